"""A transformers model without weights, taken apart into prologue, layers and head.

The model is built on `meta`. Each decoder layer is replaced by a stub that records the arguments it is
called with, so the model's own forward tells every layer's boundary input and arguments (masks, rotary
tables, sliding or full) without our knowing the family. The real layers, still weightless, are driven one
at a time with bound weights. The head is the model's own forward again, its last stub handing in the
hidden states: final norms, tied heads and soft caps come along by themselves.
"""

from __future__ import annotations

import json
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lamella.checkpoint.facts import num_routed_experts
from lamella.errors import UserError
from lamella.models import attention, experts
from lamella.models.fused import FusedNorm
from lamella.models.linear import FrozenConv1D, FrozenLinear
from lamella.models.mixers import FAILS, mark_bypassed, stand_in
from lamella.models.prove import Report, fuse
from lamella.models.readers import stand_in_readers


@dataclass
class LayerCall:
    """How the model called one layer: positional and keyword arguments after the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class PlainHead:
    """Logits = linear(norm(hidden))."""

    norm: FusedNorm
    linear: nn.Linear


class _TupleWanted(Exception):
    """The model takes `layer(...)[0]`: a bare [1, T, H] answer arrived at the next layer as [T, H]."""


class _Stub(nn.Module):
    """Stands for a decoder layer: hands its input on, or what it was given, and records the call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not a submodule: its weights are not the model's any more
        self.returns_tuple = False
        self.returns_pair = False
        self.call: LayerCall | None = None
        self.answer: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.dim() == 2:
            raise _TupleWanted
        self.call = LayerCall(args, kwargs)
        hidden = hidden_states if self.answer is None else self.answer
        if self.returns_pair:
            return hidden, None
        return (hidden,) if self.returns_tuple else hidden


def load_config(folder: Path, tie_word_embeddings: bool | None = None) -> PretrainedConfig:
    """transformers' config of a store or checkpoint folder.

    Args:
        tie_word_embeddings: what the files say, over what the config says; None keeps the config's.

    Raises:
        UserError: no config, or an architecture transformers does not know.
    """
    return read_config(folder / "config.json", tie_word_embeddings)


def _special_floats(found: dict[str, Any]) -> Any:
    """transformers writes infinities and NaN as {"__float__": "Infinity"}."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def read_config(file: Path, tie_word_embeddings: bool | None = None) -> PretrainedConfig:
    """`load_config` of a file under any name."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"), object_hook=_special_floats)
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"cannot be read: {error}", path=file, fix="give a folder with a valid config.json") from error
    if "model_type" not in raw:
        raise UserError("config.json names no model_type", path=file, fix="use a Hugging Face model folder")
    try:
        config = AutoConfig.for_model(**raw)
    except (TypeError, ZeroDivisionError, AttributeError, StrictDataclassError) as error:
        raise UserError(f"transformers cannot read it: {error}", path=file, fix="correct config.json") from error
    except ValueError as error:
        raise UserError(f"transformers does not know model_type {raw['model_type']!r}", path=file,
                        fix="update transformers, or use another model") from error  # fmt: skip
    if config.get_text_config() is not config:
        raise UserError(f"{raw['model_type']} is multimodal; only text decoders are supported", path=file,
                        fix="use the text-only checkpoint of this family")  # fmt: skip
    if tie_word_embeddings is not None:
        config.tie_word_embeddings = tie_word_embeddings
    return config


