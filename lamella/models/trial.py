"""A run without weights: does a family's code do, layer by layer, what the engine relies on?

The model's own forward and every layer run on `meta` tensors: no weight is read and no memory is taken, whatever the
model's size. Found out so, before anything is written: attention that is not ours to compute, weights that are read in
ways the engine does not serve, tensors handed from layer to layer beside the hidden states, code that does not run when
it is taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lamella.checkpoint.facts import QUANTISED_CLASSES, classify_in_layer, num_routed_experts
from lamella.errors import UserError
from lamella.models.attention import AttentionLayout
from lamella.models.layout import pack_rows
from lamella.models.linear import FrozenLinear
from lamella.models.mixers import FAILS, Mixer
from lamella.models.pieces import ParamPlan
from lamella.models.skeleton import LayerCall, Skeleton

TOKENS = 6
_FIX = "this model family is not supported yet"


def try_layers(skeleton: Skeleton) -> None:
    """Run prologue, layers and head of a skeleton that is not needed any more: its buffers are thrown away.

    Raises:
        UserError: with the reason why this family cannot be computed exactly.
    """
    for module in [*skeleton.model.modules(), *(m for layer in skeleton.layers for m in layer.modules())]:
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")
    layout = AttentionLayout(pack_rows([([0] * TOKENS, [False] * TOKENS)]))
    name = type(skeleton.model).__name__
    with torch.no_grad(), torch.device("meta"):
        ids, positions = torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS)
        try:
            hidden, calls = skeleton.prologue(ids, positions)
        except FAILS as error:
            if _by_meta(error):
                return
            raise _fails(name, "its forward", error) from error
        size = int(skeleton.config.hidden_size)
        if hidden.shape != (1, TOKENS, size):
            raise UserError(f"{name}: between layers stand tensors of shape {list(hidden.shape)} for {TOKENS} tokens, not "
                            f"[1, {TOKENS}, {size}]", fix=_FIX)  # fmt: skip
        for i, call in enumerate(calls):
            if not skeleton.mixing[i].mixers:  # those run on real rows: see engine/mixing.py
                _try_layer(skeleton, i, hidden, call, layout)


def _try_layer(skeleton: Skeleton, i: int, hidden: Tensor, call: LayerCall, layout: AttentionLayout) -> None:
    what = f"layer {i} ({type(skeleton.layers[i]).__name__})"
    containers = [(c, len(c)) for c in _containers((call.args, call.kwargs))]
    before = layout.calls
    try:
        with layout.use():
            out = skeleton.run_layer(i, hidden, call)
    except FAILS as error:
        if _by_meta(error):
            return
        raise _fails(what, "it", error) from error
    if out.shape != hidden.shape:
        raise UserError(f"{what} makes {list(out.shape)} of hidden states {list(hidden.shape)}", fix=_FIX)
    if any(len(c) != n for c, n in containers):
        raise UserError(f"{what} hands tensors to later layers beside the hidden states (shared keys and values)", fix=_FIX)
    if layout.calls - before > 1:
        raise UserError(f"{what} goes {layout.calls - before} times through the attention interface, not once", fix=_FIX)


def _containers(given: Any) -> Iterator[Any]:
    """Dicts and lists in a call's arguments, which a layer could write to."""
    if isinstance(given, dict | list):
        yield given
    if isinstance(given, dict | list | tuple):
        for part in given.values() if isinstance(given, dict) else given:
            yield from _containers(part)


def _by_meta(error: Exception) -> bool:
    """Whether code failed for want of values: it may be right with them."""
    return isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error).lower()


def _fails(what: str, which: str, error: Exception) -> UserError:
    return UserError(f"{what}: {which} fails when the model is taken apart: {type(error).__name__}: {str(error)[:200]}", fix=_FIX)


def check_readers(skeleton: Skeleton, plans: Mapping[str, ParamPlan]) -> None:
    """See that who uses a weight to be quantised reads it through the engine: it lies in a buffer that the next layer reuses.

    Raises:
        UserError: a weight of a module that is neither a linear layer nor experts of transformers' interface.
    """
    served: dict[int, set[int]] = {}
    experts = num_routed_experts(skeleton.config.to_dict())
    for plan in plans.values():
        if plan.layer is None or not plan.pieces:
            continue
        source = plan.pieces[0].source
        rest = source.partition(f".{plan.layer}.")[2]
        stored = plan.shape[-2:] if len(plan.pieces) > 1 else plan.shape
        if classify_in_layer(rest, stored, experts) not in QUANTISED_CLASSES:
            continue
        layer = skeleton.layers[plan.layer]
        if plan.layer not in served:
            served[plan.layer] = set(_served(layer))
        owner = layer.get_submodule(plan.name.removeprefix(f"{skeleton.prefix}.{plan.layer}.").rpartition(".")[0])
        if id(owner) not in served[plan.layer]:
            raise UserError(f"{type(owner).__name__} uses {source} in a way of its own, not as a linear layer nor through the "
                            "experts interface", fix=_FIX)  # fmt: skip


def _served(layer: nn.Module) -> Iterator[int]:
    for module in layer.modules():
        if isinstance(module, FrozenLinear) or (hasattr(module, "has_gate") and hasattr(module, "is_transposed")):
            yield id(module)
        if isinstance(module, Mixer):
            yield from (id(m) for m in (module, *module.__dict__["own"].modules()))
