"""Which weights a LoRA gets pairs on, by name, and of what rank. Imports no torch, so that plans choose as training does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lamella.config import LoraConfig
from lamella.errors import UserError

PEFT_REFUSES = {
    "falcon_h1": re.compile(r"(^|\.)out_proj$"), "nemotron_h": re.compile(r"(^|\.)out_proj$"),
    "laguna": re.compile(r"\.shared_experts?\."),
}  # fmt: skip
"""Model type -> layers that PEFT loads no LoRA on: fused Mamba kernels would bypass it; Laguna's rename of shared experts, an
expression whose dot takes any letter, also takes the names it made, so their pairs are dropped."""


@dataclass(frozen=True)
class Candidate:
    """A weight that can have a pair.

    Attributes:
        layer: decoder layer index.
        path: name of the owning module inside the layer; parameter: an expert parameter's name in it, None for a linear layer.
        inputs, outputs: features in and out; experts: how many (None for a linear layer).
        order: position of the parameter in its module.
    """

    layer: int
    path: str
    parameter: str | None
    inputs: int
    outputs: int
    experts: int | None
    order: int

    def name(self) -> str:
        return self.path if self.parameter is None else f"{self.path}.{self.parameter}"


def rank_on_experts(config: LoraConfig, active: int) -> int:
    """Rank of pairs on experts, of which a token passes `active`."""
    return max(1, config.rank // active) if config.expert_rank == "auto" else int(config.expert_rank)


def select(candidates: Sequence[Candidate], targets: str | tuple[str, ...]) -> list[Candidate]:
    """Those that `lora.targets` names, in their order.

    Raises:
        UserError: a name that matches nothing, or half of what experts hold in one weight; nothing to choose from.
    """
    if not candidates:
        raise UserError("the model has no linear layer or expert weight that can have a LoRA pair",
                        fix="this family is not supported yet")  # fmt: skip
    if isinstance(targets, str):
        return list(candidates)
    expanded = _expand_expert_aliases(targets, candidates)
    has_fused = any(c.parameter == "gate_up_proj" for c in candidates)
    for target in targets:
        alias = has_fused and target.rpartition(".")[2] in ("gate_proj", "up_proj")
        if not alias and not any(_matches(c, target) for c in candidates):
            names = sorted({c.name().rpartition(".")[2] for c in candidates} | {c.name() for c in candidates})
            near = difflib.get_close_matches(target, names, n=1, cutoff=0.0)
            raise UserError(f"lora.targets: {target!r} matches no linear layer or expert weight; nearest: {near[0]!r}",
                            fix=f"valid names: {', '.join(sorted({c.name() for c in candidates}))}")  # fmt: skip
    return [c for c in candidates if any(_matches(c, t) for t in expanded)]


def _matches(candidate: Candidate, target: str) -> bool:
    name = candidate.name()
    if name == target or name.endswith(f".{target}"):
        return True
    full = f"layers.{candidate.layer}.{name}"
    if full == target or target.endswith(f".{full}"):
        return True
    return candidate.parameter is not None and (candidate.path == target or candidate.path.endswith(f".{target}"))


def _expand_expert_aliases(targets: tuple[str, ...], candidates: Sequence[Candidate]) -> list[str]:
    """On fused experts `gate_proj` and `up_proj` together mean `gate_up_proj`; one alone cannot be given a pair."""
    fused = [c for c in candidates if c.parameter == "gate_up_proj"]
    expanded = list(targets)
    halves = {t.rpartition(".")[2] for t in targets} & {"gate_proj", "up_proj"}
    if fused and halves:
        if halves != {"gate_proj", "up_proj"}:
            linear = [c for c in candidates if c.parameter is None and any(_matches(c, h) for h in halves)]
            if not linear:
                raise UserError(f"lora.targets names {halves.pop()!r} alone, but this model's experts hold gate and up in one weight",
                                fix="target both gate_proj and up_proj, or experts.gate_up_proj")  # fmt: skip
        else:
            expanded.append("experts.gate_up_proj")
    return expanded
