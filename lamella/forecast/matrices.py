"""A layer's matrices from its tensors: named, fused and in the order that transformers gives them once loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lamella.adapter.targets import PEFT_REFUSES
from lamella.checkpoint.facts import TensorClass
from lamella.forecast.shape import Matrix

TRANSPOSED = frozenset({"gpt_oss", "llama4_text", "llama4"})
"""Families whose fused experts are [experts, inputs, outputs]."""
CONV1D = frozenset({"gpt2", "gpt-sw3", "openai-gpt", "imagegpt"})
"""Families whose projections are [inputs, outputs], in modules of their own that get no LoRA here."""

OWN_EXPERTS = frozenset({"llama4_text", "llama4"})
"""Families whose experts transformers computes in a way of their own, which gets no LoRA here."""

NEVER_CALLED = {"jamba": re.compile(r"\.dt_proj$")}
"""Model type -> layers whose weight the family multiplies with, and which it never calls: they get no LoRA pair."""
_EXPERT = re.compile(r"^(?P<path>(?:.*\.)?experts)\.(?P<number>\d+)\.(?P<leaf>\w+)\.weight$")
_GATES, _UPS = ("gate_proj", "w1"), ("up_proj", "w3")
_DOWNS = {"w2": "down_proj", "down_proj": "down_proj"}
_CONVS = re.compile(r"(^|\.)conv\w*\.weight$")
_ATTENTION_ORDER = (
    "q_proj", "q_a_proj", "q_b_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "qkv_proj",
    "query_key_value", "c_attn", "in_proj_qkvz", "in_proj_ba", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a",
    "output_gate", "dense", "c_proj",
)  # fmt: skip
_MLP_ORDER = (
    "gate",
    "wg",
    "router",
    "gate_proj",
    "w1",
    "gate_up_proj",
    "up_proj",
    "w3",
    "c_fc",
    "fc1",
    "down_proj",
    "c_proj",
    "w2",
)


@dataclass(frozen=True)
class Held:
    """A tensor of a layer: its name inside, shape, class, and whether the store holds it in 4 bits."""

    name: str
    shape: tuple[int, ...]
    kind: TensorClass
    quantised: bool


def matrices_of(tensors: Iterable[Held], model_type: str, hidden: int, active: int) -> tuple[Matrix, ...]:
    """Matrices of one layer.

    Args:
        tensors: all that the layer has.
        model_type: of config.json.
        hidden: size of the hidden state, by which fused experts' sides are told apart.
        active: experts per token.
    """
    found: list[Matrix] = []
    apart: dict[str, dict[str, list[Held]]] = {}
    for held in tensors:
        match = _EXPERT.match(held.name)
        if match:
            apart.setdefault(match["path"], {}).setdefault(match["leaf"], []).append(held)
        elif held.kind == "experts" and len(held.shape) == 3 and not _attends(held.name):
            found.append(_fused(held, model_type, hidden, active))
        elif _is_linear(held):
            found.append(_linear(held, model_type))
    for path, leaves in apart.items():
        found.extend(_together(_loaded(path, model_type), leaves, active))
    return tuple(sorted(found, key=lambda m: _place(m.name)))


def _is_linear(held: Held) -> bool:
    if len(held.shape) != 2 or not held.name.endswith(".weight") or _CONVS.search(held.name):
        return False
    return held.kind in ("attention", "mlp", "experts", "router", "other")


def _linear(held: Held, model_type: str) -> Matrix:
    name = _loaded(held.name.removesuffix(".weight"), model_type)
    outputs, inputs = held.shape
    if model_type in CONV1D:
        outputs, inputs = inputs, outputs
    adaptable = held.kind != "router" and not any(
        refused.search(name) for refused in (PEFT_REFUSES.get(model_type), NEVER_CALLED.get(model_type)) if refused
    )
    shared = any(part.startswith("shared") for part in name.split("."))
    return Matrix(name, held.kind, outputs, inputs, quantised=held.quantised, adaptable=adaptable, shared=shared)


def _fused(held: Held, model_type: str, hidden: int, active: int) -> Matrix:
    experts, rows, columns = held.shape
    name = _loaded(held.name.removesuffix(".weight"), model_type)
    reads = not name.endswith(("down_proj", "w2"))
    flipped = model_type in TRANSPOSED
    if rows != columns and hidden in (rows, columns):
        flipped = (rows if reads else columns) == hidden
    outputs, inputs = (columns, rows) if flipped else (rows, columns)
    adaptable = model_type not in OWN_EXPERTS
    return Matrix(name, "experts", outputs, inputs, experts, min(active, experts), held.quantised, adaptable)


def _together(path: str, leaves: dict[str, list[Held]], active: int) -> list[Matrix]:
    """Experts one by one, as the fused parameters they become."""

    def one(name: str, parts: Sequence[list[Held]]) -> Matrix:
        first = parts[0][0]
        number = len(parts[0])
        outputs = sum(part[0].shape[0] for part in parts)
        return Matrix(
            f"{path}.{name}", "experts", outputs, first.shape[1], number, min(active, number), first.quantised
        )

    gates = [leaves[leaf] for leaf in leaves if leaf in _GATES]
    ups = [leaves[leaf] for leaf in leaves if leaf in _UPS]
    found = []
    if gates and ups:
        found.append(one("gate_up_proj", [*gates, *ups]))
    for leaf, tensors in leaves.items():
        if not (gates and ups and leaf in (*_GATES, *_UPS)):
            found.append(one(_DOWNS.get(leaf, leaf), [tensors]))
    return found


def _loaded(name: str, model_type: str) -> str:
    """As transformers calls it."""
    if model_type.startswith("granitemoe"):
        return name.replace(".input_linear", ".experts.gate_up_proj").replace(".output_linear", ".experts.down_proj")
    return name.replace("block_sparse_moe", "mlp")


def _place(name: str) -> tuple[int, int, int, str]:
    """Sort key: attention before what follows it, each in the order of transformers' modules."""
    parts, attention = name.split("."), _attends(name)
    order = _ATTENTION_ORDER if attention else _MLP_ORDER
    inner = 2 if any(part.startswith("shared") for part in parts[:-1]) else int("experts" in parts)
    return int(not attention), inner, order.index(parts[-1]) if parts[-1] in order else len(order), name


def _attends(name: str) -> bool:
    return any("attn" in part or "attention" in part or part == "mixer" for part in name.split("."))
