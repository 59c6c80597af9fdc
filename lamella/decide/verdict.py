"""One verdict, and what would change it.

- deploy: the proposal is a choice (fast enough), its net value is above zero even at the lower end of the quality difference's
  interval, and no other option earns more.
- wait: it does not pay now, but its net value is above zero at the measured quality, or will be within the horizon as documents
  grow, and nothing else but the current option does better.
- do not deploy: all else.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lamella.decide.model import Choice, Gain, Verdict, World, cost, net, pace, why_out

FARTHEST = 100.0
"""An input is looked at from a hundredth to a hundred times its value."""
_STEPS = 240
PRICE_DAYS, MODEL_DAYS = 90, 180


@dataclass(frozen=True)
class Case:
    """All that a verdict follows from.

    Attributes:
        growth: of documents, a month.
    """

    world: World
    choices: tuple[Choice, ...]
    current: str
    proposal: str
    growth: float = 0.0

    def choice(self, name: str) -> Choice:
        return next(c for c in self.choices if c.name == name)

    def net_of(self, name: str, low: bool = False) -> float:
        return net(self.choice(name), self.choice(self.current), self.world, low)

    @property
    def net(self) -> float:
        """Of the proposal."""
        return self.net_of(self.proposal)


def judge(case: Case) -> Verdict:
    """See above."""
    proposal = case.choice(case.proposal)
    if why_out(proposal, case.world):
        return "do not deploy"
    rivals = rivals_of(case)
    best_rival = max((case.net_of(c.name) for c in rivals), default=-math.inf)
    value, low = case.net, case.net_of(case.proposal, low=True)
    if low > 0 and value >= best_rival:
        return "deploy"
    if best_rival > max(value, 0.0):
        return "do not deploy"
    if value > 0 or (case.growth > 0 and pays_from(case) is not None):
        return "wait"
    return "do not deploy"


def rivals_of(case: Case) -> list[Choice]:
    """Options beside the two, those that are out left aside."""
    return [c for c in case.choices if c.name not in (case.proposal, case.current) and not why_out(c, case.world)]


def pays_from(case: Case) -> int | None:
    """First month within the horizon in which the proposal's net value is above zero, as documents grow."""
    for month in range(int(case.world.horizon) + 1):
        grown = replace(case.world, documents=case.world.documents * (1 + case.growth) ** month)
        if net(case.choice(case.proposal), case.choice(case.current), grown) > 0:
            return month
    return None


# ---- inputs, one by one ----------------------------------------------------------------------------

_OF_WORLD = {"documents per month": "documents", "input tokens": "input_tokens", "output tokens": "output_tokens", "peak factor": "peak",
             "staff cost an hour": "staff_per_hour", "hours a month": "hours", "latency target": "latency_target"}  # fmt: skip
_OF_CHOICE = {"machine an hour": "machine_per_hour", "documents per second": "documents_per_s", "price of input": "input_price",
              "price of output": "output_price", "paid once": "once",
              "re-training": "retrain", "staff hours a month": "staff_hours_per_month",
              "other a month": "per_month", "p99": "latency_p99_s", "share of the bound": "share",
              "input tokens": "own_input_tokens", "output tokens": "own_output_tokens"}  # fmt: skip
_WITHIN = {"peak factor": (1.0, math.inf), "hours a month": (0.0, 744.0), "share of the bound": (0.0, 1.0),
           "growth a month": (-1.0, 10.0)}  # fmt: skip
"""Values that an input cannot have lie outside."""


RANGE_FACTOR = 1e6
"""Ranges reach no further from a value: beyond, floats leave their own range and no answer means anything."""


def _within(name: str) -> tuple[float, float]:
    return _WITHIN.get(name.rpartition(": ")[2], (-math.inf, math.inf))


def inputs_of(case: Case) -> dict[str, float]:
    """Every number that is not zero, by the name under which it can be changed."""
    found = {name: getattr(case.world, key) for name, key in _OF_WORLD.items()}
    found["worth of a wrong label" if case.world.by_label else "worth of a point of F1"] = case.world.worth
    for c in case.choices:
        if c.name not in (case.proposal, case.current):
            continue
        found |= {f"{c.name}: {name}": getattr(c, key) for name, key in _OF_CHOICE.items()}
    proposal = case.choice(case.proposal)
    found[f"{proposal.name}: quality gain"] = proposal.gain.value
    found["growth a month"] = case.growth
    return {name: value for name, value in found.items() if value is not None and value != 0 and math.isfinite(value)}


