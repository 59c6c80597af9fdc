"""NF4 and dropout masks in Triton: the bits of `kernels/reference.py`.

Dequantising reads a code byte, looks two values up and writes them, with the scale of each block worked out from its
8-bit form on the way: one pass, 0.5 + 1/64 bytes in and one output element out per value. Arithmetic is fp32 with every
rounding as in the reference, so multiply-adds must not be fused (`enable_fp_fusion=False`) and divisions are exact.

One program takes `tile` whole blocks. Offsets are 64-bit: a large layer has over 2^31 values.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamella.kernels import reference
from lamella.kernels.layout import (
    ABSMAX_BLOCK,
    ABSMAX_FLOOR,
    NF4_TABLE,
    AbsmaxRun,
    AbsmaxState,
    block_count,
    check_dequantize,
    check_keep,
    check_run,
    drop_threshold,
    non_finite,
    prepare_quantize,
)
from lamella.kernels.triton import interpreted

TILE_VALUES = 4096
"""Values per program (at least one block)."""

_tables: dict[torch.device, tuple[Tensor, Tensor]] = {}


def _table(device: torch.device) -> tuple[Tensor, Tensor]:
    """On the device: fp32 [16] values, and [16] their 15 midpoints and the floor of scales (as a constant it is below the
    normal fp32 numbers, and Triton would make it fp64)."""
    if device not in _tables:
        table = torch.tensor(NF4_TABLE, dtype=torch.float32)
        limits = torch.cat([(table[:-1] + table[1:]) / 2, torch.tensor([ABSMAX_FLOOR], dtype=torch.float32)])
        _tables[device] = (table.to(device), limits.to(device))
    return _tables[device]


@triton.jit
def _store(pointer, value, mask, INTEGER_BF16: tl.constexpr):
    """Store fp32 values rounded to nearest even. The interpreter truncates to bf16: there it is rounded in integers."""
    if INTEGER_BF16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(pointer, rounded.to(tl.uint16), mask=mask)
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize(
    codes, scales, code, absmax2, offset, table, out, n, n_bytes, blocks_per_tensor, q_stride, absmax2_stride, offset_stride,
    NESTED: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, SCALES_PER_GROUP: tl.constexpr,
    INTEGER_BF16: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    byte = block.to(tl.int64)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    packed = tl.load(codes + byte, mask=byte < n_bytes, other=0).to(tl.int32)  # a bound as it is: wide loads
    inside = block.to(tl.int64) * (2 * HALF) < n
    if NESTED:
        tensor = block // blocks_per_tensor
        index = block % blocks_per_tensor
        tensor64 = tensor.to(tl.int64)
        q = tl.load(scales + tensor64 * q_stride + index, mask=inside, other=0).to(tl.int32)
        second = tl.load(absmax2 + tensor64 * absmax2_stride + index // SCALES_PER_GROUP, mask=inside, other=0.0)
        mean = tl.load(offset + tensor64 * offset_stride, mask=inside, other=0.0)
        scale = tl.load(code + q) * second + mean
    else:
        scale = tl.load(scales + block, mask=inside, other=0.0)
    high = tl.load(table + (packed >> 4)) * scale[:, None]
    low = tl.load(table + (packed & 15)) * scale[:, None]
    values = tl.reshape(tl.join(high, low), (TILE, 2 * HALF))
    at = block.to(tl.int64)[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    _store(out + at, values, at < n, INTEGER_BF16)


@triton.jit
def _quantize(x, codes, absmax, flags, limits, n, n_bytes, HALF: tl.constexpr, TILE: tl.constexpr):
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = block.to(tl.int64)[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    size = tl.abs(value)
    finite = size <= 3.4028234663852886e38  # False for NaN too
    largest = tl.max(tl.where(finite, size, 0.0), axis=1)
    first = block.to(tl.int64) * (2 * HALF)
    partial = (first < n) & (first + 2 * HALF > n)
    floored = tl.maximum(largest, tl.load(limits + 15))
    largest = tl.where(partial, floored, largest)
    tl.store(absmax + block, largest, mask=first < n)
    bad = tl.sum(tl.where(finite, 0, 1).to(tl.int32))
    tl.store(flags + tl.program_id(0), bad)
    inverse = tl.div_rn(tl.full((TILE,), 1.0, tl.float32), floored)
    divisor = tl.where(partial, largest, tl.full((TILE,), 1.0, tl.float32))
    factor = tl.where(partial, tl.full((TILE,), 1.0, tl.float32), inverse)
    scaled = tl.div_rn(value, tl.broadcast_to(divisor[:, None], (TILE, 2 * HALF))) * factor[:, None]
    index = tl.zeros((TILE, 2 * HALF), tl.int32)
    for k in tl.static_range(15):
        index += (scaled > tl.load(limits + k)).to(tl.int32)
    high, low = tl.split(tl.reshape(index, (TILE, HALF, 2)))
    byte = block.to(tl.int64)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    tl.store(codes + byte, (high * 16 + low).to(tl.uint8), mask=byte < n_bytes)


@triton.jit
def _mix(h, BITS: tl.constexpr, FACTOR: tl.constexpr):
    return (h ^ (h >> BITS)) * tl.full((1, 1), FACTOR, tl.uint32)


@triton.jit(do_not_specialize=["rows"])
def _keep(low, high, out, rows, columns, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    low_row = tl.load(low + row, mask=row < rows, other=0).to(tl.uint32, bitcast=True)
    high_row = tl.load(high + row, mask=row < rows, other=0).to(tl.uint32, bitcast=True)
    h = column.to(tl.uint32)[None, :] + low_row[:, None]
    h = _mix(_mix(h, 16, 0x7FEB352D), 15, 0x846CA68B)
    h = h ^ (h >> 16) ^ high_row[:, None]
    h = _mix(h * tl.full((1, 1), 0x7FEB352D, tl.uint32), 15, 0x846CA68B)
    h = h ^ (h >> 16)
    keep = h >= tl.full((1, 1), THRESHOLD, tl.uint32)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out + at, keep.to(tl.int8), mask=(row < rows)[:, None] & (column < columns)[None, :])


def _tile(block_size: int) -> int:
    return max(1, TILE_VALUES // block_size)


def quantize_nf4(
    x: Tensor,
    block_size: int = 64,
    *,
    codes: Tensor | None = None,
    absmax: Tensor | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `lamella.kernels.quantize_nf4`. The check for non-finite values waits for the device."""
    codes, absmax = prepare_quantize(x, block_size, codes, absmax)
    tile = _tile(block_size)
    programs = -(-block_count(x.numel(), block_size) // tile)
    flags = torch.empty(programs, dtype=torch.int32, device=x.device)
    _quantize[(programs,)](
        x.reshape(-1), codes, absmax, flags, _table(x.device)[1], x.numel(), codes.numel(),
        HALF=block_size // 2, TILE=tile, enable_fp_fusion=False,
    )  # fmt: skip
    if bool(flags.any()):
        raise non_finite()
    return codes, absmax


def quantize_absmax(absmax: Tensor, *, threads: int | None = None) -> AbsmaxState:
    """See `lamella.kernels.quantize_absmax`: 1/64 of the values, plain torch."""
    return reference.quantize_absmax(absmax)


def dequantize_absmax(state: AbsmaxState, *, out: Tensor | None = None, threads: int | None = None) -> Tensor:
    """See `lamella.kernels.dequantize_absmax`: plain torch; `dequantize_nf4` does not need it."""
    return reference.dequantize_absmax(state, out=out)


def dequantize_nf4(
    codes: Tensor,
    absmax: Tensor | AbsmaxState,
    out: Tensor,
    block_size: int = 64,
    *,
    stream: bool | None = None,
    threads: int | None = None,
) -> Tensor:
    """See `lamella.kernels.dequantize_nf4`. Reads the 8-bit scales as they are."""
    check_dequantize(codes, absmax, out, block_size)
    if isinstance(absmax, AbsmaxState):
        run = AbsmaxRun(
            absmax.q.view(1, -1), absmax.code.view(-1), absmax.absmax2.view(1, -1), absmax.offset.view(1)
        )  # fmt: skip
        return _launch(codes, run, out, block_size)
    return _launch(codes, absmax, out, block_size)


def dequantize_nf4_run(codes: Tensor, run: AbsmaxRun, out: Tensor, block_size: int = 64) -> Tensor:
    """See `lamella.kernels.dequantize_nf4_run`: one kernel for all tensors of the run."""
    check_run(codes, run, out, block_size)
    return _launch(codes, run, out, block_size)


def _launch(codes: Tensor, absmax: Tensor | AbsmaxRun, out: Tensor, block_size: int) -> Tensor:
    n, tile = out.numel(), _tile(block_size)
    if n == 0:
        return out
    blocks = block_count(n, block_size)
    table = _table(codes.device)[0]
    integer_bf16 = interpreted() and out.dtype == torch.bfloat16
    target = out.view(-1).view(torch.uint16) if integer_bf16 else out
    if isinstance(absmax, AbsmaxRun):
        scales = absmax.q, absmax.code, absmax.absmax2, absmax.offset
        sizes = absmax.q.shape[1], absmax.q.stride(0), absmax.absmax2.stride(0), absmax.offset.stride(0)
    else:
        scales, sizes = (absmax, table, table, table), (blocks, 0, 0, 0)
    _dequantize[(-(-blocks // tile),)](
        codes, *scales, table, target, n, codes.numel(), *sizes, NESTED=isinstance(absmax, AbsmaxRun), HALF=block_size // 2,
        TILE=tile, SCALES_PER_GROUP=ABSMAX_BLOCK, INTEGER_BF16=integer_bf16, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def keep_mask(row_keys: Tensor, columns: int, p: float, *, threads: int | None = None) -> Tensor:
    """See `lamella.kernels.keep_mask`."""
    check_keep(row_keys, columns, p)
    rows = row_keys.numel()
    out = torch.empty(rows, columns, dtype=torch.bool, device=row_keys.device)
    if out.numel():
        spread = reference.spread_keys(row_keys)
        low, high = spread.to(torch.int32), (spread >> 32).to(torch.int32)
        _keep[(-(-rows // 8), -(-columns // 512))](
            low, high, out.view(torch.int8), rows, columns, THRESHOLD=drop_threshold(p), ROWS=8, COLUMNS=512
        )  # fmt: skip
    return out
