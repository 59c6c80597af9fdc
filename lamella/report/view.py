"""One run as the page shows it: a verdict, tiles, and sections of charts and tables."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lamella.errors import UserError
from lamella.forecast.compare import compare_run
from lamella.report import charts
from lamella.report.collect import Columns, RunFiles, last_line, mark_of, read_object
from lamella.report.tables import Table, parts_of, say
from lamella.trace import summary as devices
from lamella.units import format_bytes, format_count, format_seconds

GOOD = ("ok", "complete", "completed", "done", "passed", "finished")
STALE_S = 120.0
"""A run without a receipt whose metrics have not grown for so long (and for ten steps) has stopped."""


def section(
    key: str, title: str, found: list[Any], tables: list[Table] | None = None, note: str = ""
) -> dict[str, Any]:
    """A part of the page; `found`: charts, None left out."""
    return {"id": key, "title": title, "note": note, "charts": [c for c in found if c is not None],
            "tables": [t.to_json() for t in tables or [] if t.rows]}  # fmt: skip


def detail(run: RunFiles, points: int = 1000, now_s: float | None = None) -> dict[str, Any]:
    """All that the page shows of a run."""
    seen = _guarded("devices", "Devices", lambda: devices_of(run))
    seen = None if isinstance(seen, dict) and "charts" in seen else seen
    parts: tuple[tuple[str, str, Callable[[], dict[str, Any]]], ...] = (
        ("training", "Training", lambda: training(run, points)),
        ("devices", "Devices", lambda: time_of_devices(run, seen)),
        ("planned", "Planned and measured", lambda: planned(run)),
        ("topology", "Machine", lambda: topology(run, seen)),
        ("memory", "Memory", lambda: memory(run)),
        ("experts", "Expert load", lambda: experts(run)),
        ("settings", "Settings", lambda: settings(run)),
        ("quality", "Quality", lambda: quality(run)),
        ("receipt", "Receipt", lambda: receipt(run)),
    )
    sections = [_guarded(*part) for part in parts]
    return {
        "name": run.name,
        "title": str(run.config.get("name") or run.name),
        "subtitle": subtitle(run),
        "version": run.version,
        **_head(run, seen, now_s),
        "sections": [s for s in sections if s["charts"] or s["tables"]],
        "missing": run.missing,
    }


UNEXPECTED = (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError)
"""What code meets in JSON that is otherwise than a run writes it: by another version, or by hand."""


def _guarded(key: str, title: str, make: Callable[[], Any]) -> Any:
    """A part of the page; where the files are otherwise than expected, one that says so."""
    try:
        return make()
    except UNEXPECTED as error:
        return section(
            key, title, [], [Table([["not shown", f"the files are not as expected: {error!r}"]], facts=True)]
        )


def _head(run: RunFiles, seen: dict[str, Any] | None, now_s: float | None) -> dict[str, Any]:
    try:
        return {**verdict(run, seen, now_s), "tiles": tiles(run)}
    except UNEXPECTED as error:
        return {
            "status": "unclear",
            "good": None,
            "verdict": [f"the files are not as expected: {error!r}"],
            "tiles": [],
        }


def summary(folder: Path, now_s: float | None = None) -> dict[str, Any]:
    """A run's line in the list: from its small files and the last line of its metrics."""
    now_s = time.time() if now_s is None else now_s
    line = last_line(folder / "metrics.jsonl")
    found: dict[str, Any] = {"name": folder.name, "step": line.get("step"), "loss": charts.number(line.get("loss")),
                             "tokens_per_s": charts.number(line.get("tokens_per_s")), "note": ""}  # fmt: skip
    tree: dict[str, dict[str, Any]] = {}
    for name in ("receipt.json", "config.json", "eval/metrics.json"):
        path = folder / name
        try:
            tree[name] = read_object(path) if mark_of(path) is not None else {}
        except UserError as error:
            tree[name], found["note"] = {}, str(error)
    try:
        return found | _summary(tree, line, folder, now_s)
    except UNEXPECTED as error:
        return found | {"status": "unclear", "steps": None, "store": "", "rank": None, "f1": None, "updated": None,
                        "note": f"the files are not as expected: {error!r}"}  # fmt: skip


