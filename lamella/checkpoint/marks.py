"""What config.json says of how its weights are quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamella.checkpoint.facts import text_config

_MARKS = ("quantization_config", "compression_config")


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """config.json's `quantization_config`, or None."""
    for tree in (config, text_config(config)):
        for mark in _MARKS:
            settings = tree.get(mark)
            if isinstance(settings, Mapping) and settings:
                return settings
    return None


def method_of(settings: Mapping[str, Any]) -> str:
    return str(settings.get("quant_method") or "unknown")


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json without its marks, as of a model whose weights are no longer packed."""
    plain = {key: value for key, value in config.items() if key not in _MARKS}
    nested = plain.get("text_config")
    return {**plain, "text_config": plain_config(nested)} if isinstance(nested, dict) else plain
