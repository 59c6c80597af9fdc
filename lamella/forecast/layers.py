"""What a decoder layer computes, in the pieces in which the engine computes it: linear layers on one input as one product
(`models/groups.py`), experts as one call, attention's core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lamella.forecast.shape import Core, LayerShape, Matrix, ModelShape, Site

TOGETHER = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Linear layers on one input that are one product."""
BLOCK_RANK = 64
"""Up to this sum of ranks a group's B matrices are multiplied as one (`models.groups.BLOCK_RANK`)."""


@dataclass(frozen=True)
class Linears:
    """Linear layers on one input, passed by every token.

    Attributes:
        inputs; outputs: of each; ranks: of their LoRA pairs, 0: none.
        needs_input: backward gives the input's gradient.
        after_norm: the input is a norm's output, which backward makes again where there is LoRA.
    """

    inputs: int
    outputs: tuple[int, ...]
    ranks: tuple[int, ...]
    needs_input: bool
    after_norm: bool
    router: bool = False

    @property
    def width(self) -> int:
        return sum(self.outputs)

    @property
    def rank(self) -> int:
        return sum(self.ranks)

    @property
    def as_block(self) -> bool:
        return self.rank <= BLOCK_RANK


@dataclass(frozen=True)
class Experts:
    """Routed SwiGLU experts: `count` of them, `active` a token; `matrices` stored for each (gate, up and down: 3)."""

    count: int
    active: int
    hidden: int
    inner: int
    ranks: tuple[int, int]
    needs_input: bool
    macs: int
    """Multiply-adds of one expert on one row."""


@dataclass(frozen=True)
class Pieces:
    """One layer's work.

    Attributes:
        trains: it has a backward pass; needs_input: a gradient goes on to the layer below.
        gated: width of gated activations, all dense MLPs together.
        trained: LoRA parameters; tensors: of them.
        dequantised: parameters of each matrix that is 4-bit and multiplied in 16.
        everywhere: LoRA on more than attention.
        quantised_experts: 4-bit parameters of routed experts.
    """

    hidden: int
    linears: tuple[Linears, ...]
    experts: Experts | None
    core: Core | None
    core_trains: bool
    gated: int
    trains: bool
    needs_input: bool
    trained: int
    tensors: int
    dequantised: tuple[int, ...]
    quantised_experts: int
    everywhere: bool


def pieces_of(shape: ModelShape, sites: Sequence[Site], kept: bool = False) -> list[Pieces]:
    """Every layer's work. A layer below the first adapted one has no backward pass.

    `kept`: as the engine goes back through kept graphs, where the first adapted layer's input has a gradient too, which nobody
    asks for.
    """
    by_layer: dict[int, dict[str, Site]] = {}
    for site in sites:
        by_layer.setdefault(site.layer, {})[site.matrix.name] = site
    first = min(by_layer, default=len(shape.layers))
    return [
        _pieces(
            shape.hidden,
            layer,
            tuple(sorted((name, s.rank) for name, s in by_layer.get(i, {}).items())),
            max(min(i - first, 1), -1),
            kept,
        )
        for i, layer in enumerate(shape.layers)
    ]


def _groups(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    """Matrices that are multiplied together, in model order."""
    groups: list[list[Matrix]] = []
    for m in matrices:
        owner, _, own = m.name.rpartition(".")
        last = groups[-1] if groups else []
        joins = any(
            own in names
            and all(x.name.rpartition(".")[0] == owner and x.name.rpartition(".")[2] in names for x in last)
            for names in TOGETHER
        )
        if last and joins:
            last.append(m)
        else:
            groups.append([m])
    return groups


@lru_cache(maxsize=1024)
def _pieces(hidden: int, layer: LayerShape, ranks: tuple[tuple[str, int], ...], above_first: int, kept: bool) -> Pieces:
    """`above_first`: 1 above the first adapted layer, 0 for that one, -1 below."""
    rank_of = dict(ranks)
    trains = above_first >= 0
    before = above_first > 0
    plain = [m for m in layer.matrices if not m.fused_experts]
    routed = [m for m in layer.matrices if m.fused_experts]
    linears: list[Linears] = []
    adapted_blocks = {name.partition(".")[0] for name in rank_of}
    block, block_adapted, core_trains = "", False, before
    for group in _groups(plain):
        owner = group[0].name.partition(".")[0]
        if owner != block:
            before |= block_adapted
            block, block_adapted = owner, False
        # the first products of a block read the block's input; later ones what the block made of it
        is_first = group[0].inputs == hidden and not group[0].name.endswith(("o_proj", "down_proj", "out_proj"))
        needs = before or (block_adapted and not is_first) or (kept and trains and owner in adapted_blocks)
        linears.append(Linears(group[0].inputs, tuple(m.outputs for m in group),
                               tuple(rank_of.get(m.name, 0) for m in group), needs, is_first,
                               any(m.kind == "router" for m in group)))  # fmt: skip
        block_adapted |= any(m.name in rank_of for m in group)
        if group[0].kind == "attention":
            core_trains = core_trains or any(m.name in rank_of and not m.name.endswith("o_proj") for m in group)
    before |= block_adapted
    experts = _experts(routed, rank_of, trains and (before or above_first > 0)) if routed else None
    adapted = [m for m in layer.matrices if m.name in rank_of]
    trained = sum(rank_of[m.name] * (m.inputs + m.outputs) * m.experts for m in adapted)
    gated = sum(m.inputs for m in plain if m.name.endswith("down_proj"))
    return Pieces(
        hidden, tuple(linears), experts, layer.core, core_trains, gated, trains, above_first > 0, trained,
        2 * len(adapted), tuple(m.parameters for m in plain if m.quantised),
        sum(m.parameters for m in routed if m.quantised), any(m.kind != "attention" for m in adapted),
    )  # fmt: skip


def _experts(routed: Sequence[Matrix], rank_of: dict[str, int], needs_input: bool) -> Experts:
    down = next((m for m in routed if m.name.endswith("down_proj")), routed[-1])
    others = [m for m in routed if m is not down]
    ranks = (max((rank_of.get(m.name, 0) for m in others), default=0), rank_of.get(down.name, 0))
    return Experts(down.experts, down.active, down.outputs, down.inputs, ranks, needs_input,
                   sum(m.outputs * m.inputs for m in routed))  # fmt: skip
