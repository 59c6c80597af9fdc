"""Attention of a layer, from config.json and the layer's matrices."""

from __future__ import annotations

from collections.abc import Sequence

from lamella.checkpoint.keys import Keys
from lamella.checkpoint.kinds import CHUNKED, LINEAR, SLIDING
from lamella.forecast.shape import Core, CoreKind, LayerShape, Matrix

_LINEAR_PARTS = ("linear_attn", "mamba", "output_gate", "mixer", "ssm", "conv")
_RECURRENT = (*_LINEAR_PARTS, "temporal_block.linear", "forget_gate")


def mixes_otherwise(layer: LayerShape) -> bool:
    """Whether a layer has a token mixer that is not attention, beside one or in its place."""
    linear = layer.core is not None and layer.core.kind == "linear"
    return linear or any(part in m.name for m in layer.matrices for part in _RECURRENT)


def core_of(k: Keys, kind: str, matrices: Sequence[Matrix]) -> Core | None:
    """Heads, sizes and window of one layer; None: no attention, or sizes that config.json does not say.

    A chunked layer counts as a window of its chunk (which sees up to twice as much). Linear attention caches a state of one
    size, whatever the length: no elements per token.

    Args:
        kind: the layer's word of `layer_types`.

    Raises:
        UserError: sizes that cannot be.
    """
    names = {m.name.rpartition(".")[2] for m in matrices if m.kind == "attention"}
    if not names or k.get("num_attention_heads") is None:
        return None
    heads, kv_heads = k.heads()
    if kind == LINEAR or any(part in m.name for m in matrices for part in _LINEAR_PARTS):
        return _linear(k, heads)
    window = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}.get(kind)
    seen = None if window is None else k.maybe(window)
    word: CoreKind = "full" if seen is None else "sliding"
    if "kv_b_proj" in names:
        size = k.size("qk_nope_head_dim", 0) + k.size("qk_rope_head_dim")
        cached = k.size("kv_lora_rank") + k.size("qk_rope_head_dim")
        return Core(word, heads, heads, size, k.size("v_head_dim"), cached, seen)
    size = k.head_dim()
    return Core(word, heads, kv_heads, size, size, 2 * kv_heads * size, seen)


def _linear(k: Keys, heads: int) -> Core:
    if k.get("linear_num_value_heads") is None:
        size = k.head_dim()
        return Core("linear", heads, heads, size, size, 0)
    key, value = k.size("linear_key_head_dim"), k.size("linear_value_head_dim")
    return Core("linear", k.size("linear_num_value_heads"), k.size("linear_num_key_heads"), key, value, 0)
