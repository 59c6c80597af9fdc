"""Which way round a family's fused experts lie: told by its model type, never by sizes.

[E, O, I]   most families: an expert's matrices as linear layers have them (gate and up: O = 2 x inner)
[E, I, O]   those below: what is multiplied from the right
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamella.checkpoint.facts import text_config

INPUTS_FIRST = frozenset({"gpt_oss", "llama4", "llama4_text", "aria", "aria_text", "openai_privacy_filter"})
"""Model types whose fused experts take their inputs along the second axis (transformers 5.24)."""


def takes_inputs_first(config: Mapping[str, Any]) -> bool:
    """Whether fused experts lie as [E, I, O]."""
    return str(text_config(config).get("model_type") or config.get("model_type")) in INPUTS_FIRST
