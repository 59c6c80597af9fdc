"""Money: what each option costs and earns. All inputs are named numbers, so that each can be changed alone.

    self-hosted a month = machines x price an hour x hours      machines = ceil(documents x peak / (documents/s x 3600 x hours))
    API a month         = documents x (input tokens x price + output tokens x price) / 10^6
    both                + (once + staff hours once x rate) / horizon + retrain / every + (staff hours x rate + other) a month
    gain a month        = F1 points over the current option x worth of a point       (or fewer wrong labels x cost of one)
    net value a month   = gain - (its cost - the current option's cost)

A difference whose 95 % interval holds zero counts as none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lamella.decide.settings import Kind

SECONDS = 3600.0
MILLION = 1e6
Inputs = Mapping[str, float]


@dataclass(frozen=True)
class Gain:
    """Quality of an option less the current one's, in shares (0.01 is a point), with its 95 % interval."""

    value: float = 0.0
    low: float = 0.0
    high: float = 0.0

    @property
    def counted(self) -> float:
        """What counts: nothing where the interval holds zero."""
        return self.value if self.low > 0 or self.high < 0 else 0.0

    @property
    def counted_low(self) -> float:
        """The same at the interval's lower end."""
        return self.low if self.low > 0 or self.high < 0 else min(self.low, 0.0)


@dataclass(frozen=True)
class Choice:
    """One option with its numbers.

    Attributes:
        hosted: whether on one's own machines. machine_per_hour, documents_per_s: of one machine.
        input_price, output_price: per million tokens. out: why it is no choice; "" if it is one.
        retrain_every: months; inf: never.
    """

    name: str
    kind: Kind
    hosted: bool
    machine_per_hour: float = 0.0
    documents_per_s: float = math.inf
    input_price: float = 0.0
    output_price: float = 0.0
    once: float = 0.0
    retrain: float = 0.0
    retrain_every: float = math.inf
    staff_hours_once: float = 0.0
    staff_hours_per_month: float = 0.0
    per_month: float = 0.0
    latency_p99_s: float | None = None
    quality: tuple[float, float | None, float | None] | None = None
    gain: Gain = field(default_factory=Gain)
    out: str = ""


@dataclass(frozen=True)
class World:
    """What is the same for all options."""

    documents: float
    input_tokens: float
    output_tokens: float
    peak: float
    hours: float
    horizon: float
    staff_per_hour: float
    worth: float
    """Of 0.01 of F1 a month; or of one wrong label."""
    by_label: bool = False


@dataclass(frozen=True)
class Cost:
    """Money a month, by part; machines: how many (0: an API); utilisation: share of what they could answer."""

    parts: dict[str, float]
    machines: int = 0
    utilisation: float | None = None
    capacity: float | None = None
    """Documents a month of all machines at full load."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def capacity_of_one(choice: Choice, world: World) -> float:
    """Documents a month that one machine answers at full load."""
    return choice.documents_per_s * SECONDS * world.hours


def fixed(choice: Choice, world: World) -> dict[str, float]:
    """What does not depend on volume, a month."""
    return {
        "training and set-up": (choice.once + choice.staff_hours_once * world.staff_per_hour) / world.horizon,
        "re-training": choice.retrain / choice.retrain_every,
        "staff": choice.staff_hours_per_month * world.staff_per_hour,
        "other": choice.per_month,
    }


def token_price(choice: Choice, world: World) -> float:
    """Of a document at an API."""
    return (world.input_tokens * choice.input_price + world.output_tokens * choice.output_price) / MILLION


def cost(choice: Choice, world: World) -> Cost:
    """A month's cost at the world's volume."""
    if not choice.hosted:
        return Cost({"tokens": world.documents * token_price(choice, world), **fixed(choice, world)})
    one = capacity_of_one(choice, world)
    machines = max(1, math.ceil(world.documents * world.peak / one - 1e-9))
    parts = {"machines": machines * choice.machine_per_hour * world.hours, **fixed(choice, world)}
    return Cost(parts, machines, world.documents / (machines * one), machines * one)


def gain(choice: Choice, world: World, low: bool = False) -> float:
    """What its quality is worth a month beside the current option's; `low`: at the lower end of the interval."""
    share = choice.gain.counted_low if low else choice.gain.counted
    return share * world.documents * world.worth if world.by_label else share * 100 * world.worth


def net(choice: Choice, current: Choice, world: World, low: bool = False) -> float:
    """Net value a month of changing from the current option to this one."""
    return gain(choice, world, low) - (cost(choice, world).total - cost(current, world).total)


def break_even(choice: Choice, other: Choice, world: World) -> float | None:
    """Fewest documents a month at which `choice` costs no more than `other`; None: at no volume up to 10^12.

    With whole machines the cost of one's own is a staircase: each stair is looked at.
    """
    if choice.hosted and not other.hosted:
        price, extra = token_price(other, world), sum(fixed(choice, world).values()) - sum(fixed(other, world).values())
        if price <= 0:
            return None
        step = capacity_of_one(choice, world) / world.peak
        machine = choice.machine_per_hour * world.hours
        for machines in range(1, 100_001):
            first = (machines - 1) * step
            wanted = max((machines * machine + extra) / price, first, 0.0)
            if wanted <= machines * step:
                return wanted
            if machine >= price * step and machines > 1:
                return None  # every further machine costs more than it saves
        return None
    return _scan(choice, other, world)


def _scan(choice: Choice, other: Choice, world: World) -> float | None:
    """By doubling and halving, where both or neither have machines, or the API is the choice."""

    def cheaper(documents: float) -> bool:
        here = replace(world, documents=documents)
        return cost(choice, here).total <= cost(other, here).total + 1e-12

    if cheaper(1.0):
        return 0.0
    low, high = 1.0, 1.0
    while not cheaper(high):
        low, high = high, high * 1.25
        if high > 1e12:
            return None
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if cheaper(middle) else (middle, high)
    return high


def over_utilisation(choice: Choice, world: World) -> list[tuple[float, float]]:
    """(utilisation, money per 1,000 documents) of one machine; of an API the price does not depend on it."""
    found = []
    for k in range(1, 21):
        share = k / 20
        if not choice.hosted:
            found.append((share, 1000 * token_price(choice, world)))
            continue
        documents = share * capacity_of_one(choice, world)
        month = choice.machine_per_hour * world.hours + sum(fixed(choice, world).values())
        found.append((share, 1000 * month / documents))
    return found


Verdict = Literal["deploy", "do not deploy", "wait"]
