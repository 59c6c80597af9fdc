"""Money: what each option costs and earns. All inputs are named numbers, so that each can be changed alone.

    self-hosted a month = machines x price an hour x hours      machines = ceil(documents x peak / (documents/s x 3600 x hours))
    documents/s         = given, or from a plan's bounds at b sequences: share / (output tokens / written/s + input tokens / read/s)
    p99 from a plan     = spread x b / (documents/s)            (Little's law), at the b with most documents/s that meets the target
    API a month         = documents x (input tokens x price + output tokens x price) / 10^6
    both                + (once + staff hours once x rate) / horizon + retrain / every + (staff hours x rate + other) a month
    gain a month        = F1 points over the current option x worth of a point       (or fewer wrong labels x cost of one)
    net value a month   = gain - (its cost - the current option's cost)

A difference whose 95 % interval holds zero counts as none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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
class Point:
    """Bounds of one machine at so many sequences at once, from a plan: tokens a second of all together."""

    sequences: int
    written_per_s: float
    read_per_s: float


@dataclass(frozen=True)
class Choice:
    """One option with its numbers.

    Attributes:
        hosted: whether on one's own machines. machine_per_hour, documents_per_s: of one machine.
        input_price, output_price: per million tokens. out: why it is no choice; "" if it is one.
        retrain_every: months; inf: never.
        points: what a plan says, in the place of documents_per_s and latency_p99_s; share: of these bounds that a server reaches;
            spread: p99 over mean latency.
        own_input_tokens, own_output_tokens: of a document, where this option's differ from the others'; None: they do not.
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
    points: tuple[Point, ...] = ()
    share: float = 1.0
    spread: float = 1.0
    own_input_tokens: float | None = None
    own_output_tokens: float | None = None


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
    latency_target: float = math.inf
    """Seconds: an option whose p99 is above is out."""


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


def tokens(choice: Choice, world: World) -> tuple[float, float]:
    """Input and output tokens of a document."""
    given = choice.own_input_tokens, choice.own_output_tokens
    return (world.input_tokens if given[0] is None else given[0], world.output_tokens if given[1] is None else given[1])


@dataclass(frozen=True)
class Pace:
    """Of one machine: documents a second, and seconds of an answer (None: unknown) at so many sequences at once (0: unknown)."""

    documents_per_s: float
    latency_p99_s: float | None
    sequences: int = 0


def paces(choice: Choice, world: World) -> list[Pace]:
    """What a plan's points give."""
    read, written = tokens(choice, world)
    found = []
    for p in choice.points:
        rate = choice.share / (written / p.written_per_s + read / p.read_per_s)
        found.append(Pace(rate, choice.spread * p.sequences / rate, p.sequences))
    return found


def pace(choice: Choice, world: World) -> Pace:
    """Most documents a second within the latency target; where no point meets it, the quickest answers."""
    if not choice.points:
        return Pace(choice.documents_per_s, choice.latency_p99_s)
    ways = paces(choice, world)
    meeting = [p for p in ways if p.latency_p99_s is not None and p.latency_p99_s <= world.latency_target]
    if meeting:
        return max(meeting, key=lambda p: p.documents_per_s)
    return min(ways, key=lambda p: p.latency_p99_s or 0.0)


def why_out(choice: Choice, world: World) -> str:
    """Why an option is no choice; "" if it is one."""
    latency = pace(choice, world).latency_p99_s
    if not choice.out and latency is not None and latency > world.latency_target:
        return f"its p99 of {latency:.3g} s misses the target of {world.latency_target:.3g} s"
    return choice.out


def capacity_of_one(choice: Choice, world: World) -> float:
    """Documents a month that one machine answers at full load."""
    return pace(choice, world).documents_per_s * SECONDS * world.hours


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
    read, written = tokens(choice, world)
    return (read * choice.input_price + written * choice.output_price) / MILLION


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
    """Fewest documents a month at which `choice` costs no more than `other`; None: at no volume (between two of one's own: within the
    first 200,000 machines of the other).

    With whole machines the cost of one's own is a staircase: just above, at the next stair, it may cost more again.
    """
    if choice.hosted and not other.hosted:
        price, extra = token_price(other, world), sum(fixed(choice, world).values()) - sum(fixed(other, world).values())
        if price <= 0:
            return None
        step = capacity_of_one(choice, world) / world.peak
        machine = choice.machine_per_hour * world.hours
        if machine + extra <= price * step:
            return max(0.0, (machine + extra) / price)
        if machine >= price * step:
            return None  # every further machine costs more than it saves
        machines = math.ceil(extra / (price * step - machine))  # the first stair whose far end is paid for
        return max((machines * machine + extra) / price, (machines - 1) * step)
    return _at_the_others_stairs(choice, other, world)


STAIRS = 200_000
"""Stairs of the other option's cost that are looked at, at most."""


def _at_the_others_stairs(choice: Choice, other: Choice, world: World) -> float | None:
    """Against one's own machines, or between two APIs.

    What `choice` costs more than `other` falls only where the other needs a further machine (or, between APIs, along its
    price). So the first volume is just above one of the other's stairs, the first of which is at nothing.
    """
    extra = sum(fixed(choice, world).values()) - sum(fixed(other, world).values())
    if not other.hosted:
        saved = token_price(other, world) - token_price(choice, world)
        if extra < 0 or (extra == 0 and saved >= 0):
            return 0.0
        return extra / saved if saved > 0 else None
    step = capacity_of_one(other, world) / world.peak
    theirs = other.machine_per_hour * world.hours
    mine = choice.machine_per_hour * world.hours if choice.hosted else token_price(choice, world) * step
    own = capacity_of_one(choice, world) / world.peak if choice.hosted else step
    for stair in range(STAIRS):
        documents = stair * step * (1 + 1e-8)
        machines = max(1, math.ceil(documents / own - 1e-9)) if choice.hosted else stair
        if machines * mine + extra <= (stair + 1) * theirs * (1 + 1e-12):
            return documents
        # from here on it can only fall further behind: one machine more or less at each end
        if mine / own >= theirs / step and stair * step * (mine / own - theirs / step) > theirs - extra:
            return None
    return None


def over_utilisation(choice: Choice, world: World) -> list[tuple[float, float]]:
    """(utilisation, money per 1,000 documents) of one machine; of an API at the world's volume, as it has none."""
    found = []
    for k in range(1, 21):
        share = k / 20
        if not choice.hosted:
            found.append((share, 1000 * cost(choice, world).total / world.documents))
            continue
        documents = share * capacity_of_one(choice, world)
        month = choice.machine_per_hour * world.hours + sum(fixed(choice, world).values())
        found.append((share, 1000 * month / documents))
    return found


Verdict = Literal["deploy", "do not deploy", "wait"]
