"""What an adapter adds to each stored tensor, made a piece at a time: scale * B A, and the parts of it.

The adapter's file is read a pair at a time (of experts: one layer's stack), never whole. Every pair must find its whole place
among the stored tensors, or the merge is refused: a merged model that is a copy of the base looks like success.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lamella.adapter.lora import SiteSpec, is_finite
from lamella.adapter.read import AdapterFile
from lamella.checkpoint.header import read_header
from lamella.errors import UserError
from lamella.models.pieces import ParamPlan, Piece
from lamella.models.skeleton import Skeleton

_PAIRS_HELD = 4
"""Pairs in memory: gate_up and down of one layer's experts are asked for in turns."""


class PairFile:
    """An adapter of any known layout, a pair in memory at a time.

    Attributes:
        file: the folder, checked against the model; sites: key -> SiteSpec, in model order.
        tensors: how many the file has.
        used: keys of the sites whose pairs were read.
    """

    def __init__(self, file: AdapterFile) -> None:
        self.file = file
        self.sites: dict[str, SiteSpec] = file.sites
        self.tensors = len(read_header(file.path))
        self.used: set[str] = set()
        self._held: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()

    def pair(self, key: str) -> tuple[Tensor, Tensor]:
        """A and B of a site, fp32, in `SiteSpec.a_shape` and `b_shape`.

        Raises:
            UserError: NaN or infinite values.
        """
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        if len(self._held) == _PAIRS_HELD:
            self._held.popitem(last=False)
        pair = self.file.pair(key)
        if not all(is_finite(value) for value in pair):
            raise UserError(f"the pair of {key} holds NaN or infinite values", path=self.file.path,
                            fix="train again from an earlier checkpoint")  # fmt: skip
        self.used.add(key)
        self._held[key] = pair
        return pair


@dataclass(frozen=True)
class DeltaOf:
    """What is added to one stored tensor.

    Attributes:
        site: the adapted weight of the model that it belongs to.
        at: which part of that it is (see `Piece.at`).
        shape: of the stored tensor.
        transposed: the model's parameter is [E, in, out].
    """

    site: SiteSpec
    at: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool

    def _factors(self, pairs: PairFile, expert: int | None) -> tuple[Tensor, Tensor]:
        """Left [rows, r] and right [r, columns] of the matrix (of one expert), scale included."""
        a, b = pairs.pair(self.site.key)
        if expert is not None:
            a, b = a[expert], b[expert]
        left, right = (a.T, b.T) if self.transposed else (b, a)
        if len(self.at) == 3:
            left = left[self.at[1] : self.at[2]]
        return left * self.site.scale, right

    def values(self, pairs: PairFile, first: int, out: Tensor) -> None:
        """Fill `out` (fp32, flat) with the delta's values from `first` on, row-major over `shape`."""
        *_, rows, columns = self.shape
        each = rows * columns
        done = 0
        while done < out.numel():
            matrix, place = divmod(first + done, each)
            expert = None if self.site.experts is None else (self.at[0] if self.at else matrix)
            count = min(each - place, out.numel() - done)
            left, right = self._factors(pairs, expert)
            row, last = place // columns, -(-(place + count) // columns)
            target = out[done : done + count]
            if place % columns == 0 and count % columns == 0:
                torch.matmul(left[row:last], right, out=target.view(-1, columns))
            else:
                whole = (left[row:last] @ right).view(-1)
                target.copy_(whole[place - row * columns :][:count])
            done += count


def plan_deltas(
    pairs: PairFile, plans: Mapping[str, ParamPlan], shapes: Mapping[str, tuple[int, ...]], skeleton: Skeleton
) -> dict[str, DeltaOf]:
    """Stored tensor -> what is added to it.

    Args:
        plans: of `plan_binding`; shapes: of the stored tensors.

    Raises:
        UserError: a pair whose weight is not among the stored tensors, or not whole; with names.
    """
    found: dict[str, DeltaOf] = {}
    filled: dict[str, int] = defaultdict(int)
    for plan in plans.values():
        site = pairs.sites.get(plan.name) or pairs.sites.get(plan.name.removesuffix(".weight"))
        if site is None:
            continue
        transposed = site.experts is not None and _is_transposed(site, skeleton)
        for piece in plan.pieces:
            delta = _delta_of(site, plan, piece, shapes[piece.source], transposed)
            assert piece.source not in found, piece.source
            found[piece.source] = delta
            filled[site.key] += _numel(delta.shape)
    wanted = {key: site.inputs * site.outputs * (site.experts or 1) for key, site in pairs.sites.items()}
    lost = [key for key, numel in wanted.items() if filled[key] != numel]
    if lost:
        raise UserError(f"{len(lost)} of {len(wanted)} adapted weights have no place among the stored tensors, first {lost[0]!r} "
                        f"({filled[lost[0]]} of {wanted[lost[0]]} values)", path=pairs.file.folder,
                        fix="the adapter belongs to another model, or this family's weights cannot be merged yet")  # fmt: skip
    return found


def _is_transposed(site: SiteSpec, skeleton: Skeleton) -> bool:
    """The experts' module says how its parameters lie; sizes say nothing."""
    module = skeleton.layers[site.layer].get_submodule(site.path)
    return bool(module.is_transposed)


def _delta_of(site: SiteSpec, plan: ParamPlan, piece: Piece, shape: tuple[int, ...], transposed: bool) -> DeltaOf:
    sides = (site.inputs, site.outputs) if transposed else (site.outputs, site.inputs)
    whole = sides if site.experts is None else (site.experts, *sides)
    if tuple(plan.shape) != whole or (site.experts is None and piece.at):
        raise UserError(f"{piece.source}: the delta of {site.key} {list(whole)} does not lie as its weight {list(plan.shape)} does",
                        fix="this family's weights cannot be merged yet")  # fmt: skip
    return DeltaOf(site, piece.at, tuple(shape), transposed)


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
