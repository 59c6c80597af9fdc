"""Frozen linear layers that share an input, computed as one: query, key and value; gate and up.

Weights that lie one after the other in memory (the engine binds a layer's so) are one matrix. LoRA's A matrices
are stacked, its B matrices stand on the diagonal of one block matrix, so a group takes two matmuls forward and
four backward beside the frozen ones, whatever its size. Backward accumulates one input gradient, and reads the
weights from the modules, where the engine has bound them again.

Shape suffixes: N rows (tokens), I inputs, O outputs of the whole group, R ranks of the whole group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from lamella.models.linear import DropoutClock, FrozenLinear
from lamella.models.pieces import Cut
from lamella.models.several import RowRuns, lora_part

BLOCK_RANK = 64
"""Up to this rank sum the B matrices are multiplied as one block matrix; beyond, its zeros would cost more than calls."""


@dataclass
class _Site:
    """One adapted linear layer of a group: its outputs' and its ranks' places, and the pair."""

    outputs: slice
    ranks: slice
    a: Tensor
    b: Tensor
    scale: float
    dropout: float
    site: int
    features: int
    inputs: Cut | None

    def dropped(self, x_NI: Tensor, keys_N: Tensor) -> Tensor:
        """x as this layer's dropout leaves it; the mask is made again in backward instead of kept."""
        keep = DropoutClock.mask(keys_N, self.features, self.dropout, self.site)
        if self.inputs is not None:
            keep = self.inputs.of(keep)
        return x_NI * keep / (1 - self.dropout)


def _one_matrix(weights: Sequence[Tensor]) -> Tensor | None:
    """The weights as one [O, I] view, where they lie so."""
    first = weights[0]
    end = first.data_ptr()
    for w in weights:
        if w.data_ptr() != end or not w.is_contiguous() or w.dtype != first.dtype:
            return None
        end += w.nbytes
    storage = first.untyped_storage()
    if any(w.untyped_storage().data_ptr() != storage.data_ptr() for w in weights):
        return None
    rows = sum(w.shape[0] for w in weights)
    return torch.as_strided(first.detach(), (rows, first.shape[1]), (first.shape[1], 1), first.storage_offset())


