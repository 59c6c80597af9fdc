"""The receipt: what was asked, what happened, and the proof that the result is what it says.

`receipt.json` is written atomically, also for a run that failed (with the reason). A run is `ok` only after the
saved adapter was read back, found finite, equal to the trained one and different from the start, and the frozen
base was found unchanged.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import statistics
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from lamella import __version__
from lamella.adapter.lora import is_finite, is_zero
from lamella.adapter.tensors_file import TensorsFile
from lamella.config import RunConfig
from lamella.console import out
from lamella.errors import RunFailed
from lamella.files import file_checksum, fsync_path, write_json
from lamella.hardware.memory import peak_rss_bytes
from lamella.trace.summary import show as show_devices
from lamella.train.asked import (
    asked_of_adapter,
    asked_of_engine,
    asked_of_optimizer,
    compare,
    engine_in_effect,
    optimizer_in_effect,
    refuse_differences,
)
from lamella.train.checkpoint import Checkpoints
from lamella.train.folder import RESULT_PARTIAL, RunFolder
from lamella.train.optimizer import Optimizer
from lamella.train.parts import Parts
from lamella.train.state import RunState, Start, digests, tensor_of
from lamella.units import format_bytes, format_count, format_seconds

WEIGHTS = "adapter_model.safetensors"
_LAST = 10  # steps whose mean is the final loss


@dataclass(frozen=True)
class Facts:
    """All a receipt is made from."""

    config: RunConfig
    parts: Parts
    state: RunState
    optimizer: Optimizer
    start: Start
    metrics: list[dict[str, Any]]
    checkpoints: Checkpoints
    train_s: float
    world: int
    memory: str
    """Checksum of the base in memory at the start; the loop compared it at the end."""
    matmul_flops_per_s: float = 0.0
    """What the ranks' devices multiply, together."""
    devices: dict[str, Any] | None = None
    """What each device did (`lamella.trace.summary`)."""
    expert_load: dict[str, list[int]] = field(default_factory=dict)
    """Tokens each expert saw, of all ranks together, since this process began."""
    proof: dict[str, Any] = field(default_factory=dict)


def check_before(config: RunConfig, parts: Parts) -> None:
    """Raises `RunFailed` when engine or adapter are otherwise than asked, or the adapter has not its formula's size."""
    refuse_differences(
        compare(asked_of_engine(config), engine_in_effect(parts))
        + compare(asked_of_adapter(config, parts), parts.adapter.settings())
    )
    for row in trainable_table(parts):
        if row["expected"] is not None and row["expected"] != row["parameters"]:
            raise RunFailed(
                f"{row['class']}: {row['parameters']} trainable parameters, but {row['formula']} = {row['expected']}"
            )


# --- what trains, and what moved


