"""LoRA of several adapters on a few rows in one call: the C kernel's interface.

bf16 or fp32 on a CPU with AVX-512 BF16. What a row gets does not depend on the other rows, nor on threads. Where rows are
many, or on other machines, callers multiply run by run (`models/several.py`).

Shape suffixes: N rows, I inputs, O outputs, r rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lamella import kernels
from lamella.kernels import build, library

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
RANK_MAX = 1024
MOST_ROWS = 32
"""Of one adapter: more are faster as a matmul."""

Run = tuple[int, int, Tensor | None, Tensor | None, float]
"""First row, end, A [r, I] and B [O, r] (None: zeros), scale."""


class _Run(ctypes.Structure):
    """`lora_run` of cpu/lora_rows.c."""

    _fields_ = [
        ("a", c_void_p), ("b", c_void_p), ("rank", c_int64), ("b_out", c_int64), ("b_rank", c_int64), ("scale", c_float),
    ]  # fmt: skip


class _Job(ctypes.Structure):
    """`lora_job` of cpu/lora_rows.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "y", "runs", "run_of")),
        *((name, c_int64) for name in ("x_row", "y_row", "inputs", "outputs")), ("dtype", c_int),
    ]  # fmt: skip


@cache
def _lib() -> ctypes.CDLL | None:
    if kernels.backend() != "c-avx512":
        return None
    lib = library.load(build.find() or build.build())
    lib.lamella_lora_rows.argtypes = [ctypes.POINTER(_Job), c_int64, c_int]
    return lib if lib.lamella_lora_rows_supported() else None


def takes(x_NI: Tensor, lengths: Sequence[int] = (1,), rank: int = 1) -> bool:
    """Whether the kernel works on such rows, and pays: runs of these lengths, pairs up to this rank."""
    fits = x_NI.device.type == "cpu" and x_NI.dtype in DTYPES and rank <= RANK_MAX
    return fits and 0 < max(lengths, default=0) <= MOST_ROWS and _lib() is not None


def lora_rows(x_NI: Tensor, runs: Sequence[Run], y_NO: Tensor) -> None:
    """Write scale (x A^T) B^T into y, every run of rows with its own pair.

    Args:
        x_NI, y_NO: of one dtype, contiguous along their last axis.
        runs: of all rows, one after the other; A contiguous, B contiguous along one of its axes.
    """
    lib = _lib()
    assert lib is not None and x_NI.dtype == y_NO.dtype and x_NI.stride(1) == y_NO.stride(1) == 1
    rows, inputs = x_NI.shape
    outputs = y_NO.shape[1]
    given = (_Run * len(runs))()
    run_of = np.empty(rows, dtype=np.int32)
    at = 0
    for n, (first, end, a, b, scale) in enumerate(runs):
        assert first == at
        run_of[first:end] = n
        at = end
        if a is None or b is None:
            continue
        rank = a.shape[0]
        assert a.shape == (rank, inputs) and b.shape == (outputs, rank) and rank <= RANK_MAX
        assert a.is_contiguous() and 1 in b.stride() and a.dtype == b.dtype == x_NI.dtype
        given[n] = _Run(a.data_ptr(), b.data_ptr(), rank, b.stride(0), b.stride(1), scale)
    assert at == rows
    job = _Job(x_NI.data_ptr(), y_NO.data_ptr(), ctypes.addressof(given), run_of.ctypes.data, x_NI.stride(0),
               y_NO.stride(0), inputs, outputs, DTYPES[x_NI.dtype])  # fmt: skip
    status = lib.lamella_lora_rows(ctypes.byref(job), rows, torch.get_num_threads())
    assert status == 0
