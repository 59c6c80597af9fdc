"""A step as a list of work: which rows make a micro-batch, who takes it in each stage, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lamella.plan.costs import CostTable, ModelCost, RowCost
from lamella.plan.deal import deal
from lamella.plan.devices import Device, Links
from lamella.plan.schedule import schedule
from lamella.plan.split import Split, Stage


@dataclass(frozen=True)
class Action:
    """One group of micro-batches through one stage: forward ("F") or back ("B")."""

    kind: Literal["F", "B"]
    group: int


@dataclass(frozen=True)
class StepPlan:
    """The work of one optimizer step; every rank computes the same one.

    Attributes:
        items: for each micro-batch the positions of its rows among the step's rows.
        groups: for each group its micro-batches (indices into `items`); each micro-batch is in one group.
        owners: `owners[s][m]`: ranks that take micro-batch m through stage s; one, or all of an `experts` stage (the first
            of them sends on).
        actions: `actions[s]`: what the ranks of stage s do, in order: every group forward once and back once.
    """

    items: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    owners: tuple[tuple[tuple[int, ...], ...], ...]
    actions: tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Pass:
    """One rank's part of an action.

    Attributes:
        kind, items: forward or back, and the micro-batches it takes; none: nothing is done.
        first, last: layers that it walks through; going back it ends at the first trained one.
        turns: it begins at the layer that the action before it ended at, whose weights are still at hand.
    """

    kind: Literal["F", "B"]
    items: tuple[int, ...]
    first: int
    last: int
    turns: bool

    def dequantised(self, table: CostTable) -> float:
        """Bytes written before it can compute."""
        total = table.dequantised[self.last] - table.dequantised[self.first]
        if self.turns:
            total -= table.model.layers[self.first if self.kind == "F" else self.last - 1].dequantised_bytes
        return total


def passes_of(split: Split, plan: StepPlan, rank: int, table: CostTable) -> list[Pass]:
    """A rank's part of each of its stage's actions, in order. The step is one of many like it, so its first one follows the last
    of the step before."""
    s = split.stage_of(rank)
    stage, trained = split.stages[s], table.model.first_trained
    found = []
    for action in plan.actions[s]:
        items = tuple(m for m in plan.groups[action.group] if rank in plan.owners[s][m])
        low = stage.first if action.kind == "F" else min(max(stage.first, trained), stage.last)
        found.append(Pass(action.kind, items if low < stage.last else (), low, stage.last, False))
    at_work = [k for k, each in enumerate(found) if each.items]
    for k, before in zip(at_work, [*at_work[-1:], *at_work[:-1]], strict=True):
        each = found[k]
        if found[before].kind != each.kind and (each.kind == "B" or trained <= stage.first):
            found[k] = replace(each, turns=True)
    return found


def plan_step(
    split: Split,
    model: ModelCost,
    speeds: Sequence[float],
    rows: Sequence[RowCost],
    micro_batch_tokens: int,
    in_flight: int | None = None,
    *,
    devices: Sequence[Device] | None = None,
    links: Links | None = None,
    table: CostTable | None = None,
) -> StepPlan:
    """Divide a step's rows; the same arguments give the same plan on every rank.

    Rows are dealt to groups of about equal cost, then within a group to the ranks of every stage by share (what a rank got too
    much of in one group it gets less of in the next). Rows that meet the same ranks are packed, longest first, into
    micro-batches. A row is never cut; with fewer rows than groups or ranks some have nothing, and empty groups vanish.

    Args:
        speeds: FLOP/s of each rank, for the order of work in stages.
        micro_batch_tokens: of a micro-batch; a longer row is one by itself.
        in_flight: groups that the first stage holds at most between forward and back; None: as few as take the least time.
        devices, links: where given, the order of work in stages counts dequantising and transfers too.
        table: of `model`, where the caller has it.
    """
    table = table or CostTable(model)
    whole = [table.flops([row]) for row in rows]
    count = min(split.groups, len(rows)) if len(split.stages) > 1 else 1
    in_group = deal(whole, [1.0] * count) if rows else []
    owner = _owners(split.stages, table, rows, in_group, count)

    items: list[tuple[int, ...]] = []
    groups: list[tuple[int, ...]] = []
    for g in range(count):
        buckets: dict[tuple[int, ...], list[int]] = {}
        for i in range(len(rows)):
            if in_group[i] == g:
                buckets.setdefault(tuple(taken[i] for taken in owner), []).append(i)
        packed = [item for key in sorted(buckets) for item in _pack(buckets[key], rows, micro_batch_tokens)]
        if packed:
            groups.append(tuple(range(len(items), len(items) + len(packed))))
            items += packed
    owners = tuple(
        tuple(stage.ranks if stage.way == "experts" else (stage.ranks[taken[item[0]]],) for item in items)
        for stage, taken in zip(split.stages, owner, strict=True)
    )
    if not groups:
        return StepPlan((), (), owners, tuple(() for _ in split.stages))
    times = _Times(split, table, speeds, rows, items, groups, owners)
    forward, back = times.passes(devices)
    transfers = times.transfers(devices, links) if devices is not None and links is not None else None
    order = schedule(forward, back, in_flight, transfers)
    actions = tuple(tuple(Action(kind, group) for kind, group in stage) for stage in order)
    return StepPlan(tuple(items), tuple(groups), owners, actions)


def _owners(
    stages: Sequence[Stage], table: CostTable, rows: Sequence[RowCost], in_group: Sequence[int], count: int
) -> list[list[int]]:
    """For each stage and row the position of the row's rank in the stage (0 in an `experts` stage)."""
    found = []
    for stage in stages:
        taken = [0] * len(rows)
        if stage.way == "tokens" and len(stage.ranks) > 1:
            costs = [table.flops([row], stage.first, stage.last) for row in rows]
            # Stages of like shares then deal alike, and fewer, fuller micro-batches pass between them.
            sorted_ranks = sorted(range(len(stage.ranks)), key=lambda k: (-stage.shares[k], k))
            shares = [stage.shares[k] for k in sorted_ranks]
            loads = [0.0] * len(shares)
            for g in range(count):
                mine = [i for i in range(len(rows)) if in_group[i] == g]
                for i, k in zip(mine, deal([costs[i] for i in mine], shares, loads), strict=True):
                    taken[i] = sorted_ranks[k]
                    loads[k] += costs[i]
        found.append(taken)
    return found