def _summary(tree: dict[str, dict[str, Any]], line: dict[str, Any], folder: Path, now_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    receipt, config = tree["receipt.json"], tree["config.json"]
    mark = mark_of(folder / "metrics.jsonl")
    touched_s = mark[0] / 1e9 if mark else 0.0
    found["status"] = status_of(receipt, touched_s, line.get("step_s"), now_s)
    found["steps"] = _steps_planned(receipt, config, {})
    lora = config.get("lora") or {}
    found["store"] = Path(str(config.get("store", ""))).name
    found["rank"] = lora.get("rank")
    systems = tree["eval/metrics.json"].get("systems") or []
    found["f1"] = charts.number(max((s["average"]["value"] for s in systems if "average" in s), default=math.nan))
    found["updated"] = touched_s or None
    return found


def status_of(receipt: dict[str, Any], touched_s: float, step_s: float | None, now_s: float) -> str:
    """The receipt's word; without one "running", or "stopped" where metrics have long not grown."""
    if receipt.get("status"):
        return str(receipt["status"])
    if not touched_s:
        return "not started"
    return "running" if now_s - touched_s < max(STALE_S, 10 * (step_s or 0.0)) else "stopped"


def _steps_planned(receipt: dict[str, Any], config: dict[str, Any], plan: dict[str, Any]) -> int | None:
    found = (receipt.get("figures") or {}).get("steps_planned") or (plan.get("figures") or {}).get("steps")
    found = found or (config.get("train") or {}).get("steps")
    return int(found) if found else None


# ---- the head --------------------------------------------------------------------------------------


def devices_of(run: RunFiles) -> dict[str, Any] | None:
    """What each device did: from the receipt, which knows their names, or, while the run goes on, from its last steps."""
    found = run.receipt.get("devices") or devices.summarise(run.metrics.last)
    return found if isinstance(found, dict) else None


def verdict(run: RunFiles, seen: dict[str, Any] | None, now_s: float | None = None) -> dict[str, Any]:
    """Status, and a line of what holds the run up, how long it still takes, and what it has cost."""
    mark = mark_of(run.metrics.path)
    steps = run.metrics.column("step_s")
    recent = statistics.median(steps[-20:]) if len(steps) else None
    status = status_of(run.receipt, mark[0] / 1e9 if mark else 0.0, recent, time.time() if now_s is None else now_s)
    words = []
    if run.receipt.get("reason"):
        words.append(str(run.receipt["reason"]))
    if seen is not None:
        words.append(f"bottleneck: {seen['bottleneck']}")
    planned_steps = _steps_planned(run.receipt, run.config, run.plan)
    done = int(run.metrics.column("step")[-1]) if len(run.metrics) else 0
    if status == "running" and planned_steps and recent:
        left_s = max(planned_steps - done, 0) * recent
        words.append(f"step {done:,} of {planned_steps:,}, {format_seconds(left_s)} left")
    elif done:
        words.append(f"{done:,} steps" + (f" of {planned_steps:,}" if planned_steps and planned_steps != done else ""))
    spent_s = float(np.nansum(steps)) if len(steps) else 0.0
    price = (run.plan.get("money") or {}).get("usd_per_hour")
    if price and spent_s:
        words.append(f"{spent_s / 3600 * price:.2f} USD so far at {price:g} USD an hour")
    elif spent_s:
        words.append(f"{format_seconds(spent_s)} of training; no price known")
    return {"status": status, "good": status.lower() in GOOD if run.receipt.get("status") else None, "verdict": words}


def subtitle(run: RunFiles) -> str:
    """Store, adapter, versions."""
    words = []
    if run.config.get("store"):
        words.append(f"store {Path(str(run.config['store'])).name}")
    lora = run.config.get("lora")
    if isinstance(lora, dict) and "rank" in lora:
        words.append(f"LoRA rank {lora['rank']}")
    if run.receipt.get("written"):
        words.append(f"ended {run.receipt['written']}")
    return ", ".join(words)


def tiles(run: RunFiles) -> list[dict[str, str]]:
    """The figures at the top."""
    found = []
    for system in (run.measured.get("systems") or [])[:6]:
        if "average" in system:
            found.append({"value": f"{system['average']['value']:.2f}", "label": f"macro-F1, {system['name']}"})
    tokens, seconds = (float(np.nansum(run.metrics.column(name))) for name in ("tokens", "step_s"))
    if tokens and seconds:
        found.append({"value": format_count(tokens / seconds), "label": "tokens per second"})
        found.append({"value": format_seconds(seconds), "label": "training"})
    share = run.metrics.column("utilisation")
    if np.isfinite(share).any():
        found.append({"value": f"{float(np.nanmedian(share)):.0%}", "label": "of the matmul rate"})
    figures = run.receipt.get("figures") or {}
    rss = run.metrics.column("rss_bytes")
    peak = figures.get("peak_rss_bytes") or (float(np.nanmax(rss)) if np.isfinite(rss).any() else 0)
    if peak:
        found.append({"value": format_bytes(float(peak)), "label": "peak memory (RSS)"})
    loss = run.metrics.column("loss")
    good = loss[np.isfinite(loss)]
    if len(good):
        found.append({"value": f"{good[-min(10, len(good)) :].mean():.3f}", "label": "loss (last 10 steps)"})
    return found


# ---- sections --------------------------------------------------------------------------------------


def training(run: RunFiles, points: int) -> dict[str, Any]:
    """Loss and what goes with it."""
    return section("training", "Training", series_of(run.metrics, run.validation, points), note=_training_note(run))


def series_of(
    metrics: Columns, validation: Columns, points: int, first: float = -math.inf, last: float = math.inf
) -> list[Any]:
    """Charts over steps, in full where a part of them has few enough."""
    step = metrics.column("step")
    inside = (step >= first) & (step <= last)
    x = step[inside]

    def column(name: str) -> charts.Floats:
        return metrics.column(name)[inside]

    loss = column("loss")
    window = max(1, len(loss) // 50)
    shown = {"each step": loss, f"mean of {window}": running_mean(loss, window)} if window > 1 else {"each step": loss}
    found = [charts.lines("Loss per label token", x, shown, points=points, key="loss")]
    v = validation.column("step")
    v_inside = (v >= first) & (v <= last)
    found.append(
        charts.lines("Validation loss", v[v_inside], {"validation": validation.column("loss")[v_inside]}, points=points)
    )
    for title, name, unit, zero in (
        ("Learning rate", "learning_rate", "", True), ("Gradient norm before clipping", "grad_norm", "", True),
        ("Tokens per second", "tokens_per_s", "", True), ("Memory of the process (RSS)", "rss_bytes", "B", True),
    ):  # fmt: skip
        found.append(charts.lines(title, x, {title.split(" (")[0].lower(): column(name)}, unit=unit, points=points, zero=zero,
                                  key=name))  # fmt: skip
    return [chart for chart in found if chart is not None]


def running_mean(values: charts.Floats, window: int) -> charts.Floats:
    """Mean of the last `window` finite values at each place."""
    good = np.isfinite(values)
    sums = np.cumsum(np.where(good, values, 0.0))
    counts = np.cumsum(good)
    sums[window:] = sums[window:] - sums[:-window].copy()
    counts[window:] = counts[window:] - counts[:-window].copy()
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, sums / counts, np.nan)


def _training_note(run: RunFiles) -> str:
    if not len(run.metrics):
        return ""
    tokens, labels, seconds = (float(np.nansum(run.metrics.column(n))) for n in ("tokens", "label_tokens", "step_s"))
    skipped = int((~np.isfinite(run.metrics.column("loss"))).sum())
    said = f"{len(run.metrics):,} steps, {format_count(tokens)} tokens, {format_count(labels)} of them labels, {format_seconds(seconds)}."
    return said + (f" {skipped:,} steps have no finite loss and are left out." if skipped else "")


def time_of_devices(run: RunFiles, seen: dict[str, Any] | None) -> dict[str, Any]:
    """A lane per device: shares of its time by cause, and the last steps piece by piece."""
    found: list[Any] = []
    note = ""
    tables = []
    if seen is not None:
        names = [f"rank {d['rank']} {d['device']}".strip() for d in seen["each"]]
        parts: dict[str, list[float]] = {"busy": [d["busy"] for d in seen["each"]]}
        for kind, word in (("wait", "waits for"), ("move", "moves over")):
            for cause in dict.fromkeys(c for d in seen["each"] for c in d[kind]):
                parts[f"{word} {cause}"] = [d[kind].get(cause, 0.0) for d in seen["each"]]
        parts["other"] = [d["other"] for d in seen["each"]]
        found.append(charts.stack("Time of each device by cause", names, parts, unit="share"))
        note = " ".join([f"Bottleneck: {seen['bottleneck']}.", *(f"{t[:1].upper()}{t[1:]}." for t in seen["findings"])])
        tables.append(Table(devices.rows_of(seen), list(devices.HEAD), frozenset({1, 2, 3, 5, 6}), caption="Devices"))
    found.append(_lanes(run.trace))
    return section("devices", "Devices", found, tables, note)


def _lanes(trace: dict[str, Any]) -> Any:
    events = trace.get("traceEvents") or []
    rank_of = {e["pid"]: e["args"]["name"] for e in events if e.get("ph") == "M" and e.get("name") == "process_name"}
    lane_of = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("ph") == "M" and e.get("name") == "thread_name"
    }
    keys = sorted({(e["pid"], e["tid"]) for e in events if e.get("ph") == "X"})
    names = [f"{rank_of.get(pid, pid)}: {lane_of.get((pid, tid), tid)}" for pid, tid in keys]
    spans = [
        (keys.index((e["pid"], e["tid"])), e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, str(e.get("cat", "")), str(e["name"]))
        for e in events if e.get("ph") == "X"
    ]  # fmt: skip
    return charts.lanes("The last steps, piece by piece", names, spans)


