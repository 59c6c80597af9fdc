"""Starts all ranks, and starts them again when one was lost; how they are started is the launcher's matter.

Bad input and failed runs end at once, with one message. A lost rank (killed, crashed, silent) ends all, and all go on
from the last checkpoint, `launch.restarts` times at most.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from lamella.config import RunConfig
from lamella.console import notice
from lamella.errors import RunFailed, UserError
from lamella.launch.verdict import INTERRUPTED, End, decide

Mode = Literal["auto", "resume", "fresh"]
Attempt = Callable[[Mode], tuple[list[End], bool]]
"""Runs all ranks to their end. Returns the ends that were not good, and whether the user asked to stop."""


def supervise(config: RunConfig, mode: Mode, attempt: Attempt) -> None:
    """Run all ranks until they are done.

    Args:
        mode: as of `train_run`; given until the run has begun, so that a later start goes on from its checkpoints.

    Raises:
        UserError: bad input, found by any rank.
        RunFailed: the run failed, or ranks were lost more often than `launch.restarts`.
        KeyboardInterrupt: stopped by a signal, after saving.
    """
    restarts, begun = config.launch.restarts, config.runs_dir / config.name / "config.json"
    before = _version(begun)
    for count in range(restarts + 1):
        ends, asked_to_stop = attempt(mode if _version(begun) == before else "auto")
        if not ends:
            return
        verdict = decide(ends, asked_to_stop)
        if verdict.exit_code == INTERRUPTED:
            for line in verdict.text.splitlines()[1:]:
                notice(line)
            raise KeyboardInterrupt
        if verdict.exit_code == 2:
            raise UserError(verdict.text)
        if not verdict.again:
            raise RunFailed(verdict.text)
        if count < restarts:
            notice(f"{verdict.text}\nstarting all ranks again ({count + 1} of {restarts} restarts)")
    raise RunFailed(verdict.text, fix=f"gave up after {restarts} restarts; when the cause is gone, go on with --resume")


def _version(path: Path) -> tuple[int, int] | None:
    """Changes whenever the file is written anew."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
