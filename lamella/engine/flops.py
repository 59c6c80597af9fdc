"""Useful floating-point operations of a step, by arithmetic: the numerator of utilisation.

A product of [m, k] and [k, n] counts 2 m k n. What counts, per layer and token:

    frozen weight W [O, I]    forward 2 O I; input gradient 2 O I where the backward walk needs it (the weights
                              themselves have no gradient); forward once more where the layer is recomputed
    experts [E, O, I]         the same, times the experts that a token is routed to
    LoRA of rank r            forward 2 r (I + O); backward 4 r (I + O), less 2 r I where no input gradient is needed
    attention                 2 (D + D_v) per head and visible (query, key) pair forward, twice that backward
    head V x H                forward and input gradient, at label positions only

Elementwise work, softmax, dequantising, filler rows and what a kernel recomputes inside itself do not count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lamella.adapter import SiteSpec
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


@dataclass(frozen=True)
class LayerFlops:
    """Of one layer in a step: by token and by visible pair, in all and of the forward pass; `window` of the pairs."""

    token: float
    token_forward: float
    pair: float
    pair_forward: float
    window: int | None


@dataclass(frozen=True)
class _Weight:
    """One frozen matrix: multiply-adds per token, its LoRA's rank x inputs and rank x outputs per token, and whether
    its input needs a gradient."""

    macs: int
    lora_inputs: int
    lora_outputs: int
    needs_input: bool


@dataclass(frozen=True)
class _Core:
    """Attention without its projections: (D + D_v) x heads per visible pair, window, whether its inputs need gradients."""

    macs: int
    window: int | None
    needs_input: bool


@dataclass
class _Layer:
    weights: list[_Weight] = field(default_factory=list)
    cores: list[_Core] = field(default_factory=list)


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

    def _read(self, layer: nn.Module, sites: dict[str, SiteSpec], below: bool) -> _Layer:
        """Matrices of one layer in model order.

        `below`: an adapted layer comes before this one, so all inputs need gradients. In the first adapted layer an
        input needs one when an adapted weight lies before it: in an earlier block (attention, MLP), or for the last
        matrix of a module in that module, as the others all read the block's input.
        """
        found = _Layer()
        config = self.config
        per_token = int(getattr(config, "num_experts_per_tok", 0) or getattr(config, "num_experts_per_token", 0) or 1)
        blocks: dict[str, dict[str, list[tuple[str, nn.Parameter]]]] = {}
        for name, p in layer.named_parameters():
            if p.dim() >= 2 and not name.endswith("bias"):
                name = name.removesuffix(".weight")
                block = blocks.setdefault(name.partition(".")[0], {})
                block.setdefault(name.rpartition(".")[0], []).append((name, p))
        before = below
        for block in blocks.values():
            for owner, matrices in block.items():
                inside = before
                for name, p in matrices:
                    last = name == matrices[-1][0]
                    site = sites.get(name)
                    times = per_token if p.dim() == 3 else 1
                    rank = 0 if site is None else site.rank * times
                    inputs, outputs = (0, 0) if site is None else (site.inputs, site.outputs)
                    macs = _numel(layer, name, p) * times
                    module = layer.get_submodule(owner)
                    if last and hasattr(module, "layer_idx") and hasattr(module, "is_causal"):
                        found.cores.append(self._core(module, inside))
                    needs = inside if last else before
                    found.weights.append(_Weight(macs, rank * inputs, rank * outputs, needs))
                    inside |= site is not None
            before |= any(name in sites for matrices in block.values() for name, _ in matrices)
        return found

    def _core(self, attention: nn.Module, needs_input: bool) -> _Core:
        heads = int(self.config.num_attention_heads)
        size = int(getattr(attention, "head_dim", None) or self.config.hidden_size // heads)
        window = getattr(attention, "sliding_window", None)
        if window is None and getattr(self.config, "layer_types", None) is None:
            window = getattr(self.config, "sliding_window", None)
        return _Core(heads * (size + int(getattr(attention, "v_head_dim", size))), window, needs_input)

    def layer(self, i: int, recompute: bool) -> LayerFlops:
        """One layer's FLOPs by token and by visible pair, of a step."""
        layer, trains = self._layers[i], i >= self.first
        again = int(recompute and trains)
        per_token = forward = pair = pair_forward = 0.0
        for w in layer.weights:
            lora = 2.0 * (w.lora_inputs + w.lora_outputs)
            forward += 2.0 * w.macs + lora
            per_token += 2.0 * w.macs * (1 + again + (trains and w.needs_input)) + (3 + again) * lora
            per_token -= 0.0 if w.needs_input else 2.0 * w.lora_inputs
        window: int | None = None
        for core in layer.cores:
            window = core.window
            pair_forward += 2.0 * core.macs
            pair += 2.0 * core.macs * (1 + again + 2 * (trains and core.needs_input))
        return LayerFlops(per_token, forward, pair, pair_forward, window)

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
