"""A step as a list of single pieces of work, each with its device, bytes, FLOPs and what it waits for. The engine records the
same pieces under the same names (`lamella.trace`), so forecast and measurement are compared line by line.

The list is of a step in the middle of a run: layers that stay are there already, and the slots hold what the step before left
in them. Of the engine's order (`engine/weights.py`, `engine/step.py`) it keeps what decides the time:

- a streamed layer is read ahead beside the layer at work, into the one of two slots that does not hold it; where a group begins
  anew at the far end, its first two layers are read when their turn comes;
- the layer at which the walk turns around is neither read nor dequantised again, across steps too;
- on an accelerator a copy waits for the dequantising that last read its slot, a disk read for the copy that last left its host
  buffer, and neither for the arithmetic; boundaries beyond the room for them go to the host and come back ahead of their turn;
- ranks of an expert split meet in every layer: twice forward, twice for gradients, and twice again where it is recomputed;
- a boundary is sent when its group has passed the stage, not before the receiver has come to the action before the one that
  takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

from lamella.forecast.shape import ModelShape, Site
from lamella.forecast.times import StepTimes
from lamella.plan.costs import GRADIENT_BYTES, RowCost
from lamella.plan.split import Split, Stage
from lamella.plan.work import StepPlan

Kind = Literal[
    "load",
    "copy",
    "dequantise",
    "embed",
    "forward",
    "backward",
    "head",
    "spill",
    "fetch",
    "send",
    "reduce",
    "meet",
    "optimizer",
]

SUMS_FORWARD, SUMS_BACK = 2, 2
"""All-reduces of an expert split in a layer: after attention and after the experts, and of the gradients at their inputs."""
NORM_SHARE = 1 / 8
"""Of the optimizer's time: the norm reads a gradient (4 bytes a parameter), the update gradient, value and moments, and writes
all but the gradient (28)."""
AHEAD = 2
"""Actions whose transfers a rank is ready for (`engine/step.py`)."""
FETCH_AHEAD = 2
"""Spilled boundaries (of one micro-batch and layer) that come back ahead of their turn."""
DIVIDED = ("linear", "experts", "attention", "lora", "dequantise", "head")
"""Causes of a layer's time that an expert split divides; norms and fixed costs of calls each rank has whole."""


