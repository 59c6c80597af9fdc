"""`decide.json` from `decide.toml`."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lamella.decide.inputs import Sources, read_case
from lamella.decide.model import (
    Choice,
    World,
    break_even,
    capacity_of_one,
    cost,
    fixed,
    gain,
    over_utilisation,
    pace,
    token_price,
    tokens,
    why_out,
)
from lamella.decide.settings import DecideConfig
from lamella.decide.verdict import (
    Case,
    Flip,
    check_ranges,
    fast_enough,
    flips,
    inputs_of,
    judge,
    look_again,
    rivals_of,
    sensitivity,
    sentence,
)
from lamella.errors import UserError


@dataclass(frozen=True)
class Figure:
    """A number with its formula and inputs."""

    name: str
    value: float
    unit: str
    formula: str

    def text(self) -> str:
        return f"{self.name} = {self.value:,.6g} {self.unit}\n    = {self.formula}"


def decide(config: DecideConfig, today: datetime.date | None = None) -> tuple[dict[str, Any], list[Figure]]:
    """(`decide.json`, every figure explained). Raises `UserError` as `read_case` does, or for a range of no input."""
    today = today or datetime.datetime.now(datetime.UTC).date()
    case, sources = read_case(config)
    inputs = inputs_of(case)
    wrong = check_ranges(case, config.sensitivity)
    if wrong:
        raise UserError(f"`sensitivity` {wrong}", fix='give each range as "input" = [low, high]', path=config.file)
    verdict = judge(case)
    rows = sensitivity(case, config.sensitivity)
    found = flips(case)
    retrain = case.choice(case.proposal).retrain_every
    review = None if config.review is None else datetime.date.fromisoformat(config.review)
    when, why = look_again(today, sources.dates, retrain, review)

    def money(value: float) -> str:
        return f"{value:,.0f} {config.currency}" if abs(value) >= 10 else f"{value:,.2f} {config.currency}"

    tree = {
        "kind": "decide", "version": 1, "name": config.name, "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "verdict": verdict, "sentence": sentence(case, verdict, money), "because": because(case, sources, money),
        "would_change_it": would_change(case, found), "look_again": when.isoformat(), "look_again_because": why,
        "currency": config.currency, "current": config.current, "proposal": config.proposal,
        "options": [option(c, case) for c in case.choices], "break_even": break_evens(case), "sensitivity": rows,
        "flips": [{"input": f.name, "value": f.now, "at": f.at, "verdict": f.verdict} for f in found],
        "net_value_per_month": case.net, "inputs": inputs, "sources": sources.told,
    }  # fmt: skip
    return tree, figures(case, config.currency)


def option(c: Choice, case: Case) -> dict[str, Any]:
    spent = cost(c, case.world)
    quality = None if c.quality is None else dict(zip(("value", "low", "high"), c.quality, strict=True))
    return {
        "name": c.name, "kind": c.kind, "f1": None if case.world.by_label else quality,
        "accuracy": quality if case.world.by_label else None, "per_1000_documents": 1000 * spent.total / case.world.documents,
        "per_month": spent.total, "parts": spent.parts, "machines": spent.machines, "utilisation": spent.utilisation,
        "capacity_documents_per_month": spent.capacity, "latency_p99_s": pace(c, case.world).latency_p99_s,
        "sequences": pace(c, case.world).sequences or None, "out": why_out(c, case.world),
        "gain": {**asdict(c.gain), "counted": c.gain.counted}, "gain_per_month": gain(c, case.world),
        "net_value_per_month": case.net_of(c.name), "over_utilisation": over_utilisation(c, case.world),
    }  # fmt: skip


def break_evens(case: Case) -> list[dict[str, Any]]:
    """Volume from which the proposal costs no more than each other option; null: from none."""
    p = case.choice(case.proposal)
    return [
        {"against": c.name, "documents_per_month": break_even(p, c, case.world)}
        for c in case.choices
        if c.name != p.name
    ]


def because(case: Case, sources: Sources, money: Any) -> list[str]:
    """What the verdict rests on."""
    p, current = case.choice(case.proposal), case.choice(case.current)
    mine, theirs = cost(p, case.world), cost(current, case.world)
    said = [
        f"{p.name} costs {money(mine.total)} a month, {current.name} {money(theirs.total)}, at {case.world.documents:,.0f} documents"
    ]
    if mine.utilisation is not None:
        said.append(f"its {mine.machines} machine{'s' * (mine.machines != 1)} would be used to {mine.utilisation:.1%}")
    g = p.gain
    what = "accuracy" if case.world.by_label else "F1"
    points = f"{100 * g.value:+.2f} points [{100 * g.low:+.2f}, {100 * g.high:+.2f}]"
    if g.counted:
        said.append(f"its {what} is {points}, worth {money(gain(p, case.world))} a month")
    else:
        said.append(f"its {what} is {points}: the interval holds zero, so it counts as no gain")
    for c in case.choices:
        if why_out(c, case.world):
            said.append(f"{c.name} is out: {why_out(c, case.world)}")
    if math.isfinite(case.world.latency_target):
        said += [f"how long {c.name} takes is not known, so the target of {case.world.latency_target:g} s was not put to it"
                 for c in case.choices if pace(c, case.world).latency_p99_s is None]  # fmt: skip
    said += sources.worse
    even = break_even(p, current, case.world)
    said.append(f"it first costs no more than {current.name} at {even:,.0f} documents a month" if even is not None
                else f"it costs more than {current.name} at any volume")  # fmt: skip
    return said


def would_change(case: Case, found: Sequence[Flip], most: int = 6) -> list[str]:
    """The nearest changes that give another verdict, the smallest first; of a proposal that is too slow and would not pay either,
    what else would have to change."""
    said = [_flip_text(f) for f in found[:most]]
    if said:
        return said
    said = ["no single input within a hundredth and a hundred times its value"]
    for words, other in _relaxed(case):
        more = flips(other) if judge(other) == judge(case) else []
        if judge(other) != judge(case):
            return [*said, f"{words}: {judge(other)}"]
        if more:
            return [*said, *(f"{words}: {_flip_text(f)}" for f in more[:most])]
    return said


def _relaxed(case: Case) -> Iterator[tuple[str, Case]]:
    """What stands in the way, taken away: the latency target, better options, both."""
    p = case.choice(case.proposal)
    slow = why_out(p, case.world) and not p.out
    ahead = [c.name for c in rivals_of(case) if case.net_of(c.name) > max(case.net, 0.0)]
    alone = replace(case, choices=tuple(c for c in case.choices if c.name not in ahead))
    names = " and ".join(f'"{name}"' for name in ahead)
    quick, none = "were it within the latency target at this cost", f"without the option {names}"
    if slow:
        yield quick, fast_enough(case)
    if ahead:
        yield none, alone
    if slow and ahead:
        yield f"{quick}, {none}", fast_enough(alone)


def _flip_text(f: Flip) -> str:
    """`above` and `below` with the figure rounded away from the value now, so that it holds as printed."""
    up = f.at > f.now
    digits = 3 - math.floor(math.log10(abs(f.at))) if f.at else 4
    scale = 10.0**digits
    rounded = (math.ceil if up else math.floor)(f.at * scale) / scale
    times = f", {f.at / f.now:.3g} times" if f.at * f.now > 0 else ""
    return f"{f.name} {'at least' if up else 'at most'} {plain(rounded)} (now {plain(f.now)}{times}): {f.verdict}"


def plain(value: float) -> str:
    """Without an exponent where it is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def figures(case: Case, currency: str) -> list[Figure]:
    """Every figure with formula and inputs."""
    w, found = case.world, []
    for c in case.choices:
        spent = cost(c, w)
        if c.points:
            found += pace_figures(c, w)
        if c.hosted:
            one = capacity_of_one(c, w)
            found.append(Figure(f"{c.name}: documents a month of one machine", one, "documents",
                                f"{pace(c, w).documents_per_s:.6g} documents/s x 3600 x {w.hours:g} hours"))  # fmt: skip
            found.append(
                Figure(
                    f"{c.name}: machines",
                    spent.machines,
                    "",
                    f"ceil({w.documents:,.0f} x peak {w.peak:g} / {one:,.0f})",
                )
            )
            found.append(Figure(f"{c.name}: machines a month", spent.parts["machines"], currency,
                                f"{spent.machines} x {c.machine_per_hour:g} an hour x {w.hours:g} hours"))  # fmt: skip
        else:
            read, written = tokens(c, w)
            found.append(Figure(f"{c.name}: a document", token_price(c, w), currency,
                                f"({read:g} x {c.input_price:g} + {written:g} x {c.output_price:g}) / 10^6"))  # fmt: skip
            found.append(
                Figure(f"{c.name}: tokens a month", spent.parts["tokens"], currency, f"{w.documents:,.0f} x a document")
            )
        parts = fixed(c, w)
        once = f"({c.once:g} + {c.staff_hours_once:g} h x {w.staff_per_hour:g}) / {w.horizon:g} months"
        monthly = f"{c.retrain:g} / {c.retrain_every:g} months + {c.staff_hours_per_month:g} h x {w.staff_per_hour:g} + {c.per_month:g}"
        found.append(Figure(f"{c.name}: fixed a month", sum(parts.values()), currency, f"{once} + {monthly}"))
        found.append(
            Figure(
                f"{c.name}: a month", spent.total, currency, " + ".join(f"{k} {v:,.6g}" for k, v in spent.parts.items())
            )
        )
        worth = (
            f"{w.documents:,.0f} documents x {w.worth:g} a wrong label" if w.by_label else f"100 x {w.worth:g} a point"
        )
        found.append(
            Figure(
                f"{c.name}: gain a month",
                gain(c, w),
                currency,
                f"{c.gain.counted:.6g} counted of {c.gain.value:.6g} x {worth}",
            )
        )
        found.append(Figure(f"{c.name}: net value a month", case.net_of(c.name), currency,
                            f"gain - ({spent.total:,.6g} - {cost(case.choice(case.current), w).total:,.6g})"))  # fmt: skip
    return found


def pace_figures(c: Choice, w: World) -> list[Figure]:
    """Of an option that a plan describes."""
    here = pace(c, w)
    read, written = tokens(c, w)
    point = next(p for p in c.points if p.sequences == here.sequences)
    rate = Figure(f"{c.name}: documents a second of one machine", here.documents_per_s, "documents/s",
                  f"{c.share:g} of the bound / ({written:g} tokens / {point.written_per_s:,.6g} tokens/s + {read:g} / "
                  f"{point.read_per_s:,.6g}), {here.sequences} at once")  # fmt: skip
    assert here.latency_p99_s is not None
    return [rate, Figure(f"{c.name}: p99", here.latency_p99_s, "s",
                         f"{c.spread:g} x {here.sequences} at once / {here.documents_per_s:.6g} documents/s")]  # fmt: skip
