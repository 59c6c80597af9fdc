"""Options with their numbers, from comparisons, load tests, plans, the catalogue and what is given by hand."""

from __future__ import annotations

import datetime
import math
from typing import Any

from lamella.decide import files
from lamella.decide.model import Choice, Gain, Point, World
from lamella.decide.settings import DecideConfig, Option
from lamella.decide.verdict import Case
from lamella.endpoint.prices import price_of
from lamella.errors import UserError

Quality = tuple[float, float | None, float | None]


class Sources:
    """What was read, and where each figure is from.

    Attributes:
        dates: of prices. told: "option: figure" -> source. worse: tenants for whom the proposal is significantly worse, in words.
    """

    def __init__(self, config: DecideConfig) -> None:
        self.config = config
        self.comparisons = [files.read(path, files.Comparison) for path in config.comparisons]
        self.dates: list[datetime.date] = []
        self.told: dict[str, str] = {}
        self.worse: list[str] = []

    def wrong(self, option: Option, what: str, fix: str) -> UserError:
        return UserError(f"`options` {option.name!r}: {what}", fix=fix, path=self.config.file)

    def candidate(self, option: Option) -> tuple[files.Candidate, int] | None:
        """Its entry in the first comparison that has it, and how many rows that had."""
        if option.candidate is None:
            return None
        names = []
        for tree in self.comparisons:
            for c in tree.candidates:
                names.append(c.name)
                if c.name == option.candidate:
                    return c, tree.rows
        raise self.wrong(option, f"no comparison has a candidate {option.candidate!r}",
                         f"candidates: {', '.join(names) or 'none: name compare.json files in `comparisons`'}")  # fmt: skip

    def difference(self, before: Option, after: Option) -> tuple[Gain, dict[str, files.TenantDifference]] | None:
        """The paired difference of two candidates, and of each tenant, where a comparison measured it either way round."""
        for d in (d for tree in self.comparisons for d in tree.differences):
            x = d.average
            if (d.before, d.after) == (before.candidate, after.candidate):
                return Gain(x.value, x.low, x.high), d.tenants
            if (d.after, d.before) == (before.candidate, after.candidate):
                turned = {t: v.model_copy(update={"value": -v.value}) for t, v in d.tenants.items()}
                return Gain(-x.value, -x.high, -x.low), turned
        return None

    def date(self, text: str) -> None:
        self.dates.append(datetime.date.fromisoformat(text))


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
    target = math.inf if config.latency_p99_s is None else config.latency_p99_s
    world = World(volume.documents_per_month, *tokens, volume.peak_factor, volume.hours_per_month, volume.horizon_months,
                  config.staff_per_hour, worth, by_label, target)  # fmt: skip
    choices = tuple(_choice(option, current, sources, world) for option in config.options)
    return Case(world, choices, config.current, config.proposal, volume.growth_per_month), sources


def _tokens(config: DecideConfig, sources: Sources) -> tuple[float, float]:
    """Of a document, as given, or as the first API candidate's answers had them."""
    volume = config.volume
    if volume.input_tokens or volume.output_tokens:
        return volume.input_tokens, volume.output_tokens
    for option in config.options:
        found = sources.candidate(option)
        if found is not None and not option.hosted and found[0].tokens.input:
            c, rows = found
            sources.told["tokens of a document"] = f"{c.name} in the comparison"
            return c.tokens.input / rows, c.tokens.output / rows
    return 0.0, 0.0


def _own_tokens(option: Option, sources: Sources, world: World) -> dict[str, float]:
    """Where they differ from the others': by hand, or as the comparison counted them if `volume` says nothing."""
    found = sources.candidate(option)
    volume = sources.config.volume
    own = {"input": option.input_tokens, "output": option.output_tokens}
    if found is not None and found[0].tokens.input and not (volume.input_tokens or volume.output_tokens):
        c, rows = found
        own = {k: getattr(c.tokens, k) / rows if v is None else v for k, v in own.items()}
    shared = {"input": world.input_tokens, "output": world.output_tokens}
    return {f"own_{k}_tokens": v for k, v in own.items() if v is not None and v != shared[k]}


