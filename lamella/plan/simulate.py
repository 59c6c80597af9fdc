"""A step played through before it runs: every action of every rank, every message on its link.

Per rank and action: FLOPs over speed, plus the dequantising of the stage's layers (once per pass of a group; where a walk turns
around, the layer at work stays), beside which the layers that do not stay in memory are read (but for those in the slots at the
turn); of those layers the longer of the two counts. Boundaries go to the next stage when a group has passed, one message after
the other on a link; between hosts all devices share the link of their two hosts. Ranks of an `experts` stage go in step, with two
all-reduces a layer forward, two back, and two for what is recomputed. At the end a stage's ranks add up their gradients.

`lamella.forecast.items` lists the same step piece by piece; this is the quick way of a search among many splits.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lamella.plan.costs import GRADIENT_BYTES, STATE_BYTES, CostTable, ModelCost, RowCost
from lamella.plan.devices import Device, Links
from lamella.plan.memory import DeviceMemory, memory_of
from lamella.plan.split import Split, Stage
from lamella.plan.work import Action, Pass, StepPlan, part_of, passes_of

IN_SLOTS = 2
"""Streamed layers that are still at hand where the walk turns around."""


@dataclass(frozen=True)
class Span:
    """One action of one rank, in seconds from the step's start."""

    rank: int
    kind: str
    group: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What a step would take.

    Attributes:
        step_s: until the last rank is done, gradients reduced.
        busy_s: per rank, computing and dequantising.
        idle: per rank, 1 - busy / step.
        read_bytes: per rank, packed bytes streamed.
        sent_bytes: by (from, to) rank; rings are counted along their neighbours.
        reduce_s: per stage, of the gradients.
        spans: in order of their start.
    """

    step_s: float
    busy_s: tuple[float, ...]
    idle: tuple[float, ...]
    read_bytes: tuple[int, ...]
    sent_bytes: dict[tuple[int, int], int]
    reduce_s: tuple[float, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class _Work:
    """One rank's part of an action: items taken, seconds it takes and seconds it computes."""

    items: tuple[int, ...]
    seconds: float
    busy: float
    read: int


def simulate(
    split: Split,
    plan: StepPlan,
    model: ModelCost,
    devices: Sequence[Device],
    links: Links,
    rows: Sequence[RowCost],
    table: CostTable | None = None,
    memory: Sequence[DeviceMemory] | None = None,
) -> Timeline:
    """Play one step.

    Args:
        rows: those that `plan` was made for.
        table: of `model`, where the caller has it.
        memory: `memory_of` the same, where the caller has it.
    """
    table = table or CostTable(model)
    memory = memory or memory_of(split, model, devices, plan, rows, table)
    return _Simulation(split, plan, table, devices, links, rows, memory).run()


@dataclass
class _Rank:
    stage: int
    next: int = 0
    free_s: float = 0.0
    busy_s: float = 0.0
    read: int = 0
    running: bool = False
    work: list[_Work] = field(default_factory=list)