def changed(case: Case, name: str, value: float) -> Case:
    """The case with one input set."""
    if name in ("worth of a wrong label", "worth of a point of F1"):
        return replace(case, world=replace(case.world, worth=value))
    if name in _OF_WORLD:
        fields: dict[str, Any] = {_OF_WORLD[name]: value}
        return replace(case, world=replace(case.world, **fields))
    if name == "growth a month":
        return replace(case, growth=value)
    owner, _, what = name.rpartition(": ")

    def one(c: Choice) -> Choice:
        if c.name != owner:
            return c
        if what == "quality gain":
            more = value - c.gain.value
            return replace(c, gain=Gain(value, c.gain.low + more, c.gain.high + more))
        of_choice: dict[str, Any] = {_OF_CHOICE[what]: value}
        return replace(c, **of_choice)

    return replace(case, choices=tuple(one(c) for c in case.choices))


@dataclass(frozen=True)
class Flip:
    """The value of an input nearest to its own at which the verdict is another."""

    name: str
    now: float
    at: float
    verdict: Verdict

    @property
    def distance(self) -> float:
        """By ratio, in logarithms; where the sign changes, of the change to the value now."""
        if self.at * self.now > 0:
            return abs(math.log(self.at / self.now))
        return math.log1p(abs(self.at - self.now) / abs(self.now))


def flip(case: Case, name: str) -> Flip | None:
    """The nearest value at which the verdict is another; None: there is none within a hundredth and a hundred times (of a quality
    gain: within 100 points). Steps grow from 0.01 % to 4 % of the value: a window narrower than that may be missed."""
    now, value = judge(case), inputs_of(case)[name]
    low, high = _within(name)
    found = []
    for direction in (1.0, -1.0):
        before = value
        for there in _tries(name, value, direction):
            if not low <= there <= high:
                break
            if judge(changed(case, name, there)) != now:
                at = _narrow(case, name, before, there, now)
                found.append(Flip(name, value, at, judge(changed(case, name, at))))
                break
            before = there
    return min(found, key=lambda f: f.distance) if found else None


def _tries(name: str, value: float, direction: float) -> Iterator[float]:
    additive = name.endswith(": quality gain")
    for k in range(1, _STEPS + 1):
        if additive:
            yield value + direction * (k / _STEPS) ** 2
        else:
            yield value * FARTHEST ** (direction * (k / _STEPS) ** 2)


def _narrow(case: Case, name: str, same: float, other: float, now: Verdict) -> float:
    for _ in range(100):
        middle = (same + other) / 2
        if judge(changed(case, name, middle)) == now:
            same = middle
        else:
            other = middle
    return other


def flips(case: Case) -> list[Flip]:
    """Of every input that has one, the nearest first."""
    return sorted((f for name in inputs_of(case) if (f := flip(case, name)) is not None), key=lambda f: f.distance)


def fast_enough(case: Case) -> Case:
    """The same, were the proposal within the latency target."""

    def one(c: Choice) -> Choice:
        if c.name != case.proposal:
            return c
        here = pace(c, case.world)
        return replace(c, points=(), documents_per_s=here.documents_per_s, latency_p99_s=None)

    return replace(case, choices=tuple(one(c) for c in case.choices))


def range_of(case: Case, name: str, value: float) -> tuple[float, float]:
    """Of an input that was given none: half and twice, as far as it can go; of a quality gain its 95 % interval."""
    g = case.choice(case.proposal).gain
    if name.endswith(": quality gain") and g.low < g.high:
        return g.low, g.high
    low, high = _within(name)
    ends = sorted((0.5 * value, 2 * value))
    return max(low, ends[0]), min(high, ends[1])


