"""Grouped expert matmuls over rows sorted by expert, with LoRA in the same pass.

Rows offsets[e] .. offsets[e + 1] of x belong to expert e. Three shapes of work:

    grouped_linear   y = x W_e^T + scale (x A_e^T) B_e^T              forward of an expert's weight
    grouped_input    dx = dy W_e + scale (dy B_e) A_e * keep          gradient at its input
    grouped_outer    G_e = alpha big_e^T small_e                      gradients of A and B

Tiles of rows never cross an expert's border. Which expert and which rows each tile has is worked out on the device from
the offsets; the host only knows an upper bound of how many tiles there are (S / TILE + E), surplus ones end at once, so
nothing waits for the device. Products are summed in fp32, in an order fixed by the shapes: no atomics.

The library's grouped matmul (`torch.nn.functional.grouped_mm`, CUTLASS on Hopper and later) may do the product with the
frozen weight: where a weight has no LoRA, `choose` says which one is used. (With LoRA it would take a pass of its own over
an output already rounded, in which a young adapter's effect is lost; `how="library"` measures that.)

Shape suffixes: S rows sorted by expert, E experts, K summed features, N features out, I inputs, O outputs, r rank.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lamella.kernels.triton import interpreted

How = Literal["triton", "library"]

LIBRARY_CAPABILITY = (9, 0)
LIBRARY_ROWS = 64
"""`choose`: on devices from this compute capability on, with at least this many rows per expert on average, in bf16, the
library's grouped matmul is used. `python -m bench.gpu --only grouped` measures both on either side of the rule."""