class Item(NamedTuple):
    """One piece of work.

    Attributes:
        kind: what is done; name: as the engine's span is named (`forward 3`, `layer 3`, `head`, `update`).
        rank: whose work it is (the receiver's rank of a `send` is `peer`).
        lane: what of the rank it occupies, one item at a time, in the order of the list: "compute", "read" (disk), "copy"
            and "copy what was read" (host to device), "spill" and "gradients" (device to host), "fetch", "to 2" (sending to rank 2).
        layer, group: None where it has none.
        nbytes, flops: what it moves and computes.
        seconds: on its own lane, undisturbed; of a transfer what comes before its bytes, which take what the links allow.
        after: positions in the list of what has to be done before.
        links: names of the links its bytes pass, the slowest share counts; (): none.
        latency_s: from when its lane is free again until what waits for it may begin.
        causes: of `seconds`, by cause (see `StepTimes`); () where the kind says it all.
    """

    kind: Kind
    name: str
    rank: int
    lane: str
    seconds: float
    layer: int | None = None
    group: int | None = None
    nbytes: int = 0
    flops: float = 0.0
    peer: int | None = None
    after: tuple[int, ...] = ()
    links: tuple[str, ...] = ()
    latency_s: float = 0.0
    causes: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Route:
    """What bytes pass on their way: names of links, and seconds that the first byte takes."""

    links: tuple[str, ...] = ()
    latency_s: float = 0.0


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds and how fast it is.

    Attributes:
        times: seconds of its work, of whole layers.
        resident: layers whose packed bytes stay where they are computed with.
        pinned: on an accelerator, those in host memory; all others come from disk.
        accelerator: computes beside its host; its slots are on the device.
        recompute: layers run again in the backward walk; else their activations are kept.
        read: disk to host; copy: host to device; back: device to host.
        boundary_bytes: room for boundary inputs on the device; None: all stay.
        layer_bytes: packed bytes that are read of each layer, where it is not all of them (a part of an expert split).
        part: of each cause in `DIVIDED`, what this rank does of it; 1 where it is not named.
    """

    times: StepTimes
    resident: frozenset[int]
    pinned: frozenset[int] = frozenset()
    accelerator: bool = False
    recompute: bool = True
    read: Route = Route()
    copy: Route = Route()
    back: Route = Route()
    boundary_bytes: int | None = None
    layer_bytes: Mapping[int, int] | None = None
    part: Mapping[str, float] = field(default_factory=dict)


def part_of_share(share: float) -> dict[str, float]:
    """`RankPlan.part` of a rank that has this share of an expert split."""
    return dict.fromkeys(DIVIDED, share)


def step_items(
    split: Split,
    plan: StepPlan,
    shape: ModelShape,
    rows: Sequence[RowCost],
    ranks: Sequence[RankPlan],
    routes: Mapping[tuple[int, int], Route],
    sites: Sequence[Site],
    *,
    dtype_bytes: int = 2,
) -> list[Item]:
    """All pieces of one step, in an order in which every rank's lanes take them.

    Args:
        split, plan: `plan` was made of `rows` for `split`.
        ranks: by rank, as many as the split has.
        routes: from rank to rank, for those that the split makes neighbours (both ways; missing: no time at all).
        sites: what is trained.
        dtype_bytes: of hidden states.
    """
    builder = _Builder(split, plan, shape, rows, ranks, routes, sites, dtype_bytes)
    builder.walk()
    builder.finish()
    return builder.items


class _Builder:
    def __init__(
        self,
        split: Split,
        plan: StepPlan,
        shape: ModelShape,
        rows: Sequence[RowCost],
        ranks: Sequence[RankPlan],
        routes: Mapping[tuple[int, int], Route],
        sites: Sequence[Site],
        dtype_bytes: int,
    ) -> None:
        self.split, self.plan, self.shape = split, plan, shape
        self.ranks, self.routes, self.dtype_bytes = ranks, routes, dtype_bytes
        self.items: list[Item] = []
        self.first_trained = min((site.layer for site in sites), default=len(shape.layers))
        self.parameters = [0] * len(shape.layers)
        for site in sites:
            self.parameters[site.layer] += site.parameters
        self.lengths = [tuple(rows[i].tokens for i in item) for item in plan.items]
        self.tokens = [sum(lengths) for lengths in self.lengths]
        self.labels = [sum(rows[i].labels for i in item) for item in plan.items]
        self.states = {r: _RankState(self, r, stage, ranks[r]) for stage in split.stages for r in stage.ranks}
        # (kind, stage it goes to, micro-batch) -> last piece of who sends it
        self.sent: dict[tuple[str, int, int], int] = {}
        self.ends: dict[int, list[int]] = {r: [] for r in self.states}  # by rank, the pieces that end its actions

    def add(self, item: Item) -> int:
        self.items.append(item)
        return len(self.items) - 1

    # ---- the walk -------------------------------------------------------------------------------

    def walk(self) -> None:
        """Actions of all stages, each when all that it needs is in the list."""
        for state in self.states.values():
            state.warm_up(self.plan)
        at = [0] * len(self.split.stages)
        while any(k < len(self.plan.actions[s]) for s, k in enumerate(at)):
            before = list(at)
            for s, stage in enumerate(self.split.stages):
                while at[s] < len(self.plan.actions[s]) and self._is_ready(s, at[s]):
                    self._act(s, stage, at[s])
                    at[s] += 1
            assert at != before, "a stage waits for what will not come"

    def _source(self, s: int, kind: str) -> int | None:
        """The stage that a stage's action gets its input from."""
        source = s - 1 if kind == "F" else s + 1
        return source if 0 <= source < len(self.split.stages) else None

    def _works(self, s: int, kind: str) -> bool:
        """Whether an action does anything in this stage: gradients go no further than the first trained layer."""
        return kind == "F" or self.first_trained < self.split.stages[s].last

    def _is_ready(self, s: int, k: int) -> bool:
        action = self.plan.actions[s][k]
        if self._source(s, action.kind) is None or not self._works(s, action.kind):
            return True
        return all((action.kind, s, m) in self.sent for m in self.plan.groups[action.group])

    def _act(self, s: int, stage: Stage, k: int) -> None:
        action = self.plan.actions[s][k]
        if not self._works(s, action.kind):
            self._note_ends(stage)
            return
        group = self.plan.groups[action.group]
        mine = {r: tuple(m for m in group if r in self.plan.owners[s][m]) for r in stage.ranks}
        source = self._source(s, action.kind)
        if source is not None:
            for m in group:
                for rank in self.plan.owners[s][m]:
                    self._send(s, source, action.kind, m, rank, self.ends[rank][k - AHEAD] if k >= AHEAD else -1)
        teams = [stage.ranks] if stage.way == "experts" else [(rank,) for rank in stage.ranks]
        for team in teams:
            if mine[team[0]]:
                self._pass(team, stage, action.kind, action.group, mine[team[0]])
        to = s + 1 if action.kind == "F" else s - 1
        if 0 <= to < len(self.split.stages):
            for m in group:
                self.sent[action.kind, to, m] = self.states[self.plan.owners[s][m][0]].last
        self._note_ends(stage)

    def _note_ends(self, stage: Stage) -> None:
        for rank in stage.ranks:
            self.ends[rank].append(self.states[rank].last)

    def _send(self, s: int, source: int, kind: str, m: int, rank: int, posted: int) -> None:
        """One micro-batch's boundary, or its gradient, on its way to `rank`, which is ready for it after `posted`."""
        sender = self.plan.owners[source][m][0]
        route = self.routes.get((sender, rank), Route())
        nbytes = self.tokens[m] * self.shape.hidden * self.dtype_bytes
        number = self.add(Item(
            "send", f"send to rank {rank}", sender, f"to {rank}", 0.0, nbytes=nbytes, peer=rank,
            after=tuple(n for n in (self.sent[kind, s, m], posted) if n >= 0), links=route.links, latency_s=route.latency_s,
        ))  # fmt: skip
        self.states[rank].pending.append(number)
        self.states[sender].sends.append(number)

    def _pass(self, team: Sequence[int], stage: Stage, kind: str, group: int, mine: Sequence[int]) -> None:
        """A group through a stage's layers on one rank, or on all of an expert split."""
        states = [self.states[rank] for rank in team]
        last = stage.last == len(self.shape.layers)
        if kind == "F":
            for state in states:
                state.embed(group, mine)
            for i in range(stage.first, stage.last):
                for state in states:
                    state.bind(i)
                    state.forward(i, group, mine)
                self._sum(team, mine, self._sums(i, SUMS_FORWARD), i, group)
            if last:
                for state in states:
                    state.head(group, mine)
                self._sum(team, mine, 1, None, group)
            return
        for i in reversed(range(max(stage.first, self.first_trained), stage.last)):
            for state in states:
                state.bind(i)
                state.backward(i, group, mine)
            sums = self._sums(i, SUMS_BACK) - (i == self.first_trained)
            if states[0].own.recompute:
                sums += self._sums(i, SUMS_FORWARD)
            self._sum(team, mine, sums, i, group)

    def _sums(self, layer: int, each: int) -> int:
        """All-reduces of a layer in one pass: half of them where it has no attention. (At the first trained layer's input no
        gradient is needed.)"""
        return each if self.shape.layers[layer].core is not None else each // 2

    def _sum(self, team: Sequence[int], mine: Sequence[int], count: int, layer: int | None, group: int) -> None:
        """`count` all-reduces of hidden states for each micro-batch. With three ranks or more they travel in fp32."""
        if len(team) > 1:
            size = self.dtype_bytes if len(team) == 2 else max(self.dtype_bytes, 4)
            nbytes = count * sum(self.tokens[m] for m in mine) * self.shape.hidden * size
            name = f"sum of ranks {', '.join(map(str, team))}"
            self._ring(team, name, nbytes, count * len(mine), layer, group)

    def _ring(
        self, team: Sequence[int], name: str, nbytes: float, times: int, layer: int | None = None, group: int | None = None
    ) -> None:  # fmt: skip
        """A ring all-reduce: each rank gives 2 (N - 1) / N of the bytes to the next one, in as many turns."""
        turns = 2 * (len(team) - 1)
        done = tuple(self.states[rank].last for rank in team if self.states[rank].last >= 0)
        numbers = []
        for k, rank in enumerate(team):
            to = team[(k + 1) % len(team)]
            route = self.routes.get((rank, to), Route())
            numbers.append(self.add(Item(
                "reduce", name, rank, "compute", turns * times * route.latency_s, layer, group,
                nbytes=int(nbytes * turns / len(team)), peer=to, after=done, links=route.links,
            )))  # fmt: skip
        for rank, number in zip(team, numbers, strict=True):
            self.states[rank].last = number
            self.states[rank].pending += [n for n in numbers if n != number]

    # ---- the end of the step --------------------------------------------------------------------

    def finish(self) -> None:
        """Meeting, sums of gradients, norm and update."""
        everybody = sorted(self.states)
        if len(everybody) > 1:
            self._meet(everybody)
        for stage in self.split.stages:
            parameters = sum(self.parameters[stage.first : stage.last])
            if len(stage.ranks) > 1 and parameters:
                self._ring(stage.ranks, "sum of gradients", parameters * GRADIENT_BYTES, 1)
        for name, share in (("gradient norm", NORM_SHARE), ("update", 1 - NORM_SHARE)):
            for rank in everybody:
                state = self.states[rank]
                parameters = sum(self.parameters[state.stage.first : state.stage.last])
                state.compute("optimizer", name, share * state.own.times.update(parameters) if parameters else 0.0)
            if len(everybody) > 1 and name == "gradient norm":
                self._meet(everybody)

    def _meet(self, everybody: Sequence[int]) -> None:
        """A few numbers summed over all ranks."""
        done = tuple(n for r in everybody for n in (self.states[r].last, *self.states[r].pending) if n >= 0)
        done += tuple(n for r in everybody for n in self.states[r].sends)
        latency = max((route.latency_s for route in self.routes.values()), default=0.0)
        for rank in everybody:
            state = self.states[rank]
            state.pending, state.sends = [], []
            state.last = self.add(
                Item("meet", "meeting", rank, "compute", 2 * (len(everybody) - 1) * latency, after=done)
            )


