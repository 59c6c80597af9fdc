"""Comparisons, load tests and decisions as sections of the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamella.errors import UserError
from lamella.report import charts
from lamella.report.collect import find_artifacts, mark_of, read_object
from lamella.report.tables import Table, parts_of
from lamella.report.view import UNEXPECTED, f1_dots, section

CONFUSIONS = 12
"""Pairs of labels shown of a candidate."""


def sections_of(folder: Path) -> list[dict[str, Any]]:
    """A section for each comparison, load test and decision in a folder; one that cannot be read says so."""
    found: list[dict[str, Any]] = []
    for kind, path in find_artifacts(folder):
        name = path.parent.name if path.parent != folder else path.stem
        try:
            tree = read_object(path)
            found.append(_SHOW[kind](tree, f"{kind}-{len(found)}", str(tree.get("name") or name)))
        except UserError as error:
            found.append(section(f"{kind}-{len(found)}", f"{kind}: {name}", [], note=str(error)))
        except UNEXPECTED as error:
            found.append(
                section(
                    f"{kind}-{len(found)}", f"{kind}: {name}", [], note=f"{path.name} is not as expected: {error!r}"
                )
            )
    return found


def marks_of(folder: Path) -> tuple[tuple[str, tuple[int, int] | None], ...]:
    """Changes when one of them does."""
    return tuple((str(path), mark_of(path)) for _, path in find_artifacts(folder))


def comparison(tree: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    """`compare.json`: F1 with intervals, differences, what it cost."""
    candidates = tree["candidates"]
    systems = [{"name": c["name"], **c["metrics"]} for c in candidates]
    money = [
        [c["name"], c.get("role") or "-", c.get("answering") or "-",
         *(charts.shown((c.get("latency_s") or {}).get(q), "s") for q in ("p50", "p99")), _tokens(c), _money(c),
         *(charts.shown(c["metrics"].get(f"{rate}_rate"), "share") for rate in ("invalid", "truncated"))]
        for c in candidates
    ]  # fmt: skip
    head = [
        "candidate",
        "role",
        "answering",
        "p50",
        "p99",
        "tokens in / out",
        "per 1,000 documents",
        "invalid",
        "truncated",
    ]
    tables = [Table(money, head, frozenset(range(3, 9)), caption="What answering took")]
    tables += [_difference(d) for d in tree.get("differences") or []]
    tables += [t for c, of in (tree.get("confusion") or {}).items() if (t := _confusions(c, of)) is not None]
    note = f"{tree.get('rows', '?')} rows of {len(tree.get('tenants') or [])} tenants."
    return section(key, f"Comparison: {name}", [f1_dots("Macro-F1 per tenant", systems)], tables, note)


def _confusions(candidate: str, by_tenant: dict[str, Any]) -> Table | None:
    """The pairs of labels that were taken for each other most often: the matrices, which have a row per label, are in the
    file."""
    wrong = [
        (count, tenant, gold, said, sum(row))
        for tenant, of in by_tenant.items()
        for gold, row in zip(of["labels"], of["counts"], strict=True)
        for said, count in zip(of["predicted"], row, strict=True)
        if count and said != gold
    ]
    wrong.sort(key=lambda w: (-w[0], *w[1:4]))
    rows = [
        [tenant, gold, said, f"{count:,}", f"{count / of:.1%}"] for count, tenant, gold, said, of in wrong[:CONFUSIONS]
    ]
    left = len(wrong) - len(rows)
    caption = f"{candidate}: what was taken for what" + (f" ({left} rarer pairs are in compare.json)" if left else "")
    head = ["tenant", "label", "answered", "documents", "of the label's"]
    return Table(rows, head, frozenset((3, 4)), caption=caption) if rows else None


def _tokens(candidate: dict[str, Any]) -> str:
    used = candidate.get("tokens")
    return f"{used['input']:,} / {used['output']:,}" if used else "-"


def _money(candidate: dict[str, Any]) -> str:
    spent = candidate.get("money")
    return f"{spent['per_1000_documents']:.4g} {spent['currency']}" if spent else "-"


def _difference(d: dict[str, Any]) -> Table:
    rows = []
    for tenant, value in {**d["tenants"], "average": d["average"]}.items():
        p = value.get("p_holm", value.get("p"))
        told = "significant" if value.get("significant") else "not significant" if "significant" in value else ""
        rows.append(
            [
                tenant,
                f"{value['value']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]",
                "-" if p is None else f"{p:.3g}",
                told,
            ]
        )
    caption = f"{d['after']} less {d['before']} (macro-F1; p by Holm over tenants)"
    return Table(rows, ["tenant", "difference", "p", ""], frozenset((1, 2)), caption=caption)


def load_test(tree: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    """`loadtest.json`: latencies, throughput, goodput."""
    words = {
        "ttft_s": "first token",
        "tpot_s": "each further token",
        "e2e_s": "whole answer",
        "label_s": "completed label",
    }
    rows = [
        [word, *(charts.shown(tree[k].get(q), "s") for q in ("p50", "p90")), _p99(tree[k]), charts.shown(tree[k].get("mean"), "s")]
        for k, word in words.items() if tree.get(k)
    ]  # fmt: skip
    chart_rows = [word for k, word in words.items() if tree.get(k)]
    chart = charts.dots(
        "Latency in seconds: p50, from there to p99", chart_rows,
        {"p50": [_p(tree[k]) for k in words if tree.get(k)]},
    ) if rows else None  # fmt: skip
    asked = tree["requests"]
    note = (
        f"{tree.get('url', '')} {tree.get('model', '')}: {asked['sent']:,} sent, {asked['ok']:,} answered, {asked['rejected']:,} told to "
        f"wait (429), {asked['errors']:,} errors in {charts.shown(tree.get('duration_s'), 's')}; "
        f"{charts.shown((tree.get('throughput') or {}).get('requests_per_s'), '')} requests/s."
    )
    good = tree.get("goodput")
    if good:
        target = ", ".join(f"{k} {v}" for k, v in good["target"].items())
        note += f" Goodput under {target}: {charts.shown(good['requests_per_s'], '')} requests/s ({charts.shown(good['share'], 'share')})."
    latency = Table(rows, ["", "p50", "p90", "p99", "mean"], frozenset((1, 2, 3, 4)), caption="Latency")
    return section(key, f"Load test: {name}", [chart], [latency, _levels(tree.get("levels") or [])], note)


def _p99(figures: dict[str, Any]) -> str:
    few = f" (of {figures['samples']})" if figures.get("few_for_p99") else ""
    return charts.shown(figures.get("p99"), "s") + few


def _levels(levels: Sequence[dict[str, Any]]) -> Table:
    """One line per load, where there were several."""
    rows = []
    for level in levels if len(levels) > 1 else ():
        load = f"{level['concurrency']} at a time" if level.get("concurrency") else f"{level.get('rate')} a second"
        good = level.get("goodput") or {}
        rows.append([load, f"{level['requests']['ok']:,}", f"{level['requests']['rejected']:,}", f"{level['requests']['errors']:,}",
                     charts.shown(level["throughput"]["requests_per_s"], ""), charts.shown((level.get("ttft_s") or {}).get("p50"), "s"),
                     charts.shown((level.get("e2e_s") or {}).get("p50"), "s"), charts.shown(good.get("share"), "share")])  # fmt: skip
    head = ["load", "answered", "429", "errors", "requests/s", "first token p50", "answer p50", "within target"]
    return Table(rows, head, frozenset(range(1, 8)), caption="By load")


def _p(figures: dict[str, Any]) -> dict[str, float]:
    return {"value": figures["p50"], "low": figures["p50"], "high": figures["p99"]}


def decision(tree: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    """`decide.json`: the verdict, costs over utilisation, what would change it."""
    currency = tree.get("currency", "USD")
    options = tree["options"]
    curves = {o["name"]: o.get("over_utilisation") or [] for o in options}
    rows = [
        [o["name"], o["kind"], "-" if not o.get("f1") else f"{o['f1']['value']:.3f}", charts.shown(o.get("per_1000_documents"), ""),
         charts.shown(o.get("per_month"), ""), charts.shown(o.get("utilisation"), "share")]
        for o in options
    ]  # fmt: skip
    head = ["option", "kind", "F1", f"{currency} per 1,000 documents", f"{currency} a month", "utilisation"]
    tables = [Table(rows, head, frozenset((2, 3, 4, 5)), caption="Options")]
    tables.append(Table([[w] for w in tree.get("because") or []], ["why"]))
    tables.append(Table([[w] for w in tree.get("would_change_it") or []], ["what would change it"]))
    tables += [
        Table(t.rows, t.head, t.numeric, t.facts, p.title or "Inputs")
        for p in parts_of(tree.get("inputs") or {})
        for t in p.tables
    ]
    tornado = charts.tornado(
        f"Net value a month, {currency}, over each input's range",
        [(s["input"], f"{s['low']:g}", f"{s['high']:g}", s["net_low"], s["net_high"]) for s in tree.get("sensitivity") or []],
        tree.get("net_value_per_month") or 0.0, "",
    )  # fmt: skip
    note = f"{tree['verdict'].upper()}: {tree['sentence']} Look again on {tree.get('look_again', '-')}."
    cost = charts.curves(f"{currency} per 1,000 documents over utilisation", curves, x_name="utilisation", unit="")
    return section(key, f"Decision: {name}", [cost, tornado], tables, note)


_SHOW = {"compare": comparison, "loadtest": load_test, "decide": decision}


def headline(sections: Sequence[dict[str, Any]]) -> str:
    """The newest decision's verdict, for the page's head."""
    return next((s["note"] for s in reversed(sections) if s["id"].startswith("decide")), "")
