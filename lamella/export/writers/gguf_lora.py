"""LoRA adapters as GGUF files for llama.cpp.

A pair is two fp32 tensors beside a base tensor's name: `blk.0.attn_q.weight.lora_a` [r, in] and `.lora_b` [out, r], for
experts [E, r, in] and [E, out, r]. llama.cpp adds (alpha / r) B A with r each pair's own and one `adapter.lora.alpha`
(src/llama-adapter.h), so alpha is what most pairs have as scale * r, and B of any other pair takes the rest of its factor.
Rows of B of queries and keys lie as the base's rows do; an adapter of fused gate and up becomes two with the same A.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lamella.adapter.layouts import fuse_halves, half_of
from lamella.adapter.lora import Adapter, SiteSpec, is_finite
from lamella.adapter.places import Place, places_of
from lamella.adapter.read import AdapterFile
from lamella.checkpoint.architecture import Architecture, architecture_of
from lamella.checkpoint.gguf_archs import GgufArch, arch_of, place_of
from lamella.checkpoint.gguf_decode import paired, unpaired
from lamella.checkpoint.gguf_header import GgufHeader, RawTensor, read_gguf_header
from lamella.errors import UserError
from lamella.export.writers.gguf_file import GgufFile
from lamella.models.skeleton import Skeleton

_EXPERTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
"""Fused expert parameters of transformers 5 -> llama.cpp's tensors."""


@dataclass(frozen=True)
class Written:
    """Attributes:
    tensors: how many; alpha: `adapter.lora.alpha`; folded: pairs whose B took a factor.
    """

    tensors: int
    alpha: float
    folded: int


class Pairs(Protocol):
    """An adapter in memory (`Adapter`) or in a folder (`AdapterFile`)."""

    @property
    def sites(self) -> dict[str, SiteSpec]: ...

    def pair(self, key: str) -> tuple[Tensor, Tensor]:
        """A [r, in], B [out, r], or [E, r, in], [E, out, r]."""


@dataclass(frozen=True)
class _Half:
    """One tensor pair of a site: base tensor's name, heads in rotary pairs, which half of a fused gate and up."""

    name: str
    heads: int | None = None
    half: int = 0


def export_lora(folder: Path, skeleton: Skeleton, file: Path, facts: Mapping[str, str] | None = None) -> Written:
    """An adapter folder of any layout that is read as a GGUF adapter.

    Raises:
        UserError: see `AdapterFile` (tensors that are no pairs of decoder layers, by name) and `write_lora`; nothing is
            written then.
    """
    return write_lora(AdapterFile(folder, skeleton), skeleton, file, facts)


def write_lora(adapter: Pairs, skeleton: Skeleton, file: Path, facts: Mapping[str, str] | None = None) -> Written:
    """Write an adapter of this model, one pair at a time.

    Args:
        facts: further metadata, under `lamella.`.

    Raises:
        UserError: a model type that is not written as GGUF, or weights without a place there; before writing.
    """
    arch = arch_of(skeleton.config.to_dict())
    places, halves = places_of(skeleton), _halves(skeleton, arch)
    unheld = [key for key in adapter.sites if key not in halves]
    if unheld:
        raise UserError(f"a GGUF adapter of {arch.name} cannot hold {', '.join(unheld[:4])}",
                        fix="merge the adapter into the base and export the model")  # fmt: skip
    alphas = {key: site.scale * site.rank for key, site in adapter.sites.items()}
    alpha = float(np.float32(Counter(alphas.values()).most_common(1)[0][0]))
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for key, site in adapter.sites.items():
        for half in halves[key]:
            rows = site.outputs // len(halves[key])
            shapes[f"{half.name}.lora_a"] = site.a_shape, "F32"
            shapes[f"{half.name}.lora_b"] = (*site.b_shape[:-2], rows, site.rank), "F32"
    keys: dict[str, Any] = {
        "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": alpha, "general.file_type": 0,
        **{f"lamella.{key}": value for key, value in (facts or {}).items()},
    }  # fmt: skip
    out = GgufFile(file, arch.name, keys, shapes)
    folded, moved = 0, False
    for key in adapter.sites:
        a, b = (p.detach().float().cpu() for p in adapter.pair(key))
        if not (is_finite(a) and is_finite(b)):
            raise UserError(
                f"the pair of {key} holds NaN or infinite values", fix="train again from an earlier checkpoint"
            )
        moved = moved or bool(b.any())
        if alphas[key] != alpha:
            b, folded = b * (alphas[key] / alpha), folded + 1
        for half in halves[key]:
            part = half_of(b, places[key].halves, half.half).contiguous().numpy()
            if half.heads:
                part = paired(part, half.heads)
            for name, values in ((f"{half.name}.lora_a", a.numpy()), (f"{half.name}.lora_b", part)):
                raw = np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8)
                assert raw.size == out.tensors[name].nbytes, name
                out.write(raw, out.tensors[name].offset)
    if not moved:
        raise UserError("every B of the adapter is zero: it changes nothing", fix="train it first")
    out.finish()
    assert len(shapes) == 2 * sum(len(halves[key]) for key in adapter.sites)
    return Written(len(shapes), alpha, folded)


