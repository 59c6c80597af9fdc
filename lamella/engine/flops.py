"""Useful floating-point operations of a step: the numerator of utilisation. What counts: see `forecast.flops`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lamella.adapter import SiteSpec
from lamella.adapter.lora import active_experts
from lamella.forecast.flops import LayerFlops, LayerWork, Part, work_of
from lamella.models.layout import PackedBatch
from lamella.models.linear import FrozenLinear
from lamella.models.skeleton import Skeleton


@dataclass
class StepFlops:
    """FLOPs of a step by kind; LoRA, attention and head hold their forward, backward and recompute together."""

    forward: float = 0.0
    recompute: float = 0.0
    input_gradients: float = 0.0
    lora: float = 0.0
    attention: float = 0.0
    head: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.recompute + self.input_gradients + self.lora + self.attention + self.head


def visible_pairs(batch: PackedBatch, window: int | None) -> int:
    """(query, key) pairs of a batch: a token is seen by itself and by what follows it in its sequence (or subtree), in
    sliding-window layers by `window` tokens at most."""
    index_T = torch.arange(batch.tokens, device=batch.visible_until.device)
    seen_T = batch.visible_until - index_T
    return int((seen_T if window is None else seen_T.clamp(max=window)).sum())


def _numel(layer: nn.Module, name: str, p: nn.Parameter) -> int:
    """Of one matrix in the model, whatever part of it a rank holds."""
    if p.dim() == 3:
        return math.prod(p.shape[1:])
    module = layer.get_submodule(name) if name in dict(layer.named_modules()) else None
    return module.in_features * module.out_features if isinstance(module, FrozenLinear) else p.numel()


class FlopCounter:
    """Counts the FLOPs of a model's steps.

    Args:
        skeleton: the model (its shapes are read, not its weights).
        sites: the adapted weights; none for a base that is only evaluated.
    """

    def __init__(self, skeleton: Skeleton, sites: Iterable[SiteSpec] = ()) -> None:
        self.config = skeleton.config
        by_layer: dict[int, dict[str, SiteSpec]] = {}
        for site in sites:
            name = site.path if site.parameter is None else f"{site.path}.{site.parameter}"
            by_layer.setdefault(site.layer, {})[name] = site
        self.first = min(by_layer, default=len(skeleton.layers))
        self._layers = [
            self._read(layer, by_layer.get(i, {}), i > self.first) for i, layer in enumerate(skeleton.layers)
        ]

    def _read(self, layer: nn.Module, sites: dict[str, SiteSpec], below: bool) -> LayerWork:
        """Matrices of one layer in model order. `below`: an adapted layer comes before this one."""
        per_token = active_experts(self.config)
        parts = []
        cores = {}
        for name, p in layer.named_parameters():
            fused = p.dim() == 3 and "experts" in name.split(".")
            if (p.dim() != 2 and not fused) or name.endswith("bias"):
                continue
            name = name.removesuffix(".weight")
            site = sites.get(name)
            times = per_token if fused else 1
            rank = 0 if site is None else site.rank * times
            inputs, outputs = (0, 0) if site is None else (site.inputs, site.outputs)
            parts.append(Part(name, _numel(layer, name, p) * times, rank * inputs, rank * outputs, site is not None))
            owner = name.rpartition(".")[0]
            module = layer.get_submodule(owner)
            if hasattr(module, "layer_idx") and hasattr(module, "is_causal"):
                cores[owner] = self._core(module)
        return work_of(parts, cores, below)

    def _core(self, attention: nn.Module) -> tuple[int, int | None]:
        """(D + D_v) x heads, and the window."""
        heads = int(self.config.num_attention_heads)
        size = getattr(attention, "qk_head_dim", None) or getattr(
            attention, "head_dim", None
        )  # latent attention has both
        size = int(size or self.config.hidden_size // heads)
        window = getattr(attention, "sliding_window", None)
        if window is None and getattr(self.config, "layer_types", None) is None:
            window = getattr(self.config, "sliding_window", None)
        return heads * (size + int(getattr(attention, "v_head_dim", size))), window

    def layer(self, i: int, recompute: bool) -> LayerFlops:
        """One layer's FLOPs by token and by visible pair, of a step."""
        return self._layers[i].flops(i >= self.first, recompute)

    def step(
        self, batches: Sequence[PackedBatch], recomputed: Collection[int] = (), layers: range | None = None
    ) -> StepFlops:
        """FLOPs of forward and backward of these micro-batches.

        Args:
            recomputed: layers whose forward runs again in the backward walk.
            layers: through these alone, and through the head when the last layer is one of them; None: all.
        """
        layers = range(len(self._layers)) if layers is None else layers
        tokens = sum(b.tokens for b in batches)
        windows = {core.window for layer in self._layers for core in layer.cores}
        pairs = {window: sum(visible_pairs(b, window) for b in batches) for window in windows}
        out = StepFlops()
        for i, layer in enumerate(self._layers[layers.start : layers.stop], layers.start):
            trains, again = i >= self.first, int(i in recomputed)
            for w in layer.weights:
                once = 2.0 * w.macs * tokens
                out.forward += once
                out.recompute += again * once
                out.input_gradients += once * (trains and w.needs_input)
                lora = 2.0 * tokens * (w.lora_inputs + w.lora_outputs)
                no_input = 0.0 if w.needs_input else 2.0 * tokens * w.lora_inputs
                out.lora += (3 + again) * lora - no_input
            for core in layer.cores:
                out.attention += 2.0 * core.macs * pairs[core.window] * (
                    1 + again + 2 * (trains and core.needs_input))  # fmt: skip
        positions = sum(int(b.score_tokens.numel()) for b in batches) if layers.stop == len(self._layers) else 0
        passes = 2 if self.first < len(self._layers) else 1
        out.head = 2.0 * passes * positions * int(self.config.vocab_size) * int(self.config.hidden_size)
        return out
