"""What a model's layers cost, as plans take it (`plan.costs`), from shapes; the engine's own costs are made by the same sums."""

from __future__ import annotations

from collections.abc import Iterable

from lamella.forecast.flops import LayerFlops, layer_work
from lamella.forecast.shape import ModelShape, Site
from lamella.forecast.use import activation_bytes_per_token
from lamella.plan.costs import STATE_BYTES, LayerCost, ModelCost


def layer_cost(
    flops: LayerFlops, *, hidden: int, dtype_bytes: int, packed_bytes: int, quantised: int, parameters: int, trained: int,
    activation_bytes_per_token: float,
) -> LayerCost:  # fmt: skip
    """One layer.

    Args:
        hidden: size of the hidden state; dtype_bytes: of the dtype computed in.
        packed_bytes: of its file in the store.
        quantised: parameters in 4 bits, of all `parameters`; trained: of its LoRA pairs.
        activation_bytes_per_token: see `activations_of`.
    """
    return LayerCost(
        flops_per_token=flops.token, flops_per_pair=flops.pair,
        forward_share=flops.token_forward / flops.token if flops.token else 0.5,
        packed_bytes=packed_bytes, dequantised_bytes=quantised * dtype_bytes, adapter_bytes=STATE_BYTES * trained,
        activation_bytes_per_token=activation_bytes_per_token, boundary_bytes_per_token=hidden * dtype_bytes,
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


def activations_of(shape: ModelShape, sites: Iterable[Site], dtype_bytes: int, device_kind: str = "cpu") -> list[float]:
    """Of each layer, bytes of its work per token (`use.activation_bytes_per_token`)."""
    by_layer: dict[int, list[Site]] = {}
    for site in sites:
        by_layer.setdefault(site.layer, []).append(site)
    known: dict[tuple[int, tuple[tuple[str, int], ...]], float] = {}
    found = []
    for i, layer in enumerate(shape.layers):
        own = by_layer.get(i, [])
        key = hash(layer), tuple((site.matrix.name, site.rank) for site in own)
        if key not in known:
            known[key] = activation_bytes_per_token(shape, i, own, dtype_bytes, device_kind)
        found.append(known[key])
    return found


def cost_of(
    shape: ModelShape, sites: Iterable[Site], dtype_bytes: int, recompute: bool, device_kind: str = "cpu"
) -> ModelCost:
    """Costs of a model with a LoRA, equal to those of an engine that has both open.

    Args:
        sites: the adapted weights (see `trainable.sites_of`).
        dtype_bytes: of the dtype computed in: 2, or 4 for fp32.
        recompute: layers run again in the backward walk.
        device_kind: "cpu" or "cuda": layers keep more where no fused modules stand in.
    """
    sites = list(sites)
    by_layer: dict[int, dict[str, Site]] = {}
    for site in sites:
        by_layer.setdefault(site.layer, {})[site.matrix.name] = site
    first = min(by_layer, default=len(shape.layers))
    activations = activations_of(shape, sites, dtype_bytes, device_kind)
    layers = []
    for i, layer in enumerate(shape.layers):
        own = by_layer.get(i, {})
        layers.append(layer_cost(
            layer_work(layer, own, i > first).flops(i >= first, recompute), hidden=shape.hidden, dtype_bytes=dtype_bytes,
            packed_bytes=layer.store_bytes, quantised=layer.quantised_parameters,
            parameters=sum(m.parameters for m in layer.matrices) + layer.other_parameters,
            trained=sum(site.parameters for site in own.values()), activation_bytes_per_token=activations[i],
        ))  # fmt: skip
    outer = shape.embedding_parameters + shape.head_parameters + shape.outer_parameters
    return model_cost(layers, hidden=shape.hidden, vocab=shape.vocab, outer_bytes=outer * dtype_bytes, tied=shape.tied,
                      trained=bool(by_layer), dtype_bytes=dtype_bytes, recompute=recompute)  # fmt: skip