def trainable_table(parts: Parts) -> list[dict[str, Any]]:
    """Per class: tensors, parameters, bytes, and the number the formula gives."""
    rows: dict[str, dict[str, Any]] = {}
    parameters = parts.adapter.parameters()
    for name, p in zip(parameters, parameters.values(), strict=True):  # sizes alone: state on disk stays there
        kind = parts.class_of(name)
        row = rows.setdefault(kind, {"class": kind, "tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += p.numel()
        row["bytes"] += p.numel() * p.element_size()
    for kind, row in rows.items():
        row["expected"], row["formula"] = parts.base.expected.get(kind, (None, ""))
    return list(rows.values())


def moved_table(parts: Parts, start: Start, state: RunState) -> list[dict[str, Any]]:
    """Per class, how many tensors differ from their initial values by a gradient; each expert's part counts by itself.

    `no_gradient`: had none yet, with reason: experts that no token reached (or, for their A, none since B left
    zero), and every A before the second update. `dead`: neither moved nor excused. Weight decay alone is no movement.
    """
    now, initial = digests(parts.adapter.parameters(), parts.class_of), start.digests()
    still = set(state.untouched)
    alive = {tensor_of(unit) for unit in now if unit not in still}
    rows: dict[str, dict[str, Any]] = {}
    for unit in now:
        kind = parts.class_of(tensor_of(unit))
        row = rows.setdefault(kind, {"class": kind, "total": 0, "moved": 0, "no_gradient": [], "dead": []})
        row["total"] += 1
        first_update = state.updates < 2 and "lora_A" in unit
        unreached = kind == "experts" and ("lora_A" in unit or tensor_of(unit) in alive)
        if unit not in still and now[unit] != initial[unit]:
            row["moved"] += 1
        elif unit in still and unit not in state.dead and (first_update or unreached):
            row["no_gradient"].append(unit)
        else:
            row["dead"].append(unit)
    return list(rows.values())


# --- figures from the metrics


def tokens_per_s(metrics: list[dict[str, Any]]) -> float:
    seconds = sum(line["step_s"] for line in metrics)
    return sum(line["tokens"] for line in metrics) / seconds if seconds else 0.0


def final_loss(metrics: list[dict[str, Any]]) -> float:
    """Mean loss of the last (up to 10) steps that were not skipped."""
    losses = [line["loss"] for line in metrics if line["loss"] is not None][-_LAST:]
    return sum(losses) / len(losses) if losses else math.nan


def middle(metrics: list[dict[str, Any]], name: str) -> float | None:
    """Median over the steps that tell it and were not skipped."""
    values = [line[name] for line in metrics if line.get(name) and not line["skipped"]]
    return statistics.median(values) if values else None


def _figures(facts: Facts) -> dict[str, Any]:
    lines = facts.metrics
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    norms = [line["grad_norm"] for line in lines if line["grad_norm"] is not None]
    state = facts.state
    return {
        "steps": state.step, "steps_planned": facts.parts.data.steps, "updates": state.updates,
        "skipped_bad": state.bad_steps, "skipped_empty": state.empty_steps,
        "rows": sum(line["rows"] for line in lines), "tokens": sum(line["tokens"] for line in lines),
        "label_tokens": sum(line["label_tokens"] for line in lines),
        "first_loss": losses[0] if losses else None, "final_loss": final_loss(lines) if losses else None,
        "lowest_loss": min(losses, default=None), "largest_grad_norm": max(norms, default=None),
        "tokens_per_s": tokens_per_s(lines), "flops_per_step": middle(lines, "flops"),
        "flop_per_s": middle(lines, "flop_per_s"), "matmul_flops_per_s": facts.matmul_flops_per_s,
        "utilisation": middle(lines, "utilisation"), "train_s": facts.train_s, "peak_rss_bytes": peak_rss_bytes(),
        "ranks": facts.world,
    }  # fmt: skip


# --- the receipt


def gather(facts: Facts, status: str, reason: str = "") -> dict[str, Any]:
    """The receipt as a JSON tree."""
    parts, state = facts.parts, facts.state
    in_effect = engine_in_effect(parts)
    return {
        "status": status,
        "reason": reason,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "name": facts.config.name,
        "versions": {**_versions(), "kernels": in_effect.get("kernels")},
        "config": facts.config.model_dump(mode="json"),
        "engine": in_effect,
        "comparison": compare(asked_of_engine(facts.config), in_effect)
        + compare(
            asked_of_optimizer(facts.config, facts.optimizer, parts.data.steps), optimizer_in_effect(facts.optimizer)
        ),
        "base": {"path": str(parts.base.path), "fingerprint": parts.base.fingerprint, "tensors": parts.base.tensors},
        "started_from": parts.started_from,
        "trainable": trainable_table(parts),
        "moved": moved_table(parts, facts.start, state),
        "start": state.start,
        "data": {
            "fingerprint": state.data_fingerprint,
            **parts.data.report(),
            "first_rows": parts.data.decoded_labels(3),
        },
        "figures": _figures(facts),
        "devices": facts.devices,
        "expert_load": facts.expert_load,
        "best": _best(facts),
        "warnings": [*state.warnings, *_bad_steps(state)],
        **facts.proof,
    }


def _bad_steps(state: RunState) -> list[str]:
    if not state.bad_steps:
        return []
    end = f", the last {state.bad_in_row} in a row" if state.bad_in_row else ""
    return [f"{state.bad_steps} of {state.step} steps had a non-finite loss or gradient and were skipped{end}"]


def _best(facts: Facts) -> dict[str, Any] | None:
    best = facts.state.best
    if best is None or best.step is None:
        return None
    path = facts.checkpoints.path(best.step)
    return {
        "metric": best.metric, "mode": best.mode, "value": best.value, "step": best.step, "checkpoint": str(path),
        "present": path.is_dir(),
    }  # fmt: skip


def prove(facts: Facts, folder: RunFolder) -> None:
    """Save the adapter, prove it, put it into the run's folder, and write the receipt with status `ok`.

    Raises:
        RunFailed: the saved adapter is not the trained one, is not finite, is zero or did not move everywhere; the
            base changed; settings in the saved files are not those asked.
    """
    saved = _save_aside(facts, folder.path / RESULT_PARTIAL)
    trained = digests(facts.parts.adapter.parameters(), facts.parts.class_of)
    _check_file(saved / WEIGHTS)
    facts.parts.adapter.load_state(saved)
    read_back = digests(facts.parts.adapter.parameters(), facts.parts.class_of)
    changed = [name for name in trained if trained[name] != read_back[name]]
    if changed:
        raise RunFailed(f"{len(changed)} adapter tensors differ when read back from {WEIGHTS}, e.g. {changed[0]}")
    zero = [name for name in facts.start.zero if is_zero(facts.parts.adapter.parameters()[name])]
    if facts.start.zero and len(zero) == len(facts.start.zero):
        raise RunFailed("every B matrix is still zero: the adapter does nothing")
    dead = [name for row in moved_table(facts.parts, facts.start, facts.state) for name in row["dead"]]
    if dead:
        raise RunFailed(f"{len(dead)} trainable tensors did not move, e.g. {dead[0]}")
    adapter_rows = compare(asked_of_adapter(facts.config, facts.parts), facts.parts.adapter.saved_settings(saved))
    refuse_differences(adapter_rows)
    damaged = facts.parts.base.verify()
    if damaged:
        raise RunFailed(f"{len(damaged)} frozen tensors changed on disk, e.g. {damaged[0]}", fix="quantize again")
    facts.proof["frozen"] = {"verified": True, "changed": [], "memory_xxh3_128": facts.memory}
    facts.proof["adapter"] = {
        "path": str(folder.path / WEIGHTS),
        "bytes": (saved / WEIGHTS).stat().st_size,
        "tensors": len(TensorsFile(saved / WEIGHTS)),
        "xxh3_128": file_checksum(saved / WEIGHTS),
        "read_back_equal": True,
        "finite": True,
        "zero_tensors": len(zero),
    }
    tree = gather(facts, "ok")
    tree["comparison"] += adapter_rows
    refuse_differences(tree["comparison"])
    for path in sorted(saved.iterdir()):
        os.replace(path, folder.path / path.name)
    saved.rmdir()
    fsync_path(folder.path)
    write(folder.receipt_path, tree)


def _save_aside(facts: Facts, temp: Path) -> Path:
    """The adapter's files where nobody takes them for a result yet."""
    if temp.exists():
        shutil.rmtree(temp)
    temp.mkdir()
    facts.parts.adapter.save(temp)
    for path in temp.iterdir():
        fsync_path(path)
    return temp


def _check_file(path: Path) -> None:
    """Every floating tensor of the saved file is finite."""
    tensors = TensorsFile(path)
    if not tensors:
        raise RunFailed("the saved adapter has no tensors", path=path)
    for name in tensors:
        if not is_finite(tensors[name]):
            raise RunFailed(f"saved tensor {name} is not finite", path=path)


def write(path: Path, tree: dict[str, Any]) -> None:
    write_json(path, json_safe(tree))


def json_safe(value: Any) -> Any:
    """NaN and infinities become null, paths and dtypes text."""
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def _versions() -> dict[str, str]:
    found = {"lamella": __version__, "python": platform.python_version(), "torch": torch.__version__}
    found |= {name: version(name) for name in ("transformers", "tokenizers", "safetensors", "numpy")}
    commit = _git_commit(Path(__file__).parent)
    return {**found, **({"commit": commit} if commit else {})}


def _git_commit(folder: Path) -> str:
    """Commit of a source checkout, with `+changes` when files differ from it; empty when installed otherwise."""
    git = shutil.which("git")
    if git is None or not (folder.parent.parent / ".git").exists():
        return ""
    head = subprocess.run([git, "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    status = subprocess.run(
        [git, "-C", str(folder), "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False
    )
    return head.stdout.strip() + ("+changes" if status.stdout.strip() else "")


# --- the printed form


def show(path: Path) -> None:
    """Print a receipt's short form to stdout."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    figures = tree["figures"]
    out.print(Text(f"receipt of {tree['name']}: {tree['status']} {tree['reason']}".rstrip(), style="bold"))
    base = Table(show_edge=False, pad_edge=False)
    for title in ("base", "format", "from", "tensors", "parameters", "bytes"):
        base.add_column(title)
    for row in tree["base"]["tensors"]:
        size = format_bytes(row["bytes"])
        base.add_row(
            row["class"], row["format"], row["dtype"], str(row["count"]), format_count(row["parameters"]), size
        )
    out.print(base)
    table = Table(show_edge=False, pad_edge=False)
    for title in ("trains", "parameters", "moved", "no gradient", "formula"):
        table.add_column(title)
    for row, moved in zip(tree["trainable"], tree["moved"], strict=True):
        table.add_row(
            row["class"], format_count(row["parameters"]), f"{moved['moved']}/{moved['total']}",
            str(len(moved["no_gradient"])), row["formula"],
        )  # fmt: skip
    out.print(table)
    lines = [
        f"steps {figures['steps']} ({figures['skipped_bad']} bad, {figures['skipped_empty']} empty), rows "
        f"{figures['rows']}, tokens {figures['tokens']}, label tokens {figures['label_tokens']}",
        f"loss {_number(figures['first_loss'])} -> {_number(figures['final_loss'])}, largest gradient norm "
        f"{_number(figures['largest_grad_norm'])}",
        f"{figures['tokens_per_s']:.0f} tokens/s, {format_seconds(figures['train_s'])}, peak memory "
        f"{format_bytes(figures['peak_rss_bytes'])}",
    ]
    if figures["utilisation"] is not None:
        lines.append(f"{figures['flop_per_s'] / 1e9:.0f} GFLOP/s in the middle step, {figures['utilisation']:.1%} of what "
                     f"the machine's matrix product reaches ({figures['matmul_flops_per_s'] / 1e9:.0f} GFLOP/s)")  # fmt: skip
    for first in tree["data"]["first_rows"][:1]:
        lines.append(f"row {first['row']} trains on {first['label_tokens']} tokens: {first['labels']}")
    if "adapter" in tree:
        lines.append(f"frozen base verified; adapter {tree['adapter']['path']} ({tree['adapter']['xxh3_128']})")
    lines += [f"warning: {text}" for text in tree["warnings"]]
    for line in lines:
        out.print(Text("  " + line))
    if tree["devices"] is not None:
        show_devices(tree["devices"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