class _RankState:
    """What one rank has at hand while its pieces are listed.

    Attributes:
        last: its last piece in the compute lane; -1: none yet.
        pending: what its next one has to wait for besides.
        sends: sends since the last meeting.
    """

    def __init__(self, builder: _Builder, rank: int, stage: Stage, own: RankPlan) -> None:
        self.builder, self.rank, self.stage, self.own = builder, rank, stage, own
        self.last, self.pending, self.sends = -1, list[int](), list[int]()
        self.slots: HostSlots | DeviceSlots = (DeviceSlots if own.accelerator else HostSlots)(self)
        self.boundaries = Boundaries(self) if own.accelerator else None
        self.hung = set[int]()  # layers whose adapter is there in the compute dtype
        self._times: dict[tuple[str, int, tuple[int, ...]], dict[str, float]] = {}
        self.quiet = False

    def add(self, item: Item) -> int:
        return -1 if self.quiet else self.builder.add(item)

    def warm_up(self, plan: StepPlan) -> None:
        """Bring the slots to the state in which steps leave them."""
        self.quiet = True
        s = self.builder.split.stages.index(self.stage)
        for _ in range(2):
            for action in plan.actions[s]:
                if not any(self.rank in plan.owners[s][m] for m in plan.groups[action.group]):
                    continue
                layers = range(self.stage.first, self.stage.last)
                back = reversed(range(max(self.stage.first, self.builder.first_trained), self.stage.last))
                for i in layers if action.kind == "F" else back:
                    self.slots.bind(i)
        self.slots.settle()
        self.quiet, self.last, self.pending = False, -1, []

    def compute(
        self, kind: Kind, name: str, seconds: float | Mapping[str, float], layer: int | None = None,
        group: int | None = None, after: Sequence[int] = (),
    ) -> int:  # fmt: skip
        """A piece in the compute lane."""
        if self.quiet:
            return -1
        causes: tuple[tuple[str, float], ...] = ()
        if not isinstance(seconds, float | int):
            causes = tuple(seconds.items())
            seconds = sum(seconds.values())
        needs: tuple[int, ...] = ()
        if self.pending or after:
            needs = tuple(sorted({n for n in (*self.pending, *after) if n >= 0}))
            self.pending.clear()
        number = self.add(Item(kind, name, self.rank, "compute", seconds, layer, group, after=needs, causes=causes))
        self.last = number
        return number

    def bind(self, layer: int) -> None:
        self.slots.bind(layer)

    def part(self, cause: str) -> float:
        return self.own.part.get(cause, 1.0)

    def dequantise(self, layer: int, after: Sequence[int]) -> int:
        seconds = self.own.times.dequantise(layer) * self.part("dequantise")
        return self.compute("dequantise", f"layer {layer}", seconds, layer, after=after)

    def layer_bytes(self, layer: int) -> int:
        if self.own.layer_bytes is not None and layer in self.own.layer_bytes:
            return self.own.layer_bytes[layer]
        return self.builder.shape.layers[layer].store_bytes

    def embed(self, group: int, mine: Sequence[int]) -> None:
        seconds = sum(self.own.times.prologue(self.builder.tokens[m]) for m in mine)
        arriving, self.pending = self.pending, []
        self.compute("embed", "embed", seconds, group=group)
        self.pending = arriving

    def forward(self, layer: int, group: int, mine: Sequence[int]) -> None:
        before = self.last
        self.compute("forward", f"forward {layer}", self._layer("forward", layer, mine), layer, group)
        if self.own.recompute and layer < self.stage.last - 1:
            self.hung.discard(layer)
        if self.boundaries is not None and layer >= self.builder.first_trained and self.own.recompute:
            self.boundaries.put(layer, group, mine, before)

    def backward(self, layer: int, group: int, mine: Sequence[int]) -> None:
        after = () if self.boundaries is None else self.boundaries.get(layer, group, mine)
        self.compute("backward", f"backward {layer}", self._layer("backward", layer, mine), layer, group, after)
        if self.own.recompute:
            self.hung.discard(layer)
        parameters = self.builder.parameters[layer]
        if self.own.accelerator and parameters:
            back = self.own.back
            self.sends.append(self.add(Item(
                "spill", f"gradients {layer}", self.rank, "gradients", back.latency_s, layer, group,
                nbytes=parameters * GRADIENT_BYTES, after=(self.last,), links=back.links,
            )))  # fmt: skip
        if self.boundaries is not None:
            self.boundaries.done[layer, group] = self.last

    def head(self, group: int, mine: Sequence[int]) -> None:
        part = self.part("head")
        seconds = sum(self.own.times.head(round(part * self.builder.labels[m])) for m in mine)
        self.compute("head", "head", seconds, group=group)

    def _layer(self, kind: Literal["forward", "backward"], layer: int, mine: Sequence[int]) -> dict[str, float]:
        """Seconds by cause of one layer and pass on these micro-batches."""
        total: dict[str, float] = {}
        for m in mine:
            key = (kind, layer, self.builder.lengths[m])
            if key not in self._times:
                times = self.own.times
                found = (times.forward(layer, key[2]) if kind == "forward"
                         else times.backward(layer, key[2], self.own.recompute))  # fmt: skip
                self._times[key] = {cause: seconds * self.part(cause) for cause, seconds in found.items()}
            for cause, seconds in self._times[key].items():
                total[cause] = total.get(cause, 0.0) + seconds
        hang_s = self.own.times.hang(layer) * self.part("lora") if layer not in self.hung else 0.0
        self.hung.add(layer)
        return {**total, "hang": hang_s} if hang_s else total


