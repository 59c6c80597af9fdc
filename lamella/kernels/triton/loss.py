"""Cross-entropy of a linear head without its logits in memory (as in "Cut Your Losses", Wijmans et al. 2024).

Pass 1 multiplies tiles of hidden states and vocabulary and keeps, of each tile, the largest logit and the sum of
exponentials relative to it: [N, V / tile]. Their combination is the log-sum-exp. Pass 2, for one slice of the vocabulary
after the other, multiplies again, turns logits into p - (1 at the target), and multiplies those with the slice's weights;
products of slices are added in fp32. Alive at once: one slice of p, [N, slice], in the compute dtype.

Shape suffixes: N positions, V vocabulary, H hidden.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamella.kernels.triton.grouped import Tiling, tiling_of

SLICE_BYTES = 256 << 20
"""Bytes of p alive at once (one column tile at least)."""


@triton.jit
def _logits(hidden, weight, row, column, N, V, H, M_TILE: tl.constexpr, N_TILE: tl.constexpr, K_TILE: tl.constexpr):
    """fp32 [M_TILE, N_TILE] of hidden weight^T."""
    k = tl.arange(0, K_TILE)
    h_at = hidden + row.to(tl.int64)[:, None] * H + k[None, :]
    w_at = weight + column.to(tl.int64)[None, :] * H + k[:, None]
    acc = tl.zeros((M_TILE, N_TILE), tl.float32)
    for step in range(0, tl.cdiv(H, K_TILE)):
        real_k = k < H - step * K_TILE
        a = tl.load(h_at, mask=(row < N)[:, None] & real_k[None, :], other=0.0)
        b = tl.load(w_at, mask=real_k[:, None] & (column < V)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        h_at += K_TILE
        w_at += K_TILE
    return acc


@triton.jit(do_not_specialize=["N"])
def _statistics(
    hidden, weight, target, largest, total, chosen, N, V, H, tiles, M_TILE: tl.constexpr, N_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * M_TILE + tl.arange(0, M_TILE)
    column = tl.program_id(1) * N_TILE + tl.arange(0, N_TILE)
    acc = _logits(hidden, weight, row, column, N, V, H, M_TILE, N_TILE, K_TILE)
    acc = tl.where((column < V)[None, :], acc, float("-inf"))
    top = tl.max(acc, axis=1)
    at = row.to(tl.int64) * tiles + tl.program_id(1)
    tl.store(largest + at, top, mask=row < N)
    tl.store(total + at, tl.sum(tl.exp(acc - top[:, None]), axis=1), mask=row < N)
    wanted = tl.load(target + row, mask=row < N, other=-1).to(tl.int32)
    hit = column[None, :] == wanted[:, None]
    here = (wanted >= tl.program_id(1) * N_TILE) & (wanted < (tl.program_id(1) + 1) * N_TILE)
    tl.store(chosen + row, tl.sum(tl.where(hit, acc, 0.0), axis=1), mask=(row < N) & here)


@triton.jit(do_not_specialize=["N", "first"])
def _residual(
    hidden, weight, target, lse, out, first, N, V, H, columns, M_TILE: tl.constexpr, N_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * M_TILE + tl.arange(0, M_TILE)
    local = tl.program_id(1) * N_TILE + tl.arange(0, N_TILE)
    column = first + local
    acc = _logits(hidden, weight, row, column, N, V, H, M_TILE, N_TILE, K_TILE)
    norm = tl.load(lse + row, mask=row < N, other=0.0)
    wanted = tl.load(target + row, mask=row < N, other=-1).to(tl.int32)
    p = tl.exp(acc - norm[:, None]) - tl.where(column[None, :] == wanted[:, None], 1.0, 0.0)
    at = out + row.to(tl.int64)[:, None] * columns + local[None, :]
    tl.store(
        at, p.to(out.dtype.element_ty), mask=(row < N)[:, None] & (local < columns)[None, :] & (column < V)[None, :]
    )


def _product(p_NC: Tensor, weight_CH: Tensor) -> Tensor:
    """fp32 [N, H]."""
    if p_NC.is_cuda and p_NC.dtype != torch.float32:
        return torch.mm(p_NC, weight_CH, out_dtype=torch.float32)
    return p_NC.float() @ weight_CH.float()


def linear_cross_entropy(
    hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, factor: float, gradient: bool = True, *,
    slice_bytes: int = SLICE_BYTES, tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Cross-entropy of logits hidden weight^T (computed in fp32) at each target.

    Args:
        hidden_NH: bf16, fp16 or fp32, like weight_VH.
        target_N: int64, 0 <= target < V.
        factor: the gradient is that of factor * sum of the losses.
        gradient: False: losses alone.
        slice_bytes: bound of the slice of probabilities alive at once.

    Returns:
        losses fp32 [N], and the gradient at hidden_NH in its dtype, or None.
    """
    (n, h), v = hidden_NH.shape, weight_VH.shape[0]
    if n == 0:
        return hidden_NH.new_zeros(0, dtype=torch.float32), torch.zeros_like(hidden_NH) if gradient else None
    hidden_NH, weight_VH, target_N = hidden_NH.contiguous(), weight_VH.contiguous(), target_N.contiguous()
    made = tiling or tiling_of(hidden_NH.device, hidden_NH.dtype)
    sizes = {"M_TILE": made.m, "N_TILE": made.n, "K_TILE": made.k}
    launch = {"num_warps": made.warps, "num_stages": made.stages}
    tiles = triton.cdiv(v, made.n)
    largest, total = hidden_NH.new_empty(2, n, tiles, dtype=torch.float32)
    chosen_N = hidden_NH.new_empty(n, dtype=torch.float32)
    _statistics[(triton.cdiv(n, made.m), tiles)](
        hidden_NH, weight_VH, target_N, largest, total, chosen_N, n, v, h, tiles, **sizes, **launch
    )  # fmt: skip
    lse_N = torch.logsumexp(largest + total.log(), dim=1)
    loss_N = lse_N - chosen_N
    if not gradient:
        return loss_N, None
    columns = max(made.n, slice_bytes // (n * hidden_NH.element_size()) // made.n * made.n)
    grad_NH = torch.zeros(n, h, dtype=torch.float32, device=hidden_NH.device)
    for first in range(0, v, columns):
        width = min(columns, v - first)
        p_NC = hidden_NH.new_empty(n, width)
        _residual[(triton.cdiv(n, made.m), triton.cdiv(width, made.n))](
            hidden_NH, weight_VH, target_N, lse_N, p_NC, first, n, v, h, width, **sizes, **launch
        )  # fmt: skip
        grad_NH += _product(p_NC, weight_VH[first : first + width])
    return loss_N, grad_NH.mul_(factor).to(hidden_NH.dtype)
