"""In which order each stage takes the groups of micro-batches: a simulation of the step fixes it beforehand.

Each stage goes back with a group as soon as one is ready, else forward with the next (one forward, one backward; Narayanan
et al. 2019), and holds so many groups at most. The order is one in which a step has happened, so no stage can wait for
what will not come: every list is consistent with one order of all events.
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
    if in_flight is not None:
        return _run(forward, back, transfers, max(1, in_flight))[1]
    if not groups:
        return tuple(() for _ in forward)
    stages = len(forward)
    limits = {*range(1, min(groups, 2 * stages + 2) + 1), min(groups, 3 * stages), groups}
    tried = [_run(forward, back, transfers, limit) for limit in sorted(limits)]
    least = min(end for end, _ in tried)
    return next(actions for end, actions in tried if end <= least * SLACK)


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
) -> tuple[float, tuple[Order, ...]]:
    """One simulated step: its seconds and what each stage did."""
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
        kind: Kind = "B" if ready[s]["B"] else "F"
        if not ready[s][kind] or (kind == "F" and flying[s] >= max(1, limit - s)):
            return
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
