"""One rank's part of a step: which micro-batches pass through which of its layers, from whom they come and to whom they go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lamella.models.layout import PackedBatch
from lamella.plan.split import Split
from lamella.plan.work import Action, StepPlan

FORWARD_TAG, BACKWARD_TAG, BARE_TAG = 0, 1, 2
_TAGS = 4


class Pending(Protocol):
    """A transfer under way; its tensor is not to be touched before `wait` returns."""

    def wait(self) -> None: ...


class Peers(Protocol):
    """Point-to-point transfers between ranks. A tag tells the transfers under way between two ranks apart."""

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending: ...
    def receive(self, out: Tensor, source: int, tag: int) -> Pending: ...


@dataclass(frozen=True)
class Task:
    """A micro-batch's passage through this rank's layers.

    Attributes:
        number: of the micro-batch among the step's; one for all ranks.
        source: rank that its boundary comes from; None: it starts here, with its tokens' embeddings.
        targets: ranks that its output goes to; none: it ends here, with the loss. Its gradient comes from the first of them.
        back_to: ranks that the gradient of its input goes to.
        speaks: this rank is the one that sends, and whose loss counts (in an `experts` stage all ranks hold the same).
    """

    batch: PackedBatch
    number: int
    source: int | None = None
    targets: tuple[int, ...] = ()
    back_to: tuple[int, ...] = ()
    speaks: bool = True

    def tag(self, kind: int) -> int:
        return self.number * _TAGS + kind


@dataclass(frozen=True)
class RankWork:
    """What one rank does in a step: its actions in order, on its tasks of each group. Layers [first, last)."""

    first: int
    last: int
    actions: tuple[Action, ...]
    groups: tuple[tuple[Task, ...], ...]

    @property
    def tasks(self) -> list[Task]:
        return [task for group in self.groups for task in group]


def whole_work(batches: Sequence[PackedBatch], layers: int, speaks: bool = True) -> RankWork:
    """All layers on these micro-batches, as one group."""
    tasks = tuple(Task(batch, number, speaks=speaks) for number, batch in enumerate(batches))
    return RankWork(0, layers, (Action("F", 0), Action("B", 0)), (tasks,))


def rank_work(
    split: Split, plan: StepPlan, rank: int, rows: Sequence[int], pack: Callable[[Sequence[int]], list[PackedBatch]]
) -> RankWork:
    """This rank's part of a step.

    Args:
        rows: the step's rows; `plan` names them by their positions here.
        pack: makes micro-batches of rows; one for those of an item.
    """
    at = split.stage_of(rank)
    stage = split.stages[at]
    groups = []
    for members in plan.groups:
        tasks = []
        for number in members:
            owners = plan.owners[at][number]
            if rank not in owners:
                continue
            (batch,) = pack([rows[position] for position in plan.items[number]])
            before = plan.owners[at - 1][number] if at else ()
            after = plan.owners[at + 1][number] if at + 1 < len(split.stages) else ()
            source = before[0] if before else None
            tasks.append(Task(batch, number, source, after, before, rank == owners[0]))
        groups.append(tuple(tasks))
    return RankWork(stage.first, stage.last, plan.actions[at], tuple(groups))