class _Simulation:
    def __init__(
        self,
        split: Split,
        plan: StepPlan,
        table: CostTable,
        devices: Sequence[Device],
        links: Links,
        rows: Sequence[RowCost],
        memory: Sequence[DeviceMemory],
    ) -> None:
        self.split, self.plan, self.table, self.devices, self.links, self.rows = (
            split,
            plan,
            table,
            devices,
            links,
            rows,
        )
        self.tokens = [sum(rows[i].tokens for i in item) for item in plan.items]
        self.ranks = {r: _Rank(s) for s, stage in enumerate(split.stages) for r in stage.ranks}
        for rank, state in self.ranks.items():
            state.work = [
                self._work(rank, state.stage, each, memory[rank]) for each in passes_of(split, plan, rank, table)
            ]
        self.arrived: dict[tuple[str, int, int, int], float] = {}  # kind, stage, item, rank -> when its input is there
        self.link_free: dict[tuple[object, object], float] = {}
        self.sent: dict[tuple[int, int], int] = {}
        self.spans: list[Span] = []
        self.events: list[tuple[float, int, int]] = []  # end, rank, position among its actions

    def _work(self, rank: int, s: int, each: Pass, memory: DeviceMemory) -> _Work:
        if not each.items:
            return _Work((), 0.0, 0.0, 0)
        stage, device, table = self.split.stages[s], self.devices[rank], self.table
        rows = [self.rows[i] for m in each.items for i in self.plan.items[m]]
        flops = table.passes(rows, stage.first, stage.last)[each.kind == "B"]
        nbytes = each.dequantised(table)
        busy = part_of(stage, rank, table) * (flops / device.flops_per_s + nbytes / device.dequantise_bytes_per_s)
        seconds = busy + self._rings(stage, each)
        read, share = self._read(stage, each, memory)
        if read:
            beside = seconds * (1 if device.spills else share)  # on a GPU layers that stay lie between the others
            seconds += max(read / device.read_bytes_per_s - beside, 0.0)
        return _Work(each.items, seconds, busy, read)

    def _read(self, stage: Stage, each: Pass, memory: DeviceMemory) -> tuple[int, float]:
        """Packed bytes that a pass reads, and the share of its layers that they are of: beside others nothing is read."""
        if not memory.streamed_bytes:
            return 0, 0.0
        packed = self.table.packed
        held = stage.first + memory.layers_held
        a, b = max(held, each.first), stage.last
        if each.turns and each.kind == "F":
            a = min(a + IN_SLOTS, b)
        elif each.turns:
            b = max(b - IN_SLOTS, a)
        of_all = packed[stage.last] - packed[held]
        if b <= a or not of_all:
            return 0, 0.0
        return int(memory.streamed_bytes * (packed[b] - packed[a]) / of_all), (b - a) / (each.last - each.first)

    def _rings(self, stage: Stage, each: Pass) -> float:
        """Seconds of an expert split's all-reduces in one pass."""
        n = len(stage.ranks)
        if stage.way != "experts" or n < 2:
            return 0.0
        layers = self.table.model.layers[stage.first : stage.last]
        count, weight = self.table.model.sums_of(each.kind, 2), self.table.model.sums_of(each.kind, n)
        total = 0.0
        for per_token, alike in Counter(layer.boundary_bytes_per_token for layer in layers).items():
            for m in each.items:
                nbytes = self.tokens[m] * per_token * weight / count
                total += count * alike * self.links.ring_seconds(self.devices, stage.ranks, nbytes)
        return total

    def run(self) -> Timeline:
        for s in range(len(self.split.stages)):
            self._start(s, 0.0)
        while self.events:
            now, rank, k = heapq.heappop(self.events)
            state = self.ranks[rank]
            state.running = False
            self._send(rank, state, self.plan.actions[state.stage][k], state.work[k], now)
            for s in (state.stage - 1, state.stage, state.stage + 1):
                if 0 <= s < len(self.split.stages):
                    self._start(s, now)
        for state in self.ranks.values():
            assert state.next == len(state.work), "a rank waits for what will not come"
        return self._timeline()

    def _start(self, s: int, now: float) -> None:
        """Start what the ranks of a stage can do next."""
        stage = self.split.stages[s]
        teams = [stage.ranks] if stage.way == "experts" else [(rank,) for rank in stage.ranks]
        for team in teams:
            while self._start_team(s, team):
                pass

    def _start_team(self, s: int, team: Sequence[int]) -> bool:
        states = [self.ranks[rank] for rank in team]
        k = states[0].next
        if any(state.running for state in states) or k == len(states[0].work):
            return False
        action = self.plan.actions[s][k]
        ready = [self._ready(rank, s, action, self.ranks[rank].work[k]) for rank in team]
        if None in ready:
            return False
        start = max([state.free_s for state in states] + [t for t in ready if t is not None])
        end = start + max(state.work[k].seconds for state in states)
        for rank, state in zip(team, states, strict=True):
            state.next += 1
            work = state.work[k]
            if not work.items:
                continue
            state.free_s, state.running = end, True
            state.busy_s += work.busy
            state.read += work.read
            self.spans.append(Span(rank, action.kind, action.group, start, end))
            heapq.heappush(self.events, (end, rank, k))
        return not states[0].running

    def _ready(self, rank: int, s: int, action: Action, work: _Work) -> float | None:
        """When all that the action needs is there; None: not yet known."""
        outer = s == 0 if action.kind == "F" else s == len(self.split.stages) - 1
        if outer:
            return 0.0
        times = [self.arrived.get((action.kind, s, m, rank)) for m in work.items]
        known = [t for t in times if t is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    def _send(self, rank: int, state: _Rank, action: Action, work: _Work, now: float) -> None:
        """Boundaries (or their gradients) to whoever takes the items next."""
        s = state.stage
        to = s + 1 if action.kind == "F" else s - 1
        if not 0 <= to < len(self.split.stages):
            return
        layer = self.split.stages[max(s, to)].first
        per_token = self.table.model.layers[layer].boundary_bytes_per_token
        for m in work.items:
            if self.plan.owners[s][m][0] != rank:
                continue
            for peer in self.plan.owners[to][m]:
                nbytes = self.tokens[m] * per_token
                self.sent[rank, peer] = self.sent.get((rank, peer), 0) + nbytes
                hosts = self.devices[rank].host, self.devices[peer].host
                lane = hosts if hosts[0] != hosts[1] else (rank, peer)
                link = self.links.between(self.devices, rank, peer)
                gone = max(now, self.link_free.get(lane, 0.0)) + nbytes / link.bytes_per_s
                self.link_free[lane] = gone
                self.arrived[action.kind, to, m, peer] = gone + link.latency_s

    def _timeline(self) -> Timeline:
        ends, reduces = [], []
        for stage in self.split.stages:
            state_bytes = self.table.adapter[stage.last] - self.table.adapter[stage.first]
            gradients = state_bytes // STATE_BYTES * GRADIENT_BYTES
            reduce_s = 0.0
            if len(stage.ranks) > 1:
                reduce_s = self.links.ring_seconds(self.devices, stage.ranks, gradients)
                for a, b in zip(stage.ranks, stage.ranks[1:] + stage.ranks[:1], strict=True):
                    n = len(stage.ranks)
                    self.sent[a, b] = self.sent.get((a, b), 0) + 2 * (n - 1) * int(gradients) // n
            reduces.append(reduce_s)
            ends.append(max(self.ranks[rank].free_s for rank in stage.ranks) + reduce_s)
        step_s = max(ends)
        order = range(len(self.devices))
        busy = tuple(self.ranks[r].busy_s if r in self.ranks else 0.0 for r in order)
        idle = tuple(1 - b / step_s if step_s else 0.0 for b in busy)
        read = tuple(self.ranks[r].read if r in self.ranks else 0 for r in order)
        spans = tuple(sorted(self.spans, key=lambda x: (x.start_s, x.rank)))
        return Timeline(step_s, busy, idle, read, self.sent, tuple(reduces), spans)
