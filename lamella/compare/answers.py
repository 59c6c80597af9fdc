"""What one candidate answered, and what that took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lamella.endpoint.prices import Price
from lamella.eval.metrics import Prediction


@dataclass
class Spent:
    """Sums over answers.

    Attributes:
        input, output, reasoning, cached_input: tokens; reasoning is part of output where the server says so.
        latencies_s: of each answer that was asked for in this or an earlier run; empty where rows are answered together.
        money: in the price's currency; None: no price.
        seconds: of work, for candidates run here. wall_s: of asking an endpoint, in this run.
        uncounted: answers of which the server did not say how many tokens they took.
    """

    input: int = 0
    output: int = 0
    reasoning: int = 0
    cached_input: int = 0
    latencies_s: list[float] = field(default_factory=list)
    money: float | None = None
    retries: int = 0
    from_cache: int = 0
    seconds: float = 0.0
    wall_s: float = 0.0
    uncounted: int = 0

    def latency(self) -> dict[str, float] | None:
        """p50, p99 and mean; None where nothing was timed one by one."""
        if not self.latencies_s:
            return None
        p50, p99 = np.percentile(self.latencies_s, [50, 99])
        return {"p50": float(p50), "p99": float(p99), "mean": float(np.mean(self.latencies_s))}

    def tokens(self) -> dict[str, int]:
        return {
            "input": self.input,
            "output": self.output,
            "reasoning": self.reasoning,
            "cached_input": self.cached_input,
        }


@dataclass
class Answers:
    """A candidate's answers to every test row, in the task's order."""

    predictions: list[Prediction]
    spent: Spent
    notes: list[str] = field(default_factory=list)
    price: Price | None = None
    in_effect: dict[str, Any] = field(default_factory=dict)


def plain(prediction: Prediction) -> dict[str, Any]:
    """For the cache."""
    from dataclasses import asdict

    return asdict(prediction)


def in_order(predictions: Sequence[Prediction], order: Sequence[tuple[str, Any]]) -> list[Prediction]:
    """Predictions as the task's rows stand."""
    by_row = {(p.tenant, p.id): p for p in predictions}
    return [by_row[key] for key in order]
