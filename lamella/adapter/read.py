"""Adapter folders of every known layout, read one pair at a time."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from lamella.adapter.config_files import (
    CONFIG,
    FACTS,
    MERGE,
    Settings,
    read_facts,
    read_mlx_config,
    read_peft_config,
)
from lamella.adapter.layouts import LAYOUTS, PREFIX, Layout, fuse_halves, fused_from_file, layout_named, pad_rank
from lamella.adapter.lora import SiteSpec, linear_names_of, scale_of
from lamella.adapter.places import Names, Place, Slot, places_of
from lamella.adapter.tensors_file import TensorsFile
from lamella.errors import UserError
from lamella.models.skeleton import Skeleton

WEIGHTS = LAYOUTS["peft"].weights
_VERSION_THAT_SWAPS = (0, 19)


@dataclass
class _Raw:
    """The pair of one module of the file: tensor names and shapes."""

    module: str
    a: str = ""
    b: str = ""


@dataclass
class _Parts:
    """All of the file that one site is made of."""

    place: Place
    fused: _Raw | None = None
    singles: dict[tuple[int | None, int | None], _Raw] = field(default_factory=dict)
    """(expert, half) -> pair; expert None: of all experts."""


class AdapterFile:
    """An adapter folder, checked against a model; values are read when asked for.

    Attributes:
        layout: how the file is laid out; how: what tells so.
        sites: key -> SiteSpec, in model order; facts: of `lamella_adapter.json`.
        notes: what people should know of the reading.
    """

    def __init__(self, folder: Path, skeleton: Skeleton, layout: str | None = None, names: Names | None = None) -> None:
        """
        Args:
            names: of the skeleton's model, where many folders are read; None: made here.

        Raises:
            UserError: unreadable files, tensors that are not LoRA pairs, names or shapes that do not fit the model, a
                layout that cannot be told.
        """
        self.folder, self.facts = folder, read_facts(folder)
        self._mlx = (folder / LAYOUTS["mlx"].weights).is_file() and not (folder / WEIGHTS).is_file()
        self.settings: Settings = read_mlx_config(folder) if self._mlx else read_peft_config(folder)
        self.path = folder / (LAYOUTS["mlx"].weights if self._mlx else WEIGHTS)
        self._file = _open(self.path)
        self.notes: list[str] = []
        names = names or Names(skeleton, places_of(skeleton))
        self.places = names.places
        self.linear_names = linear_names_of(skeleton)
        self.fused_experts = any(place.parameter is not None for place in self.places.values())
        raws = self._pairs()
        self._parts, fused = self._resolve(raws, names)
        self.layout, self.how = self._layout(layout, fused)
        self._name_fused(fused, names)
        self.rslora = bool(self.facts.get("rslora", self.settings.rslora))
        self.dropout = float(self.facts.get("dropout", self.settings.dropout))
        self._scales: dict[str, dict[str, float]] = {}
        self.sites: dict[str, SiteSpec] = {
            key: self._site(self._parts[key]) for key in self.places if key in self._parts
        }
        self._keep_stated()

    # ---- names ------------------------------------------------------------------------------------------

    def _pairs(self) -> list[_Raw]:
        pattern = r"(.+)\.lora_([ab])" if self._mlx else rf"{re.escape(PREFIX)}(.+)\.lora_([AB])(?:\.default)?\.weight"
        found: dict[str, _Raw] = {}
        strange = []
        for name in self._file:
            match = re.fullmatch(pattern, name)
            if match is None:
                strange.append(name)
                continue
            raw = found.setdefault(match[1], _Raw(match[1]))
            setattr(raw, match[2].lower(), name)
        heads = [name for name in found if not re.search(r"\.\d+\.", name)]  # outside the layers
        if strange or heads:
            self._refuse(strange, heads)
        for raw in found.values():
            if not raw.a or not raw.b:
                raise UserError(
                    f"{raw.module} has only lora_{'A' if raw.a else 'B'}", path=self.path, fix="save the adapter again"
                )
        if not found:
            raise UserError("the file has no tensors", path=self.path, fix="the adapter is empty; train again")
        return list(found.values())

    def _refuse(self, strange: list[str], heads: list[str]) -> None:
        """Say which tensors no server takes from an adapter, and why."""
        renamed = [
            name for name in strange if (".lora_A." in name or ".lora_B." in name) and not name.startswith(PREFIX)
        ]
        if renamed:
            raise UserError(
                f"{len(renamed)} names of pairs do not begin with {PREFIX}, first {renamed[0]}", path=self.path,
                fix="save the adapter again with the tool that trained it, or give the tensors that prefix",
            )  # fmt: skip
        reasons = [f"{name} is not a LoRA weight: {_why(name)}" for name in strange[:3]]
        reasons += [f"{name} is a LoRA pair outside the decoder layers" for name in heads[:3]]
        more = len(strange) + len(heads) - len(reasons)
        raise UserError("; ".join(reasons) + (f"; and {more} more" if more else ""), path=self.path,
                        fix=f"these tensors need a merge: {MERGE}")  # fmt: skip

    def _resolve(self, raws: Sequence[_Raw], names: Names) -> tuple[dict[str, _Parts], dict[str, list[_Raw]]]:
        """Site key -> its parts, and fused pairs by the module around the experts (which weight each is comes later)."""
        parts: dict[str, _Parts] = {}
        fused: dict[str, list[_Raw]] = defaultdict(list)
        stray = []
        for raw in raws:
            base = raw.module.replace(".base_layer", "")
            module = names.around(base)
            if module is not None:
                fused[module].append(raw)
                continue
            slot = names.find(base) if base == raw.module else None
            if slot is None:
                stray.append(raw.module)
                continue
            self._add(parts, slot, raw)
        if stray:
            known = sorted(self.places)
            raise UserError(
                f"adapter: {len(raws) - len(stray)} of {len(raws)} modules exist in the model; not there: {sorted(stray)[:3]}; "
                f"the model has: {known[:3]}", path=self.path,
                fix="the adapter belongs to another model class or its names have another prefix",
            )  # fmt: skip
        return parts, fused

    def _add(self, parts: dict[str, _Parts], slot: Slot, raw: _Raw) -> None:
        entry = parts.setdefault(slot.place.key, _Parts(slot.place))
        at = (slot.expert, slot.half)
        if at in entry.singles:
            raise UserError(
                f"{raw.module}: {slot.place.key} has two pairs", path=self.path, fix="save the adapter again"
            )
        entry.singles[at] = raw

    def _name_fused(self, fused: dict[str, list[_Raw]], names: Names) -> None:
        """Which parameter each fused pair adapts: by depth of nesting where all are there, else by shapes."""
        for module, raws in fused.items():
            places = names.containers[module]
            for raw in raws:
                fits = [place for place in places if self._fits(self.layout, place, raw)]
                if len(raws) == len(places):  # the last parameter's wrapper is the outermost
                    fits = [places[len(places) - 1 - raw.module.count(".base_layer")]]
                if len(fits) != 1:
                    raise UserError(f"{raw.module}: cannot tell which expert parameter it adapts", path=self.path,
                                    fix="export the adapter with PEFT 0.18 or later, with all expert parameters")  # fmt: skip
                entry = self._parts.setdefault(fits[0].key, _Parts(fits[0]))
                if entry.fused is not None or entry.singles:
                    raise UserError(
                        f"{raw.module}: {fits[0].key} has two pairs", path=self.path, fix="save the adapter again"
                    )
                entry.fused = raw

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.infos[name].shape)

    def _fits(self, layout: Layout, place: Place, raw: _Raw) -> bool:
        assert place.experts is not None
        a, b = self._shape(raw.a), self._shape(raw.b)
        inputs, outputs = place.inputs, place.outputs
        if layout.swapped and not place.transposed:
            inputs, outputs = outputs, inputs
        return (len(a) == len(b) == 2 and a[1] == inputs and b[0] == outputs and a[0] == b[1] and a[0] % place.experts == 0)  # fmt: skip

    # ---- the layout -------------------------------------------------------------------------------------

    def _layout(self, asked: str | None, fused: dict[str, list[_Raw]]) -> tuple[Layout, str]:
        if asked is not None:
            return layout_named(asked), "as asked"
        if "layout" in self.facts:
            return layout_named(str(self.facts["layout"])), f"said by {FACTS}"
        if "expert_layout" in self.facts:
            return LAYOUTS["peft"], f"said by {FACTS}"
        if self._mlx:
            return LAYOUTS["mlx"], f"there is {self.path.name}"
        if not fused:
            single = any(expert is not None for part in self._parts.values() for expert, _ in part.singles)
            return (LAYOUTS["vllm"], "keys name single experts") if single else (LAYOUTS["peft"], "no experts")
        return self._fused_layout(fused)

    def _fused_layout(self, fused: dict[str, list[_Raw]]) -> tuple[Layout, str]:
        """PEFT before and after 0.19 and Unsloth write the same names: version, marks and shapes tell them apart."""
        if self.settings.unsloth:
            return self._turned(LAYOUTS["unsloth"], fused), "auto_mapping has unsloth_fixed"
        version = self.settings.peft_version
        if version is not None:
            layout = LAYOUTS["peft" if version >= _VERSION_THAT_SWAPS else "peft-0.18"]
            return layout, f"peft_version {version[0]}.{version[1]}"
        fits = [layout for layout in (LAYOUTS["peft"], LAYOUTS["peft-0.18"]) if self._all_fit(layout, fused)]
        places = [self._place_of(module) for module in fused]
        if len(fits) == 1 or all(place.transposed for place in places):
            return (fits or [LAYOUTS["peft"]])[0], "the shapes fit no other"
        raise UserError(
            "experts' pairs may be of PEFT 0.18 or of PEFT 0.19 and later: "
            + ("both fit" if fits else "neither fits") + " the shapes, and adapter_config.json has no peft_version",
            path=self.folder / CONFIG, fix='add "peft_version" with the version that saved it, such as "0.18.1"',
        )  # fmt: skip

    def _place_of(self, module: str) -> Place:
        return next(place for place in self.places.values() if place.module == module)

    def _all_fit(self, layout: Layout, fused: dict[str, list[_Raw]]) -> bool:
        return all(
            any(self._fits(layout, place, raw) for place in self.places.values() if place.module == module)
            for module, raws in fused.items()
            for raw in raws
        )

    def _turned(self, layout: Layout, fused: dict[str, list[_Raw]]) -> Layout:
        """Unsloth on PEFT 0.18 has the roles of A and B swapped as that has."""
        version = self.settings.peft_version
        if version is not None:
            return replace(layout, swapped=version < _VERSION_THAT_SWAPS)
        if self._all_fit(layout, fused):
            return layout
        return replace(layout, swapped=True)

    # ---- sites ------------------------------------------------------------------------------------------

    def _site(self, parts: _Parts) -> SiteSpec:
        place, (rank, scale, alpha) = parts.place, self._ranks(parts)
        stored = self.facts.get("sites", {}).get(place.key)
        if stored is not None:
            rank, alpha = int(stored[0]), float(stored[1])
            scale = scale_of(alpha, rank, self.rslora)
        return SiteSpec(place.key, place.layer, place.path, place.parameter, place.inputs, place.outputs, place.experts,
                        rank, alpha, scale, place.index, place.order)  # fmt: skip

    def _keep_stated(self) -> None:
        """Where an export of ours says what it holds: that, without pairs of zeros that the layout needed besides."""
        stated = self.facts.get("sites")
        if not stated:
            return
        missing = sorted(set(stated) - set(self.sites))
        if missing:
            raise UserError(f"{len(missing)} of {len(stated)} pairs are not in the file, e.g. {missing[0]}", path=self.path,
                            fix="export the adapter again")  # fmt: skip
        for key in set(self.sites) - set(stated):
            if bool(self._raw_pair(key)[1].any()):
                raise UserError(f"{key} is in the file and not among its stated pairs", path=self.path,
                                fix=f"the file was changed after the export; remove `sites` from {FACTS}")  # fmt: skip
            del self.sites[key]

    def _ranks(self, parts: _Parts) -> tuple[int, float, float]:
        """Rank, scale and alpha of a site as the file has it."""
        place = parts.place
        if parts.fused is not None:
            if not self._fits(self.layout, place, parts.fused):
                self._wrong_shape(parts.fused, place)
            there = self._shape(parts.fused.a)[0] // (place.experts or 1)
            return self._checked(place.key, there)
        if place.parameter is None:
            raw = parts.singles[None, None]
            a, b = self._shape(raw.a), self._shape(raw.b)
            if self._mlx:
                a, b = a[::-1], b[::-1]
            if len(a) != 2 or len(b) != 2 or a[1] != place.inputs or b[0] != place.outputs or a[0] != b[1]:
                self._wrong_shape(raw, place)
            return self._checked(place.key, a[0])
        return self._single_ranks(parts)

    def _wrong_shape(self, raw: _Raw, place: Place) -> None:
        experts = f" of {place.experts} experts" if place.experts else ""
        raise UserError(
            f"adapter: {raw.module} has shapes {list(self._shape(raw.a))}, {list(self._shape(raw.b))}; the model needs "
            f"{place.inputs} inputs and {place.outputs} outputs{experts} in layout {self.layout.name}",
            path=self.path,
            fix="the adapter belongs to a model of other sizes, or is of another layout",
        )

    def _checked(self, key: str, there: int) -> tuple[int, float, float]:
        """Rank, scale, alpha of a pair whose tensors have rank `there`."""
        said, alpha = self.settings.rank_of(key, there), self.settings.alpha_of(key)
        scale = scale_of(alpha, said, self.settings.rslora)
        if said == there:
            return there, scale, alpha
        if self.layout.patterns:
            raise UserError(
                f"{key} has rank {there}, {CONFIG} says {said}", path=self.path, fix="correct r or rank_pattern"
            )
        return there, scale, scale * (math.sqrt(there) if self.rslora else there)

    def _single_ranks(self, parts: _Parts) -> tuple[int, float, float]:
        """Experts or matrices one by one: the fused pair's rank is the largest, or the sum of gate's and up's."""
        place = parts.place
        halves: dict[int | None, int] = {}
        scales: dict[str, float] = {}
        for (_, half), raw in parts.singles.items():
            rank = self._single_shape(raw, place)
            _, scale, _ = self._checked(raw.module, rank)
            scales[raw.module] = scale
            halves[half] = max(halves.get(half, 0), rank)
        common = next(iter(scales.values()))
        self._scales[place.key] = {module: scale / common for module, scale in scales.items()}
        rank = max(halves.values())
        if len(halves) == 2 and not (self._same_a(parts) and len(set(halves.values())) == 1):
            rank = sum(halves.values())
            self._note(f"gate and up of experts have different A in this file: fused pairs of rank {rank} "
                       f"({' + '.join(str(r) for r in halves.values())}), exactly the same weights")  # fmt: skip
        return rank, common, common * (math.sqrt(rank) if self.rslora else rank)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _single_shape(self, raw: _Raw, place: Place) -> int:
        """Rank of one matrix's pair, of one expert or of all."""
        a, b = self._shape(raw.a), self._shape(raw.b)
        outputs = place.outputs // (1 if place.halves == "none" else 2)
        if self._mlx:
            if len(a) == 2 and len(b) == 3 and place.experts and a[0] % place.experts == 0:  # older mlx-lm: A flattened
                a = (place.experts, a[0] // place.experts, a[1])
            if len(a) != 3 or len(b) != 3 or a[0] != place.experts or b[0] != place.experts:
                self._wrong_shape(raw, place)
            a, b = a[1:], b[1:]
        if len(a) != 2 or len(b) != 2 or a[1] != place.inputs or b[0] != outputs or a[0] != b[1]:
            self._wrong_shape(raw, place)
        return a[0]

    def _same_a(self, parts: _Parts) -> bool:
        """Whether gate and up of each expert have one A."""
        experts = {expert for expert, _ in parts.singles}
        for expert in experts:
            gate, up = parts.singles.get((expert, 0)), parts.singles.get((expert, 1))
            if gate is None or up is None:
                continue
            if self._shape(gate.a) != self._shape(up.a) or not torch.equal(self._file[gate.a], self._file[up.a]):
                return False
        return True

    # ---- values -----------------------------------------------------------------------------------------

    def pair(self, key: str) -> tuple[Tensor, Tensor]:
        """A and B of a site, fp32, ours."""
        return self._unfolded(self.sites[key], *self._raw_pair(key))

    def _raw_pair(self, key: str) -> tuple[Tensor, Tensor]:
        parts = self._parts[key]
        place = parts.place
        if parts.fused is not None:
            return fused_from_file(self.layout, place, *self._values(parts.fused))
        if place.parameter is None:
            a, b = self._values(parts.singles[None, None])
            return (a.T.contiguous(), b.T.contiguous()) if self._mlx else (a, b)
        return self._from_singles(parts)

    def _values(self, raw: _Raw) -> tuple[Tensor, Tensor]:
        return self._file[raw.a].float(), self._file[raw.b].float()

    def _from_singles(self, parts: _Parts) -> tuple[Tensor, Tensor]:
        place = parts.place
        pairs = {half: self._stacked(parts, half) for half in sorted({h for _, h in parts.singles}, key=str)}
        if place.halves == "none":
            return pairs[None]
        for half, other in ((0, 1), (1, 0)):
            if half not in pairs:  # only one of the two is adapted: the other's rows of B are zero
                pairs[half] = pairs[other][0], torch.zeros_like(pairs[other][1])
        if self._same_a(parts) and pairs[0][0].shape == pairs[1][0].shape:
            return fuse_halves((self._common_a(pairs[0][0], pairs[1][0]), pairs[0][1]),
                               (self._common_a(pairs[0][0], pairs[1][0]), pairs[1][1]), place.halves)[:2]  # fmt: skip
        a, b, _ = fuse_halves(pairs[0], pairs[1], place.halves)
        return a, b

    @staticmethod
    def _common_a(gate: Tensor, up: Tensor) -> Tensor:
        """A of both: where one of the two has no pair for an expert its A is zero, and the other's counts."""
        return torch.where((gate == 0).all(dim=(1, 2), keepdim=True), up, gate)

    def _stacked(self, parts: _Parts, half: int | None) -> tuple[Tensor, Tensor]:
        """Pairs of one matrix of all experts, [E, r, in] and [E, out, r]; experts without one get zeros."""
        place, folds = parts.place, self._scales[parts.place.key]
        assert place.experts is not None
        raws = {expert: raw for (expert, h), raw in parts.singles.items() if h == half}
        if None in raws:
            a, b = self._values(raws[None])
            return a.reshape(place.experts, -1, place.inputs), b * folds[raws[None].module]
        outputs = place.outputs // (1 if place.halves == "none" else 2)
        rank = max(self._single_shape(raw, place) for raw in raws.values())
        a_ErI = torch.zeros(place.experts, rank, place.inputs)
        b_EOr = torch.zeros(place.experts, outputs, rank)
        for expert, raw in raws.items():
            assert expert is not None
            a, b = pad_rank(*self._values(raw), rank)
            a_ErI[expert], b_EOr[expert] = a, b if folds[raw.module] == 1 else b * folds[raw.module]
        return a_ErI, b_EOr

    def _unfolded(self, site: SiteSpec, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Take back what an export of ours padded and folded."""
        stored = self.facts.get("sites", {}).get(site.key)
        if stored is None:
            return a, b
        if bool(a[..., site.rank :, :].any()) or bool(b[..., site.rank :].any()):
            raise UserError(f"{site.key}: ranks beyond {site.rank} should be zero", path=self.path,
                            fix=f"the file was changed after the export; remove `sites` from {FACTS}")  # fmt: skip
        a, b = a[..., : site.rank, :].contiguous(), b[..., : site.rank].contiguous()
        return a, b if float(stored[2]) == 1 else b / float(stored[2])


def check_allowed(sites: Iterable[SiteSpec], allowed: Sequence[str]) -> None:
    """Raises `UserError` for pairs on modules that a server's list of targets does not name."""
    names = {site.key: site.parameter or site.path.rpartition(".")[2] for site in sites}
    outside = [key for key, name in names.items() if name not in allowed]
    if outside:
        raise UserError(
            f"{len(outside)} of {len(names)} adapted modules are not among the allowed targets: {outside[:3]}; allowed: "
            f"{sorted(allowed)[:8]}", fix="allow these modules where the adapter is served, or train without them",
        )  # fmt: skip


def _open(path: Path) -> TensorsFile:
    if not path.is_file() and path.with_suffix(".bin").is_file():
        raise UserError(
            "the adapter is a pickle", path=path.with_suffix(".bin"), fix="save it as safetensors with PEFT"
        )
    try:
        return TensorsFile(path)
    except (OSError, UserError) as error:
        what = error.what if isinstance(error, UserError) else error
        if not path.exists():
            raise UserError("no such file", path=path, fix="give the folder of a whole adapter") from error
        raise UserError(
            f"cannot be read: {what}", path=path, fix="save the adapter again, whole and in fp32 or 16 bit"
        ) from error


def _why(name: str) -> str:
    if "lora_embedding" in name:
        return "LoRA on embeddings"
    if "magnitude" in name:
        return "DoRA's magnitudes"
    if ".base_layer." in name:
        return "a weight of the base under its wrapper's name"
    return "a module that was trained in full"


def describe(file: AdapterFile) -> str:
    """One line: what was read, and in which layout."""
    return f"adapter {file.folder}: layout {file.layout.name} ({file.how}), {len(file.sites)} weights adapted"