def read_lora(file: Path, skeleton: Skeleton) -> Adapter:
    """A GGUF adapter for this model.

    Gate and up of experts become one pair: with the same A of the same rank, else of the sum of both ranks.

    Raises:
        UserError: no adapter, one of another architecture, a half of a pair missing, names that the model does not have.
    """
    header = read_gguf_header(file)
    arch = arch_of(skeleton.config.to_dict())
    if header.metadata.get("general.type") != "adapter" or header.metadata.get("adapter.type") != "lora":
        raise UserError("is no GGUF LoRA adapter", fix="give a file that llama.cpp's --lora takes", path=file)
    if header.arch != arch.name:
        raise UserError(
            f"is an adapter of {header.arch!r}, the model is {arch.name!r}", fix="give its own base", path=file
        )
    alpha = float(header.metadata.get("adapter.lora.alpha", 0.0))
    if alpha <= 0:
        raise UserError(f"adapter.lora.alpha is {alpha}", fix="convert the adapter again", path=file)
    pairs = _pairs(header, file)
    places, state, sites = places_of(skeleton), dict[str, Tensor](), []
    for key, halves in _halves(skeleton, arch).items():
        found = [pairs.pop(half.name) for half in halves if half.name in pairs]
        if not found:
            continue
        if len(found) != len(halves):
            raise UserError(f"{key}: only one of gate and up is adapted, which is not read", fix="merge it", path=file)
        a, b = found[0][0], _unpaired(found[0][1], halves[0].heads)
        grown = 1
        if len(found) == 2:
            a, b, same = fuse_halves(found[0], found[1], places[key].halves)
            grown = 1 if same else 2
        sites.append(_site(places[key], a, b, alpha * grown, file))
        state |= {f"{key}.lora_A": a, f"{key}.lora_B": b}
    if pairs:
        raise UserError(
            f"adapts {sorted(pairs)[:3]}, which the model does not have", fix="give its own base", path=file
        )
    adapter = Adapter(sites, 0.0, False)
    adapter.describe(skeleton)
    adapter.load_state(state)
    return adapter


def _site(place: Place, a: Tensor, b: Tensor, alpha: float, file: Path) -> SiteSpec:
    rank = a.shape[-2]
    site = SiteSpec(place.key, place.layer, place.path, place.parameter, place.inputs, place.outputs, place.experts, rank, alpha,
                    alpha / rank, place.index, place.order)  # fmt: skip
    if (tuple(a.shape), tuple(b.shape)) != (site.a_shape, site.b_shape):
        raise UserError(f"{place.key} has shapes {list(a.shape)}, {list(b.shape)}; the model needs {list(site.a_shape)}, "
                        f"{list(site.b_shape)}", fix="the adapter belongs to a model of other sizes", path=file)  # fmt: skip
    return site


def _halves(skeleton: Skeleton, arch: GgufArch) -> dict[str, list[_Half]]:
    """Every weight of the model that a GGUF adapter may adapt -> its tensors."""
    config = skeleton.config.to_dict()
    architecture = architecture_of(config)
    made = {key: _halves_of(place, arch, config, architecture) for key, place in places_of(skeleton).items()}
    return {key: halves for key, halves in made.items() if halves}


def _halves_of(place: Place, arch: GgufArch, config: Mapping[str, Any], architecture: Architecture) -> list[_Half]:
    if place.parameter is not None:
        names = _EXPERTS.get(place.parameter, ())
        return [_Half(f"blk.{place.layer}.{name}.weight", None, i) for i, name in enumerate(names)]
    try:
        there = place_of(arch, f"{place.key}.weight", config, architecture)
    except UserError:
        return []
    return [_Half(there.name, there.heads)] if there.expert is None else []


def _pairs(header: GgufHeader, file: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Base tensor's name -> A, B."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, raw in header.tensors.items():
        base, _, kind = name.rpartition(".lora_")
        if not base or kind not in ("a", "b"):
            raise UserError(
                f"tensor {name!r} is no half of a LoRA pair", fix="merge such an adapter into its base", path=file
            )
        halves.setdefault(base, {})[kind] = _values(raw)
    half = sorted(name for name, pair in halves.items() if len(pair) != 2)
    if half:
        raise UserError(f"{half[0]} has one half of its pair alone", fix="convert the adapter again", path=file)
    return {name: (pair["a"], pair["b"]) for name, pair in halves.items()}


def _values(raw: RawTensor) -> Tensor:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    if raw.type not in ("F32", "F16", "BF16", "Q8_0"):
        raise UserError(f"tensor {raw.name!r} has type {raw.type}, which adapters do not have", path=raw.file,
                        fix="convert the adapter again")  # fmt: skip
    with raw.file.open("rb") as stream:
        stream.seek(raw.offset)
        data = np.frombuffer(stream.read(raw.nbytes), np.uint8)
    rows = max(1, int(np.prod(raw.shape[:-1])))
    values = dequantize(data.reshape(rows, -1), GGMLQuantizationType[raw.type])
    return torch.from_numpy(np.array(values, np.float32).reshape(raw.shape))


def _unpaired(b: Tensor, heads: int | None) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(unpaired(b.numpy(), heads))) if heads else b
