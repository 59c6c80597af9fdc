"""A stand-in for a slower device: computing takes so many times as long, by sleeping."""

from __future__ import annotations

import time
from collections.abc import Sequence


class Pace:
    """How much slower this device is to seem.

    Args:
        slowdown: `[[devices]].slowdown`: a factor of 1 or more, or pairs of a step (from 0) and the factor from then on.
    """

    def __init__(self, slowdown: float | Sequence[tuple[int, float]] = 1.0) -> None:
        pairs = [(0, slowdown)] if isinstance(slowdown, int | float) else list(slowdown)
        self._pairs = sorted(pairs)
        self.factor = 1.0
        self.begin_step(0)

    @staticmethod
    def clock() -> float:
        """Seconds that this thread has computed: what other processes on the same cores take is not to be stretched."""
        return time.thread_time()

    def begin_step(self, step: int) -> None:
        """Take the factor of this step."""
        self.factor = next((factor for begin, factor in reversed(self._pairs) if begin <= step), 1.0)

    def stretch(self, seconds: float) -> None:
        """Sleep for what computing of so many seconds (by `clock`) would have taken longer."""
        if self.factor > 1:
            time.sleep(seconds * (self.factor - 1))
