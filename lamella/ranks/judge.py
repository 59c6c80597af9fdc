"""Who is lost: judged from the beats of all ranks. No threads, no clock; time is told.

Clocks of hosts differ, so a rank's silence is the time in which its beats, as seen here, did not change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lamella.errors import RankLost, RunFailed
from lamella.units import format_bytes, format_seconds

DONE = "done"
_LOW_MEMORY = 0.05


@dataclass(frozen=True)
class Beat:
    """One sign of life.

    Attributes:
        number: counts this rank's beats.
        progress: goes up with each piece of work done.
        step: steps completed.
        doing: what it is at; for a rank that `waits`, what for.
        ended: "" while it runs, `DONE`, or the error that ended it.
        blames: the rank that this error is about, if another.
        oom_kills: processes the kernel of `host` has killed for lack of memory.
        planned_bytes: what its plan says it takes beyond the program; 0: not said.
        pid, pids: its process, and which processes know it by that number.
    """

    number: int
    progress: int
    step: int
    doing: str
    waits: bool
    ended: str = ""
    blames: int | None = None
    host: str = ""
    rss_bytes: int = 0
    free_bytes: int = 0
    oom_kills: int = 0
    planned_bytes: int = 0
    pid: int = 0
    pids: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> Beat:
        return cls(**json.loads(text))

    def told(self) -> str:
        if self.ended:
            return f"step {self.step} done, ended" if self.ended == DONE else f"step {self.step} done, failed"
        return f"step {self.step} done, {self.doing}"


@dataclass(frozen=True)
class Verdict:
    """Why this rank cannot go on.

    Attributes:
        rank: whose fault it is; None: not known.
        at_once: the others will not tell by themselves. (A rank that fails does: it takes part in the step's sums once
            more, and whoever computes learns of it there.)
        lost: a rank is gone or silent, not failed: all started again may go on.
    """

    rank: int | None
    what: str
    fix: str
    at_once: bool = True
    lost: bool = True

    def error(self) -> RunFailed:
        return (RankLost if self.lost else RunFailed)(self.what, fix=self.fix)


class Judge:
    """Keeps the last beats and how long nothing changed.

    Args:
        silence_s: a rank without a beat for longer is lost.
        patience_s: a rank that makes no progress for longer while another waits is stuck.
        place: of the store, for messages.
    """

    def __init__(self, rank: int, world: int, silence_s: float, patience_s: float, place: str) -> None:
        self.rank, self.world = rank, world
        self.silence_s, self.patience_s, self.place = silence_s, patience_s, place
        self.last: list[Beat | None] = [None] * world
        self.store_gone = ""
        self._silent_s = [0.0] * world
        self._still_s = [0.0] * world
        self._gone = [0] * world
        self._no_answer_s = 0.0
        self._first_kills: dict[str, int] = {}

    def hear(self, beats: Sequence[Beat]) -> None:
        """Take what the store holds now, by rank."""
        for r, beat in enumerate(beats):
            old = self.last[r]
            if old is None or beat.number != old.number:
                self._silent_s[r] = 0.0
            if old is None or (beat.progress, beat.step, beat.waits) != (old.progress, old.step, old.waits):
                self._still_s[r] = 0.0
            self.last[r] = beat
            self._first_kills.setdefault(beat.host, beat.oom_kills)

    def gone(self, rank: int, is_gone: bool) -> None:
        """Whether this rank's process is there no more, when it had not ended by its last beat. It counts when seen twice:
        the goodbye may have come between the beat and the look."""
        self._gone[rank] = self._gone[rank] + 1 if is_gone else 0

    def pass_time(self, seconds: float, answered: bool) -> None:
        """`seconds` went by, in which the store answered or not. Silence of others counts while it does."""
        self._no_answer_s = 0.0 if answered else self._no_answer_s + seconds
        for r in range(self.world):
            self._still_s[r] += seconds
            if answered:
                self._silent_s[r] += seconds

    def nobody_listens(self, silence_s: float) -> bool:
        """All others have ended, or give no sign of life for `silence_s`."""
        return all(beat.ended or self._gone[r] > 1 or self._silent_s[r] > silence_s for r, beat in self._others())

    def verdict(self) -> Verdict | None:
        """What ends this rank now, if anything."""
        failed = self._failed()
        if failed is not None:
            return failed
        if self._no_answer_s > self.silence_s:
            return self._store_lost()
        return self._lost(self.silence_s) or self._stuck()

    def suspect(self, silence_s: float) -> Verdict | None:
        """Who is behind a connection that broke: as `verdict`, but a short silence is enough."""
        failed = self._failed()
        if failed is not None:
            return failed
        return self._store_lost() if self.store_gone else self._lost(silence_s)

    def told(self) -> str:
        return "; ".join(
            f"rank {r}: {beat.told()}" for r, beat in enumerate(self.last) if r != self.rank and beat is not None
        )

    def _others(self) -> list[tuple[int, Beat]]:
        return [(r, beat) for r, beat in enumerate(self.last) if r != self.rank and beat is not None]

    def _failed(self) -> Verdict | None:
        """Another rank ended with an error: its own goes before one about a third rank."""
        failed = [(r, beat) for r, beat in self._others() if beat.ended not in ("", DONE)]
        if not failed:
            return None
        r, beat = min(failed, key=lambda pair: (pair[1].blames is not None, pair[0]))
        what, _, fix = beat.ended.partition("\n  fix: ")
        if beat.blames is not None:
            return Verdict(beat.blames, f"{what} (seen by rank {r})", fix, at_once=beat.blames == self.rank)
        return Verdict(r, f"rank {r} failed after step {beat.step}: {what}", fix, at_once=False, lost=False)

    def _lost(self, silence_s: float) -> Verdict | None:
        there = [(r, beat) for r, beat in self._others() if not beat.ended]
        gone = [(r, beat) for r, beat in there if self._gone[r] > 1]
        silent = gone or [(r, beat) for r, beat in there if self._silent_s[r] > silence_s]
        if not silent:
            return None
        r, beat = max(silent, key=lambda pair: self._silent_s[pair[0]])
        how = f"its process {beat.pid} is gone" if gone else f"no sign of life for {self._silent_s[r]:.0f} s"
        more = [str(other) for other, _ in silent if other != r]
        also = f" (and rank {', '.join(more)})" if more else ""
        return Verdict(
            r,
            f"rank {r}{also} is lost: {how}. Its last completed step is "
            f"{beat.step}; after that: {beat.doing}{self._memory(beat)}",
            f"look at the log and the host ({beat.host}) of rank {r}, then go on with --resume; "
            "LAMELLA_SILENCE_S sets how long a silence is borne",
        )

    def _stuck(self) -> Verdict | None:
        """A rank that does nothing while another has waited as long."""
        beats = [(r, beat) for r, beat in enumerate(self.last) if beat is not None and not beat.ended]
        still = [(r, beat) for r, beat in beats if self._still_s[r] > self.patience_s]
        waiting = [r for r, beat in still if beat.waits]
        stuck = [(r, beat) for r, beat in still if not beat.waits]
        if not waiting or not stuck:
            return None
        r, beat = stuck[0]
        this = " (this one)" if r == self.rank else ""
        return Verdict(
            r,
            f"rank {r}{this} makes no progress: {format_seconds(self._still_s[r])} at the same place while rank "
            f"{waiting[0]} waits. Its last completed step is {beat.step}; after that: {beat.doing}",
            f"look at rank {r} on {beat.host}, then go on with --resume; LAMELLA_RANK_TIMEOUT_S sets how long a rank "
            "may keep others waiting",
        )

    def _store_lost(self) -> Verdict:
        others = self._others()
        host = next((beat.host for r, beat in others if r == 0), "?")
        how = f"is gone ({self.store_gone})" if self.store_gone else f"has not answered for {self._no_answer_s:.0f} s"
        return Verdict(
            None if self.rank == 0 else 0,
            f"rank {self.rank} has lost the others: the store at {self.place}, where ranks leave their signs of life, {how}. "
            f"Last heard of rank 0's host ({host}): {self.told()}",
            "see whether that host runs and can be reached, then go on with --resume; LAMELLA_SILENCE_S sets how long "
            "a silence is borne",
        )

    def _memory(self, beat: Beat) -> str:
        """Signs that the kernel killed it for lack of memory."""
        planned = f" ({format_bytes(beat.planned_bytes)} beyond the program were planned)" if beat.planned_bytes else ""
        now = max((other.oom_kills for other in self.last if other is not None and other.host == beat.host), default=0)
        if now > self._first_kills.get(beat.host, now):
            return (
                f". It probably ran out of memory: the kernel of {beat.host} has killed a process for that meanwhile "
                f"(rank held {format_bytes(beat.rss_bytes)}){planned}"
            )
        if beat.free_bytes < _LOW_MEMORY * (beat.free_bytes + beat.rss_bytes):
            return (
                f". It probably ran out of memory: it held {format_bytes(beat.rss_bytes)}, and "
                f"{format_bytes(beat.free_bytes)} were left on {beat.host}{planned}"
            )
        return ""
