"""A store and an adapter as one GGUF, through the streamed merge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lamella.adapter.lora import Adapter
from lamella.checkpoint.source import Checkpoint
from lamella.config import LoraConfig
from lamella.export.merge import merge
from lamella.export.writers.gguf import gguf_writer
from lamella.models.skeleton import Skeleton, load_config
from tests.fixtures import dense_config, moe_config


@pytest.mark.parametrize("config", [dense_config(), moe_config(inner=32)], ids=["dense", "moe"])
def test_merged_model(config, made, tmp_path):
    """Dequantised base and delta, as F32 to the bit of what the plain fp32 merge writes; as q8_0 with its loss told."""
    store, _ = made(config)
    adapter = Adapter.create(Skeleton(load_config(store.path), torch.float32), LoraConfig(rank=4, alpha=8), seed=0)
    generator = torch.Generator().manual_seed(1)
    for p in adapter.parameters().values():
        p.data = torch.randn(p.shape, generator=generator) * 0.05
    adapter.save(tmp_path / "adapter", base="base")
    merge(store.path, tmp_path / "adapter", tmp_path / "plain", "fp32")
    merge(store.path, tmp_path / "adapter", tmp_path / "out", "gguf f32", writer=gguf_writer("f32"))
    with Checkpoint.open(tmp_path / "plain") as plain, Checkpoint.open(tmp_path / "out" / "model.gguf") as ours:
        assert set(plain.tensors) == set(ours.tensors)
        for name, tensor in plain.tensors.items():
            a, b = np.empty(tensor.numel, np.float32), np.empty(tensor.numel, np.float32)
            plain.values(tensor, 0, a)
            ours.values(ours.tensors[name], 0, b)
            assert a.tobytes() == b.tobytes(), name
    merged = merge(
        store.path, tmp_path / "adapter", tmp_path / "q8", "gguf q8_0", writer=gguf_writer("q8_0"), max_loss=1.0
    )
    assert merged.losses and all(0 < loss.loss.error < 1 for loss in merged.losses)
