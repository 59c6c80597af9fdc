"""Results side by side, and on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table

from lamella.errors import UserError
from lamella.eval.metrics import MACRO_RULE, Interval, paired_difference
from lamella.eval.run import SystemResult
from lamella.eval.task import Task
from lamella.files import write_text


def compare_table(results: Sequence[SystemResult]) -> Group:
    """Two tables with one row per system: macro-F1 by tenant; averages over tenants, and answers without a label.

    The tables are as wide as they need to be; figures are never cut.
    """
    first = results[0].metrics
    assert all(r.metrics.rows == first.rows for r in results), "systems in one table must answer the same rows"
    return Group(tenant_table(results), average_table(results))


def tenant_table(results: Sequence[SystemResult]) -> Table:
    """Macro-F1 with 95 % interval per tenant and on average."""
    first = results[0].metrics
    headings = [f"{t}\n{m.rows} rows\n{len(m.labels)} labels" for t, m in first.tenants.items()]
    rows = [
        [r.name, *(_two_lines(r.metrics.tenants[t].macro_f1) for t in first.tenants), _two_lines(r.metrics.average)]
        for r in results
    ]
    title = f"macro-F1 [95 % interval over documents], {first.rows} rows"
    return _table(title, ["system", *headings, "average"], rows)


def average_table(results: Sequence[SystemResult]) -> Table:
    """Averages over tenants with 95 % intervals; accuracy on answered rows; answers without a label; time."""
    rows = []
    for result in results:
        m = result.metrics
        answered = "-" if m.accuracy_answered is None else _figure(m.accuracy_answered)
        counts = (f"{n} ({100 * n / m.rows:.1f} %)" if n else "0" for n in (m.invalid, m.truncated, m.empty))
        rows.append([result.name, str(m.average_accuracy), str(m.average_micro_f1), answered, *counts,
                     f"{1000 * result.seconds_per_row:.1f}"])  # fmt: skip
    title = "averages over tenants [95 % interval]; invalid, truncated and empty answers are wrong"
    headings = ["system", "accuracy", "micro-F1", "accuracy\nanswered", "invalid", "truncated", "empty", "ms/row"]
    return _table(title, headings, rows)


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for n, heading in enumerate(headings):
        table.add_column(heading, justify="right" if n else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    measured = Console(width=10_000)
    table.width = max(Measurement.get(measured, measured.options, table).maximum, len(title))
    return table


def _figure(value: float) -> str:
    return f"{value:.3f}".removeprefix("0") if value < 1 else f"{value:.3f}"


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
                "warnings": r.warnings,
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
        write_text(folder / "predictions.jsonl", lines)
        write_text(folder / "metrics.json", document)
    except OSError as error:
        raise UserError(
            f"results cannot be written: {error}", fix="give a writable folder with -o", path=folder
        ) from error