def planned(run: RunFiles) -> dict[str, Any]:
    """Planned beside measured."""
    if not run.plan:
        return section("planned", "Planned and measured", [])
    try:
        found = compare_run(run.folder)
    except UserError as error:
        return section("planned", "Planned and measured", [], [Table([["not compared", str(error)]], facts=True)])
    rows = [(f"{line.where}: {line.what}", line.unit, line.planned, line.measured) for line in found.summary]
    pieces = Table(
        [[x.where, x.what, charts.shown(x.planned, x.unit), charts.shown(x.measured, x.unit), "-" if x.ratio is None else f"{x.ratio:.2f}x"]
         for x in found.pieces[:12]],
        ["where", "what", "planned", "measured", "ratio"], frozenset((2, 3, 4)), caption="Pieces of a step, largest misses first",
    )  # fmt: skip
    chart = charts.pairs("Measured over planned", rows)
    note = f"Medians of {found.steps} steps, {found.traced_steps} of them piece by piece."
    return section(
        "planned",
        "Planned and measured",
        [chart],
        [pieces],
        " ".join([note, *(f"Not compared: {m}." for m in found.missing)]),
    )


def topology(run: RunFiles, seen: dict[str, Any] | None) -> dict[str, Any]:
    """Hosts, devices and what joins them, with rates."""
    machine = run.plan.get("machine") or {}
    hosts, held = machine.get("hosts") or [], machine.get("devices") or []
    if not hosts:
        return section("topology", "Machine", [])
    real = machine.get("source") == "measured" and not any("rough" in str(n) for n in machine.get("notes") or [])
    host_names = [_unique(h["name"], k, len(hosts)) for k, h in enumerate(hosts)]
    names = [f"{d['name']} #{k}" if len(held) > 1 else d["name"] for k, d in enumerate(held)]
    nodes = [{"name": n, "group": "host", "text": f"{h['cores']} cores, {format_bytes(h['ram_bytes'])}"}
             for n, h in zip(host_names, hosts, strict=True)]  # fmt: skip
    nodes += [{"name": n, "group": d["kind"], "text": f"{format_bytes(d['memory_bytes'])}, {d['matmul_flops_per_s'] / 1e12:.2f} TFLOP/s"}
              for n, d in zip(names, held, strict=True)]  # fmt: skip
    by_device = {link["device"]: link for link in machine.get("host_links") or []}
    links = []
    for k, (name, d) in enumerate(zip(names, held, strict=True)):
        link = by_device.get(k)
        rate = (
            f"{link['to_device_bytes_per_s'] / 1e9:.1f} GB/s in, {link['from_device_bytes_per_s'] / 1e9:.1f} out" if link
            else f"{d['memory_bytes_per_s'] / 1e9:.1f} GB/s"
        )  # fmt: skip
        links.append((host_names[d.get("host", 0)], name, rate, real))
    for peer in machine.get("peer_links") or []:
        links.append(
            (
                names[peer["a"]],
                names[peer["b"]],
                f"{peer['bytes_per_s'] / 1e9:.1f} GB/s {peer.get('kind', '')}".strip(),
                real,
            )
        )
    for name, h in zip(host_names, hosts, strict=True):
        if h.get("disk"):
            disk = f"disk of {name}"
            nodes.append({"name": disk, "group": "disk", "text": h["disk"].get("kind") or ""})
            seen_rate = next(
                (
                    x["bytes_per_s"]
                    for x in (seen or {}).get("links", [])
                    if x["link"].startswith("disk") and x["bytes_per_s"]
                ),
                None,
            )
            links.append(
                (name, disk, f"{(seen_rate or h['disk']['read_bytes_per_s']) / 1e9:.2f} GB/s", bool(seen_rate) or real)
            )
    note = "" if real else "Rates that were not measured are drawn dashed; lamella probe measures them."
    measured = [[x["link"], charts.shown(x["bytes"], "B"), charts.shown(x["bytes_per_step"], "B"), charts.shown(x["bytes_per_s"], "B/s")]
                for x in (seen or {}).get("links", [])]  # fmt: skip
    table = Table(
        measured,
        ["link", "bytes", "a step", "rate seen"],
        frozenset((1, 2, 3)),
        caption="What went over links in the run",
    )
    return section("topology", "Machine", [charts.graph("Topology", nodes, links)], [table], note)


