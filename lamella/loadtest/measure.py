"""From timestamps to the figures of `loadtest.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lamella.errors import UserError

ENOUGH = 100
"""Samples from which a p99 is more than the slowest one."""
TARGETS = ("ttft", "tpot", "e2e", "label")


@dataclass(frozen=True)
class Answer:
    """One request's outcome; times by the clock of the run.

    Attributes:
        end_s: last byte, or the refusal.
        status: "rejected" is HTTP 429 alone.
        first_s, last_s: first and last piece with text or reasoning; None: nothing was streamed.
        input, output, reasoning: tokens as the server counts them; None: it does not say.
        label: what became of the label; None: none was asked for, or no answer.
        said: the server's message when it is not "ok".
    """

    end_s: float
    status: Literal["ok", "rejected", "error"]
    first_s: float | None = None
    last_s: float | None = None
    input: int | None = None
    output: int | None = None
    reasoning: int | None = None
    label: Literal["completed", "truncated", "invalid"] | None = None
    said: str = ""


@dataclass(frozen=True)
class Sample:
    """An answer and when its request was meant to be sent. Latencies count from `intended_s`, not from `sent_s`: a client
    that falls behind must not hide how long its users wait (coordinated omission)."""

    intended_s: float
    sent_s: float
    answer: Answer

    @property
    def e2e_s(self) -> float:
        return self.answer.end_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.answer.first_s is None else self.answer.first_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None below two tokens, or where the server counts none."""
        a = self.answer
        if a.first_s is None or a.last_s is None or a.output is None or a.output < 2:
            return None
        return (a.last_s - a.first_s) / (a.output - 1)

    @property
    def label_s(self) -> float | None:
        """Whole wait for a completed label, thinking included."""
        return self.e2e_s if self.answer.label == "completed" else None

    def value(self, name: str) -> float | None:
        value: float | None = getattr(self, f"{name}_s")
        return value

    def meets(self, targets: Mapping[str, float]) -> bool:
        """Answered, and every target kept; a figure that there is not keeps none."""
        if self.answer.status != "ok":
            return False
        return all((v := self.value(name)) is not None and v <= most for name, most in targets.items())


def figures(values: Sequence[float]) -> dict[str, Any] | None:
    """p50, p90, p99 (linear between samples), mean, the number of samples, and whether those are too few for a p99."""
    if not values:
        return None
    p50, p90, p99 = (float(p) for p in np.percentile(np.asarray(values, np.float64), (50, 90, 99)))
    mean = float(np.mean(values))
    return {
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "mean": mean,
        "samples": len(values),
        "few_for_p99": len(values) < ENOUGH,
    }


def read_targets(texts: Sequence[str]) -> dict[str, float]:
    """`["e2e=2s", "ttft=300ms"]` -> seconds by figure. Raises `UserError`."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, amount = text.partition("=")
        if name not in TARGETS or name in found:
            raise UserError(
                f"--target {text!r}: {'given twice' if name in found else 'no such figure'}",
                fix=f"FIGURE=TIME with one of {', '.join(TARGETS)}",
            )
        found[name] = parse_time(amount, f"--target {text!r}")
    return found


def parse_time(text: str, what: str) -> float:
    """`"300ms"`, `"2s"`, `"5min"`, `"1h"` or plain seconds -> seconds, above 0. Raises `UserError`."""
    for unit, factor in (("ms", 1e-3), ("min", 60.0), ("s", 1.0), ("h", 3600.0), ("", 1.0)):
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit) if unit else text) * factor
            except ValueError:
                break
            if 0 < value < float("inf"):
                return value
            break
    raise UserError(f"{what}: {text!r} is no time above 0", fix="write it as 300ms, 2s, 5min or 1h")


def _total(samples: Sequence[Sample], name: str) -> int | None:
    counts = [c for s in samples if (c := getattr(s.answer, name)) is not None]
    return sum(counts) if counts else None


def summarise(samples: Sequence[Sample], duration_s: float, targets: Mapping[str, float]) -> dict[str, Any]:
    """The measured part of one level of `loadtest.json`.

    Args:
        samples: without warm-up.
        duration_s: from the first intended send to the last answer; rates are over it.
        targets: seconds by figure; empty: no goodput.
    """
    by = {status: sum(s.answer.status == status for s in samples) for status in ("ok", "rejected", "error")}
    ok = [s for s in samples if s.answer.status == "ok"]
    tree: dict[str, Any] = {
        "duration_s": duration_s,
        "requests": {"sent": len(samples), "ok": by["ok"], "rejected": by["rejected"], "errors": by["error"]},
    }
    for name in TARGETS:
        tree[f"{name}_s"] = figures([v for s in ok if (v := s.value(name)) is not None])
    labels = [s.answer.label for s in ok if s.answer.label is not None]
    tree["labels"] = None
    if labels:
        tree["labels"] = {"completed": labels.count("completed"), "truncated": labels.count("truncated"),
                          "invalid": labels.count("invalid")}  # fmt: skip
    tree["tokens"] = {name: _total(ok, name) for name in ("input", "output", "reasoning")}
    output = tree["tokens"]["output"]
    tree["throughput"] = {
        "requests_per_s": by["ok"] / duration_s,
        "output_tokens_per_s": None if output is None else output / duration_s,
        "labels_per_s": labels.count("completed") / duration_s if labels else None,
    }
    tree["goodput"] = None
    if targets:
        good = sum(s.meets(targets) for s in samples)
        tree["goodput"] = {
            "target": {name: f"{seconds:g} s" for name, seconds in targets.items()},
            "requests_per_s": good / duration_s,
            "share": good / len(samples) if samples else 0.0,
        }
    tree["late_s"] = figures([s.sent_s - s.intended_s for s in samples])
    said: dict[str, int] = {}
    for s in samples:
        if s.answer.status == "error":
            said[s.answer.said] = said.get(s.answer.said, 0) + 1
    tree["errors"] = [{"said": what, "count": n} for what, n in sorted(said.items(), key=lambda item: -item[1])[:10]]
    return tree
