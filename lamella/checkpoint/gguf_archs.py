"""llama.cpp's architectures and transformers' model types: keys of the metadata, names and order of the tensors.

From llama.cpp's converter and graphs (`conversion/`, `src/models/`) and gguf 0.19's constants. Where llama.cpp's code fixes
what config.json may choose, `fixed` has the value: a config that says otherwise cannot be written as that architecture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lamella.checkpoint.architecture import Architecture, architecture_of
from lamella.checkpoint.facts import text_config
from lamella.errors import UserError

Keys = tuple[tuple[str, str], ...]

COMMON: Keys = (
    ("context_length", "max_position_embeddings"), ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"), ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"), ("attention.head_count_kv", "num_key_value_heads"),
)  # fmt: skip
"""Key of the metadata after the architecture's name -> key of config.json: whole numbers that every architecture has."""

_RMS: Keys = (("attention.layer_norm_rms_epsilon", "rms_norm_eps"),)
_QWEN_EXPERTS: Keys = (
    ("expert_count", "num_experts"), ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
)  # fmt: skip
_SILU = {"hidden_act": "silu"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}


@dataclass(frozen=True)
class GgufArch:
    """One model type in GGUF.

    Attributes:
        name: `general.architecture`; enum: its member of `gguf.MODEL_ARCH`.
        model_type, model_class: of transformers.
        keys: numbers beside `COMMON`: key of the metadata -> key of config.json.
        fixed: what llama.cpp's code does whatever a config says.
        paired: rows of queries and keys lie in rotary pairs (see `gguf_decode.unpaired`).
        norm_add: what norm weights in a file have more than transformers'.
        flags: tensor of layer 0 -> key of config.json that is true where it is there.
        window: key of the sliding window; None: there is none in llama.cpp's graph.
        written: whether models are exported (others are read alone).
    """

    name: str
    enum: str
    model_type: str
    model_class: str
    keys: Keys = _RMS
    fixed: Mapping[str, Any] = field(default_factory=lambda: _SILU)
    paired: bool = False
    norm_add: float = 0.0
    flags: Mapping[str, str] = field(default_factory=dict)
    window: str | None = None
    written: bool = True


_BIASES = {"attn_q.bias": "attention_bias"}
_LLAMA_BIASES = {**_BIASES, "ffn_gate.bias": "mlp_bias"}

