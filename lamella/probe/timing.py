"""Many pieces of work, timed in rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True)
class Effort:
    """Every round runs each piece until `turn_s` seconds are spent on it, once at least, and keeps the fastest run. Rounds that
    lie apart meet different moments of a machine that others use too."""

    rounds: int
    turn_s: float


@dataclass
class Piece(Generic[Key]):
    """Work to be timed: `once` does it; `key` says what it is; `seconds` are the rounds' best runs."""

    key: Key
    once: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    def turn(self, turn_s: float) -> None:
        """One round: a run that is not counted (libraries compile for a shape, caches are filled), then counted ones."""
        self.once()
        best = spent = 0.0
        while not spent or spent < turn_s:
            start_s = time.perf_counter()
            self.once()
            taken_s = time.perf_counter() - start_s
            best = min(best, taken_s) if spent else taken_s
            spent += max(taken_s, 1e-9)
        self.seconds.append(best)

    @property
    def best_s(self) -> float:
        """Of all rounds: what else the machine does can only slow a run down."""
        return min(self.seconds)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure(pieces: Sequence[Piece[Key]], effort: Effort) -> None:
    """All rounds of all pieces."""
    for _ in range(effort.rounds):
        for piece in pieces:
            piece.turn(effort.turn_s)
