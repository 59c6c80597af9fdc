"""GGUF files of tiny models, written with the `gguf` package alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

LLAMA_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """Of a llama-like checkpoint's tensor."""
    name = name.replace("model.layers.", "blk.")
    for ours, theirs in LLAMA_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def in_pairs(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows in llama.cpp's order, one by one: row 2 j of a head is transformers' row j, row 2 j + 1 its row j + d / 2."""
    size = len(matrix) // heads
    out = np.empty_like(matrix)
    for head in range(heads):
        for j in range(size // 2):
            out[head * size + 2 * j] = matrix[head * size + j]
            out[head * size + 2 * j + 1] = matrix[head * size + size // 2 + j]
    return out


def write_gguf(path: Path, arch: str, config, tensors: dict[str, np.ndarray], *, more=None, types=None) -> Path:
    """A file of raw tensors by GGUF names.

    Args:
        more: further keys after the architecture's name; types: tensor -> ggml type of its bytes (uint8, whole rows).
    """
    writer = GGUFWriter(path, arch)
    keys = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]), **(more or {}),
    }  # fmt: skip
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 4)
    for name, values in tensors.items():
        kind = (types or {}).get(name)
        writer.add_tensor(name, values, raw_dtype=None if kind is None else GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_tensors(config, state: dict[str, np.ndarray], paired: bool) -> dict[str, np.ndarray]:
    """A llama-like model's tensors as a GGUF file has them."""
    found = {}
    for name, values in state.items():
        if paired and "q_proj" in name:
            values = in_pairs(values, config.num_attention_heads)
        if paired and "k_proj" in name:
            values = in_pairs(values, config.num_key_value_heads)
        found[gguf_name(name)] = values
    return found
