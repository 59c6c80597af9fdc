"""A step as a list of work: which rows make a micro-batch, who takes it in each stage, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
