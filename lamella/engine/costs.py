"""What an open engine's model costs, as plans take it."""

from __future__ import annotations

import torch

from lamella.engine.engine import Engine
from lamella.engine.flops import FlopCounter
from lamella.engine.weights import is_streamed
from lamella.forecast import costs
from lamella.forecast.describe import shape_of
from lamella.forecast.shape import ModelShape, Site
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
    shape = shape_of(store.path)
    activations = costs.activations_of(shape, _sites(engine, shape), size, engine.walk.weights.device.type)
    layers = []
    for i in range(len(skeleton.layers)):
        records = store.records(i)
        layers.append(costs.layer_cost(
            counter.layer(i, recompute), hidden=hidden, dtype_bytes=size, packed_bytes=store.group_bytes(i),
            quantised=sum(torch.Size(r.shape).numel() for r in records if is_streamed(r)),
            parameters=sum(torch.Size(r.shape).numel() for r in records),
            trained=sum(site.numel for site in adapter.layer_sites(i)),
            activation_bytes_per_token=activations[i],
        ))  # fmt: skip
    outer = sum(torch.Size(r.shape).numel() for r in store.records("outer")) * size
    return costs.model_cost(
        layers, hidden=hidden, vocab=int(engine.config.vocab_size), outer_bytes=outer,
        tied=store.manifest.tie_word_embeddings, trained=counter.first < len(skeleton.layers),
        dtype_bytes=size, recompute=recompute,
    )  # fmt: skip


def _sites(engine: Engine, shape: ModelShape) -> list[Site]:
    """The adapter's pairs on the shape's matrices."""
    assert engine.adapter is not None
    by_name = [{m.name: m for m in layer.matrices} for layer in shape.layers]
    names = [(s, s.path if s.parameter is None else f"{s.path}.{s.parameter}") for s in engine.adapter.sites.values()]
    return [Site(s.layer, by_name[s.layer][name], s.rank) for s, name in names]