def _pack(mine: Sequence[int], rows: Sequence[RowCost], budget: int) -> list[tuple[int, ...]]:
    """Longest first, each row into the first micro-batch with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(mine, key=lambda i: (-rows[i].tokens, i)):
        k = next((k for k, left in enumerate(room) if rows[i].tokens <= left), None)
        if k is None:
            bins.append([i])
            room.append(budget - rows[i].tokens)
        else:
            bins[k].append(i)
            room[k] -= rows[i].tokens
    return [tuple(sorted(b)) for b in bins]


@dataclass(frozen=True)
class _Times:
    """Seconds of each stage with each group, as [stage][group]."""

    split: Split
    table: CostTable
    speeds: Sequence[float]
    rows: Sequence[RowCost]
    items: Sequence[tuple[int, ...]]
    groups: Sequence[tuple[int, ...]]
    owners: Sequence[Sequence[tuple[int, ...]]]

    def passes(self, devices: Sequence[Device] | None) -> tuple[list[list[float]], list[list[float]]]:
        """Forward and back: those of the stage's slowest rank."""
        forward, back = [], []
        for s, stage in enumerate(self.split.stages):
            parts = [part_of(stage, rank, self.table) for rank in stage.ranks]
            nbytes = self.table.dequantised[stage.last] - self.table.dequantised[stage.first]
            fs, bs = [], []
            for group in self.groups:
                f = b = 0.0
                for part, rank in zip(parts, stage.ranks, strict=True):
                    mine = [self.rows[i] for m in group if rank in self.owners[s][m] for i in self.items[m]]
                    df, db = self.table.passes(mine, stage.first, stage.last)
                    more = nbytes / devices[rank].dequantise_bytes_per_s if mine and devices else 0.0
                    f = max(f, part * (df / self.speeds[rank] + more))
                    b = max(b, part * (db / self.speeds[rank] + more))
                fs.append(f)
                bs.append(b)
            forward.append(fs)
            back.append(bs)
        return forward, back

    def transfers(self, devices: Sequence[Device], links: Links) -> list[list[float]]:
        """From each stage to the next: on the busiest of their links."""
        found = []
        for s, stage in enumerate(self.split.stages[1:], start=1):
            per_token = self.table.model.layers[stage.first].boundary_bytes_per_token
            row = []
            for group in self.groups:
                lanes: dict[tuple[int, int], float] = {}
                for m in group:
                    nbytes = sum(self.rows[i].tokens for i in self.items[m]) * per_token
                    for peer in self.owners[s][m]:
                        lane = self.owners[s - 1][m][0], peer
                        link = links.between(devices, *lane)
                        lanes[lane] = lanes.get(lane, link.latency_s) + nbytes / link.bytes_per_s
                row.append(max(lanes.values()))
            found.append(row)
        return found


def part_of(stage: Stage, rank: int, table: CostTable) -> float:
    """Part of a stage's work per token that a rank does: all of it, or in an `experts` stage what is not divided and its
    share of what is."""
    if stage.way == "tokens":
        return 1.0
    divided = table.divided(stage.first, stage.last)
    return 1 - divided + divided * stage.shares[stage.ranks.index(rank)]
