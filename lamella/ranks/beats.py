"""Signs of life: each rank tells the others what it is doing, and ends when one of them is lost.

A thread puts a `Beat` into the group's TCP store every second and reads the others'; a second thread judges them
(`judge.py`). Two threads, since a store behind a cut link does not answer and its client then waits without end.

A rank that learns that another is lost ends by itself, in one of two ways. Its main thread raises `RunFailed` when it
comes by (`beat`, the start of a collective). But it may be stuck: gloo waits in C++ for a peer that says nothing, takes
no Python exception there, and `abort` of its process group does not wake it; so the watching thread then prints the
message, lets the run write its last words, and leaves with `os._exit`.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import psutil

from lamella.console import err
from lamella.errors import RunFailed, UserError
from lamella.hardware.memory import rss_bytes
from lamella.ranks.judge import Beat, Judge, Verdict
from lamella.ranks.report import leave_report

BEAT_S = 1.0
"""Seconds between beats, at most."""
GRACE_S = 5.0
"""How long a rank that computes has to come by and end in good order, once another is lost."""
LAST_WORDS_S = 30.0
"""How long writing the failed run's receipt may take when the main thread is stuck."""


class Notes(Protocol):
    """What beats need of a `torch.distributed` store."""

    def set(self, key: str, value: str) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


def show_error(error: UserError) -> None:
    if not leave_report(error):
        err.print(f"error: {error.render()}", markup=False)


@dataclass
class Pulse:
    """What this process is doing; written by the main thread, read by the one that tells the others.

    Attributes:
        step: steps completed.
        count: goes up with each piece of work done.
        waits: it waits for other ranks; what for is in `doing`.
        ended: "" while it runs, `judge.DONE`, or the error that ended it.
        blames: the rank that this error is about, if another.
        planned_bytes: what its plan says it takes beyond the program.
        say: shows an error; who starts this process may want it elsewhere than on the terminal.
    """

    step: int = 0
    doing: str = "starting"
    waits: bool = False
    count: int = 0
    ended: str = ""
    blames: int | None = None
    planned_bytes: int = 0
    say: Callable[[UserError], None] = show_error

    def beat(self, step: int | None = None, doing: str = "") -> None:
        if step is not None:
            self.step = step
        if doing:
            self.doing = doing
        self.count += 1


PULSE = Pulse()
"""This process's own."""


