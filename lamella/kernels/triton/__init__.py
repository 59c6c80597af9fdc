"""Triton kernels for CUDA tensors; imported only for those, or for CPU tensors under `TRITON_INTERPRET=1`.

Each has a plain-torch twin: `kernels/reference.py` for NF4 and dropout masks, `twins.py` for the others.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache


@cache
def missing() -> str | None:
    """Why these kernels cannot be used here, or None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, on the CPU (for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"
