"""What an open engine's model costs, as plans take it."""

from __future__ import annotations

import torch

from lamella.engine.engine import Engine
from lamella.engine.flops import FlopCounter
from lamella.plan.costs import STATE_BYTES, LayerCost, ModelCost


def model_cost(engine: Engine, recompute: bool) -> ModelCost:
    """Costs by layer of the engine's model with its adapter.

    Args:
        recompute: layers run again in the backward walk.
    """
    adapter, skeleton, store = engine.adapter, engine.skeleton, engine.store
    assert adapter is not None, "no adapter attached"
    counter = FlopCounter(skeleton, adapter.sites.values())
    hidden, size = int(engine.config.hidden_size), skeleton.dtype.itemsize
    formats = {r.name: r.format for key, _ in store.manifest.groups() for r in store.records(key)}
    layers = []
    for i in range(len(skeleton.layers)):
        flops = counter.layer(i, recompute)
        records = store.records(i)
        quantised = sum(torch.Size(r.shape).numel() for r in records if formats[r.name] != "raw")
        numel = sum(torch.Size(r.shape).numel() for r in records)
        trained = sum(p.numel() for site in adapter.layer_sites(i) for p in adapter.pair(site.key))
        macs = flops.token_forward / 2  # a token writes about as many values as it does products / hidden
        layers.append(LayerCost(
            flops_per_token=flops.token, flops_per_pair=flops.pair,
            forward_share=flops.token_forward / flops.token if flops.token else 0.5,
            packed_bytes=store.group_bytes(i), dequantised_bytes=quantised * size, adapter_bytes=STATE_BYTES * trained,
            activation_bytes_per_token=size * (4 * hidden + 3 * macs / hidden), boundary_bytes_per_token=hidden * size,
            divisible=quantised / max(numel, 1), window=flops.window,
        ))  # fmt: skip
    outer = sum(torch.Size(r.shape).numel() for r in store.records("outer")) * size
    tied = store.manifest.tie_word_embeddings
    passes = 2 if counter.first < len(skeleton.layers) else 1
    return ModelCost(
        tuple(layers), head_flops_per_label=2.0 * passes * int(engine.config.vocab_size) * hidden,
        first_bytes=0, last_bytes=outer if tied else outer // 2,
    )  # fmt: skip
