"""`loadtest.json` as one table."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from lamella.units import format_seconds

_WORDS = {"ttft_s": "first token", "tpot_s": "per output token", "e2e_s": "whole answer", "label_s": "completed label"}


def show(tree: dict[str, Any]) -> Table:
    """A column per level. A p99 of few samples has a `*`."""
    levels = tree["levels"]
    few = any((level[k] or {}).get("few_for_p99") for level in levels for k in _WORDS)
    table = Table(
        title=f"{tree['model']} at {tree['url']}: {tree['mode']}, by {tree['tool']}",
        caption="p50 / p90 / p99 (samples)" + ("; *: a p99 of fewer than 100 samples" if few else ""),
    )
    table.add_column("")
    for level in levels:
        rate = level["rate"]
        table.add_column(
            f"{level['concurrency']} at a time" if rate is None else f"{rate:g} requests/s", justify="right"
        )
    table.add_row("sent / ok", *(f"{r['sent']:,} / {r['ok']:,}" for r in (level["requests"] for level in levels)))
    table.add_row("told to wait (429)", *(f"{level['requests']['rejected']:,}" for level in levels))
    table.add_row("errors", *(f"{level['requests']['errors']:,}" for level in levels))
    for key, word in _WORDS.items():
        if any(level[key] for level in levels):
            table.add_row(word, *(_latency(level[key]) for level in levels))
    if any(level["labels"] for level in levels):
        for kind in ("completed", "truncated", "invalid"):
            table.add_row(
                f"labels {kind}", *(f"{level['labels'][kind]:,}" if level["labels"] else "-" for level in levels)
            )
    for key, word in (
        ("requests_per_s", "requests/s"),
        ("output_tokens_per_s", "output tokens/s"),
        ("labels_per_s", "labels/s"),
    ):
        if any(level["throughput"][key] is not None for level in levels):
            table.add_row(word, *(_number(level["throughput"][key]) for level in levels))
    if any(level["goodput"] for level in levels):
        target = ", ".join(f"{k} {v}" for k, v in levels[-1]["goodput"]["target"].items())
        table.add_row(f"goodput, requests/s ({target})", *(_good(level["goodput"]) for level in levels))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _latency(figures: dict[str, Any] | None) -> str:
    if not figures:
        return "-"
    shown = [format_seconds(figures[p]) for p in ("p50", "p90", "p99")]
    return f"{' / '.join(shown)}{'*' if figures.get('few_for_p99') else ''} ({figures.get('samples', '?')})"


def _good(good: dict[str, Any] | None) -> str:
    if not good:
        return "-"
    return _number(good["requests_per_s"]) + ("" if good["share"] is None else f" ({good['share']:.0%})")
