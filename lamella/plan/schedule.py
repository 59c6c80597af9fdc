"""In which order each stage takes the groups of micro-batches: a simulation of the step fixes it beforehand.

A stage that is free takes what is ready: back with a group, or forward with the next if it does not hold too many. Backward
first is one forward, one backward (Narayanan et al. 2019); forward first keeps more groups on their way, so that a slow early
stage need not wait for the last ones. Both are tried, also mixed at the slowest stage, with several limits; of those that take
the least time the one with the fewest groups in flight is kept.

The order is one in which a step has happened, so no stage can wait for what will not come: every list is consistent with
one order of all events.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

Kind = Literal["F", "B"]
Order = tuple[tuple[Kind, int], ...]

SLACK = 1.001
"""Of the step's time that fewer groups in flight may cost."""


def schedule(
    forward: Sequence[Sequence[float]],
    back: Sequence[Sequence[float]],
    in_flight: int | None = None,
    transfers: Sequence[Sequence[float]] | None = None,
) -> tuple[Order, ...]:
    """What each stage does, as (kind, group) in order.

    Args:
        forward, back: seconds of stage s with group g, as [s][g].
        in_flight: groups that the first stage holds at most (stage s holds s fewer, at least one). None: as few as take
            the least time.
        transfers: seconds of group g between stages s and s + 1, as [s][g]; one at a time in each direction.
    """
    transfers = transfers or [[0.0] * len(row) for row in forward[1:]]
    groups = len(forward[0]) if forward else 0
    if not groups:
        return tuple(() for _ in forward)
    stages = len(forward)
    work = [sum(f) + sum(b) for f, b in zip(forward, back, strict=True)]
    slowest = max(range(stages), key=lambda s: (work[s], -s))
    limits = {1, 2, stages, stages + 1, stages + 2, 2 * stages, 3 * stages, groups}
    if in_flight is not None:
        limits = {max(1, in_flight)}
    tried = [
        (*_run(forward, back, transfers, limit, eager), limit)
        for limit in sorted(limit for limit in limits if limit <= groups or in_flight is not None)
        for eager in sorted({0, slowest + 1, stages})
    ]
    least = min(end for end, _, _ in tried)
    good = [(orders, limit) for end, orders, limit in tried if end <= least * SLACK]
    return min(good, key=lambda x: (sum(max(map(len, held(order))) for order in x[0]), x[1]))[0]


def held(actions: Sequence[tuple[Kind, int]]) -> list[tuple[int, ...]]:
    """Groups in flight after each forward action of a stage."""
    flying: list[int] = []
    out: list[tuple[int, ...]] = []
    for kind, group in actions:
        if kind == "F":
            flying.append(group)
            out.append(tuple(flying))
        else:
            flying.remove(group)
    return out


def _run(
    forward: Sequence[Sequence[float]],
    back: Sequence[Sequence[float]],
    transfers: Sequence[Sequence[float]],
    limit: int,
    eager: int,
) -> tuple[float, tuple[Order, ...]]:
    """One simulated step: its seconds and what each stage did; stages before `eager` go forward first."""
    stages, groups = len(forward), len(forward[0])
    ready: list[dict[Kind, list[int]]] = [{"F": [], "B": []} for _ in range(stages)]
    ready[0]["F"] = list(range(groups))
    flying = [0] * stages
    busy = [False] * stages
    done: list[list[tuple[Kind, int]]] = [[] for _ in range(stages)]
    # (time, 0: a stage has finished / 1: something has come, stage, kind, group)
    events: list[tuple[float, int, int, Kind, int]] = []
    free: dict[tuple[int, int], float] = {}
    now = end = 0.0

    def start(s: int) -> None:
        if busy[s]:
            return
        can_forward = bool(ready[s]["F"]) and flying[s] < max(1, limit - s)
        if not can_forward and not ready[s]["B"]:
            return
        kind: Kind = "F" if can_forward and (s < eager or not ready[s]["B"]) else "B"
        group = heapq.heappop(ready[s][kind])
        flying[s] += 1 if kind == "F" else -1
        busy[s] = True
        done[s].append((kind, group))
        heapq.heappush(events, (now + (forward if kind == "F" else back)[s][group], 0, s, kind, group))

    def pass_on(s: int, kind: Kind, group: int) -> None:
        to = s + 1 if kind == "F" else s - 1
        if kind == "F" and to == stages:
            heapq.heappush(ready[s]["B"], group)
        elif to >= 0:
            there = max(now, free.get((s, to), 0.0)) + transfers[min(s, to)][group]
            free[s, to] = there
            heapq.heappush(events, (there, 1, to, kind, group))

    start(0)
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, what, s, kind, group = heapq.heappop(events)
            if what:
                heapq.heappush(ready[s][kind], group)
            else:
                busy[s] = False
                end = now
                pass_on(s, kind, group)
        for s in range(stages):
            start(s)
    assert all(len(actions) == 2 * groups for actions in done), "a stage has not finished"
    return end, tuple(tuple(actions) for actions in done)
