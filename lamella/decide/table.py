"""A decision for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lamella.decide.run import plain

BAR = 14


def show(tree: dict[str, Any]) -> Group:
    """Verdict, reasons, options, break-even, sensitivity, what would change it."""
    parts: list[RenderableType] = [
        Text(tree["sentence"], style="bold"),
        *(Text(f"- {x}") for x in tree["because"]),
        _options(tree),
    ]
    parts.append(_sensitivity(tree))
    parts += [Text("what would change it", style="bold"), *(Text(f"- {x}") for x in tree["would_change_it"])]
    parts.append(Text(f"look again on {tree['look_again']}: {tree['look_again_because']}"))
    return Group(*parts)


def _money(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.4g}"


def _quality_name(tree: dict[str, Any]) -> str:
    return "accuracy" if any(o["accuracy"] for o in tree["options"]) else "F1"


def _quality(option: dict[str, Any]) -> str:
    figure = option["f1"] or option["accuracy"]
    return "-" if figure is None else f"{figure['value']:.3f}"


def _options(tree: dict[str, Any]) -> Table:
    table = Table(title=f"options ({tree['currency']})", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("option", _quality_name(tree), "p99", "per 1,000", "a month", "used", "net value", "even from"):
        table.add_column(
            name, justify="left" if name == "option" else "right", min_width=11 if name == "option" else None
        )
    even = {b["against"]: b["documents_per_month"] for b in tree["break_even"]}
    for o in tree["options"]:
        name = o["name"] + (
            " (now)" if o["name"] == tree["current"] else " (proposed)" if o["name"] == tree["proposal"] else ""
        )
        at = "" if o["name"] == tree["proposal"] else "never" if even[o["name"]] is None else f"{even[o['name']]:,.0f}"
        machines = "-" if o["utilisation"] is None else f"{o['machines']:,} x {o['utilisation']:.0%}"
        table.add_row(name + (", out" if o["out"] else ""), _quality(o),
                      "-" if o["latency_p99_s"] is None else f"{o['latency_p99_s']:.3g} s", _money(o["per_1000_documents"]),
                      _money(o["per_month"]), machines, _money(o["net_value_per_month"]), at)  # fmt: skip
    return table


def _sensitivity(tree: dict[str, Any], most: int = 10) -> Table:
    """Net value at each input's ends, as bars around the value now; verdicts where they change."""
    rows = tree["sensitivity"][:most]
    now = tree["net_value_per_month"]
    widest = max((abs(r[k] - now) for r in rows for k in ("net_low", "net_high")), default=0.0) or 1.0
    table = Table(
        title=f"net value a month, {_money(now)} now, over each input's range",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for name in ("input", "low", "high", "less", "more", "at low", "at high", "verdict"):
        table.add_column(
            name,
            justify="right" if name in ("low", "high", "less", "at low", "at high") else "left",
            no_wrap=name in ("less", "more"),
        )
    for r in rows:
        ends = [r["net_low"] - now, r["net_high"] - now]
        less, more = max(0.0, -min(ends)), max(0.0, *ends)
        bars = ["█" * round(BAR * x / widest / 2) for x in (less, more)]
        turns = [f"{end}: {r[f'verdict_{end}']}" for end in ("low", "high") if r[f"verdict_{end}"] != tree["verdict"]]
        table.add_row(r["input"], plain(r["low"]), plain(r["high"]), *bars, _money(r["net_low"]), _money(r["net_high"]),
                      ", ".join(turns))  # fmt: skip
    return table