def _choice(option: Option, current: Option, sources: Sources, world: World) -> Choice:
    numbers: dict[str, Any] = dict(_own_tokens(option, sources, world))
    in_tokens = not option.hosted or option.plan is not None
    known = numbers.get("own_input_tokens", world.input_tokens) + numbers.get("own_output_tokens", world.output_tokens)
    if in_tokens and not known:
        raise sources.wrong(
            option,
            "nothing says how many tokens a document has",
            "set volume.input_tokens and volume.output_tokens",
        )
    numbers |= _machine(option, sources) if option.hosted else _price(option, sources)
    if option.latency_p99_s is not None:
        numbers["latency_p99_s"] = option.latency_p99_s
    elif "points" not in numbers:
        numbers.setdefault("latency_p99_s", _latency(option, sources))
    retrain_every = math.inf if option.retrain_every_months is None else option.retrain_every_months
    return Choice(
        option.name, option.kind, option.hosted, once=option.once, retrain=option.retrain, retrain_every=retrain_every,
        staff_hours_once=option.staff_hours_once, staff_hours_per_month=option.staff_hours_per_month, per_month=option.per_month,
        quality=_quality(option, sources, world.by_label), gain=_gain(option, current, sources, world.by_label), **numbers,
    )  # fmt: skip


def _latency(option: Option, sources: Sources) -> float | None:
    """As the comparison measured it at an endpoint; what ran in the comparison itself says nothing of a server."""
    found = sources.candidate(option)
    if found is None or found[0].where != "endpoint" or found[0].latency_s is None:
        return None
    sources.told[f"{option.name}: p99"] = "the comparison"
    return found[0].latency_s.p99


def _machine(option: Option, sources: Sources) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    if option.machine_per_hour is not None:
        numbers["machine_per_hour"] = option.machine_per_hour
        sources.told[f"{option.name}: machine an hour"] = "given" + (
            f", {option.price_date}" if option.price_date else ""
        )
        if option.price_date:
            sources.date(option.price_date)
    else:
        numbers["machine_per_hour"] = _catalogue(option, sources)
    if option.documents_per_s is not None:
        return numbers | {"documents_per_s": option.documents_per_s}
    if option.load_test is None:
        return numbers | _planned(option, sources)
    tree = files.read(option.load_test, files.LoadTest)
    rates = tree.throughput
    within = tree.goodput.requests_per_s if tree.goodput is not None else None
    rate = next((r for r in (within, rates.labels_per_s, rates.requests_per_s) if r is not None), 0.0)
    if rate <= 0:
        raise UserError("answered nothing (within its target)", fix="run the load test again", path=option.load_test)
    sources.told[f"{option.name}: documents per second"] = f"load test {option.load_test.name}" + (
        ", goodput" if within is not None else ""
    )
    return numbers | {"documents_per_s": rate, "latency_p99_s": (tree.label_s or tree.e2e_s).p99}


def _catalogue(option: Option, sources: Sources) -> float:
    from lamella.hardware.catalogue import catalogue
    from lamella.hardware.machines import open_machine

    assert option.machine is not None
    try:
        prices = [device.price for device in open_machine(option.machine).devices]
    except UserError as error:
        raise sources.wrong(option, f"machine {option.machine!r}: {error.what}", error.fix) from error
    known = [price for price in prices if price is not None]
    if len(known) < len(prices):
        raise sources.wrong(option, f"the catalogue has no price of {option.machine}", "give machine_per_hour")
    if sources.config.currency != "USD":
        raise sources.wrong(
            option, f"the catalogue's prices are in USD, not {sources.config.currency}", "give machine_per_hour"
        )
    for price in known:
        sources.date(price.date)
    dates = ", ".join(sorted({price.date for price in known}))
    sources.told[f"{option.name}: machine an hour"] = (
        f"catalogue of {catalogue().date}, {option.machine}, price of {dates}"
    )
    return float(sum(price.usd_per_hour for price in known))


