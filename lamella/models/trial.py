"""A run without weights: does a family's code do, layer by layer, what the engine relies on?

The model's own forward runs on a few tokens and weights of no values (memory that nothing is written to), every layer on
`meta` tensors: no weight is read and next to no memory is taken, whatever the model's size. Found out so, before anything
is written: attention that is not ours to compute, weights that are read in ways the engine does not serve, tensors handed
from layer to layer beside the hidden states, code that does not run when it is taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lamella.checkpoint.facts import QUANTISED_CLASSES, classify_in_layer, num_routed_experts
from lamella.errors import UserError
from lamella.models.attention import AttentionLayout
from lamella.models.layout import pack_rows
from lamella.models.linear import FrozenLinear
from lamella.models.mixers import FAILS, Mixer, calls_interface, of_class
from lamella.models.pieces import ParamPlan
from lamella.models.readers import Reader, is_experts
from lamella.models.skeleton import LayerCall, Skeleton

TOKENS = 6
_FIX = "this model family is not supported yet"


def try_layers(skeleton: Skeleton) -> None:
    """Run prologue, layers and head of a skeleton that is not needed any more: its buffers are thrown away.

    Raises:
        UserError: with the reason why this family cannot be computed exactly.
    """
    _give_room(skeleton.model)
    batch = pack_rows([([0] * TOKENS, [False] * TOKENS)])
    layout = AttentionLayout(batch)
    name = type(skeleton.model).__name__
    with torch.no_grad():
        try:
            hidden, calls = skeleton.prologue(batch.input_ids, batch.position_ids)
        except FAILS as error:
            raise _fails(name, "its forward", error) from error
    for module in (m for layer in skeleton.layers for m in layer.modules()):
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to("meta")
    with torch.no_grad(), torch.device("meta"):
        hidden, calls = hidden.to("meta"), [_on_meta(call) for call in calls]
        size = int(skeleton.config.hidden_size)
        if hidden.shape != (1, TOKENS, size):
            raise UserError(f"{name}: between layers stand tensors of shape {list(hidden.shape)} for {TOKENS} tokens, not "
                            f"[1, {TOKENS}, {size}]", fix=_FIX)  # fmt: skip
        for i, call in enumerate(calls):
            _check_mask(i, skeleton.layers[i])
            _try_layer(skeleton, i, hidden, call, layout)


def _give_room(model: nn.Module) -> None:
    """Memory for the parameters outside the layers, tied ones once; pages of it that nothing is read from take none."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, old in held.items():
                if old is not None and old.is_meta:
                    room = torch.empty(old.shape, dtype=old.dtype)
                    held[key] = made.setdefault(id(old), nn.Parameter(room, requires_grad=False))


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
    if not isinstance(out, Tensor) or out.shape != hidden.shape:
        made = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise UserError(f"{what} makes {made} of hidden states {list(hidden.shape)}", fix=_FIX)
    if any(len(c) != n for c, n in containers):
        raise UserError(
            f"{what} hands tensors to later layers beside the hidden states (shared keys and values)", fix=_FIX
        )
    if layout.calls - before > max(skeleton.mixing[i].attentions, 1):
        raise UserError(
            f"{what} goes {layout.calls - before} times through the attention interface, "
            f"and has {skeleton.mixing[i].attentions} attentions",
            fix=_FIX,
        )


def _check_mask(i: int, layer: nn.Module) -> None:
    """Attention of a family's own that knows causality from a mask alone: there is none here."""
    for module in layer.modules():
        own = module.__dict__["own"] if isinstance(module, Mixer) else module
        names = {name for f in of_class(own) for name in f.__code__.co_names}
        attends = isinstance(module, Mixer) or "attention" in type(own).__name__.lower()
        if attends and "softmax" in names and "scaled_dot_product_attention" not in names and not calls_interface(own):
            raise UserError(f"layer {i}: {type(own).__name__} computes attention itself, from a mask, and not through the "
                            "attention interface", fix=_FIX)  # fmt: skip


def _containers(given: Any) -> Iterator[Any]:
    """Dicts and lists in a call's arguments, which a layer could write to."""
    if isinstance(given, MutableMapping | MutableSequence):
        yield given
    if isinstance(given, MutableMapping | MutableSequence | tuple):
        for part in given.values() if isinstance(given, MutableMapping) else given:
            yield from _containers(part)


def _on_meta(call: LayerCall) -> LayerCall:
    args, kwargs = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (call.args, call.kwargs))
    return LayerCall(args, kwargs)


def _by_meta(error: Exception) -> bool:
    """Whether code failed for want of values: it may be right with them."""
    return isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error).lower()


def _fails(what: str, which: str, error: Exception) -> UserError:
    return UserError(
        f"{what}: {which} fails when the model is taken apart: {type(error).__name__}: {str(error)[:200]}", fix=_FIX
    )


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
        if isinstance(module, FrozenLinear | Reader) or is_experts(module):
            yield id(module)
        if isinstance(module, Mixer):
            yield from (id(m) for m in (module, *module.__dict__["own"].modules()))
