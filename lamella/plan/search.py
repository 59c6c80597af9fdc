"""The split that a step takes the least time with, among all that fit.

Candidates: sequences over all devices; stages over every order of devices that keeps hosts together, one or several
devices each (`teams`), layers cut exactly; experts and heads divided within a host. Quick estimates (`fluid`) rank them; the
best are played through (`simulate`) under each device's memory, and the best pipeline's cuts are moved by a layer as long as that
helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lamella.config import SplitConfig
from lamella.errors import UserError
from lamella.plan.asked import Asked, check_asked
from lamella.plan.costs import CostTable, ModelCost, RowCost
from lamella.plan.devices import Device, Link, Links
from lamella.plan.fluid import Fluid, Team
from lamella.plan.memory import DeviceMemory, in_flight_of, memory_of
from lamella.plan.simulate import Timeline, simulate
from lamella.plan.split import Split, Way
from lamella.plan.teams import find_teams
from lamella.plan.work import StepPlan, plan_step
from lamella.units import format_seconds

PLAYED = 10
"""Pipelines that are played through, the best by estimate first."""
SLOWER = 2
"""Of these, played although estimated slower than what is known: the best rejected ones are printed."""
MOVES = 24
"""Tries of moving a cut of the best pipeline by a layer."""
FEW = 4
"""Devices up to which the order of teams is looked for under several numbers of groups."""
GROUPS = (1, 2, 3, 4, 6, 8)
"""Groups in flight that are tried, times the number of stages."""
WORTH = 0.01
"""Of the step's time: the least that a suggestion has to save."""


@dataclass(frozen=True)
class Rejected:
    """A split that was not chosen; `step_s` None: it does not fit."""

    split: Split
    step_s: float | None
    why: str


@dataclass(frozen=True)
class Choice:
    """The chosen split, what a step with it would take, and why.

    Attributes:
        plan: of the rows given.
        reasons: lines for people.
        rejected: the best of each other kind, and what does not fit; fastest first.
        memory: per device.
        in_flight: for `plan_step`: groups that the first stage may hold, as memory was reckoned with; None: one stage.
        suggestions: what would make steps faster, lines for people.
    """

    split: Split
    timeline: Timeline
    reasons: list[str]
    rejected: list[Rejected]
    memory: list[DeviceMemory]
    plan: StepPlan
    in_flight: int | None
    suggestions: list[str]


class NothingFits(UserError):
    """No split fits; `split` and `plan` are of the one that comes nearest."""

    def __init__(self, what: str, fix: str, split: Split, plan: StepPlan) -> None:
        super().__init__(what, fix=fix)
        self.split, self.plan = split, plan


@dataclass(frozen=True)
class _Tried:
    split: Split
    plan: StepPlan
    memory: list[DeviceMemory]
    timeline: Timeline | None
    in_flight: int | None

    @property
    def step_s(self) -> float:
        return float("inf") if self.timeline is None else self.timeline.step_s


def find_split(
    model: ModelCost,
    devices: Sequence[Device],
    links: Links,
    rows: Sequence[RowCost],
    asked: SplitConfig,
    micro_batch_tokens: int,
) -> Choice:
    """Find the split.

    Args:
        rows: of a typical step.
        asked: what is fixed by hand.
        micro_batch_tokens: of a micro-batch, at most (a longer row is one by itself).

    Raises:
        UserError: the settings contradict each other, the model or the devices.
        NothingFits: with what each device needs and has.
    """
    assert model.layers and devices and rows
    return _Finder(model, devices, links, rows, check_asked(asked, model, devices), micro_batch_tokens).run()