def _planned(option: Option, sources: Sources) -> dict[str, Any]:
    assert option.plan is not None
    tree = files.read(option.plan, files.Plan)
    serves = tree.serving.here if tree.serving is not None else ()
    found = next((s for s in serves if option.plan_format in (None, s.format) and s.decode), None)
    if found is None:
        formats = ", ".join(s.format for s in serves) or "none"
        raise UserError(f"has no serving preview in {option.plan_format or 'any format'} for its machine; it has {formats}",
                        fix="plan again, with a machine that holds the model, or set plan_format", path=option.plan)  # fmt: skip
    if option.machine is not None:
        from lamella.forecast.serving import devices_of
        from lamella.hardware.machines import open_machine

        mine = devices_of(open_machine(option.machine)).name
        if mine != found.machine:
            raise sources.wrong(
                option, f"its plan is for {found.machine}, its machine is {mine}", "plan again for this machine"
            )
    points = tuple(Point(d.sequences, d.tokens_per_s, found.prefill_tokens_per_s) for d in found.decode)
    sources.told[f"{option.name}: documents per second"] = (
        f"{option.plan_share:g} of the bounds in {option.plan.name}, {found.format} on {found.machine}"
    )
    return {"points": points, "share": option.plan_share, "spread": option.p99_over_mean}


def _price(option: Option, sources: Sources) -> dict[str, Any]:
    found = sources.candidate(option)
    money = None if found is None else found[0].money
    currency = sources.config.currency
    if option.price is not None:
        try:
            price = price_of(option.price)
        except UserError as error:
            raise sources.wrong(option, error.what, error.fix) from error
        told = files.Prices(**price.to_json())
        said_in = price.currency
    elif money is not None and money.prices.input_per_mtok is not None:
        told, said_in = money.prices, money.currency
    else:
        raise sources.wrong(option, "no price is known", "give `price`, or a candidate that was asked with one")
    if said_in != currency:
        raise sources.wrong(option, f"its price is in {said_in}", f"give it in {currency}")
    sources.date(told.date)
    sources.told[f"{option.name}: price"] = f"{told.source}, {told.date}"
    return {"input_price": told.input_per_mtok, "output_price": told.output_per_mtok}


def _quality(option: Option, sources: Sources, by_label: bool) -> Quality | None:
    if option.quality is not None:
        return option.quality.value, option.quality.low, option.quality.high
    found = sources.candidate(option)
    if found is None:
        return None
    x = found[0].metrics.average_accuracy if by_label else found[0].metrics.average
    if x is None:
        raise sources.wrong(option, "its comparison has no accuracy of labels, as those of spans have none",
                            "give `worth.per_f1_point_per_month` in the place of `per_wrong_label`, or `quality`")  # fmt: skip
    return x.value, x.low, x.high


def _gain(option: Option, current: Option, sources: Sources, by_label: bool) -> Gain:
    """By hand; paired where a comparison measured both; else from two figures, whose intervals are taken as independent."""
    if option.name == current.name:
        return Gain()
    if option.gain is not None:
        sources.told[f"{option.name}: quality gain"] = "given"
        return Gain(option.gain.value, option.gain.low, option.gain.high)
    if not by_label and option.quality is None and current.quality is None:
        found = sources.difference(current, option)
        if found is not None:
            sources.told[f"{option.name}: quality gain"] = "paired bootstrap over documents"
            if option.name == sources.config.proposal:
                sources.worse += [f"{t} gets worse by {-100 * d.value:.2f} points of F1, significantly" for t, d in found[1].items()
                                  if d.significant and d.value < 0]  # fmt: skip
            return found[0]
    a, b = (_quality(o, sources, by_label) for o in (current, option))
    if a is None or b is None:
        missing = current if a is None else option
        raise sources.wrong(missing, "nothing says how good it is", "give `quality`, or `candidate` of a comparison")
    value = b[0] - a[0]
    half = math.hypot(_half(a), _half(b))
    sources.told[f"{option.name}: quality gain"] = "difference of two figures, intervals taken as independent"
    return Gain(value, value - half, value + half)


def _half(x: Quality) -> float:
    """Half the width of an interval; 0 where none is given."""
    value, low, high = x
    return 0.0 if low is None or high is None else max(value - low, high - value)
