"""Where each adaptable weight stands in a model, and under which names files know it.

transformers fuses a layer's experts into 3-D parameters; checkpoints, and the engines that read them, mostly keep one
matrix an expert, under names of their own (`block_sparse_moe.experts.3.w1`). A `Place` holds both sides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lamella.adapter.lora import candidates_of
from lamella.errors import UserError
from lamella.models.binding import SourceNames, plan_binding
from lamella.models.pieces import ParamPlan
from lamella.models.skeleton import Skeleton

Halves = Literal["none", "concatenated", "interleaved"]
_GATE_UP, _ALIASES = ("gate_proj", "up_proj"), {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_SWITCH = ("switch_mlp", "switch_glu")


@dataclass(frozen=True)
class Place:
    """A weight that can have a pair.

    Attributes:
        key: its full name in the model (see `SiteSpec.key`); layer: decoder layer index; index: among all places.
        path: the module's name inside the layer.
        module: full name of the module that holds it; parameter: an expert parameter's name in it, None: a linear layer.
        inputs, outputs: features; experts: how many (None: a linear layer); order: of the parameter in its module.
        transposed: the expert parameter is [E, in, out] instead of [E, out, in].
        halves: how gate and up stand in the outputs of an expert parameter that holds both.
        source: the module's name in the checkpoint; of expert parameters, that of the module around the experts.
        leaves: of expert parameters, names of one expert's matrices in the checkpoint: (gate, up), or one.
    """

    key: str
    layer: int
    index: int
    path: str
    module: str
    parameter: str | None
    inputs: int
    outputs: int
    experts: int | None
    order: int
    transposed: bool
    halves: Halves
    source: str
    leaves: tuple[str, ...]

    @property
    def generic(self) -> tuple[str, ...]:
        """Names of one expert's matrices where the checkpoint has them in one tensor."""
        return _GATE_UP if self.halves != "none" else (self.parameter or "",)


def places_of(skeleton: Skeleton, shapes: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, Place]:
    """Every adaptable weight of a model by key, in model order.

    Args:
        shapes: stored tensor name -> shape, of a store or checkpoint: gives the checkpoint's names. None: the model's
            own stand in their place.
    """
    plans = plan_binding(skeleton, shapes) if shapes is not None else {}
    found = {}
    for index, c in enumerate(candidates_of(skeleton)):
        module = skeleton.layers[c.layer].get_submodule(c.path)
        name = f"{skeleton.prefix}.{c.layer}.{c.path}"
        key = name if c.parameter is None else f"{name}.{c.parameter}"
        halves: Halves = "none"
        if c.parameter == "gate_up_proj" and module.has_gate:
            halves = "concatenated" if module.is_concatenated else "interleaved"
        leaves: tuple[str, ...] = ()
        source = name
        if c.parameter is None:
            source = _linear_source(plans.get(f"{name}.weight"), name)
        else:
            leaves = _GATE_UP if halves != "none" else (c.parameter,)
            source, leaves = _expert_source(plans.get(key), name, leaves)
        found[key] = Place(key, c.layer, index, c.path, name, c.parameter, c.inputs, c.outputs, c.experts, c.order,
                           bool(getattr(module, "is_transposed", False)), halves, source, leaves)  # fmt: skip
    return found


def _linear_source(plan: ParamPlan | None, name: str) -> str:
    if plan is None or len(plan.pieces) != 1:
        return name
    return plan.pieces[0].source.removesuffix(".weight")


def _expert_source(plan: ParamPlan | None, name: str, leaves: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Name of the module around the experts and of one expert's matrices, in the checkpoint."""
    if plan is None or not plan.pieces:
        return name, leaves
    first = sorted((p for p in plan.pieces if p.at[:1] == (0,)), key=lambda piece: piece.at)
    if not first:
        around = plan.pieces[0].source.removesuffix(".weight").rpartition(".")[0]
        return (around if around.rpartition(".")[2] == "experts" else name), leaves
    names = [re.fullmatch(r"(.+)\.0\.([^.]+)\.weight", piece.source) for piece in first]
    if len(first) != len(leaves) or any(match is None for match in names):
        return name, leaves
    found = [match for match in names if match is not None]
    return found[0][1], tuple(match[2] for match in found)


@dataclass(frozen=True)
class Slot:
    """What one pair of an adapter file adapts: a weight, one expert's part of it, or one half of all experts' parts.

    `half`: 0 gate (or the whole), 1 up; None: both.
    """

    place: Place
    expert: int | None = None
    half: int | None = None


class Names:
    """From module names of adapter files to places.

    Attributes:
        containers: name of a module around fused experts -> its places, in order.
    """

    def __init__(self, skeleton: Skeleton, places: Mapping[str, Place]) -> None:
        self.places = dict(places)
        self.containers: dict[str, list[Place]] = {}
        self._linear: dict[str, Place] = {}
        self._leaves: dict[str, dict[str, Slot]] = {}
        self._sources = SourceNames(skeleton)
        self._parameters = sorted({place.parameter for place in places.values() if place.parameter is not None})
        for place in places.values():
            names = dict.fromkeys((place.module, place.source))
            if place.parameter is None:
                self._linear |= dict.fromkeys(names, place)
                continue
            for name in names:
                if place not in self.containers.setdefault(name, []):
                    self.containers[name].append(place)
                leaves = self._leaves.setdefault(name, {})
                for at, leaf in enumerate(place.generic):
                    half = at if place.halves != "none" else None
                    for alias in {leaf, _ALIASES.get(leaf, leaf), place.leaves[at]}:
                        leaves[alias] = Slot(place, None, half)

    def around(self, name: str) -> str | None:
        """The model's name of the module around fused experts that a file calls so; None: it is none."""
        if name in self.containers:
            return self.containers[name][0].module
        for parameter in self._parameters:
            key, _, _ = self._sources.find(f"{name}.{parameter}")
            if key in self.places and self.places[key].parameter is not None:
                return self.places[key].module
        return None

    def find(self, name: str) -> Slot | None:
        """Slot of a linear layer, of one expert's matrix, or of one matrix of all experts (`switch_mlp.up_proj`).

        Raises:
            UserError: an expert that the model does not have.
        """
        if name in self._linear:
            return Slot(self._linear[name])
        match = re.fullmatch(r"(.+)\.(\d+)\.([^.]+)", name)
        if match is not None and (slot := self._leaves.get(match[1], {}).get(match[3])) is not None:
            return self._expert(slot, int(match[2]), name)
        around, _, leaf = name.rpartition(".")
        parent, _, last = around.rpartition(".")
        container = self.around(f"{parent}.experts" if last in _SWITCH else around)
        if container is not None and (slot := self._leaves[container].get(leaf)) is not None:
            return slot
        key, expert, half = self._sources.find(f"{name}.weight")
        place = self.places.get(key) or self.places.get(key.removesuffix(".weight"))
        if place is None:
            return None
        if place.parameter is None:
            return Slot(place)
        return self._expert(Slot(place, None, half if place.halves != "none" else None), expert or 0, name)

    @staticmethod
    def _expert(slot: Slot, expert: int, name: str) -> Slot:
        if expert >= (slot.place.experts or 0):
            raise UserError(f"{name}: the model has {slot.place.experts} experts",
                            fix="the adapter belongs to a model with more experts")  # fmt: skip
        return Slot(slot.place, expert, slot.half)
