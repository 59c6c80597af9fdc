"""Options with their numbers, from comparisons, load tests, plans, the catalogue and what is given by hand."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamella.decide.model import Choice, Gain, World
from lamella.decide.settings import DecideConfig, Option
from lamella.decide.verdict import Case
from lamella.endpoint.prices import price_of
from lamella.errors import UserError

OVER = "latency"


class Sources:
    """What was read, and where each figure is from.

    Attributes:
        dates: of prices. told: "option: figure" -> source. tokens: input and output of a document, where a comparison says.
    """

    def __init__(self, config: DecideConfig) -> None:
        self.config = config
        self.comparisons = [_read(path, "compare") for path in config.comparisons]
        self.dates: list[datetime.date] = []
        self.told: dict[str, str] = {}

    def candidate(self, option: Option) -> dict[str, Any] | None:
        """Its entry in a comparison."""
        if option.candidate is None:
            return None
        names = []
        for tree in self.comparisons:
            for c in tree["candidates"]:
                names.append(c["name"])
                if c["name"] == option.candidate:
                    return c | {"_rows": tree["rows"]}
        raise UserError(f"option {option.name!r}: no comparison has a candidate {option.candidate!r}",
                        fix=f"candidates: {', '.join(names) or 'none: name compare.json files in `comparisons`'}")  # fmt: skip

    def difference(self, before: Option, after: Option) -> dict[str, Any] | None:
        """The paired difference of two candidates, where a comparison measured it."""
        for tree in self.comparisons:
            for d in tree.get("differences", []):
                if (d["before"], d["after"]) == (before.candidate, after.candidate):
                    return d["average"]
                if (d["after"], d["before"]) == (before.candidate, after.candidate):
                    x = d["average"]
                    return {"value": -x["value"], "low": -x["high"], "high": -x["low"]}
        return None


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", fix=f"make it with `lamella {kind}`", path=path) from error
    except ValueError as error:
        raise UserError(f"not JSON: {error}", fix=f"make it again with `lamella {kind}`", path=path) from error
    if not isinstance(tree, dict) or tree.get("kind") not in (kind, f"lamella {kind}"):
        raise UserError(f"is no result of `lamella {kind}`", fix=f"give a {kind}.json", path=path)
    return tree


def read_case(config: DecideConfig) -> tuple[Case, Sources]:
    """All options with their numbers.

    Raises:
        UserError: a file that is not what it should be, a candidate or price that is not there, no quality to compare.
    """
    sources = Sources(config)
    current = next(o for o in config.options if o.name == config.current)
    volume = config.volume
    tokens = _tokens(config, sources)
    by_label = config.worth.per_wrong_label is not None
    worth = config.worth.per_wrong_label if by_label else config.worth.per_f1_point_per_month
    assert worth is not None
    world = World(volume.documents_per_month, tokens[0], tokens[1], volume.peak_factor, volume.hours_per_month, volume.horizon_months,
                  config.staff_per_hour, worth, by_label)  # fmt: skip
    choices = tuple(_choice(option, current, sources, world) for option in config.options)
    return Case(world, choices, config.current, config.proposal, volume.growth_per_month), sources


def _tokens(config: DecideConfig, sources: Sources) -> tuple[float, float]:
    """Of a document, as given, or as the first API candidate's answers had them."""
    volume = config.volume
    if volume.input_tokens or volume.output_tokens:
        return volume.input_tokens, volume.output_tokens
    for option in config.options:
        found = sources.candidate(option)
        if found is not None and not option.kind.startswith("self") and found["tokens"]["input"]:
            sources.told["tokens of a document"] = f"{found['name']} in the comparison"
            return found["tokens"]["input"] / found["_rows"], found["tokens"]["output"] / found["_rows"]
    return 0.0, 0.0


def _choice(option: Option, current: Option, sources: Sources, world: World) -> Choice:
    hosted = option.kind.startswith("self-hosted")
    found = sources.candidate(option)
    numbers: dict[str, Any] = _machine(option, sources, world) if hosted else _price(option, found, sources)
    latency = option.latency_p99_s or numbers.pop("latency", None) or ((found or {}).get("latency_s") or {}).get("p99")
    limit = sources.config.latency_p99_s
    out = ""
    if limit is not None and latency is not None and latency > limit:
        out = f"its p99 of {latency:.3g} s misses the target of {limit:g} s"
    return Choice(
        option.name, option.kind, hosted, once=option.once, retrain=option.retrain, retrain_every=option.retrain_every_months or math.inf,
        staff_hours_once=option.staff_hours_once, staff_hours_per_month=option.staff_hours_per_month, per_month=option.per_month,
        latency_p99_s=latency, quality=_quality(option, found, world.by_label), gain=_gain(option, current, sources, world.by_label),
        out=out, **numbers,
    )  # fmt: skip