class HostSlots:
    """Two slots in memory that the walk itself reads (`engine/weights.py`): the next layer is asked for when the one at work
    has been dequantised."""

    def __init__(self, state: _RankState) -> None:
        self.state, self.own = state, state.own
        self.bound: int | None = None
        self.slot_of: dict[int, int] = {}
        self.read: dict[int, int] = {}

    def settle(self) -> None:
        """What has been read is there."""
        self.read.clear()

    def bind(self, i: int) -> None:
        if self.bound == i:
            return
        state = self.state
        self._request(i, self.bound, (state.last, *state.pending))
        number = state.dequantise(i, (self.read.get(i, -1),))
        step = 1 if self.bound is None or self.bound < i else -1
        self.bound = i
        if state.stage.first <= i + step < state.stage.last:
            self._request(i + step, i if i in self.slot_of else None, (number,))

    def _request(self, i: int, keep: int | None, after: Iterable[int]) -> None:
        if i in self.slot_of or i in self.own.resident:
            return
        slot = 1 - self.slot_of[keep] if keep in self.slot_of else 0
        for other in [k for k, s in self.slot_of.items() if s == slot]:
            del self.slot_of[other]
        self.slot_of[i] = slot
        self.read[i] = _load(self.state, i, after)


class DeviceSlots:
    """Two slots on an accelerator, filled by a copy stream (`engine/device.py`); the host runs ahead of the arithmetic."""

    def __init__(self, state: _RankState) -> None:
        self.state, self.own = state, state.own
        self.bound: int | None = None
        self.holds: list[int | None] = [None, None]
        self.used, self.arrived = [-1, -1], [-1, -1]
        self.left = [-1, -1]  # copies that last left the two host buffers
        self.turn = 0
        self.all_here = self.own.resident.issuperset(range(state.stage.first, state.stage.last))

    def settle(self) -> None:
        self.used, self.arrived, self.left = [-1, -1], [-1, -1], [-1, -1]

    def bind(self, i: int) -> None:
        if self.bound == i:
            return
        here = i not in self.own.resident
        after: tuple[int, ...] = ()
        if here:
            self._fetch(i, (self.bound,))
            after = (self.arrived[self.holds.index(i)],)
        number = self.state.dequantise(i, after)
        if here:
            self.used[self.holds.index(i)] = number
        step = 1 if self.bound is None or self.bound < i else -1
        self.bound = i
        end = self.state.stage.last if step > 0 else self.state.stage.first - 1
        if self.all_here:
            return
        streamed = (n for n in range(i + step, end, step) if n not in self.own.resident)
        coming = list(islice(streamed, 1 if here else 2))
        for n in coming:
            self._fetch(n, (i, *coming))

    def _fetch(self, i: int, keep: Iterable[int | None]) -> None:
        if i in self.holds:
            return
        kept = set(keep)
        slot = next(s for s in range(2) if self.holds[s] is None or self.holds[s] not in kept)
        self.holds[slot] = i
        after = [self.used[slot]]
        turn = self.turn % 2
        if i not in self.own.pinned:
            after.append(_load(self.state, i, (self.left[turn],)))
        own = self.own.copy
        lane = "copy" if i in self.own.pinned else "copy what was read"  # whichever is there first goes first
        number = self.state.add(Item(
            "copy", f"layer {i}", self.state.rank, lane, own.latency_s, i, nbytes=self.state.layer_bytes(i),
            after=tuple(n for n in after if n >= 0), links=own.links,
        ))  # fmt: skip
        self.arrived[slot] = number
        if i not in self.own.pinned:
            self.left[turn] = number
            self.turn += 1


