"""Names and shapes of all tensors of a Hugging Face checkpoint, from config.json alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella.checkpoint.blocks import Shape, Tensors, norms
from lamella.checkpoint.facts import text_config
from lamella.checkpoint.families import FAMILIES, Family, layer_kinds
from lamella.checkpoint.family_defaults import DEFAULTS
from lamella.checkpoint.keys import Keys
from lamella.errors import UserError

PREFIX = "model.layers"
ALIASES: Mapping[str, str] = {
    "gemma3": "gemma3_text", "kimi_k2": "deepseek_v3", "llama4": "llama4_text", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
"""Model types whose decoder is another type's."""

_OLD_NAMES = {
    "hidden_size": ("n_embd", "d_model", "dim"), "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"), "max_position_embeddings": ("n_positions", "max_seq_len"),
}  # fmt: skip
_NO_DECODER = re.compile(r"MaskedLM|Classification|QuestionAnswering|PreTraining|Encoder|TextEmbedding")


@dataclass(frozen=True)
class Architecture:
    """Tensors of a checkpoint, in the order of transformers' modules.

    Attributes:
        model_type: the family's.
        prefix: of the layers; layers: names inside each layer -> shape.
        outer: full names outside the layers -> shape; beyond: of layers that predict further tokens.
        kinds: how each layer attends.
        tied: the head is the embedding.
        assumed: keys that config.json does not say, with the family's default.
    """

    model_type: str
    prefix: str
    layers: tuple[Tensors, ...]
    outer: Tensors
    beyond: Tensors
    kinds: tuple[str, ...]
    tied: bool
    assumed: dict[str, Any]

    def tensors(self) -> Tensors:
        """All of them by full name."""
        found = dict(self.outer)
        for i, layer in enumerate(self.layers):
            found |= {f"{self.prefix}.{i}.{name}": shape for name, shape in layer.items()}
        return found | self.beyond


def tensor_shapes(config: Mapping[str, Any], path: Path | None = None) -> dict[str, Shape]:
    """Names and shapes of all tensors of a checkpoint with this config.json.

    Args:
        config: config.json; of a multimodal model the decoder alone is given.
        path: named in errors.

    Raises:
        UserError: an unknown family, an encoder, values that are missing or contradict each other.
    """
    return architecture_of(config, path).tensors()


def known_family(config: Mapping[str, Any]) -> str | None:
    """The decoder's model type, where there are rules for it."""
    text = text_config(config)
    name = str(text.get("model_type") or config.get("model_type"))
    name = ALIASES.get(name, name)
    return name if name in FAMILIES else None


def keys_of(config: Mapping[str, Any], path: Path | None = None) -> Keys:
    """config.json with its family's defaults, where the family is known; old names of sizes become today's."""
    name, text = known_family(config), dict(text_config(config))
    for key, others in _OLD_NAMES.items():
        said = next((other for other in others if other in text), None)
        if key not in text and said:
            text[key] = text[said]
    return Keys(text, DEFAULTS[name] if name else {}, path)


def architecture_of(config: Mapping[str, Any], path: Path | None = None) -> Architecture:
    """See `tensor_shapes`."""
    refuse_encoder(config, path)
    name = known_family(config)
    if name is None:
        said = text_config(config).get("model_type") or config.get("model_type")
        raise UserError(
            f"model_type {said!r} is not among those whose tensors follow from config.json",
            fix=f"give a folder with the checkpoint: its headers are read (known: {', '.join(sorted(FAMILIES))})", path=path,
        )  # fmt: skip
    k, family = keys_of(config, path), FAMILIES[name]
    kinds = tuple(layer_kinds(k, family))
    layers = tuple(family.layer(k, i) for i in range(k.layers()))
    tied = is_tied(config, k)
    return Architecture(name, PREFIX, layers, _outer(k, family, tied), _beyond(k, family), kinds, tied, dict(k.assumed))


def is_tied(config: Mapping[str, Any], k: Keys) -> bool:
    """Whether config.json, or the family's default, says that the head is the embedding."""
    if "tie_word_embeddings" in config:
        return Keys(config, {}, k.path).flag("tie_word_embeddings")
    return k.flag("tie_word_embeddings")


def refuse_encoder(config: Mapping[str, Any], path: Path | None) -> None:
    """Raises `UserError` where config.json tells of an encoder."""
    named = config.get("architectures")
    named = [str(name) for name in named] if isinstance(named, list) else []
    if config.get("is_encoder_decoder") is True or (named and all(_NO_DECODER.search(name) for name in named)):
        what = f"{named[0] if named else config.get('model_type')} is no decoder-only language model"
        raise UserError(what, fix="give a causal language model", path=path)


def _outer(k: Keys, family: Family, tied: bool) -> Tensors:
    hidden, vocab = k.size("hidden_size"), k.size("vocab_size")
    found: Tensors = {"model.embed_tokens.weight": (vocab, hidden)}
    if family.final_norm != "none":
        found |= norms(["model.norm"], hidden, bias=family.final_norm == "layer")
    if not tied:
        found["lm_head.weight"] = (vocab, hidden)
    if family.head_bias and k.flag(family.head_bias):
        found["lm_head.bias"] = (vocab,)
    return found


def _beyond(k: Keys, family: Family) -> Tensors:
    """Layers that predict further tokens (DeepSeek-V3, arXiv:2412.19437, section 2.2): a whole layer behind two norms and a
    projection, with copies of embedding and head in the file."""
    count = k.get("num_nextn_predict_layers") if family.predicts else 0
    if not count:
        return {}
    hidden, vocab, layers = k.size("hidden_size"), k.size("vocab_size"), k.layers()
    kind = family.layer(Keys({**k.config, "mlp_layer_types": None}, k.defaults, k.path), layers)
    found: Tensors = {}
    for i in range(layers, layers + k.size("num_nextn_predict_layers")):
        part = {
            **kind, "embed_tokens.weight": (vocab, hidden), "enorm.weight": (hidden,), "hnorm.weight": (hidden,),
            "eh_proj.weight": (hidden, 2 * hidden), "shared_head.norm.weight": (hidden,),
            "shared_head.head.weight": (vocab, hidden),
        }  # fmt: skip
        found |= {f"{PREFIX}.{i}.{name}": shape for name, shape in part.items()}
    return found