def _unique(name: str, number: int, count: int) -> str:
    return f"{name} {number}" if count > 1 else name


def memory(run: RunFiles) -> dict[str, Any]:
    """Planned parts of each rank's peak against what there is, and what was measured."""
    ranks = (run.plan.get("figures") or {}).get("ranks") or []
    if not ranks:
        return section("memory", "Memory", [])
    last = run.metrics.last[-1].get("devices") or [] if run.metrics.last else []
    peaks = {d["rank"]: d["peak_bytes"] for d in last if d.get("peak_bytes")}
    names = [f"rank {r['rank']} {r['name']}" for r in ranks]
    order = list(dict.fromkeys(part for r in ranks for part in r["parts"]))
    parts = {part: [float(r["parts"].get(part, 0)) for r in ranks] for part in order}
    chart = charts.stack("Planned peak by part", names, parts, unit="B", limits=[float(r["have"]) for r in ranks])
    rows = [[n, charts.shown(r["need"], "B"), charts.shown(peaks.get(r["rank"]), "B"), charts.shown(r["have"], "B"),
             f"{r['need'] / r['have']:.1%}" if r["have"] else "-"] for n, r in zip(names, ranks, strict=True)]  # fmt: skip
    table = Table(rows, ["rank", "planned peak", "measured peak", "there is", "planned share"], frozenset((1, 2, 3, 4)),
                  caption="Peak memory")  # fmt: skip
    return section("memory", "Memory", [chart], [table])


