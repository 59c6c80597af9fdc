"""Causal attention over packed sequences by the C kernels, forward and backward: bf16 on x86-64 CPUs with AVX-512.

Three ways to compute the products: AMX tiles, bf16 dot products, or fp32 multiply-adds; the best this machine has is
taken, `LAMELLA_ATTENTION` forces one (`amx`, `avx512-bf16`, `avx512`), and `torch` switches all of this off. The
algorithm and the memory layouts are told in `cpu/attention.h`. Results depend neither on the number of threads nor on
what else stands in the batch.

Shape suffixes: T tokens, H heads, K kv heads, D head size, V value size.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lamella import kernels
from lamella.errors import UserError
from lamella.kernels import build, library

IMPLEMENTATIONS = {"amx": 2, "avx512-bf16": 1, "avx512": 0}
HEAD_MAX, CHUNK = 256, 32
FORWARD_BLOCK = 2  # chunks of queries, as in cpu/attention.h
WANTED_GRAINS = 8
"""Backward has a grain of work per sequence and kv head; a long sequence with fewer kv heads is cut further."""
UNDIVIDED = 16
"""Chunks of keys up to which a sequence is not cut."""


class _Strided(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("head", c_int64), ("token", c_int64)]


_STRIDED = ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")
_POINTERS = ("lse", "visible_until", "position", "chunks", "sequences", "blocks", "packed", "scratch", "partial")
_SIZES = ("tokens", "chunk_count", "sequence_count", "block_count", "heads", "kv_heads", "size", "value_size", "window",
          "parts", "undivided")  # fmt: skip


class _Job(ctypes.Structure):
    """`attention` of cpu/attention.h."""

    _fields_ = [
        *((name, _Strided) for name in _STRIDED), *((name, c_void_p) for name in _POINTERS),
        *((name, c_int64) for name in _SIZES), ("scale", c_float), ("isa", c_int32), ("threads", c_int32),
    ]  # fmt: skip

    def lend(self, field: str, size_bytes: int) -> None:
        """Point a field to memory of the job's own, aligned to a cache line."""
        made = torch.empty(size_bytes + 64, dtype=torch.uint8)
        self.__dict__.setdefault("lent", []).append(made)
        setattr(self, field, -(-made.data_ptr() // 64) * 64)


@cache
def _library() -> ctypes.CDLL:
    lib = library.load(build.find() or build.build())
    lib.lamella_attention_supported.argtypes = [ctypes.c_int]
    lib.lamella_attention_scratch.argtypes = [ctypes.POINTER(_Job), ctypes.c_int]
    lib.lamella_attention_scratch.restype = c_int64
    lib.lamella_attention_forward.argtypes = [ctypes.POINTER(_Job)]
    lib.lamella_attention_backward.argtypes = [ctypes.POINTER(_Job)]
    return lib


def supported() -> tuple[str, ...]:
    """The implementations this machine can run, best first; none where the kernels are plain torch."""
    if kernels.backend() == "torch":
        return ()
    return tuple(name for name, isa in IMPLEMENTATIONS.items() if _library().lamella_attention_supported(isa))


@cache
def implementation() -> str:
    """`amx`, `avx512-bf16`, `avx512`, or `torch` where none of them runs. Resolved once per process.

    Raises:
        UserError: `LAMELLA_ATTENTION` asks for one that is unknown or cannot run here.
    """
    asked = os.environ.get("LAMELLA_ATTENTION") or None
    if asked == "torch":
        return asked
    if asked is not None and asked not in IMPLEMENTATIONS:
        raise UserError(
            f"unknown attention {asked!r}", fix=f"set LAMELLA_ATTENTION to one of {', '.join(IMPLEMENTATIONS)}, torch"
        )
    can = supported()
    if asked is not None and asked not in can:
        raise UserError(f"this machine cannot run attention {asked!r}", fix="unset LAMELLA_ATTENTION")
    return asked or (can[0] if can else "torch")


def takes(q_HTD: Tensor, v_KTV: Tensor) -> bool:
    """Whether the kernels compute attention of such tensors."""
    fits = all(size % 32 == 0 and 0 < size <= HEAD_MAX for size in (q_HTD.shape[-1], v_KTV.shape[-1]))
    return fits and q_HTD.dtype == torch.bfloat16 and q_HTD.device.type == "cpu" and implementation() != "torch"


@dataclass(frozen=True)
class Segments:
    """Who sees whom in a packed batch, as tables of 32-token chunks. Made once per batch, used by every layer.

    Attributes:
        tokens: T.
        visible_until, position: int32 [T], as in `PackedBatch`.
        chunks: int32 [C, 6]; first token, count, and the smallest and largest visible_until and position.
        sequences: int32 [S, 2]; first chunk and number of chunks; longest first, empty ones left out.
        blocks: int32 [B, 2]; index in `sequences` and first chunk of 64 queries; most work first.
    """

    tokens: int
    visible_until: Tensor
    position: Tensor
    chunks: Tensor
    sequences: Tensor
    blocks: Tensor

    @staticmethod
    def of(visible_until: Tensor, position: Tensor, starts: Tensor) -> Segments:
        """From a batch's tensors: int64 [T], [T] and [S + 1]; the sequences cover all tokens."""
        until, at = visible_until.numpy().astype(np.int32), position.numpy().astype(np.int32)
        start = starts.numpy()
        length = np.diff(start)
        count = -(-length // CHUNK)
        first_chunk = np.cumsum(count) - count
        order = np.argsort(-length, kind="stable")
        order = order[length[order] > 0]
        in_sequence = np.arange(count.sum()) - np.repeat(first_chunk, count)
        first = np.repeat(start[:-1], count) + in_sequence * CHUNK
        columns = [first, np.minimum(CHUNK, np.repeat(start[1:], count) - first)]
        if len(first):
            columns += [pick.reduceat(x, first) for x in (until, at) for pick in (np.minimum, np.maximum)]
        blocks = [
            (index, first_chunk[s] + offset)
            for index, s in enumerate(order)
            for offset in range(0, count[s], FORWARD_BLOCK)
        ]
        blocks.sort(key=lambda block: first_chunk[order[block[0]]] - block[1])

        def table(rows: object, width: int) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int32).reshape(-1, width))

        return Segments(
            len(until), torch.from_numpy(until), torch.from_numpy(at), table(np.stack(columns, axis=-1), len(columns)),
            table(np.stack([first_chunk[order], count[order]], axis=-1), 2), table(blocks, 2),
        )  # fmt: skip


def _strided(x: Tensor, heads: int, tokens: int, size: int) -> _Strided:
    """A [heads, tokens, size] tensor, whatever its strides, but contiguous along the size."""
    assert x.shape == (heads, tokens, size), f"{tuple(x.shape)} is not {(heads, tokens, size)}"
    assert x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.stride(2) == 1
    return _Strided(x.data_ptr(), x.stride(0), x.stride(1))


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _job(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float, window: int | None,
    name: str | None, threads: int | None,
) -> _Job:  # fmt: skip
    (heads, tokens, size), (kv_heads, _, value_size) = q.shape, v.shape
    assert heads % kv_heads == 0, f"{heads} heads over {kv_heads} kv heads"
    assert tokens == segments.tokens, f"{tokens} tokens in a layout of {segments.tokens}"
    assert scale > 0 and takes(q, v)
    assert lse.shape == (heads, tokens) and lse.dtype == torch.float32 and lse.is_contiguous()
    window = 0 if window is None or window >= tokens else window
    return _Job(
        q=_strided(q, heads, tokens, size), k=_strided(k, kv_heads, tokens, size),
        v=_strided(v, kv_heads, tokens, value_size), out=_strided(out, heads, tokens, value_size), lse=lse.data_ptr(),
        visible_until=segments.visible_until.data_ptr(), position=segments.position.data_ptr(),
        chunks=segments.chunks.data_ptr(), sequences=segments.sequences.data_ptr(), blocks=segments.blocks.data_ptr(),
        tokens=tokens, chunk_count=len(segments.chunks), sequence_count=len(segments.sequences),
        block_count=len(segments.blocks), heads=heads, kv_heads=kv_heads, size=size, value_size=value_size,
        window=window, parts=1, scale=scale, isa=IMPLEMENTATIONS[name or implementation()],
        threads=torch.get_num_threads() if threads is None else threads,
    )  # fmt: skip


def forward(
    q_HTD: Tensor, k_KTD: Tensor, v_KTV: Tensor, segments: Segments, scale: float, window: int | None = None,
    *, name: str | None = None, threads: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of every token to what it sees.

    Args:
        q_HTD, k_KTD, v_KTV: bf16, any strides; K divides H; D and V multiples of 32 up to 256 (`takes`).
        segments: who sees whom.
        scale: factor of the scores, positive.
        window: a token sees keys whose position is less than this below its own; None: all.
        name: an implementation; None: the one in effect.
        threads: None: torch's.

    Returns:
        out, bf16 [T, H, V], and the natural log of each softmax's denominator, fp32 [H, T].
    """
    q, k, v = _rows(q_HTD), _rows(k_KTD), _rows(v_KTV)
    heads, tokens, _ = q.shape
    out_THV = torch.empty(tokens, heads, v.shape[2], dtype=q.dtype)
    lse = torch.empty(heads, tokens, dtype=torch.float32)
    job = _job(q, k, v, out_THV.transpose(0, 1), lse, segments, scale, window, name, threads)
    job.lend("packed", job.chunk_count * job.kv_heads * job.value_size * 64)
    job.lend("scratch", job.threads * _library().lamella_attention_scratch(job, 0))
    status = _library().lamella_attention_forward(job)
    assert status == 0
    return out_THV, lse


def backward(
    grad_THV: Tensor, q_HTD: Tensor, k_KTD: Tensor, v_KTV: Tensor, out_THV: Tensor, lse: Tensor, segments: Segments,
    scale: float, window: int | None = None, *, wanted: tuple[bool, bool, bool] = (True, True, True),
    name: str | None = None, threads: int | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of q, k and v (those `wanted`, else None), with the strides of their tensors where these are dense.

    Args: as for `forward`, with what it returned and the gradient of `out`, bf16 [T, H, V].
    """
    q, k, v, grad = _rows(q_HTD), _rows(k_KTD), _rows(v_KTV), _rows(grad_THV)
    heads, tokens, size = q.shape
    kv_heads, _, value_size = v.shape
    job = _job(q, k, v, out_THV.transpose(0, 1), lse, segments, scale, window, name, threads)
    job.grad_out = _strided(grad.transpose(0, 1), heads, tokens, value_size)
    grads = [torch.empty_like(x) if want else None for x, want in zip((q, k, v), wanted, strict=True)]
    for x, field in zip(grads, ("grad_q", "grad_k", "grad_v"), strict=True):
        if x is not None:
            setattr(job, field, _strided(x, *x.shape))
    longest = int(segments.sequences[0, 1]) if len(segments.sequences) else 0
    job.undivided = longest
    if longest > UNDIVIDED and kv_heads < WANTED_GRAINS:
        job.parts, job.undivided = -(-WANTED_GRAINS // kv_heads), UNDIVIDED
    floats = job.parts * kv_heads * job.chunk_count * (size + value_size) * CHUNK if job.parts > 1 else 0
    job.lend("partial", 4 * floats)
    job.lend("packed", job.chunk_count * kv_heads * size * 64)
    job.lend("scratch", job.threads * _library().lamella_attention_scratch(job, 1))
    status = _library().lamella_attention_backward(job)
    assert status == 0
    return grads[0], grads[1], grads[2]
