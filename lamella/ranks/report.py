"""Why a rank ends, left where the launcher that started it looks for it. Imports no torch.

A launcher of the torchrun family names a file for it: TORCHELASTIC_ERROR_FILE.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from lamella.console import err
from lamella.errors import RankLost, UserError
from lamella.files import write_json

LAUNCHED = "LAMELLA_LAUNCHED"
"""Environment variable that `lamella train` sets in the ranks it starts."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def launched() -> bool:
    """Whether `lamella train` started this rank, and speaks for it."""
    return LAUNCHED in os.environ


def leave_report(error: UserError) -> bool:
    """Write why this rank ends for its launcher. True when the launcher will say it; else the rank has to."""
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return False
    report = {"exit_code": error.exit_code, "lost": isinstance(error, RankLost), "time_s": time.time()}
    try:
        write_json(Path(path), {"message": error.render(), "timestamp": int(time.time()), "lamella": report})
    except OSError:
        return False
    return launched()


def say(error: UserError) -> None:
    """Show why this rank ends, unless its launcher will."""
    if not leave_report(error):
        err.print(f"error: {error.render()}", markup=False)
