"""config.json as GGUF metadata (see `checkpoint.gguf_archs` for the keys, `checkpoint.gguf_rope` for rotary embeddings)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lamella.checkpoint.architecture import keys_of
from lamella.checkpoint.facts import text_config
from lamella.checkpoint.families import FAMILIES, layer_kinds
from lamella.checkpoint.gguf import query_scalar
from lamella.checkpoint.gguf_archs import COMMON, HEAD_DIM_TYPES, GgufArch, arch_of
from lamella.checkpoint.gguf_rope import FREQS, GEMMA3_LOCAL, LONG, SHORT, llama3_divisors
from lamella.checkpoint.kinds import SLIDING
from lamella.errors import UserError

_OTHER = "export in another form"


@dataclass
class Metadata:
    """What a GGUF file says of a model beside its weights.

    Attributes:
        arch: how the model type maps.
        values: key after the architecture's name -> number; text: the same for words.
        tensors: small fp32 tensors that stand for numbers of config.json.
        notices: where llama.cpp does something else.
    """

    arch: GgufArch
    values: dict[str, int | float] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, list[float]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def full_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's config.json with transformers' defaults for what it leaves out.

    Raises:
        UserError: a model type that transformers does not know.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text = {k: v for k, v in text_config(config).items() if k != "quantization_config"}
    kind = str(text.get("model_type") or config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise UserError(f"transformers does not know model_type {kind!r}", fix=_OTHER)
    family = CONFIG_MAPPING[kind].from_dict(text)
    found: dict[str, Any] = family.to_dict()
    found |= {name: getattr(family, real) for name, real in family.attribute_map.items() if hasattr(family, real)}
    if "tie_word_embeddings" in config:
        found["tie_word_embeddings"] = config["tie_word_embeddings"]
    return found


def metadata_of(config: Mapping[str, Any]) -> Metadata:
    """Metadata of a model.

    Raises:
        UserError: a model type that is not written as GGUF, or a setting that llama.cpp does not have.
    """
    arch = arch_of(config)
    full = full_config(config)
    found = Metadata(arch)
    for name, value in arch.fixed.items():
        if name in full and full[name] != value and not (value is None and full[name] is None):
            raise UserError(
                f"config.json says {name} = {full[name]!r}; llama.cpp's {arch.name} has {value!r}", fix=_OTHER
            )
    for key, name in (*COMMON, *arch.keys):
        if full.get(name) is None:
            raise UserError(f"config.json says {name} = null, which llama.cpp's {arch.name} cannot", fix=_OTHER)
        found.values[key] = full[name]
    size = full["hidden_size"] // full["num_attention_heads"]
    said = full.get("head_dim") or size
    if arch.model_type in HEAD_DIM_TYPES and said != size:
        raise UserError(f"config.json says head_dim = {said}; llama.cpp's {arch.name} has {size}", fix=_OTHER)
    rope = full["rope_parameters"]
    flat = rope.get("full_attention", rope)
    rotary = int(said * flat.get("partial_rotary_factor", 1.0))
    if rotary != said and arch.model_type != "phi3":
        raise UserError(f"{rotary} of a head's {said} dimensions are rotated, which is not written", fix=_OTHER)
    found.values |= {
        "vocab_size": full["vocab_size"], "attention.key_length": said, "attention.value_length": said,
        "rope.dimension_count": rotary, "rope.freq_base": float(flat["rope_theta"]),
    }  # fmt: skip
    _scaling(found, flat, full, rotary)
    if arch.model_type == "gemma3_text":
        found.values["rope.freq_base_swa"] = float(rope.get("sliding_attention", {}).get("rope_theta", GEMMA3_LOCAL))
    _window(found, config, full)
    if arch.model_type in ("gemma2", "gemma3_text"):
        wanted, has = query_scalar(arch.model_type, full), full["query_pre_attn_scalar"]
        if has != wanted:
            raise UserError(f"config.json says query_pre_attn_scalar = {has}; llama.cpp has {wanted}", fix=_OTHER)
    return found


def _scaling(found: Metadata, rope: Mapping[str, Any], full: Mapping[str, Any], rotary: int) -> None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return
    if kind == "llama3":
        found.tensors[FREQS] = llama3_divisors(float(rope["rope_theta"]), rotary, rope)
        return
    if kind == "linear":
        found.text["rope.scaling.type"] = "linear"
        found.values["rope.scaling.factor"] = float(rope["factor"])
        return
    if kind == "yarn" and rope.get("attention_factor") is None and not rope.get("mscale"):
        found.text["rope.scaling.type"] = "yarn"
        found.values["rope.scaling.factor"] = float(rope["factor"])
        found.values["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
        betas = {f"rope.scaling.yarn_{b}": rope[b] for b in ("beta_fast", "beta_slow") if rope.get(b) is not None}
        found.values |= {key: float(value) for key, value in betas.items()}
        return
    if kind == "longrope" and found.arch.model_type == "phi3":
        import math

        original = rope.get("original_max_position_embeddings") or full["original_max_position_embeddings"]
        factor = full["max_position_embeddings"] / original
        plain = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        found.text["rope.scaling.type"] = "longrope"
        found.values["rope.scaling.original_context_length"] = int(original)
        found.values["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or plain)
        found.tensors |= {LONG: list(rope["long_factor"]), SHORT: list(rope["short_factor"])}
        return
    raise UserError(f"rotary scaling of type {kind!r} with these settings is not written as GGUF", fix=_OTHER)


def _window(found: Metadata, config: Mapping[str, Any], full: Mapping[str, Any]) -> None:
    keys = keys_of(config)
    kinds = layer_kinds(keys, FAMILIES[found.arch.model_type])
    if SLIDING not in kinds:
        return
    window = int(full["sliding_window"])
    if found.arch.window is None:
        if window < full["max_position_embeddings"]:
            found.notices.append(f"llama.cpp's {found.arch.name} has no sliding window: equal up to {window} tokens")
        return
    rule = FAMILIES[found.arch.model_type].kinds(keys)
    if kinds != rule:
        raise UserError(
            f"config.json's layer_types differ from the pattern that llama.cpp's {found.arch.name} has", fix=_OTHER
        )
    found.values["attention.sliding_window"] = window
