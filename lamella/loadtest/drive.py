"""When requests are sent: a closed loop of so many users, or arrivals that do not wait for answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from lamella.loadtest.measure import Answer, Sample

Ask = Callable[[int], Awaitable[Answer]]
"""Sends request number n (from 0) and comes back with its outcome; never raises for what a server does."""


@dataclass(frozen=True)
class Clock:
    """Time of a run; tests bring their own."""

    now: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]


@dataclass(frozen=True)
class Until:
    """When no more requests are sent; those on their way are waited for and counted. One or both of the two."""

    requests: int | None = None
    duration_s: float | None = None


async def closed_loop(
    ask: Ask, concurrency: int, until: Until, clock: Clock, done: Callable[[Sample], None] = lambda _: None,
    first: int = 0,
) -> list[Sample]:  # fmt: skip
    """`concurrency` users; each sends its next request when it has its answer."""
    start_s, samples, sent = clock.now(), [], 0

    async def user() -> None:
        nonlocal sent
        while (until.requests is None or sent < until.requests) and (
            until.duration_s is None or clock.now() - start_s < until.duration_s
        ):
            number, sent = first + sent, sent + 1
            now_s = clock.now()
            sample = Sample(now_s, now_s, await ask(number))
            samples.append(sample)
            done(sample)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency if until.requests is None else min(concurrency, until.requests)):
            group.create_task(user())
    return samples


def arrivals(rate: float, seed: int, until: Until) -> Iterator[float]:
    """Seconds from the start at which requests are due: a Poisson process of `rate` requests per second."""
    draw, at_s, n = random.Random(seed), 0.0, 0
    while until.requests is None or n < until.requests:
        at_s += draw.expovariate(rate)
        if until.duration_s is not None and at_s >= until.duration_s:
            return
        yield at_s
        n += 1


async def open_loop(
    ask: Ask, rate: float, seed: int, until: Until, clock: Clock, done: Callable[[Sample], None] = lambda _: None,
    first: int = 0,
) -> list[Sample]:  # fmt: skip
    """Requests are sent when they are due, however many are still unanswered."""
    start_s, samples = clock.now(), []

    async def send(number: int, due_s: float) -> None:
        sent_s = clock.now()
        sample = Sample(due_s, sent_s, await ask(number))
        samples.append(sample)
        done(sample)

    async with asyncio.TaskGroup() as group:
        for n, at_s in enumerate(arrivals(rate, seed, until)):
            wait_s = start_s + at_s - clock.now()
            if wait_s > 0:
                await clock.sleep(wait_s)
            group.create_task(send(first + n, start_s + at_s))
    return samples
