"""Ways of running a step, reckoned through: a split, what every device holds under it, and how the step goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from lamella.config import ComputeConfig
from lamella.errors import UserError
from lamella.forecast import process
from lamella.forecast.calibration import Identity
from lamella.forecast.costs import cost_of
from lamella.forecast.events import Played, play
from lamella.forecast.hosts import hosts_of
from lamella.forecast.items import RankPlan, part_of_share, step_items
from lamella.forecast.outcome import HostForecast, RankForecast
from lamella.forecast.peak import CONTEXT_BYTES, GROUPS, MARGIN_SHARE, PROGRAM, MemoryPlan
from lamella.forecast.places import RankPlace, places_of
from lamella.forecast.question import Question
from lamella.forecast.roads import roads_of, stream_rate
from lamella.forecast.times import StepTimes, times_of
from lamella.forecast.trainable import sites_of
from lamella.forecast.use import PAD_TOKENS
from lamella.hardware.machine import DeviceFacts
from lamella.plan.costs import CostTable, ModelCost, RowCost
from lamella.plan.devices import Device
from lamella.plan.schedule import held
from lamella.plan.search import Choice, NothingFits, find_split
from lamella.plan.split import Split, Stage
from lamella.plan.work import StepPlan, plan_step

Dtype = Literal["bf16", "fp16", "fp32"]
DTYPE_BYTES: dict[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
FILL_TRIES = 4
COMMAND_BYTES = 20 << 20
"""Of `lamella train` beyond what it imports: tokenizer, rows, records (median over the fitting runs of `bench.plan`)."""
GROUP_BYTES = 36 << 20
"""Of a rank that has joined a group of several: gloo, its store, the first sum and copy (measured, two ranks)."""
NEAR = 1.5
"""Times as long by the quick estimate: splits of other kinds up to that are played through too."""
FP32_SHARE = 1 / 8
"""Of a card's fp16 tensor rate, what it multiplies in fp32 (T4: 65 and 8.1 TFLOP/s; V100: 125 and 15.7). Cards without bf16 train
in fp32, as fp16 needs loss scaling."""


Held = tuple[process.Choice, int | None]
"""What a rank holds, and the budget that makes it so."""


@dataclass(frozen=True)
class Variant:
    """One way of running a step, reckoned through.

    Attributes:
        choice: how the split was found; None with one rank, or when it was given.
        held: per rank, what it holds; budgets: `memory.budget` that makes the engine hold just that, None where none is needed.
    """

    recompute: str
    split: Split
    plan: StepPlan
    held: tuple[process.Choice, ...]
    budgets: tuple[int | None, ...]
    ranks: tuple[RankForecast, ...]
    hosts: tuple[HostForecast, ...]
    played: Played
    flops: float
    choice: Choice | None = None

    @property
    def fits(self) -> bool:
        return all(rank.fits for rank in self.ranks) and not any(host.short() for host in self.hosts)

    @property
    def fits_memory(self) -> bool:
        """Disks aside."""
        return all(rank.fits for rank in self.ranks) and not any(host.short_of_memory() for host in self.hosts)

    @property
    def step_s(self) -> float:
        return self.played.step_s


class Remembered:
    """`StepTimes` asked once for each kind of layer and micro-batch."""

    def __init__(self, times: StepTimes, kinds: dict[int, int]) -> None:
        self.own, self.kinds = times, kinds
        self._known: dict[Any, dict[str, float]] = {}
        self._once: dict[Any, float] = {}

    def forward(self, layer: int, lengths: Sequence[int]) -> dict[str, float]:
        key = "forward", self.kinds[layer], tuple(lengths)
        if key not in self._known:
            self._known[key] = self.own.forward(layer, lengths)
        return self._known[key]

    def backward(self, layer: int, lengths: Sequence[int], recompute: bool) -> dict[str, float]:
        key = "backward", self.kinds[layer], tuple(lengths), recompute
        if key not in self._known:
            self._known[key] = self.own.backward(layer, lengths, recompute)
        return self._known[key]

    def dequantise(self, layer: int) -> float:
        key = "dequantise", self.kinds[layer]
        if key not in self._once:
            self._once[key] = self.own.dequantise(layer)
        return self._once[key]

    def hang(self, layer: int) -> float:
        key = "hang", self.kinds[layer]
        if key not in self._once:
            self._once[key] = self.own.hang(layer)
        return self._once[key]

    def prologue(self, tokens: int) -> float:
        return self.own.prologue(tokens)

    def head(self, label_tokens: int) -> float:
        return self.own.head(label_tokens)

    def update(self, parameters: int) -> float:
        return self.own.update(parameters)


class Forecaster:
    """Answers one question; parts that do not change between ways of running are computed once."""

    def __init__(self, question: Question, split: Split | None = None) -> None:
        """`split`: take this one, look for no other."""
        q = self.q = question
        self.given = split
        self.sites = sites_of(q.shape, q.lora)
        self.places = places_of(q.machine, q.compute, q.memory, q.devices)
        self.dtypes = [_dtype(q.compute, place.facts) for place in self.places]
        self.size = max(DTYPE_BYTES[dtype] for dtype in self.dtypes)
        self.roads = roads_of(q.machine, self.places)
        self.rows = q.rows.sample_step(q.train)
        self.largest = q.rows.largest_step(q.train)
        self.tokens = sum(row.tokens for row in self.rows)
        self._own = self._own_times()
        self._shown: dict[tuple[int, bool], StepTimes] = {}
        self.costs: dict[bool, tuple[ModelCost, CostTable]] = {}
        self._plans: dict[tuple[Split, int | None], StepPlan] = {}
        self._held: list[tuple[Any, Held]] = []
        self._devices: dict[tuple[int, bool], Device] = {}

    def _own_times(self) -> list[StepTimes]:
        """Of each rank, as its rates say; one for all that are alike."""
        found: list[tuple[DeviceFacts, StepTimes]] = []
        times = []
        for place, dtype in zip(self.places, self.dtypes, strict=True):
            mine = next((t for facts, t in found if facts == place.facts), None)
            if mine is None:
                mine = times_of(self.q.shape, self.sites, in_dtype(place.facts, dtype), dtype)
                found.append((place.facts, mine))
            times.append(mine)
        return times

    def times(self, k: int, kept: bool) -> StepTimes:
        """Of a rank that keeps activations or recomputes, as past runs have shown them."""
        own = self._own[k]
        key = id(own), kept
        if key not in self._shown:
            kinds = {i: n for n, layers in enumerate(self._alike) for i in layers}
            past = self.q.calibration
            seen = own if past is None else past.apply(own, identity_of(self.places[k], self.dtypes[k], kept))
            self._shown[key] = Remembered(seen, kinds)
        return self._shown[key]

    def cost(self, recompute: bool) -> tuple[ModelCost, CostTable]:
        if recompute not in self.costs:
            kind = "cuda" if any(place.facts.kind == "cuda" for place in self.places) else "cpu"
            model = cost_of(self.q.shape, self.sites, self.size, recompute, kind)
            self.costs[recompute] = model, CostTable(model)
        return self.costs[recompute]

    # ---- ways -----------------------------------------------------------------------------------

    def variants(self) -> list[Variant]:
        """With layers recomputed and, as far as it is allowed and has room, activations kept, under one split; and under the
        best splits of other kinds. The fastest that fits first.

        Raises:
            UserError: `[split]` contradicts itself, the model or the devices.
        """
        asked = self.q.memory.recompute
        split, plan, choice = self._split(asked != "never")
        if asked != "auto":
            return [self.reckon(split, plan, asked, choice)]
        found = [self.reckon(split, plan, "always", choice)]
        if self.keeps(split, choice):
            found.append(self.reckon(split, plan, "auto", choice))
        if choice is not None:
            for other in choice.rejected:
                near = other.step_s is not None and other.step_s < NEAR * choice.timeline.step_s
                if near and {r for stage in other.split.stages for r in stage.ranks} == set(range(len(self.places))):
                    found.append(self.reckon(other.split, self._plan_of(other.split, self.rows), "auto", choice))
        return sorted(found, key=lambda v: (not v.fits_memory, v.step_s if v.fits_memory else _over(v)))

    def given_way(self, split: Split, recompute: str) -> Variant:
        """This one alone."""
        return self.reckon(split, self._plan_of(split, self.rows), recompute)

    def keeps(self, split: Split, choice: Choice | None = None) -> bool:
        """Whether some rank has room to keep activations."""
        largest = self._largest(split, None if choice is None else choice.in_flight)
        return any(self._hold(k, split, largest, "auto")[0].kept for k in range(len(self.places)))

    def kept_need(self, split: Split, choice: Choice | None = None) -> int:
        """Bytes at the peak of the rank where kept activations would take most."""
        largest = self._largest(split, None if choice is None else choice.in_flight)
        return max(self._hold(k, split, largest, "never")[0].plan.peak_bytes for k in range(len(self.places)))

    def _split(self, recompute: bool) -> tuple[Split, StepPlan, Choice | None]:
        q = self.q
        model, table = self.cost(recompute)
        devices = [self._device(k, recompute) for k in range(len(self.places))]
        micro = q.train.micro_batch_tokens
        speeds = [device.flops_per_s for device in devices]
        if self.given is not None or len(self.places) == 1:
            split = self.given or Split((Stage(0, len(q.shape.layers), (0,), (1.0,)),))
            plan = plan_step(
                split, model, speeds, self.rows, micro, devices=devices, links=self.roads.links, table=table
            )
            return split, plan, None
        try:
            choice = find_split(model, devices, self.roads.links, self.rows, q.split, micro)
        except NothingFits as error:  # reckon the nearest one through: it says best what is missing
            return error.split, error.plan, None
        return choice.split, choice.plan, choice

    def _device(self, k: int, recompute: bool) -> Device:
        """A rank as the search of a split sees it: what it reaches in all, streaming and links apart."""
        if (k, recompute) not in self._devices:
            self._devices[k, recompute] = self._seen(k, recompute)
        return self._devices[k, recompute]

    def _seen(self, k: int, recompute: bool) -> Device:
        place, times = self.places[k], self.times(k, not recompute)
        _, table = self.cost(recompute)
        lengths = _micro_batch([row.tokens for row in self.rows], self.q.train.micro_batch_tokens)
        seconds = sum(
            count * (sum(times.forward(i, lengths).values()) + sum(times.backward(i, lengths, recompute).values()))
            for i, count in self._kinds
        )
        rows = [RowCost(n, 0) for n in lengths]
        flops = table.flops(rows)
        write = sum(count * times.dequantise(i) for i, count in self._kinds)
        dequantised = sum(layer.dequantised_bytes for layer in table.model.layers)
        store = sum(layer.store_bytes for layer in self.q.shape.layers)
        room = sum(p.memory_bytes for p in self.places if p.facts.kind == "cuda" and p.host == place.host)
        beyond = max(store - room, 0)
        pinned = self.q.machine.hosts[place.host].limit_bytes * process.HOST_SHARE
        in_host = 1.0 if beyond <= pinned else pinned / beyond
        here = sum(other.host == place.host for other in self.places)
        return Device(
            place.name, self.q.machine.hosts[place.host].name, flops / seconds if seconds else 1.0,
            dequantised / write if write > 0 else 1e18, stream_rate(self.q.machine, place, in_host, here),
            place.memory_bytes, spills=place.facts.kind == "cuda",
            fixed_bytes=CONTEXT_BYTES if place.facts.kind == "cuda" else 0,
        )  # fmt: skip

    @cached_property
    def _sizes(self) -> int:
        """Different sizes of micro-batches on a CPU, where they are filled up."""
        return self.q.rows.micro_batch_sizes(self.q.train, PAD_TOKENS)

    @cached_property
    def _alike(self) -> list[list[int]]:
        """Layers by kind: shape, LoRA, and whether gradients pass (they end at the first trained layer)."""
        sites: dict[int, list[tuple[str, int]]] = {}
        for site in self.sites:
            sites.setdefault(site.layer, []).append((site.matrix.name, site.rank))
        first = min(sites, default=len(self.q.shape.layers))
        kinds: dict[Any, list[int]] = {}
        seen: dict[int, int] = {}  # many layers are one object; hashing a large one takes long
        for i, layer in enumerate(self.q.shape.layers):
            shape = seen.setdefault(id(layer), hash(layer))
            side = (i > first) - (i < first)
            kinds.setdefault((shape, tuple(sites.get(i, ())), side), []).append(i)
        return list(kinds.values())

    @cached_property
    def _kinds(self) -> list[tuple[int, int]]:
        """One layer of each kind, and how many are like it."""
        return [(layers[-1], len(layers)) for layers in self._alike]

    # ---- one way, reckoned through -----------------------------------------------------------------

    def reckon(self, split: Split, plan: StepPlan, recompute: str, choice: Choice | None = None) -> Variant:
        """Memory, pieces and time of a step under this split, with `memory.recompute` as given."""
        q = self.q
        _, table = self.cost(recompute != "never")
        largest = self._largest(split, None if choice is None else choice.in_flight)
        stages = [split.stages[split.stage_of(k)] for k in range(len(self.places))]
        both = [self._hold(k, split, largest, recompute) for k in range(len(self.places))]
        chosen = [choice for choice, _ in both]
        ranks = [self._rank_plan(k, stages[k], chosen[k]) for k in range(len(self.places))]
        items = step_items(
            split, plan, q.shape, self.rows, ranks, self.roads.between, self.sites, dtype_bytes=self.size
        )
        played = play(items, self.roads.rates)
        read = [sum(i.nbytes for i in items if i.rank == k and i.kind in ("load", "copy")) for k in range(len(ranks))]
        found = tuple(self._rank(k, stages[k], chosen[k], read[k], played) for k in range(len(ranks)))
        hosts = hosts_of(q, self.sites, self.places, stages, chosen)
        budgets = tuple(budget for _, budget in both)
        return Variant(
            recompute, split, plan, tuple(chosen), budgets, found, hosts, played, table.flops(self.rows), choice
        )

    def _largest(self, split: Split, in_flight: int | None) -> StepPlan:
        """The largest step's plan."""
        if (split, in_flight) not in self._plans:
            self._plans[split, in_flight] = self._plan_of(split, self.largest, in_flight)
        return self._plans[split, in_flight]

    def _plan_of(self, split: Split, rows: Sequence[RowCost], in_flight: int | None = None) -> StepPlan:
        model, table = self.cost(True)
        devices = [self._device(k, True) for k in range(len(self.places))]
        return plan_step(
            split, model, [d.flops_per_s for d in devices], rows, self.q.train.micro_batch_tokens, in_flight,
            devices=devices, links=self.roads.links, table=table,
        )  # fmt: skip

    def _hold(self, k: int, split: Split, plan: StepPlan, recompute: str) -> Held:
        """What one rank holds, on the largest step."""
        place, at = self.places[k], split.stage_of(k)
        stage, rows = split.stages[at], self.largest
        mine = [m for m in range(len(plan.items)) if k in plan.owners[at][m]]
        lengths = [[rows[i].tokens for i in plan.items[m]] for m in mine]
        positions = [sum(rows[i].labels for i in plan.items[m]) for m in mine]
        if not mine:  # another step may give it a row
            shortest = min(rows, key=lambda row: row.tokens)
            lengths, positions = [[shortest.tokens]], [shortest.labels]
        flying = held([(action.kind, action.group) for action in plan.actions[at]])
        most = max((sum(m in mine for g in groups for m in plan.groups[g]) for groups in flying), default=0)
        divided = stage.way == "experts" and len(stage.ranks) > 1
        rank = process.Rank(
            layers=range(stage.first, stage.last),
            share=stage.shares[stage.ranks.index(k)] if divided else 1.0,
            sharers=sum(self.places[r].host == place.host for r in stage.ranks),
            ranks_here=sum(other.host == place.host for other in self.places),
            in_flight=max(1, most) if len(split.stages) > 1 else None,
            sizes=self._sizes if place.facts.kind == "cpu" and self.dtypes[k] == "bf16" else 0,
        )
        facts = in_dtype(place.facts, self.dtypes[k]).model_copy(update={"threads": place.threads})
        key = (facts, place.host, place.memory_bytes, rank, lengths, positions, recompute)
        known = next((choice for seen, choice in self._held if seen == key), None)
        if known is None:
            known = self._choose(place, facts, self.dtypes[k], rank, lengths, positions, recompute)
            self._held.append((key, known))
        return known

    def _choose(
        self, place: RankPlace, facts: DeviceFacts, dtype: str, rank: process.Rank, lengths: list[list[int]],
        positions: list[int], recompute: str,
    ) -> Held:  # fmt: skip
        q, host = self.q, self.q.machine.hosts[place.host]
        if place.facts.kind == "cpu":
            more = COMMAND_BYTES + (GROUP_BYTES if len(self.places) > 1 else 0)
            host = host.model_copy(update={"import_bytes": process.import_bytes(host) + more})

        def choose(budget: int | None) -> process.Choice:
            return process.choose_residency(
                q.shape, self.sites, lengths, positions, dtype=dtype, device=facts, host=host,
                budget=budget, recompute=recompute, state=q.memory.state, rank=rank, dropout=q.lora.dropout > 0,
            )  # fmt: skip

        if place.budgeted:
            return choose(place.memory_bytes), place.memory_bytes
        if place.facts.kind == "cuda":
            return _fill(choose, place.memory_bytes)
        free = choose(None)
        if free.plan.peak_bytes <= place.memory_bytes:
            return free, None
        budget = max(place.memory_bytes - program_bytes(free), 1)
        return choose(budget), budget

    def _rank_plan(self, k: int, stage: Stage, chosen: process.Choice) -> RankPlan:
        gpu = self.places[k].facts.kind == "cuda"
        divided = stage.way == "experts" and len(stage.ranks) > 1
        share = stage.shares[stage.ranks.index(k)] if divided else 1.0
        return RankPlan(
            times=self.times(k, chosen.kept), resident=frozenset(chosen.residency.resident), pinned=frozenset(chosen.residency.pinned),
            accelerator=gpu, recompute=not chosen.kept, read=self.roads.read[k], copy=self.roads.copy[k], back=self.roads.back[k],
            boundary_bytes=None if chosen.boundary_room is None else int(chosen.boundary_room),
            part=part_of_share(share) if divided else {},
        )  # fmt: skip

    def _rank(self, k: int, stage: Stage, chosen: process.Choice, read_bytes: int, played: Played) -> RankForecast:
        place, plan, residency = self.places[k], chosen.plan, chosen.residency
        gpu = place.facts.kind == "cuda"
        program = 0 if gpu else program_bytes(chosen)
        have = place.memory_bytes + (program if place.budgeted else 0)
        if gpu:  # a budget there is for weights, boundaries and kept activations, not for all
            have = place.facts.memory_bytes if place.facts.free_bytes is None else place.facts.free_bytes
        need = plan.peak_bytes if chosen.fits else max(plan.peak_bytes, chosen.least + program)
        parts = dict(plan.groups)
        if need > plan.peak_bytes:
            parts["more"] = need - plan.peak_bytes
        streamed = len(residency.streamed)
        return RankForecast(
            rank=k, name=place.name, device=place.index, host=place.host, first=stage.first, last=stage.last,
            share=stage.shares[stage.ranks.index(k)], parts=parts, formulas=_formulas(plan), need=need, have=have,
            on_device=len(residency.resident), in_host=len(residency.pinned), on_disk=streamed - len(residency.pinned),
            keeps=chosen.kept, state_on_disk=chosen.state_on_disk, read_bytes=read_bytes, busy=played.busy[k],
            seconds=played.seconds[k], causes=played.causes[k], wait_s=played.wait_s[k],
        )  # fmt: skip


