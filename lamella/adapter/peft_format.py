"""PEFT adapter folders, written and read.

`adapter_model.safetensors` holds two tensors per adapted weight, nothing else. A linear layer's pair is
A [r, in], B [out, r]. A fused expert parameter's pair is flattened the way PEFT's `ParamWrapper` reads it:

    lora_A [E * r, in]    row e * r + k         (expert-major)
    lora_B [out, r * E]   column k * E + e      (rank-major)

so the delta of expert e is sum_k B[:, k * E + e] A[e * r + k, :]. Wrappers of several parameters of one module
are nested in parameter order: the last one has no `base_layer` in its name, the one before has one, and so on.
What PEFT's config cannot say (layout, base fingerprint, dropout on experts) stands in `lamella_adapter.json`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lamella import __version__
from lamella.adapter.config_files import CONFIG, FACTS, read_facts
from lamella.adapter.layouts import PREFIX as _PREFIX
from lamella.adapter.layouts import flatten_experts, unflatten_experts
from lamella.adapter.lora import Adapter, SiteSpec, check_names, is_finite
from lamella.adapter.read import WEIGHTS, AdapterFile, check_allowed, describe
from lamella.adapter.tensors_file import TensorsFile, write_tensors
from lamella.console import notice
from lamella.errors import UserError
from lamella.models.skeleton import Skeleton

__all__ = ["CONFIG", "FACTS", "WEIGHTS", "flatten_experts", "load_adapter", "load_values", "peft_config", "read_facts",
           "save_adapter", "unflatten_experts"]  # fmt: skip


def _flat(adapter: Adapter, site: SiteSpec, k: int) -> Tensor:
    """A (k = 0) or B (1) of a site as the file has it."""
    pair = tuple(p.detach() for p in adapter.pair(site.key))
    return (pair if site.experts is None else flatten_experts(pair[0], pair[1]))[k]


def _file_shapes(site: SiteSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if site.experts is None:
        return site.a_shape, site.b_shape
    return (site.experts * site.rank, site.inputs), (site.outputs, site.rank * site.experts)


def load_values(adapter: Adapter, folder: Path) -> None:
    """Set an adapter's masters from a folder that `save_adapter` wrote of one like it; holds one pair in memory.

    Raises:
        UserError: unreadable file, other names or shapes.
    """
    file = TensorsFile(folder / WEIGHTS)
    names = _tensor_names(adapter.sites)
    wanted = {f"{name}.lora_{x}.weight" for name in names.values() for x in "AB"}
    check_names(set(file), wanted, str(folder / WEIGHTS))
    with torch.no_grad():
        for key, site in adapter.sites.items():
            a, b = (file[f"{names[key]}.lora_{x}.weight"].float() for x in "AB")
            if (tuple(a.shape), tuple(b.shape)) != _file_shapes(site):
                raise UserError(f"{names[key]} has shapes {list(a.shape)}, {list(b.shape)}", path=folder / WEIGHTS,
                                fix="it belongs to another model or other LoRA settings")  # fmt: skip
            if site.experts is not None:
                a, b = unflatten_experts(a, b, site.experts)
            for master, value in zip(adapter.pair(key), (a, b), strict=True):
                master.copy_(value)


def _module_name(site: SiteSpec) -> str:
    return site.key if site.parameter is None else site.key.rpartition(".")[0]


def _tensor_names(sites: dict[str, SiteSpec]) -> dict[str, str]:
    """Site key -> name in the file without `.lora_A.weight`."""
    wrapped: dict[str, list[SiteSpec]] = defaultdict(list)
    for site in sites.values():
        if site.parameter is not None:
            wrapped[_module_name(site)].append(site)
    names = {}
    for site in sites.values():
        depth = 0
        if site.parameter is not None:
            depth = sum(other.order > site.order for other in wrapped[_module_name(site)])
        names[site.key] = _PREFIX + _module_name(site) + ".base_layer" * depth
    return names


_RENAMED_BY_PEFT = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate"}
"""On families whose experts transformers 5 fuses, PEFT takes these module names for experts wherever they stand; a
linear layer of that name (dense first layers, shared experts) must be given as a parameter, `<module>.weight`."""


class Pairs(Protocol):
    """What `peft_config` needs of an adapter, in memory or in a file."""

    sites: dict[str, SiteSpec]
    linear_names: list[str]
    fused_experts: bool
    dropout: float
    rslora: bool


def _short_targets(adapter: Pairs, left_out: set[str]) -> list[str]:
    """Target modules by last name where that names exactly ours among all linear layers, else by full name."""
    ours = {s.key for s in adapter.sites.values() if s.parameter is None} - left_out
    by_last: dict[str, set[str]] = defaultdict(set)
    for name in adapter.linear_names:
        by_last[name.rpartition(".")[2]].add(name)
    short = {last for last, names in by_last.items() if names <= ours}
    rest = {key for key in ours if key.rpartition(".")[2] not in short}
    return sorted(short) + sorted(rest)


def peft_config(adapter: Pairs, base: str) -> dict[str, Any]:
    """`adapter_config.json` for PEFT 0.17 and later; which layout the tensors have is said by `peft_version`."""
    sites = list(adapter.sites.values())
    linear = [s for s in sites if s.parameter is None]
    fused = [s for s in sites if s.parameter is not None]
    main = (linear or fused)[0]
    rank_pattern = _pattern({s.key: s.rank for s in sites}, sites, main.rank)
    alpha_pattern = _pattern({s.key: s.alpha for s in sites}, sites, main.alpha)
    as_parameters = {s.key for s in linear if adapter.fused_experts and s.key.rpartition(".")[2] in _RENAMED_BY_PEFT}
    parameters = sorted({f"{s.path}.{s.parameter}" for s in fused} | {f"{key}.weight" for key in as_parameters})
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": main.rank, "lora_alpha": main.alpha, "lora_dropout": 0.0 if parameters else adapter.dropout,
        "use_rslora": adapter.rslora, "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True,
        "target_modules": _short_targets(adapter, as_parameters), "target_parameters": parameters or None,
        "rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern, "modules_to_save": None, "use_dora": False, "peft_version": "0.19.0",
    }  # fmt: skip


def _pattern(values: dict[str, Any], sites: list[SiteSpec], usual: Any) -> dict[str, Any]:
    """Values that are not the usual one, by `experts.<parameter>` where all layers have the same, else by full name."""
    pattern = {}
    shared: dict[str, set[Any]] = defaultdict(set)
    for site in sites:
        shared[_short(site)].add(values[site.key])
    for site in sites:
        if values[site.key] != usual:
            pattern[_short(site) if len(shared[_short(site)]) == 1 else site.key] = values[site.key]
    return pattern


def _short(site: SiteSpec) -> str:
    return f"experts.{site.parameter}" if site.parameter is not None and site.path.endswith("experts") else site.key


def save_adapter(adapter: Adapter, folder: Path, *, base: str, facts: dict[str, Any]) -> dict[str, str]:
    """Write the three files into `folder` (created). fp32 values, exactly the masters.

    Returns:
        name of the weights' file -> its xxh3_128.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = _tensor_names(adapter.sites)
    tensors: dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]] = {}
    for site in adapter.sites.values():
        for k, shape in enumerate(_file_shapes(site)):
            tensors[f"{names[site.key]}.lora_{'AB'[k]}.weight"] = shape, partial(_flat, adapter, site, k)
    digest = write_tensors(folder / WEIGHTS, tensors)
    config = peft_config(adapter, base)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    own = {
        "lamella_version": __version__, "layout": "peft", "expert_layout": {"lora_A": "expert-major", "lora_B": "rank-major"},
        "dropout": adapter.dropout, "tensors": len(tensors), **facts,
    }  # fmt: skip
    (folder / FACTS).write_text(json.dumps(own, indent=2) + "\n")
    return {WEIGHTS: digest}


