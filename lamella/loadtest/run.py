"""A load test, level by level, into `loadtest.json`."""

from __future__ import annotations

import asyncio
import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from lamella.console import Meter, progress
from lamella.endpoint.client import Endpoint, Refused
from lamella.errors import UserError
from lamella.files import write_json
from lamella.loadtest.ask import Asker
from lamella.loadtest.drive import Clock, Until, closed_loop, open_loop
from lamella.loadtest.measure import ENOUGH, Sample, summarise
from lamella.loadtest.prompts import Models, Prompt

REAL = Clock(time.monotonic, asyncio.sleep)
MANY = 10_000
"""Connections of an open loop: the client must not hold requests back."""


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        concurrency: levels of the closed loop; empty: an open loop of `rate`.
        rate: requests per second.
        warmup: requests before each level that are not measured.
        targets: seconds by figure.
    """

    url: str
    mode: str
    concurrency: tuple[int, ...]
    rate: float | None
    until: Until
    warmup: int = 0
    seed: int = 0
    max_tokens: int = 64
    timeout_s: float = 300.0
    targets: dict[str, float] | None = None
    key_env: str | None = None


def base_of(url: str) -> str:
    """The address up to and with `/v1`. Raises `UserError`."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{url!r} is no address of a server", fix="give it as http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query:
        raise UserError(
            "the address holds a name, a password or a query",
            fix="give the address alone, and the key with --key-env",
        )
    return url.rstrip("/") if parts.path.strip("/") else url.rstrip("/") + "/v1"


def the_only_model(plan: Plan, transport: httpx.AsyncBaseTransport | None = None) -> str:
    """The server's one model. Raises `UserError`: no answer, or not one."""

    async def ask() -> dict[str, Any]:
        async with Endpoint(plan.url, key_env=plan.key_env, timeout_s=30, transport=transport) as endpoint:
            return await endpoint.get("/models")

    try:
        tree = asyncio.run(ask())
    except Refused as refused:
        raise UserError(
            f"{plan.url}/models: {refused}", fix="start the server, or name a model with --model"
        ) from refused
    found = tree.get("data")
    names = [str(m["id"]) for m in found if isinstance(m, dict) and "id" in m] if isinstance(found, list) else []
    if len(names) != 1:
        raise UserError(f"the server has {len(names)} models", fix=f"choose with --model: {', '.join(names) or '-'}")
    return names[0]


