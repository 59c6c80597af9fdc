"""The split that a step takes the least time with, among all that fit.

Candidates: sequences over all devices; stages over every order of devices that keeps hosts together, one or several
devices each, layers cut by dynamic programming; experts and heads divided within a host. Quick estimates (`fluid`) rank
them; the best are played through (`simulate`) under each device's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamella.config import SplitConfig
from lamella.errors import UserError
from lamella.plan.costs import CostTable, ModelCost, RowCost
from lamella.plan.devices import Device, Links
from lamella.plan.fluid import Fluid, Team
from lamella.plan.memory import DeviceMemory, memory_of
from lamella.plan.simulate import Timeline, simulate
from lamella.plan.split import Split
from lamella.plan.work import plan_step


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
        reasons: lines for people.
        rejected: the best of each other kind, and what does not fit.
        memory: per device.
    """

    split: Split
    timeline: Timeline
    reasons: list[str]
    rejected: list[Rejected]
    memory: list[DeviceMemory]


def find_split(
    model: ModelCost,
    devices: Sequence[Device],
    links: Links,
    rows: Sequence[RowCost],
    asked: SplitConfig,
    micro_batch_tokens: int,
) -> Choice:
    table = CostTable(model)
    fluid = Fluid(model, devices, links, rows, micro_batch_tokens, table)
    everyone = tuple(range(len(devices)))
    candidates: list[Split] = []
    if asked.kind in ("auto", "tokens"):
        candidates.append(fluid.split([Team(everyone)], [fluid.layers], 1))
    if asked.kind in ("auto", "stages") and len(devices) > 1:
        for groups in sorted({min(len(rows), n * len(devices)) for n in (1, 2, 4)}):
            teams = [Team((r,)) for r in everyone]
            found = fluid.cut(teams, groups)
            if found is not None:
                candidates.append(fluid.split(teams, found[1], groups))
    if asked.kind in ("auto", "experts") and len(devices) > 1:
        candidates.append(fluid.split([Team(everyone, "experts")], [fluid.layers], 1))
    judged = []
    speeds = [d.flops_per_s for d in devices]
    for split in candidates:
        plan = plan_step(split, model, speeds, rows, micro_batch_tokens)
        memory = memory_of(split, model, devices, plan, rows, table)
        if all(m.fits for m in memory):
            judged.append((simulate(split, plan, model, devices, links, rows, table), split, memory))
    if not judged:
        raise UserError("no split fits")
    judged.sort(key=lambda x: x[0].step_s)
    timeline, split, memory = judged[0]
    return Choice(split, timeline, [], [Rejected(s, t.step_s, "slower") for t, s, _ in judged[1:]], memory)
