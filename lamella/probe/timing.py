"""Many pieces of work, timed in rounds."""

from __future__ import annotations

import math
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


@dataclass
class Clock:
    """How much time there is. What is past its end takes no further round; every figure has one round at least.

    Attributes:
        limit_s: from the clock's making on; cut: whether anything was left out for lack of time.
    """

    limit_s: float = math.inf
    cut: bool = False
    start_s: float = field(default_factory=time.perf_counter)

    def over(self, reserve_s: float = 0.0) -> bool:
        """Whether less than `reserve_s` is left; asked before work that may be left out."""
        over = time.perf_counter() - self.start_s > self.limit_s - reserve_s
        self.cut |= over
        return over


def measure(pieces: Sequence[Piece[Key]], effort: Effort, clock: Clock | None = None, reserve_s: float = 0.0) -> None:
    """All rounds of all pieces; while `clock` leaves less than `reserve_s`, only those that were never run."""
    for _ in range(effort.rounds):
        for piece in pieces:
            if clock is None or not piece.seconds or not clock.over(reserve_s):
                piece.turn(effort.turn_s)