class Skeleton:
    """A model on `meta`: prologue and head get real weights, layers are driven with borrowed ones.

    Args:
        config: transformers config (it is changed: attention and experts functions are set to ours).
        dtype: compute dtype.

    Attributes:
        model: the transformers model with stubs for layers.
        layers: the real decoder layers, weightless.
        prefix: dotted name of the layer list, e.g. `model.layers`.
        mixing: per layer, how it mixes tokens.
        fused: what `fuse` replaced and what it left alone.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        config.use_cache = False
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = False  # the balancing loss is computed by the engine, over the whole step
        self.config = config
        self.dtype = dtype
        try:
            model = _build(config, dtype)
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, AssertionError) as error:
            raise UserError(f"{config.model_type}: transformers cannot build a decoder from config.json: "
                            f"{type(error).__name__}: {error}",
                            fix="correct config.json, or use a causal language model") from error  # fmt: skip
        self.model: PreTrainedModel = model.eval()
        config = self.config = model.config
        config._experts_implementation = experts.NAME
        self.prefix, layers = self._find_layers()
        self.layers: list[nn.Module] = list(layers)
        for layer in self.layers:
            _freeze_linears(layer)
            mark_bypassed(layer, int(config.hidden_size))
        parent, _, last = self.prefix.rpartition(".")
        self.stubs = [_Stub(layer) for layer in self.layers]
        setattr(self.model.get_submodule(parent), last, nn.ModuleList(self.stubs))
        self.materialize_buffers()
        self.mixing = [stand_in(layer) for layer in self.layers]
        for layer in self.layers:
            stand_in_readers(layer, num_routed_experts(config.to_dict()))
        self.fused = Report()

    def fuse(self) -> None:
        """Replace the family's modules by fused ones where they are proven to do the same."""
        self.fused = fuse(self.model, self.layers)

    def fused_facts(self) -> dict[str, Any]:
        """Fused modules by kind, classes left alone with the reason, and calls that went to the family's own."""
        return self.fused.facts([self.model, *self.layers])

    def _find_layers(self) -> tuple[str, nn.ModuleList]:
        count = self.config.num_hidden_layers
        counts = (count, getattr(self.config, "num_layers", count))
        for name, module in self.model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) in counts and name.rpartition(".")[2] in _LAYER_LISTS:
                return name, module
        raise UserError(
            f"{type(self.model).__name__}: no list of {count} decoder layers found",
            fix="this family is not supported yet",
        )

    def materialize_buffers(self) -> None:
        """Give non-persistent buffers (rotary tables, embedding scales) their values; they are in no checkpoint."""
        modules = [*self.model.modules(), *(m for layer in self.layers for m in layer.modules())]
        made: list[tuple[nn.Module, list[str]]] = []
        for module in modules:
            stored = module._buffers.keys() - module._non_persistent_buffers_set  # come with the weights
            names = [n for n, b in module._buffers.items() if b is not None and b.is_meta and n not in stored]
            made += [(module, names)] if names else []
            for name in names:
                buffer = cast(Tensor, module._buffers[name])
                module._buffers[name] = torch.full(buffer.shape, torch.nan, dtype=buffer.dtype) if (
                    buffer.is_floating_point()) else torch.zeros(buffer.shape, dtype=buffer.dtype)  # fmt: skip
        for module in (
            *(module for module, _ in made),
            self.model.base_model,
        ):  # some families' models fill their layers'
            self.model._init_weights(module)
        for module, names in made:
            bad = [n for n in names if not torch.isfinite(cast(Tensor, module._buffers[n])).all()]
            if bad:
                raise UserError(f"{type(module).__name__}: buffer {bad[0]} has no initialiser",
                                fix="this family is not supported yet")  # fmt: skip

    def prologue(self, input_ids_T: Tensor, position_ids_T: Tensor) -> tuple[Tensor, list[LayerCall]]:
        """Embed tokens and learn how each layer is called.

        Returns:
            boundary input of layer 0, [1, T, H], and one `LayerCall` per layer.
        """
        for stub in self.stubs:
            stub.call, stub.answer = None, None
        seen: list[Tensor] = []
        handle = self.stubs[0].register_forward_pre_hook(lambda _, args, kwargs: seen.append(
            args[0] if args else kwargs["hidden_states"]), with_kwargs=True)  # fmt: skip
        try:
            out = self._base(input_ids_T, position_ids_T)
        except _TupleWanted:
            out = None
        except ValueError as error:  # `hidden, weights = layer(...)` of a bare [1, T, H]
            if self.stubs[0].returns_pair or "unpack" not in str(error):
                raise
            for stub in self.stubs:
                stub.returns_pair = True
            return self.prologue(input_ids_T, position_ids_T)
        finally:
            handle.remove()
        if out is None or out.dim() == 2:
            assert not self.stubs[0].returns_tuple, "layers answered with tuples, still unpacked twice"
            for stub in self.stubs:
                stub.returns_tuple = True
            return self.prologue(input_ids_T, position_ids_T)
        calls = [stub.call for stub in self.stubs]
        if len(seen) != 1 or any(call is None for call in calls):
            raise UserError(f"{type(self.model).__name__} does not run each layer exactly once",
                            fix="this family is not supported yet")  # fmt: skip
        return seen[0], cast(list[LayerCall], calls)

    @property
    def decoder(self) -> nn.Module:
        """The model without its head."""
        if self.model.base_model is not self.model:
            return cast(nn.Module, self.model.base_model)
        return next(m for m in self.model.children() if isinstance(m, PreTrainedModel))  # its prefix is another one's

    def _base(self, input_ids_T: Tensor, position_ids_T: Tensor) -> Tensor:
        out = self.decoder(input_ids=input_ids_T[None], position_ids=position_ids_T[None], use_cache=False)
        return cast(Tensor, out.last_hidden_state)

    def head(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, V] of N boundary outputs of the last layer, through the model's own norm and head."""
        stub = self.stubs[-1]
        n = hidden_NH.shape[0]
        dummy = torch.zeros(1, n, dtype=torch.int64, device=hidden_NH.device)
        position = torch.zeros(1, n, dtype=torch.int64, device=hidden_NH.device)
        stub.answer = hidden_NH[None]
        try:
            return self.model(input_ids=dummy, position_ids=position, use_cache=False).logits[0]
        finally:
            stub.answer = None

    def plain_head(self) -> PlainHead | None:
        """The head's parts, where its logits are just a linear layer on the final norm: run both ways to see it.

        Weights must be bound.
        """
        linear = self.model.get_output_embeddings()
        norms = [m for m in self.decoder.children() if isinstance(m, FusedNorm)]
        if type(linear) is not nn.Linear or linear.bias is not None or len(norms) != 1:
            return None
        device, dtype = linear.weight.device, linear.weight.dtype
        if dtype != self.dtype:
            return None
        hidden = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        with torch.no_grad():
            same = torch.equal(self.head(hidden), linear(norms[0](hidden[None]))[0])
        return PlainHead(norms[0], linear) if same else None

    def normed(self, hidden_NH: Tensor) -> Tensor:
        """What the output layer is given, [1, N, H], of N boundary outputs of the last layer."""
        stub = self.stubs[-1]
        position = torch.zeros(hidden_NH.shape[0], dtype=torch.int64, device=hidden_NH.device)
        stub.answer = hidden_NH[None]
        try:
            return self._base(position, position)
        finally:
            stub.answer = None

    def run_layer(self, index: int, hidden: Tensor, call: LayerCall) -> Tensor:
        """Layer `index` on hidden states [1, T, H] with the arguments the model gave it."""
        out = self.layers[index](hidden, *call.args, **call.kwargs)
        return out[0] if isinstance(out, tuple) else out

    def routers(self) -> dict[int, tuple[nn.Module, int]]:
        """Layer index -> (router module, which of its outputs are the router logits), where the family says so."""
        recorder = getattr(self.model, "_can_record_outputs", None) or {}
        recorder = recorder.get("router_logits") or (
            (getattr(self.decoder, "_can_record_outputs", None) or {}).get("router_logits")
        )
        if recorder is None:
            return {}
        target, which = getattr(recorder, "target_class", recorder), getattr(recorder, "index", 0)
        found = {}
        for i, layer in enumerate(self.layers):
            for module in layer.modules():
                if isinstance(module, target):
                    found[i] = (module, which)
        return found