class _Finder:
    def __init__(
        self,
        model: ModelCost,
        devices: Sequence[Device],
        links: Links,
        rows: Sequence[RowCost],
        asked: Asked,
        micro_batch_tokens: int,
    ) -> None:
        self.model, self.devices, self.links, self.rows = model, devices, links, rows
        self.asked, self.micro_batch_tokens = asked, micro_batch_tokens
        self.table = CostTable(model)
        self.fluid = Fluid(model, devices, links, rows, micro_batch_tokens, self.table)
        self.everyone = tuple(range(len(devices)))
        self.speeds = [d.flops_per_s for d in devices]
        self.divisible = any(layer.divisible > 0 for layer in model.layers)

    def run(self) -> Choice:
        tried: list[_Tried] = []
        if "tokens" in self.asked.ways:
            tried += self._try_whole(Team(self.everyone))
        if "experts" in self.asked.ways and self.asked.stages is None and self._experts_whole():
            tried += self._try_whole(Team(self.everyone, "experts"))
        tried += self._pipelines(min((t.step_s for t in tried), default=float("inf")))
        full = [t for t in tried if self._ranks(t.split) == set(self.everyone)]
        best = min(full, key=lambda t: t.step_s, default=None)
        if best is None or best.timeline is None:
            raise self._nothing_fits(full)
        if len(best.split.stages) > 1 and self.asked.ends is None:
            best = self._move_cuts(best)
        fewer = self._fewer(tried)
        return self._choice(best, full, fewer)

    def _try(self, split: Split, in_flight: int | None = None) -> _Tried:
        plan = plan_step(
            split, self.model, self.speeds, self.rows, self.micro_batch_tokens, in_flight,
            devices=self.devices, links=self.links, table=self.table,
        )  # fmt: skip
        memory = memory_of(split, self.model, self.devices, plan, self.rows, self.table)
        timeline = None
        if all(m.fits for m in memory):
            timeline = simulate(split, plan, self.model, self.devices, self.links, self.rows, self.table, memory)
        return _Tried(split, plan, memory, timeline, in_flight)

    def _try_whole(self, team: Team) -> list[_Tried]:
        """One stage, with shares by speed, and with shares that leave room for all layers."""
        splits = dict.fromkeys([self._whole(team), self._whole(team, hold=True)])
        return [self._try(split) for split in splits]

    def _whole(self, team: Team, hold: bool = False) -> Split:
        return self._shared(self.fluid.split([team], [self.fluid.layers], 1, hold=hold))

    def _shared(self, split: Split) -> Split:
        """With shares set by hand, if there are any."""
        if self.asked.shares is None:
            return split
        stages = []
        for stage in split.stages:
            mine = [self.asked.shares[r] for r in stage.ranks]
            stages.append(replace(stage, shares=tuple(x / sum(mine) for x in mine)))
        return replace(split, stages=tuple(stages))

    def _experts_whole(self) -> bool:
        """Divide every layer among all devices: within a host, or where that is asked for."""
        one_host = len({d.host for d in self.devices}) == 1
        return self.divisible and (one_host or self.asked.ways == ("experts",))

    def _pipelines(self, least: float) -> list[_Tried]:
        """Pipelines played through: the best by estimate, few of those that are estimated slower than the `least` known."""
        drafts = sorted(self._drafts(), key=lambda d: d[0])
        full = [d for d in drafts if sum(len(t.ranks) for t in d[1]) == len(self.everyone)]
        some = [d for d in drafts if sum(len(t.ranks) for t in d[1]) < len(self.everyone)]
        tried = []
        for k, draft in enumerate(full[:PLAYED]):
            if k < SLOWER or draft[0] < least:
                tried.append(self._play(*draft[1:]))
                least = min(least, tried[-1].step_s)
        if drafts and all(t.timeline is None for t in tried):
            tried += [self._play(*d[1:]) for d in full[PLAYED:]]
        return tried + [self._play(*d[1:]) for d in some[:2]]

    def _play(self, teams: Sequence[Team], groups: int, ends: tuple[int, ...] | None, in_flight: int | None) -> _Tried:
        ends = ends or self.fluid.tightest(teams, groups, in_flight)
        return self._try(self._shared(self.fluid.split(teams, ends, groups, in_flight)), in_flight)

    def _drafts(self) -> Iterator[tuple[float, tuple[Team, ...], int, tuple[int, ...] | None, int | None]]:
        """(estimated seconds, teams, groups, ends, groups in flight); ends None: nothing fits."""
        for teams in self._orders():
            for groups in self._groups(len(teams)):
                fits = False
                # Fewer groups in flight than stages only where memory asks for it.
                for in_flight in dict.fromkeys([None, *range(len(teams), 0, -1)]):
                    found = self._ends(teams, groups, in_flight)
                    if found is not None:
                        yield found[0], teams, groups, found[1], in_flight
                        if fits:
                            break
                        fits = True
                if not fits:
                    yield float("inf"), teams, groups, self.asked.ends, 1

    def _ends(self, teams: Sequence[Team], groups: int, in_flight: int | None) -> tuple[float, tuple[int, ...]] | None:
        if self.asked.ends is None:
            return self.fluid.cut(teams, groups, in_flight)
        seconds = self.fluid.estimate(teams, self.asked.ends, groups, in_flight)
        return (seconds, self.asked.ends) if seconds < float("inf") else None

    def _orders(self) -> list[tuple[Team, ...]]:
        """Orders of teams: as asked, or the best for each number of stages."""
        only = "experts" if self.asked.ways == ("experts",) else None
        if self.asked.stages is not None:
            way: Way = "experts" if only else "tokens"
            return [tuple(Team(r, way if len(r) > 1 else "tokens") for r in self.asked.stages)]
        several_hosts = len({d.host for d in self.devices}) > 1
        if len(self.devices) < 2 or self.fluid.layers < 2:
            return []
        if not ("stages" in self.asked.ways or (only and several_hosts)):
            return []
        experts = self.divisible and "experts" in self.asked.ways
        n = len(self.devices)
        counts = {min(len(self.rows), k * n) for k in ((2,) if n > FEW else (1, 2, 4))}
        if self.asked.groups is not None:
            counts = {self.asked.groups}
        found = list(dict.fromkeys(f.teams for g in sorted(counts) for f in find_teams(self.fluid, g, experts, only)))
        if not any(sum(len(team.ranks) for team in teams) == n for teams in found):
            found.append(self._in_order(min(n, self.fluid.layers)))
        return found

    def _in_order(self, stages: int) -> tuple[Team, ...]:
        """Devices as listed, about as many to each stage."""
        n = len(self.everyone)
        ends = [n * (s + 1) // stages for s in range(stages)]
        return tuple(Team(self.everyone[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True))

    def _groups(self, stages: int) -> list[int]:
        if stages == 1:
            return [1]
        if self.asked.groups is not None:
            return [self.asked.groups]
        return sorted({min(len(self.rows), n * stages) for n in GROUPS})

    def _move_cuts(self, best: _Tried) -> _Tried:
        """Move single cuts by a layer while a played step gets shorter."""
        left = MOVES
        while left > 0:
            found = best
            for split in _neighbours(best.split):
                left -= 1
                other = self._try(self._reshared(split, best.in_flight), best.in_flight)
                if other.step_s < found.step_s:
                    found = other
            if found is best:
                break
            best = found
        return best

    def _reshared(self, split: Split, in_flight: int | None) -> Split:
        teams = [Team(stage.ranks, stage.way) for stage in split.stages]
        ends = [stage.last for stage in split.stages]
        return self._shared(self.fluid.split(teams, ends, split.groups, in_flight))

    def _ranks(self, split: Split) -> set[int]:
        return {r for stage in split.stages for r in stage.ranks}

    def _fewer(self, tried: Sequence[_Tried]) -> _Tried | None:
        """The fastest split found that leaves devices out."""
        found = [t for t in tried if self._ranks(t.split) != set(self.everyone)]
        found += [self._try(self._whole(Team(ranks))) for ranks in self._subsets()]
        return min((t for t in found if t.timeline is not None), key=lambda t: t.step_s, default=None)

    def _subsets(self) -> list[tuple[int, ...]]:
        """Sets of devices that sequences might better be shared among: each fastest so many, and all but one."""
        n = len(self.everyone)
        if n < 2 or self.asked.shares is not None:
            return []
        ends = self.fluid.layers
        alone = {r: float(self.fluid.seconds(Team((r,)), 1, 1)[0, ends]) for r in self.everyone}
        order = sorted(self.everyone, key=lambda r: (alone[r], -self.speeds[r], r))
        found = {tuple(sorted(order[:k])) for k in range(1, n)}
        found |= {tuple(r for r in self.everyone if r != out) for out in self.everyone}
        estimated = sorted(
            (float(self.fluid.seconds(team, 1, 1)[0, ends]) + self.fluid.reduce_seconds(team, 0, ends), team.ranks)
            for team in map(Team, found)
        )
        return [ranks for seconds, ranks in estimated[:4] if seconds < float("inf")]

    def _choice(self, best: _Tried, full: Sequence[_Tried], fewer: _Tried | None) -> Choice:
        assert best.timeline is not None
        others: dict[str, _Tried] = {}
        for t in sorted(full, key=lambda t: t.step_s):
            if _kind(t.split) != _kind(best.split):
                others.setdefault(_kind(t.split), t)
        rejected = [Rejected(t.split, _step(t), self._why(t, best)) for t in others.values()]
        suggestions = []
        if fewer is not None:
            out = " and ".join(self.devices[r].name for r in self.everyone if r not in self._ranks(fewer.split))
            if fewer.step_s < best.step_s * (1 - WORTH):
                rejected.append(Rejected(fewer.split, fewer.step_s, f"leaves out {out}; no device is left out unasked"))
                suggestions.append(
                    f"leave {out} out of [[devices]]: a step would take {format_seconds(fewer.step_s)} instead of "
                    f"{format_seconds(best.step_s)}"
                )
        rejected.sort(key=lambda r: float("inf") if r.step_s is None else r.step_s)
        suggestions += self._relief(best)
        reasons = [
            f"{_kind(best.split)}: {format_seconds(best.step_s)} a step, the least of {len(full)} splits played through"
        ]
        reasons += [f"not {_kind(r.split)}: {r.why}" for r in rejected]
        flying = in_flight_of(best.plan) if len(best.split.stages) > 1 else None
        return Choice(best.split, best.timeline, reasons, rejected, best.memory, best.plan, flying, suggestions)

    def _why(self, t: _Tried, best: _Tried) -> str:
        if t.timeline is None:
            return f"does not fit: {self._short(t)}"
        times = t.step_s / best.step_s
        return f"{format_seconds(t.step_s)} a step, {times:.3g} times as long" if times > 1.0005 else "no faster"

    def _short(self, t: _Tried) -> str:
        short = [k for k, m in enumerate(t.memory) if not m.fits]
        worst = max(short, key=lambda k: (_over(t.memory[k]), -k))
        more = f" (and {len(short) - 1} more)" if len(short) > 1 else ""
        return f"{self.devices[worst].name}: {t.memory[worst].line()}{more}"

    def _relief(self, best: _Tried) -> list[str]:
        """What would help: the same split with twice the links, twice the reading, or all layers held."""
        found = []
        fast = Links(_faster(self.links.local), _faster(self.links.remote),
                     {pair: _faster(link) for pair, link in self.links.pairs.items()})  # fmt: skip
        tries = [
            ("links twice as fast", self.devices, fast),
            ("reading layers twice as fast", [replace(d, read_bytes_per_s=2 * d.read_bytes_per_s) for d in self.devices], self.links),
        ]  # fmt: skip
        streaming = [k for k, m in enumerate(best.memory) if m.streamed_bytes]
        if streaming:
            names = ", ".join(self.devices[k].name for k in streaming)
            held = [replace(d, memory_bytes=None) for d in self.devices]
            tries.append((f"memory for all layers ({names})", held, self.links))
        for what, devices, links in tries:
            memory = memory_of(best.split, self.model, devices, best.plan, self.rows, self.table)
            t = simulate(best.split, best.plan, self.model, devices, links, self.rows, self.table, memory)
            if t.step_s < best.step_s * (1 - 3 * WORTH):
                found.append(
                    f"{what}: a step would take {format_seconds(t.step_s)} instead of {format_seconds(best.step_s)}"
                )
        return found

    def _nothing_fits(self, tried: Sequence[_Tried]) -> NothingFits:
        """What each device needs and has, under the split of each kind that comes nearest."""
        nearest: dict[str, _Tried] = {}
        for t in sorted(tried, key=lambda t: max(_over(m) for m in t.memory)):
            nearest.setdefault(_kind(t.split), t)
        lines = []
        for kind, t in nearest.items():
            lines.append(f"  {kind}:")
            lines += [f"    {d.name}: {m.line()}" for d, m in zip(self.devices, t.memory, strict=True)]
        fewer = self._fewer([])
        fix = "use devices with more memory or more of them, shorter sequences, fewer rows a step or a lower LoRA rank"
        if fewer is not None:
            out = " and ".join(self.devices[r].name for r in self.everyone if r not in self._ranks(fewer.split))
            fix = f"leave {out} out of [[devices]]: without, it fits; or {fix}"
        best = next(iter(nearest.values()))
        what = "no split of the model fits these devices\n" + "\n".join(lines)
        return NothingFits(what, fix, best.split, best.plan)


def _neighbours(split: Split) -> Iterator[Split]:
    """Splits with one cut moved by a layer."""
    for s in range(len(split.stages) - 1):
        a, b = split.stages[s], split.stages[s + 1]
        for to in (a.last - 1, a.last + 1):
            if a.first < to < b.last:
                stages = [*split.stages[:s], replace(a, last=to), replace(b, first=to), *split.stages[s + 2 :]]
                yield replace(split, stages=tuple(stages))


def _kind(split: Split) -> str:
    if len(split.stages) == 1:
        return f"{split.stages[0].way} over {len(split.stages[0].ranks)}"
    inside = {stage.way for stage in split.stages if len(stage.ranks) > 1}
    return f"{len(split.stages)} stages" + "".join(f", {way} within" for way in sorted(inside))


def _step(t: _Tried) -> float | None:
    return None if t.timeline is None else t.timeline.step_s


def _over(memory: DeviceMemory) -> float:
    return 0.0 if memory.have is None else memory.need / memory.have


def _faster(link: Link) -> Link:
    return Link(2 * link.bytes_per_s, link.latency_s / 2)
