"""Waiting requests in lanes, taken in turns: whoever asks most waits longest. Policy alone: no torch, no threads."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Full(Exception):
    """Nothing can be put in, and nobody waits with more than the one who asks."""


class Lanes(Generic[T]):
    """First in, first out within a lane; lanes in turn.

    Args:
        bound: most items that wait.
        owner: of an item: who it counts for when the bound is reached. One owner may have several lanes.
    """

    def __init__(self, bound: int, owner: Callable[[T], Hashable]) -> None:
        self.bound, self._owner = bound, owner
        self._lanes: OrderedDict[Hashable, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[T]:
        for lane in self._lanes.values():
            yield from lane

    def put(self, lane: Hashable, item: T) -> T | None:
        """Put an item at the end of its lane.

        Returns:
            who had to go for it: the newest of the owner with most items, where that one has at least two more.

        Raises:
            Full: the bound is reached and nobody has so many more.
        """
        gone = None
        if len(self) >= self.bound:
            counts: dict[Hashable, int] = {}
            for waiting in self:
                counts[self._owner(waiting)] = counts.get(self._owner(waiting), 0) + 1
            most = max(counts, key=lambda owner: counts[owner], default=None)
            if not counts or counts[most] < counts.get(self._owner(item), 0) + 2:
                raise Full(f"{len(self)} requests wait")
            gone = [waiting for waiting in self if self._owner(waiting) == most][-1]
            self.discard(gone)
        self._lanes.setdefault(lane, deque()).append(item)
        return gone

    def heads(self) -> list[tuple[Hashable, T]]:
        """The first item of every lane, the lane whose turn it is first."""
        return [(key, lane[0]) for key, lane in self._lanes.items()]

    def served(self, lane: Hashable, *, whole: bool = True) -> None:
        """The lane had its turn; `whole`: its first item is done with and leaves."""
        if whole:
            self._lanes[lane].popleft()
        if self._lanes[lane]:
            self._lanes.move_to_end(lane)
        else:
            del self._lanes[lane]

    def discard(self, item: T) -> bool:
        """Take an item out wherever it stands; False: it is not here."""
        for key, lane in self._lanes.items():
            at = next((n for n, waiting in enumerate(lane) if waiting is item), None)
            if at is not None:
                del lane[at]
                if not lane:
                    del self._lanes[key]
                return True
        return False
