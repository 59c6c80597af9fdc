"""How a model and a step are divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["tokens", "experts"]


@dataclass(frozen=True)
class Stage:
    """A run of layers and the ranks that hold it.

    Attributes:
        first: first layer.
        last: the layer after the last one.
        ranks: who holds these layers, ascending.
        shares: of the work, one for each of `ranks`; they sum to 1.
        way: `tokens`: each rank takes whole sequences, as many as its share; `experts`: all ranks take every sequence, and
            each layer's experts and attention heads are divided by share.
    """

    first: int
    last: int
    ranks: tuple[int, ...]
    shares: tuple[float, ...]
    way: Way = "tokens"


@dataclass(frozen=True)
class Split:
    """Stages in the order data pass them; together they hold every layer once, and every rank is in one of them.

    Attributes:
        stages: one alone: no pipeline.
        groups: of micro-batches in flight; each passes a stage as one layer-major walk, forward and back.
    """

    stages: tuple[Stage, ...]
    groups: int = 1

    def stage_of(self, rank: int) -> int:
        """Index of the stage that a rank is in."""
        return next(s for s, stage in enumerate(self.stages) if rank in stage.ranks)
