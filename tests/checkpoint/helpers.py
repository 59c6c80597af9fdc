"""Checkpoints written tensor by tensor, and fused twins of MoE ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.fixtures import random_model


def write_tensors(path: Path, config: dict, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """A checkpoint of exactly these tensors, spread over `shards` files with an index if more than one."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name: t.contiguous().clone() for name, t in tensors.items()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def write_fused(path: Path, config, *, seed: int = 0, dtype=torch.bfloat16, shards: int = 1) -> Path:
    """The model's own parameters as they are: experts fused 3-D, where `save_pretrained` takes them apart."""
    model = random_model(config, seed).to(dtype)
    return write_tensors(path, json.loads(config.to_json_string(use_diff=False)), dict(model.state_dict()), shards)


def layer_config(layers: int = 1, **over) -> dict:
    """A config.json for hand-made tensors: hidden 64, vocabulary 32."""
    return {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": layers, "vocab_size": 32,
            "tie_word_embeddings": True, **over}  # fmt: skip


def embedding(hidden: int = 64) -> dict[str, torch.Tensor]:
    return {"model.embed_tokens.weight": torch.ones(32, hidden)}
