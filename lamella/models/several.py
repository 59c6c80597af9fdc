"""Several adapters in one packed batch, for inference: which rows belong to which adapter, and LoRA by runs of rows.

Tokens of one adapter stand side by side, so a linear layer's rows are a few runs; every run gets its own pair, and the
frozen matmul is done once for all of them. What one adapter computes never enters another's rows.

Shape suffixes: N rows, T tokens of the batch, I inputs, O outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from lamella.errors import UserError
from lamella.kernels import lora_rows as kernels


class Pair(Protocol):
    """What is needed of a `linear.LoraSite`."""

    a: Tensor
    b: Tensor
    scale: float


Several = Sequence[Pair | None]
"""The pairs on one weight by adapter (its place in the batch's list); None: that adapter leaves the weight alone."""

BASE = -1
"""Adapter number of rows that belong to the bare base."""
_STEPS = ((64, 8), (512, 32), (1024, 64), (2048, 128))
"""Up to so many rows, filled up to a multiple of this: oneDNN keeps a compiled kernel for every number of rows it meets."""
_LARGEST_STEP = 256


def filled_up(rows: int) -> int:
    """The number of rows that stands for `rows` where few different numbers are to be met."""
    step = next((step for most, step in _STEPS if rows <= most), _LARGEST_STEP)
    return -(-rows // step) * step


class RowRuns:
    """Runs of rows by adapter.

    Args:
        adapter_N: int64 [N] on the CPU, the adapter's number of each row, or `BASE`.

    Attributes:
        runs: (first row, end, adapter's number), covering all rows in order.
    """

    current: RowRuns | None = None

    def __init__(self, adapter_N: Tensor) -> None:
        self.adapter_N = adapter_N
        rows = adapter_N.numel()
        turns = (adapter_N[1:] != adapter_N[:-1]).nonzero().flatten() + 1
        bounds = [0, *turns.tolist(), rows] if rows else [0]
        self.runs = [(a, b, int(adapter_N[a])) for a, b in pairwise(bounds)]

    @property
    def alone(self) -> int | None:
        """The adapter's number where all rows are one's."""
        return self.runs[0][2] if len(self.runs) == 1 else None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Inside, linear layers and experts obey these runs."""
        before, RowRuns.current = RowRuns.current, self
        try:
            yield
        finally:
            RowRuns.current = before

    @classmethod
    def here(cls, rows: int) -> RowRuns:
        """The runs of the batch at work, which has to have as many rows.

        Raises:
            UserError: a layer is called on other rows than the batch's tokens, so whose they are is not known.
        """
        runs = cls.current
        assert runs is not None, "several adapters are hung and no rows are said to be theirs"
        if runs.adapter_N.numel() != rows:
            raise UserError(
                f"an adapted layer is called on {rows} rows in a batch of {runs.adapter_N.numel()} tokens, so adapters cannot "
                "be told apart in it",
                fix="serve this model family with one adapter at a time (`lamella eval`), or merge the adapter",
            )
        return runs

    @classmethod
    @contextmanager
    def picked(cls, index: Tensor | None) -> Iterator[None]:
        """Inside, rows are those of the batch's tokens (or of its sequences) that `index` names, in its order."""
        if cls.current is None or index is None:
            yield
            return
        with cls(cls.current.adapter_N[index.flatten().cpu()]).use():
            yield


Runs = Sequence[tuple[int, int, int]]
"""(first row, end, adapter's number)."""


def _pair(several: Several, number: int, expert: int | None) -> tuple[Tensor | None, Tensor | None, float]:
    """A, B and scale of an adapter; None: it has no pair here."""
    site = None if number == BASE else several[number]
    if site is None:
        return None, None, 0.0
    return (site.a, site.b, site.scale) if expert is None else (site.a[expert], site.b[expert], site.scale)


def largest_rank(several: Several) -> int:
    return max((site.a.shape[-2] for site in several if site is not None), default=0)


def lora_part(x_NI: Tensor, several: Several, y_NO: Tensor, runs: Runs, expert: int | None = None) -> None:
    """Write every run's scale (x A^T) B^T into y, zeros where its adapter has no pair.

    Args:
        runs: of all rows.
        expert: the pairs are stacks, and this one's is meant.
    """
    rows = x_NI.shape[0]
    if kernels.takes(x_NI, [end - first for first, end, _ in runs], largest_rank(several)):
        x_NI = x_NI if x_NI.stride(1) == 1 else x_NI.contiguous()
        kernels.lora_rows(x_NI, [(first, end, *_pair(several, number, expert)) for first, end, number in runs], y_NO)
        return
    few_shapes = x_NI.dtype == torch.bfloat16 and x_NI.device.type == "cpu"
    for first, end, number in runs:
        a_rI, b_Or, scale = _pair(several, number, expert)
        if a_rI is None or b_Or is None:
            y_NO[first:end].zero_()
            continue
        taken = min(filled_up(end - first), rows) if few_shapes else end - first
        start = min(first, rows - taken)
        xa_Nr = x_NI[start : start + taken] @ a_rI.T
        if taken == end - first:
            y_NO[first:end].addmm_(xa_Nr, b_Or.T, beta=0, alpha=scale)
        else:  # neighbours' rows came along; their results are dropped
            part = x_NI.new_empty(taken, b_Or.shape[0]).addmm_(xa_Nr, b_Or.T, beta=0, alpha=scale)
            y_NO[first:end] = part[first - start : end - start]
