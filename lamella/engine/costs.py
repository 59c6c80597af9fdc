"""What an open engine's model costs, as plans take it."""

from __future__ import annotations

import torch

from lamella.engine.engine import Engine
from lamella.engine.flops import FlopCounter
from lamella.forecast import costs
from lamella.plan.costs import ModelCost


def model_cost(engine: Engine, recompute: bool) -> ModelCost:
    """Costs by layer of the engine's model with its adapter, by the sums that plans make from shapes alone.

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
        records = store.records(i)
        layers.append(costs.layer_cost(
            counter.layer(i, recompute), hidden=hidden, dtype_bytes=size, packed_bytes=store.group_bytes(i),
            quantised=sum(torch.Size(r.shape).numel() for r in records if formats[r.name] != "raw"),
            parameters=sum(torch.Size(r.shape).numel() for r in records),
            trained=sum(site.numel for site in adapter.layer_sites(i)),
        ))  # fmt: skip
    outer = sum(torch.Size(r.shape).numel() for r in store.records("outer")) * size
    return costs.model_cost(
        layers, hidden=hidden, vocab=int(engine.config.vocab_size), outer_bytes=outer,
        tied=store.manifest.tie_word_embeddings, trained=counter.first < len(skeleton.layers),
        dtype_bytes=size, recompute=recompute,
    )  # fmt: skip
