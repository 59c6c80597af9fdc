"""Python's cycle collector while a command starts.

Imports and a large store's manifest make a million objects that stay. The collector's defaults look through them again and
again: a fifth of the start of a run on a model of 94 layers with 128 experts. Long work gets the
defaults back.
"""

from __future__ import annotations

import gc

DEFAULTS = gc.get_threshold()
STARTING = (100_000, 20, 50)
"""Thresholds of the three generations while a command starts."""


def quiet_start() -> None:
    """Let the collector run seldom from now on."""
    gc.set_threshold(*STARTING)


def settle() -> None:
    """End of a quiet start: collect as before. A program that set thresholds of its own keeps them."""
    if gc.get_threshold() == STARTING:
        gc.set_threshold(*DEFAULTS)