def _machine(option: Option, sources: Sources, world: World) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    if option.machine_per_hour is not None:
        numbers["machine_per_hour"] = option.machine_per_hour
        sources.told[f"{option.name}: machine an hour"] = "given" + (
            f", {option.price_date}" if option.price_date else ""
        )
    else:
        assert option.machine is not None
        numbers["machine_per_hour"] = _catalogue(option, sources)
    if option.price_date:
        sources.dates.append(datetime.date.fromisoformat(option.price_date))
    if option.documents_per_s is not None:
        numbers["documents_per_s"] = option.documents_per_s
    elif option.load_test is not None:
        tree = _read(option.load_test, "loadtest")
        rates = tree["throughput"]
        good = tree.get("goodput")
        rate = rates.get("labels_per_s") or (good["requests_per_s"] if good else rates["requests_per_s"])
        if not rate:
            raise UserError("answered nothing", fix="run the load test again", path=option.load_test)
        numbers |= {"documents_per_s": rate, "latency": (tree.get("label_s") or tree["e2e_s"])["p99"]}
        sources.told[f"{option.name}: documents per second"] = f"load test {option.load_test.name}"
    else:
        numbers["documents_per_s"] = _planned(option, world, sources)
    return numbers


def _catalogue(option: Option, sources: Sources) -> float:
    from lamella.hardware.catalogue import catalogue
    from lamella.hardware.machines import open_machine

    assert option.machine is not None
    machine = open_machine(option.machine)
    prices = [device.price for device in machine.devices]
    if any(price is None for price in prices):
        raise UserError(
            f"option {option.name!r}: the catalogue has no price of {option.machine}", fix="give machine_per_hour"
        )
    sources.dates.append(datetime.date.fromisoformat(catalogue().date))
    sources.told[f"{option.name}: machine an hour"] = f"catalogue of {catalogue().date}, {option.machine}"
    return float(sum(price.usd_per_hour for price in prices if price is not None))


def _planned(option: Option, world: World, sources: Sources) -> float:
    assert option.plan is not None
    tree = _read(option.plan, "plan")
    rates = [
        (rate["tokens_per_s"], serve)
        for serve in ((tree.get("serving") or {}).get("here") or [])
        for rate in serve["decode"]
    ]
    if not rates:
        raise UserError(
            "has no serving preview for its machine",
            fix="plan again, with a machine that holds the model",
            path=option.plan,
        )
    if not world.output_tokens:
        raise UserError(
            f"option {option.name!r}: a plan's bound is in tokens", fix="give volume.output_tokens", path=option.plan
        )
    best, serve = max(rates, key=lambda r: r[0])
    reached = best * option.plan_share
    per_document = world.output_tokens / reached + world.input_tokens / (
        serve["prefill_tokens_per_s"] * option.plan_share
    )
    sources.told[f"{option.name}: documents per second"] = (
        f"{option.plan_share:g} of the bound in {option.plan.name}: {best:,.0f} tokens/s written in {serve['format']}, "
        f"{serve['prefill_tokens_per_s']:,.0f} read"
    )
    return 1 / per_document


def _price(option: Option, found: Mapping[str, Any] | None, sources: Sources) -> dict[str, Any]:
    if option.price is not None:
        price = price_of(option.price)
        if price.currency != sources.config.currency:
            raise UserError(
                f"option {option.name!r}: its price is in {price.currency}", fix=f"give it in {sources.config.currency}"
            )
        told = price.to_json()
    elif found is not None and found.get("money") and "input_per_mtok" in found["money"]["prices"]:
        told = found["money"]["prices"]
    else:
        raise UserError(
            f"option {option.name!r}: no price is known", fix="give `price`, or a candidate that was asked with one"
        )
    sources.dates.append(datetime.date.fromisoformat(told["date"]))
    sources.told[f"{option.name}: price"] = f"{told['source']}, {told['date']}"
    return {"input_price": told["input_per_mtok"], "output_price": told["output_per_mtok"]}


def _quality(
    option: Option, found: Mapping[str, Any] | None, by_label: bool
) -> tuple[float, float | None, float | None] | None:
    if option.quality is not None:
        return option.quality.value, option.quality.low, option.quality.high
    if found is None:
        return None
    x = found["metrics"]["average_accuracy" if by_label else "average"]
    return x["value"], x["low"], x["high"]


def _gain(option: Option, current: Option, sources: Sources, by_label: bool) -> Gain:
    """Paired where a comparison measured both; else from two figures, whose intervals are taken as independent."""
    if option.name == current.name:
        return Gain()
    if not by_label and option.quality is None and current.quality is None:
        d = sources.difference(current, option)
        if d is not None:
            sources.told[f"{option.name}: quality gain"] = "paired bootstrap over documents"
            return Gain(d["value"], d["low"], d["high"])
    a, b = (_quality(o, sources.candidate(o), by_label) for o in (current, option))
    if a is None or b is None:
        missing = current.name if a is None else option.name
        raise UserError(f"nothing says how good {missing!r} is", fix="give `quality`, or `candidate` of a comparison")
    value = b[0] - a[0]
    half = math.hypot(*(_half(x) for x in (a, b)))
    sources.told[f"{option.name}: quality gain"] = "difference of two figures, intervals taken as independent"
    return Gain(value, value - half, value + half)


def _half(x: Sequence[float | None]) -> float:
    """Half the width of an interval; 0 where none is given."""
    value, low, high = x
    assert value is not None
    return 0.0 if low is None or high is None else max(value - low, high - value)
