"""What a checkpoint's tensors are: which decoder layer they belong to, their class, and whether they become 4-bit.

Classes: attention, mlp, experts (4-bit), and router, norm, bias, embedding, head, other (kept in 16/32 bit).
Small errors in a router flip the chosen experts, so a router is recognised by name and by shape.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lamella.checkpoint.header import TensorInfo
from lamella.errors import UserError

TensorClass = Literal["attention", "mlp", "experts", "router", "norm", "bias", "embedding", "head", "other"]
QUANTISED_CLASSES: frozenset[TensorClass] = frozenset({"attention", "mlp", "experts"})

NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that families' configs give to the number of routed experts per layer."""
ACTIVE_EXPERTS_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Names that families' configs give to the number of experts per token."""
ROUTER_NAMES = frozenset({"gate", "wg", "gate_network", "gating"})
"""Modules that choose experts, where there are any; so does whatever has `router` in its name."""

_LAYER = re.compile(r"^(?P<prefix>[A-Za-z_][\w.]*?)\.(?P<index>\d+)\.(?P<rest>.+)$")
_NOT_DECODER = re.compile(r"vision|visual|audio|image|encoder|speech|mtp|resampler", re.IGNORECASE)
_NORM = re.compile(r"norm|(^|_)ln(_|\d|$)|layernorm", re.IGNORECASE)
_ATTENTION = re.compile(r"attn|attention|mixer|mamba|ssm|recurrent|(^|\.)rglru", re.IGNORECASE)
_MLP = re.compile(r"mlp|feed_?forward|ffn?($|\d|_)|fc\d?$|dense|moe|shared_expert", re.IGNORECASE)
_LINEAR = re.compile(
    r"(_|^)proj($|_)|^w\d$|^w[qkvo]$|^fc|_fc$|^c_|^dense|query|key|value|linear|_lin\d?$", re.IGNORECASE
)
_EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe)(\.\w+)?$", re.IGNORECASE)
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output|output_layer|output_projection|head)\.(weight|bias)$")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes read from config.json under the names that families give them; None where it says nothing."""

    model_type: str
    hidden_size: int | None
    num_layers: int
    vocab_size: int | None
    num_experts: int | None
    num_predict_layers: int
    """Multi-token prediction layers that config.json declares; they stand behind the decoder layers."""
    tie_word_embeddings: bool | None
    """What config.json says, at its top level or in text_config; the files decide."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder's part of config.json: `text_config` for multimodal models, else all of it."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def first_int(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these keys that holds a positive integer."""
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    return None


def num_routed_experts(config: Mapping[str, Any]) -> int | None:
    """Routed experts per layer; None for a dense model."""
    return first_int(text_config(config), *NUM_EXPERTS_KEYS)


def num_active_experts(config: Mapping[str, Any]) -> int:
    """Experts per token; 1 for a dense model."""
    return first_int(text_config(config), *ACTIVE_EXPERTS_KEYS) or 1


def _listed_layers(text: Mapping[str, Any]) -> int | None:
    """Number of layers where config.json lists their kinds instead (Nemotron-H)."""
    listed = next((text[n] for n in ("layer_types", "layers_block_type") if isinstance(text.get(n), list)), None)
    return len(listed) if listed else None


