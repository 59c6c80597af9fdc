"""What this process spends its time on: spans by cause, kept for the last steps and summed for every step. No torch."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

Cause = Literal["load", "dequantise", "compute", "send", "receive", "reduce", "wait_peer", "wait_disk", "wait_host",
                "optimizer", "save"]  # fmt: skip
CAUSES: tuple[Cause, ...] = get_args(Cause)
MOST_SPANS = 20_000
"""Kept of one step (about 200 bytes each); later ones count in totals alone."""


class Span(NamedTuple):
    """One stretch of time. `start_s` and `end_s` are `time.perf_counter()`; `lane` tells threads apart ("main", "read",
    "send", ...): one thread to a lane, and "main" is the one that walks; `peer` is the other rank of a transfer or wait."""

    cause: Cause
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0
    peer: int | None = None
    lane: str = "main"


@dataclass
class StepSpans:
    """The spans of one step, in the order in which they ended; `dropped`: beyond `MOST_SPANS`."""

    step: int
    start_s: float
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0


@dataclass
class Totals:
    """Sums since `start_s`.

    Attributes:
        seconds: by cause, main lane alone; a span within another counts for its own cause only.
        nbytes: by cause, all lanes.
        wait_s, link_s: main lane's seconds in `wait_peer`, and in `send` and `receive`, by peer.
        sent: bytes sent, all lanes, by peer.
        by_peer_bytes: of `send` and `receive` whose peer is known, all lanes.
        read_s: seconds of `load` in other lanes: how long the reader was at work.
    """

    start_s: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    wait_s: dict[int, float] = field(default_factory=dict)
    link_s: dict[int, float] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    by_peer_bytes: int = 0
    read_s: float = 0.0


class Timing:
    """A span under way; `nbytes` may be set before it ends."""

    __slots__ = ("_inner_s", "_outer", "_recorder", "cause", "lane", "name", "nbytes", "peer", "start_s")

    def __init__(self, recorder: Recorder, cause: Cause, name: str, nbytes: int, peer: int | None, lane: str) -> None:
        self._recorder = recorder
        self.cause, self.name, self.nbytes, self.peer, self.lane = cause, name, nbytes, peer, lane
        self._inner_s = 0.0

    def __enter__(self) -> Timing:
        if self.lane == "main":
            self._outer: Timing | None = self._recorder._open
            self._recorder._open = self
        self.start_s = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        end_s = time.perf_counter()
        taken_s = end_s - self.start_s
        if self.lane == "main":
            outer = self._recorder._open = self._outer
            if outer is not None:
                outer._inner_s += taken_s
        self._recorder.add(
            Span(self.cause, self.name, self.start_s, end_s, self.nbytes, self.peer, self.lane), taken_s - self._inner_s
        )


class Recorder:
    """Collects spans; always on, since a span costs one to two microseconds.

    Args:
        keep_steps: spans of so many last steps are kept; none before the first step, or with 0.
    """

    def __init__(self, keep_steps: int = 5) -> None:
        self.totals = Totals()
        self._open: Timing | None = None
        self._lock = threading.Lock()
        self.keep(keep_steps)

    def keep(self, steps: int) -> None:
        """Keep the spans of so many last steps from here on; those there are go."""
        self.steps: deque[StepSpans] = deque(maxlen=steps)
        self._now: StepSpans | None = None

    def begin_step(self, step: int) -> None:
        """Spans that end from here on belong to this step."""
        if self.steps.maxlen:
            self._now = StepSpans(step, time.perf_counter())
            self.steps.append(self._now)

    def take_totals(self) -> Totals:
        """Sums since the last call (or since this process began), and begin anew."""
        with self._lock:
            taken, self.totals = self.totals, Totals()
        return taken

    def add(self, span: Span, own_s: float | None = None) -> None:
        """Take a span; `own_s`: its seconds without those of spans within it (None: all)."""
        now = self._now
        if now is not None:
            if len(now.spans) < MOST_SPANS:
                now.spans.append(span)
            else:
                now.dropped += 1
        seconds = span.end_s - span.start_s if own_s is None else own_s
        cause, peer = span.cause, span.peer
        if span.lane == "main":
            totals = self.totals
            totals.seconds[cause] = totals.seconds.get(cause, 0.0) + seconds
            if peer is not None and cause in ("wait_peer", "send", "receive"):
                by_peer = totals.wait_s if cause == "wait_peer" else totals.link_s
                by_peer[peer] = by_peer.get(peer, 0.0) + seconds
            if not span.nbytes:
                return
        with self._lock:
            totals = self.totals
            totals.nbytes[cause] = totals.nbytes.get(cause, 0) + span.nbytes
            if peer is not None and cause in ("send", "receive"):
                totals.by_peer_bytes += span.nbytes
            if cause == "send" and peer is not None:
                totals.sent[peer] = totals.sent.get(peer, 0) + span.nbytes
            if cause == "load" and span.lane != "main":
                totals.read_s += seconds

    def span(self, cause: Cause, name: str, nbytes: int = 0, peer: int | None = None, lane: str = "main") -> Timing:
        """Time what happens inside: `with RECORDER.span("compute", "layer 3"): ...`."""
        return Timing(self, cause, name, nbytes, peer, lane)


RECORDER = Recorder()
"""This process's own."""
