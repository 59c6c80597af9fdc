"""Results side by side, and on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from lamella.errors import UserError
from lamella.eval.metrics import MACRO_RULE, Interval, paired_difference
from lamella.eval.run import SystemResult
from lamella.eval.task import Task


def compare_table(results: Sequence[SystemResult]) -> Table:
    """One row per system: macro-F1 with 95 % interval per tenant and on average, accuracy, answers without a label.

    The table is as wide as it needs to be; figures are never cut.
    """
    first = results[0].metrics
    assert all(r.metrics.rows == first.rows for r in results), "systems in one table must answer the same rows"
    title = f"macro-F1 [95 % interval over documents], {first.rows} rows"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("system", no_wrap=True)
    for tenant, metrics in first.tenants.items():
        table.add_column(f"{tenant}\n{metrics.rows} rows\n{len(metrics.labels)} labels", justify="right", no_wrap=True)
    headings = ["average", "accuracy", "invalid", "truncated", "ms/row"]
    with_empty = any(r.metrics.empty for r in results)
    if with_empty:
        headings.insert(-1, "empty")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        m = result.metrics
        counts = [m.invalid, m.truncated, *([m.empty] if with_empty else [])]
        table.add_row(
            result.name, *(_two_lines(m.tenants[t].macro_f1) for t in first.tenants), _two_lines(m.average),
            f"{m.accuracy:.3f}", *(f"{n}\n{100 * n / m.rows:.1f} %" if n else "0" for n in counts),
            f"{1000 * result.seconds_per_row:.1f}",
        )  # fmt: skip
    measured = Console(width=10_000)
    table.width = Measurement.get(measured, measured.options, table).maximum
    return table


def _two_lines(figure: Interval) -> str:
    value, _, rest = str(figure).partition(" ")
    return f"{value}\n{rest}"


def differences(task: Task, results: Sequence[SystemResult]) -> dict[str, dict[str, Any]]:
    """Paired differences of every later system to the first one: name -> intervals."""
    first = results[0]
    return {
        other.name: asdict(
            paired_difference(
                first.predictions,
                other.predictions,
                task.labels,
                resamples=first.metrics.resamples,
                seed=first.metrics.seed,
            )
        )
        for other in results[1:]
    }


def to_json(task: Task, results: Sequence[SystemResult]) -> dict[str, Any]:
    """What `metrics.json` holds."""
    return {
        "task": task.config.name,
        "rule": MACRO_RULE,
        "labels": {tenant: list(names) for tenant, names in task.labels.items()},
        "notes": list(task.notes),
        "systems": [
            {
                "name": r.name,
                "mode": r.mode,
                "shots": r.shots,
                "seconds": r.seconds,
                "seconds_per_row": r.seconds_per_row,
                **r.metrics.to_json(),
                "warnings": r.metrics.warnings,
            }
            for r in results
        ],
        "difference_to_first": differences(task, results),
    }


def write_results(
    folder: Path, task: Task, results: Sequence[SystemResult], facts: dict[str, Any] | None = None
) -> None:
    """Write `predictions.jsonl` (a line per system and row) and `metrics.json`, each whole or not at all.

    Args:
        facts: what else the reader must know (store, engine settings); goes into `metrics.json`.

    Raises:
        UserError: the folder cannot be written.
    """
    lines = (
        json.dumps({"system": r.name, **asdict(p), "correct": p.correct}, ensure_ascii=False) + "\n"
        for r in results
        for p in r.predictions
    )
    document = json.dumps({**(facts or {}), **to_json(task, results)}, ensure_ascii=False, indent=1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(folder / "predictions.jsonl", lines)
        _write_atomically(folder / "metrics.json", [document])
    except OSError as error:
        raise UserError(
            f"results cannot be written: {error}", fix="give a writable folder with -o", path=folder
        ) from error


def _write_atomically(path: Path, parts: Iterable[str]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
