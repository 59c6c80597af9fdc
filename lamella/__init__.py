"""Lamella fine-tunes language models that do not fit, one thin layer at a time."""

import os

__version__ = "0.1.0"

# Read once, when torch loads its thread pool. OpenMP threads that wait spin for long by default: with one other busy
# process on the machine that makes a training step 9 times slower; threads that sleep at once cost 60 % on an idle one.
# 10,000 spins cost 5 % idle and a third of the damage when busy (figures in docs/log.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
