"""Rates of `torch.mm` (oneDNN) over a grid of shapes, in the forms in which a step multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lamella.hardware.machine import MatmulPoint, ProductForm
from lamella.probe.pool import Pool
from lamella.probe.timing import Piece


@dataclass(frozen=True)
class ProductGrid:
    """Sizes measured: `tokens` rows of activations, `features` of layers, `ranks` of LoRA groups; products of more than
    `most_flops` are left out."""

    tokens: tuple[int, ...]
    features: tuple[int, ...]
    ranks: tuple[int, ...]
    most_flops: float

    def shapes(self) -> Iterator[Shape]:
        for t in self.tokens:
            for a in self.features:
                for b in self.features:
                    if 2.0 * t * a * b <= self.most_flops:
                        yield Shape("forward", t, a, b)
                        yield Shape("backward", t, a, b)
                for r in self.ranks:
                    yield Shape("narrow", t, a, r)
                    yield Shape("narrow_back", t, a, r)
                    yield Shape("widen", t, r, a)
                    yield Shape("widen_back", t, r, a)
                    yield Shape("gradient", r, t, a)


@dataclass(frozen=True)
class Shape:
    """[rows, inner] x [inner, columns] in one of the forms of `MatmulPoint`."""

    form: ProductForm
    rows: int
    inner: int
    columns: int

    def operands(self, pool: Pool) -> Callable[[], tuple[Tensor, Tensor]]:
        """The two matrices, elsewhere in memory each time."""
        if self.form == "gradient":
            left, right = pool.turning("a", self.inner, self.rows), pool.turning("b", self.inner, self.columns)
            return lambda: (left().T, right())
        left = pool.turning("a", self.rows, self.inner)
        if self.form in ("forward", "narrow", "widen"):
            right = pool.turning("b", self.columns, self.inner)
            return lambda: (left(), right().T)
        right = pool.turning("b", self.inner, self.columns)
        return lambda: (left(), right())

    def point(self, seconds: float) -> MatmulPoint:
        flops = 2.0 * self.rows * self.inner * self.columns
        return MatmulPoint(form=self.form, rows=self.rows, inner=self.inner, columns=self.columns,
                           flops_per_s=flops / seconds)  # fmt: skip


FULL = ProductGrid((32, 128, 512, 2048), (256, 1024, 4096, 12288), (8, 32, 128), 1.3e11)
QUICK = ProductGrid((64, 1024), (512, 4096), (16, 64), 4e10)


def product_pieces(grid: ProductGrid, pool: Pool) -> list[Piece[Shape]]:
    """One per shape; LoRA's second product and both gradients write over what is there, the frozen layer's product with
    LoRA adds to it, which costs about as much."""
    return [_piece(shape, pool) for shape in grid.shapes()]


def _piece(shape: Shape, pool: Pool) -> Piece[Shape]:
    out, operands = pool.turning("out", shape.rows, shape.columns), shape.operands(pool)
    return Piece(shape, lambda: torch.mm(*operands(), out=out()))
