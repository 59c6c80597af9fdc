"""Rows dealt to ranks in proportion to shares: the largest cost per share as small as can be.

Longest first to where it ends lowest (LPT), then moves and swaps away from the fullest rank while they help, then, where the
bound is still far, a search of bounded size. Plain Python numbers in a fixed order: every rank deals alike.
"""

from __future__ import annotations

from collections.abc import Sequence

GOOD = 1.001
"""Largest cost per share, relative to the lower bound, at which the search ends."""
NODES = 1500
"""Of the last search."""
ROUNDS = 200
"""Of moves and swaps."""


def deal(costs: Sequence[float], shares: Sequence[float], before: Sequence[float] | None = None) -> list[int]:
    """Who takes each row.

    Args:
        costs: of each row.
        shares: of each rank, of any sum; a rank with share 0 takes nothing.
        before: cost that each rank has already.

    Returns:
        For each row the index of its rank.
    """
    able = [r for r, share in enumerate(shares) if share > 0]
    assert able, "no rank has a share"
    if len(able) == 1:
        return [able[0]] * len(costs)
    start = [0.0] * len(able) if before is None else [before[r] for r in able]
    table = _Deal(costs, [shares[r] for r in able], start)
    table.longest_first()
    table.improve()
    table.search()
    return [able[k] for k in table.owner]


class _Deal:
    def __init__(self, costs: Sequence[float], shares: Sequence[float], start: list[float]) -> None:
        self.costs = list(costs)
        self.shares = list(shares)
        self.start = start
        self.order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
        self.owner = [0] * len(costs)
        level = (sum(costs) + sum(start)) / sum(shares)
        largest = max(costs, default=0.0)
        alone = min(((s + largest) / share for s, share in zip(start, shares, strict=True)), default=0.0)
        self.bound = max(level, alone, *(s / share for s, share in zip(start, shares, strict=True)))

    def loads(self) -> list[float]:
        loads = list(self.start)
        for i in self.order:
            loads[self.owner[i]] += self.costs[i]
        return loads

    def worst(self, loads: Sequence[float]) -> float:
        return max(load / share for load, share in zip(loads, self.shares, strict=True))

    def longest_first(self) -> None:
        loads = list(self.start)
        ranks = range(len(self.shares))
        for i in self.order:
            c = self.costs[i]
            k = min(ranks, key=lambda k: ((loads[k] + c) / self.shares[k], k))
            self.owner[i] = k
            loads[k] += c

    def improve(self) -> None:
        """Moves and swaps away from the rank with the largest cost per share, the best one each time."""
        shares, costs = self.shares, self.costs
        for _ in range(ROUNDS):
            loads = self.loads()
            levels = [load / share for load, share in zip(loads, shares, strict=True)]
            full = max(range(len(levels)), key=lambda k: (levels[k], -k))
            if levels[full] <= self.bound * GOOD:
                return
            rows: list[list[int]] = [[] for _ in shares]
            for i in self.order:
                rows[self.owner[i]].append(i)
            best, change = levels[full] * (1 - 1e-9), None
            for k in range(len(shares)):
                if k == full:
                    continue
                # The two ranks end level when this much goes over.
                ideal = (loads[full] * shares[k] - loads[k] * shares[full]) / (shares[full] + shares[k])
                for i, j in _pairs(costs, rows[full], rows[k], ideal):
                    over = costs[i] - (0.0 if j is None else costs[j])
                    level = max((loads[full] - over) / shares[full], (loads[k] + over) / shares[k])
                    if level < best:
                        best, change = level, (i, j, k)
            if change is None:
                return
            i, j, k = change
            self.owner[i] = k
            if j is not None:
                self.owner[j] = full

    def search(self) -> None:
        """Branch and bound over the rows in order of cost, from what is found so far, for a bounded number of nodes."""
        best = self.worst(self.loads())
        if best <= self.bound * GOOD:
            return
        n, shares, left = len(self.order), self.shares, NODES
        loads, owner = list(self.start), [0] * len(self.costs)
        rest = [0.0] * (n + 1)
        for p in range(n - 1, -1, -1):
            rest[p] = rest[p + 1] + self.costs[self.order[p]]
        total_share = sum(shares)
        tries: list[list[int]] = [self._choices(loads, self.costs[self.order[0]])]
        while tries and left > 0:
            p = len(tries) - 1
            i = self.order[p]
            if not tries[p]:
                tries.pop()
                if p:
                    j = self.order[p - 1]
                    loads[owner[j]] -= self.costs[j]
                continue
            left -= 1
            k = tries[p].pop()
            level = (loads[k] + self.costs[i]) / shares[k]
            if level >= best * (1 - 1e-9) or (sum(loads) + rest[p]) / total_share >= best:
                continue
            owner[i] = k
            if p == n - 1:
                loads[k] += self.costs[i]
                worst = self.worst(loads)
                loads[k] -= self.costs[i]
                if worst < best:
                    best, self.owner = worst, list(owner)
                    if best <= self.bound * GOOD:
                        return
                continue
            loads[k] += self.costs[i]
            tries.append(self._choices(loads, self.costs[self.order[p + 1]]))

    def _choices(self, loads: Sequence[float], cost: float) -> list[int]:
        """Ranks for the next row, the best last; of equal ranks one."""
        seen: dict[tuple[float, float], int] = {}
        for k, (load, share) in enumerate(zip(loads, self.shares, strict=True)):
            seen.setdefault((load, share), k)
        return sorted(seen.values(), key=lambda k: (-(loads[k] + cost) / self.shares[k], -k))


def _pairs(
    costs: Sequence[float], mine: Sequence[int], theirs: Sequence[int], ideal: float
) -> list[tuple[int, int | None]]:
    """For each of `mine` (longest first) the move, and the swaps nearest to `ideal` from above and below."""
    found: list[tuple[int, int | None]] = []
    j = 0
    for i in mine:
        found.append((i, None))
        wanted = costs[i] - ideal
        while j < len(theirs) and costs[theirs[j]] > wanted:
            j += 1
        found.extend((i, theirs[p]) for p in (j - 1, j) if 0 <= p < len(theirs))
    return found
