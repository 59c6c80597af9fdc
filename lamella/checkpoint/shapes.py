"""Shapes against config.json: a shard of another model is found before anything is read.

Only relations that hold for every family are checked: who touches the hidden size, vocabulary rows, expert
counts, and that experts and layers agree with each other where the config gives them one size.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lamella.checkpoint.facts import Layout, ModelFacts, expert_pattern, natural_key, text_config
from lamella.checkpoint.header import TensorInfo
from lamella.errors import UserError

_READS_HIDDEN = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "q_a_proj", "kv_a_proj_with_mqa"}
_WRITES_HIDDEN = {"o_proj", "down_proj", "w2"}
_HIDDEN_NORMS = {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"}
_OWN_SHAPES = ("zamba", "opt")
"""Model types (by prefix) whose blocks read other widths than the hidden size."""
_INNER_ROWS = {"gate_proj", "up_proj", "w1", "w3"}


def check_shapes(tensors: Iterable[TensorInfo], facts: ModelFacts, config: Mapping[str, Any], path: Path) -> None:
    """Compare shapes with config.json and with each other.

    Raises:
        UserError: names the first tensor (in order of layers) whose shape is wrong, and the shape expected.
    """
    ordered = sorted(tensors, key=lambda t: natural_key(t.name))
    for tensor in ordered:
        expected = _expected(tensor, facts)
        if expected:
            _refuse(tensor, expected, path)
    odd = _odd_ones(ordered, text_config(config))
    if odd:
        _refuse(*odd, path)


def check_experts(layout: Layout, facts: ModelFacts, path: Path) -> None:
    """Experts stored one by one must all be there.

    Raises:
        UserError: names the first expert missing from a layer.
    """
    for layer in layout.layers:
        seen: dict[str, set[int]] = defaultdict(set)
        for tensor in layer:
            before, found, after = tensor.name.partition(".experts.")
            number, _, leaf = after.partition(".")
            if found and number.isdigit():
                seen[f"{before}.experts.{{}}.{leaf}"].add(int(number))
        for pattern, numbers in seen.items():
            absent = sorted(set(range(facts.num_experts or max(numbers) + 1)) - numbers)
            if absent:
                what = f"tensor {pattern.format(absent[0])!r} is missing; the layer has {len(numbers)} experts"
                raise UserError(what, fix="download the checkpoint again", path=path)


def _refuse(tensor: TensorInfo, expected: str, path: Path) -> None:
    what = f"tensor {tensor.name!r} has shape {list(tensor.shape)} in {tensor.file.name}, {expected}"
    raise UserError(what, fix="the file belongs to another model: download it again", path=path)


def _expected(tensor: TensorInfo, facts: ModelFacts) -> str:
    """What is wrong with a shape, or ""."""
    parts = tensor.name.split(".")
    module = parts[-2] if len(parts) > 1 else ""
    hidden, shape = facts.hidden_size, tensor.shape
    if hidden is None or parts[-1] != "weight" or facts.model_type.startswith(_OWN_SHAPES):
        return ""
    if any(word in tensor.name for word in ("vision", "visual", "audio")):
        return ""
    in_layer = any(part.isdigit() for part in parts)
    if not in_layer:
        if module not in ("embed_tokens", "lm_head", "wte") or len(shape) != 2:
            return ""
        if shape[1] != hidden:
            return f"config.json says hidden size {hidden}"
        if facts.vocab_size and shape[0] < facts.vocab_size:
            return f"config.json says {facts.vocab_size} vocabulary rows"
        return ""
    if len(shape) == 2 and module in _READS_HIDDEN and shape[1] != hidden:
        return f"config.json says hidden size {hidden} (last dimension)"
    if len(shape) == 2 and module in _WRITES_HIDDEN and shape[0] != hidden:
        return f"config.json says hidden size {hidden} (first dimension)"
    if module in _HIDDEN_NORMS and shape != (hidden,):
        return f"config.json says hidden size {hidden}"
    return ""


def _odd_ones(ordered: list[TensorInfo], config: Mapping[str, Any]) -> tuple[TensorInfo, str] | None:
    """A tensor whose shape differs from its like in other layers, where the config gives that size once.

    Families whose layers differ on purpose say so with lists or with second sizes in config.json
    (`global_head_dim`, a list of inner sizes, dense first layers beside experts): those are left alone.
    """
    groups: dict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in ordered:
        groups[expert_pattern(tensor.name)].append(tensor)
    for pattern, group in groups.items():
        shapes = Counter(tensor.shape for tensor in group)
        if len(shapes) == 1:
            continue
        wanted = _known_shape(pattern, config)
        if wanted is None:
            continue
        for tensor in group:
            axis, sizes, key = wanted
            if tensor.shape[axis] not in sizes:
                return tensor, f"config.json says {key} = {sorted(sizes)[0]}"
    return None


def _known_shape(pattern: str, config: Mapping[str, Any]) -> tuple[int, set[int], str] | None:
    """(axis, allowed sizes, where from) of a linear weight by its name, if config.json fixes it."""
    module = pattern.split(".")[-2]
    if module in _INNER_ROWS or module in ("down_proj", "w2"):
        axis = 0 if module in _INNER_ROWS else 1
        if "experts" in pattern:
            for key in ("moe_intermediate_size", "intermediate_size"):
                if isinstance(config.get(key), int):
                    return axis, {config[key]}, key
            return None
        if isinstance(config.get("intermediate_size"), int) and not any("expert" in k or "moe" in k for k in config):
            return axis, {config["intermediate_size"]}, "intermediate_size"
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    several_kinds = len(set(config.get("layer_types") or ())) > 1  # each kind may have its own head size
    if not isinstance(heads, int) or several_kinds or any(key.startswith("global_") for key in config):
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if module in ("k_proj", "v_proj") and isinstance(kv_heads, int):
        return 0, {kv_heads * head_dim}, "num_key_value_heads x head_dim"
    if module in ("q_proj", "o_proj"):
        axis = 0 if module == "q_proj" else 1
        return axis, {heads * head_dim, 2 * heads * head_dim}, "num_attention_heads x head_dim"
    return None
