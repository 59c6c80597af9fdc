"""LoRA adapters as GGUF files for llama.cpp.

A pair is two fp32 tensors beside a base tensor's name: `blk.0.attn_q.weight.lora_a` [r, in] and `.lora_b` [out, r], for
experts [E, r, in] and [E, out, r]. llama.cpp adds (alpha / r) B A with r each pair's own and one `adapter.lora.alpha`
(src/llama-adapter.h), so alpha is what most pairs have as scale * r, and B of any other pair takes the rest of its factor.
Rows of B of queries and keys lie as the base's rows do; an adapter of fused gate and up becomes two with the same A.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamella.adapter.lora import Adapter, SiteSpec, sites_from_shapes
from lamella.adapter.peft_format import CONFIG, WEIGHTS
from lamella.adapter.tensors_file import TensorsFile
from lamella.checkpoint.architecture import architecture_of
from lamella.checkpoint.gguf_archs import GgufArch, arch_of, place_of
from lamella.checkpoint.gguf_decode import paired, unpaired
from lamella.checkpoint.gguf_header import GgufHeader, RawTensor, read_gguf_header
from lamella.errors import UserError
from lamella.export.writers.gguf_file import GgufFile
from lamella.models.linear import FrozenLinear
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


@dataclass(frozen=True)
class _Half:
    """One tensor pair of a site: base tensor's name, rows of B, heads in rotary pairs."""

    name: str
    rows: slice
    heads: int | None


def export_lora(folder: Path, skeleton: Skeleton, file: Path, facts: Mapping[str, str] | None = None) -> Written:
    """An adapter folder in PEFT's format as a GGUF adapter.

    Raises:
        UserError: see `check_folder` and `write_lora`; nothing is written then.
    """
    check_folder(folder)
    return write_lora(Adapter.load(folder, skeleton), skeleton.config.to_dict(), file, facts)


def check_folder(folder: Path) -> None:
    """See that an adapter folder holds LoRA pairs of decoder layers and nothing else.

    Raises:
        UserError: names of tensors that a GGUF adapter cannot hold.
    """
    names = sorted(TensorsFile(folder / WEIGHTS))
    unheld = [n for n in names if ".layers." not in n or not n.endswith((".lora_A.weight", ".lora_B.weight"))]
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    unheld += [f"{name} (modules_to_save)" for name in config.get("modules_to_save") or ()]
    if unheld:
        raise UserError(f"a GGUF adapter cannot hold {', '.join(unheld[:4])}{' ...' if len(unheld) > 4 else ''}",
                        fix="merge such an adapter into the base and export the model", path=folder)  # fmt: skip


def write_lora(
    adapter: Adapter, config: Mapping[str, Any], file: Path, facts: Mapping[str, str] | None = None
) -> Written:
    """Write an adapter, one pair at a time.

    Args:
        config: config.json of the base.
        facts: further metadata, under `lamella.`.

    Raises:
        UserError: a model type that llama.cpp does not have here, or weights without a place in GGUF; before writing.
    """
    arch = arch_of(config)
    halves = _halves(adapter, arch, config)
    alphas = {key: site.scale * site.rank for key, site in adapter.sites.items()}
    alpha = float(np.float32(Counter(alphas.values()).most_common(1)[0][0]))
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for key, site in adapter.sites.items():
        for half in halves[key]:
            rows = len(range(*half.rows.indices(site.outputs)))
            shapes[f"{half.name}.lora_a"] = site.a_shape, "F32"
            shapes[f"{half.name}.lora_b"] = (*site.b_shape[:-2], rows, site.rank), "F32"
    keys: dict[str, Any] = {
        "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": alpha, "general.file_type": 0,
        **{f"lamella.{key}": value for key, value in (facts or {}).items()},
    }  # fmt: skip
    out = GgufFile(file, arch.name, keys, shapes)
    folded = 0
    for key in adapter.sites:
        a, b = (p.detach().float().cpu() for p in adapter.pair(key))
        if alphas[key] != alpha:
            b, folded = b * (alphas[key] / alpha), folded + 1
        for half in halves[key]:
            part = b[..., half.rows, :].contiguous().numpy()
            if half.heads:
                part = paired(part, half.heads)
            for name, values in ((f"{half.name}.lora_a", a.numpy()), (f"{half.name}.lora_b", part)):
                out.write(np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8), out.tensors[name].offset)
    out.finish()
    assert len(shapes) == 2 * sum(len(found) for found in halves.values())
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
    state: dict[str, Tensor] = {}
    shapes, alphas = {}, {}
    for site, halves in _all_sites(skeleton, arch).items():
        found = [pairs.pop(half.name) for half in halves if half.name in pairs]
        if not found:
            continue
        if len(found) != len(halves):
            raise UserError(f"{site}: only one of gate and up is adapted, which is not read", fix="merge it", path=file)
        a, b, ranks = _joined([(a, _unpaired(b, half.heads)) for (a, b), half in zip(found, halves, strict=True)])
        state |= {f"{site}.lora_A": a, f"{site}.lora_B": b}
        shapes[site], alphas[site] = (tuple(a.shape), tuple(b.shape)), alpha * ranks
    if pairs:
        raise UserError(
            f"adapts {sorted(pairs)[:3]}, which the model does not have", fix="give its own base", path=file
        )
    adapter = Adapter(sites_from_shapes(skeleton, shapes, alphas, False), 0.0, False)
    adapter.describe(skeleton)
    adapter.load_state(state)
    return adapter