@dataclass(frozen=True)
class Tiling:
    """Rows, columns and summed features of a tile; warps and pipeline stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


WIDE_CAPABILITIES = ((8, 0), (9, 0), (10, 0))
WIDE = Tiling(128, 256, 64, 8, 3)
"""For devices with 160 kB of shared memory or more per block (`WIDE_CAPABILITIES`)."""
NARROW = Tiling(128, 128, 32, 4, 3)
"""For the others (8.6, 8.9, 12.0: 100 kB)."""
PLAIN = Tiling(64, 64, 32, 4, 2)
"""For fp32, without tensor cores."""
SKINNY = Tiling(64, 16, 64, 4, 3)
"""For products with A or B: as many columns as the rank."""
TALL = Tiling(128, 16, 64, 4, 3)
"""For gradients of A and B: m columns of the wide side, k rows at a time."""
TALL_FP32 = Tiling(64, 16, 32, 4, 2)
SMALL = Tiling(16, 128, 128, 1, 1)
"""For the interpreter, whose time goes by the number of operations."""


def tiling_of(device: torch.device, dtype: torch.dtype) -> Tiling:
    if device.type != "cuda":
        return SMALL
    if dtype == torch.float32:
        return PLAIN
    wide = torch.cuda.get_device_capability(device) in WIDE_CAPABILITIES
    return WIDE if wide else NARROW


def choose(rows: int, experts: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> How:
    """Which grouped matmul multiplies with the frozen weights: see `LIBRARY_ROWS`. By shape alone, never by the data."""
    if device.type != "cuda" or dtype != torch.bfloat16 or not hasattr(F, "grouped_mm") or k % 8 or n % 8:
        return "triton"
    if torch.cuda.get_device_capability(device) < LIBRARY_CAPABILITY:
        return "triton"
    return "library" if rows >= LIBRARY_ROWS * experts else "triton"


@dataclass(frozen=True)
class Groups:
    """Where each expert's rows are.

    Attributes:
        offsets: int32 [E + 1] on the device; the last is the number of rows.
        rows: S, known to the host.
    """

    offsets: Tensor
    rows: int
    _tiles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def experts(self) -> int:
        return self.offsets.numel() - 1

    @classmethod
    def of_sorted(cls, expert_S: Tensor, experts: int) -> Groups:
        """From each row's expert, ascending; without waiting for the device."""
        edges = torch.arange(experts + 1, device=expert_S.device, dtype=expert_S.dtype)
        return cls(torch.searchsorted(expert_S.contiguous(), edges, out_int32=True), expert_S.numel())

    def counts(self) -> Tensor:
        """int64 [E] rows of each expert, on the device."""
        return (self.offsets[1:] - self.offsets[:-1]).long()

    def tiles(self, size: int) -> tuple[Tensor, Tensor]:
        """(expert, first row) of each tile, int32 [bound] on the device; expert is E where there is no tile.

        Tile t belongs to the expert whose cumulated tile counts first exceed t. Worked out once per size.
        """
        if size in self._tiles:
            return self._tiles[size]
        bound = -(-self.rows // size) + self.experts
        ends_E = torch.cumsum((self.counts() + size - 1) // size, 0)
        tile = torch.arange(bound, device=self.offsets.device)
        expert = torch.searchsorted(ends_E, tile, right=True)
        known = expert.clamp(max=self.experts - 1)
        before = torch.where(known > 0, ends_E[(known - 1).clamp(min=0)], 0)
        first = self.offsets[known] + (tile - before) * size
        self._tiles[size] = expert.int(), first.int()
        return self._tiles[size]


@triton.jit(do_not_specialize=["n_tiles"])
def _matmul(
    x, w, y, low, factor, keep, bias, tile_expert, tile_first, offsets, n_tiles, experts, K, N, R, scale,
    stride_we, stride_wk, stride_wn, stride_fe, stride_fr, stride_fn,
    M_TILE: tl.constexpr, N_TILE: tl.constexpr, K_TILE: tl.constexpr, R_TILE: tl.constexpr, GROUP: tl.constexpr,
    LORA: tl.constexpr, KEEP: tl.constexpr, BIAS: tl.constexpr, BASE: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """y[rows, N] = x[rows, K] w_e[K, N] + scale low[rows, R] factor_e[R, N] (* keep) + bias_e; without BASE added to y."""
    pid = tl.program_id(0)
    columns = tl.cdiv(N, N_TILE)
    width = GROUP * columns  # GROUP row tiles share their columns' weights in the cache
    first_tile = pid // width * GROUP
    group = tl.minimum(n_tiles - first_tile, GROUP)
    tile = first_tile + pid % width % group
    column = pid % width // group
    e = tl.load(tile_expert + tile)
    if e < experts:
        row = tl.load(tile_first + tile) + tl.arange(0, M_TILE)
        inside = row < tl.load(offsets + e + 1)
        n = column * N_TILE + tl.arange(0, N_TILE)
        real_n = n < N
        row64 = row.to(tl.int64)
        e64 = e.to(tl.int64)
        y_at = y + row64[:, None] * N + n[None, :]
        mask = inside[:, None] & real_n[None, :]
        if LORA:  # first, so that one accumulator is enough
            r = tl.arange(0, R_TILE)
            l_at = low + row64[:, None] * R + r[None, :]
            f_at = factor + e64 * stride_fe + r[:, None] * stride_fr + n.to(tl.int64)[None, :] * stride_fn
            left = tl.load(l_at, mask=inside[:, None] & (r < R)[None, :], other=0.0)
            right = tl.load(f_at, mask=(r < R)[:, None] & real_n[None, :], other=0.0)
            acc = tl.dot(left, right, input_precision="ieee") * scale
            if KEEP:
                acc *= tl.load(keep + row64[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
        else:
            acc = tl.zeros((M_TILE, N_TILE), tl.float32)
        if BASE:
            k = tl.arange(0, K_TILE)
            x_at = x + row64[:, None] * K + k[None, :]
            w_at = w + e64 * stride_we + k.to(tl.int64)[:, None] * stride_wk + n.to(tl.int64)[None, :] * stride_wn
            for step in range(0, tl.cdiv(K, K_TILE)):
                if EVEN_K:
                    a = tl.load(x_at, mask=inside[:, None], other=0.0)
                    b = tl.load(w_at, mask=real_n[None, :], other=0.0)
                else:
                    real_k = k < K - step * K_TILE
                    a = tl.load(x_at, mask=inside[:, None] & real_k[None, :], other=0.0)
                    b = tl.load(w_at, mask=real_k[:, None] & real_n[None, :], other=0.0)
                acc = tl.dot(a, b, acc, input_precision="ieee")
                x_at += K_TILE
                w_at += K_TILE * stride_wk
        if BIAS:
            acc += tl.load(bias + e64 * N + n, mask=real_n, other=0.0).to(tl.float32)[None, :]
        if not BASE:
            acc += tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_at, acc.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _outer(
    big, small, keep, out, offsets, M, R, alpha, stride_oe, stride_om, stride_or,
    M_TILE: tl.constexpr, R_TILE: tl.constexpr, S_TILE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """out_e[M, R] = alpha big_e[rows, M]^T small_e[rows, R]; rows in their order, so the sum is always the same."""
    e = tl.program_id(1)
    m = tl.program_id(0) * M_TILE + tl.arange(0, M_TILE)
    r = tl.arange(0, R_TILE)
    s = tl.arange(0, S_TILE)
    real_m = m < M
    first = tl.load(offsets + e)
    last = tl.load(offsets + e + 1)
    acc = tl.zeros((M_TILE, R_TILE), tl.float32)
    for start in range(first, last, S_TILE):
        row = start + s
        inside = row < last
        row64 = row.to(tl.int64)
        at = row64[:, None] * M + m[None, :]
        mask = inside[:, None] & real_m[None, :]
        a = tl.load(big + at, mask=mask, other=0.0)
        if KEEP:
            a = (a * tl.load(keep + at, mask=mask, other=0.0)).to(a.dtype)
        b = tl.load(small + row64[:, None] * R + r[None, :], mask=inside[:, None] & (r < R)[None, :], other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
    o_at = out + e.to(tl.int64) * stride_oe + m.to(tl.int64)[:, None] * stride_om + r[None, :] * stride_or
    tl.store(o_at, (acc * alpha).to(out.dtype.element_ty), mask=real_m[:, None] & (r < R)[None, :])


def _rank_tile(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))


def _launch(
    x_SK: Tensor, w_EKN: Tensor, groups: Groups, y_SN: Tensor, tiling: Tiling, *, base: bool = True,
    low_Sr: Tensor | None = None, factor_ErN: Tensor | None = None, scale: float = 1.0, keep_SN: Tensor | None = None,
    bias_EN: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`w_EKN` and `factor_ErN` may be any strided views."""
    (rows, k), n = x_SK.shape, y_SN.shape[1]
    if rows == 0 or n == 0:
        return y_SN
    assert x_SK.is_contiguous()
    assert y_SN.is_contiguous()
    assert y_SN.shape[0] == rows == groups.rows
    assert not base or w_EKN.shape == (groups.experts, k, n), (w_EKN.shape, groups.experts, k, n)
    lora = low_Sr is not None and factor_ErN is not None
    low = low_Sr.contiguous() if low_Sr is not None else x_SK
    factor = factor_ErN if factor_ErN is not None else w_EKN
    rank = low.shape[1] if lora else 0
    expert, first = groups.tiles(tiling.m)
    tiles = expert.numel()
    _matmul[(tiles * triton.cdiv(n, tiling.n),)](
        x_SK, w_EKN, y_SN, low, factor, x_SK if keep_SN is None else keep_SN.contiguous(),
        x_SK if bias_EN is None else bias_EN.contiguous(), expert, first, groups.offsets, tiles, groups.experts, k, n, rank,
        float(scale), *w_EKN.stride(), *factor.stride(),
        M_TILE=tiling.m, N_TILE=tiling.n, K_TILE=tiling.k, R_TILE=_rank_tile(rank), GROUP=8, LORA=lora,
        KEEP=keep_SN is not None, BIAS=bias_EN is not None, BASE=base, EVEN_K=k % tiling.k == 0,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return y_SN


def _skinny(x_SK: Tensor, w_EKr: Tensor, groups: Groups) -> Tensor:
    """x_e w_e with few columns: [S, r] in x's dtype."""
    out_Sr = x_SK.new_empty(x_SK.shape[0], w_EKr.shape[2])
    tiling = SMALL if interpreted() and x_SK.device.type == "cpu" else SKINNY
    columns = min(_rank_tile(w_EKr.shape[2]), 128)
    return _launch(x_SK, w_EKr, groups, out_Sr, Tiling(tiling.m, columns, tiling.k, tiling.warps, tiling.stages))


def _product(
    x_SK: Tensor, w_EKN: Tensor, groups: Groups, low_Sr: Tensor | None, factor_ErN: Tensor | None, scale: float,
    keep_SN: Tensor | None, bias_EN: Tensor | None, how: How | None, tiling: Tiling | None,
) -> Tensor:  # fmt: skip
    rows, k = x_SK.shape
    n = w_EKN.shape[2]
    tiling = tiling or tiling_of(x_SK.device, x_SK.dtype)
    low = {"low_Sr": low_Sr, "factor_ErN": factor_ErN, "scale": scale, "keep_SN": keep_SN, "bias_EN": bias_EN}
    if how is None:  # LoRA is added before the one rounding to 16 bit, which would swallow a young adapter's effect
        how = "triton" if low_Sr is not None else choose(rows, groups.experts, k, n, x_SK.dtype, x_SK.device)
    if how == "triton":
        return _launch(x_SK, w_EKN, groups, x_SK.new_empty(rows, n), tiling, **low)  # type: ignore[arg-type]
    y_SN = F.grouped_mm(x_SK, w_EKN, offs=groups.offsets[1:])
    if low_Sr is None and bias_EN is None:
        return y_SN
    return _launch(x_SK, w_EKN, groups, y_SN, tiling, base=False, **low)  # type: ignore[arg-type]


def grouped_linear(
    x_SI: Tensor, w_EOI: Tensor, groups: Groups, a_ErI: Tensor | None = None, b_EOr: Tensor | None = None,
    scale: float = 1.0, *, dropped_SI: Tensor | None = None, bias_EO: Tensor | None = None, transposed: bool = False,
    how: How | None = None, tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y = x W_e^T + bias_e + scale (dropped A_e^T) B_e^T for each row's expert e.

    Args:
        x_SI: rows sorted by expert, contiguous.
        w_EOI: frozen weights, [E, I, O] if `transposed`.
        dropped_SI: input of A where it is not x (dropout).
        how: "triton", "library", or None: `choose`.

    Returns:
        y [S, O], and x A_e^T [S, r] in x's dtype where there is LoRA (the backward needs it).
    """
    xa_Sr = (
        None if a_ErI is None else _skinny(x_SI if dropped_SI is None else dropped_SI, a_ErI.transpose(1, 2), groups)
    )
    w_EKN = w_EOI if transposed else w_EOI.transpose(1, 2)
    factor = None if b_EOr is None else b_EOr.transpose(1, 2)
    return _product(x_SI, w_EKN, groups, xa_Sr, factor, scale, None, bias_EO, how, tiling), xa_Sr


def grouped_input(
    dy_SO: Tensor, w_EOI: Tensor, groups: Groups, a_ErI: Tensor | None = None, dxa_Sr: Tensor | None = None, *,
    keep_SI: Tensor | None = None, transposed: bool = False, how: How | None = None, tiling: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """dx = dy W_e + dxa A_e (* keep): gradient at the input, [S, I].

    Args:
        dxa_Sr: scale dy B_e, from `grouped_low`.
        keep_SI: what x was multiplied by before A (0 or 1 / (1 - p)).
    """
    w_EKN = w_EOI.transpose(1, 2) if transposed else w_EOI
    return _product(dy_SO, w_EKN, groups, dxa_Sr, a_ErI, 1.0, keep_SI, None, how, tiling)


def grouped_low(dy_SO: Tensor, b_EOr: Tensor, groups: Groups) -> Tensor:
    """dy B_e: [S, r] in dy's dtype."""
    return _skinny(dy_SO, b_EOr, groups)


def grouped_outer(
    big_SM: Tensor, small_Sr: Tensor, groups: Groups, out: Tensor, alpha: float = 1.0, *,
    keep_SM: Tensor | None = None, swapped: bool = False, tiling: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """out_e = alpha big_e^T small_e, [E, M, r]; an expert without rows gets zeros.

    Args:
        out: filled; [E, M, r], or [E, r, M] if `swapped`.
        keep_SM: multiplied with `big` first, rounded to its dtype.
    """
    experts, m, rank = groups.experts, big_SM.shape[1], small_Sr.shape[1]
    assert big_SM.is_contiguous()
    assert out.shape == ((experts, rank, m) if swapped else (experts, m, rank))
    stride_e, *strides = out.stride()
    stride_m, stride_r = reversed(strides) if swapped else strides
    if tiling is None:
        tiling = SMALL if not big_SM.is_cuda else TALL if big_SM.dtype != torch.float32 else TALL_FP32
    _outer[(triton.cdiv(m, tiling.m), experts)](
        big_SM, small_Sr.contiguous(), big_SM if keep_SM is None else keep_SM.contiguous(), out, groups.offsets, m, rank,
        float(alpha), stride_e, stride_m, stride_r,
        M_TILE=tiling.m, R_TILE=_rank_tile(rank), S_TILE=tiling.k, KEEP=keep_SM is not None, num_warps=tiling.warps,
        num_stages=tiling.stages,
    )  # fmt: skip
    return out
