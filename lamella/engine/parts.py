"""What of a layer's stored tensors a rank needs that holds parts of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lamella.models.pieces import Cut, ParamPlan
from lamella.store.manifest import TensorRecord
from lamella.store.reader import block_of

_GAP_BYTES = 64
"""Ranges of a file that are no further apart are read as one."""


@dataclass(frozen=True)
class Held:
    """What of a quantised parameter comes here.

    Attributes:
        names: stored tensors, in the order of their places.
        shape: that they take where they are dequantised.
        part: of the one tensor named, whole blocks; None: all of each.
        cut: still to be made of what is dequantised, where the part is not one of whole blocks.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    part: Cut | None = None
    cut: Cut | None = None


def held_of(plan: ParamPlan, cut: Cut | None, block_size: int, records: Mapping[str, TensorRecord]) -> Held:
    """What of a quantised parameter makes up its part `cut` (None: everything).

    Args:
        block_size: of tensors that say nothing else.
        records: stored tensors by name.
    """
    pieces = sorted(plan.pieces, key=lambda p: p.at)
    names = tuple(p.source for p in pieces)
    if cut is None:
        return Held(names, plan.shape)
    if cut.dim == 0 and all(p.at for p in pieces):  # experts stored one by one
        return Held(tuple(p.source for p in pieces if cut.first <= p.at[0] < cut.last), cut.shape(plan.shape))
    first = records[names[0]]
    block_size = block_of(first, block_size)
    if first.order and (cut.dim or first.order[0]):
        return Held(names, plan.shape, cut=cut)
    row = torch.Size(plan.shape[1:]).numel()
    edges = (cut.first, cut.last) if cut.dim else (cut.first * row, cut.last * row)
    rows_fit = cut.dim == 0 or (len(plan.shape) == 2 and row % block_size == 0)
    if len(pieces) == 1 and rows_fit and all(edge % block_size == 0 for edge in edges):
        return Held(names, cut.shape(plan.shape), part=cut)
    return Held(names, plan.shape, cut=cut)


def ranges_of(
    plans: Iterable[tuple[ParamPlan, Held | None]], records: Mapping[str, TensorRecord]
) -> list[tuple[int, int]]:
    """(offset, bytes) of what is read of a layer's file, in order.

    Args:
        plans: the layer's parameters; with what is held of quantised ones, None for others, which are read whole.
    """
    wanted: list[tuple[int, int]] = []
    for plan, held in plans:
        if held is None:
            wanted += [at for p in plan.pieces for at in records[p.source].parts.values()]
            continue
        for name in held.names if torch.Size(held.shape).numel() else ():
            parts = dict(records[name].parts)
            if held.part is not None and held.part.dim == 0:
                large = "data" if records[name].format == "raw" else "codes"
                offset, size = parts[large]
                row, whole = torch.Size(held.shape[1:]).numel(), records[name].numel
                parts[large] = (offset + held.part.first * row * size // whole, held.shape[0] * row * size // whole)
            wanted += parts.values()
    joined: list[tuple[int, int]] = []
    for offset, nbytes in sorted(wanted):
        if joined and offset - sum(joined[-1]) <= _GAP_BYTES:
            start, size = joined[-1]
            joined[-1] = (start, max(size, offset + nbytes - start))
        elif nbytes:
            joined.append((offset, nbytes))
    return joined


def covers(ranges: Sequence[tuple[int, int]], record: TensorRecord) -> bool:
    """Whether all of a tensor's parts lie in these ranges."""
    return all(any(a <= offset and offset + n <= a + size for a, size in ranges) for offset, n in record.parts.values())
