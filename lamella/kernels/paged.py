"""Attention of one new token per row to a cache in blocks: the C kernel's interface and its plain-torch twin.

The kernel reads keys and values where they lie (bf16 or fp32 on a CPU with AVX-512 BF16) and sums in fp32; its bits depend
neither on threads nor on what other rows there are.

Shape suffixes: B rows, H heads, K kv heads, D key size, V value size, n blocks of a row, L length.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from lamella import kernels
from lamella.kernels import build, library

DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Job(ctypes.Structure):
    """`paged_job` of cpu/paged.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "keys", "values", "out", "table", "low", "position", "sinks")),
        *((name, c_int64) for name in ("q_row", "q_head", "width", "block", "heads", "kv_heads", "size", "value_size",
                                       "longest")),
        ("scale", c_float), ("softcap", c_float), ("dtype", c_int),
    ]  # fmt: skip


@cache
def _lib() -> ctypes.CDLL | None:
    if kernels.backend() != "c-avx512":
        return None
    lib = library.load(build.find() or build.build())
    lib.lamella_paged_attend.argtypes = [ctypes.POINTER(_Job), c_int64, c_int, c_void_p]
    return lib if lib.lamella_paged_supported() else None


def takes(q_BHD: Tensor) -> bool:
    """Whether the kernel computes attention of such queries."""
    return q_BHD.device.type == "cpu" and q_BHD.dtype in DTYPES and _lib() is not None


def attend(
    q_BHD: Tensor, keys: Tensor, values: Tensor, table_Bn: Tensor, lows: Sequence[int], positions: Sequence[int],
    block: int, scale: float, softcap: float | None = None, sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[B, H, V]: each row's token sees its keys lows[b] .. positions[b].

    Args:
        keys, values: [slots, K, D] and [slots, K, V], contiguous, of q's dtype; K divides H.
        table_Bn: int32, the row's blocks: position p lies in slot table[b, p // block] * block + p % block.
    """
    (rows, heads, size), (_, kv_heads, value_size) = q_BHD.shape, values.shape
    lib = _lib()
    assert lib is not None
    assert keys.is_contiguous() and values.is_contiguous() and keys.dtype == values.dtype == q_BHD.dtype
    assert keys.shape[1:] == (kv_heads, size) and heads % kv_heads == 0 and table_Bn.dtype == torch.int32
    assert max(positions) // block < table_Bn.shape[1]
    q_BHD = q_BHD if q_BHD.stride(2) == 1 else q_BHD.contiguous()
    table_Bn = table_Bn.contiguous()
    out = q_BHD.new_empty(rows, heads, value_size)
    low_B, position_B = torch.tensor(lows), torch.tensor(positions)
    sinks = None if sinks_H is None else sinks_H.float().contiguous()
    longest = max(p - low + 1 for low, p in zip(lows, positions, strict=True))
    threads = torch.get_num_threads()
    scratch = torch.empty(threads, heads // kv_heads, longest, dtype=torch.float32)
    job = _Job(
        q=q_BHD.data_ptr(), keys=keys.data_ptr(), values=values.data_ptr(), out=out.data_ptr(), table=table_Bn.data_ptr(),
        low=low_B.data_ptr(), position=position_B.data_ptr(), sinks=None if sinks is None else sinks.data_ptr(),
        q_row=q_BHD.stride(0), q_head=q_BHD.stride(1), width=table_Bn.shape[1], block=block, heads=heads,
        kv_heads=kv_heads, size=size, value_size=value_size, longest=longest, scale=scale, softcap=softcap or 0.0,
        dtype=DTYPES[q_BHD.dtype],
    )  # fmt: skip
    status = lib.lamella_paged_attend(ctypes.byref(job), rows, threads, scratch.data_ptr())
    assert status == 0
    return out


def reference(
    q_BHD: Tensor, k_BKLD: Tensor, v_BKLV: Tensor, seen_BL: Tensor, scale: float, softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[B, H, V]: the same in plain torch, on keys and values gathered by row."""
    rows, heads, size = q_BHD.shape
    kv_heads = k_BKLD.shape[1]
    scores = (
        torch.matmul(q_BHD.reshape(rows, kv_heads, heads // kv_heads, size), k_BKLD.transpose(2, 3)).float() * scale
    )
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen_BL[:, None, None, :], float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, kv_heads, -1, 1).expand(rows, -1, -1, 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights.to(v_BKLV.dtype), v_BKLV).reshape(rows, heads, -1)