def model_facts(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts of a config.json.

    Raises:
        UserError: no model_type, or no number of layers.
    """
    text = text_config(config)
    layers = first_int(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers") or _listed_layers(text)
    model_type = text.get("model_type") or config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError("has no model_type", fix="give a Hugging Face causal language model", path=path)
    if layers is None:
        raise UserError(f"says no number of decoder layers (model_type {model_type!r})",
                        fix="give a decoder-only language model", path=path)  # fmt: skip
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return ModelFacts(
        model_type=model_type,
        hidden_size=first_int(text, "hidden_size", "n_embd", "d_model", "dim"),
        num_layers=layers,
        vocab_size=first_int(text, "vocab_size"),
        num_experts=num_routed_experts(config),
        num_predict_layers=first_int(text, "num_nextn_predict_layers", "num_mtp_modules", "mtp_num_layers") or 0,
        tie_word_embeddings=tied if isinstance(tied, bool) else None,
    )


@dataclass(frozen=True)
class Layout:
    """Tensors by decoder layer.

    Attributes:
        prefix: module path of the layer list, e.g. "model.layers".
        layers: tensors of each layer, in the order of the checkpoint's names.
        outer: tensors outside the layers.
        beyond: multi-token prediction heads: layers past the last one of config.json, or modules named `mtp`.
    """

    prefix: str
    layers: tuple[tuple[TensorInfo, ...], ...]
    outer: tuple[TensorInfo, ...]
    beyond: tuple[TensorInfo, ...]


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts `experts.10` after `experts.9`."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in name.split(".")]


def layout_of(tensors: Mapping[str, TensorInfo], facts: ModelFacts, path: Path) -> Layout:
    """Sort tensors into decoder layers.

    Raises:
        UserError: no decoder layers found, a layer missing, more layers than config.json tells of.
    """
    counts: dict[str, Counter[int]] = {}
    for name in tensors:
        match = _LAYER.match(name)
        if match and not _NOT_DECODER.search(match["prefix"]):
            counts.setdefault(match["prefix"], Counter())[int(match["index"])] += 1
    counts = {prefix: found for prefix, found in counts.items() if 0 in found or facts.num_layers - 1 in found}
    if not counts:
        raise UserError(f"no decoder layers found among {len(tensors)} tensors (model_type {facts.model_type!r})",
                        fix="give a decoder-only language model in Hugging Face layout", path=path)  # fmt: skip
    prefix = max(counts, key=lambda p: (len(counts[p]), counts[p].total(), -len(p)))
    absent = [i for i in range(facts.num_layers) if i not in counts[prefix]]
    if absent:
        what = f"config.json says {facts.num_layers} decoder layers, {prefix}.{absent[0]} has no tensors"
        raise UserError(what, fix="download the checkpoint again", path=path)
    told = facts.num_layers + facts.num_predict_layers
    if max(counts[prefix]) >= told:
        what = f"config.json says {told} layers, the files hold {prefix}.{max(counts[prefix])}"
        raise UserError(what, fix="config.json and weights do not belong together", path=path)
    groups: list[list[TensorInfo]] = [[] for _ in range(facts.num_layers)]
    outer: list[TensorInfo] = []
    beyond: list[TensorInfo] = []
    for name in sorted(tensors, key=natural_key):
        match = _LAYER.match(name)
        if "mtp" in name.split("."):
            beyond.append(tensors[name])
        elif not match or match["prefix"] != prefix:
            outer.append(tensors[name])
        elif int(match["index"]) < facts.num_layers:
            groups[int(match["index"])].append(tensors[name])
        else:
            beyond.append(tensors[name])
    return Layout(prefix, tuple(tuple(group) for group in groups), tuple(outer), tuple(beyond))


def classify_outer(name: str) -> TensorClass:
    """Class of a tensor outside the decoder layers."""
    if _HEAD.search(name):
        return "head"
    if _NOT_DECODER.search(name):
        return "other"
    if name.endswith(".bias"):
        return "bias"
    module = name.rpartition(".")[0]
    if any(_NORM.search(part) for part in module.split(".")[-2:]):
        return "norm"
    return "embedding" if _EMBEDDING.search(module) or _EMBEDDING.search(name) else "other"


def classify_in_layer(rest: str, shape: tuple[int, ...], num_experts: int | None) -> TensorClass:
    """Class of a tensor of a decoder layer.

    Args:
        rest: its name after the layer's index, e.g. "mlp.experts.7.gate_proj.weight".
        num_experts: routed experts according to config.json; None for a dense model.
    """
    *modules, leaf = rest.split(".")
    last = modules[-1] if modules else ""
    if "bias" in leaf and len(shape) <= 2:  # also fused expert biases [experts, n] and score corrections
        return "bias"
    named = next((part for part in reversed(modules) if not part.isdigit()), "")  # `input_layernorm.0.weight`
    if any(_NORM.search(part) for part in (named, leaf)):
        return "norm"
    if "conv" in last or "sink" in leaf or len(shape) < 2 or (len(shape) > 2 and min(shape) == 1):
        return "router" if is_router(modules, shape, num_experts) and len(shape) == 1 else "other"
    if is_router(modules, shape, num_experts):
        return "router"
    if "experts" in modules or (len(shape) == 3 and shape[0] == num_experts):
        return "experts"
    if leaf != "weight" or len(shape) != 2:
        return "other"
    if _ATTENTION.search(".".join(modules)):
        return "attention"
    if any(_MLP.search(part) for part in modules) or _LINEAR.search(last):
        return "mlp"
    return "other"


def is_router(modules: list[str], shape: tuple[int, ...], num_experts: int | None) -> bool:
    """Whether a weight chooses experts: by its module's name, or by a shape that has one row per expert.

    Args:
        modules: parts of its module's path in the layer, e.g. ["mlp", "gate"].
    """
    if any("router" in part for part in modules):
        return True
    last = modules[-1] if modules else ""
    if num_experts in shape and modules == ["mixer", "gate"]:  # Nemotron-H calls every layer's module so
        return True
    if num_experts is None or "experts" in modules or any(_ATTENTION.search(part) for part in modules):
        return False
    if last in ROUTER_NAMES or (last.endswith("_gate") and "expert" in last):
        return True
    return len(shape) == 2 and num_experts in shape and not _LINEAR.search(last)


def expert_pattern(name: str) -> str:
    """`model.layers.3.mlp.experts.7.w1.weight` -> `model.layers.*.mlp.experts.*.w1.weight`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
