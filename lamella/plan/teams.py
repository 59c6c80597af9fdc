"""Which devices make which stage: dynamic programming over sets of devices and layers.

State: a set of devices that hold the layers from l on in k stages; value: their seconds in a step
(`fluid.in_pipeline`). A stage is one device or several of one host; a host that has begun is finished before the next
begins. Equal devices are interchangeable, so a set is a count of each kind. With too many sets (more than eight unlike
devices) the order of devices is fixed instead: hosts as listed, in each host the fastest first; stages are then runs of
that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from lamella.plan.devices import Device, Links
from lamella.plan.fluid import Fluid, Team, before

STEPS = 8000
"""Of the dynamic programming over sets: (set, stage) pairs."""
CELLS = 400
"""Pairs up to which layers are not grouped."""
GRID = 32
"""Groups of layers beyond that; the cuts are then made exactly for the devices' order found."""

SOME = 2
"""Splits without some of the devices that are kept, if their slowest stage is faster."""

State = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """Teams in order, and the estimated seconds of a step."""

    teams: tuple[Team, ...]
    seconds: float


def find_teams(fluid: Fluid, groups: int, experts: bool, only: str | None = None) -> list[Found]:
    """The best order of teams for each number of stages from 2, and the best that leave devices out and are faster.

    Args:
        groups: of micro-batches, for the estimate.
        experts: stages of several devices may divide experts.
        only: "experts": they must; None: as is faster.
    """
    kinds = kinds_of(fluid.devices, fluid.links)
    steps = prod((len(k) + 1) * (len(k) + 2) // 2 for k in kinds)
    space: _Sets | _Runs = _Sets(kinds, fluid.devices) if steps <= STEPS else _Runs(fluid.devices)
    return _Search(fluid, space, groups, experts, only).run()


def kinds_of(devices: Sequence[Device], links: Links) -> list[list[int]]:
    """Devices that are alike in all but name, and have no link of their own."""
    special = {r for pair in links.pairs for r in pair}
    kinds: dict[tuple[object, ...], list[int]] = {}
    for r, d in enumerate(devices):
        own = r if r in special else -1
        key = (d.host, d.flops_per_s, d.dequantise_bytes_per_s, d.read_bytes_per_s, d.memory_bytes, d.fixed_bytes, own)
        kinds.setdefault(key, []).append(r)
    return list(kinds.values())


class _Sets:
    """Sets of devices as counts of each kind."""

    def __init__(self, kinds: list[list[int]], devices: Sequence[Device]) -> None:
        self.kinds = kinds
        self.full: State = tuple(len(k) for k in kinds)
        self.start: State = (0,) * len(kinds)
        self.hosts: dict[str, list[int]] = {}
        for k, ranks in enumerate(kinds):
            self.hosts.setdefault(devices[ranks[0]].host, []).append(k)

    def steps(self, state: State) -> Iterator[tuple[State, State]]:
        """(next state, what the stage takes)."""
        used = {h: sum(state[k] for k in ks) for h, ks in self.hosts.items()}
        begun = [h for h, ks in self.hosts.items() if 0 < used[h] < sum(self.full[k] for k in ks)]
        for host in begun or [h for h in self.hosts if not used[h]]:
            ks = self.hosts[host]
            for counts in product(*(range(self.full[k] - state[k] + 1) for k in ks)):
                if any(counts):
                    taken = [0] * len(state)
                    for k, c in zip(ks, counts, strict=True):
                        taken[k] = c
                    yield tuple(a + b for a, b in zip(state, taken, strict=True)), tuple(taken)

    def ranks(self, used: State, taken: State) -> tuple[int, ...]:
        left = [n - b for n, b in zip(self.full, used, strict=True)]
        return tuple(sorted(r for k, c in enumerate(taken) for r in self.kinds[k][left[k] - c : left[k]]))

    def some(self, taken: State) -> tuple[int, ...]:
        return self.ranks(self.start, taken)


class _Runs:
    """The last devices of a fixed order; a stage takes those before them, of one host."""

    def __init__(self, devices: Sequence[Device]) -> None:
        hosts = list(dict.fromkeys(d.host for d in devices))
        self.order = sorted(
            range(len(devices)), key=lambda r: (hosts.index(devices[r].host), -devices[r].flops_per_s, r)
        )
        self.host = [devices[r].host for r in self.order]
        self.start: State = (0,)
        self.full: State = (len(devices),)

    def steps(self, state: State) -> Iterator[tuple[State, State]]:
        last = len(self.order) - state[0]
        for first in range(last - 1, -1, -1):
            if self.host[first] != self.host[last - 1]:
                return
            yield (len(self.order) - first,), (first, last)

    def ranks(self, used: State, taken: State) -> tuple[int, ...]:
        return tuple(sorted(self.order[taken[0] : taken[1]]))

    def some(self, taken: State) -> tuple[int, ...]:
        return self.ranks(self.start, taken)


class _Search:
    def __init__(self, fluid: Fluid, space: _Sets | _Runs, groups: int, experts: bool, only: str | None) -> None:
        self.fluid, self.space, self.groups, self.experts, self.only = fluid, space, groups, experts, only
        self.matrices: dict[State, np.ndarray] = {}
        self.most = min(len(fluid.devices), fluid.layers)
        self.edges: dict[State, list[tuple[State, State]]] = {}
        self.value: dict[State, np.ndarray] = {}  # [stages, first layer]: seconds

    def run(self) -> list[Found]:
        states = self._reach()
        if sum(len(e) for e in self.edges.values()) > CELLS and self.fluid.layers > GRID:
            layers = self.fluid.layers
            self.fluid = self.fluid.on_grid(sorted({round(i * layers / GRID) for i in range(GRID + 1)}))
        shape = (self.most + 1, len(self.fluid.points))
        self.value = {state: np.full(shape, np.inf) for state in states}
        self.value[self.space.start][0, -1] = 0.0
        for state in states:
            value = self.value[state]
            ks = [k for k in range(self.most) if np.isfinite(value[k]).any()]
            if not ks:
                continue
            low, high = ks[0], ks[-1] + 1
            for after, taken in self.edges[state]:
                best = before(self._matrix(taken), value[low:high], self.groups).min(axis=2)
                out = self.value[after][low + 1 : high + 1]
                np.minimum(out, best, out=out)
        found = []
        for state in states:
            for k in range(2, self.most + 1):
                if np.isfinite(seconds := self.value[state][k, 0]):
                    found.append((float(seconds), k, state))
        found.sort()
        full = [x for x in found if x[2] == self.space.full]
        least = min((x[0] for x in full), default=np.inf)
        some = [x for x in found if x[2] != self.space.full and x[0] < least]
        back: dict[State, list[tuple[State, State]]] = {}
        for state in states:
            for after, taken in self.edges[state]:
                back.setdefault(after, []).append((state, taken))
        return [Found(self._teams(back, state, k), seconds) for seconds, k, state in full + some[:SOME]]

    def _reach(self) -> list[State]:
        """States in an order in which each comes after those that lead to it."""
        edges = self.edges
        todo = [self.space.start]
        while todo:
            state = todo.pop()
            if state not in edges:
                edges[state] = list(self.space.steps(state))
                todo += [after for after, _ in edges[state]]
        return sorted(edges, key=lambda s: (sum(s), s))

    def _matrix(self, taken: State) -> np.ndarray:
        if taken not in self.matrices:
            ranks = self.space.some(taken)
            ways = [Team(ranks)]
            if len(ranks) > 1 and self.experts:
                ways = [Team(ranks, "experts")] if self.only == "experts" else [*ways, Team(ranks, "experts")]
            matrix = self.fluid.seconds(ways[0], self.groups, 1)
            for team in ways[1:]:
                matrix = np.minimum(matrix, self.fluid.seconds(team, self.groups, 1))
            self.matrices[taken] = matrix
        return self.matrices[taken]

    def _teams(self, back: dict[State, list[tuple[State, State]]], state: State, k: int) -> tuple[Team, ...]:
        """From the first stage on, by way of values that made this one."""
        at = 0
        teams = []
        while k:
            wanted = self.value[state][k, at]
            for later, taken in back[state]:
                both = before(self._matrix(taken)[at : at + 1], self.value[later][k - 1], self.groups)[0]
                if both.min() == wanted:
                    break
            else:
                raise AssertionError("no way back")
            cell = int(both.argmin())
            teams.append(self._way(self.space.ranks(later, taken), at, cell))
            at, state, k = cell, later, k - 1
        return tuple(teams)

    def _way(self, ranks: tuple[int, ...], a: int, b: int) -> Team:
        tokens, experts = Team(ranks), Team(ranks, "experts")
        if len(ranks) == 1 or not self.experts:
            return tokens
        if self.only == "experts":
            return experts
        faster = self.fluid.seconds(experts, self.groups, 1)[a, b] < self.fluid.seconds(tokens, self.groups, 1)[a, b]
        return experts if faster else tokens
