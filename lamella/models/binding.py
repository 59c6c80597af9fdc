"""From the names in a store to the parameters of a model.

Names are the checkpoint's own; transformers knows how each family renames and fuses them
(`get_model_conversion_mapping`). Renames are followed; experts stored one by one become slices of the fused
parameter, so they are dequantised straight into place. Any other conversion is refused.

Every stored tensor is used exactly once and every parameter has a source, or binding fails.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from lamella.errors import UserError
from lamella.models.pieces import ParamPlan, Piece
from lamella.models.skeleton import Skeleton


def model_parameters(skeleton: Skeleton) -> dict[str, tuple[int | None, Tensor]]:
    """Every parameter and persistent buffer by full name: (layer index or None, meta tensor). Tied heads appear once."""
    found: dict[str, tuple[int | None, Tensor]] = {}
    seen: set[int] = set()
    for name, tensor in skeleton.model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = (None, tensor)
    for i, layer in enumerate(skeleton.layers):
        for name, tensor in layer.state_dict(keep_vars=True).items():
            found[f"{skeleton.prefix}.{i}.{name}"] = (i, tensor)
    return found


@cache
def _numbered(pattern: str) -> re.Pattern[str]:
    before, _, after = pattern.replace("\\.", ".").partition("*")
    return re.compile(re.escape(before) + r"(\d+)" + re.escape(after))


def _source_number(key: str, pattern: str) -> int:
    """Index at the wildcard of `pattern` (such as `experts.*.gate_proj.weight`) in `key`."""
    match = _numbered(pattern).search(key.replace("^", ""))
    assert match is not None, (key, pattern)
    return int(match[1])


def _converter_for(converters: list[WeightConverter], pattern: str) -> WeightConverter:
    return next(c for c in converters if pattern in c.source_patterns)


def _place(
    key: str, pattern: str, converter: WeightConverter, shapes: Mapping[str, tuple[int, ...]], source: str
) -> Piece:
    kinds = [type(op) for op in converter.operations]
    dims = [getattr(op, "dim", None) for op in converter.operations]
    merge = kinds[:1] == [MergeModulelist] and dims[0] == 0
    if merge and len(kinds) == 1:
        return Piece(source, (_source_number(key, pattern),))
    if merge and kinds[1:] == [Concatenate] and dims[1] == 1:
        part = converter.source_patterns.index(pattern)
        rows = shapes[source][0]
        return Piece(source, (_source_number(key, pattern), part * rows, (part + 1) * rows))
    if kinds == [Concatenate] and dims[0] == 0:
        return Piece(
            source, (converter.source_patterns.index(pattern), -1)
        )  # its rows are told when all parts are known
    raise UserError(f"{source}: this family's weights need {' + '.join(k.__name__ for k in kinds)}, which is not supported",
                    fix="this model family is not supported yet")  # fmt: skip


def plan_binding(skeleton: Skeleton, shapes: Mapping[str, tuple[int, ...]], where: str = "") -> dict[str, ParamPlan]:
    """Decide where every parameter's bytes come from.

    Args:
        skeleton: the weightless model.
        shapes: stored tensor name -> shape.
        where: what to name in errors, e.g. the store's path.

    Returns:
        Full parameter name -> plan.

    Raises:
        UserError: a stored tensor that the model does not know, a parameter without a source, two sources for one
            place, or shapes that disagree; each with names.
    """
    parameters = model_parameters(skeleton)
    plans = {name: ParamPlan(name, layer, tuple(t.shape)) for name, (layer, t) in parameters.items()}
    stubbed = skeleton.model
    transforms: list[Any] = get_model_conversion_mapping(stubbed)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    tied = _tied_names(skeleton, parameters)
    for source in shapes:
        key, pattern = rename_source_key(source, renamings, converters)
        if key not in plans and f"{stubbed.base_model_prefix}.{key}" in plans:
            key = f"{stubbed.base_model_prefix}.{key}"
        if key in tied:
            raise UserError(f"{source} is stored, though it is tied to the embeddings", path=where or None,
                            fix="set tie_word_embeddings = false in config.json")  # fmt: skip
        if key not in plans:
            raise UserError(f"{source} has no place in {type(stubbed).__name__}", path=where or None,
                            fix="the checkpoint does not belong to this architecture, or holds more than a text decoder")  # fmt: skip
        if pattern is None:
            piece = Piece(source)
        else:
            renamed, _ = rename_source_key(source, renamings, []) if renamings else (source, None)
            piece = _place(renamed, pattern, _converter_for(converters, pattern), shapes, source)
        plans[key].pieces.append(piece)
    for plan in plans.values():
        _stack(plan, shapes)
    _check(plans, shapes, where)
    return plans


class SourceNames:
    """The family's renames, for names that are not a store's (an adapter's): made once, asked for many names."""

    def __init__(self, skeleton: Skeleton) -> None:
        transforms: list[Any] = get_model_conversion_mapping(skeleton.model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]

    def find(self, source: str) -> tuple[str, int | None, int]:
        """The parameter that a checkpoint's tensor of this name is in or a part of.

        Returns:
            parameter's name; expert (None: the name is of no single expert); which of the matrices that are put one
            after the other it is (0: gate, 1: up).
        """
        key, pattern = rename_source_key(source, self._renamings, self._converters)
        if pattern is None or "*" not in pattern:
            return key, None, 0
        renamed, _ = rename_source_key(source, self._renamings, [])
        converter = _converter_for(self._converters, pattern)
        return key, _source_number(renamed, pattern), converter.source_patterns.index(pattern)


def _stack(plan: ParamPlan, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give tensors that are stacked to one parameter their rows, in the converter's order."""
    if any(len(piece.at) != 2 for piece in plan.pieces):
        return
    first = 0
    for at, piece in enumerate(sorted(plan.pieces, key=lambda p: p.at)):
        rows = shapes[piece.source][0]
        plan.pieces[at] = Piece(piece.source, (first, first + rows))
        first += rows


def _tied_names(skeleton: Skeleton, parameters: Mapping[str, Any]) -> set[str]:
    return {name for name in skeleton.model.state_dict() if name not in parameters}


def _check(plans: Mapping[str, ParamPlan], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    for plan in plans.values():
        filled = 0
        for piece in plan.pieces:
            if len(piece.at) in (1, 3) and (len(plan.shape) != 3 or piece.at[0] >= plan.shape[0]):
                raise UserError(f"{piece.source}: expert {piece.at[0]} does not fit {plan.name} {list(plan.shape)}",
                                path=where or None, fix="config.json and weights disagree on the number of experts")  # fmt: skip
            shape = piece.shape(plan.shape)
            if shape != tuple(shapes[piece.source]):
                raise UserError(f"{piece.source} has shape {list(shapes[piece.source])}, {plan.name} needs {list(shape)}",
                                path=where or None, fix="config.json and weights do not belong together")  # fmt: skip
            filled += math.prod(shape)
        if len({p.at for p in plan.pieces}) != len(plan.pieces):
            raise UserError(f"{plan.name} has two sources: {[p.source for p in plan.pieces][:3]}", path=where or None,
                            fix="the checkpoint stores one weight twice")  # fmt: skip
        if filled != math.prod(plan.shape):
            raise UserError(f"{plan.name}: {filled} of {math.prod(plan.shape)} values have a source", path=where or None,
                            fix="the checkpoint is incomplete; download it again")  # fmt: skip