def _load(state: _RankState, i: int, after: Iterable[int]) -> int:
    """A layer read from disk."""
    own = state.own.read
    return state.add(Item(
        "load", f"layer {i}", state.rank, "read", own.latency_s, i, nbytes=state.layer_bytes(i),
        after=tuple(n for n in after if n >= 0), links=own.links,
    ))  # fmt: skip


class Boundaries:
    """Boundary inputs on an accelerator: the oldest go to the host when there is no room, and come back ahead of their turn."""

    def __init__(self, state: _RankState) -> None:
        self.state, self.room = state, state.own.boundary_bytes
        self.here: dict[tuple[int, int, int], int] = {}  # layer, group, micro-batch -> bytes
        self.here_bytes = 0
        # layer, group -> bytes on the host, and the piece that took them there
        self.gone: dict[tuple[int, int], tuple[int, int]] = {}
        self.done: dict[tuple[int, int], int] = {}  # pieces of the backward passes

    def put(self, layer: int, group: int, mine: Sequence[int], before: int) -> None:
        """Keep the inputs of a layer's forward pass; `before`: the piece before it."""
        builder, own = self.state.builder, self.state.own
        for m in mine:
            nbytes = builder.tokens[m] * builder.shape.hidden * builder.dtype_bytes
            self.here[layer, group, m] = nbytes
            self.here_bytes += nbytes
        if self.room is None:
            return
        out: dict[tuple[int, int], int] = {}
        while self.here_bytes > self.room and self.here:
            key = next(iter(self.here))
            nbytes = self.here.pop(key)
            self.here_bytes -= nbytes
            out[key[:2]] = out.get(key[:2], 0) + nbytes
        for key2, nbytes in out.items():
            number = self.state.add(Item(
                "spill", f"spill {key2[0]}", self.state.rank, "spill", own.back.latency_s, *key2, nbytes=nbytes,
                after=(before,) if before >= 0 else (), links=own.back.links,
            ))  # fmt: skip
            self.gone[key2] = (self.gone.get(key2, (0, -1))[0] + nbytes, number)
            self.state.pending.append(number)

    def get(self, layer: int, group: int, mine: Sequence[int]) -> tuple[int, ...]:
        """Take a layer's boundaries out; what its backward pass waits for."""
        for m in mine:
            self.here_bytes -= self.here.pop((layer, group, m), 0)
        if (layer, group) not in self.gone:
            return ()
        nbytes, spilled = self.gone.pop((layer, group))
        own = self.state.own
        started = self.done.get((layer + max(1, FETCH_AHEAD // len(mine)) + 1, group), -1)
        return (self.state.add(Item(
            "fetch", f"fetch {layer}", self.state.rank, "fetch", own.copy.latency_s, layer, group, nbytes=nbytes,
            after=tuple(n for n in (spilled, started) if n >= 0), links=own.copy.links,
        )),)  # fmt: skip