def sensitivity(case: Case, ranges: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """Net value and verdict at each input's low and high value, the widest first."""
    rows = []
    for name, value in inputs_of(case).items():
        low, high = ranges.get(name) or range_of(case, name, value)
        at = [changed(case, name, v) for v in (low, high)]
        rows.append({"input": name, "low": low, "high": high, "net_low": at[0].net, "net_high": at[1].net,
                     "verdict_low": judge(at[0]), "verdict_high": judge(at[1])})  # fmt: skip
    return sorted(rows, key=lambda r: -abs(r["net_high"] - r["net_low"]))


def check_ranges(case: Case, ranges: Mapping[str, tuple[float, float]]) -> str:
    """What is wrong with ranges that were given; "" if nothing."""
    inputs = inputs_of(case)
    for name, (low, high) in ranges.items():
        if name not in inputs:
            return f"names no input: {name!r}; inputs: {', '.join(inputs)}"
        least, most = _within(name)
        if low > high:
            return f"{name!r}: low {low:g} is above high {high:g}"
        signed = name.endswith(": quality gain") or name == "growth a month"
        if low < least or high > most or (low <= 0 and not signed):
            return f"{name!r}: {low:g} to {high:g} is not within {max(least, 0):g} (left out) and {most:g}"
        value = abs(inputs[name])
        if (not signed and low < value / RANGE_FACTOR) or max(abs(low), abs(high)) > max(value, 1.0) * RANGE_FACTOR:
            return f"{name!r}: {low:g} to {high:g} is further than a factor of {RANGE_FACTOR:g} from {inputs[name]:g}; nearer values"
    return ""


def look_again(
    today: datetime.date, price_dates: Sequence[datetime.date], retrain_months: float, review: datetime.date | None
) -> tuple[datetime.date, str]:
    """(date, why): the earliest of the re-training period, 90 days after the oldest price, 180 days (new base models come out),
    and the date that was given; tomorrow at the earliest."""
    dates: list[tuple[datetime.date, str]] = [(today + datetime.timedelta(days=MODEL_DAYS), "new base models come out")]
    if math.isfinite(retrain_months):
        dates.append((today + datetime.timedelta(days=round(30.4 * retrain_months)), "re-training is due"))
    if price_dates:
        oldest = min(price_dates)
        due = oldest + datetime.timedelta(days=PRICE_DAYS)
        late = "the oldest price is 90 days old then" if due > today else f"a price of {oldest} is older than 90 days"
        dates.append((due, late))
    if review is not None:
        dates.append((review, "as asked"))
    when, why = min(dates)
    return max(when, today + datetime.timedelta(days=1)), why


def sentence(case: Case, verdict: Verdict, money: Callable[[float], str]) -> str:
    """The verdict in words."""
    p, current = case.choice(case.proposal), case.choice(case.current)
    value = case.net
    out = why_out(p, case.world)
    if out:
        return f"Do not deploy {p.name}: {out}{_beside(case, money)}."
    machines = cost(p, case.world).machines
    at = f"{machines:,} machine{'s' * (machines != 1)}" if p.hosted else "the API"
    if verdict == "deploy":
        return f"Deploy {p.name}: on {at} it is worth {money(value)} a month more than {current.name}."
    best = max(rivals_of(case), key=lambda c: case.net_of(c.name), default=None)
    if best is not None and case.net_of(best.name) > max(value, 0.0):
        own = f"would lose {money(-value)}" if value < 0 else f"would be worth {money(value)} more"
        return (f"Do not deploy {p.name}: it {own} a month beside {current.name}, while {best.name} is worth "
                f"{money(case.net_of(best.name))} more.")  # fmt: skip
    if verdict == "wait":
        if value > 0:
            return f"Wait: {p.name} would be worth {money(value)} a month, but not at the lower end of what its quality may be."
        return f"Wait: {p.name} loses {money(-value)} a month now, and pays from month {pays_from(case)} on if documents grow as said."
    if value == 0:
        return f"Do not deploy {p.name}: it is worth no more than {current.name}."
    return f"Do not deploy {p.name}: it would lose {money(-value)} a month beside {current.name}."


def _beside(case: Case, money: Callable[[float], str]) -> str:
    """What it would be worth were it not out."""
    if case.net < 0:
        return f", and it would lose {money(-case.net)} a month beside {case.current}"
    return f", though it would be worth {money(case.net)} a month"
