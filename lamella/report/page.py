"""A run's folder as one HTML page that needs nothing else: no scripts, fonts or requests.

Reads `metrics.jsonl`, `validation.jsonl`, `receipt.json`, `config.json` and `eval/metrics.json` of the run; what is not
there is left out and named at the page's end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lamella.errors import UserError
from lamella.files import write_text
from lamella.report.charts import Tick, line_chart, running_mean
from lamella.trace import summary as devices
from lamella.units import format_bytes, format_count, format_seconds

MEAN = "average"
"""Name under which the mean over tenants is shown."""
COLOURS = 6
"""Colours of systems in `page.html`: c0 to c5, in order of appearance."""


@dataclass(frozen=True)
class Table:
    """A table of strings; `numeric` holds the columns set to the right; `facts` marks name-value pairs."""

    rows: list[list[str]]
    head: list[str] = field(default_factory=list)
    numeric: frozenset[int] = frozenset()
    facts: bool = False


@dataclass(frozen=True)
class Part:
    """A titled piece of a nested JSON value."""

    title: str
    tables: list[Table]


def write_report(run_dir: Path, target: Path | None = None) -> Path:
    """Write the page of the run in `run_dir` to `target` (default `<run_dir>/report.html`).

    Raises:
        UserError: the folder is missing, holds nothing to show, or a file in it is not JSON.
    """
    if not run_dir.is_dir():
        raise UserError("no such folder", fix="give the folder of a run, such as runs/demo", path=run_dir)
    html = render(run_dir)
    return write_text(target or run_dir / "report.html", html)


def render(run_dir: Path) -> str:
    """The page's HTML."""
    metrics = _read_lines(run_dir / "metrics.jsonl")
    validation = _read_lines(run_dir / "validation.jsonl")
    receipt = _read_object(run_dir / "receipt.json")
    config = _read_object(run_dir / "config.json")
    measured = _read_object(run_dir / "eval" / "metrics.json")
    if not (metrics or receipt or measured):
        raise UserError("nothing to report on", fix="a run's folder holds metrics.jsonl and receipt.json", path=run_dir)
    have = {"metrics.jsonl": metrics, "receipt.json": receipt, "config.json": config, "eval/metrics.json": measured}
    loss, charts = _training_charts(metrics, validation)
    status = str(receipt.get("status", "")) if receipt else ""
    f1 = _f1(measured) if measured else None
    env = Environment(
        loader=PackageLoader("lamella.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    env.globals |= {name: getattr(env.get_template("macros.html").module, name) for name in ("plot", "table")}
    return env.get_template("page.html").render(
        title=str((config or {}).get("name") or run_dir.name),
        subtitle=_subtitle(config, metrics),
        status=status,
        status_good=status.lower() in ("ok", "complete", "completed", "done", "passed", "finished"),
        tiles=_tiles(metrics, receipt, f1),
        f1=f1,
        loss=loss,
        charts=charts,
        training_note=_training_note(metrics),
        devices=_devices(metrics, receipt),
        receipt=parts_of({k: v for k, v in receipt.items() if k != "devices" and (k != "config" or not config)})
        if receipt
        else [],
        receipt_json=json.dumps(receipt, indent=2, ensure_ascii=False),
        config=parts_of(config) if config else [],
        missing=[name for name, value in have.items() if not value],
    )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The file's whole lines. A last one without its newline is still being written, or was cut by a kill: left out."""
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:  # not JSON, or not UTF-8
                raise UserError(
                    f"not JSON: {error}", fix="repair or delete the line", path=path, line=number
                ) from error
    return rows


def _read_object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(
            f"not JSON: {error.msg}", fix="repair or delete the file", path=path, line=error.lineno
        ) from error
    return value if isinstance(value, dict) else {"value": value}


def _column(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Values of a column; NaN where a row has none."""
    return [float(v) if isinstance(v := row.get(name), int | float) else math.nan for row in rows]


def _finite(values: Iterable[float]) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def _training_charts(metrics: list[dict[str, Any]], validation: list[dict[str, Any]]) -> tuple[Any, list[Any]]:
    steps = _column(metrics, "step")
    losses = _column(metrics, "loss")
    window = max(1, len(steps) // 20)
    loss_chart = None
    if len(_finite(losses)) == len(losses):
        loss_chart = line_chart(
            f"Loss per label token; thin: each step, thick: mean of {window}", steps,
            {"raw": losses, "mean": running_mean(losses, window)}, x_label="step",
        )  # fmt: skip
    else:
        title = "Loss per label token (steps without a finite loss are left out)"
        loss_chart = line_chart(title, steps, {"raw": losses}, x_label="step")
    charts = [
        line_chart("Memory of the process (RSS), MB", steps, {"rss": _column(metrics, "rss_bytes")}, x_label="step",
                   from_zero=True, divisor=1e6),
        line_chart("Tokens per second", steps, {"rate": _column(metrics, "tokens_per_s")}, x_label="step",
                   from_zero=True),
        line_chart("Gradient norm before clipping", steps, {"norm": _column(metrics, "grad_norm")}, x_label="step",
                   from_zero=True),
        line_chart("Learning rate, 1e-4", steps, {"rate": _column(metrics, "learning_rate")}, x_label="step",
                   from_zero=True, divisor=1e-4),
    ]  # fmt: skip
    held_out = line_chart("Validation loss", _column(validation, "step"), {"validation": _column(validation, "loss")},
                          x_label="step")  # fmt: skip
    return loss_chart, [chart for chart in (held_out, *charts) if chart]


def _training_note(metrics: list[dict[str, Any]]) -> str:
    if not metrics:
        return ""
    tokens, labels = sum(_finite(_column(metrics, "tokens"))), sum(_finite(_column(metrics, "label_tokens")))
    seconds = sum(_finite(_column(metrics, "step_s")))
    return (
        f"{len(metrics)} steps, {format_count(tokens)} tokens, {format_count(labels)} of them labels, "
        f"{format_seconds(seconds)}. The horizontal axis is the step."
    )


def _devices(metrics: list[dict[str, Any]], receipt: dict[str, Any] | None) -> dict[str, Any] | None:
    """What each device did; from the receipt, which knows their names, or, while the run goes on, from the steps."""
    found = (receipt or {}).get("devices") or devices.summarise(metrics)
    if not isinstance(found, dict):
        return None
    words = [f"Bottleneck: {found['bottleneck']}.", *(f"{text[:1].upper()}{text[1:]}." for text in found["findings"])]
    table = Table(devices.rows_of(found), list(devices.HEAD), frozenset({1, 2, 3, 5, 6}))
    return {"table": table, "note": " ".join(words), "links": devices.links_of(found)}


def _subtitle(config: dict[str, Any] | None, metrics: list[dict[str, Any]]) -> str:
    words = []
    if config and config.get("store"):
        words.append(f"store {Path(str(config['store'])).name}")
    lora = (config or {}).get("lora")
    if isinstance(lora, dict) and "rank" in lora:
        words.append(f"LoRA rank {lora['rank']}")
    if metrics:
        words.append(f"{len(metrics)} steps")
    return ", ".join(words)


def _tiles(
    metrics: list[dict[str, Any]], receipt: dict[str, Any] | None, f1: dict[str, Any] | None
) -> list[dict[str, str]]:
    tiles = []
    if f1:
        for row in f1["rows"]:
            if row["mean"]:
                tiles += [{"value": f"{m['value']:.2f}", "label": f"macro-F1, {m['mode']}"} for m in row["marks"]]
    tokens, seconds = sum(_finite(_column(metrics, "tokens"))), sum(_finite(_column(metrics, "step_s")))
    if tokens and seconds:
        tiles.append({"value": format_count(tokens / seconds), "label": "tokens per second"})
        tiles.append({"value": format_seconds(seconds), "label": "training"})
    peak = _find(receipt or {}, "peak_rss_bytes") or max(_finite(_column(metrics, "rss_bytes")), default=0)
    if peak:
        tiles.append({"value": format_bytes(float(peak)), "label": "peak memory (RSS)"})
    return tiles


def _f1(measured: dict[str, Any]) -> dict[str, Any]:
    """The macro-F1 chart from what `lamella.eval.table.write_results` wrote: a dot and an interval per system."""
    systems = measured["systems"]
    tenants = list(dict.fromkeys(tenant for system in systems for tenant in system["tenants"]))
    rows = []
    for tenant in [*tenants, MEAN]:
        marks = []
        for n, system in enumerate(systems):
            if tenant == MEAN:
                figure = system.get("average")
            else:
                figure = system["tenants"].get(tenant, {}).get("macro_f1")
            if figure is None:
                continue
            low, high = figure.get("low"), figure.get("high")
            title = f"{system['name']}: {figure['value']:.3f}" + (
                f" [{low:.3f}, {high:.3f}]" if high is not None else ""
            )
            marks.append(
                {"mode": system["name"], "value": figure["value"], "title": title,
                 "at": round(100 * figure["value"], 2),
                 "low": None if low is None else round(100 * low, 2),
                 "high": None if high is None else round(100 * high, 2), "colour": n % COLOURS}
            )  # fmt: skip
        rows.append({"name": tenant, "mean": tenant == MEAN, "marks": marks})
    head = ["", *[system["name"] for system in systems]]
    cells = [[r["name"], *[m["title"].removeprefix(f"{m['mode']}: ") for m in r["marks"]]] for r in rows]
    count = systems[0].get("rows") if systems else None
    note = "Dot: the figure; bar: its 95 % bootstrap interval over documents."
    return {
        "modes": [{"name": s["name"], "colour": n % COLOURS} for n, s in enumerate(systems)],
        "rows": rows,
        "ticks": [Tick(100 * x, f"{x:g}") for x in (0, 0.2, 0.4, 0.6, 0.8, 1)],
        "table": Table(cells, head, frozenset(range(1, len(head)))),
        "note": f"{count} test rows. {note}" if count else note,
    }


def _find(tree: Any, key: str) -> Any:
    """First value under `key`, breadth first in nested objects; None without."""
    level = [tree]
    while level:
        for node in level:
            if key in node:
                return node[key]
        level = [child for node in level for child in node.values() if isinstance(child, dict)]
    return None


def _say(name: str, value: Any) -> str:
    """A value for people, by the unit in its name."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, int | float):
        if name.endswith("bytes") or name == "rss":
            return f"{format_bytes(float(value))} ({value:,} bytes)"
        if name.endswith("_s") and not name.endswith("per_s"):
            return format_seconds(float(value))
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(v, str | int | float) for v in value):
        return ", ".join(_say("", v) for v in value) or "none"
    return json.dumps(value, ensure_ascii=False)


def _words(name: str) -> str:
    for ending in ("_bytes_per_s", "_per_s", "_bytes", "_s"):
        if name.endswith(ending) and name != ending:
            name = name.removesuffix(ending) + (" per second" if ending.endswith("per_s") else "")
            break
    return name.replace("_", " ")


def _rows_table(rows: list[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    numeric = frozenset(
        i
        for i, c in enumerate(columns)
        if all(isinstance(r.get(c), int | float | None) and not isinstance(r.get(c), bool) for r in rows)
    )

    def cell(row: dict[str, Any], column: str) -> str:
        value = row.get(column)
        if column.endswith("bytes") and isinstance(value, int | float):
            return format_bytes(float(value))
        return _say(column, value)

    return Table([[cell(r, c) for c in columns] for r in rows], [_words(c) for c in columns], numeric)


def parts_of(tree: dict[str, Any], title: str = "") -> list[Part]:
    """A nested JSON object as titled tables: plain values first, then each inner object and list of objects.

    Empty texts are left out.
    """
    facts = []
    inner: list[Part] = []
    for key, value in tree.items():
        if value == "":
            continue
        name = f"{title} / {_words(key)}" if title else _words(key)
        if isinstance(value, dict) and value:
            plain = all(not isinstance(v, dict | list) for v in value.values())
            same = all(isinstance(v, dict) and v for v in value.values())
            if same and len({tuple(v) for v in value.values() if isinstance(v, dict)}) == 1 and len(value) > 1:
                inner.append(Part(name, [_rows_table([{"name": k, **v} for k, v in value.items()])]))
            elif plain and len(value) <= 2 and title:
                facts.append([_words(key), ", ".join(f"{_words(k)} {_say(k, v)}" for k, v in value.items())])
            else:
                inner += parts_of(value, name)
        elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            inner.append(Part(name, [_rows_table(value)]))
        else:
            facts.append([_words(key), _say(key, value)])
    own = [Part(title, [Table(facts, facts=True)])] if facts else []
    return own + inner
