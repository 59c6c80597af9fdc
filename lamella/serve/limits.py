"""How much one key may ask for: requests and tokens a minute, requests at once. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lamella.serve.errors import ApiError
from lamella.serve.keys import Caller
from lamella.serve.settings import KeyLimits


@dataclass
class Bucket:
    """Holds up to `size`, fills by `size` a minute. What is taken may exceed what is there; then it is empty for longer."""

    size: float
    level: float
    at_s: float

    def fill(self, now_s: float) -> None:
        self.level = min(self.size, self.level + (now_s - self.at_s) * self.size / 60)
        self.at_s = now_s

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there."""
        return max(0.0, (amount - self.level) * 60 / self.size)


@dataclass
class _Use:
    limits: KeyLimits
    requests: Bucket
    tokens: Bucket
    running: int = 0


class Limiter:
    """Counts by key id.

    Args:
        default: of keys without limits of their own.
        clock: seconds that never go back.
    """

    def __init__(self, default: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._default = default
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def _use(self, caller: Caller) -> _Use:
        limits = caller.limits or self._default
        use = self._uses.get(caller.id)
        now_s = self._clock()
        if use is None or use.limits != limits:
            requests, tokens = float(max(1, limits.requests_per_minute)), float(max(1, limits.tokens_per_minute))
            running = use.running if use is not None else 0
            use = _Use(limits, Bucket(requests, requests, now_s), Bucket(tokens, tokens, now_s), running)
            self._uses[caller.id] = use
        use.requests.fill(now_s)
        use.tokens.fill(now_s)
        return use

    @contextmanager
    def request(self, caller: Caller) -> Iterator[None]:
        """One request, from here to the end of the block.

        Raises:
            ApiError: 429, with the time after which to try again.
        """
        use = self._use(caller)
        limits = use.limits
        if limits.concurrent and use.running >= limits.concurrent:
            raise _refused(f"{limits.concurrent} requests of this key are running", "concurrent_requests", 1.0)
        if limits.requests_per_minute and use.requests.level < 1:
            raise _refused(
                f"over {limits.requests_per_minute} requests a minute", "requests_per_minute", use.requests.wait_s(1)
            )
        if limits.tokens_per_minute and use.tokens.level < 1:
            raise _refused(
                f"over {limits.tokens_per_minute} tokens a minute", "tokens_per_minute", use.tokens.wait_s(1)
            )
        use.requests.level -= 1
        use.running += 1
        try:
            yield
        finally:
            self._uses[caller.id].running -= 1

    def count(self, caller: Caller, tokens: int) -> None:
        """Tokens that a request took, of its prompt or of its answer."""
        use = self._uses.get(caller.id)
        if use is not None:
            use.tokens.fill(self._clock())
            use.tokens.level -= tokens


def _refused(what: str, code: str, wait_s: float) -> ApiError:
    return ApiError(429, f"{what}: try again in {max(1, round(wait_s + 0.5))} s", code=code, retry_s=wait_s)
