"""Spans of all ranks as one timeline in the Chrome trace event format, which Perfetto and chrome://tracing open.

One process per rank, one thread per lane, times in microseconds since the first step shown. Transfers that are under way at
once get threads of their own, since slices of one thread must nest. A send and the receive that belongs to it are tied by
an arrow.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lamella.files import write_text
from lamella.trace.clock import METHOD, RANK_0, Clock
from lamella.trace.recorder import Span, StepSpans

LANES = ("main", "read", "copy", "receive", "send", "save")
"""Lanes in the order in which they are shown; others follow by name."""
Pair = tuple["Placed", "Placed"]


@dataclass(frozen=True)
class RankSpans:
    """What one rank recorded; `label` says which device it is."""

    rank: int
    label: str
    steps: list[StepSpans]
    clock: Clock = RANK_0


@dataclass(frozen=True)
class Placed:
    """A span on rank 0's clock, in seconds since the trace begins."""

    rank: int
    step: int
    span: Span
    start_s: float
    end_s: float


def pack(steps: Sequence[StepSpans]) -> list[Any]:
    """Spans as plain lists, to be sent to another rank."""
    return [[s.step, s.start_s, s.dropped, [list(span) for span in s.spans]] for s in steps]


def unpack(packed: list[Any]) -> list[StepSpans]:
    return [StepSpans(step, start, [Span(*span) for span in spans], dropped) for step, start, dropped, spans in packed]


def write_trace(path: Path, ranks: Sequence[RankSpans], missing: Sequence[int] = ()) -> Path:
    """Write `ranks` as a trace, atomically; `missing`: ranks that could not be asked."""
    tree = trace_of(ranks, missing)
    events = tree.pop("traceEvents")
    return write_text(path, _pieces(tree, events))


def _pieces(tree: dict[str, Any], events: list[dict[str, Any]]) -> Iterator[str]:
    """JSON, one event to a line."""
    yield json.dumps(tree, allow_nan=False)[:-1] + ', "traceEvents": [\n'
    for n, event in enumerate(events):
        yield json.dumps(event, allow_nan=False) + (",\n" if n < len(events) - 1 else "\n")
    yield "]}\n"


def trace_of(ranks: Sequence[RankSpans], missing: Sequence[int] = ()) -> dict[str, Any]:
    """The trace as a JSON tree."""
    zero_s = min(
        (start + one.clock.offset_s for one in ranks for step in one.steps
         for start in (step.start_s, *(span.start_s for span in step.spans))),
        default=0.0,
    )  # fmt: skip
    placed = [
        Placed(one.rank, step.step, span, span.start_s + one.clock.offset_s - zero_s,
               span.end_s + one.clock.offset_s - zero_s)
        for one in ranks for step in one.steps for span in step.spans
    ]  # fmt: skip
    placed = side_by_side(placed)
    seen: dict[int, set[str]] = {one.rank: {"main"} for one in ranks}
    for p in placed:
        seen[p.rank].add(p.span.lane)
    lanes = {rank: sorted(names, key=_lane_order) for rank, names in seen.items()}
    tid = {(rank, lane): n + 1 for rank, names in lanes.items() for n, lane in enumerate(names)}
    pairs = transfers(placed)
    events = [_slice(p, tid[p.rank, p.span.lane]) for p in placed]
    events += [event for n, pair in enumerate(pairs) for event in _arrow(pair, tid, n + 1)]
    for one in ranks:
        for step in one.steps:
            at = _micros(step.start_s + one.clock.offset_s - zero_s)
            events.append({"ph": "i", "s": "p", "name": f"step {step.step + 1}", "cat": "step", "pid": one.rank + 1,
                           "tid": tid[one.rank, "main"], "ts": at})  # fmt: skip
    events.sort(key=lambda e: (e["ts"], -e.get("dur", 0.0)))
    early = max((send.start_s - receive.end_s for send, receive in pairs), default=0.0)
    about = {
        "ranks": [one.rank for one in ranks], "missing_ranks": list(missing),
        "dropped_spans": sum(step.dropped for one in ranks for step in one.steps),
        "clock": {"method": METHOD, "offset_s": [one.clock.offset_s for one in ranks],
                  "error_s": [one.clock.error_s for one in ranks],
                  "received_before_sent_s": max(early, 0.0)},
    }  # fmt: skip
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": [*_names(ranks, lanes, tid), *events]}


