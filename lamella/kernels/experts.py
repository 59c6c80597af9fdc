"""Gated experts on packed NF4 weights: the C kernels' interface.

Written for bf16 on CPUs with AVX-512 BF16; AMX tiles are used where there are any. Weights are undone a panel at a time
inside the kernel and never stand in memory. `lamella/models/experts.py` is the caller; shape suffixes as there.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lamella.errors import UserError
from lamella.kernels import build
from lamella.kernels.library import load

ROUTES = ("amx", "avx512-bf16")
COLUMNS = 64
"""Hidden and inner sizes must be multiples of this."""
PARTS = 7
"""Numbers that say where a matrix lies: codes, absmax (-1: double quantised), absmax_q, absmax_code, absmax2, offset (byte
offsets in the layer's buffer) and its first block's number."""


class _Job(ctypes.Structure):
    """Mirrors `experts_job` in cpu/experts.h."""

    _fields_ = [
        *((name, c_int64) for name in ("amx", "threads", "tokens", "hidden", "inner", "experts", "rank1", "rank2")),
        *((name, c_void_p) for name in ("base", "matrices", "x", "offsets", "token", "a1", "b1", "a2", "b2")),
        ("scale1", c_double), ("scale2", c_double),
        *((name, c_void_p) for name in ("gate", "up", "xa1", "xa2", "y", "dout", "weight", "dx", "dweight",
                                        "da1", "db1", "da2", "db2")),
    ]  # fmt: skip


@cache
def route() -> str | None:
    """`amx`, `avx512-bf16`, or None where the kernels cannot run (or `LAMELLA_KERNELS` asks for others).

    `LAMELLA_EXPERTS` picks one by name, or `torch` for none.

    Raises:
        UserError: the one asked for is unknown or cannot run here.
    """
    asked = os.environ.get("LAMELLA_EXPERTS", "")
    if asked not in ("", "torch", *ROUTES):
        raise UserError(
            f"unknown expert kernels {asked!r}", fix=f"set LAMELLA_EXPERTS to one of torch, {', '.join(ROUTES)}"
        )
    if asked == "torch" or (not asked and os.environ.get("LAMELLA_KERNELS", "") not in ("", "c-avx512")):
        return None
    try:
        lib = _library()
    except (build.CompileError, OSError):
        if asked:
            raise
        return None  # `lamella.kernels` has said so already
    can = {"avx512-bf16": bool(lib.lamella_experts_built() and lib.lamella_has_avx512_bf16())}
    can["amx"] = can["avx512-bf16"] and bool(lib.lamella_has_amx_bf16())
    if asked and not can[asked]:
        raise UserError(f"this machine cannot run expert kernels {asked!r}", fix="unset LAMELLA_EXPERTS")
    return asked or next((name for name in ROUTES if can[name]), None)


@cache
def _library() -> ctypes.CDLL:
    lib = load(build.find() or build.build())
    for function in (lib.lamella_experts_forward, lib.lamella_experts_backward):
        function.argtypes = [ctypes.POINTER(_Job)]
    lib.lamella_experts_scratch.argtypes = [ctypes.POINTER(_Job), ctypes.c_int]
    lib.lamella_experts_scratch.restype = c_int64
    lib.lamella_experts_route.argtypes = [*[c_void_p] * 2, *[c_int64] * 5, *[c_void_p] * 4]
    lib.lamella_experts_combine.argtypes = [*[c_void_p] * 4, *[c_int64] * 3, ctypes.c_int]
    return lib


@dataclass(frozen=True)
class Lora:
    """One pair on all experts: a [E, r, I], b [E, O, r], bf16."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class PackedExperts:
    """Where a layer's expert weights lie.

    Attributes:
        buffer: uint8, the layer's packed bytes.
        table: int64 [E, 3, PARTS]: gate, up [I, H] and down [H, I] of each expert.
        hidden, inner: H and I, multiples of 64.
        blank: no weights are there: outputs are made and left as they are (their memory is looked at, not their values).
    """

    buffer: Tensor
    table: Tensor
    hidden: int
    inner: int
    blank: bool = False


@dataclass(frozen=True)
class Saved:
    """What forward keeps for backward: gate and up projections [S, I] (columns in the kernel's order) and x A^T."""

    gate: Tensor
    up: Tensor
    xa1: Tensor | None
    xa2: Tensor | None


@dataclass(frozen=True)
class Routing:
    """Tokens sorted by expert: S = T K rows, fewer where some experts are another rank's.

    Attributes:
        offsets_E: int32 [E + 1], first row of each expert.
        token_S: int32 [S], token of each row.
        slot_TK: int32 [T, K], row of each (token, choice), or -1.
        weight_S: fp32 [S], routing weight of each row.
    """

    offsets_E: Tensor
    token_S: Tensor
    slot_TK: Tensor
    weight_S: Tensor


def sort_by_expert(
    index_TK: Tensor, weight_TK: Tensor, experts: int, first: int = 0, total: int | None = None
) -> Routing:
    """Stable counting sort of a router's choices.

    Args:
        index_TK: int64 [T, K], contiguous.
        weight_TK: fp32 [T, K], contiguous.
        experts, first: rows are made for `experts` experts from `first` on; choices of others get none.
        total: how many the router chooses from; None: `first + experts`.
    """
    assert index_TK.dtype == torch.int64
    assert index_TK.is_contiguous()
    assert weight_TK.dtype == torch.float32
    assert weight_TK.is_contiguous()
    total = first + experts if total is None else total
    tokens, per_token = index_TK.shape
    offsets_E, token_S = torch.empty(experts + 1, dtype=torch.int32), torch.empty(index_TK.numel(), dtype=torch.int32)
    slot_TK, weight_S = (
        torch.empty(tokens, per_token, dtype=torch.int32),
        torch.empty(index_TK.numel(), dtype=torch.float32),
    )
    if _library().lamella_experts_route(
        index_TK.data_ptr(), weight_TK.data_ptr(), index_TK.numel(), per_token, first, experts, total,
        *(t.data_ptr() for t in (offsets_E, token_S, slot_TK, weight_S)),
    ):  # fmt: skip
        raise IndexError(f"router chose an expert outside 0 .. {total - 1}")
    rows = int(offsets_E[-1])
    return Routing(offsets_E, token_S[:rows], slot_TK, weight_S[:rows])


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _job(weights: PackedExperts, x_TH: Tensor, routing: Routing, lora1: Lora | None, lora2: Lora | None) -> _Job:
    assert x_TH.dtype == torch.bfloat16
    assert x_TH.is_contiguous()
    assert x_TH.shape[1] == weights.hidden
    assert weights.hidden % COLUMNS == 0
    assert weights.inner % COLUMNS == 0
    job = _Job(
        amx=route() == "amx", threads=torch.get_num_threads(), tokens=x_TH.shape[0], hidden=weights.hidden,
        inner=weights.inner, experts=weights.table.shape[0], base=weights.buffer.data_ptr(),
        matrices=weights.table.data_ptr(), x=x_TH.data_ptr(), offsets=routing.offsets_E.data_ptr(),
        token=routing.token_S.data_ptr(),
    )  # fmt: skip
    for number, lora, inputs, outputs in (
        ("1", lora1, weights.hidden, 2 * weights.inner),
        ("2", lora2, weights.inner, weights.hidden),
    ):
        if lora is not None:
            rank = lora.a.shape[1]
            assert tuple(lora.a.shape[1:]) == (rank, inputs)
            assert tuple(lora.b.shape[1:]) == (outputs, rank)
            assert lora.a.is_contiguous()
            assert lora.b.is_contiguous()
            assert lora.a.dtype == lora.b.dtype == torch.bfloat16
            for field, value in (
                ("rank", rank),
                ("a", _pointer(lora.a)),
                ("b", _pointer(lora.b)),
                ("scale", lora.scale),
            ):
                setattr(job, field + number, value)
    return job


def _call(function: ctypes._FuncPointer, job: _Job) -> None:
    if function(ctypes.byref(job)):
        raise MemoryError("no memory for the expert kernels' scratch")


def scratch_bytes(hidden: int, inner: int, rank1: int, rank2: int) -> int:
    """Bytes that each thread keeps for backward, from call to call."""
    job = _Job(hidden=hidden, inner=inner, rank1=rank1, rank2=rank2)
    return int(_library().lamella_experts_scratch(ctypes.byref(job), 1))


def forward(
    weights: PackedExperts,
    x_TH: Tensor,
    routing: Routing,
    y_SH: Tensor,
    lora1: Lora | None,
    lora2: Lora | None,
    keep: bool,
) -> Saved | None:
    """y[s] = down(silu(gate x) * up x) of row s's expert, with LoRA, for x = x_TH[token_S[s]].

    Args:
        x_TH: bf16 [T, H].
        y_SH: bf16 [S, H], written.
        lora1, lora2: on gate and up together, and on down.
        keep: return what backward needs.
    """
    rows = routing.token_S.shape[0]
    job = _job(weights, x_TH, routing, lora1, lora2)
    job.y = y_SH.data_ptr()
    saved = None
    if keep:
        saved = Saved(
            x_TH.new_empty(rows, weights.inner), x_TH.new_empty(rows, weights.inner),
            None if lora1 is None else x_TH.new_empty(rows, lora1.a.shape[1]),
            None if lora2 is None else x_TH.new_empty(rows, lora2.a.shape[1]),
        )  # fmt: skip
        job.gate, job.up, job.xa1, job.xa2 = map(_pointer, (saved.gate, saved.up, saved.xa1, saved.xa2))
    if not weights.blank:
        _call(_library().lamella_experts_forward, job)
    return saved


def backward(
    weights: PackedExperts, x_TH: Tensor, routing: Routing, saved: Saved, dout_TH: Tensor, lora1: Lora | None,
    lora2: Lora | None, dx_SH: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Gradients for out[t] = sum of weight_S[s] * y[s] over t's rows.

    Args:
        dout_TH: bf16 [T, H].
        dx_SH: bf16 [S, H], written: gradient at each row's input; None when not needed.

    Returns:
        gradient of weight_S, fp32 [S]; and those of the LoRA pairs that are there: a1, b1, a2, b2.
    """
    assert dout_TH.is_contiguous()
    assert dout_TH.dtype == torch.bfloat16
    job = _job(weights, x_TH, routing, lora1, lora2)
    dweight_S = torch.empty_like(routing.weight_S)
    gradients = [torch.empty_like(t) for lora in (lora1, lora2) if lora is not None for t in (lora.a, lora.b)]
    job.dout, job.weight, job.dweight = dout_TH.data_ptr(), routing.weight_S.data_ptr(), dweight_S.data_ptr()
    job.dx = _pointer(dx_SH)
    job.gate, job.up, job.xa1, job.xa2 = map(_pointer, (saved.gate, saved.up, saved.xa1, saved.xa2))
    names = [
        name for lora, pair in ((lora1, ("da1", "db1")), (lora2, ("da2", "db2"))) if lora is not None for name in pair
    ]
    for name, gradient in zip(names, gradients, strict=True):
        setattr(job, name, gradient.data_ptr())
    if not weights.blank:
        _call(_library().lamella_experts_backward, job)
    return dweight_S, gradients


def combine(y_SH: Tensor, slot_TK: Tensor, weight_TK: Tensor | None, rows: int | None = None) -> Tensor:
    """out[t] = sum over k of weight[t, k] (or 1) * y[slot[t, k]], slots of -1 left out; summed in fp32 in the order of k;
    bf16 [T, H], or [rows, H] with zeros after the T."""
    assert slot_TK.dtype == torch.int32
    tokens, per_token = slot_TK.shape
    out_TH = y_SH.new_empty(tokens if rows is None else rows, y_SH.shape[1])
    out_TH[tokens:] = 0
    _library().lamella_experts_combine(
        y_SH.data_ptr(), slot_TK.data_ptr(), _pointer(weight_TK), out_TH.data_ptr(), tokens, y_SH.shape[1], per_token,
        torch.get_num_threads(),
    )  # fmt: skip
    return out_TH