def experts(run: RunFiles) -> dict[str, Any]:
    """Tokens that each expert saw."""
    load = run.receipt.get("expert_load") or {}
    layers = [(name, counts) for name, counts in load.items() if counts]
    if not layers:
        return section("experts", "Expert load", [])
    width = max(len(counts) for _, counts in layers)
    shares = [[c * len(counts) / max(sum(counts), 1) for c in counts] for _, counts in layers]
    chart = charts.heat(
        "Share of an even load", [f"expert {k}" for k in range(width)], [name for name, _ in layers], shares, ""
    )
    idle = sum(c == 0 for _, counts in layers for c in counts)
    most = max(max(row) for row in shares)
    return section(
        "experts",
        "Expert load",
        [chart],
        note=f"1 is an even share. The busiest expert has {most:.1f}; {idle} never saw a token.",
    )


def settings(run: RunFiles) -> dict[str, Any]:
    """What was asked for beside what was in effect."""
    rows = [
        [str(row["setting"]), say("", row["asked"]), say("", row["in_effect"]), "same" if row.get("ok") else "differs"]
        for row in run.receipt.get("comparison") or []
    ]
    asked = Table(rows, ["setting", "asked", "in effect", ""], caption="Asked and in effect")
    told = [table for part in parts_of(run.config) for table in _titled(part)] if run.config else []
    return section("settings", "Settings", [], [asked, *told])


def _titled(part: Any) -> list[Table]:
    return [Table(t.rows, t.head, t.numeric, t.facts, part.title or "Run") for t in part.tables]


def quality(run: RunFiles) -> dict[str, Any]:
    """F1 per tenant with intervals, before and after."""
    systems = run.measured.get("systems") or []
    if not systems:
        return section("quality", "Quality", [])
    note = f"{systems[0].get('rows', '?')} test rows. Dot: the figure; bar: its 95 % bootstrap interval over documents."
    return section("quality", "Quality", [f1_dots("Macro-F1 per tenant", systems)], note=note)


def f1_dots(title: str, systems: list[dict[str, Any]]) -> Any:
    """A dot and an interval per system and tenant; `systems` as `lamella eval` and `lamella compare` write their metrics."""
    tenants = list(dict.fromkeys(tenant for s in systems for tenant in s.get("tenants", {})))
    series: dict[str, list[Any]] = defaultdict(list)
    for s in systems:
        for tenant in tenants:
            series[s["name"]].append((s.get("tenants", {}).get(tenant) or {}).get("macro_f1"))
        series[s["name"]].append(s.get("average"))
    return charts.dots(title, [*tenants, "average"], series)


def receipt(run: RunFiles) -> dict[str, Any]:
    """What was proven."""
    if not run.receipt:
        return section("receipt", "Receipt", [])
    shown = {k: v for k, v in run.receipt.items() if k not in ("devices", "comparison", "expert_load", "config")}
    tables = [table for part in parts_of(shown) for table in _titled(part)]
    warnings = run.receipt.get("warnings") or []
    return section("receipt", "Receipt", [], tables, " ".join(f"Warning: {w}." for w in warnings))
