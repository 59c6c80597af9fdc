"""Makes a process the rank that its launcher meant it to be. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import signal

from lamella.config import RunConfig
from lamella.ranks.beats import PULSE
from lamella.ranks.place import place_of
from lamella.ranks.report import launched, say

_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
_PR_SET_PDEATHSIG = 1


def is_restart() -> bool:
    """Whether the launcher (`torchrun --max-restarts`) has started this rank before."""
    return int(os.environ.get(_RESTART_COUNT, "0")) > 0


def enter(config: RunConfig) -> None:
    """Be rank RANK of WORLD_SIZE; before torch is imported, which reads OMP_NUM_THREADS then.

    Raises:
        UserError: another number of `[[devices]]` than of ranks.
    """
    # torch's store prints stack traces when its host ends; what that means is ours to say
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    PULSE.say = say  # when this rank ends itself because others are lost
    place = place_of(config, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if place.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(place.threads)
    if launched():
        # SIGTERM is the agent's answer to another rank's end, of which this rank hears by itself, with more to say
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)  # without its launcher it stops in order
