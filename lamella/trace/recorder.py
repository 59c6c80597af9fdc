"""What this process spends its time on: spans by cause, kept for the last steps and summed for every step. No torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

Cause = Literal["load", "dequantise", "compute", "send", "receive", "reduce", "wait_peer", "wait_disk", "wait_host",
                "optimizer", "save"]  # fmt: skip
CAUSES: tuple[Cause, ...] = get_args(Cause)
BUSY: tuple[Cause, ...] = ("load", "dequantise", "compute")
"""Causes that are the device's own work on a step."""


@dataclass(frozen=True)
class Span:
    """One stretch of time. `start_s` and `end_s` are `time.perf_counter()`; `lane` tells threads apart ("main", "read",
    "send", ...); `peer` is the other rank of a transfer."""

    cause: Cause
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0
    peer: int | None = None
    lane: str = "main"


@dataclass
class StepTotals:
    """Seconds and bytes by cause of one step, main lane alone."""

    seconds: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)


class Recorder:
    """Collects spans; always on, since a span costs about a microsecond.

    Args:
        keep_steps: spans of so many last steps are kept (totals: of the step under way).
    """

    def __init__(self, keep_steps: int = 5) -> None:
        self.steps: deque[tuple[int, list[Span]]] = deque(maxlen=max(keep_steps, 1))
        self._spans: list[Span] = []
        self.totals = StepTotals()

    def begin_step(self, step: int) -> None:
        """Spans from here on belong to this step."""
        self._spans = []
        self.steps.append((step, self._spans))
        self.totals = StepTotals()

    def add(self, span: Span) -> None:
        self._spans.append(span)
        if span.lane == "main":
            t = self.totals
            t.seconds[span.cause] = t.seconds.get(span.cause, 0.0) + span.end_s - span.start_s
            t.nbytes[span.cause] = t.nbytes.get(span.cause, 0) + span.nbytes

    @contextmanager
    def span(
        self, cause: Cause, name: str, nbytes: int = 0, peer: int | None = None, lane: str = "main"
    ) -> Iterator[None]:
        """Time what happens inside."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(Span(cause, name, start_s, time.perf_counter(), nbytes, peer, lane))


RECORDER = Recorder()
"""This process's own."""
