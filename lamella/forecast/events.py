"""Discrete-event simulation of a step's list of pieces (`items.py`).

Every lane of a rank takes its pieces in the order of the list, each when the one before has left the lane and all that it waits
for is done. A piece takes its seconds; then its bytes pass its links. Bytes under way share links by progressive filling
(max-min fairness; Bertsekas and Gallager, *Data Networks*, 6.5.2): all rates grow alike until a link is full, those on it
stay, the others grow on. Rates change only when a transfer begins or ends. The same list gives the same numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lamella.forecast.items import Item, Kind
from lamella.forecast.pieces import Key, Spent, pieces_of_items, to_plain

BUSY: tuple[Kind, ...] = ("dequantise", "embed", "forward", "backward", "head", "optimizer")
"""Kinds that are work; in the compute lane `reduce` and `meet` move bytes meanwhile."""
_WAIT: dict[Kind, str] = {"load": "disk", "copy": "host", "fetch": "host", "spill": "host"}


@dataclass(frozen=True)
class LinkUse:
    """What passed a link: bytes, seconds in which something was under way, and that as a share of the step."""

    nbytes: int
    busy_s: float
    share: float


@dataclass(frozen=True)
class Part:
    """A part of the longest chain of pieces: what it was spent on (`compute of rank 0`, `disk of host 0`, ...), its seconds
    and share of the step."""

    what: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Played:
    """A step as it would go.

    Attributes:
        start_s, end_s: of each piece, from the step's start; a transfer ends when it has arrived.
        step_s: when the last piece ends.
        seconds: per rank, of its compute lane by kind of piece (`forward`, `dequantise`, `reduce`, ...).
        causes: per rank, of its layers' passes by cause (`experts`, `attention`, ...; see `StepTimes`).
        wait_s: per rank, seconds in which its compute lane had to wait, by what for ("disk", "host", "rank 1"); after its last
            piece nothing is waited for.
        busy: per rank, share of the step in which it computes; idle: the rest.
        links: by name.
        path: the longest chain: pieces, last first.
        bottleneck: the chain's seconds by what they were spent on, most first; they sum to `step_s`.
        items: what was played.
    """

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    step_s: float
    seconds: dict[int, dict[str, float]]
    causes: dict[int, dict[str, float]]
    wait_s: dict[int, dict[str, float]]
    busy: dict[int, float]
    links: dict[str, LinkUse]
    path: tuple[int, ...]
    bottleneck: tuple[Part, ...]
    items: tuple[Item, ...] = field(default=(), repr=False, compare=False)

    @cached_property
    def pieces(self) -> dict[Key, Spent]:
        """By rank, cause and name, as a trace shows them."""
        taken = [
            end - start - item.latency_s for item, start, end in zip(self.items, self.start_s, self.end_s, strict=True)
        ]
        return pieces_of_items(self.items, taken)

    @property
    def idle(self) -> dict[int, float]:
        return {rank: 1 - share for rank, share in self.busy.items()}

    def to_dict(self) -> dict[str, Any]:
        """For a plan's document: all but the items, which it has as pieces."""
        return {
            "step_s": self.step_s, "seconds": {str(r): x for r, x in self.seconds.items()},
            "causes": {str(r): x for r, x in self.causes.items()}, "wait_s": {str(r): x for r, x in self.wait_s.items()},
            "busy": {str(r): x for r, x in self.busy.items()},
            "links": {n: {"bytes": u.nbytes, "busy_s": u.busy_s, "share": u.share} for n, u in self.links.items()},
            "pieces": to_plain(self.pieces),
            "bottleneck": [{"what": p.what, "seconds": p.seconds, "share": p.share} for p in self.bottleneck],
        }  # fmt: skip


def play(items: Sequence[Item], links: Mapping[str, float]) -> Played:
    """Play the pieces of a step.

    Args:
        items: in an order in which each comes after what it waits for.
        links: bytes per second by name.

    Raises:
        ValueError: a piece waits for a later one, or passes a link without a rate.
    """
    for n, item in enumerate(items):
        if any(not 0 <= other < n for other in item.after):
            raise ValueError(f"piece {n} ({item.name}) waits for {item.after}, not all of them before it in the list")
        for name in item.links:
            if not links.get(name, 0.0) > 0:
                raise ValueError(f"piece {n} ({item.name}) passes {name!r}, which has no rate among {sorted(links)}")
    return _Simulation(items, links).run()


