"""The formats: tables, block layouts, double quantisation state, and the checks every path shares.

NF4: QLoRA (Dettmers et al. 2023), appendix E; layout as in bitsandbytes: the flattened tensor in
blocks, one fp32 absmax a block, two 4-bit codes a byte, high nibble first. With an odd count the
last low nibble is 7, the code of zero.

MXFP4: OCP Microscaling Formats (MX) v1.0; the flattened tensor in blocks of 32, one e8m0 scale a block, two e2m1 codes a
byte, low nibble first (as GPT-OSS stores them). With an odd count the last high nibble is 0.

int8: the flattened tensor in blocks of any length, one fp32 scale a block, symmetric codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lamella.errors import UserError

NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
MXFP4_TABLE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_BLOCK = 32
INT8_MAX = 127.0
ABSMAX_FLOOR = 1e-38
"""Smallest divisor of a block; a partial last block of zeros also stores it."""
ABSMAX_BLOCK = 256
"""Scales per block of the second level."""
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ABSMAX_BINS = 65536


@dataclass(frozen=True)
class AbsmaxState:
    """Scales, double quantised: absmax[i] = code[q[i]] * absmax2[i // 256] + offset, in fp32.

    Attributes:
        q: uint8 [blocks].
        code: fp32 [256], sorted.
        absmax2: fp32 [ceil(blocks / 256)].
        offset: fp32 scalar, the mean of the scales.
    """

    q: Tensor
    code: Tensor
    absmax2: Tensor
    offset: Tensor


@dataclass(frozen=True)
class AbsmaxRun:
    """Double-quantised scales of t tensors of one size whose codes lie one after the other: rows may be strided views.

    Attributes:
        q: uint8 [t, blocks].
        code: fp32 [256], of all of them.
        absmax2: fp32 [t, ceil(blocks / 256)].
        offset: fp32 [t].
    """

    q: Tensor
    code: Tensor
    absmax2: Tensor
    offset: Tensor


@cache
def dynamic_code() -> Tensor:
    """fp32 [256], sorted: the signed 8-bit dynamic code (Dettmers 2015, "8-Bit Approximations").

    Seven decades below 1; decade i holds 2^i values, the centres of equal parts of [0.1, 1]; each
    with both signs, then 0 and 1.
    """
    positive = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        positive.append((edges[:-1] + edges[1:]) / 2 * 10 ** (i - 6))
    magnitudes = torch.cat(positive)
    return torch.cat([-magnitudes, magnitudes, torch.tensor([0.0, 1.0])]).sort().values


@cache
def dynamic_code_bins() -> Tensor:
    """uint8 [65536]: nearest dynamic code of each of the equal steps from -1 to 1 (bitsandbytes' CPU rule)."""
    code = dynamic_code()
    midpoints = 0.5 * (code[:-1] + code[1:])
    steps = -1.0 + (2.0 * torch.arange(ABSMAX_BINS, dtype=torch.float32)) / (ABSMAX_BINS - 1)
    return torch.bucketize(steps, midpoints).to(torch.uint8)


def block_count(n: int, block_size: int) -> int:
    return -(-n // block_size)


def non_finite() -> UserError:
    return UserError("the tensor holds NaN or infinite values", fix="repair or replace the checkpoint")


def check_block_size(block_size: int) -> None:
    if block_size not in BLOCK_SIZES:
        raise UserError(f"block size {block_size} is not one of {BLOCK_SIZES}", fix="use 64")


def check_part(name: str, tensor: Tensor, dtype: torch.dtype, numel: int, device: torch.device) -> None:
    """A buffer that a kernel reads or writes by address.

    Raises:
        UserError: other dtype, element count or device than needed, or not contiguous.
    """
    if tensor.dtype != dtype or tensor.numel() != numel or tensor.device != device or not tensor.is_contiguous():
        raise UserError(
            f"{name} must be {numel} contiguous {dtype} on {device}, got {tensor.numel()} {tensor.dtype} on "
            f"{tensor.device}{'' if tensor.is_contiguous() else ', not contiguous'}",
            fix="the parts do not belong together: quantize again",
        )


def check_state(state: AbsmaxState, blocks: int, device: torch.device) -> None:
    check_part("absmax_q", state.q, torch.uint8, blocks, device)
    check_part("absmax_code", state.code, torch.float32, 256, device)
    check_part("absmax2", state.absmax2, torch.float32, block_count(blocks, ABSMAX_BLOCK), device)
    check_part("offset", state.offset, torch.float32, 1, device)


def check_source(x: Tensor) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise UserError(f"cannot quantize {x.dtype}", fix="the tensor must be fp32, bf16 or fp16")
    if x.numel() == 0:
        raise UserError(f"cannot quantize an empty tensor, shape {tuple(x.shape)}", fix="leave it out")


def prepare_quantize(x: Tensor, block_size: int, codes: Tensor | None, absmax: Tensor | None) -> tuple[Tensor, Tensor]:
    """Check the source and the given buffers; make those not given."""
    check_block_size(block_size)
    check_source(x)
    n, blocks = x.numel(), block_count(x.numel(), block_size)
    codes = torch.empty((n + 1) // 2, dtype=torch.uint8, device=x.device) if codes is None else codes
    absmax = torch.empty(blocks, dtype=torch.float32, device=x.device) if absmax is None else absmax
    check_part("codes", codes, torch.uint8, (n + 1) // 2, x.device)
    check_part("absmax", absmax, torch.float32, blocks, x.device)
    return codes, absmax


def prepare_mxfp4(x: Tensor, codes: Tensor | None, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `prepare_quantize`."""
    check_source(x)
    n, blocks = x.numel(), block_count(x.numel(), MXFP4_BLOCK)
    codes = torch.empty((n + 1) // 2, dtype=torch.uint8, device=x.device) if codes is None else codes
    scales = torch.empty(blocks, dtype=torch.uint8, device=x.device) if scales is None else scales
    check_part("codes", codes, torch.uint8, (n + 1) // 2, x.device)
    check_part("scales", scales, torch.uint8, blocks, x.device)
    return codes, scales


def prepare_int8(x: Tensor, block_size: int, codes: Tensor | None, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `prepare_quantize`; blocks of any length."""
    check_source(x)
    check_int8_block(block_size)
    n, blocks = x.numel(), block_count(x.numel(), block_size)
    codes = torch.empty(n, dtype=torch.int8, device=x.device) if codes is None else codes
    scales = torch.empty(blocks, dtype=torch.float32, device=x.device) if scales is None else scales
    check_part("codes", codes, torch.int8, n, x.device)
    check_part("scales", scales, torch.float32, blocks, x.device)
    return codes, scales


def check_int8_block(block_size: int) -> None:
    if block_size < 1:
        raise UserError(f"block size {block_size} is less than 1", fix="use 64")


def check_output(out: Tensor, device: torch.device) -> None:
    if out.dtype not in FLOAT_DTYPES:
        raise UserError(f"cannot dequantize into {out.dtype}", fix="use fp32, bf16 or fp16")
    check_part("out", out, out.dtype, out.numel(), device)


def check_mxfp4(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    check_output(out, codes.device)
    check_part("codes", codes, torch.uint8, (out.numel() + 1) // 2, codes.device)
    check_part("scales", scales, torch.uint8, block_count(out.numel(), MXFP4_BLOCK), codes.device)


def check_int8(codes: Tensor, scales: Tensor, out: Tensor, block_size: int) -> None:
    check_int8_block(block_size)
    check_output(out, codes.device)
    check_part("codes", codes, torch.int8, out.numel(), codes.device)
    check_part("scales", scales, torch.float32, block_count(out.numel(), block_size), codes.device)


def check_dequantize(codes: Tensor, absmax: Tensor | AbsmaxState, out: Tensor, block_size: int) -> None:
    check_block_size(block_size)
    check_output(out, codes.device)
    n, blocks = out.numel(), block_count(out.numel(), block_size)
    check_part("codes", codes, torch.uint8, (n + 1) // 2, codes.device)
    if isinstance(absmax, AbsmaxState):
        check_state(absmax, blocks, codes.device)
    else:
        check_part("absmax", absmax, torch.float32, blocks, codes.device)


def check_run(codes: Tensor, run: AbsmaxRun, out: Tensor, block_size: int) -> None:
    """The parts of a run that its kernels read by address.

    Raises:
        UserError: parts whose sizes do not belong together.
    """
    check_block_size(block_size)
    tensors, blocks = run.q.shape
    n = tensors * blocks * block_size
    check_part("out", out, out.dtype, n, codes.device)
    check_part("codes", codes, torch.uint8, n // 2, codes.device)
    check_part("absmax_code", run.code, torch.float32, 256, codes.device)
    wanted = {"absmax_q": (run.q, torch.uint8, (tensors, blocks)), "offset": (run.offset, torch.float32, (tensors,)),
              "absmax2": (run.absmax2, torch.float32, (tensors, block_count(blocks, ABSMAX_BLOCK)))}  # fmt: skip
    for name, (part, dtype, shape) in wanted.items():
        row_is_dense = part.dim() == 1 or part.stride(1) == 1
        if part.dtype != dtype or part.shape != shape or part.device != codes.device or not row_is_dense:
            raise UserError(f"{name} must be {list(shape)} {dtype} on {codes.device}, got {list(part.shape)} {part.dtype} "
                            f"on {part.device}", fix="the parts do not belong together: quantize again")  # fmt: skip


def check_keep(row_keys: Tensor, columns: int, p: float) -> None:
    assert (row_keys.dtype, row_keys.dim()) == (torch.int64, 1), "row_keys is int64 [T]"
    assert columns >= 0, columns
    assert 0 <= p < 1, p


def drop_threshold(p: float) -> int:
    """A 32-bit hash below this drops its element."""
    return min(round(p * 2**32), 2**32 - 1)


JOB = 8
"""Numbers of a tensor in `dequantize_nf4_many`: byte offsets of codes, absmax (-1: double quantised), absmax_q,
absmax_code, absmax2 and offset in the buffer (-1: not there), its first value's place in the output, its values."""


def check_jobs(base: Tensor, jobs: Tensor, out: Tensor) -> None:
    assert base.dtype == torch.uint8
    assert base.is_contiguous()
    assert jobs.dtype == torch.int64
    assert jobs.is_contiguous()
    assert jobs.shape[1:] == (JOB,)
    assert out.is_contiguous()
