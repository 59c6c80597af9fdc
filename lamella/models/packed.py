"""Expert weights that stay packed: an expert is dequantised when its tokens come, and never all of them at once.

A MoE layer's experts are nearly all of its bytes: the 128 experts of a Qwen3-235B layer take 4.8 GB dequantised, one takes
38 MB. On a CPU their parameters therefore have no place in the shared buffer; the module holds an `ExpertBytes` instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lamella.kernels.experts import COLUMNS, PARTS, PackedExperts
from lamella.models.pieces import Cut, ParamPlan, Piece
from lamella.store.manifest import TensorRecord
from lamella.store.reader import PackedGroup, block_of

BLOCK = 64
"""Values per scale that the fused kernels take."""
_scratch: dict[torch.dtype, Tensor] = {}


def can_stay_packed(plan: ParamPlan, module: nn.Module, block_size: int, records: Mapping[str, TensorRecord]) -> bool:
    """Whether a parameter is a stack of experts whose borders are borders of quantised blocks.

    Args:
        block_size: of tensors that say nothing else.
        records: stored tensors by name.
    """
    if len(plan.shape) != 3 or not hasattr(module, "has_gate"):
        return False
    experts = plan.shape[0]
    stored = [records[p.source] for p in plan.pieces]
    blocks = [block_of(record, block_size) for record in stored]
    if len(plan.pieces) == 1 and plan.pieces[0].at == ():
        orders = ((), (0, 1, 2), (0, 2, 1))
        return stored[0].order in orders and torch.Size(plan.shape[1:]).numel() % blocks[0] == 0
    if any(record.order for record in stored):
        return False
    sizes = [math.prod(p.shape(plan.shape)) for p in plan.pieces]
    fit = all(n % block == 0 for n, block in zip(sizes, blocks, strict=True))
    return all(p.at for p in plan.pieces) and fit and len(plan.pieces) % experts == 0


@dataclass
class ExpertBytes:
    """The expert parameters of one module, in its layer's packed bytes.

    Attributes:
        plans: parameter name in the module (`gate_up_proj`, `down_proj`, ...) -> where it comes from.
        records: their stored tensors by name.
        block_size: of those that say nothing else.
        held: the experts that this rank holds (all parameters' first dimension); None: all. Experts are numbered from
            the first one held.
        group: the layer's bytes, or None while the layer is not at work.
    """

    plans: dict[str, ParamPlan]
    records: Mapping[str, TensorRecord]
    block_size: int = BLOCK
    held: Cut | None = None
    group: PackedGroup | None = None

    @property
    def first(self) -> int:
        return 0 if self.held is None else self.held.first

    def shape(self, name: str) -> tuple[int, ...]:
        whole = self.plans[name].shape
        return whole if self.held is None else self.held.shape(whole)

    def at_work(self) -> PackedGroup:
        assert self.group is not None, "the layer is not at work"
        return self.group

    def parameter(self, name: str, dtype: torch.dtype) -> ExpertParameter:
        return ExpertParameter(self, self.plans[name], dtype)

    @cached_property
    def _pieces(self) -> dict[str, dict[int, list[Piece]]]:
        """Parameter -> expert (-1: all in one tensor) -> its pieces in the order of their rows."""
        found: dict[str, dict[int, list[Piece]]] = {}
        for name, plan in self.plans.items():
            by_expert: dict[int, list[Piece]] = {}
            for piece in sorted(plan.pieces, key=lambda p: p.at):
                by_expert.setdefault(piece.at[0] if piece.at else -1, []).append(piece)
            found[name] = by_expert
        return found

    def pieces(self, name: str, expert: int) -> tuple[list[Piece], bool]:
        """Pieces of one expert (numbered in the model), and whether they are a slice of the tensor of all experts."""
        by_expert = self._pieces[name]
        return (by_expert[-1], True) if -1 in by_expert else (by_expert[expert], False)

    def _locate(self, name: str, expert: int, row: int) -> list[int]:
        """Numbers for the kernels (`PARTS`) of the matrix that starts at this row of an expert (numbered in the model)."""
        plan = self.plans[name]
        columns = plan.shape[2]
        pieces, sliced = self.pieces(name, expert)
        if sliced:
            source, element = pieces[0].source, (expert * plan.shape[1] + row) * columns
        else:
            piece = next(p for p in reversed(pieces) if len(p.at) < 3 or p.at[1] <= row)
            source, element = piece.source, (row - (piece.at[1] if len(piece.at) == 3 else 0)) * columns
        parts = {part: offset for part, (offset, _) in self.at_work().records[source].parts.items()}
        names = ("absmax", "absmax_q", "absmax_code", "absmax2", "offset")
        return [parts["codes"] + element // 2, *(parts.get(part, -1) for part in names), element // BLOCK]

    @cached_property
    def _table(self) -> Tensor | None:
        """[E, 3, PARTS] for the fused kernels, or None where the matrices have no shape for them."""
        if self.table_sizes is None:
            return None
        _, inner = self.table_sizes
        rows = [
            [
                self._locate("gate_up_proj", e, 0),
                self._locate("gate_up_proj", e, inner),
                self._locate("down_proj", e, 0),
            ]
            for e in range(self.first, self.first + self.shape("gate_up_proj")[0])
        ]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 3, PARTS)

    @cached_property
    def _nf4(self) -> bool:
        records = [self.records[p.source] for plan in self.plans.values() for p in plan.pieces]
        return all(r.format == "nf4" and block_of(r, self.block_size) == BLOCK for r in records)

    @property
    def table_sizes(self) -> tuple[int, int] | None:
        """Hidden and inner size of experts whose shapes and formats the fused kernels serve."""
        gate_up, down = self.plans.get("gate_up_proj"), self.plans.get("down_proj")
        if gate_up is None or down is None or not self._nf4:
            return None
        experts, twice, hidden = gate_up.shape
        inner = twice // 2
        fits = hidden % COLUMNS == 0 and inner % COLUMNS == 0 and down.shape == (experts, hidden, inner)
        return (hidden, inner) if fits else None

    def for_kernels(self) -> PackedExperts | None:
        """For the fused kernels, or None where they do not serve these shapes."""
        if self._table is None:
            return None
        _, twice, hidden = self.plans["gate_up_proj"].shape
        return PackedExperts(self.at_work().buffer, self._table, hidden, twice // 2, self.at_work().blank)


@dataclass
class ExpertParameter:
    """Stands for a [E, O, I] parameter: indexing dequantises one expert, into a buffer that the next one reuses (a transposed
    view of it where the store holds its rows as columns)."""

    bytes: ExpertBytes
    plan: ParamPlan
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bytes.shape(self.plan.name.rpartition(".")[2])

    def __getitem__(self, expert: int) -> Tensor:
        expert += self.bytes.first
        group, shape = self.bytes.at_work(), self.plan.shape[1:]
        numel = torch.Size(shape).numel()
        buffer = _scratch.get(self.dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = _scratch[self.dtype] = torch.empty(numel, dtype=self.dtype)
        out = buffer[:numel]
        pieces, sliced = self.bytes.pieces(self.plan.name.rpartition(".")[2], expert)
        if sliced:
            source = pieces[0].source
            group.dequantize_slice(source, expert * numel, out)
            if group.records[source].order == (0, 2, 1):
                return out.view(shape[1], shape[0]).T
        else:
            group.dequantize_many([p.source for p in pieces], out)
        return out.view(shape)
