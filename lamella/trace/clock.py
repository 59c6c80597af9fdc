"""How far the ranks' clocks are apart, bounded without assumptions.

No rank leaves a collective before every rank has entered it. So for each round, with e and l the readings of `clock` just
before and after it, and o what has to be added to a rank's clock to get rank 0's:

    e_0 <= l + o        and        e + o <= l_0

Over some rounds the tightest of these bounds hold o in an interval; its middle is the offset, half its width the error.
Ranks that share a kernel share its clock: there the offset is 0 when the interval allows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

METHOD = ("offsets from bounds: nobody leaves a collective before all have entered it; tightest of several rounds; "
          "0 on ranks that share rank 0's kernel")  # fmt: skip
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Clock:
    """`offset_s` is to be added to a rank's readings to get rank 0's; it is off by `error_s` at most."""

    offset_s: float
    error_s: float


RANK_0 = Clock(0.0, 0.0)


@dataclass(frozen=True)
class Readings:
    """One rank's clock before and after each round, and which kernel it runs on (empty: not known)."""

    enter_s: tuple[float, ...]
    leave_s: tuple[float, ...]
    kernel: str = ""


def read_clock(
    collective: Callable[[], object], rounds: int = 16, clock: Callable[[], float] = time.perf_counter
) -> Readings:
    """Read the clock around `rounds` collectives of all ranks."""
    enter, leave = [], []
    for _ in range(rounds):
        enter.append(clock())
        collective()
        leave.append(clock())
    kernel = _BOOT.read_text(encoding="utf-8").strip() if _BOOT.is_file() else ""
    return Readings(tuple(enter), tuple(leave), kernel)


def clocks_of(readings: Sequence[Readings]) -> list[Clock]:
    """Every rank's clock against rank 0's, from the readings of all, by rank."""
    first = readings[0]
    clocks = [RANK_0]
    for mine in readings[1:]:
        low = max(e - leave for e, leave in zip(first.enter_s, mine.leave_s, strict=True))
        high = min(leave - e for leave, e in zip(first.leave_s, mine.enter_s, strict=True))
        if low <= 0.0 <= high and mine.kernel and mine.kernel == first.kernel:
            clocks.append(RANK_0)
        else:
            clocks.append(Clock((low + high) / 2, abs(high - low) / 2))
    return clocks
