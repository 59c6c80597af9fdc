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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lamella.decide.model import Choice, Gain, Verdict, World, cost, net

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
    if proposal.out:
        return "do not deploy"
    rivals = [c for c in case.choices if c.name not in (case.proposal, case.current) and not c.out]
    best_rival = max((case.net_of(c.name) for c in rivals), default=-math.inf)
    value, low = case.net, case.net_of(case.proposal, low=True)
    if low > 0 and value >= best_rival:
        return "deploy"
    if best_rival > max(value, 0.0):
        return "do not deploy"
    if value > 0 or (case.growth > 0 and pays_from(case) is not None):
        return "wait"
    return "do not deploy"


def pays_from(case: Case) -> int | None:
    """First month within the horizon in which the proposal's net value is above zero, as documents grow."""
    for month in range(int(case.world.horizon) + 1):
        grown = replace(case.world, documents=case.world.documents * (1 + case.growth) ** month)
        if net(case.choice(case.proposal), case.choice(case.current), grown) > 0:
            return month
    return None


# ---- inputs, one by one ----------------------------------------------------------------------------

_OF_WORLD = {"documents per month": "documents", "input tokens": "input_tokens", "output tokens": "output_tokens", "peak factor": "peak",
             "staff cost an hour": "staff_per_hour"}  # fmt: skip
_OF_CHOICE = {"machine an hour": "machine_per_hour", "documents per second": "documents_per_s", "price of input": "input_price",
              "price of output": "output_price", "paid once": "once",
              "re-training": "retrain", "staff hours a month": "staff_hours_per_month",
              "other a month": "per_month"}  # fmt: skip


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
    return {name: value for name, value in found.items() if value and math.isfinite(value)}


def changed(case: Case, name: str, value: float) -> Case:
    """The case with one input set."""
    if name in ("worth of a wrong label", "worth of a point of F1"):
        return replace(case, world=replace(case.world, worth=value))
    if name in _OF_WORLD:
        fields: dict[str, Any] = {_OF_WORLD[name]: value}
        return replace(case, world=replace(case.world, **fields))
    owner, _, what = name.rpartition(": ")

    def one(c: Choice) -> Choice:
        if c.name != owner:
            return c
        if what == "quality gain":
            factor = value / c.gain.value
            return replace(c, gain=Gain(value, c.gain.low * factor, c.gain.high * factor))
        of_choice: dict[str, Any] = {_OF_CHOICE[what]: value}
        return replace(c, **of_choice)

    return replace(case, choices=tuple(one(c) for c in case.choices))


def flip(case: Case, name: str) -> tuple[float, Verdict] | None:
    """The value of an input nearest to its own (by ratio) at which the verdict is another, and that verdict; None: there is none
    within a hundredth and a hundred times."""
    now, value = judge(case), inputs_of(case)[name]
    least = 1.0 if name == "peak factor" else -math.inf
    found = []
    for direction in (1.0, -1.0):
        before = value
        for k in range(1, _STEPS + 1):
            there = value * FARTHEST ** (direction * k / _STEPS)
            if there < least:
                break
            if judge(changed(case, name, there)) != now:
                found.append(_narrow(case, name, before, there, now))
                break
            before = there
    return min(found, key=lambda f: abs(math.log(f[0] / value))) if found else None


def _narrow(case: Case, name: str, same: float, other: float, now: Verdict) -> tuple[float, Verdict]:
    for _ in range(60):
        middle = math.sqrt(same * other) if same * other > 0 else (same + other) / 2
        if judge(changed(case, name, middle)) == now:
            same = middle
        else:
            other = middle
    return other, judge(changed(case, name, other))


def sensitivity(case: Case, ranges: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """Net value and verdict at each input's low and high value, the widest first; inputs without a range: half and twice."""
    rows = []
    for name, value in inputs_of(case).items():
        low, high = ranges.get(name, (0.5 * value, 2 * value))
        if name == "peak factor" and name not in ranges:
            low = max(low, 1.0)
        at = [changed(case, name, v) for v in (low, high)]
        rows.append({"input": name, "low": low, "high": high, "net_low": at[0].net, "net_high": at[1].net,
                     "verdict_low": judge(at[0]), "verdict_high": judge(at[1])})  # fmt: skip
    return sorted(rows, key=lambda r: -abs(r["net_high"] - r["net_low"]))


def look_again(
    today: datetime.date, price_dates: Sequence[datetime.date], retrain_months: float, review: datetime.date | None
) -> tuple[datetime.date, str]:
    """(date, why): the earliest of the re-training period, 90 days after the oldest price, 180 days (new base models come out),
    and the date that was given; tomorrow at the earliest."""
    dates: list[tuple[datetime.date, str]] = [(today + datetime.timedelta(days=MODEL_DAYS), "new base models come out")]
    if math.isfinite(retrain_months):
        dates.append((today + datetime.timedelta(days=round(30.4 * retrain_months)), "re-training is due"))
    if price_dates:
        dates.append((min(price_dates) + datetime.timedelta(days=PRICE_DAYS), "the oldest price is 90 days old then"))
    if review is not None:
        dates.append((review, "as asked"))
    when, why = min(dates)
    return max(when, today + datetime.timedelta(days=1)), why


def sentence(case: Case, verdict: Verdict, money: Callable[[float], str]) -> str:
    """The verdict in words."""
    p, current = case.choice(case.proposal), case.choice(case.current)
    value = case.net
    if p.out:
        return f"Do not deploy {p.name}: {p.out}."
    at = f"{cost(p, case.world).machines} machine{'s' * (cost(p, case.world).machines != 1)}" if p.hosted else "the API"
    if verdict == "deploy":
        return f"Deploy {p.name}: on {at} it is worth {money(value)} a month more than {current.name}."
    rivals = [c for c in case.choices if c.name not in (case.proposal, case.current) and not c.out]
    best = max(rivals, key=lambda c: case.net_of(c.name), default=None)
    if best is not None and case.net_of(best.name) > max(value, 0.0):
        return (f"Do not deploy {p.name}: {best.name} is worth {money(case.net_of(best.name))} a month more than {current.name}, it "
                f"{money(value)}.")  # fmt: skip
    if verdict == "wait":
        if value > 0:
            return f"Wait: {p.name} would be worth {money(value)} a month, but not at the lower end of what its quality may be."
        return f"Wait: {p.name} loses {money(-value)} a month now, and pays from month {pays_from(case)} on if documents grow as said."
    return f"Do not deploy {p.name}: it would lose {money(-value)} a month beside {current.name}."
