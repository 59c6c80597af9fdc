"""How fast and how dearly a server may be asked."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any


class RateLimiter:
    """At most so many requests and tokens in any minute.

    Args:
        requests_per_min, tokens_per_min: None: no limit.
        clock, sleep: for tests.
    """

    def __init__(
        self, requests_per_min: float | None = None, tokens_per_min: float | None = None, *,
        clock: Callable[[], float] = time.monotonic, sleep: Any = asyncio.sleep,
    ) -> None:  # fmt: skip
        self._requests, self._tokens = requests_per_min, tokens_per_min
        self._clock, self._sleep = clock, sleep
        self._sent: deque[tuple[float, int]] = deque()
        self._turn = asyncio.Lock()

    async def wait(self, tokens: int) -> None:
        """Until a request of so many tokens may go; it then counts. One larger than a minute's tokens goes alone."""
        if self._requests is None and self._tokens is None:
            return
        async with self._turn:
            while (ready_s := self._ready_s(tokens)) > self._clock():
                await self._sleep(ready_s - self._clock())
            self._sent.append((self._clock(), tokens))

    def _ready_s(self, tokens: int) -> float:
        now_s = self._clock()
        while self._sent and self._sent[0][0] <= now_s - 60:
            self._sent.popleft()
        ready_s = now_s
        if self._requests is not None and len(self._sent) >= self._requests:
            ready_s = self._sent[len(self._sent) - max(int(self._requests), 1)][0] + 60
        if self._tokens is not None:
            over = sum(n for _, n in self._sent) + tokens - self._tokens
            for sent_s, n in self._sent:
                if over <= 0:
                    break
                over -= n
                ready_s = max(ready_s, sent_s + 60)
        return ready_s


class CeilingReached(Exception):
    """The next request might pass the ceiling."""


class Ledger:
    """Money spent, and a ceiling that is not passed: what a request may cost at most is set aside before it is sent.

    Args:
        ceiling: None: no limit.
    """

    def __init__(self, ceiling: float | None = None, spent: float = 0.0) -> None:
        self.ceiling, self.spent = ceiling, spent
        self._aside = 0.0
        self._under_way = 0
        self._changed = asyncio.Condition()

    async def reserve(self, at_most: float) -> None:
        """Set aside; waits while requests under way may still cost less than was set aside for them.

        Raises:
            CeilingReached: nothing is under way, and there is no room.
        """
        async with self._changed:
            while self.ceiling is not None and self.spent + self._aside + at_most > self.ceiling * (1 + 1e-12):
                if not self._under_way:
                    raise CeilingReached
                await self._changed.wait()
            self._aside += at_most
            self._under_way += 1

    async def settle(self, at_most: float, cost: float) -> None:
        """The request is over: what it cost, in the place of what was set aside."""
        async with self._changed:
            self._under_way -= 1
            self._aside = self._aside - at_most if self._under_way else 0.0  # sums of fractions leave a rest
            self.spent += cost
            self._changed.notify_all()
