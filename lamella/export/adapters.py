"""Adapters in the layouts of other engines: checked, written aside, then put in place."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamella import __version__
from lamella.adapter.config_files import CONFIG, FACTS
from lamella.adapter.layouts import GGUF, LAYOUTS, Entry, Layout, file_entries, layout_named, pad_rank, switch_name
from lamella.adapter.lora import SiteSpec, is_finite, is_zero
from lamella.adapter.peft_format import peft_config
from lamella.adapter.places import Place, places_of
from lamella.adapter.read import AdapterFile, check_allowed
from lamella.adapter.tensors_file import TensorsFile, write_tensors
from lamella.errors import UserError
from lamella.export import travel
from lamella.export.adapter_base import Base, base_of, open_base
from lamella.export.servers import server_notes
from lamella.files import fsync_path
from lamella.store.journal import check_writable

_SAME_SCALE = 1e-9
"""Scales that differ by less are one scale written twice (alpha / sqrt(r) is rounded)."""


@dataclass(frozen=True)
class Exported:
    """An adapter that was written.

    Attributes:
        folder: where; files: name -> bytes.
        pairs: LoRA pairs of the source, all of them in the export; tensors: in the file.
        notes: what people must know: how to start the engine, what was padded or folded.
    """

    folder: Path
    layout: str
    files: dict[str, int]
    pairs: int
    tensors: int
    notes: tuple[str, ...] = ()


@dataclass
class _Plan:
    """How the pairs fit a layout that cannot say all that ours can.

    Attributes:
        rank, alpha: of the file's configuration; scale: of all pairs, None: patterns say each pair's.
        ranks: key -> rank in the file; factors: key -> what B is multiplied by.
        added: pairs of zeros that the layout needs besides.
    """

    rank: int
    alpha: float
    scale: float | None
    ranks: dict[str, int]
    factors: dict[str, float]
    added: tuple[Place, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def folded(self) -> list[str]:
        return [key for key, factor in self.factors.items() if factor != 1]


def export_adapter(
    source: Path, out: Path, layout: str, base: Path | None = None, *, another_base: bool = False,
    source_layout: str | None = None, allowed: Sequence[str] = (),
) -> Exported:  # fmt: skip
    """Write an adapter in another layout, with what belongs to it.

    Args:
        source: run folder, or adapter folder of any layout that is read.
        out: new folder; it appears when all is written and read back.
        layout: one of `LAYOUTS`.
        base: store or checkpoint it belongs to; None: the one that the run's receipt names.
        another_base: export it although the base's weights are not those it was trained on.
        source_layout: of `source`, where its files do not tell.
        allowed: module names that the server lets adapters have pairs on; empty: all.

    Raises:
        UserError: `out` exists, unreadable adapter, another base, pairs that the layout cannot hold, an adapter that
            changes nothing.
    """
    if layout == GGUF:
        raise UserError("GGUF adapters are written by the GGUF writer", fix="use `lamella export` with --layout gguf")
    target = layout_named(layout)
    if out.exists():
        raise UserError("exists already", fix="give another folder, or remove it", path=out)
    where = open_base(base if base is not None else base_of(source))
    file = AdapterFile(source, where.skeleton, source_layout)
    check_base(file, where, another_base)
    if allowed:
        check_allowed(file.sites.values(), allowed)
    places = places_of(where.skeleton, where.shapes)
    with aside(out) as temp:
        rank, tensors, said = write_layout(target, file, places, temp, where)
        notes = [f"read as layout {file.layout.name} ({file.how})", *file.notes, *said]
        notes += server_notes(target, file.sites.values(), rank, where, out)
        notes += travel.write(
            temp, where, source=source, facts=file.facts, kind="adapter", layout=target.name, notes=notes
        )
        _read_back(target, file, AdapterFile(temp, where.skeleton))
        for path in sorted(temp.rglob("*")):
            if path.is_file():
                fsync_path(path)
        os.replace(temp, out)
    fsync_path(out.absolute().parent)
    files = {str(p.relative_to(out)): p.stat().st_size for p in sorted(out.rglob("*")) if p.is_file()}
    return Exported(out, target.name, files, len(file.sites), tensors, tuple(notes))


@contextmanager
def aside(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, gone at the end unless it was renamed.

    Raises:
        UserError: no folder can be made there, or no room.
    """
    check_writable(out, "the export", "-o DIR")
    temp = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        temp.mkdir(parents=True)
        yield temp
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror or error}", fix="make room, or give another -o DIR", path=out
        ) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def check_base(file: AdapterFile, base: Base, another_base: bool = False) -> None:
    """Raises `UserError` when the adapter names another base's fingerprint."""
    trained_on = file.facts.get("base_fingerprint")
    if trained_on is not None and trained_on != base.fingerprint and not another_base:
        raise UserError(
            f"the adapter was trained on a base with fingerprint {trained_on}, this one's is {base.fingerprint}",
            fix="give the base it was trained on, or say --another-base when this one is meant", path=base.path,
        )  # fmt: skip


