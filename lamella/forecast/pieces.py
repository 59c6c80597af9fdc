"""What items and a trace have in common: pieces of a step by rank, cause and name, with their seconds and bytes.

Times of a trace are a span's own: what lies within it on the same lane (an expert split's sums within a layer's pass) is taken
off. Spans of waiting are no pieces, nor is saving; the few numbers that ranks exchange at a step's end are one piece, `meeting`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lamella.errors import UserError
from lamella.forecast.items import Item, Kind


class Key(NamedTuple):
    """A piece: `cause` as the trace has it."""

    rank: int
    cause: str
    name: str


@dataclass(frozen=True)
class Spent:
    """Of one piece in one step, all groups together: seconds, how often, bytes; of a forecast the seconds by cause too."""

    seconds: float
    count: float
    nbytes: float
    causes: dict[str, float] = field(default_factory=dict)


CAUSES: dict[Kind, str] = {
    "load": "load", "copy": "wait_host", "spill": "wait_host", "fetch": "wait_host", "dequantise": "dequantise",
    "embed": "compute", "forward": "compute", "backward": "compute", "head": "compute", "send": "send", "reduce": "reduce",
    "meet": "meet", "optimizer": "optimizer",
}  # fmt: skip
"""Of the trace, by kind of item."""
MEETING = ("meeting", "sum of numbers", "word of rank 0", "gather", "broadcast", "making groups")
"""How names of small exchanges among all ranks begin."""


def pieces_of_items(items: Sequence[Item], seconds: Sequence[float] | None = None) -> dict[Key, Spent]:
    """What a traced step is to show: a `send` is a `receive` on the other side too (its seconds are in the sender's).

    Args:
        seconds: that each item took when played; None: its own, undisturbed.
    """
    found: dict[Key, list[tuple[float, Item]]] = {}
    for n, item in enumerate(items):
        taken = item.seconds if seconds is None else seconds[n]
        found.setdefault(Key(item.rank, CAUSES[item.kind], item.name), []).append((taken, item))
        if item.kind == "send":
            assert item.peer is not None
            found.setdefault(Key(item.peer, "receive", f"receive from rank {item.rank}"), []).append((0.0, item))
    return {key: _sum(each) for key, each in found.items()}


def _sum(each: Sequence[tuple[float, Item]]) -> Spent:
    causes: dict[str, float] = {}
    for _, item in each:
        for cause, seconds in item.causes:
            causes[cause] = causes.get(cause, 0.0) + seconds
    return Spent(sum(s for s, _ in each), len(each), sum(item.nbytes for _, item in each), causes)


def to_plain(pieces: Mapping[Key, Spent]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {**key._asdict(), "seconds": spent.seconds, "count": spent.count, "bytes": spent.nbytes, "causes": spent.causes}
        for key, spent in sorted(pieces.items())
    ]


def from_plain(plain: Sequence[Mapping[str, Any]]) -> dict[Key, Spent]:
    return {
        Key(p["rank"], p["cause"], p["name"]): Spent(p["seconds"], p["count"], p["bytes"], dict(p["causes"]))
        for p in plain
    }


@dataclass(frozen=True)
class Traced:
    """The steps that a trace shows.

    Attributes:
        steps: their numbers (from 1), in order; not those cut short by `dropped`.
        pieces: of each step.
        ranks, missing: whose spans are there, and whose are not.
        dropped: spans that were not kept.
    """

    steps: tuple[int, ...]
    pieces: tuple[dict[Key, Spent], ...]
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    dropped: int

    def median(self) -> dict[Key, Spent]:
        """Of each piece, over the steps; one that a step has not counts as nothing there."""
        keys = sorted({key for step in self.pieces for key in step})
        nothing = Spent(0.0, 0, 0)
        of = {key: [step.get(key, nothing) for step in self.pieces] for key in keys}
        return {
            key: Spent(statistics.median(s.seconds for s in spent), statistics.median(s.count for s in spent),
                       statistics.median(s.nbytes for s in spent))
            for key, spent in of.items()
        }  # fmt: skip


def read_traced(path: Path, after: int = 0) -> Traced:
    """The steps of a trace beyond the first `after`.

    Raises:
        UserError: the file is no trace.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg}", fix="train again: trace.json is written at the end of a run", path=path,
                        line=error.lineno, column=error.colno) from error  # fmt: skip
    if not isinstance(tree, dict) or not isinstance(tree.get("traceEvents"), list):
        raise UserError("not a trace: it has no traceEvents", fix="give the trace.json of a run", path=path)
    return traced(tree, after)


def traced(tree: Mapping[str, Any], after: int = 0) -> Traced:
    """As `read_traced`, from the trace's JSON tree."""
    events, about = tree["traceEvents"], tree.get("otherData", {})
    lanes = {(e["pid"], e["tid"]): str(e["args"]["name"]) for e in events if e.get("name") == "thread_name"}
    slices = [e for e in events if e.get("ph") == "X" and e["args"]["step"] > after]
    steps = sorted({e["args"]["step"] for e in slices})
    pieces: dict[int, dict[Key, list[tuple[float, int]]]] = {step: {} for step in steps}
    for event, own_us in _own(slices):
        lane = lanes.get((event["pid"], event["tid"]), "main")
        key = _key(event["pid"] - 1, event["cat"], event["name"][len(event["cat"]) + 1 :], lane)
        if key is not None:
            nbytes = event["args"].get("bytes", 0)
            pieces[event["args"]["step"]].setdefault(key, []).append((own_us / 1e6, nbytes))
    return Traced(
        tuple(steps), tuple({key: _spent(key, all_) for key, all_ in pieces[step].items()} for step in steps),
        tuple(about.get("ranks", ())), tuple(about.get("missing_ranks", ())), int(about.get("dropped_spans", 0)),
    )  # fmt: skip


def _spent(key: Key, all_: Sequence[tuple[float, int]]) -> Spent:
    """Sends are told when they begin and when they are waited for; those that carry bytes count."""
    count = sum(n > 0 for _, n in all_) if key.cause in ("send", "receive") else len(all_)
    return Spent(sum(s for s, _ in all_), count, sum(n for _, n in all_))


def _key(rank: int, cause: str, name: str, lane: str) -> Key | None:
    if any(name.startswith(word) for word in MEETING):
        return Key(rank, "meet", "meeting")
    main = lane == "main"
    if cause in ("wait_peer", "wait_disk", "save") or (main and cause in ("wait_host", "load")):
        return None
    return Key(rank, cause, name)


def _own(slices: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float]]:
    """Each slice with its microseconds less those of slices within it in the same lane."""
    by_lane: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for event in slices:
        by_lane.setdefault((event["pid"], event["tid"]), []).append(event)
    found = []
    for lane in by_lane.values():
        lane.sort(key=lambda e: (e["ts"], -e["dur"]))
        own = [float(e["dur"]) for e in lane]
        open_: list[int] = []
        for n, event in enumerate(lane):
            while open_ and lane[open_[-1]]["ts"] + lane[open_[-1]]["dur"] <= event["ts"]:
                open_.pop()
            if open_:
                own[open_[-1]] -= event["dur"]
            open_.append(n)
        found += list(zip(lane, own, strict=True))
    return found