def side_by_side(placed: Sequence[Placed]) -> list[Placed]:
    """The spans with lanes such as "send 2" for those that overlap one before them without lying within it."""
    lanes: dict[tuple[int, str], list[list[int]]] = defaultdict(list)
    result = []
    for p in sorted(placed, key=lambda p: (_nanos(p.start_s), -_nanos(p.end_s))):
        tracks = lanes[p.rank, p.span.lane]
        at = next((n for n, ends in enumerate(tracks) if _fits(ends, p)), len(tracks))
        if at == len(tracks):
            tracks.append([])
        tracks[at].append(_nanos(p.end_s))
        lane = p.span.lane if at == 0 else f"{p.span.lane} {at + 1}"
        result.append(replace(p, span=p.span._replace(lane=lane)))
    return result


def _fits(ends: list[int], p: Placed) -> bool:
    """Whether a span lies within all spans open at its start, given their ends; those that have ended are dropped."""
    while ends and ends[-1] <= _nanos(p.start_s):
        ends.pop()
    return not ends or _nanos(p.end_s) <= ends[-1]


def transfers(placed: Sequence[Placed]) -> list[Pair]:
    """Sends with their receives, those that carry bytes. Between two ranks they keep their order; a step in which one of
    them is missing gets none."""
    sends: dict[tuple[int, int, int], list[Placed]] = defaultdict(list)
    receives: dict[tuple[int, int, int], list[Placed]] = defaultdict(list)
    for p in placed:
        if p.span.peer is None or not p.span.nbytes:
            continue
        if p.span.cause == "send":
            sends[p.step, p.rank, p.span.peer].append(p)
        elif p.span.cause == "receive":
            receives[p.step, p.span.peer, p.rank].append(p)
    pairs: list[Pair] = []
    for key, out in sorted(sends.items()):
        came = receives.get(key, [])
        if len(came) == len(out):
            by_start = [sorted(some, key=lambda p: p.start_s) for some in (out, came)]
            pairs += zip(*by_start, strict=True)
    return pairs


def _lane_order(lane: str) -> tuple[int, str]:
    name = lane.split(" ")[0]
    return (LANES.index(name) if name in LANES else len(LANES), lane)


def _nanos(seconds: float) -> int:
    return round(seconds * 1e9)


def _micros(seconds: float) -> float:
    return _nanos(seconds) / 1e3


def _slice(p: Placed, tid: int) -> dict[str, Any]:
    start, end = _micros(p.start_s), _micros(p.end_s)
    args: dict[str, Any] = {"step": p.step + 1}
    if p.span.nbytes:
        args["bytes"] = p.span.nbytes
    if p.span.peer is not None:
        args["peer"] = p.span.peer
    return {"ph": "X", "name": f"{p.span.cause} {p.span.name}", "cat": p.span.cause, "pid": p.rank + 1, "tid": tid,
            "ts": start, "dur": round(end - start, 3), "args": args}  # fmt: skip


def _arrow(pair: Pair, tid: dict[tuple[int, str], int], number: int) -> list[dict[str, Any]]:
    send, receive = pair
    common = {"name": "transfer", "cat": "transfer", "id": number}
    ends = (("s", send, send.start_s), ("f", receive, receive.end_s))
    return [
        {"ph": ph, **common, "pid": p.rank + 1, "tid": tid[p.rank, p.span.lane], "ts": _micros(at),
         **({"bp": "e"} if ph == "f" else {})}
        for ph, p, at in ends
    ]  # fmt: skip


def _names(
    ranks: Sequence[RankSpans], lanes: dict[int, list[str]], tid: dict[tuple[int, str], int]
) -> list[dict[str, Any]]:
    events = []
    for one in ranks:
        pid = one.rank + 1
        about: list[tuple[str, int, dict[str, Any]]] = [
            ("process_name", 0, {"name": f"rank {one.rank} {one.label}".rstrip()}),
            ("process_sort_index", 0, {"sort_index": one.rank}),
        ]
        for lane in lanes[one.rank]:
            about.append(("thread_name", tid[one.rank, lane], {"name": lane}))
            about.append(("thread_sort_index", tid[one.rank, lane], {"sort_index": tid[one.rank, lane]}))
        events += [{"ph": "M", "name": name, "pid": pid, "tid": t, "args": args} for name, t, args in about]
    return events