def write_layout(
    layout: Layout, file: AdapterFile, places: dict[str, Place], folder: Path, base: Base
) -> tuple[int, int, list[str]]:
    """Weights, configuration and facts of an adapter, nothing else.

    Args:
        places: of the base's model, with the checkpoint's names. folder: exists.

    Returns:
        rank of the configuration; tensors written; what was padded, folded or added.
    """
    plan = _fit(layout, file, places)
    tensors = _write_weights(layout, file, places, plan, folder / layout.weights, base)
    _write_configs(layout, file, places, plan, folder, base)
    return plan.rank, tensors, plan.notes


# --- what a layout can hold


def _fit(layout: Layout, file: AdapterFile, places: dict[str, Place]) -> _Plan:
    sites = list(file.sites.values())
    ranks = {site.key: site.rank for site in sites}
    top = max(ranks.values())
    if layout.patterns:
        return _Plan(top, 0.0, None, ranks, dict.fromkeys(ranks, 1.0))
    usual = Counter(_rounded(site.scale) for site in sites).most_common(1)[0][0]
    scale = next(site.scale for site in sites if _rounded(site.scale) == usual)
    factors = {site.key: _factor(site.scale, scale) for site in sites}
    plan = _Plan(top, scale * top, scale, ranks, factors, _companions(layout, places, file.sites))
    if file.rslora:
        plan.notes.append(
            f"{layout.tool} knows no rsLoRA: its scale {scale:g} is written as lora_alpha {plan.alpha:g} / r {top}"
        )
    if plan.folded:
        exact = all(math.frexp(factors[key])[0] == 0.5 for key in plan.folded)
        plan.notes.append(
            f"{layout.tool} has one scale for all pairs ({scale:g}): B of {len(plan.folded)} pairs is multiplied by the ratio of "
            + ("theirs, a power of two, so exactly" if exact else "theirs, rounded to fp32")
        )
    if layout.one_rank and len(set(ranks.values())) > 1:
        plan.ranks = dict.fromkeys(ranks, top)
        plan.notes.append(f"{layout.tool} has one rank for all pairs: those of {sorted(set(ranks.values()))[:-1]} are filled up "
                          f"to {top} with zeros, the product is the same")  # fmt: skip
    if plan.added:
        plan.notes.append(
            f"{layout.tool} needs all parts of a fused weight: {len(plan.added)} pairs of zeros added, e.g. {plan.added[0].key}"
        )
        plan.ranks |= {
            place.key: top if layout.one_rank else _partner_rank(place, file.sites, top) for place in plan.added
        }
    return plan


def _rounded(scale: float) -> float:
    return float(f"{scale:.9g}")


def _factor(scale: float, common: float) -> float:
    factor = scale / common
    return 1.0 if abs(factor - 1) < _SAME_SCALE else factor


_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _companions(layout: Layout, places: dict[str, Place], sites: dict[str, SiteSpec]) -> tuple[Place, ...]:
    """Places without a pair that the engine reads together with one that has."""
    found: dict[str, Place] = {}
    if layout.name == "vllm-3d":
        modules = {places[key].module for key in sites if places[key].parameter is not None}
        found = {
            p.key: p for p in places.values() if p.parameter is not None and p.module in modules and p.key not in sites
        }
    if layout.name == "sglang":
        for key in sites:
            around, _, leaf = places[key].module.rpartition(".")
            for group in _TOGETHER:
                if places[key].parameter is None and leaf in group:
                    names = (f"{around}.{other}" for other in group)
                    found |= {name: places[name] for name in names if name in places and name not in sites}
    return tuple(found.values())


def _partner_rank(place: Place, sites: dict[str, SiteSpec], top: int) -> int:
    return max((site.rank for key, site in sites.items() if key.startswith(f"{place.module}.")), default=top)


# --- writing


def _write_weights(
    layout: Layout, file: AdapterFile, places: dict[str, Place], plan: _Plan, path: Path, base: Base
) -> int:
    """Number of tensors written."""
    model_type = str(base.skeleton.config.model_type)
    written = [*(places[key] for key in file.sites), *plan.added]
    around = Counter(place.module for place in written if place.parameter is not None)
    pair = lru_cache(maxsize=4)(partial(_pair, file, places, plan))
    items: dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]] = {}
    moved: set[str] = set()
    for place in written:
        depth = (
            sum(other.module == place.module and other.order > place.order for other in written)
            if around[place.module]
            else 0
        )
        named = (
            replace(place, source=switch_name(place, model_type))
            if layout.experts == "switch" and place.parameter
            else place
        )
        entries = file_entries(layout, named, plan.ranks[place.key], depth)
        clash = entries.keys() & items.keys()
        assert not clash, clash
        items |= {name: (entry[0], partial(_make, pair, place.key, entry, moved)) for name, entry in entries.items()}
    write_tensors(path, items)
    if not moved:
        raise UserError("every B of the adapter is zero: it changes nothing", fix="train it first", path=file.path)
    assert len(TensorsFile(path)) == len(items)
    return len(items)