class _Simulation:
    def __init__(self, items: Sequence[Item], links: Mapping[str, float]) -> None:
        count = len(items)
        self.items, self.capacity = items, links
        self.start, self.left, self.end = [0.0] * count, [0.0] * count, [0.0] * count
        self.because = [-1] * count  # the piece that one began after
        self.limit: dict[int, str] = {}  # of a transfer, the link that was full
        self.waiters: list[list[int]] = [[] for _ in range(count)]
        self.lane_next = [-1] * count
        self.needs = [len(item.after) for item in items]
        self.before = [-1] * count
        lane_last: dict[tuple[int, str], int] = {}
        for n, item in enumerate(items):
            for other in item.after:
                self.waiters[other].append(n)
            lane = (item.rank, item.lane)
            if lane in lane_last:
                self.before[n] = lane_last[lane]
                self.lane_next[lane_last[lane]] = n
                self.needs[n] += 1
            lane_last[lane] = n
        self.events: list[tuple[float, int, int]] = []  # time, what (0 leaves its lane's seconds, 1 has arrived), piece
        self.moving: dict[int, tuple[float, float, float]] = {}  # piece -> bytes left at a time, that time, rate
        self.finish: dict[int, float] = {}
        self.shares: dict[tuple[tuple[str, ...], ...], dict[tuple[str, ...], tuple[float, str]]] = {}
        self.link_s = dict.fromkeys(links, 0.0)
        self.link_since: dict[str, float] = {}
        self.link_users = dict.fromkeys(links, 0)

    def run(self) -> Played:
        for n, needs in enumerate(self.needs):
            if not needs:
                self._begin(n, 0.0)
        while self.events or self.moving:
            now = self.events[0][0] if self.events else float("inf")
            changed = False
            if self.finish:
                now = min(now, min(self.finish.values()))
                for n in [n for n, at in self.finish.items() if at <= now]:
                    self._stop_moving(n, now)
                    self._leave(n, now)
                    changed = True
            while self.events and self.events[0][0] <= now:
                _, what, n = heapq.heappop(self.events)
                if what:
                    self._arrive(n, now)
                elif self.items[n].nbytes and self.items[n].links:
                    self._start_moving(n, now)
                    changed = True
                else:
                    self._leave(n, now)
            if changed:
                self._share(now)
        return self._played()

    # ---- pieces ---------------------------------------------------------------------------------

    def _begin(self, n: int, now: float) -> None:
        self.start[n] = now
        heapq.heappush(self.events, (now + self.items[n].seconds, 0, n))

    def _leave(self, n: int, now: float) -> None:
        """A piece lets go of its lane."""
        self.left[n] = now
        after = self.lane_next[n]
        if after >= 0:
            self._met(after, n, now)
        if self.items[n].latency_s:
            heapq.heappush(self.events, (now + self.items[n].latency_s, 1, n))
        else:
            self._arrive(n, now)

    def _arrive(self, n: int, now: float) -> None:
        self.end[n] = now
        for waiter in self.waiters[n]:
            self._met(waiter, n, now)

    def _met(self, n: int, by: int, now: float) -> None:
        """One of the things that a piece waits for is there."""
        self.needs[n] -= 1
        if not self.needs[n]:
            self.because[n] = by
            self._begin(n, now)

    # ---- links ----------------------------------------------------------------------------------

    def _start_moving(self, n: int, now: float) -> None:
        self.moving[n] = (float(self.items[n].nbytes), now, 0.0)
        for link in self.items[n].links:
            if not self.link_users[link]:
                self.link_since[link] = now
            self.link_users[link] += 1

    def _stop_moving(self, n: int, now: float) -> None:
        del self.moving[n], self.finish[n]
        for link in self.items[n].links:
            self.link_users[link] -= 1
            if not self.link_users[link]:
                self.link_s[link] += now - self.link_since[link]

    def _share(self, now: float) -> None:
        """Give every transfer under way its rate from now on."""
        key = tuple(sorted(self.items[n].links for n in self.moving))
        if key not in self.shares:
            self.shares[key] = fill(key, self.capacity)
        shares = self.shares[key]
        for n, (left, since, rate) in self.moving.items():
            new, full = shares[self.items[n].links]
            self.limit[n] = full
            if new != rate:
                left = max(left - rate * (now - since), 0.0)
                self.moving[n] = (left, now, new)
                self.finish[n] = now + left / new

    # ---- what came of it ------------------------------------------------------------------------

    def _played(self) -> Played:
        items, step_s = self.items, max(self.end, default=0.0)
        ranks = sorted({item.rank for item in items})
        seconds: dict[int, dict[str, float]] = {r: {} for r in ranks}
        causes: dict[int, dict[str, float]] = {r: {} for r in ranks}
        waits: dict[int, dict[str, float]] = {r: {} for r in ranks}
        nbytes = dict.fromkeys(self.capacity, 0)
        for n, item in enumerate(items):
            for link in item.links:
                nbytes[link] += item.nbytes
            if item.lane != "compute":
                continue
            own = seconds[item.rank]
            own[item.kind] = own.get(item.kind, 0.0) + self.left[n] - self.start[n]
            for cause, value in item.causes:
                causes[item.rank][cause] = causes[item.rank].get(cause, 0.0) + value
            self._blame(n, waits[item.rank])
        busy = {r: sum(own.get(kind, 0.0) for kind in BUSY) / step_s if step_s else 0.0 for r, own in seconds.items()}
        uses = {
            name: LinkUse(nbytes[name], busy_s, busy_s / step_s if step_s else 0.0)
            for name, busy_s in self.link_s.items()
        }
        path = self._path(max(range(len(items)), key=lambda n: (self.end[n], -n))) if items else []
        return Played(
            tuple(self.start),
            tuple(self.end),
            step_s,
            seconds,
            causes,
            waits,
            busy,
            uses,
            tuple(path),
            self._parts(path, step_s),
            tuple(items),
        )

    def _until(self, n: int, then: int) -> float:
        """When piece n let `then` begin."""
        return self.left[n] if self.before[then] == n and n not in self.items[then].after else self.end[n]

    def _blame(self, n: int, waits: dict[str, float]) -> None:
        """Add what a piece's lane waited for, from when it was free until the piece began."""
        free = self.left[self.before[n]] if self.before[n] >= 0 else 0.0
        at, cause = self.start[n], self.because[n]
        rank = self.items[n].rank
        while at > free and cause >= 0:
            begin = max(self.start[cause], free)
            what = self._waited_for(self.items[cause], rank)
            waits[what] = waits.get(what, 0.0) + at - begin
            at, cause = begin, self.because[cause]

    @staticmethod
    def _waited_for(item: Item, rank: int) -> str:
        if item.rank != rank:
            return f"rank {item.rank}"
        return _WAIT.get(item.kind, f"rank {item.peer}" if item.peer is not None else "itself")

    def _path(self, last: int) -> list[int]:
        path = [last]
        while self.because[path[-1]] >= 0:
            path.append(self.because[path[-1]])
        return path

    def _parts(self, path: Sequence[int], step_s: float) -> tuple[Part, ...]:
        total: dict[str, float] = {}
        for k, n in enumerate(path):
            until = self._until(n, path[k - 1]) if k else self.end[n]
            item = self.items[n]
            what = f"compute of rank {item.rank}"
            if n in self.limit:
                what = self.limit[n]
            elif item.kind not in BUSY:
                what = f"{item.kind} of rank {item.rank}"
            total[what] = total.get(what, 0.0) + until - self.start[n]
        parts = (Part(what, s, s / step_s if step_s else 0.0) for what, s in total.items() if s > 0)
        return tuple(sorted(parts, key=lambda p: (-p.seconds, p.what)))


def fill(
    transfers: Sequence[tuple[str, ...]], capacity: Mapping[str, float]
) -> dict[tuple[str, ...], tuple[float, str]]:  # fmt: skip
    """Max-min fair rates of transfers under way at once, each given by its links.

    Returns:
        by links: rate of each such transfer, and the link that is full.
    """
    room = {link: capacity[link] for links in transfers for link in links}
    open_: list[tuple[str, ...]] = list(transfers)
    rates: dict[tuple[str, ...], tuple[float, str]] = {}
    least = 0.0
    while open_:
        users: dict[str, int] = {}
        for links in open_:
            for link in set(links):
                users[link] = users.get(link, 0) + 1
        rate, full = min((room[link] / count, link) for link, count in users.items())
        least = rate = max(rate, least)  # shares never shrink from link to link, but for rounding
        for links in open_:
            if full in links:
                rates[links] = (rate, full)
                for link in set(links):
                    room[link] -= rate
        open_ = [links for links in open_ if full not in links]
    return rates
