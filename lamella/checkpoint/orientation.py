"""Which way round a family's fused experts lie: told by its model type, never by sizes.

[E, O, I]   most families: an expert's matrices as linear layers have them (gate and up: O = 2 x inner)
[E, I, O]   those below: what is multiplied from the right
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lamella.checkpoint.architecture import known_family
from lamella.checkpoint.facts import ModelFacts, text_config
from lamella.checkpoint.header import TensorInfo
from lamella.errors import UserError

INPUTS_FIRST = frozenset({"gpt_oss", "llama4", "llama4_text", "aria", "aria_text", "openai_privacy_filter"})
"""Model types whose fused experts take their inputs along the second axis (transformers 5.24)."""


def takes_inputs_first(config: Mapping[str, Any]) -> bool:
    """Whether fused experts lie as [E, I, O]."""
    return str(text_config(config).get("model_type") or config.get("model_type")) in INPUTS_FIRST


_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


def check_orientation(tensors: Iterable[TensorInfo], facts: ModelFacts, config: Mapping[str, Any]) -> None:
    """Fused experts must have the hidden size where their family has it; square ones are taken as the family's.

    Raises:
        UserError: names the tensor, its shape and the one that its model type calls for.
    """
    if facts.hidden_size is None or (known_family(config) is None and not takes_inputs_first(config)):
        return
    swapped = takes_inputs_first(config)
    for tensor in tensors:
        match = _FUSED.search(tensor.name)
        if match is None or len(tensor.shape) != 3:
            continue
        takes_hidden = match[1] == "gate_up_proj"
        axis = 1 if takes_hidden is swapped else 2
        if tensor.shape[axis] != facts.hidden_size:
            inner = "2 x inner" if takes_hidden else "inner"
            axes = ["experts", inner, inner]
            axes[axis] = f"{facts.hidden_size} (hidden size)"
            what = f"tensor {tensor.name!r} has shape {list(tensor.shape)}, model_type {facts.model_type!r}"
            raise UserError(f"{what} has fused experts as [{', '.join(axes)}]", path=tensor.file,
                            fix="give the checkpoint in its family's own layout, or the config.json that belongs to it")  # fmt: skip