def oom_kills() -> int:
    """Processes that the kernel of this host has killed for lack of memory since it started; 0 where it does not say."""
    file = Path("/proc/vmstat")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def pid_space() -> str:
    """Names the set of processes that know each other by the same numbers: those of one container on one running host.
    "" where the system does not tell."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip()} {os.readlink(space)}" if boot.is_file() and space.exists() else ""


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or only waits for its parent to take note."""
    try:
        return str(psutil.Process(pid).status()) == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Beats:
    """This rank's beats and its watch over the others'.

    Args:
        store: this object's own connection; nothing else may use it, since a call on it can wait without end.
        place: of the store, for messages.
        hosts_store: the store lives in this process, so it has to outlive the others' last look at it.
        silence_s, patience_s: see `Judge`.
    """

    def __init__(
        self, rank: int, world: int, store: Notes, place: str, hosts_store: bool, silence_s: float, patience_s: float
    ) -> None:
        self.rank, self.world = rank, world
        self.last_words: Callable[[RunFailed], None] | None = None
        self._store, self._hosts_store = store, hosts_store
        self._keys = [f"beat/{r}" for r in range(world)]
        self._beat_s = min(BEAT_S, silence_s / 10)
        self._grace_s, self._patience_s = min(GRACE_S, silence_s), patience_s
        self._judge = Judge(rank, world, silence_s, patience_s, place)
        self._lock = threading.Lock()
        self._pids = pid_space()
        self._number = 0
        self._answers = 0
        self._verdict: Verdict | None = None
        self._claimed_by: str = ""
        self._wake, self._stop = threading.Event(), threading.Event()
        self._store.set(self._keys[rank], self._own().to_json())

    def start(self) -> None:
        """Begin; every rank must have been built by now (then all first beats are in the store)."""
        for name, target in (("lamella-beats", self._exchange), ("lamella-watch", self._watch)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def hurry(self) -> None:
        """Send a beat now."""
        self._wake.set()

    def check(self) -> None:
        """Raises `RunFailed` when another rank is known to be lost."""
        if self._verdict is not None and not PULSE.ended:
            self.fail(self._verdict)

    def explain(self) -> Verdict | None:
        """Who is to blame for a connection that broke: looks at the beats until they show it; None when they do not."""
        deadline_s = time.monotonic() + 8 * self._beat_s
        while time.monotonic() < deadline_s:
            with self._lock:
                verdict = self._judge.suspect(3 * self._beat_s)
            if verdict is not None:
                return verdict
            self._wake.set()
            time.sleep(self._beat_s / 10)
        return None

    def told(self) -> str:
        """What each of the others said last."""
        with self._lock:
            return self._judge.told()

    def fail(self, verdict: Verdict, cause: BaseException | None = None) -> NoReturn:
        """End the main thread's work with `verdict`; the watching thread will not end the process any more."""
        PULSE.blames = verdict.rank
        self.claim()
        raise verdict.error() from cause

    def claim(self) -> None:
        """The main thread ends the run; waits here without end if the watching thread already does."""
        with self._lock:
            self._claimed_by = self._claimed_by or "main"
        while self._claimed_by != "main":
            time.sleep(1)

    def leave(self, ended: str) -> None:
        """Say goodbye: `judge.DONE`, or the error that ended this rank."""
        PULSE.ended = ended
        with self._lock:
            goodbye = self._number + 1
        most_s = time.monotonic() + 5 * self._beat_s
        while time.monotonic() < most_s and not self._gone_well(goodbye):
            self._wake.set()
            time.sleep(0.02)
        self._stop.set()
        self._wake.set()

    def _gone_well(self, goodbye: int) -> bool:
        """The goodbye is in the store, and nobody needs the store any more if it lives here."""
        with self._lock:
            if self._judge.store_gone:
                return True
            own = self._judge.last[self.rank]
            said = own is not None and own.number >= goodbye
            return said and (not self._hosts_store or self._judge.nobody_listens(3 * self._beat_s))

    def _own(self) -> Beat:
        with self._lock:
            self._number += 1
            number = self._number
        return Beat(
            number=number, progress=PULSE.count, step=PULSE.step, doing=PULSE.doing, waits=PULSE.waits,
            ended=PULSE.ended, blames=PULSE.blames, host=platform.node(), rss_bytes=rss_bytes(),
            planned_bytes=PULSE.planned_bytes,
            free_bytes=int(psutil.virtual_memory().available), oom_kills=oom_kills(), pid=os.getpid(), pids=self._pids,
        )  # fmt: skip

    def _exchange(self) -> None:
        try:
            while not self._stop.is_set():
                self._store.set(self._keys[self.rank], self._own().to_json())
                beats = [Beat.from_json(text) for text in self._store.multi_get(self._keys)]
                gone = [bool(b.pids) and b.pids == self._pids and not b.ended and is_gone(b.pid) for b in beats]
                with self._lock:
                    self._answers += 1
                    self._judge.hear(beats)
                    for rank, missing in enumerate(gone):
                        self._judge.gone(rank, missing)
                if beats[self.rank].ended and not self._hosts_store:
                    return
                self._wake.wait(self._beat_s)
                self._wake.clear()
        except RuntimeError as error:  # torch's way to say that the store's host closed the connection
            with self._lock:
                self._judge.store_gone = str(error).partition("\n")[0] or repr(error)

    def _watch(self) -> None:
        before_s, answers, lost_s = time.monotonic(), 0, 0.0
        while not self._stop.wait(self._beat_s):
            now_s = time.monotonic()
            passed_s = min(now_s - before_s, 2 * self._beat_s)  # time in which this process was frozen is not counted
            before_s = now_s
            with self._lock:
                self._judge.pass_time(passed_s, self._answers != answers)
                answers = self._answers
                verdict = self._judge.verdict()
            if verdict is None or PULSE.ended:
                self._verdict, lost_s = None, 0.0
                continue
            self._verdict = verdict
            lost_s += passed_s
            if lost_s > self._bearable_s(verdict):
                self._end(verdict)

    def _bearable_s(self, verdict: Verdict) -> float:
        """How long the main thread may take to come by and end in good order."""
        if PULSE.waits:
            return 0.0 if verdict.at_once else self._grace_s
        return self._grace_s if verdict.at_once else self._patience_s

    def _end(self, verdict: Verdict) -> None:
        with self._lock:
            self._claimed_by = self._claimed_by or "watch"
        if self._claimed_by != "watch":
            self._stop.wait(self._beat_s)
            return
        PULSE.ended, PULSE.blames = verdict.what, verdict.rank
        self._wake.set()  # tell the others
        error = verdict.error()
        PULSE.say(error)
        if self.last_words is not None:
            words = threading.Thread(target=self.last_words, args=(error,), daemon=True)
            words.start()
            words.join(LAST_WORDS_S)
        err.show_cursor(True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)  # the main thread is stuck where no exception reaches it
