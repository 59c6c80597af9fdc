"""A comparison for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from lamella.units import format_seconds


def show(tree: dict[str, Any], changed: Sequence[dict[str, Any]] = (), most: int = 5) -> Group:
    """F1 by tenant, what answering took, differences to the first candidate, and some rows that changed."""
    parts: list[RenderableType] = [_quality(tree), _effort(tree)]
    parts += [_difference(d, tree) for d in tree["differences"]]
    if changed:
        parts.append(_changed(changed[:most], len(changed)))
    return Group(*parts)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for k, name in enumerate(head):
        table.add_column(name, justify="left" if k in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}".replace("0.", ".", 1)


def _interval(tree: dict[str, Any]) -> str:
    return f"{figure(tree['value'])}\n[{figure(tree['low'])}, {figure(tree['high'])}]"


def _quality(tree: dict[str, Any]) -> Table:
    rows = []
    spans = any(c["metrics"].get("kind") == "spans" for c in tree["candidates"])
    for c in tree["candidates"]:
        m = c["metrics"]
        each = [_interval(m["tenants"][t]["macro_f1"]) for t in tree["tenants"]]
        more = [figure(m[k]["value"]) if k in m else "-" for k in ("average_micro_f1", "average_accuracy")]
        rates = [f"{100 * m[f'{status}_rate']:.1f} %" for status in ("invalid", "truncated")]
        rows.append([c["name"], *each, _interval(m["average"]), *more, *rates])
    head = [
        "strict F1 of spans" if spans else "macro-F1",
        *tree["tenants"],
        "average",
        "micro-F1",
        "accuracy",
        "invalid",
        "truncated",
    ]
    return _table(f"{tree['name']}: {tree['rows']} rows, 95 % intervals over documents", head, rows)


def _effort(tree: dict[str, Any]) -> Table:
    rows = []
    for c in tree["candidates"]:
        latency, money, tokens = c["latency_s"] or {}, c["money"], c["tokens"]
        rows.append([c["name"], c["answering"], f"{tokens['input']:,}", f"{tokens['output']:,}", _seconds(latency.get("p50")),
                     _seconds(latency.get("p99")), "-" if money is None else f"{money['per_1000_documents']:.4g} {money['currency']}",
                     f"{c['from_cache']:,}"])  # fmt: skip
    head = ["candidate", "answering", "tokens in", "out", "p50", "p99", "per 1,000 documents", "from cache"]
    spent = tree["spent"]
    total = f"; {spent['total']:.4g} {spent['currency']} spent" if spent["total"] else ""
    return _table(f"what answering took{total}", head, rows, left=(0, 1))


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _difference(d: dict[str, Any], tree: dict[str, Any]) -> Table:
    rows = []
    for tenant, x in d["tenants"].items():
        rows.append([tenant, f"{x['value']:+.3f}", f"[{x['low']:+.3f}, {x['high']:+.3f}]", f"{x['p']:.3g}", f"{x['p_holm']:.3g}",
                     "yes" if x["significant"] else "no"])  # fmt: skip
    x = d["average"]
    rows.append(["average", f"{x['value']:+.3f}", f"[{x['low']:+.3f}, {x['high']:+.3f}]", f"{x['p']:.3g}", "", ""])
    moved = tree.get("changed", {}).get(d["after"])
    more = f"; {moved['gained']} rows gained, {moved['lost']} lost" if moved else ""
    head = ["tenant", "difference", "95 % interval", "p", "p (Holm)", "significant"]
    return _table(f"{d['after']} less {d['before']}, macro-F1, paired over documents{more}", head, rows)


def _changed(lines: Sequence[dict[str, Any]], count: int) -> Table:
    rows = [
        [
            x["after"],
            x["change"],
            x["tenant"],
            _short(x["entity"] or x["text"]),
            x["gold"],
            x["before_said"],
            x["after_said"],
        ]
        for x in lines
    ]
    head = ["candidate", "", "tenant", "of", "gold", "before", "now"]
    return _table(f"{len(lines)} of {count} rows that changed (all in changed.jsonl)", head, rows, left=range(7))


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"
