"""What transformers 5.24 takes for keys that a config.json leaves out, by family: the defaults of its configuration classes.

Keys that bear on shapes alone; those that default to null, false or nothing are left out. Tests compare them with the
installed transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "apertus": {
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 65536, "num_attention_heads": 32,
        "num_hidden_layers": 32, "vocab_size": 131072,
    },
    "arcee": {
        "hidden_size": 2560, "intermediate_size": 18432, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "vocab_size": 32000,
    },
    "cohere": {
        "hidden_size": 8192, "intermediate_size": 22528, "max_position_embeddings": 8192, "num_attention_heads": 64,
        "num_hidden_layers": 40, "tie_word_embeddings": True, "vocab_size": 256000,
    },
    "cohere2": {
        "hidden_size": 8192, "intermediate_size": 22528, "max_position_embeddings": 8192, "num_attention_heads": 64,
        "num_hidden_layers": 40, "sliding_window": 4096, "tie_word_embeddings": True, "vocab_size": 256000,
    },
    "cwm": {
        "head_dim": 128, "hidden_size": 6144, "intermediate_size": 21504, "max_position_embeddings": 131072,
        "num_attention_heads": 48, "num_hidden_layers": 64, "num_key_value_heads": 8, "sliding_window": 8192,
        "vocab_size": 128256,
    },
    "deepseek_v2": {
        "first_k_dense_replace": 0, "hidden_size": 4096, "intermediate_size": 11008, "kv_lora_rank": 512,
        "max_position_embeddings": 2048, "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_attention_heads": 32, "num_hidden_layers": 32, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
    },
    "deepseek_v3": {
        "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    },
    "dots1": {
        "first_k_dense_replace": 0, "hidden_size": 4608, "intermediate_size": 10944, "max_position_embeddings": 2048,
        "max_window_layers": 62, "moe_intermediate_size": 1408, "num_attention_heads": 32, "num_hidden_layers": 62,
        "num_key_value_heads": 32, "sliding_window": 4096, "vocab_size": 152064,
    },
    "ernie4_5": {
        "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131072,
        "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "vocab_size": 103424,
    },
    "ernie4_5_moe": {
        "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072, "moe_intermediate_size": 1536,
        "moe_k": 6, "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "tie_word_embeddings": True, "vocab_size": 103424,
    },
    "exaone4": {
        "hidden_size": 4096, "intermediate_size": 16384, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4,
        "vocab_size": 102400,
    },
    "gemma": {
        "head_dim": 256, "hidden_size": 3072, "intermediate_size": 24576, "max_position_embeddings": 8192,
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 16, "tie_word_embeddings": True,
        "vocab_size": 256000,
    },
    "gemma2": {
        "head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192,
        "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "sliding_window": 4096,
        "tie_word_embeddings": True, "vocab_size": 256000,
    },
    "gemma3_text": {
        "head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 131072,
        "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "sliding_window": 4096,
        "tie_word_embeddings": True, "vocab_size": 262208,
    },
    "glm": {
        "attention_bias": True, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 13696,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "vocab_size": 151552,
    },
    "glm4": {
        "attention_bias": True, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 13696,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "vocab_size": 151552,
    },
    "glm4_moe": {
        "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "vocab_size": 151552,
    },
    "glm4_moe_lite": {
        "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1, "num_attention_heads": 20,
        "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20, "q_lora_rank": 768,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "vocab_size": 154880,
    },
    "gpt_oss": {
        "attention_bias": True, "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "num_local_experts": 128, "sliding_window": 128, "vocab_size": 201088,
    },
    "granite": {
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 32, "vocab_size": 32000,
    },
    "helium": {
        "head_dim": 128, "hidden_size": 2560, "intermediate_size": 7040, "max_position_embeddings": 4096,
        "num_attention_heads": 20, "num_hidden_layers": 24, "num_key_value_heads": 20, "vocab_size": 48000,
    },
    "hunyuan_v1_dense": {
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 32, "vocab_size": 290943,
    },
    "hunyuan_v1_moe": {
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048, "moe_topk": 1,
        "num_attention_heads": 32, "num_experts": 1, "num_hidden_layers": 32, "vocab_size": 290943,
    },
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 32, "vocab_size": 32000,
    },
    "llama4_text": {
        "attention_chunk_size": 8192, "head_dim": 128, "hidden_size": 5120, "interleave_moe_layer_step": 1,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "max_position_embeddings": 131072,
        "no_rope_layer_interval": 4, "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "num_local_experts": 16, "use_qk_norm": True, "vocab_size": 202048,
    },
    "minimax": {
        "block_size": 256, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "vocab_size": 32000,
    },
    "minimax_m2": {
        "head_dim": 128, "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608,
        "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
        "num_local_experts": 256, "vocab_size": 200064,
    },
    "ministral": {
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096, "vocab_size": 32000,
    },
    "ministral3": {
        "head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 262144,
        "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "vocab_size": 131072,
    },
    "mistral": {
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096, "vocab_size": 32000,
    },
    "mixtral": {
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "vocab_size": 32000,
    },
    "nemotron": {
        "hidden_size": 6144, "intermediate_size": 24576, "max_position_embeddings": 4096, "num_attention_heads": 48,
        "num_hidden_layers": 32, "vocab_size": 256000,
    },
    "olmo": {
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 32, "vocab_size": 50304,
    },
    "olmo2": {
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 32, "vocab_size": 50304,
    },
    "olmo3": {
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 32, "sliding_window": 4096, "vocab_size": 50304,
    },
    "olmoe": {
        "hidden_size": 2048, "intermediate_size": 2048, "max_position_embeddings": 4096, "num_attention_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "vocab_size": 50304,
    },
    "phi3": {
        "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "vocab_size": 32064,
    },
    "phimoe": {
        "hidden_size": 4096, "intermediate_size": 6400, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 16,
        "vocab_size": 32064,
    },
    "qwen2": {
        "hidden_size": 4096, "intermediate_size": 22016, "max_position_embeddings": 32768, "max_window_layers": 28,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "sliding_window": 4096,
        "vocab_size": 151936,
    },
    "qwen2_moe": {
        "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 32768,
        "max_window_layers": 28, "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "qkv_bias": True,
        "shared_expert_intermediate_size": 5632, "sliding_window": 4096, "vocab_size": 151936,
    },
    "qwen3": {
        "head_dim": 128, "hidden_size": 4096, "intermediate_size": 22016, "max_position_embeddings": 32768,
        "max_window_layers": 28, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "sliding_window": 4096, "vocab_size": 151936,
    },
    "qwen3_5_moe_text": {
        "head_dim": 256, "hidden_size": 2048, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 32768, "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512, "vocab_size": 248320,
    },
    "qwen3_5_text": {
        "head_dim": 256, "hidden_size": 4096, "intermediate_size": 12288, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 32768, "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4,
        "vocab_size": 248320,
    },
    "qwen3_moe": {
        "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 32768,
        "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 24, "num_key_value_heads": 4, "sliding_window": 4096, "vocab_size": 151936,
    },
    "qwen3_next": {
        "decoder_sparse_step": 1, "head_dim": 256, "hidden_size": 2048, "intermediate_size": 5632,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "max_position_embeddings": 32768, "moe_intermediate_size": 512,
        "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "shared_expert_intermediate_size": 512, "vocab_size": 151936,
    },
    "seed_oss": {
        "attention_bias": True, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 27648,
        "max_position_embeddings": 524288, "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "vocab_size": 155136,
    },
    "smollm3": {
        "hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 32768, "no_rope_layer_interval": 4,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "stablelm": {
        "hidden_size": 2560, "intermediate_size": 6912, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "vocab_size": 50304,
    },
    "starcoder2": {
        "hidden_size": 3072, "intermediate_size": 12288, "max_position_embeddings": 4096, "num_attention_heads": 24,
        "num_hidden_layers": 30, "num_key_value_heads": 2, "tie_word_embeddings": True, "use_bias": True,
        "vocab_size": 49152,
    },
    "vaultgemma": {
        "head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192,
        "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "sliding_window": 4096,
        "tie_word_embeddings": True, "vocab_size": 256000,
    },
}  # fmt: skip
