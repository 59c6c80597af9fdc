"""NF4, MXFP4 and int8: quantise and dequantise; dropout masks; one dispatch. Knows no models.

CPU tensors go to the C kernels (AVX-512, AVX2 or portable, by what the machine has), built on first
use if need be; without a compiler, plain torch is used and says so. CUDA tensors go to the Triton kernels
(`triton/`), or to plain torch (`reference.py`) where Triton is not installed. All paths give the same bits.
`LAMELLA_KERNELS` forces one of `c-avx512`, `c-avx2`, `c-portable`, `torch`; `torch` counts for CUDA tensors too.

Results do not depend on the number of threads, with one exception taken over from bitsandbytes:
`offset` of a double-quantised tensor is torch's mean, whose last bit may.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from lamella import console
from lamella.errors import UserError
from lamella.kernels import build, reference
from lamella.kernels.layout import AbsmaxRun, AbsmaxState
from lamella.kernels.library import ISAS, CpuKernels, load

__all__ = [
    "BACKENDS", "AbsmaxRun", "AbsmaxState", "backend", "by_triton", "cuda_backend", "dequantize_absmax",
    "dequantize_int8", "dequantize_mxfp4", "dequantize_nf4", "dequantize_nf4_many", "dequantize_nf4_run", "keep_mask",
    "quantize_absmax", "quantize_int8", "quantize_mxfp4", "quantize_nf4", "resolve",
]  # fmt: skip

BACKENDS = ("c-avx512", "c-avx2", "c-portable", "torch")


class Kernels(Protocol):
    """What a backend offers; the functions of this module say what each does."""

    def quantize_nf4(
        self,
        x: Tensor,
        block_size: int = 64,
        *,
        codes: Tensor | None = None,
        absmax: Tensor | None = None,
        threads: int | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def quantize_absmax(self, absmax: Tensor, *, threads: int | None = None) -> AbsmaxState: ...

    def dequantize_absmax(
        self, state: AbsmaxState, *, out: Tensor | None = None, threads: int | None = None
    ) -> Tensor: ...

    def dequantize_nf4(
        self,
        codes: Tensor,
        absmax: Tensor | AbsmaxState,
        out: Tensor,
        block_size: int = 64,
        *,
        stream: bool | None = None,
        threads: int | None = None,
    ) -> Tensor: ...

    def dequantize_nf4_many(
        self, base: Tensor, jobs: Tensor, out: Tensor, block_size: int = 64, *, threads: int | None = None
    ) -> Tensor: ...

    def quantize_mxfp4(
        self, x: Tensor, *, codes: Tensor | None = None, scales: Tensor | None = None, threads: int | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def dequantize_mxfp4(
        self, codes: Tensor, scales: Tensor, out: Tensor, *, stream: bool | None = None, threads: int | None = None
    ) -> Tensor: ...

    def quantize_int8(
        self,
        x: Tensor,
        block_size: int = 64,
        *,
        codes: Tensor | None = None,
        scales: Tensor | None = None,
        threads: int | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def dequantize_int8(
        self,
        codes: Tensor,
        scales: Tensor,
        out: Tensor,
        block_size: int = 64,
        *,
        stream: bool | None = None,
        threads: int | None = None,
    ) -> Tensor: ...

    def keep_mask(self, row_keys: Tensor, columns: int, p: float, *, threads: int | None = None) -> Tensor: ...


def resolve(name: str | None = None) -> tuple[str, Kernels]:
    """A backend by its name, or the best this machine has.

    Raises:
        UserError: `name` is unknown, this machine lacks its instructions, or it cannot be built.
    """
    if name is not None and name not in BACKENDS:
        raise UserError(f"unknown kernels {name!r}", fix=f"set LAMELLA_KERNELS to one of {', '.join(BACKENDS)}")
    if name == "torch":
        return name, reference
    try:
        lib = load(build.find() or build.build())
    except (build.CompileError, OSError) as error:
        if name is not None:
            raise UserError(
                f"kernels {name!r} cannot be loaded: {error}", fix="unset LAMELLA_KERNELS, or install a C compiler"
            ) from error
        console.notice(f"CPU kernels unavailable, plain torch is used instead (slower): {error}")
        return "torch", reference
    if name is None:
        name = next(n for n in BACKENDS if n in ISAS and CpuKernels.supported(lib, n))
    elif not CpuKernels.supported(lib, name):
        raise UserError(f"this machine cannot run {name!r}", fix="unset LAMELLA_KERNELS")
    return name, CpuKernels(lib, name)


@cache
def _resolved() -> tuple[str, Kernels]:
    return resolve(os.environ.get("LAMELLA_KERNELS") or None)


def backend() -> str:
    """Backend of CPU tensors: `c-avx512`, `c-avx2`, `c-portable` or `torch`. Resolved once per process.

    Raises:
        UserError: `LAMELLA_KERNELS` asks for one that cannot run here.
    """
    return _resolved()[0]


@cache
def cuda_backend() -> str:
    """Backend of CUDA tensors: `triton` or `torch`. Resolved once per process; says so when it is plain torch."""
    from lamella.kernels.triton import missing

    if os.environ.get("LAMELLA_KERNELS") == "torch":
        return "torch"
    why = missing()
    if why is not None:
        console.notice(f"CUDA kernels unavailable, plain torch is used instead (slower): {why}")
    return "triton" if why is None else "torch"


def by_triton(device: torch.device) -> bool:
    """Whether tensors on this device go to the Triton kernels."""
    return device.type == "cuda" and cuda_backend() == "triton"


def _for(device: torch.device) -> Kernels:
    if by_triton(device):
        from lamella.kernels.triton import formats

        return cast(Kernels, formats)
    return _resolved()[1] if device.type == "cpu" else reference


def quantize_nf4(
    x: Tensor,
    block_size: int = 64,
    *,
    codes: Tensor | None = None,
    absmax: Tensor | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise to NF4, bit for bit as `bitsandbytes.functional.quantize_4bit(quant_type="nf4")` on a CPU.

    Args:
        x: fp32, bf16 or fp16, any shape, n > 0 elements; taken flat.
        block_size: 32 .. 4096, a power of two.
        codes: buffer to write, uint8 [ceil(n / 2)]; made if None.
        absmax: buffer to write, fp32 [ceil(n / block_size)]; made if None.
        threads: CPU threads; None: torch's.

    Returns:
        (codes, absmax).

    Raises:
        UserError: a NaN or infinite value (the caller knows the tensor's name), an empty tensor, another
            dtype or block size, or a buffer that does not fit.
    """
    return _for(x.device).quantize_nf4(x, block_size, codes=codes, absmax=absmax, threads=threads)


