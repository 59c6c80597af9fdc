"""Which rows a step takes, and which of them share a micro-batch. Pure functions of lengths: a run resumes at any step without
replay. Imports no torch.

The order of rows depends on (seed, epoch) alone, the steps of an epoch on the order and the row lengths,
the micro-batches of a step on its rows and the token budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MASK64 = (1 << 64) - 1


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64 (Steele, Lea, Flood 2014): the same on every machine and numpy."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(rows) that depends on nothing but its arguments."""
    with np.errstate(over="ignore"):
        key = _mix(np.array([seed & _MASK64], dtype=np.uint64))
        key = _mix(key ^ np.uint64(epoch))
        keys = _mix(np.arange(rows, dtype=np.uint64) ^ key)
    return np.argsort(keys, kind="stable").tolist()


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of one optimizer step. `index` counts steps from 0 over the whole run."""

    index: int
    epoch: int
    first: int
    """Position of its first row in the epoch's order."""
    rows: tuple[int, ...]
    """Indices into the data set's rows."""


class StepPlanner:
    """Optimizer steps over a data set, by a number of rows or a token budget.

    Every epoch covers each row once; its last step may be smaller. A row over the token budget is a step of
    its own.

    Args:
        lengths: tokens of each row.
        rows_per_step: rows of a step; None: as many as fit `tokens_per_step`.
    """

    def __init__(self, lengths: Sequence[int], *, seed: int, rows_per_step: int | None, tokens_per_step: int) -> None:
        assert lengths, "no rows to plan"
        self._lengths = list(lengths)
        self._seed = seed
        self._rows_per_step = rows_per_step
        self._tokens_per_step = tokens_per_step
        self._first_steps = [0]  # global index of each epoch's first step, as far as planned
        self._epochs: dict[int, list[Step]] = {}

    def epoch(self, epoch: int) -> list[Step]:
        """Steps of one epoch (from 0), with their global indices."""
        while len(self._first_steps) <= epoch:
            last = len(self._first_steps) - 1
            self._first_steps.append(self._first_steps[last] + len(self._cut(last)))
        if epoch not in self._epochs:
            self._epochs.clear()  # one epoch at a time is in use
            start, steps, done = self._first_steps[epoch], [], 0
            for k, rows in enumerate(self._cut(epoch)):
                steps.append(Step(start + k, epoch, done, tuple(rows)))
                done += len(rows)
            self._epochs[epoch] = steps
        return self._epochs[epoch]

    def step(self, index: int) -> Step:
        """Step `index` of the run, found without replaying the earlier ones."""
        epoch = max(e for e, first in enumerate(self._first_steps) if first <= index)
        while index > (steps := self.epoch(epoch))[-1].index:
            epoch += 1
        return steps[index - steps[0].index]

    def total_steps(self, epochs: float) -> int:
        """Steps of `epochs` passes; a part of an epoch is rounded up to whole steps."""
        whole = math.floor(epochs)
        steps = len(self.epoch(whole))
        return self._first_steps[whole] + math.ceil(round((epochs - whole) * steps, 9))

    def _cut(self, epoch: int) -> list[list[int]]:
        order = epoch_order(len(self._lengths), self._seed, epoch)
        if self._rows_per_step is not None:
            n = self._rows_per_step
            return [order[i : i + n] for i in range(0, len(order), n)]
        steps: list[list[int]] = []
        room = 0
        for row in order:
            if not steps or self._lengths[row] > room:
                steps.append([])
                room = self._tokens_per_step
            steps[-1].append(row)
            room -= self._lengths[row]
        return steps


def pack_lengths(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Rows (positions in `lengths`) of each micro-batch: longest first, each into the first one with room.

    Rows of equal length keep their order. A row longer than the budget is a micro-batch of its own.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for k, left in enumerate(room):
            if lengths[row] <= left:
                bins[k].append(row)
                room[k] -= lengths[row]
                break
        else:
            bins.append([row])
            room.append(budget_tokens - lengths[row])
    return bins


def share_rows(lengths: Sequence[int], shares: Sequence[float]) -> list[list[int]]:
    """Split a step's rows among ranks in proportion to `shares`, by tokens.

    Longest row first, each to the rank that is then least loaded for its share. A rank may get no row.

    Returns:
        For each rank the positions (in `lengths`) of its rows, ascending.
    """
    assert any(share > 0 for share in shares), "no rank has a share"
    loads = [0.0] * len(shares)
    taken: list[list[int]] = [[] for _ in shares]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        able = [r for r, share in enumerate(shares) if share > 0]
        rank = min(able, key=lambda r: ((loads[r] + lengths[i]) / shares[r], r))
        loads[rank] += lengths[i]
        taken[rank].append(i)
    return [sorted(rows) for rows in taken]