def load_adapter(
    folder: Path, skeleton: Skeleton, values: bool = True, *, layout: str | None = None, allowed: Sequence[str] = ()
) -> Adapter:
    """Read an adapter folder of any known layout into an `Adapter` for this model; says which when it is not ours.

    Args:
        values: False leaves the parameters on `meta`: sites and settings only.
        layout: one of `layouts.LAYOUTS`, for files that do not tell it.
        allowed: modules that may have pairs, by last name; empty: all.

    Raises:
        UserError: unreadable files, tensors that are not LoRA pairs, names or shapes that do not fit the model.
    """
    file = AdapterFile(folder, skeleton, layout)
    if allowed:
        check_allowed(file.sites.values(), allowed)
    if (values and file.layout.name != "peft") or file.notes:
        for line in (describe(file), *file.notes):
            notice(line)
    with torch.device("cpu" if values else "meta"):
        adapter = Adapter(list(file.sites.values()), file.dropout, file.rslora)
    adapter.origin, adapter.layout = file.facts, file.layout.name
    adapter.describe(skeleton)
    if values:
        with torch.no_grad():
            for key in adapter.sites:
                for master, value in zip(adapter.pair(key), file.pair(key), strict=True):
                    if not is_finite(value):
                        raise UserError(f"the pair of {key} holds NaN or infinite values", path=file.path,
                                        fix="give an adapter from before training broke")  # fmt: skip
                    master.copy_(value)
    return adapter