def quantize_absmax(absmax: Tensor, *, threads: int | None = None) -> AbsmaxState:
    """Quantise scales to 8 bits (double quantisation), as bitsandbytes' `compress_statistics=True`.

    Args:
        absmax: fp32 [blocks].
        threads: CPU threads; None: torch's.
    """
    return _for(absmax.device).quantize_absmax(absmax, threads=threads)


def dequantize_absmax(state: AbsmaxState, *, out: Tensor | None = None, threads: int | None = None) -> Tensor:
    """Scales of a double-quantised tensor, fp32 [blocks], into `out` if given.

    Raises:
        UserError: parts whose sizes do not belong together.
    """
    return _for(state.q.device).dequantize_absmax(state, out=out, threads=threads)


def dequantize_nf4(
    codes: Tensor,
    absmax: Tensor | AbsmaxState,
    out: Tensor,
    block_size: int = 64,
    *,
    stream: bool | None = None,
    threads: int | None = None,
) -> Tensor:
    """Fill `out` with table[code] * absmax, computed in fp32 and rounded to nearest even.

    Args:
        codes: uint8 [ceil(n / 2)].
        absmax: fp32 [ceil(n / block_size)], or the scales still double quantised (no buffer needed then).
        out: fp32, bf16 or fp16, contiguous, n elements.
        block_size: as when quantised.
        stream: write past the caches; None: by size. Same result.
        threads: CPU threads; None: torch's.

    Returns:
        `out`.

    Raises:
        UserError: parts whose sizes do not belong together.
    """
    return _for(codes.device).dequantize_nf4(codes, absmax, out, block_size, stream=stream, threads=threads)


def dequantize_nf4_run(codes: Tensor, run: AbsmaxRun, out: Tensor, block_size: int = 64) -> Tensor:
    """Dequantise t tensors of one size, codes one after the other, each with its own double-quantised scales.

    Args:
        codes: uint8 [t * n / 2].
        run: their scales; whole blocks, as many in each.
        out: fp32, bf16 or fp16, contiguous, t * n elements.
        block_size: as when quantised.

    Returns:
        `out`, bit for bit as tensor by tensor.

    Raises:
        UserError: parts whose sizes do not belong together.
    """
    if by_triton(codes.device):
        from lamella.kernels.triton import nf4

        return nf4.dequantize_nf4_run(codes, run, out, block_size)
    return reference.dequantize_nf4_run(codes, run, out, block_size)


