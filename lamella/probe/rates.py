"""Rates of the kernels that a training step is made of, at real shapes, with the threads that training uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lamella.hardware.machine import KernelRates
from lamella.hardware.matmul import native_dtype
from lamella.probe import own, products
from lamella.probe.pool import REGION_BYTES, Pool
from lamella.probe.timing import Clock, Effort, Piece, measure

LENGTHS, LENGTHS_QUICK = (32, 128, 512, 2048, 8192), (64, 512)
HEAD_SIZES = (64, 128)
VALUES, VALUES_QUICK = (1 << 15, 1 << 18, 1 << 21, 1 << 24), (1 << 15, 1 << 21)
ROUTED, ROUTED_QUICK = (32, 512, 4096), (64, 1024)
WEIGHTS, WEIGHTS_QUICK = (1 << 16, 1 << 19, 1 << 22, 1 << 25), (1 << 18, 1 << 22)
UPDATED = 1 << 21
CHAIN = 100
RESERVE_S, RESERVE_QUICK_S = 22.0, 3.0
"""Left for what comes after the kernels' rounds: steps of small models, the disk, sums among ranks."""


class KernelWork:
    """Everything that is measured, in pieces, and the rates from their times."""

    def __init__(self, quick: bool, dtype: torch.dtype) -> None:
        pool = Pool(dtype, REGION_BYTES // 4 if quick else REGION_BYTES)
        self.products = products.product_pieces(products.QUICK if quick else products.FULL, pool)
        self.experts = own.expert_pieces(own.EXPERTS_QUICK if quick else own.EXPERTS, pool)
        self.attention = own.attention_pieces(LENGTHS_QUICK if quick else LENGTHS, HEAD_SIZES, pool)
        self.rows = own.row_pieces(VALUES_QUICK if quick else VALUES, ROUTED_QUICK if quick else ROUTED, pool)
        self.rows += own.dequantise_pieces(WEIGHTS_QUICK if quick else WEIGHTS, pool)
        self.others = [Piece("call", call_chain()), Piece("update", update_of(UPDATED)), Piece("sum", plain_sum(pool))]

    def groups(self) -> dict[str, list[Piece[Any]]]:
        """By what they are, for progress."""
        return {"matrix products": [*self.products], "experts on 4-bit weights": self.experts, "attention": self.attention,
                "norms, activations and routing": self.rows, "calls and optimizer": self.others}  # fmt: skip

    def rates(self, threads: int, seconds: Callable[[Piece[Any]], float] = lambda piece: piece.median_s) -> KernelRates:
        """`seconds`: of a piece, from its rounds."""
        others = {piece.key: seconds(piece) for piece in self.others}
        return KernelRates(
            threads=threads,
            matmul=tuple(piece.key.point(seconds(piece)) for piece in self.products),
            experts=tuple(own.expert_points({piece.key: seconds(piece) for piece in self.experts})),
            attention=tuple(own.attention_points({piece.key: seconds(piece) for piece in self.attention})),
            rows=tuple(p.key.point(seconds(p)) for p in self.rows),
            row_bytes_per_s=6.0 * VALUES[-1] / others["sum"],
            call_s=others["call"] / (4 * CHAIN),  # each function and the operation in it, there and back
            update_parameters_per_s=UPDATED / others["update"],
        )


def measure_kernels(
    threads: int | None,
    quick: bool,
    on_progress: Callable[[str], None],
    clock: Clock | None = None,
    in_place: bool = True,
) -> KernelRates:
    """Measure products, experts, attention and row-wise work of this CPU in the dtype it computes in natively, and what a layer
    takes besides.

    Args:
        threads: of torch; None: as torch has them.
        quick: a coarse grid, in a few seconds, instead of about half a minute on idle cores.
        on_progress: told what is measured now.
        clock: how long the whole may take; rounds after the first are left out where it runs short.
        in_place: measure what a layer takes beside its kernels too; it needs the engine, whose imports take seconds.
    """
    clock = clock or Clock()
    reserve_s = RESERVE_QUICK_S if quick else RESERVE_S
    before = torch.get_num_threads()
    effort = Effort(1, 0.001) if quick else Effort(4, 0.003)
    try:
        torch.set_num_threads(threads or before)
        dtype = native_dtype(torch.device("cpu"))
        work = KernelWork(quick, dtype)
        for turn in range(effort.rounds):
            for what, pieces in work.groups().items():
                on_progress(f"{what}, round {turn + 1} of {effort.rounds}")
                measure(pieces, Effort(1, effort.turn_s), clock, reserve_s)
        rates = work.rates(torch.get_num_threads())
        del work
        if not in_place:
            return rates
        from lamella.probe.in_place import measure_in_place

        return rates.model_copy(update={"fixed": measure_in_place(rates, dtype, quick, on_progress, clock)})
    finally:
        torch.set_num_threads(before)


class _Nothing(torch.autograd.Function):
    """Does next to nothing: what is left is the cost of being called."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.neg()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.neg()


def call_chain() -> Callable[[], object]:
    """`CHAIN` functions of autograd one after the other, there and back."""
    leaf = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)

    def chain() -> None:
        x = leaf
        for _ in range(CHAIN):
            x = _Nothing.apply(x)
        torch.autograd.grad(x, leaf, torch.ones_like(x))

    return chain


def plain_sum(pool: Pool) -> Callable[[], object]:
    """The sum of two bf16 arrays, in a third: 6 bytes a value."""
    x, y, out = (pool.tensor(use, VALUES[-1]) for use in ("a", "b", "out"))
    return lambda: torch.add(x, y, out=out)


def update_of(parameters: int) -> Callable[[], object]:
    """The optimizer's work on so many parameters in eight tensors."""
    held = [torch.nn.Parameter(torch.zeros(parameters // 8)) for _ in range(8)]
    for p in held:
        p.grad = torch.full_like(p, 1e-3)
    return own.updating(held)
