"""Triton kernels in Triton's interpreter, on CPU tensors (`TRITON_INTERPRET=1`, set by `tests/conftest.py` where no GPU is).

The interpreter rounds to bf16 wrongly and computes bf16 sums and dots wrongly, so bf16 is tested here only where its bits
are made in integers; the rest of it in `tests/engine/test_cuda.py`, on a GPU.
"""

import importlib.util
import os

import pytest


def need_interpreter() -> None:
    """Skip the calling module where Triton cannot run on CPU tensors."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed", allow_module_level=True)
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a CUDA device is here: run with TRITON_INTERPRET=1", allow_module_level=True)
