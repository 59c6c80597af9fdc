"""config.json of public models, by hand: the keys that decide shapes, as their repositories have them."""

from __future__ import annotations

from typing import Any

_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "torch_dtype": "bfloat16", "attention_bias": False,
          "num_key_value_heads": 8, "max_position_embeddings": 40960, "use_sliding_window": False}  # fmt: skip
_QWEN3_MOE = {"model_type": "qwen3_moe", "head_dim": 128, "vocab_size": 151936, "torch_dtype": "bfloat16", "num_experts": 128,
              "num_experts_per_tok": 8, "num_key_value_heads": 4, "tie_word_embeddings": False, "decoder_sparse_step": 1,
              "mlp_only_layers": [], "attention_bias": False}  # fmt: skip
_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "attention_bias": False, "mlp_bias": False,
           "tie_word_embeddings": False, "torch_dtype": "bfloat16", "max_position_embeddings": 131072}  # fmt: skip
_MIXTRAL = {"model_type": "mixtral", "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16"}  # fmt: skip
_GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "num_experts_per_tok": 4, "vocab_size": 201088, "attention_bias": True,
            "sliding_window": 128, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}}  # fmt: skip
_DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
             "num_hidden_layers": 61, "n_shared_experts": 1, "num_experts_per_tok": 8, "kv_lora_rank": 512, "q_lora_rank": 1536,
             "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "attention_bias": False,
             "tie_word_embeddings": False, "torch_dtype": "bfloat16",
             "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}  # fmt: skip
_GLM = {"model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "num_attention_heads": 96, "num_key_value_heads": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "vocab_size": 151552, "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16"}  # fmt: skip
_LLAMA4 = {"model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
           "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 202048,
           "num_experts_per_tok": 1, "attention_chunk_size": 8192, "tie_word_embeddings": False}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "tie_word_embeddings": True},
    "Qwen3-8B": {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "tie_word_embeddings": False},
    "Qwen3-32B": {**_QWEN3, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
                  "num_attention_heads": 64, "tie_word_embeddings": False},
    "Qwen3-30B-A3B": {**_QWEN3_MOE, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
                      "num_hidden_layers": 48, "num_attention_heads": 32},
    "Qwen3-235B-A22B": {**_QWEN3_MOE, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
                        "num_hidden_layers": 94, "num_attention_heads": 64},
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "head_dim": 256,
        "num_attention_heads": 16, "num_key_value_heads": 2, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10, "full_attention_interval": 4,
        "vocab_size": 151936, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "Mixtral-8x7B": {**_MIXTRAL, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "vocab_size": 32000, "sliding_window": None},
    "Mixtral-8x22B": {**_MIXTRAL, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
                      "num_attention_heads": 48, "vocab_size": 32000, "sliding_window": None},
    "GPT-OSS-20B": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "GPT-OSS-120B": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "DeepSeek-V3": {**_DEEPSEEK, "vocab_size": 129280, "num_attention_heads": 128, "num_key_value_heads": 128,
                    "n_routed_experts": 256, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
    "Kimi-K2": {**_DEEPSEEK, "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64,
                "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    "GLM-4.5": {**_GLM, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160,
                "first_k_dense_replace": 3, "num_hidden_layers": 92, "use_qk_norm": True},
    "GLM-4.5-Air": {**_GLM, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
                    "n_routed_experts": 128, "first_k_dense_replace": 1, "num_hidden_layers": 46, "use_qk_norm": False},
    "Llama-3.1-8B": {**_LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32},
    "Llama-3.1-70B": {**_LLAMA3, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                      "num_attention_heads": 64},
    "Llama-3.1-405B": {**_LLAMA3, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
                       "num_attention_heads": 128},
    "Llama-4-Scout": {"model_type": "llama4", "torch_dtype": "bfloat16", "vision_config": {},
                      "text_config": {**_LLAMA4, "num_local_experts": 16, "interleave_moe_layer_step": 1}},
    "Llama-4-Maverick": {"model_type": "llama4", "torch_dtype": "bfloat16", "vision_config": {},
                         "text_config": {**_LLAMA4, "num_local_experts": 128, "interleave_moe_layer_step": 2}},
    "Gemma-3-27B": {"model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {}, "text_config": {
        "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "sliding_window": 1024}},
}  # fmt: skip
