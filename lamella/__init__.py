"""Lamella fine-tunes language models that do not fit, one thin layer at a time."""

import os

__version__ = "0.1.0"

# Read once, when torch loads its thread pool. By default idle OpenMP threads spin; with one other busy process on the
# machine that made a training step 15 times slower (docs/log.md). Threads that sleep cost nothing there.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