ARCHS: tuple[GgufArch, ...] = (
    GgufArch("llama", "LLAMA", "llama", "LlamaForCausalLM", paired=True, flags=_LLAMA_BIASES),
    GgufArch("llama", "LLAMA", "mistral", "MistralForCausalLM", paired=True),
    GgufArch("llama", "LLAMA", "mixtral", "MixtralForCausalLM", paired=True,
             keys=(*_RMS, ("expert_count", "num_local_experts"), ("expert_used_count", "num_experts_per_tok"))),
    GgufArch("qwen2", "QWEN2", "qwen2", "Qwen2ForCausalLM"),
    GgufArch("qwen2moe", "QWEN2MOE", "qwen2_moe", "Qwen2MoeForCausalLM",
             keys=(*_RMS, *_QWEN_EXPERTS, ("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
             fixed={**_SILU, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "qkv_bias": True}),
    GgufArch("qwen3", "QWEN3", "qwen3", "Qwen3ForCausalLM", fixed={**_SILU, "attention_bias": False}),
    GgufArch("qwen3moe", "QWEN3MOE", "qwen3_moe", "Qwen3MoeForCausalLM", keys=(*_RMS, *_QWEN_EXPERTS),
             fixed={**_SILU, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
                    "attention_bias": False}),
    GgufArch("gemma", "GEMMA", "gemma", "GemmaForCausalLM", norm_add=1.0,
             fixed={"hidden_act": "gelu_pytorch_tanh", "attention_bias": False, "tie_word_embeddings": True}),
    GgufArch("gemma2", "GEMMA2", "gemma2", "Gemma2ForCausalLM", norm_add=1.0, window="sliding_window",
             keys=(*_RMS, ("attn_logit_softcapping", "attn_logit_softcapping"),
                   ("final_logit_softcapping", "final_logit_softcapping")),
             fixed={**_GELU, "attention_bias": False, "tie_word_embeddings": True}),
    GgufArch("gemma3", "GEMMA3", "gemma3_text", "Gemma3ForCausalLM", norm_add=1.0, window="sliding_window",
             fixed={**_GELU, "attention_bias": False, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    GgufArch("phi3", "PHI3", "phi3", "Phi3ForCausalLM", window="sliding_window"),
    GgufArch("starcoder2", "STARCODER2", "starcoder2", "Starcoder2ForCausalLM",
             keys=(("attention.layer_norm_epsilon", "norm_epsilon"),), fixed={"hidden_act": "gelu_pytorch_tanh"},
             flags={"attn_q.bias": "use_bias"}),
    GgufArch("olmoe", "OLMOE", "olmoe", "OlmoeForCausalLM",
             keys=(*_RMS, ("expert_count", "num_experts"), ("expert_used_count", "num_experts_per_tok")),
             fixed={**_SILU, "norm_topk_prob": False, "clip_qkv": None, "attention_bias": False}),
    GgufArch("olmo2", "OLMO2", "olmo2", "Olmo2ForCausalLM", fixed={**_SILU, "attention_bias": False}),
    GgufArch("granite", "GRANITE", "granite", "GraniteForCausalLM", paired=True, flags=_LLAMA_BIASES,
             keys=(*_RMS, ("logit_scale", "logits_scaling"), ("attention.scale", "attention_multiplier"),
                   ("embedding_scale", "embedding_multiplier"), ("residual_scale", "residual_multiplier"))),
    GgufArch("command-r", "COMMAND_R", "cohere", "CohereForCausalLM", flags={"attn_q_norm.weight": "use_qk_norm"},
             keys=(("attention.layer_norm_epsilon", "layer_norm_eps"), ("logit_scale", "logit_scale")),
             fixed={**_SILU, "attention_bias": False, "tie_word_embeddings": True}),
    GgufArch("cohere2", "COHERE2", "cohere2", "Cohere2ForCausalLM", window="sliding_window",
             keys=(("attention.layer_norm_epsilon", "layer_norm_eps"), ("logit_scale", "logit_scale")),
             fixed={**_SILU, "attention_bias": False, "tie_word_embeddings": True}),
)  # fmt: skip

HEAD_DIM_TYPES = ("cohere", "cohere2", "granite", "olmo2", "olmoe", "phi3", "qwen2_moe", "starcoder2")
"""Model types whose heads are `hidden_size / num_attention_heads` wide: config.json does not say `head_dim`."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint's tensor lies in a GGUF file.

    Attributes:
        name: of the tensor there; expert: its index on the first axis, or None.
        heads: heads whose rows lie in rotary pairs, or None; add: what the file's values have more.
    """

    name: str
    expert: int | None = None
    heads: int | None = None
    add: float = 0.0


def arch_of(config: Mapping[str, Any]) -> GgufArch:
    """How a model of this config.json is written as GGUF.

    Raises:
        UserError: a model type that is not.
    """
    said = text_config(config).get("model_type") or config.get("model_type")
    name = {"gemma3": "gemma3_text"}.get(str(said), str(said))
    found = next((a for a in ARCHS if a.model_type == name and a.written), None)
    if found is None:
        known = ", ".join(sorted({a.model_type for a in ARCHS if a.written}))
        raise UserError(f"model_type {said!r} is not written as GGUF", fix=f"export in another form (GGUF: {known})")
    return found


_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_HEADS = re.compile(r"self_attn\.([qk])_proj\.(weight|bias)$")


def places(arch: GgufArch, config: Mapping[str, Any]) -> dict[str, Place]:
    """Every tensor of a checkpoint of this config.json -> its place in a GGUF file.

    Raises:
        UserError: a tensor for which this architecture has no name.
    """
    architecture = architecture_of(config)
    return {name: place_of(arch, name, config, architecture) for name in architecture.tensors()}


def place_of(arch: GgufArch, name: str, config: Mapping[str, Any], architecture: Architecture) -> Place:
    """See `places`; `name` may also be a fused `experts.gate_proj` without an index."""
    match = _EXPERT.search(name)
    plain = _EXPERT.sub(".experts.", name)
    found = _name_map(arch, len(architecture.layers)).get_name(plain, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise UserError(f"tensor {name!r} has no place in a GGUF of architecture {arch.name!r}",
                        fix="export in another form")  # fmt: skip
    text, heads = text_config(config), None
    letter = _HEADS.search(name)
    if arch.paired and letter:
        kv = text.get("num_key_value_heads") or text["num_attention_heads"]
        heads = int(text["num_attention_heads"] if letter[1] == "q" else kv)
    add = arch.norm_add if name.endswith("norm.weight") else 0.0
    return Place(found, int(match[1]) if match else None, heads, add)


_MAPS: dict[tuple[str, int], Any] = {}


def _name_map(arch: GgufArch, layers: int) -> Any:
    from gguf.constants import MODEL_ARCH
    from gguf.tensor_mapping import get_tensor_name_map

    key = arch.enum, layers
    if key not in _MAPS:
        _MAPS[key] = get_tensor_name_map(MODEL_ARCH[arch.enum], layers)
    return _MAPS[key]
