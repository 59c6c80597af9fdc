"""What a LoRA trains on a model, from shapes: its sites, and the memory of their state, beside what else could be trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lamella.adapter.targets import Candidate, rank_on_experts, select
from lamella.config import LoraConfig
from lamella.forecast.shape import Matrix, ModelShape, Site

VALUE_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8
"""Of a trained parameter: fp32 value and gradient, and AdamW's two fp32 moments."""


@dataclass(frozen=True)
class TrainableSet:
    """What is trained.

    Attributes:
        name: "as asked", or which alternative.
        parameters: by class (attention, mlp, experts, other).
        expert_rank: of pairs on experts; None: there are none.
    """

    name: str
    parameters: dict[str, int]
    expert_rank: int | None = None

    @property
    def total(self) -> int:
        return sum(self.parameters.values())

    @property
    def adapter_bytes(self) -> int:
        """Of the adapter's file, fp32 as it is saved, without its header."""
        return VALUE_BYTES * self.total

    @property
    def gradient_bytes(self) -> int:
        return GRADIENT_BYTES * self.total

    @property
    def optimizer_bytes(self) -> int:
        return MOMENT_BYTES * self.total

    @property
    def state_bytes(self) -> int:
        """Values, gradients and moments: 16 bytes a parameter."""
        return self.adapter_bytes + self.gradient_bytes + self.optimizer_bytes


def active_experts(shape: ModelShape) -> int:
    """Routed experts that a token passes in a layer; 1 for a dense model."""
    return max((m.active for layer in shape.layers for m in layer.matrices if m.fused_experts), default=1)


def sites_of(shape: ModelShape, lora: LoraConfig) -> list[Site]:
    """The pairs that `Adapter.create` would make for these settings, in model order.

    Raises:
        UserError: a target that matches nothing.
    """
    matrices: dict[tuple[int, str], Matrix] = {}
    candidates = []
    for i, layer in enumerate(shape.layers):
        for matrix in layer.matrices:
            if matrix.adaptable:
                candidates.append(_candidate(i, matrix))
                matrices[i, matrix.name] = matrix
    on_experts = rank_on_experts(lora, active_experts(shape))
    chosen = select(candidates, lora.targets)
    return [Site(c.layer, matrices[c.layer, c.name()], lora.rank if c.experts is None else on_experts) for c in chosen]


def _candidate(layer: int, matrix: Matrix) -> Candidate:
    path, parameter, experts = matrix.name, None, None
    if matrix.fused_experts:
        path, _, parameter = matrix.name.rpartition(".")
        experts = matrix.experts
    return Candidate(layer, path, parameter, matrix.inputs, matrix.outputs, experts, 0)


def trainable_set(sites: Iterable[Site], name: str = "as asked") -> TrainableSet:
    counts: Counter[str] = Counter()
    rank = None
    for site in sites:
        counts[site.matrix.kind] += site.parameters
        rank = site.rank if site.matrix.fused_experts else rank
    return TrainableSet(name, dict(counts), rank)


def alternatives(shape: ModelShape, lora: LoraConfig) -> list[TrainableSet]:
    """What the same rank would train: attention alone, all linear layers, and with experts at rank r, at r / active experts,
    and with outer factors shared (one A per layer for what reads the hidden state, one B for what writes it, as inference
    engines call it: the factors inside the experts stay one an expert).
    """
    everything = sites_of(shape, lora.model_copy(update={"targets": "all-linear"}))
    attention = [site for site in everything if site.matrix.kind == "attention"]
    found = [trainable_set(attention, "attention")] if attention else []
    if not any(site.matrix.fused_experts for site in everything):
        return [*found, trainable_set(everything, "all-linear")]
    active = active_experts(shape)
    by_rank = [("experts at rank r", lora.rank), ("experts at rank r / active", max(1, lora.rank // active))]
    for name, rank in by_rank:
        found.append(trainable_set(_with_expert_rank(everything, rank), name))
    shared = _with_expert_rank(everything, lora.rank)
    counts: Counter[str] = Counter()
    for site in shared:
        counts[site.matrix.kind] += _shared_outer(site, shape.hidden) if site.matrix.fused_experts else site.parameters
    found.append(TrainableSet("experts at rank r, outer factors shared", dict(counts), lora.rank))
    return found


def _with_expert_rank(sites: Sequence[Site], rank: int) -> list[Site]:
    return [replace(site, rank=rank) if site.matrix.fused_experts else site for site in sites]


def _shared_outer(site: Site, hidden: int) -> int:
    """Parameters of a pair on experts whose factor on the hidden state's side is one for all."""
    matrix = site.matrix
    outer, inner = (matrix.inputs, matrix.outputs) if matrix.inputs == hidden else (matrix.outputs, matrix.inputs)
    return site.rank * (outer + matrix.experts * inner)