def _pair(file: AdapterFile, places: dict[str, Place], plan: _Plan, key: str) -> tuple[Tensor, Tensor, bool]:
    """A and B as the file is to have them, before its axes; whether B is zero."""
    place, rank = places[key], plan.ranks[key]
    if key not in file.sites:
        many = () if place.experts is None else (place.experts,)
        return torch.zeros(*many, rank, place.inputs), torch.zeros(*many, place.outputs, rank), True
    a, b = file.pair(key)
    for which, value in (("A", a), ("B", b)):
        if not is_finite(value):
            raise UserError(
                f"{key}: {which} is not finite", fix="train again with a lower learning rate", path=file.path
            )
    factor = plan.factors[key]
    a, b = pad_rank(a, b if factor == 1 else b * factor, rank)
    return a, b, is_zero(b) or not bool(b.any())  # -0.0


def _make(pair: Callable[[str], tuple[Tensor, Tensor, bool]], key: str, entry: Entry, moved: set[str]) -> Tensor:
    a, b, zero = pair(key)
    if not zero:
        moved.add(key)
    return entry[1](a, b)


def _write_configs(
    layout: Layout, file: AdapterFile, places: dict[str, Place], plan: _Plan, folder: Path, base: Base
) -> None:
    if layout.name == "mlx":
        config = _mlx_config(file, places, plan, base)
    elif layout.patterns:
        config = _peft_config(layout, file, base)
    else:
        config = _server_config(layout, file, places, plan, base)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    kept = {
        k: v
        for k, v in file.facts.items()
        if k not in ("layout", "expert_layout", "sites", "rslora", "tensors", "folded")
    }
    sites = {key: [site.rank, site.alpha, plan.factors[key]] for key, site in file.sites.items()}
    facts = {
        **kept, "lamella_version": __version__, "layout": layout.name, "axes": layout.axes, "dropout": file.dropout,
        "rslora": file.rslora, "base_fingerprint": file.facts.get("base_fingerprint", base.fingerprint), "sites": sites,
    }  # fmt: skip
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _peft_config(layout: Layout, file: AdapterFile, base: Base) -> dict[str, Any]:
    config = peft_config(file, travel.base_name(base))
    if layout.name == "peft-0.18":
        config["peft_version"] = "0.18.1"
    if layout.name == "unsloth":
        model = base.skeleton.model
        config["auto_mapping"] = {
            "base_model_class": type(model).__name__, "parent_library": type(model).__module__, "unsloth_fixed": True,
        }  # fmt: skip
    return config


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _server_config(
    layout: Layout, file: AdapterFile, places: dict[str, Place], plan: _Plan, base: Base
) -> dict[str, Any]:
    targets: set[str] = set()
    for place in [*(places[key] for key in file.sites), *plan.added]:
        if place.parameter is None:
            targets.add(place.source.rpartition(".")[2])
        else:
            targets |= {*place.leaves, *place.generic} | ({place.parameter} if layout.experts == "fused" else set())
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": travel.base_name(base), "inference_mode": True,
        "r": plan.rank, "lora_alpha": _number(plan.alpha), "lora_dropout": 0.0, "use_rslora": False, "bias": "none",
        "target_modules": sorted(targets), "modules_to_save": None, "use_dora": False,
    }  # fmt: skip


def _mlx_config(file: AdapterFile, places: dict[str, Place], plan: _Plan, base: Base) -> dict[str, Any]:
    keys: set[str] = set()
    for place in (places[key] for key in file.sites):
        source = place.source if place.parameter is None else switch_name(place, str(base.skeleton.config.model_type))
        _, _, inside = source.partition(f".{place.layer}.")
        keys |= {inside} if place.parameter is None else {f"{inside}.{leaf}" for leaf in place.generic}
    return {
        "model": travel.base_name(base), "fine_tune_type": "lora", "num_layers": len(base.skeleton.layers),
        "lora_parameters": {"rank": plan.rank, "scale": plan.scale, "dropout": 0.0, "keys": sorted(keys)},
    }  # fmt: skip


def _read_back(layout: Layout, file: AdapterFile, again: AdapterFile) -> None:
    """What was written is the adapter that was read: the same pairs, ranks, scales, and values."""
    assert again.layout.name == layout.name
    assert list(again.sites) == list(file.sites), (len(again.sites), len(file.sites))
    for key, site in file.sites.items():
        there = again.sites[key]
        assert (there.rank, there.alpha) == (site.rank, site.alpha), key
        same = all(torch.equal(x, y) for x, y in zip(file.pair(key), again.pair(key), strict=True))
        if not same:
            (_, b), (_, back) = file.pair(key), again.pair(key)
            assert torch.allclose(b, back, rtol=3e-7, atol=0), key


def known_layouts() -> list[str]:
    """Names for `--layout`."""
    return [*LAYOUTS, GGUF]
