"""Tiny configs of every model type that is written as GGUF, and random weights for them without a model."""

from __future__ import annotations

import numpy as np
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lamella.checkpoint.architecture import tensor_shapes
from lamella.export.writers import Target
from lamella.export.writers.gguf import GgufWriter

BASE = dict(
    vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
    max_position_embeddings=256, bos_token_id=0, eos_token_id=4, pad_token_id=2,
)  # fmt: skip
EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[]
)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "llama": dict(tie_word_embeddings=False, head_dim=16),
    "llama biases": dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=32),
    "llama 3": dict(rope_parameters=LLAMA3),
    "llama linear": dict(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    "mistral": dict(sliding_window=None, head_dim=16),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "qwen2": {},
    "qwen2_moe": dict(**EXPERTS, shared_expert_intermediate_size=48),
    "qwen3": dict(head_dim=32, rope_parameters=YARN),
    "qwen3_moe": dict(**EXPERTS, head_dim=16, norm_topk_prob=True),
    "gemma": dict(head_dim=32),
    "gemma2": dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=8),
    "gemma3_text": dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=8, num_hidden_layers=7),
    "phi3": dict(tie_word_embeddings=False),
    "starcoder2": dict(use_bias=True),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "olmo2": {},
    "granite": dict(logits_scaling=4.0, attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.3),
    "cohere": dict(use_qk_norm=True),
    "cohere2": dict(sliding_window=8, num_hidden_layers=4),
}  # fmt: skip


def config_of(name: str, **over):
    return CONFIG_MAPPING[name.split(" ")[0]](**{**BASE, **CONFIGS[name], **over})


def random_tensors(config, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.05 for name, shape in tensor_shapes(config.to_dict()).items()
    }


class Given:
    """A source of given values; remembers what it is told of the file."""

    def __init__(self, values: torch.Tensor) -> None:
        self.given = values.reshape(-1)
        self.got = torch.full_like(self.given, np.nan)

    def values(self, first, out):
        out.copy_(self.given[first : first + out.numel()])

    def stored(self, first, got):
        assert self.got[first : first + got.numel()].isnan().all(), "told twice"
        self.got[first : first + got.numel()] = got

    def nf4_parts(self, block_size):
        return None


def write_model(path, config, tensors, form="f32", files=None):
    """Write a model; gives the writer, and the values that it promises to readers."""
    config = config if isinstance(config, dict) else config.to_dict()
    targets = [Target(name, tuple(t.shape), "float32", "other") for name, t in tensors.items()]
    writer = GgufWriter(path, targets, form, config, files or {})
    promised = {}
    for target in reversed(targets):  # any order
        source = Given(tensors[target.name])
        writer.tensor(target, source)
        promised[target.name] = source.got.reshape(target.shape)
    writer.finish(config, files or {})
    return writer, promised