def _fill(choose: Callable[[int | None], process.Choice], have: int) -> Held:
    """Of a GPU: the engine's own share for weights where all fits so; else the budget for weights with which the peak comes near
    to the device's memory."""
    found, asked = choose(None), None
    last = found
    if found.plan.peak_bytes <= have and not found.residency.streamed:
        return found, None
    for _ in range(FILL_TRIES):
        spare = have - last.plan.peak_bytes
        if 0 <= spare < have / 40:
            break
        budget = max(round(last.residency.total_bytes + (spare - have / 100) / (1 + MARGIN_SHARE)), 1)
        last = choose(budget)
        holds_more = last.residency.packed_bytes > found.residency.packed_bytes
        if found.plan.peak_bytes > have or (last.plan.peak_bytes <= have and holds_more):
            found, asked = last, budget
    return found, asked


def program_bytes(chosen: process.Choice) -> int:
    """What a process holds before it opens a model, with libraries and what they compile."""
    return sum(chosen.plan.parts.get(name, 0) for name in PROGRAM)


def identity_of(place: RankPlace, dtype: Dtype, kept: bool) -> Identity:
    """As runs on such a device are known in a calibration."""
    measured = place.facts.kernels is not None
    return Identity(device=place.facts.name, threads=place.threads, dtype=dtype, kernels=measured, kept=kept)


