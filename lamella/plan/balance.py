"""Shares and layers follow the speed that steps show.

What a device does in a step is known (FLOPs, bytes dequantised), so the seconds it was busy give its speed relative to what
it was planned with. Steps in a row that differ in the same direction, and agree, are a change: two when they differ much, four
else. Anything less is noise and only moves an average. A new split is proposed when it makes steps shorter by the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lamella.config import SplitConfig
from lamella.plan.costs import CostTable, ModelCost, RowCost
from lamella.plan.devices import Device, Links
from lamella.plan.fluid import Fluid, Team, in_pipeline
from lamella.plan.split import Split
from lamella.plan.work import StepPlan, part_of, passes_of

AGREE = 0.5
"""Steps agree when each differs from their mean by at most so much of what that differs from the average."""
CLEAR = 3.0
"""Times the threshold: a difference that two steps prove."""
PROOF = 4
"""Steps that prove a smaller one."""
MEMORY = 16
"""Steps that the average looks back."""
FIRM = 2
"""Steps whose average the threshold is meant for; the mean of more is firmer by the square root, and less is then enough."""


@dataclass
class _Speed:
    """One device.

    Attributes:
        slowness: log of planned speed over speed shown, on average.
        apart: the last steps', where they stood apart from that, all on one side.
        steps: in the average.
    """

    slowness: float = 0.0
    apart: list[float] = field(default_factory=list)
    steps: int = 0

    def observe(self, x: float, threshold: float) -> None:
        if not self.steps and not self.apart:  # what was planned with says little of how fast steps are
            self.slowness, self.steps = x, 1
            return
        off = x - self.slowness
        if abs(off) <= math.log1p(threshold):
            self.apart = []
            self.steps += 1
            self.slowness += off / min(self.steps, MEMORY)
            return
        self.apart = [*(y for y in self.apart[-PROOF + 1 :] if (y - self.slowness) * off > 0), x]
        for n in (2, PROOF):
            last = self.apart[-n:]
            mean = sum(last) / n
            change = abs(mean - self.slowness)
            agree = all(abs(y - mean) <= AGREE * change for y in last)
            if len(last) == n and agree and (n == PROOF or change > math.log1p(CLEAR * threshold)):
                self.slowness, self.apart, self.steps = mean, [], n
                return


class Balancer:
    """Follows the speed of each device and proposes new shares, and layers per stage.

    Every rank keeps one and feeds it the same figures, so all propose alike.

    Args:
        split: in use.
        devices: as planned with; their FLOP/s need only be right relative to dequantising.
        asked: `rebalance` False: nothing is ever proposed; `layers` given: layers stay.
        threshold: part of the step's time that a new split has to save.
    """

    def __init__(
        self,
        split: Split,
        model: ModelCost,
        devices: Sequence[Device],
        links: Links,
        asked: SplitConfig,
        threshold: float = 0.08,
        *,
        micro_batch_tokens: int = 1,
        in_flight: int | None = None,
    ) -> None:
        self.split, self.model, self.planned, self.links = split, model, list(devices), links
        self.asked, self.threshold = asked, threshold
        self.micro_batch_tokens, self.in_flight = micro_batch_tokens, in_flight
        self._table = CostTable(model)
        self._speeds = [_Speed() for _ in devices]

    @property
    def devices(self) -> list[Device]:
        """The devices at the speed they show."""
        found = []
        for device, speed in zip(self.planned, self._speeds, strict=True):
            slow = math.exp(speed.slowness)
            found.append(
                replace(
                    device,
                    flops_per_s=device.flops_per_s / slow,
                    dequantise_bytes_per_s=device.dequantise_bytes_per_s / slow,
                )
            )
        return found

    def observe(self, step_plan: StepPlan, rows: Sequence[RowCost], busy_s: Sequence[float]) -> None:
        """Take in a step: seconds each rank computed and dequantised (waiting and reading apart)."""
        for s, stage in enumerate(self.split.stages):
            for rank in stage.ranks:
                mine = [m for m, owners in enumerate(step_plan.owners[s]) if rank in owners]
                if not mine or busy_s[rank] <= 0:
                    continue
                flops = self._table.flops([rows[i] for m in mine for i in step_plan.items[m]], stage.first, stage.last)
                passes = [each for each in passes_of(self.split, step_plan, rank, self._table) if each.items]
                nbytes = sum(each.dequantised(self._table) for each in passes)
                device = self.planned[rank]
                expected = flops / device.flops_per_s + nbytes / device.dequantise_bytes_per_s
                expected *= part_of(stage, rank, self._table)
                self._speeds[rank].observe(math.log(busy_s[rank] / expected), self.threshold)

    def propose(self, rows: Sequence[RowCost]) -> Split | None:
        """A better split of the same stages, in use from now on; None when it would save less than the threshold.

        Args:
            rows: of the step to come, or of a typical one.
        """
        if not self.asked.rebalance or len(self.planned) < 2 or not rows:
            return None
        fluid = Fluid(self.model, self.devices, self.links, rows, self.micro_batch_tokens, self._table)
        teams = [Team(stage.ranks, stage.way) for stage in self.split.stages]
        ends = tuple(stage.last for stage in self.split.stages)
        groups = min(self.split.groups, len(rows)) if len(teams) > 1 else 1
        best = [fluid.split(teams, ends, self.split.groups, self.in_flight)]
        if len(teams) > 1 and self.asked.layers is None:
            found = fluid.cut(teams, groups, self.in_flight)
            if found is not None and found[1] != ends:
                best.append(fluid.split(teams, found[1], self.split.groups, self.in_flight))
        seconds = [estimate(fluid, split, groups, self.in_flight) for split in best]
        now = estimate(fluid, self.split, groups, self.in_flight)
        # A rank without rows has shown nothing, and where the last steps stand apart the average may be about to change.
        shown = [speed for speed in self._speeds if speed.steps]
        if any(speed.steps < FIRM for speed in shown):
            return None
        steps = min((FIRM if speed.apart else min(speed.steps, MEMORY) for speed in shown), default=FIRM)
        saves = 1 - self.threshold * math.sqrt(FIRM / max(steps, FIRM))
        # Shares alone where they will do: layers that move take their adapter state along.
        choice = 1 if len(best) > 1 and seconds[1] <= seconds[0] * saves else 0
        if seconds[choice] > now * saves:
            return None
        self.split = best[choice]
        return self.split


def estimate(fluid: Fluid, split: Split, groups: int, in_flight: int | None) -> float:
    """Seconds of a step under a split as it is, if rows could be cut at will."""
    times = []
    for s, stage in enumerate(split.stages):
        team = Team(stage.ranks, stage.way)
        flying = min(groups, max(1, (in_flight or len(split.stages)) - s))
        flops = float(fluid.flops[stage.first, stage.last])
        nbytes = float(fluid.dequantised[stage.first, stage.last])
        slowest = 0.0
        for k, (rank, share) in enumerate(zip(stage.ranks, stage.shares, strict=True)):
            device = fluid.devices[rank]
            fixed = 2 * groups * nbytes / device.dequantise_bytes_per_s
            seconds = share * flops / device.flops_per_s + fixed if share > 0 else 0.0
            if stage.way == "experts":
                seconds = part_of(stage, rank, fluid.table) * (flops / device.flops_per_s + fixed)
            reading = float(fluid.reading(team, k, groups, flying)[stage.first, stage.last])
            slowest = max(slowest, seconds, reading if share > 0 else 0.0)
        times.append(slowest)
    return in_pipeline(times, groups)
