"""FLOPs of a layer by arithmetic, from its matrices and LoRA pairs: one count for plans and for the engine's utilisation.

A product of [m, k] and [k, n] counts 2 m k n. What counts, per layer and token:

    frozen weight W [O, I]    forward 2 O I; input gradient 2 O I where the backward walk needs it (the weights
                              themselves have no gradient); forward once more where the layer is recomputed
    experts [E, O, I]         the same, times the experts that a token is routed to
    LoRA of rank r            forward 2 r (I + O); backward 4 r (I + O), less 2 r I where no input gradient is needed
    attention                 2 (D + D_v) per head and visible (query, key) pair forward, twice that backward
    head V x H                forward and input gradient, at label positions only

Elementwise work, softmax, convolutions, states of linear attention, dequantising, filler rows and what a kernel recomputes
inside itself do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lamella.forecast.shape import LayerShape, Site


@dataclass(frozen=True)
class Part:
    """A matrix of a layer.

    Attributes:
        name: inside the layer.
        macs: multiply-adds per token, of all experts that a token passes.
        lora_inputs, lora_outputs: rank x inputs and rank x outputs of its pairs, per token; 0 without.
        adapted: whether it has a pair.
    """

    name: str
    macs: int
    lora_inputs: int = 0
    lora_outputs: int = 0
    adapted: bool = False


@dataclass(frozen=True)
class Weight:
    """A matrix, and whether its input needs a gradient."""

    macs: int
    lora_inputs: int
    lora_outputs: int
    needs_input: bool


@dataclass(frozen=True)
class Attention:
    """Attention without its projections: (D + D_v) x heads per visible pair, window, whether its inputs need gradients."""

    macs: int
    window: int | None
    needs_input: bool


@dataclass(frozen=True)
class LayerFlops:
    """Of one layer in a step: by token and by visible pair, in all and of the forward pass; `window` of the pairs."""

    token: float
    token_forward: float
    pair: float
    pair_forward: float
    window: int | None


@dataclass
class LayerWork:
    """The products of one layer."""

    weights: list[Weight] = field(default_factory=list)
    cores: list[Attention] = field(default_factory=list)

    def flops(self, trains: bool, recompute: bool) -> LayerFlops:
        """Of a step, by token and by visible pair.

        Args:
            trains: the backward walk comes here.
            recompute: the layer runs again in it.
        """
        again = int(recompute and trains)
        per_token = forward = pair = pair_forward = 0.0
        for w in self.weights:
            lora = 2.0 * (w.lora_inputs + w.lora_outputs)
            forward += 2.0 * w.macs + lora
            per_token += 2.0 * w.macs * (1 + again + (trains and w.needs_input)) + (3 + again) * lora
            per_token -= 0.0 if w.needs_input else 2.0 * w.lora_inputs
        window: int | None = None
        for core in self.cores:
            window = core.window
            pair_forward += 2.0 * core.macs
            pair += 2.0 * core.macs * (1 + again + 2 * (trains and core.needs_input))
        return LayerFlops(per_token, forward, pair, pair_forward, window)


def work_of(parts: Iterable[Part], cores: Mapping[str, tuple[int, int | None]], below: bool) -> LayerWork:
    """One layer's products.

    In the first adapted layer an input needs a gradient when an adapted weight lies before it: in an earlier block
    (attention, MLP), or for the last matrix of a module in that module, as the others all read the block's input.

    Args:
        parts: in model order.
        cores: attention by the name of its module: (D + D_v) x heads, window.
        below: an adapted layer comes before this one, so all inputs need gradients.
    """
    found = LayerWork()
    blocks: dict[str, dict[str, list[Part]]] = {}
    for part in parts:
        block = blocks.setdefault(part.name.partition(".")[0], {})
        block.setdefault(part.name.rpartition(".")[0], []).append(part)
    before = below
    for block in blocks.values():
        for owner, matrices in block.items():
            inside = before
            for i, part in enumerate(matrices):
                last = i == len(matrices) - 1
                if last and owner in cores:
                    found.cores.append(Attention(*cores[owner], inside))
                found.weights.append(Weight(part.macs, part.lora_inputs, part.lora_outputs, inside if last else before))
                inside |= part.adapted
        before |= any(part.adapted for matrices in block.values() for part in matrices)
    return found


def layer_work(layer: LayerShape, sites: Mapping[str, Site], below: bool) -> LayerWork:
    """Products of a layer from its shape. `sites`: its LoRA pairs by matrix."""
    parts = []
    for m in layer.matrices:
        site = sites.get(m.name)
        rank = 0 if site is None else site.rank * m.active
        parts.append(Part(m.name, m.outputs * m.inputs * m.active, rank * m.inputs, rank * m.outputs, site is not None))
    cores = {}
    if layer.core is not None and layer.core.kind != "linear":
        owner = next((m.name.rpartition(".")[0] for m in layer.matrices if m.kind == "attention"), "")
        cores[owner] = (layer.core.heads * (layer.core.head_dim + layer.core.value_dim), layer.core.window)
    return work_of(parts, cores, below)
