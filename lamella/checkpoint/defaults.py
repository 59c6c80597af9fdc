"""Keys that config.json leaves out and that change the maths: transformers' defaults take their place, which is told."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lamella.checkpoint.facts import text_config
from lamella.checkpoint.source import read_json

_ROPE_KEYS = ("rope_theta", "rotary_emb_base", "rope_base")
"""Names of the rotary base at config.json's top level, before transformers 5 put it into `rope_parameters`."""


def defaulted(config: Mapping[str, Any], path: Path) -> list[str]:
    """One line for each missing key among head_dim, rope_parameters and eos_token_id that the family's config knows.

    `tie_word_embeddings` is not among them: there the files decide, see `lamella.checkpoint.tied`.

    Args:
        config: config.json.
        path: the checkpoint's folder; generation_config.json may name the eos.
    """
    text = text_config(config)
    absent = [key for key, there in (("head_dim", "head_dim" in text), ("rope_parameters", _has_rope(text)),
                                     ("eos_token_id", _has_eos(text, path))) if not there]  # fmt: skip
    family = _config_class(text.get("model_type")) if absent else None
    if family is None:
        return []
    fields = {field.name: field.default for field in dataclasses.fields(family)}
    lines = []
    for key in absent:
        if key not in fields or family.attribute_map.get(key) in text:
            continue
        if key == "head_dim" and fields[key] is None:
            value = "hidden_size / num_attention_heads"
        else:
            value = json.dumps(getattr(family(), key))
        lines.append(f"config.json does not say {key}: transformers' default for {text['model_type']} is used, {value}")
    return lines


def _has_rope(text: Mapping[str, Any]) -> bool:
    """Whether the base of the rotary embedding is given, for all layers or by layer type."""
    rope = text.get("rope_parameters")
    inner = [rope, *rope.values()] if isinstance(rope, dict) else []
    return any(key in tree for tree in (text, *inner) if isinstance(tree, dict) for key in _ROPE_KEYS)


def _has_eos(text: Mapping[str, Any], path: Path) -> bool:
    if "eos_token_id" in text:
        return True
    file = path / "generation_config.json"
    return file.is_file() and "eos_token_id" in read_json(file)


def _config_class(model_type: object) -> Any:
    """The family's config class; None where transformers does not know it, which is told when the model is built."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    return CONFIG_MAPPING[model_type]
