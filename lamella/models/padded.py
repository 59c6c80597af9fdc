"""Packed tokens as right-padded rows: of every sequence one, or of every path from a tree's root to a leaf.

Shape suffixes: T packed tokens, n rows of a group, L padded length, P = sum of n L over the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from lamella.models.layout import PackedBatch

_MAX_PADDING = 1.3  # a group may compute at most this many rows per real row


def by_length(lengths: list[int]) -> list[list[int]]:
    """Group sequences of similar length, keeping the order where all are alike."""
    filled = [s for s in range(len(lengths)) if lengths[s]]
    if len({lengths[s] for s in filled}) <= 1:
        return [filled] if filled else []
    groups: list[list[int]] = []
    real = 0
    for s in sorted(filled, key=lambda s: -lengths[s]):
        if groups:
            padded = lengths[groups[-1][0]] * (len(groups[-1]) + 1)
            if padded <= _MAX_PADDING * (real + lengths[s]):
                groups[-1].append(s)
                real += lengths[s]
                continue
        groups.append([s])
        real = lengths[s]
    return groups


@dataclass(frozen=True)
class RowGroup:
    """Rows computed together: `index_nL` says which packed token stands where (a row's last one again as padding)."""

    index_nL: Tensor
    lengths: tuple[int, ...]


def paths(batch: PackedBatch) -> list[Tensor]:
    """Tokens of every row, int64: of every sequence, or of every path from a tree's root to a leaf."""
    until_T = batch.visible_until.cpu()
    token_T = torch.arange(batch.tokens)
    found = []
    for leaf in (token_T + 1 == until_T).nonzero().flatten().tolist():
        found.append((until_T[: leaf + 1] > leaf).nonzero().flatten())
    return found


class Rows:
    """How the tokens of a packed batch lie in padded rows.

    Args:
        batch: the packed batch.
        multiple: rows are padded so that a group has a multiple of as many tokens (see `engine.walk.PAD_TOKENS`).
    """

    def __init__(self, batch: PackedBatch, multiple: int = 1) -> None:
        device, rows = batch.input_ids.device, paths(batch)
        self.groups: list[RowGroup] = []
        first_T = torch.full((batch.tokens,), -1, dtype=torch.int64)
        real: list[Tensor] = []
        offset = 0
        for members in by_length([len(row) for row in rows]):
            members = sorted(members)
            unit = multiple // gcd(multiple, len(members))
            length = -(-max(len(rows[r]) for r in members) // unit) * unit
            index_nL = torch.stack([torch.cat([rows[r], rows[r][-1:].expand(length - len(rows[r]))]) for r in members])
            for at, r in enumerate(members):
                place = offset + at * length + torch.arange(len(rows[r]))
                real.append(place)
                new = first_T[rows[r]] < 0
                first_T[rows[r][new]] = place[new]
            self.groups.append(RowGroup(index_nL.to(device), tuple(len(rows[r]) for r in members)))
            offset += index_nL.numel()
        empty = [torch.zeros(0, dtype=torch.int64)]
        self.once = not batch.is_tree
        self.inverse_T = first_T.to(device)
        self.real = torch.cat(real or empty).to(device)
        self.index_P = torch.cat([g.index_nL.flatten() for g in self.groups] or empty).to(device)
        assert not bool((first_T < 0).any()), "a token stands in no row"


class _Split(torch.autograd.Function):
    """[1, T, ...] -> one [n, L, ...] per group; gradients of a token's copies are summed, padding's are dropped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> tuple[Tensor, ...]:
        ctx.rows, ctx.shape = rows, x.shape
        ctx.set_materialize_grads(True)
        return tuple(x[0].index_select(0, g.index_nL.flatten()).view(*g.index_nL.shape, *x.shape[2:])
                     for g in rows.groups)  # fmt: skip

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rows: Rows = ctx.rows
        flat = [g.reshape(-1, *ctx.shape[2:]) for g in grads]
        grad_P = flat[0] if len(flat) == 1 else torch.cat(flat)
        if rows.once:
            return grad_P.index_select(0, rows.inverse_T)[None], None
        summed = grad_P.new_zeros(ctx.shape[1:])
        summed.index_add_(0, rows.index_P[rows.real], grad_P[rows.real])
        return summed[None], None


class _Join(torch.autograd.Function):
    """One [n, L, H] per group -> [1, T, H]: each token's output from the first row it stands in."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, *outs: Tensor) -> Tensor:
        ctx.rows, ctx.shapes = rows, [o.shape for o in outs]
        flat = [o.reshape(-1, o.shape[-1]) for o in outs]
        return (flat[0] if len(flat) == 1 else torch.cat(flat)).index_select(0, rows.inverse_T)[None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows: Rows = ctx.rows
        grad_P = grad.new_zeros(rows.index_P.numel(), grad.shape[-1])
        grad_P[rows.inverse_T] = grad[0]
        parts = grad_P.split([s[0] * s[1] for s in ctx.shapes])
        return None, *(part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


def split(x: Tensor, rows: Rows) -> tuple[Tensor, ...]:
    """[1, T, ...] -> one [n, L, ...] per group."""
    found: tuple[Tensor, ...] = _Split.apply(x, rows)
    return found


def join(rows: Rows, outs: Sequence[Tensor]) -> Tensor:
    """One [n, L, H] per group -> [1, T, H]."""
    joined: Tensor = _Join.apply(rows, *outs)
    return joined
