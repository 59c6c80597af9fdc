"""What a model's layers cost, as plans take it (`plan.costs`), from shapes; the engine's own costs are made by the same sums."""

from __future__ import annotations

from collections.abc import Iterable

from lamella.forecast.flops import LayerFlops, layer_work
from lamella.forecast.shape import ModelShape, Site
from lamella.plan.costs import STATE_BYTES, LayerCost, ModelCost


def layer_cost(
    flops: LayerFlops, *, hidden: int, dtype_bytes: int, packed_bytes: int, quantised: int, parameters: int, trained: int
) -> LayerCost:  # fmt: skip
    """One layer.

    Args:
        hidden: size of the hidden state; dtype_bytes: of the dtype computed in.
        packed_bytes: of its file in the store.
        quantised: parameters in 4 bits, of all `parameters`; trained: of its LoRA pairs.
    """
    macs = flops.token_forward / 2  # a token writes about as many values as it does products / hidden
    return LayerCost(
        flops_per_token=flops.token, flops_per_pair=flops.pair,
        forward_share=flops.token_forward / flops.token if flops.token else 0.5,
        packed_bytes=packed_bytes, dequantised_bytes=quantised * dtype_bytes, adapter_bytes=STATE_BYTES * trained,
        activation_bytes_per_token=dtype_bytes * (4 * hidden + 3 * macs / hidden), boundary_bytes_per_token=hidden * dtype_bytes,
        divisible=quantised / max(parameters, 1), window=flops.window,
    )  # fmt: skip


def model_cost(
    layers: Iterable[LayerCost], *, hidden: int, vocab: int, outer_bytes: int, tied: bool, trained: bool, dtype_bytes: int,
    recompute: bool,
) -> ModelCost:  # fmt: skip
    """Layers, and what lies outside them.

    Args:
        outer_bytes: of embeddings, final norm and head in the dtype computed in.
        trained: something is trained, so the head's input has a gradient.
        dtype_bytes, recompute: as `cost_of` takes them.
    """
    passes = 2 if trained else 1
    return ModelCost(
        tuple(layers), head_flops_per_label=2.0 * passes * vocab * hidden, first_bytes=0,
        last_bytes=outer_bytes if tied else outer_bytes // 2, recompute=recompute, value_bytes=dtype_bytes,
    )  # fmt: skip


def cost_of(shape: ModelShape, sites: Iterable[Site], dtype_bytes: int, recompute: bool) -> ModelCost:
    """Costs of a model with a LoRA, equal to those of an engine that has both open.

    Args:
        sites: the adapted weights (see `trainable.sites_of`).
        dtype_bytes: of the dtype computed in: 2, or 4 for fp32.
        recompute: layers run again in the backward walk.
    """
    by_layer: dict[int, dict[str, Site]] = {}
    for site in sites:
        by_layer.setdefault(site.layer, {})[site.matrix.name] = site
    first = min(by_layer, default=len(shape.layers))
    layers = []
    for i, layer in enumerate(shape.layers):
        own = by_layer.get(i, {})
        layers.append(layer_cost(
            layer_work(layer, own, i > first).flops(i >= first, recompute), hidden=shape.hidden, dtype_bytes=dtype_bytes,
            packed_bytes=layer.store_bytes, quantised=layer.quantised_parameters,
            parameters=sum(m.parameters for m in layer.matrices) + layer.other_parameters,
            trained=sum(site.parameters for site in own.values()),
        ))  # fmt: skip
    outer = shape.embedding_parameters + shape.head_parameters + shape.outer_parameters
    return model_cost(layers, hidden=shape.hidden, vocab=shape.vocab, outer_bytes=outer * dtype_bytes, tied=shape.tied,
                      trained=bool(by_layer), dtype_bytes=dtype_bytes, recompute=recompute)  # fmt: skip