def _build(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on `meta`, its attention and experts ours."""
    build = partial(AutoModelForCausalLM.from_config, config, dtype=dtype, experts_implementation=experts.NAME)
    with torch.device("meta"):
        try:
            return cast(PreTrainedModel, build(attn_implementation=attention.NAME))
        except KeyError as error:
            if error.args != (attention.NAME,):
                raise
        model = build(attn_implementation="sdpa")  # attention classes in a table of the family's own (Falcon)
    own = copy(model.config)
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) and getattr(module, "config", None) is model.config:
            module.config = own
    model.config._attn_implementation = attention.NAME  # so no mask is built: causal attention asks for none
    return cast(PreTrainedModel, model)


_LAYER_LISTS = ("layers", "h", "blocks", "block")


def _is_plain(linear: nn.Linear) -> bool:
    """Whether a class derived from `nn.Linear` computes the same: tried on a small one."""
    if linear._forward_pre_hooks or linear._forward_hooks or set(linear._parameters) != {"weight", "bias"}:
        return False
    small = type(linear).__new__(type(linear))
    nn.Linear.__init__(small, 5, 3, bias=linear.bias is not None)
    x = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        try:
            return torch.allclose(small(x), nn.functional.linear(x, small.weight, small.bias), atol=1e-5)
        except FAILS:
            return False


def _freeze_linears(layer: nn.Module) -> None:
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear or (isinstance(child, nn.Linear) and _is_plain(child)):
                setattr(parent, name, FrozenLinear.like(child))
            elif type(child) is Conv1D:
                setattr(parent, name, FrozenConv1D.of(child))