def _halves(adapter: Adapter, arch: GgufArch, config: Mapping[str, Any]) -> dict[str, list[_Half]]:
    architecture = architecture_of(config)
    found, unheld = {}, []
    for key, site in adapter.sites.items():
        halves = _halves_of(site, arch, config, architecture)
        if halves is None:
            unheld.append(key)
        else:
            found[key] = halves
    if unheld:
        raise UserError(f"a GGUF adapter of {arch.name} cannot hold {', '.join(unheld[:4])}",
                        fix="merge the adapter into the base and export the model")  # fmt: skip
    return found


def _halves_of(site: SiteSpec, arch: GgufArch, config: Mapping[str, Any], architecture: Any) -> list[_Half] | None:
    if site.parameter is not None:
        names = _EXPERTS.get(site.parameter)
        if names is None:
            return None
        rows = site.outputs // len(names)
        return [_Half(f"blk.{site.layer}.{name}.weight", slice(i * rows, (i + 1) * rows), None)
                for i, name in enumerate(names)]  # fmt: skip
    try:
        place = place_of(arch, f"{site.key}.weight", config, architecture)
    except UserError:
        return None
    return [_Half(place.name, slice(None), place.heads)] if place.expert is None else None


def _all_sites(skeleton: Skeleton, arch: GgufArch) -> dict[str, list[_Half]]:
    """Every weight of the model that a GGUF adapter may adapt -> its tensors."""
    config = skeleton.config.to_dict()
    architecture = architecture_of(config)
    found = {}
    for i, layer in enumerate(skeleton.layers):
        for path, module in layer.named_modules():
            sites = []
            if isinstance(module, FrozenLinear):
                sites = [(None, module.out_features)]
            elif hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
                shapes = {n: p.shape for n, p in module.named_parameters(recurse=False) if p.dim() == 3}
                sites = [(n, shape[2 if module.is_transposed else 1]) for n, shape in shapes.items()]
            for parameter, outputs in sites:
                key = f"{skeleton.prefix}.{i}.{path}" + (f".{parameter}" if parameter else "")
                site = SiteSpec(key, i, path, parameter, 0, outputs, None, 1, 1.0, 1.0, 0)
                halves = _halves_of(site, arch, config, architecture)
                if halves is not None:
                    found[key] = halves
    return found


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


def _joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, int]:
    """One pair for the weights of several, one below the other; and by how much the rank grew."""
    (a, b), rest = pairs[0], pairs[1:]
    if not rest:
        return a, b, 1
    (other_a, other_b) = rest[0]
    if torch.equal(a, other_a):
        return a, torch.cat([b, other_b], -2), 1
    zero = torch.zeros_like
    top, bottom = torch.cat([b, zero(b)], -1), torch.cat([zero(other_b), other_b], -1)
    return torch.cat([a, other_a], -2), torch.cat([top, bottom], -2), 2
