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
    forward: Sequence[Sequence[float]], back: Sequence[Sequence[float]], in_flight: int | None = None
) -> tuple[Order, ...]:
    """What each stage does, as (kind, group) in order.

    Args:
        forward, back: seconds of stage s with group g, as [s][g].
        in_flight: groups that the first stage holds at most (stage s holds s fewer, at least one). None: as few as take
            the least time.
    """
    groups = len(forward[0]) if forward else 0
    if in_flight is not None:
        return _run(forward, back, max(1, in_flight))[1]
    tried = [_run(forward, back, limit) for limit in range(1, groups + 1)]
    if not tried:
        return tuple(() for _ in forward)
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
    forward: Sequence[Sequence[float]], back: Sequence[Sequence[float]], limit: int
) -> tuple[float, tuple[Order, ...]]:
    """One simulated step: its seconds and what each stage did."""
    stages, groups = len(forward), len(forward[0])
    ready: list[dict[Kind, list[int]]] = [{"F": [], "B": []} for _ in range(stages)]
    ready[0]["F"] = list(range(groups))
    flying = [0] * stages
    busy = [False] * stages
    done: list[list[tuple[Kind, int]]] = [[] for _ in range(stages)]
    events: list[tuple[float, int, Kind, int]] = []
    now = 0.0

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
        heapq.heappush(events, (now + (forward if kind == "F" else back)[s][group], s, kind, group))

    start(0)
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, s, kind, group = heapq.heappop(events)
            busy[s] = False
            if kind == "F" and s + 1 < stages:
                heapq.heappush(ready[s + 1]["F"], group)
            elif kind == "F" or s > 0:
                heapq.heappush(ready[s if kind == "F" else s - 1]["B"], group)
        for s in range(stages):
            start(s)
    assert all(len(actions) == 2 * groups for actions in done), "a stage has not finished"
    return now, tuple(tuple(actions) for actions in done)
