"""Tiny configs of every family that config.json rules exist for, with their odd settings."""

from __future__ import annotations

from typing import Any

SMALL = dict(
    vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=96, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=0, eos_token_id=4, pad_token_id=2,
)  # fmt: skip
MOE = dict(moe_intermediate_size=24, num_experts_per_tok=2)
MLA = dict(
    kv_lora_rank=24, q_lora_rank=40, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, num_key_value_heads=4
)
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
    shared_expert_intermediate_size=40,
)  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "apertus": {}, "arcee": {"mlp_bias": True, "attention_bias": True}, "cohere": {}, "cohere-qk": {"use_qk_norm": True},
    "cohere2": {"tie_word_embeddings": True},
    "deepseek_v2": {**MOE, **MLA, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "deepseek_v2-lite": {**MOE, **MLA, "q_lora_rank": None, "n_routed_experts": 4, "attention_bias": True},
    "deepseek_v3": {**MOE, **MLA, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3},
    "dots1": {**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "max_window_layers": 2},
    "ernie4_5": {"use_bias": True}, "ernie4_5-tied": {"tie_word_embeddings": True},
    "ernie4_5_moe": {"moe_intermediate_size": 24, "moe_num_experts": 4, "moe_k": 2},
    "ernie4_5_moe-odd": {"moe_intermediate_size": 24, "moe_num_experts": 4, "moe_k": 2, "moe_layer_interval": 2,
                         "moe_num_shared_experts": 0, "use_bias": True},
    "exaone4": {}, "exaone4-full": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "gemma": {}, "gemma2": {}, "gemma3_text": {"attention_bias": True}, "glm": {}, "glm4": {"attention_bias": False},
    "glm4_moe": {**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe-plain": {**MOE, "n_routed_experts": 4, "first_k_dense_replace": 2, "num_nextn_predict_layers": 0},
    "glm4_moe_lite": {**MOE, **MLA, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {}, "helium": {}, "hunyuan_v1_dense": {"attention_bias": True}, "hunyuan_v1_moe": {"num_experts": 4},
    "llama": {}, "llama-biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2},
    "minimax": {"num_local_experts": 4, "block_size": 16}, "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral": {}, "ministral3": {}, "mistral": {}, "mixtral": {"num_local_experts": 4},
    "nemotron": {"mlp_bias": True}, "olmo": {}, "olmo2": {}, "olmo3": {}, "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi3": {}, "cwm": {}, "vaultgemma": {}, "phimoe": {"num_local_experts": 4},
    "phimoe-biased": {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True},
    "qwen2": {}, "qwen2-window": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "qwen3": {"attention_bias": True},
    "qwen3_5_moe_text": {**MOE, **LINEAR, "num_experts": 4}, "qwen3_5_text": LINEAR,
    "qwen3_moe": {**MOE, "num_experts": 4}, "qwen3_moe-odd": {**MOE, "num_experts": 4, "decoder_sparse_step": 2},
    "qwen3_next": {**MOE, **LINEAR, "num_experts": 4}, "seed_oss": {}, "smollm3": {"use_sliding_window": True, "sliding_window": 8},
    "stablelm": {}, "stablelm-odd": {"qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True},
    "starcoder2": {}, "starcoder2-window": {"sliding_window": 8, "use_bias": False},
}  # fmt: skip


def tiny(name: str, **over: Any) -> Any:
    """transformers' config of a variant."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[name.partition("-")[0]](**{**SMALL, **VARIANTS[name], **over})
