"""What the ends of a run's ranks amount to: one message, one exit code, and whether to start again."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

INTERRUPTED = 130
_STOPPED = {INTERRUPTED, -signal.SIGINT}


@dataclass(frozen=True)
class End:
    """How one rank ended; only ranks that did not end well have one.

    Attributes:
        exit_code: of the process; minus the signal's number when a signal ended it.
        text: the error it reported; None when it could not report.
        reported_code: exit code that belongs to that error (2: bad input, 1: a run that failed).
        lost: the error is about other ranks that are gone.
        time_s: when it was reported.
        log: what a rank without a report wrote last.
    """

    rank: int
    exit_code: int
    text: str | None = None
    reported_code: int = 1
    lost: bool = False
    time_s: float = 0.0
    log: str = ""


@dataclass(frozen=True)
class Verdict:
    """Exit code, message, and whether all ranks started again may get further."""

    exit_code: int
    text: str
    again: bool


def decide(ends: Sequence[End], asked_to_stop: bool) -> Verdict:
    """The one cause behind the ends of all ranks.

    Bad input comes first: it would be bad again. Then a rank's own failure, then ranks that were lost: only these are
    worth a new start. Ranks ended by SIGTERM were ended by the agent, after the first.

    Args:
        ends: in the order they were noticed; not empty.
    """
    reports = sorted((end for end in ends if end.text is not None), key=lambda end: end.time_s)
    for end in reports:
        if end.reported_code == 2:
            return Verdict(2, end.text or "", False)
    for end in reports:
        if not end.lost:
            return Verdict(1, end.text or "", False)
    silent = [end for end in ends if end.text is None]
    gone = [end for end in silent if end.exit_code not in (-signal.SIGTERM, *_STOPPED)]
    if asked_to_stop or (not reports and not gone and any(end.exit_code in _STOPPED for end in silent)):
        return Verdict(INTERRUPTED, "\n".join(["interrupted", *map(_how, gone[:1])]), False)
    if not gone:
        return Verdict(1, (reports[0].text or "") if reports else _how(silent[0]), True)
    said = f"\n  {reports[0].text}" if reports else ""
    return Verdict(1, _how(gone[0]) + said, True)


def _how(end: End) -> str:
    if end.exit_code < 0:
        name = signal.Signals(-end.exit_code).name
        why = ": the kernel does this when memory runs out" if end.exit_code == -signal.SIGKILL else ""
        return f"rank {end.rank} was ended by {name}{why}"
    return f"rank {end.rank} ended with exit code {end.exit_code}" + (f":\n{end.log}" if end.log else "")
