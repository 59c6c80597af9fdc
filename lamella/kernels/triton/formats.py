"""MXFP4 and int8 in Triton: the bits of `kernels/reference.py`. With NF4's it is what the dispatch offers for CUDA tensors.

Values are worked out from their codes with integer arithmetic and one multiplication in fp32, as in the reference. Offsets
are 64-bit.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamella.kernels.layout import (
    MXFP4_BLOCK,
    block_count,
    check_int8,
    check_mxfp4,
    non_finite,
    prepare_int8,
    prepare_mxfp4,
)
from lamella.kernels.triton import interpreted
from lamella.kernels.triton.nf4 import (
    TILE_VALUES,
    _store,
    dequantize_absmax,
    dequantize_nf4,
    dequantize_nf4_run,
    keep_mask,
    quantize_absmax,
    quantize_nf4,
)

__all__ = [
    "dequantize_absmax", "dequantize_int8", "dequantize_mxfp4", "dequantize_nf4", "dequantize_nf4_run", "keep_mask",
    "quantize_absmax", "quantize_int8", "quantize_mxfp4", "quantize_nf4",
]  # fmt: skip


@triton.jit
def _e2m1(code):
    """fp32 value of 4-bit codes: 0 and 0.5, or 2^(e - 1) * (1 + m / 2)."""
    exponent = (code >> 1) & 3
    mantissa = code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    bits = tl.where(exponent > 0, normal, mantissa * 0x3F000000)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _dequantize_mx(codes, scales, out, n, n_bytes, TILE: tl.constexpr, INTEGER_BF16: tl.constexpr):
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    byte = block.to(tl.int64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    packed = tl.load(codes + byte, mask=byte < n_bytes, other=0).to(tl.int32)
    exponent = tl.load(scales + block, mask=block.to(tl.int64) * 32 < n, other=0).to(tl.int32)
    scale = tl.where(exponent > 0, exponent << 23, 0x400000).to(tl.float32, bitcast=True)
    low = _e2m1(packed & 15) * scale[:, None]
    high = _e2m1(packed >> 4) * scale[:, None]
    values = tl.reshape(tl.join(low, high), (TILE, 32))
    at = block.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    _store(out + at, values, at < n, INTEGER_BF16)


@triton.jit
def _quantize_mx(x, codes, scales, flags, n, n_bytes, TILE: tl.constexpr):
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = block.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    size = tl.abs(value)
    finite = size <= 3.4028234663852886e38  # False for NaN too
    largest = tl.max(tl.where(finite, size, 0.0), axis=1)
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 2, 0)
    tl.store(scales + block, exponent.to(tl.uint8), mask=block.to(tl.int64) * 32 < n)
    tl.store(flags + tl.program_id(0), tl.sum(tl.where(finite, 0, 1).to(tl.int32)))
    y = value * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    m = tl.abs(y)
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32) + (m >= 1.75).to(tl.int32)
    code += (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32) + (m > 5.0).to(tl.int32)
    code = code | ((y.to(tl.int32, bitcast=True) >> 28) & 8)
    low, high = tl.split(tl.reshape(code, (TILE, 16, 2)))
    byte = block.to(tl.int64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(codes + byte, (low + high * 16).to(tl.uint8), mask=byte < n_bytes)


@triton.jit
def _dequantize_int8(codes, scales, out, n, block_size, TILE: tl.constexpr, INTEGER_BF16: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < n
    code = tl.load(codes + at, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + at // block_size, mask=inside, other=0.0)
    _store(out + at, code * scale, inside, INTEGER_BF16)


@triton.jit
def _quantize_int8(x, codes, scales, flags, n, block_size, TILE: tl.constexpr):
    """One program a block; TILE is the block's size filled up to a power of two."""
    block = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, TILE)
    at = block * block_size + inner
    inside = (inner < block_size) & (at < n)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(value)
    finite = size <= 3.4028234663852886e38
    largest = tl.max(tl.where(finite, size, 0.0), axis=0)
    scale = tl.div_rn(largest, 127.0)
    tl.store(scales + block, scale)
    tl.store(flags + block, tl.sum(tl.where(finite, 0, 1).to(tl.int32)))
    y = tl.div_rn(value, tl.full((TILE,), 0.0, tl.float32) + tl.where(scale == 0.0, 1.0, scale))
    y = tl.minimum(tl.maximum(y, -127.0), 127.0)
    rounded = (y + 12582912.0) - 12582912.0  # to the nearest integer, ties to even
    tl.store(codes + at, tl.where(scale == 0.0, 0.0, rounded).to(tl.int32).to(tl.int8), mask=inside)


def _target(out: Tensor) -> tuple[Tensor, bool]:
    integer_bf16 = interpreted() and out.dtype == torch.bfloat16
    return (out.view(-1).view(torch.uint16) if integer_bf16 else out), integer_bf16


def quantize_mxfp4(
    x: Tensor, *, codes: Tensor | None = None, scales: Tensor | None = None, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `lamella.kernels.quantize_mxfp4`. The check for non-finite values waits for the device."""
    codes, scales = prepare_mxfp4(x, codes, scales)
    tile = TILE_VALUES // MXFP4_BLOCK
    programs = -(-scales.numel() // tile)
    flags = torch.empty(programs, dtype=torch.int32, device=x.device)
    _quantize_mx[(programs,)](x.reshape(-1), codes, scales, flags, x.numel(), codes.numel(), TILE=tile)
    if bool(flags.any()):
        raise non_finite()
    return codes, scales


def dequantize_mxfp4(
    codes: Tensor, scales: Tensor, out: Tensor, *, stream: bool | None = None, threads: int | None = None
) -> Tensor:
    """See `lamella.kernels.dequantize_mxfp4`."""
    check_mxfp4(codes, scales, out)
    if out.numel() == 0:
        return out
    tile = TILE_VALUES // MXFP4_BLOCK
    target, integer_bf16 = _target(out)
    _dequantize_mx[(-(-block_count(out.numel(), MXFP4_BLOCK) // tile),)](
        codes, scales, target, out.numel(), codes.numel(), TILE=tile, INTEGER_BF16=integer_bf16
    )
    return out


def quantize_int8(
    x: Tensor,
    block_size: int = 64,
    *,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `lamella.kernels.quantize_int8`. The check for non-finite values waits for the device."""
    codes, scales = prepare_int8(x, block_size, codes, scales)
    flags = torch.empty(scales.numel(), dtype=torch.int32, device=x.device)
    _quantize_int8[(scales.numel(),)](
        x.reshape(-1), codes, scales, flags, x.numel(), block_size, TILE=triton.next_power_of_2(block_size)
    )
    if bool(flags.any()):
        raise non_finite()
    return codes, scales


def dequantize_int8(
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    block_size: int = 64,
    *,
    stream: bool | None = None,
    threads: int | None = None,
) -> Tensor:
    """See `lamella.kernels.dequantize_int8`."""
    check_int8(codes, scales, out, block_size)
    if out.numel() == 0:
        return out
    target, integer_bf16 = _target(out)
    _dequantize_int8[(-(-out.numel() // TILE_VALUES),)](
        codes, scales, target, out.numel(), block_size, TILE=TILE_VALUES, INTEGER_BF16=integer_bf16
    )
    return out
