"""Plain-torch twins of the kernels: same signatures, same bits, any device.

They are what the C paths are tested against, what runs where no compiler was found, and what runs
for tensors that are not on the CPU. Arithmetic follows bitsandbytes 0.50 step by step, since the
bits depend on it: whole blocks multiply by a reciprocal, a partial last block divides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamella.kernels.layout import (
    ABSMAX_BINS,
    ABSMAX_BLOCK,
    ABSMAX_FLOOR,
    INT8_MAX,
    MXFP4_BLOCK,
    MXFP4_TABLE,
    NF4_TABLE,
    AbsmaxRun,
    AbsmaxState,
    block_count,
    check_dequantize,
    check_int8,
    check_jobs,
    check_keep,
    check_mxfp4,
    check_part,
    check_run,
    check_state,
    drop_threshold,
    dynamic_code,
    dynamic_code_bins,
    non_finite,
    prepare_int8,
    prepare_mxfp4,
    prepare_quantize,
)

CHUNK_VALUES = 1 << 22
"""Values per pass, a multiple of every block size: bounds the temporaries."""


def _scale_blocks(values: Tensor, block_size: int, absmax: Tensor) -> Tensor:
    """fp32 [n] -> values scaled to [-1, 1]; writes absmax [ceil(n / block_size)]."""
    whole = len(values) // block_size * block_size
    blocks = values[:whole].view(-1, block_size)
    absmax[: len(blocks)] = blocks.abs().amax(dim=1) if len(blocks) else 0
    inverse = 1.0 / absmax[: len(blocks)].clamp(min=ABSMAX_FLOOR)
    scaled = (blocks * inverse[:, None]).view(-1)
    if whole < len(values):
        absmax[-1] = values[whole:].abs().max().clamp(min=ABSMAX_FLOOR)
        scaled = torch.cat([scaled, values[whole:] / absmax[-1]])
    return scaled


def quantize_nf4(
    x: Tensor,
    block_size: int = 64,
    *,
    codes: Tensor | None = None,
    absmax: Tensor | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `lamella.kernels.quantize_nf4`. `threads` is torch's own here."""
    codes, absmax = prepare_quantize(x, block_size, codes, absmax)
    table = torch.tensor(NF4_TABLE, dtype=torch.float32, device=x.device)
    midpoints = (table[:-1] + table[1:]) / 2
    flat, packed, scales = x.reshape(-1), codes.view(-1), absmax.view(-1)
    for first in range(0, len(flat), CHUNK_VALUES):
        values = flat[first : first + CHUNK_VALUES].float()
        if not torch.isfinite(values).all():
            raise non_finite()
        first_block = first // block_size
        part = scales[first_block : first_block + block_count(len(values), block_size)]
        scaled = _scale_blocks(values, block_size, part)
        index = torch.bucketize(scaled, midpoints, out_int32=True).to(torch.uint8)
        if len(index) % 2:
            index = torch.cat([index, index.new_full((1,), NF4_TABLE.index(0.0))])
        packed[first // 2 : first // 2 + len(index) // 2] = index[::2] << 4 | index[1::2]
    return codes, absmax


def quantize_absmax(absmax: Tensor, *, threads: int | None = None) -> AbsmaxState:
    """See `lamella.kernels.quantize_absmax`."""
    check_part("absmax", absmax, torch.float32, absmax.numel(), absmax.device)
    flat = absmax.view(-1)
    offset = flat.mean()
    centred = flat - offset
    if not torch.isfinite(centred).all():
        raise non_finite()
    blocks = block_count(len(flat), ABSMAX_BLOCK)
    padded = torch.nn.functional.pad(centred, (0, blocks * ABSMAX_BLOCK - len(flat))).view(blocks, ABSMAX_BLOCK)
    absmax2 = padded.abs().amax(dim=1)
    scaled = (padded * (1.0 / absmax2)[:, None]).clamp(-1, 1)
    bins = ((scaled + 1.0) * 0.5 * (ABSMAX_BINS - 1) + 0.5).nan_to_num().to(torch.int64)
    q = dynamic_code_bins().to(absmax.device)[bins]
    q[absmax2 == 0] = 0
    return AbsmaxState(
        q.view(-1)[: len(flat)].contiguous(), dynamic_code().to(absmax.device, copy=True), absmax2, offset
    )


def dequantize_absmax(state: AbsmaxState, *, out: Tensor | None = None, threads: int | None = None) -> Tensor:
    """See `lamella.kernels.dequantize_absmax`."""
    blocks = state.q.numel()
    out = torch.empty(blocks, dtype=torch.float32, device=state.q.device) if out is None else out
    check_state(state, blocks, state.q.device)
    check_part("out", out, torch.float32, blocks, state.q.device)
    scales = state.absmax2.view(-1).repeat_interleave(ABSMAX_BLOCK)[:blocks]
    out.view(-1).copy_(state.code.view(-1)[state.q.view(-1).long()] * scales + state.offset)
    return out


def dequantize_nf4(
    codes: Tensor,
    absmax: Tensor | AbsmaxState,
    out: Tensor,
    block_size: int = 64,
    *,
    stream: bool | None = None,
    threads: int | None = None,
) -> Tensor:
    """See `lamella.kernels.dequantize_nf4`."""
    check_dequantize(codes, absmax, out, block_size)
    scales = dequantize_absmax(absmax) if isinstance(absmax, AbsmaxState) else absmax.view(-1)
    table = torch.tensor(NF4_TABLE, dtype=torch.float32, device=codes.device)
    flat, packed = out.view(-1), codes.view(-1)
    for first in range(0, len(flat), CHUNK_VALUES):
        target = flat[first : first + CHUNK_VALUES]
        part = packed[first // 2 : (first + len(target) + 1) // 2]
        values = table[torch.stack([part >> 4, part & 15], dim=1).view(-1).int()][: len(target)]
        first_block = first // block_size
        scale = scales[first_block : first_block + block_count(len(target), block_size)]
        target.copy_(values * scale.repeat_interleave(block_size)[: len(target)])
    return out


def quantize_mxfp4(
    x: Tensor, *, codes: Tensor | None = None, scales: Tensor | None = None, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `lamella.kernels.quantize_mxfp4`."""
    codes, scales = prepare_mxfp4(x, codes, scales)
    flat, packed, exponents = x.reshape(-1), codes.view(-1), scales.view(-1)
    table = torch.tensor(MXFP4_TABLE[:8], dtype=torch.float32, device=x.device)
    midpoints = (table[:-1] + table[1:]) / 2
    above, from_ = midpoints[::2].contiguous(), midpoints[1::2].contiguous()  # ties go to the even code
    for first in range(0, len(flat), CHUNK_VALUES):
        values = flat[first : first + CHUNK_VALUES].float()
        if not torch.isfinite(values).all():
            raise non_finite()
        blocks = torch.nn.functional.pad(values, (0, -len(values) % MXFP4_BLOCK)).view(-1, MXFP4_BLOCK)
        biased = blocks.abs().amax(dim=1).view(torch.int32) >> 23
        exponent = (biased - 2).clamp(min=0)
        exponents[first // MXFP4_BLOCK :][: len(exponent)] = exponent.to(torch.uint8)
        scaled = (blocks * ((254 - exponent) << 23).view(torch.float32)[:, None]).view(-1)[: len(values)]
        size = scaled.abs()
        code = torch.bucketize(size, above, out_int32=True) + torch.bucketize(size, from_, out_int32=True, right=True)
        code = (code | (scaled.view(torch.int32) >> 31 & 8)).to(torch.uint8)
        if len(code) % 2:
            code = torch.cat([code, code.new_zeros(1)])
        packed[first // 2 : first // 2 + len(code) // 2] = code[::2] | code[1::2] << 4
    return codes, scales


def dequantize_mxfp4(
    codes: Tensor, scales: Tensor, out: Tensor, *, stream: bool | None = None, threads: int | None = None
) -> Tensor:
    """See `lamella.kernels.dequantize_mxfp4`."""
    check_mxfp4(codes, scales, out)
    table = torch.tensor(MXFP4_TABLE, dtype=torch.float32, device=codes.device)
    exponent = scales.view(-1).int()
    powers = torch.where(exponent > 0, exponent << 23, 1 << 22).view(torch.float32)
    flat, packed = out.view(-1), codes.view(-1)
    for first in range(0, len(flat), CHUNK_VALUES):
        target = flat[first : first + CHUNK_VALUES]
        part = packed[first // 2 : (first + len(target) + 1) // 2]
        values = table[torch.stack([part & 15, part >> 4], dim=1).view(-1).int()][: len(target)]
        scale = powers[first // MXFP4_BLOCK :][: block_count(len(target), MXFP4_BLOCK)]
        target.copy_(values * scale.repeat_interleave(MXFP4_BLOCK)[: len(target)])
    return out


def quantize_int8(
    x: Tensor,
    block_size: int = 64,
    *,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `lamella.kernels.quantize_int8`."""
    codes, scales = prepare_int8(x, block_size, codes, scales)
    flat, target, factors = x.reshape(-1), codes.view(-1), scales.view(-1)
    step = max(CHUNK_VALUES // block_size, 1) * block_size
    for first in range(0, len(flat), step):
        values = flat[first : first + step].float()
        if not torch.isfinite(values).all():
            raise non_finite()
        blocks = torch.nn.functional.pad(values, (0, -len(values) % block_size)).view(-1, block_size)
        scale = blocks.abs().amax(dim=1) / INT8_MAX
        factors[first // block_size :][: len(scale)] = scale
        code = (blocks / scale[:, None]).clamp(-INT8_MAX, INT8_MAX).round()
        code[scale == 0] = 0
        target[first : first + step] = code.view(-1)[: len(values)].to(torch.int8)
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
    flat, source, factors = out.view(-1), codes.view(-1), scales.view(-1)
    step = max(CHUNK_VALUES // block_size, 1) * block_size
    for first in range(0, len(flat), step):
        target = flat[first : first + step]
        scale = factors[first // block_size :][: block_count(len(target), block_size)]
        target.copy_(source[first : first + step].float() * scale.repeat_interleave(block_size)[: len(target)])
    return out


def dequantize_nf4_many(
    base: Tensor, jobs: Tensor, out: Tensor, block_size: int = 64, *, threads: int | None = None
) -> Tensor:
    """See `lamella.kernels.dequantize_nf4_many`."""
    check_jobs(base, jobs, out)

    def part(first: int, count: int, dtype: torch.dtype) -> Tensor:
        return base[first : first + count * dtype.itemsize].view(dtype)

    for codes, absmax, q, code, absmax2, offset, at, numel in jobs.tolist():
        blocks = block_count(numel, block_size)
        scales: Tensor | AbsmaxState
        if absmax >= 0:
            scales = part(absmax, blocks, torch.float32)
        else:
            second = part(absmax2, block_count(blocks, ABSMAX_BLOCK), torch.float32)
            scales = AbsmaxState(part(q, blocks, torch.uint8), part(code, 256, torch.float32), second,
                                 part(offset, 1, torch.float32)[0])  # fmt: skip
        packed = part(codes, (numel + 1) // 2, torch.uint8)
        dequantize_nf4(packed, scales, out.view(-1)[at : at + numel], block_size)
    return out


def dequantize_nf4_run(codes: Tensor, run: AbsmaxRun, out: Tensor, block_size: int = 64) -> Tensor:
    """See `lamella.kernels.dequantize_nf4_run`."""
    check_run(codes, run, out, block_size)
    second = run.absmax2.repeat_interleave(ABSMAX_BLOCK, dim=1)[:, : run.q.shape[1]]
    scales = run.code.view(-1)[run.q.long()] * second + run.offset[:, None]
    return dequantize_nf4(codes, scales.view(-1), out, block_size)


def spread_keys(keys: Tensor) -> Tensor:
    """splitmix64 on int64 [T]; shifts are made logical by masking."""

    def shift(z: Tensor, bits: int) -> Tensor:
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    z = keys + _int64(0x9E3779B97F4A7C15)
    z = (z ^ shift(z, 30)) * _int64(0xBF58476D1CE4E5B9)
    z = (z ^ shift(z, 27)) * _int64(0x94D049BB133111EB)
    return z ^ shift(z, 31)


def _int64(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits


def _int32(bits: int) -> int:
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def keep_mask(row_keys: Tensor, columns: int, p: float, *, threads: int | None = None) -> Tensor:
    """See `lamella.kernels.keep_mask`."""
    check_keep(row_keys, columns, p)
    spread = spread_keys(row_keys)
    low, high = spread.to(torch.int32)[:, None], (spread >> 32).to(torch.int32)[:, None]

    def mix(h: Tensor, bits: int, factor: int) -> Tensor:
        return (h ^ ((h >> bits) & ((1 << (32 - bits)) - 1))) * _int32(factor)

    h = torch.arange(columns, dtype=torch.int32, device=row_keys.device)[None] + low
    h = mix(mix(h, 16, 0x7FEB352D), 15, 0x846CA68B)
    h = h ^ ((h >> 16) & 0xFFFF) ^ high
    h = h * _int32(0x7FEB352D)
    h = mix(h, 15, 0x846CA68B)
    h = h ^ ((h >> 16) & 0xFFFF)
    flip = -(1 << 31)  # orders int32 as the unsigned numbers their bits are
    return (h ^ flip) >= drop_threshold(p) + flip