class LinearGroup:
    """Linear layers on one input; its outputs stand side by side.

    Args:
        linears: all with the same number of inputs.
    """

    def __init__(self, linears: Sequence[FrozenLinear]) -> None:
        assert len({m.in_features for m in linears}) == 1
        self.linears = tuple(linears)

    @property
    def slices(self) -> list[slice]:
        """Each layer's outputs among the group's. (Weights may be a rank's part, and other parts later.)"""
        bounds = [0, *accumulate(m.weight.shape[0] for m in self.linears)]
        return [slice(a, b) for a, b in pairwise(bounds)]

    @property
    def inputs(self) -> int:
        return self.linears[0].weight.shape[1]

    @property
    def outputs(self) -> int:
        return sum(m.weight.shape[0] for m in self.linears)

    def dropout_keys(self) -> Tensor | None:
        """Row keys of the micro-batch at work, where an adapted layer drops inputs."""
        drops = any(m.lora is not None and m.lora.dropout > 0 for m in self.linears)
        return DropoutClock.row_keys_T if drops else None

    def leaves(self) -> list[Tensor]:
        """A and B of every adapted layer: what autograd must see."""
        return [t for m in self.linears if m.lora is not None for t in (m.lora.a, m.lora.b)]

    def sites(self, leaves: Sequence[Tensor]) -> list[_Site]:
        """`leaves` with their places; LoRA may not be attached or removed between forward and backward."""
        found, at = [], 0
        pairs = zip(leaves[::2], leaves[1::2], strict=True)
        for m, outputs in zip(self.linears, self.slices, strict=True):
            if m.lora is not None:
                a, b = next(pairs)
                ranks = slice(at, at + a.shape[0])
                at = ranks.stop
                lora = m.lora
                found.append(
                    _Site(outputs, ranks, a, b, lora.scale, lora.dropout, lora.site, m.in_features, lora.inputs)
                )
        return found

    def forward(self, x_NI: Tensor, leaves: Sequence[Tensor], keys_N: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Outputs [N, O], and x A^T [N, R] where there is LoRA. `keys_N`: of dropout, or None."""
        sites = self.sites(leaves)
        if not sites and any(m.several is not None for m in self.linears):
            return self._each_its_own(x_NI), None
        if not sites:
            return self._frozen(x_NI), None
        if keys_N is None:
            xa_NR = x_NI @ _stacked(sites).T
        else:
            xa_NR = torch.cat([s.dropped(x_NI, keys_N) @ s.a.T for s in sites], dim=1)
        block = _block(sites, self.outputs)
        y_NO = x_NI.new_empty(x_NI.shape[0], self.outputs)  # LoRA's part first: see `_LoraLinear`
        if block is not None:
            y_NO.addmm_(xa_NR, block.T, beta=0, alpha=sites[0].scale)
        else:
            y_NO.zero_()
            for s in sites:
                y_NO[:, s.outputs].addmm_(xa_NR[:, s.ranks], s.b.T, beta=0, alpha=s.scale)
        return self._add_frozen(y_NO, x_NI), xa_NR

    def _each_its_own(self, x_NI: Tensor) -> Tensor:
        """Outputs with the pairs of several adapters, each on its rows (inference)."""
        runs = RowRuns.here(x_NI.shape[0]).runs
        y_NO = x_NI.new_empty(x_NI.shape[0], self.outputs)
        for m, outputs in zip(self.linears, self.slices, strict=True):
            if m.several is None:
                y_NO[:, outputs].zero_()
            else:
                lora_part(x_NI, m.several, y_NO[:, outputs], runs)
        return self._add_frozen(y_NO, x_NI)

    def _add_frozen(self, y_NO: Tensor, x_NI: Tensor) -> Tensor:
        """y + the frozen layers' outputs, in place; with the bits of `_frozen` where y is zero."""
        whole = _one_matrix([m.weight for m in self.linears])
        for m, outputs in zip(self.linears, self.slices, strict=True):
            if m.bias is not None:
                y_NO[:, outputs] += m.bias
        if whole is not None:
            return y_NO.addmm_(x_NI, whole.T)
        for m, outputs in zip(self.linears, self.slices, strict=True):
            y_NO[:, outputs].addmm_(x_NI, m.weight.T)
        return y_NO

    def _frozen(self, x_NI: Tensor) -> Tensor:
        whole = _one_matrix([m.weight for m in self.linears])
        biases = [m.bias for m in self.linears]
        if whole is not None and all(b is None for b in biases):
            return F.linear(x_NI, whole)
        if whole is not None and all(b is not None for b in biases):
            return F.linear(x_NI, whole, torch.cat([b.detach() for b in biases]))
        y_NO = x_NI.new_empty(x_NI.shape[0], self.outputs)
        for m, outputs in zip(self.linears, self.slices, strict=True):
            y_NO[:, outputs] = F.linear(x_NI, m.weight, m.bias)
        return y_NO

    def input_gradient(
        self, dy_NO: Tensor, leaves: Sequence[Tensor], keys_N: Tensor | None, wanted: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients at the input (where wanted) [N, I] and at x A^T (where there is LoRA) [N, R]."""
        sites = self.sites(leaves)
        if not sites:
            return (self._frozen_gradient(dy_NO) if wanted else None), None
        block = _block(sites, self.outputs)
        if block is not None:
            dxa_NR = (dy_NO @ block).mul_(sites[0].scale)
        else:
            dxa_NR = torch.cat([(dy_NO[:, s.outputs] @ s.b).mul_(s.scale) for s in sites], dim=1)
        if not wanted:
            return None, dxa_NR
        if keys_N is None:
            dx_NI = dxa_NR @ _stacked(sites)
        else:
            dx_NI = torch.stack([s.dropped(dxa_NR[:, s.ranks] @ s.a, keys_N) for s in sites]).sum(0)
        return self._add_frozen_gradient(dx_NI, dy_NO), dxa_NR

    def _add_frozen_gradient(self, dx_NI: Tensor, dy_NO: Tensor) -> Tensor:
        whole = _one_matrix([m.weight for m in self.linears])
        if whole is not None:
            return dx_NI.addmm_(dy_NO, whole)
        for m, outputs in zip(self.linears, self.slices, strict=True):
            dx_NI.addmm_(dy_NO[:, outputs], m.weight)
        return dx_NI

    def leaf_gradients(
        self, dy_NO: Tensor, x_NI: Tensor | None, xa_NR: Tensor | None, dxa_NR: Tensor | None, leaves: Sequence[Tensor],
        keys_N: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        """Gradients at every leaf, in their order. x, x A^T and its gradient: None where there is no LoRA."""
        sites = self.sites(leaves)
        if not sites:
            return []
        assert x_NI is not None
        assert xa_NR is not None
        assert dxa_NR is not None
        if _as_block(sites):
            db_RO = (xa_NR.T @ dy_NO).mul_(sites[0].scale)
            db = [db_RO[s.ranks, s.outputs].T for s in sites]
        else:
            db = [(xa_NR[:, s.ranks].T @ dy_NO[:, s.outputs]).mul_(s.scale).T for s in sites]
        if keys_N is None:
            da_RI = dxa_NR.T @ x_NI
            da = [da_RI[s.ranks] for s in sites]
        else:
            da = [dxa_NR[:, s.ranks].T @ s.dropped(x_NI, keys_N) for s in sites]
        return [t for pair in zip(da, db, strict=True) for t in pair]

    def _frozen_gradient(self, dy_NO: Tensor) -> Tensor:
        first, *others = self.linears
        whole = _one_matrix([m.weight for m in self.linears])
        if whole is not None:
            return dy_NO @ whole
        dx_NI = dy_NO[:, self.slices[0]] @ first.weight
        for m, outputs in zip(others, self.slices[1:], strict=True):
            dx_NI.addmm_(dy_NO[:, outputs], m.weight)
        return dx_NI


def _stacked(sites: Sequence[_Site]) -> Tensor:
    return sites[0].a if len(sites) == 1 else torch.cat([s.a for s in sites])


def _as_block(sites: Sequence[_Site]) -> bool:
    return sites[-1].ranks.stop <= BLOCK_RANK and len({s.scale for s in sites}) == 1


def _block(sites: Sequence[_Site], outputs: int) -> Tensor | None:
    """[O, R] with each B in its place and zeros elsewhere; None where it does not pay."""
    ranks = sites[-1].ranks.stop
    if not _as_block(sites):
        return None
    if len(sites) == 1 and sites[0].b.shape[0] == outputs:
        return sites[0].b
    block_OR = sites[0].b.new_zeros(outputs, ranks)
    for s in sites:
        block_OR[s.outputs, s.ranks] = s.b
    return block_OR
