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
import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lamella import __version__
from lamella.adapter.lora import Adapter, SiteSpec, check_names, sites_from_shapes
from lamella.adapter.tensors_file import TensorsFile, write_tensors
from lamella.errors import UserError
from lamella.models.linear import FrozenLinear
from lamella.models.skeleton import Skeleton

WEIGHTS, CONFIG, FACTS = "adapter_model.safetensors", "adapter_config.json", "lamella_adapter.json"
_PREFIX = "base_model.model."


def flatten_experts(a_ErI: Tensor, b_EOr: Tensor) -> tuple[Tensor, Tensor]:
    """[E, r, in], [E, out, r] -> PEFT's [E * r, in] (expert-major) and [out, r * E] (rank-major)."""
    experts, rank, inputs = a_ErI.shape
    return a_ErI.reshape(experts * rank, inputs), b_EOr.permute(1, 2, 0).reshape(b_EOr.shape[1], rank * experts)


def unflatten_experts(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Inverse of `flatten_experts`."""
    rank = a.shape[0] // experts
    return a.reshape(experts, rank, -1).contiguous(), b.reshape(b.shape[0], rank, experts).permute(2, 0, 1).contiguous()


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


def _short_targets(adapter: Adapter, left_out: set[str]) -> list[str]:
    """Target modules by last name where that names exactly ours among all linear layers, else by full name."""
    ours = {s.key for s in adapter.sites.values() if s.parameter is None} - left_out
    by_last: dict[str, set[str]] = defaultdict(set)
    for name in adapter.linear_names:
        by_last[name.rpartition(".")[2]].add(name)
    short = {last for last, names in by_last.items() if names <= ours}
    rest = {key for key in ours if key.rpartition(".")[2] not in short}
    return sorted(short) + sorted(rest)


def peft_config(adapter: Adapter, base: str) -> dict[str, Any]:
    """`adapter_config.json` for PEFT 0.18 and later."""
    sites = list(adapter.sites.values())
    linear = [s for s in sites if s.parameter is None]
    fused = [s for s in sites if s.parameter is not None]
    main = (linear or fused)[0]
    rank_pattern, alpha_pattern = {}, {}
    for site in sites:
        name = f"experts.{site.parameter}" if site.parameter is not None and site.path.endswith("experts") else site.key
        if site.rank != main.rank:
            rank_pattern[name] = site.rank
        if site.alpha != main.alpha:
            alpha_pattern[name] = site.alpha
    as_parameters = {s.key for s in linear if adapter.fused_experts and s.key.rpartition(".")[2] in _RENAMED_BY_PEFT}
    parameters = sorted({f"{s.path}.{s.parameter}" for s in fused} | {f"{key}.weight" for key in as_parameters})
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": main.rank, "lora_alpha": main.alpha, "lora_dropout": 0.0 if parameters else adapter.dropout,
        "use_rslora": adapter.rslora, "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True,
        "target_modules": _short_targets(adapter, as_parameters), "target_parameters": parameters or None,
        "rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern, "modules_to_save": None, "use_dora": False,
    }  # fmt: skip


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
        "lamella_version": __version__, "expert_layout": {"lora_A": "expert-major", "lora_B": "rank-major"},
        "dropout": adapter.dropout, "tensors": len(tensors), **facts,
    }  # fmt: skip
    (folder / FACTS).write_text(json.dumps(own, indent=2) + "\n")
    return {WEIGHTS: digest}


def _read_object(file: Path, fix: str) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot be read: {error}", path=file, fix=fix) from error
    if not isinstance(tree, dict):
        raise UserError(f"must hold a JSON object, not {json.dumps(tree)[:60]}", path=file, fix=fix)
    return tree


def read_facts(folder: Path) -> dict[str, Any]:
    """What `lamella_adapter.json` says; nothing for adapters of other tools, which have none.

    Raises:
        UserError: the file cannot be read or holds no JSON object, or a dropout outside 0 to 1.
    """
    file, fix = folder / FACTS, "save the adapter again"
    if not file.exists():
        return {}
    facts = _read_object(file, fix)
    dropout = facts.get("dropout", 0.0)
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise UserError(f"dropout is {dropout!r}, not a number from 0 to 1", path=file, fix=fix)
    return facts


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    config = _read_object(file, "give a PEFT adapter folder")
    if config.get("peft_type") != "LORA":
        raise UserError(f"peft_type is {config.get('peft_type')!r}", path=file, fix="only LoRA adapters are supported")
    for key in ("r", "lora_alpha"):
        if not _is_number(config.get(key)) or config[key] <= 0:
            raise UserError(f"{key} is {config.get(key)!r}", path=file, fix=f"{key} must be a positive number")
    _check_alphas(config.get("alpha_pattern"), file)
    dropout = config.get("lora_dropout") or 0.0
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise UserError(f"lora_dropout is {dropout!r}", path=file, fix="lora_dropout must be a number from 0 to 1")
    for key in ("use_dora", "modules_to_save", "lora_bias"):
        if config.get(key):
            raise UserError(f"{key} is set, which is not supported", path=file, fix="use a plain LoRA adapter")
    return config


def _check_alphas(patterns: Any, file: Path) -> None:
    fix = "alpha_pattern must be an object of names (or regular expressions) and positive numbers"
    if patterns is not None and not isinstance(patterns, dict):
        raise UserError(f"alpha_pattern is {patterns!r}", path=file, fix=fix)
    for pattern, value in (patterns or {}).items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"alpha_pattern {pattern!r}: {error}", path=file, fix=fix) from error
        if not _is_number(value) or value <= 0:
            raise UserError(f"alpha_pattern {pattern!r} is {value!r}", path=file, fix=fix)


def _pattern_value(patterns: dict[str, Any], key: str, default: float) -> float:
    """PEFT's rule: a pattern matches the end of a name, or is a regular expression for it."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", key):
            return float(value)
    return default


def load_adapter(folder: Path, skeleton: Skeleton, values: bool = True) -> Adapter:
    """Read a PEFT folder into an `Adapter` for this model.

    Args:
        values: False leaves the parameters on `meta`: sites and settings only.

    Raises:
        UserError: unreadable files, tensors that are not LoRA pairs, names or shapes that do not fit the model.
    """
    config, facts = _read_config(folder), read_facts(folder)
    try:
        tensors = load_file(folder / WEIGHTS) if values else _shapes_only(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot be read: {error}", path=folder / WEIGHTS, fix="the adapter is incomplete; save it again"
        ) from error
    pairs: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = re.fullmatch(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.weight", name)
        if match is None:
            raise UserError(
                f"{name} is not a LoRA weight", path=folder / WEIGHTS, fix="merge such tensors into the base first"
            )
        pairs[match[1]][match[2]] = tensor.float()
    half = [name for name, pair in pairs.items() if len(pair) != 2]
    if half:
        raise UserError(
            f"{half[0]} has only lora_{next(iter(pairs[half[0]]))}", path=folder / WEIGHTS, fix="save the adapter again"
        )
    keyed = _resolve_wrappers(pairs, skeleton)
    rslora = bool(config.get("use_rslora"))
    alphas = {key: _pattern_value(config.get("alpha_pattern", {}), key, float(config["lora_alpha"])) for key in keyed}
    shapes = {key: (tuple(a.shape), tuple(b.shape)) for key, (a, b) in keyed.items()}
    sites = sites_from_shapes(skeleton, shapes, alphas, rslora)
    with torch.device("cpu" if values else "meta"):
        adapter = Adapter(sites, float(facts.get("dropout", config.get("lora_dropout") or 0.0)), rslora)
    adapter.origin = facts
    adapter.describe(skeleton)
    if not values:
        return adapter
    adapter.load_state({f"{key}.lora_{x}": t for key, pair in keyed.items() for x, t in zip("AB", pair, strict=True)})
    return adapter


def _shapes_only(file: Path) -> dict[str, Tensor]:
    return {name: torch.empty(info.shape, device="meta") for name, info in TensorsFile(file).infos.items()}


def _resolve_wrappers(pairs: dict[str, dict[str, Tensor]], skeleton: Skeleton) -> dict[str, tuple[Tensor, Tensor]]:
    """Name the expert parameter behind each (nested) wrapper and unflatten its pair."""
    depths: dict[str, list[int]] = defaultdict(list)
    for name in pairs:
        depths[name.replace(".base_layer", "")].append(name.count(".base_layer"))
    modules = {
        f"{skeleton.prefix}.{i}.{path}": module
        for i, layer in enumerate(skeleton.layers)
        for path, module in layer.named_modules()
    }
    keyed = {}
    for name, pair in pairs.items():
        base = name.replace(".base_layer", "")
        module = modules.get(base)
        if module is None or isinstance(module, FrozenLinear):
            keyed[base] = (pair["A"], pair["B"])
            continue
        parameters = [(n, p) for n, p in module.named_parameters(recurse=False) if p.dim() == 3]
        fits = [(n, p) for n, p in parameters if _fits(p.shape, bool(module.is_transposed), pair)]
        if len(depths[base]) == len(parameters):  # all wrapped: order says which is which
            fits = [parameters[len(parameters) - 1 - name.count(".base_layer")]]
        if len(fits) != 1:
            raise UserError(
                f"{name}: cannot tell which expert parameter it adapts",
                fix="export the adapter with PEFT 0.18 or later",
            )
        key = f"{base}.{fits[0][0]}"
        if key in keyed:
            raise UserError(f"{name}: {key} has two pairs", fix="save the adapter again")
        keyed[key] = unflatten_experts(pair["A"], pair["B"], fits[0][1].shape[0])
    return keyed


def _fits(shape: Any, transposed: bool, pair: dict[str, Tensor]) -> bool:
    inputs, outputs = (shape[1], shape[2]) if transposed else (shape[2], shape[1])
    return pair["A"].shape[1] == inputs and pair["B"].shape[0] == outputs and pair["A"].shape[0] % shape[0] == 0