def dequantize_nf4_many(
    base: Tensor, jobs: Tensor, out: Tensor, block_size: int = 64, *, threads: int | None = None
) -> Tensor:
    """Dequantise tensors that lie in one buffer, in one call; on a CPU.

    Args:
        base: uint8, contiguous.
        jobs: int64 [tensors, JOB]; see `layout.JOB`.
        out: fp32, bf16 or fp16, contiguous.
        block_size: as when quantised.
        threads: CPU threads; None: torch's.

    Returns:
        `out`, bit for bit as tensor by tensor.
    """
    return _resolved()[1].dequantize_nf4_many(base, jobs, out, block_size, threads=threads)


def quantize_mxfp4(
    x: Tensor, *, codes: Tensor | None = None, scales: Tensor | None = None, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise to MXFP4 in flat blocks of 32.

    The scale is the OCP specification's, 2^(floor(log2(absmax)) - 2), at least 2^-127 (so for a block of zeros too). Values
    go to the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 times the scale, ties to the even code; beyond 6 they saturate.

    Args:
        x: fp32, bf16 or fp16, any shape, n > 0 elements; taken flat.
        codes: buffer to write, uint8 [ceil(n / 2)], low nibble first; made if None.
        scales: buffer to write, uint8 (e8m0) [ceil(n / 32)]; made if None.
        threads: CPU threads; None: torch's.

    Returns:
        (codes, scales).

    Raises:
        UserError: as `quantize_nf4`.
    """
    return _for(x.device).quantize_mxfp4(x, codes=codes, scales=scales, threads=threads)


def dequantize_mxfp4(
    codes: Tensor, scales: Tensor, out: Tensor, *, stream: bool | None = None, threads: int | None = None
) -> Tensor:
    """Fill `out` with value[code] * 2^(scale - 127), computed in fp32 and rounded to nearest even.

    Args:
        codes: uint8 [ceil(n / 2)], e2m1, low nibble first.
        scales: uint8 [ceil(n / 32)], e8m0; 255, its NaN, counts as infinity.
        out: fp32, bf16 or fp16, contiguous, n elements.
        stream, threads: as `dequantize_nf4`.

    Returns:
        `out`.

    Raises:
        UserError: parts whose sizes do not belong together.
    """
    return _for(codes.device).dequantize_mxfp4(codes, scales, out, stream=stream, threads=threads)


def quantize_int8(
    x: Tensor,
    block_size: int = 64,
    *,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise to int8 in flat blocks: scale = absmax / 127, code = x / scale to the nearest, ties to even.

    Args:
        x: fp32, bf16 or fp16, any shape, n > 0 elements; taken flat.
        block_size: 1 or more; a row's length gives one scale a row.
        codes: buffer to write, int8 [n]; made if None.
        scales: buffer to write, fp32 [ceil(n / block_size)]; made if None.
        threads: CPU threads; None: torch's.

    Returns:
        (codes, scales).

    Raises:
        UserError: as `quantize_nf4`.
    """
    return _for(x.device).quantize_int8(x, block_size, codes=codes, scales=scales, threads=threads)


def dequantize_int8(
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    block_size: int = 64,
    *,
    stream: bool | None = None,
    threads: int | None = None,
) -> Tensor:
    """Fill `out` with code * scale, computed in fp32 and rounded to nearest even.

    Args:
        codes: int8 [n].
        scales: fp32 [ceil(n / block_size)].
        out: fp32, bf16 or fp16, contiguous, n elements.
        block_size: as when quantised.
        stream, threads: as `dequantize_nf4`.

    Returns:
        `out`.

    Raises:
        UserError: parts whose sizes do not belong together.
    """
    return _for(codes.device).dequantize_int8(codes, scales, out, block_size, stream=stream, threads=threads)


def keep_mask(row_keys: Tensor, columns: int, p: float, *, threads: int | None = None) -> Tensor:
    """Dropout mask from an integer hash of (row key, column): the same on any device, in any order.

    Args:
        row_keys: int64 [T]; whatever identifies the row.
        columns: elements per row.
        p: share dropped, 0 <= p < 1.
        threads: CPU threads; None: torch's.

    Returns:
        bool [T, columns], True where the element is kept (probability 1 - p).
    """
    return _for(row_keys.device).keep_mask(row_keys, columns, p, threads=threads)