def identities_of(question: Question, keeps: Sequence[bool]) -> list[Identity]:
    """Of every rank; `keeps`: which of them keep activations."""
    places = places_of(question.machine, question.compute, question.memory, question.devices)
    return [
        identity_of(place, _dtype(question.compute, place.facts), kept)
        for place, kept in zip(places, keeps, strict=True)
    ]


def in_dtype(facts: DeviceFacts, dtype: str) -> DeviceFacts:
    """A card without bf16, as it trains: in fp32."""
    if dtype == facts.dtype or facts.dtype != "fp16" or dtype != "fp32":
        return facts
    return facts.model_copy(update={"dtype": "fp32", "matmul_flops_per_s": facts.matmul_flops_per_s * FP32_SHARE})


def _dtype(compute: ComputeConfig, facts: DeviceFacts) -> Dtype:
    """What a rank computes in.

    Raises:
        UserError: fp16, in which nothing can train.
    """
    if compute.dtype == "fp16":
        raise UserError("compute.dtype fp16 cannot train: its gradients underflow without loss scaling",
                        fix="use bf16 or fp32")  # fmt: skip
    if compute.dtype == "auto":
        return "fp32" if facts.dtype == "fp16" else facts.dtype
    return compute.dtype


def _micro_batch(lengths: Sequence[int], most: int) -> list[int]:
    """A typical micro-batch: the first rows that it has room for."""
    found: list[int] = []
    for n in lengths:
        if found and sum(found) + n > most:
            break
        found.append(n)
    return found


def _formulas(plan: MemoryPlan) -> dict[str, str]:
    """By group of parts, the formulas of its parts."""
    found: dict[str, list[str]] = {}
    for name, size in plan.parts.items():
        said = f"{name} {size}" + (f" ({plan.formulas[name]})" if name in plan.formulas else "")
        found.setdefault(GROUPS[name], []).append(said)
    return {group: " + ".join(said) for group, said in found.items()}


def _over(variant: Variant) -> float:
    return max(rank.need / rank.have for rank in variant.ranks)
