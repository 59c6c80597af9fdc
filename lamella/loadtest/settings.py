"""Options of a load test, checked."""

from __future__ import annotations

import math
from pathlib import Path

from lamella.errors import UserError
from lamella.eval.task import load_task
from lamella.loadtest.prompts import Prompt, made_up, of_jsonl, of_task

DEFAULT_WORDS, DEFAULT_TOKENS = "128", 64


def read_levels(concurrency: str | None, rate: float | None) -> tuple[int, ...]:
    """Levels of the closed loop; () for an open loop. Raises `UserError`."""
    if rate is not None:
        if concurrency is not None:
            raise UserError("--concurrency and --rate", fix="give one: a closed loop, or arrivals that do not wait")
        if not math.isfinite(rate) or rate <= 0:
            raise UserError(f"--rate {rate:g}", fix="give requests per second above 0")
        return ()
    levels = []
    for part in (concurrency or "1").split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= 10_000:
            raise UserError(
                f"--concurrency {concurrency!r}: {part!r} is no level", fix="give levels from 1 to 10000, as 1,8,32"
            )
        levels.append(int(part))
    return tuple(levels)


def read_prompts(task: Path | None, prompts: Path | None, synthetic: str | None, seed: int) -> tuple[list[Prompt], int]:
    """(Prompts, default token limit of an answer). Raises `UserError`: several sources, or a broken one."""
    if sum(x is not None for x in (task, prompts, synthetic)) > 1:
        raise UserError("several kinds of prompts", fix="give one of --task, --prompts and --synthetic")
    if task is not None:
        loaded = load_task(task)
        return of_task(loaded), loaded.config.max_new_tokens
    if prompts is not None:
        return of_jsonl(prompts), DEFAULT_TOKENS
    return made_up(synthetic or DEFAULT_WORDS, seed), DEFAULT_TOKENS
