"""Charts as small JSON objects, each with the table that says the same; `static/app.js` draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lamella.report.collect import Floats, thinned
from lamella.report.tables import Table
from lamella.units import format_bytes, format_seconds

Chart = dict[str, Any]
NOTHING = 1e-6
"""In any unit: what is planned with less has no ratio."""


def number(value: float | None) -> float | None:
    """A value as JSON can have it: None for NaN, infinities and what is no number."""
    return float(f"{value:.6g}") if isinstance(value, int | float) and -1e300 < value < 1e300 else None


def shown(value: float | None, unit: str) -> str:
    """A value for people."""
    if value is None or not math.isfinite(value):
        return "-"
    if unit == "B":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    if unit == "B/s":
        return f"{format_bytes(value)}/s"
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def lines(
    title: str, x: Floats, series: Mapping[str, Floats], *, unit: str = "", points: int = 1000, zero: bool = False,
    x_name: str = "step", key: str = "",
) -> Chart | None:  # fmt: skip
    """Values over steps; None where nothing is finite.

    Args:
        key: of the columns, where the page can ask for a part in full.
    """
    kept = {name: y for name, y in series.items() if len(y) and np.isfinite(y).any()}
    if not kept:
        return None
    rows = []
    for name, y in kept.items():
        good = y[np.isfinite(y)]
        rows.append(
            [name, f"{len(good):,}", *(shown(float(v), unit) for v in (good[0], good.min(), good.max(), good[-1]))]
        )
    thin_x, thin = thinned(x, list(kept.values()), points)
    drawn = [
        {"name": name, "x": [number(v) for v in thin_x], "y": [number(v) for v in y]}
        for name, y in zip(kept, thin, strict=True)
    ]  # fmt: skip
    table = Table(rows, ["series", "values", "first", "least", "greatest", "last"], frozenset(range(1, 6)))
    return {"kind": "lines", "title": title, "unit": unit, "x_name": x_name, "series": drawn, "zero": zero, "key": key,
            "thinned": len(thin_x) < len(x), "table": table.to_json()}  # fmt: skip


def stack(
    title: str, rows: Sequence[str], parts: Mapping[str, Sequence[float]], *, unit: str, limits: Sequence[float | None] = (),
    limit_name: str = "capacity",
) -> Chart | None:  # fmt: skip
    """Bars made of parts, each with its limit."""
    kept = {name: values for name, values in parts.items() if any(values)}
    if not rows or not kept:
        return None
    head = ["", *kept, "total", *([limit_name] if limits else [])]
    cells = []
    for k, row in enumerate(rows):
        line = [
            row,
            *(shown(values[k], unit) for values in kept.values()),
            shown(sum(v[k] for v in kept.values()), unit),
        ]
        cells.append([*line, shown(limits[k], unit)] if limits else line)
    return {"kind": "stack", "title": title, "unit": unit, "rows": list(rows), "limits": [number(v) for v in limits],
            "limit_name": limit_name, "parts": [{"name": n, "values": [number(v) for v in values]} for n, values in kept.items()],
            "table": Table(cells, head, frozenset(range(1, len(head)))).to_json()}  # fmt: skip


def dots(title: str, groups: Sequence[str], series: Mapping[str, Sequence[Mapping[str, float] | None]]) -> Chart | None:
    """A value with its interval for each series in each group."""
    if not groups or not series:
        return None
    drawn, columns = [], []
    for name, values in series.items():
        triples = [
            None if v is None else [number(v.get("value")), number(v.get("low")), number(v.get("high"))] for v in values
        ]
        drawn.append({"name": name, "values": triples})
        columns.append(["-" if t is None or t[0] is None else _with_interval(t) for t in triples])
    cells = [[group, *(column[k] for column in columns)] for k, group in enumerate(groups)]
    table = Table(cells, ["", *series], frozenset(range(1, len(series) + 1)))
    return {"kind": "dots", "title": title, "groups": list(groups), "series": drawn, "table": table.to_json()}


def _with_interval(t: Sequence[float | None]) -> str:
    value, low, high = t
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def pairs(title: str, rows: Sequence[tuple[str, str, float | None, float | None]]) -> Chart | None:
    """Planned and measured side by side, as ratios; rows of (what, unit, planned, measured)."""
    if not rows:
        return None
    cells = []
    drawn = []
    for what, unit, planned, measured in rows:
        ratio = measured / planned if planned and abs(planned) > NOTHING and measured is not None else None
        cells.append([what, shown(planned, unit), shown(measured, unit), "-" if ratio is None else f"{ratio:.2f}x"])
        if ratio is not None:
            drawn.append(
                {
                    "name": what,
                    "ratio": number(ratio),
                    "planned": shown(planned, unit),
                    "measured": shown(measured, unit),
                }
            )
    table = Table(cells, ["figure", "planned", "measured", "measured over planned"], frozenset((1, 2, 3)))
    return {"kind": "pairs", "title": title, "rows": drawn, "table": table.to_json()}


def lanes(
    title: str, names: Sequence[str], spans: Sequence[tuple[int, float, float, str, str]], most: int = 3000
) -> Chart | None:
    """What each lane did when; spans of (lane, start, end in seconds, cause, name), the longest of them."""
    if not spans:
        return None
    kept = sorted(sorted(spans, key=lambda s: s[1] - s[2])[:most], key=lambda s: s[1])
    causes = list(dict.fromkeys(s[3] for s in kept))
    by_lane = [[name, *("" for _ in causes)] for name in names]
    for k, row in enumerate(by_lane):
        for c, cause in enumerate(causes):
            row[c + 1] = shown(sum(s[2] - s[1] for s in spans if s[0] == k and s[3] == cause), "s")
    table = Table(by_lane, ["lane", *causes], frozenset(range(1, len(causes) + 1)))
    return {"kind": "lanes", "title": title, "lanes": list(names), "causes": causes, "left_out": len(spans) - len(kept),
            "spans": [[s[0], number(s[1]), number(s[2]), causes.index(s[3]), s[4]] for s in kept],
            "table": table.to_json()}  # fmt: skip


def graph(title: str, nodes: Sequence[Mapping[str, str]], links: Sequence[tuple[str, str, str, bool]]) -> Chart | None:
    """Devices and what joins them; links of (a, b, label, whether it is measured)."""
    if not nodes:
        return None
    rows = [[a, b, label, "measured" if measured else "assumed"] for a, b, label, measured in links]
    return {"kind": "graph", "title": title, "nodes": list(nodes),
            "links": [{"a": a, "b": b, "label": label, "measured": measured} for a, b, label, measured in links],
            "table": Table(rows, ["from", "to", "rate", ""]).to_json()}  # fmt: skip


def heat(
    title: str, columns: Sequence[str], rows: Sequence[str], values: Sequence[Sequence[float]], unit: str
) -> Chart | None:
    """A value for each row and column."""
    if not rows or not columns:
        return None
    flat = [[c, r, number(values[r][c])] for r in range(len(rows)) for c in range(len(values[r]))]
    cells = []
    for r, row in enumerate(rows):
        each = [v for v in values[r] if math.isfinite(v)]
        mean = sum(each) / len(each) if each else math.nan
        cells.append([row, *(shown(v, unit) for v in (min(each, default=math.nan), mean, max(each, default=math.nan)))])
    table = Table(cells, ["", "least", "mean", "greatest"], frozenset((1, 2, 3)))
    return {"kind": "heat", "title": title, "columns": list(columns), "rows": list(rows), "values": flat, "unit": unit,
            "table": table.to_json()}  # fmt: skip


def tornado(title: str, rows: Sequence[tuple[str, str, str, float, float]], base: float, unit: str) -> Chart | None:
    """What each input does to a result; rows of (input, low, high, result at low, result at high)."""
    if not rows:
        return None
    ordered = sorted(rows, key=lambda r: abs(r[4] - r[3]))
    cells = [[name, low, high, shown(a, unit), shown(b, unit)] for name, low, high, a, b in reversed(ordered)]
    table = Table(cells, ["input", "low", "high", "result at low", "result at high"], frozenset((1, 2, 3, 4)))
    return {"kind": "tornado", "title": title, "base": number(base), "unit": unit, "table": table.to_json(),
            "rows": [{"name": n, "low": lo, "high": hi, "at_low": number(a), "at_high": number(b)}
                     for n, lo, hi, a, b in ordered]}  # fmt: skip


def curves(title: str, series: Mapping[str, Sequence[Sequence[float]]], *, x_name: str, unit: str) -> Chart | None:
    """Lines of given points (x, y), each series with its own x."""
    kept = {name: points for name, points in series.items() if points}
    if not kept:
        return None
    rows = [
        [name, *(f"{shown(y, unit)} at {x:g}" for x, y in (points[0], points[-1]))] for name, points in kept.items()
    ]
    return {"kind": "lines", "title": title, "unit": unit, "x_name": x_name, "zero": True, "key": "", "thinned": False,
            "series": [{"name": n, "x": [number(p[0]) for p in ps], "y": [number(p[1]) for p in ps]} for n, ps in kept.items()],
            "table": Table(rows, ["series", "first", "last"], frozenset((1, 2))).to_json()}  # fmt: skip