def run(
    plan: Plan, prompts: Sequence[Prompt], models: Models, output: Path,
    transport: httpx.AsyncBaseTransport | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run all levels; the file is written after each, so an interrupt keeps those that are whole.

    Raises:
        UserError: no request of a level's warm-up or of the level was answered.
    """
    levels: list[dict[str, Any]] = []
    tree: dict[str, Any] = {}
    for concurrency in plan.concurrency or (None,):
        level = _level(plan, prompts, models, concurrency, transport)
        levels.append(level)
        tree = _whole(plan, models, levels)
        write_json(output, tree)
    return tree


def _level(
    plan: Plan, prompts: Sequence[Prompt], models: Models, concurrency: int | None,
    transport: httpx.AsyncBaseTransport | None,
) -> dict[str, Any]:  # fmt: skip
    name = f"{concurrency} at a time" if concurrency is not None else f"{plan.rate:g} requests/s"
    expected = _expected(plan)
    with progress(name, expected, "requests" if plan.until.requests is not None else "s") as meter:
        samples, duration_s = asyncio.run(_measure(plan, prompts, models, concurrency, transport, meter))
    if not samples:
        raise UserError(f"{name}: no request was due in this time", fix="give a longer --duration or a higher --rate")
    level = {"concurrency": concurrency, "rate": None if concurrency is not None else plan.rate,
             **summarise(samples, duration_s, plan.targets or {})}  # fmt: skip
    if not level["requests"]["ok"] and not level["requests"]["rejected"]:
        said = level["errors"][0]["said"] if level["errors"] else ""
        raise UserError(
            f"{name}: none of {len(samples)} requests was answered: {said}",
            fix="look at the server, the model's name and the key",
        )
    level["notes"] = _notes(plan, level)
    return level


def _expected(plan: Plan) -> float:
    if plan.until.requests is not None:
        return plan.until.requests
    assert plan.until.duration_s is not None
    return plan.until.duration_s


async def _measure(
    plan: Plan, prompts: Sequence[Prompt], models: Models, concurrency: int | None,
    transport: httpx.AsyncBaseTransport | None, meter: Meter,
) -> tuple[list[Sample], float]:  # fmt: skip
    async with Endpoint(
        plan.url, key_env=plan.key_env, timeout_s=plan.timeout_s, attempts=1, transport=transport,
        connections=concurrency or MANY,
    ) as endpoint:  # fmt: skip
        ask = Asker(endpoint, prompts, models, plan.mode, max_tokens=plan.max_tokens, timeout_s=plan.timeout_s,
                    now=REAL.now)  # fmt: skip
        if plan.warmup:
            warm = await closed_loop(ask, concurrency or min(plan.warmup, 8), Until(plan.warmup), REAL)
            if all(s.answer.status == "error" for s in warm):
                raise UserError(f"warm-up: none of {len(warm)} requests was answered: {warm[0].answer.said}",
                                fix="look at the server, the model's name and the key")  # fmt: skip
        start_s = REAL.now()
        done = _shows(meter, plan.until, start_s)
        if concurrency is not None:
            samples = await closed_loop(ask, concurrency, plan.until, REAL, done, plan.warmup)
        else:
            assert plan.rate is not None
            samples = await open_loop(ask, plan.rate, plan.seed, plan.until, REAL, done, plan.warmup)
        return samples, REAL.now() - start_s


def _shows(meter: Meter, until: Until, start_s: float) -> Callable[[Sample], None]:
    shown_s = start_s

    def done(sample: Sample) -> None:
        nonlocal shown_s
        if until.requests is not None:
            meter.advance(1)
        else:
            now_s = max(sample.answer.end_s, shown_s)
            meter.advance(now_s - shown_s)
            shown_s = now_s

    return done


def _notes(plan: Plan, level: dict[str, Any]) -> list[str]:
    notes = []
    if plan.warmup:
        notes.append(f"{plan.warmup} warm-up requests before the level are left out")
    answered = level["requests"]["ok"]
    if answered < ENOUGH:
        notes.append(f"{answered} answered requests: p99 of fewer than {ENOUGH} is little more than the slowest")
    if level["rate"] is not None:
        notes.append("latencies count from when a request was due, not from when it was sent")
    if plan.mode != "classify" and answered and level["tokens"]["output"] is None:
        notes.append("the server counts no tokens (usage): no time per output token")
    late = level["late_s"]
    if late and late["p99"] > 0.1:
        notes.append(f"the client was late: p99 of sending {late['p99']:.2g} s after due; it is part of the latencies")
    return notes


def _whole(plan: Plan, models: Models, levels: list[dict[str, Any]]) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return whole(plan, models.shown, "lamella", levels, now)


def whole(plan: Plan, model: str, tool: str, levels: list[dict[str, Any]], created: str) -> dict[str, Any]:
    """`loadtest.json`: the last level's fields at the top, and all levels."""
    head = {"kind": "loadtest", "version": 1, "url": plan.url, "model": model, "created": created, "tool": tool,
            "mode": plan.mode}  # fmt: skip
    asked = {"requests": plan.until.requests, "duration_s": plan.until.duration_s, "warmup": plan.warmup,
             "seed": plan.seed, "max_tokens": plan.max_tokens, "timeout_s": plan.timeout_s}  # fmt: skip
    assert all(math.isfinite(level["duration_s"]) for level in levels)
    return {**head, **levels[-1], "asked": asked, "levels": levels}
