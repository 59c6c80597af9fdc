"""What a rank does for the launcher that started it, before and after it trains. Imports no torch.

A launcher of the torchrun family names a file (TORCHELASTIC_ERROR_FILE) where a rank leaves the reason of its end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lamella.errors import RankLost, UserError
from lamella.files import write_json
from lamella.ranks.beats import PULSE, show_error

if TYPE_CHECKING:
    from lamella.config import RunConfig

LAUNCHED = "LAMELLA_LAUNCHED"
"""Environment variable that `lamella train` sets in the ranks it starts."""
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PR_SET_PDEATHSIG = 1


def launched() -> bool:
    """Whether `lamella train` started this rank, and speaks for it."""
    return LAUNCHED in os.environ


def is_restart() -> bool:
    """Whether the launcher (`torchrun --max-restarts`) has started this rank before."""
    return int(os.environ.get(RESTART_COUNT, "0")) > 0


def enter(config: RunConfig) -> None:
    """Make this process the rank that RANK says; before torch is imported, which reads OMP_NUM_THREADS then.

    Raises:
        UserError: another number of `[[devices]]` than of ranks.
    """
    from lamella.ranks.place import place_of

    PULSE.say = say  # when this rank ends itself because others are lost
    place = place_of(config, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if place.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(place.threads)
    if launched():
        # SIGTERM is the agent's answer to another rank's end, of which this rank hears by itself, with more to say
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)  # without its launcher it stops in order


def say(error: UserError) -> None:
    """Show why this rank ends, unless its launcher will."""
    if not leave_report(error):
        show_error(error)


def leave_report(error: UserError) -> bool:
    """Write why this rank ends where the launcher looks for it. True when the launcher will say it."""
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return False
    report = {"exit_code": error.exit_code, "lost": isinstance(error, RankLost), "time_s": time.time()}
    try:
        write_json(Path(path), {"message": error.render(), "timestamp": int(time.time()), "lamella": report})
    except OSError:  # then the rank has to say it itself
        return False
    return launched()
