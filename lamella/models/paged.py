"""A key-value cache in blocks: rows of any length join and leave at any time.

All tokens of all rows lie in one store per layer, in blocks of 32 tokens; a row is a list of blocks. A row's blocks are
taken for its prompt and its whole answer before it starts, so a row that runs never waits for memory. Other mixers than
attention keep their inputs the same way.

A view (`Prompts`, `NextTokens`) is what a batch sees of it: a `Cache`. Blocks get back clean: what a row left is never
part of another's sums.

Shape suffixes: T tokens, B rows, n blocks of a row, H heads, K kv heads, D key size, V value size, L length.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from lamella.errors import UserError
from lamella.kernels import paged as kernels
from lamella.models.padded import by_length
from lamella.units import format_bytes

BLOCK = 32
"""Tokens of a block."""


@dataclass
class Form:
    """What a token leaves behind: by attention layer the shapes of its key and value, by mixer those of its inputs."""

    attention: dict[int, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    mixers: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = field(default_factory=dict)

    @property
    def token_bytes(self) -> int:
        attention = sum((prod(k) + prod(v)) * dtype.itemsize for k, v, dtype in self.attention.values())
        mixers = sum(prod(shape) * dtype.itemsize for kept in self.mixers.values() for shape, dtype in kept)
        return attention + mixers


class FormProbe:
    """A `Cache` that keeps nothing but the shapes of what it is given: run one batch with it to learn a model's form."""

    decoding = False

    def __init__(self) -> None:
        self.form = Form()

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.form.attention[layer] = ((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]), key.dtype)

    def remember(self, mixer: int, tensors: Sequence[Tensor]) -> None:
        self.form.mixers[mixer] = [(tuple(x.shape[2:]), x.dtype) for x in tensors]

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks_H: Tensor | None, chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        raise AssertionError("nothing is kept")

    def recall(self, mixer: int) -> tuple[list[Tensor], Tensor]:
        raise AssertionError("nothing is kept")

    def filled(self, x_BH: Tensor) -> Tensor:
        raise AssertionError("nothing is kept")


@dataclass(frozen=True)
class CacheRow:
    """Blocks of one row, int64 [n]."""

    blocks: Tensor

    def slots(self, first: int, end: int) -> Tensor:
        """Where tokens first .. end - 1 lie."""
        at = torch.arange(first, end)
        return self.blocks[at // BLOCK] * BLOCK + at % BLOCK


class PagedCache:
    """The store.

    Args:
        form: what a token leaves.
        budget_bytes: of all blocks.
        device: where they lie.

    Attributes:
        blocks: that rows can have. (Block 0 is nobody's and stays zero: padding looks there.)

    Raises:
        UserError: the budget is too small for one block.
    """

    def __init__(self, form: Form, budget_bytes: int, device: torch.device) -> None:
        block_bytes = max(form.token_bytes, 1) * BLOCK
        self.blocks = budget_bytes // block_bytes - 1
        if self.blocks < 1:
            raise UserError(
                f"a KV cache of {format_bytes(budget_bytes)} has no room for a block: {BLOCK} tokens take "
                f"{format_bytes(block_bytes)}, and one block stays empty",
                fix=f"give the KV cache at least {format_bytes(block_bytes * 64)}",
            )
        self.device = device
        slots = (self.blocks + 1) * BLOCK
        self.keys = {i: torch.zeros(slots, *k, dtype=t, device=device) for i, (k, _, t) in form.attention.items()}
        self.values = {i: torch.zeros(slots, *v, dtype=t, device=device) for i, (_, v, t) in form.attention.items()}
        self.inputs = {
            m: [torch.zeros(slots, *shape, dtype=dtype, device=device) for shape, dtype in kept]
            for m, kept in form.mixers.items()
        }
        self._free = list(range(1, self.blocks + 1))  # a heap: low blocks first, so little memory is touched

    @property
    def tokens(self) -> int:
        return self.blocks * BLOCK

    @property
    def tokens_used(self) -> int:
        return (self.blocks - len(self._free)) * BLOCK

    def can_hold(self, tokens: int) -> bool:
        """Whether a row of as many tokens fits when nobody else is here."""
        return -(-tokens // BLOCK) <= self.blocks

    def reserve(self, tokens: int) -> CacheRow | None:
        """Blocks for a row that will grow to this many tokens; None: there are not enough now."""
        wanted = -(-tokens // BLOCK)
        if wanted > len(self._free):
            return None
        return CacheRow(torch.tensor([heapq.heappop(self._free) for _ in range(wanted)]))

    def release(self, row: CacheRow) -> None:
        """Give a row's blocks back, cleaned."""
        at = row.blocks.to(self.device)
        for store in (*self.values.values(), *(x for kept in self.inputs.values() for x in kept)):
            store.view(-1, BLOCK, *store.shape[1:]).index_fill_(
                0, at, 0
            )  # a NaN there would pass through a zero weight
        for block in row.blocks.tolist():
            heapq.heappush(self._free, block)


class _View:
    """Slots of a batch's tokens; tokens beyond them are filler and leave nothing."""

    def __init__(self, cache: PagedCache, slot_T: Tensor) -> None:
        self.cache, self.slot_T = cache, slot_T.to(cache.device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        tokens = self.slot_T.numel()
        self.cache.keys[layer].index_copy_(0, self.slot_T, key[0].transpose(0, 1)[:tokens])
        self.cache.values[layer].index_copy_(0, self.slot_T, value[0].transpose(0, 1)[:tokens])

    def remember(self, mixer: int, tensors: Sequence[Tensor]) -> None:
        for history, x in zip(self.cache.inputs[mixer], tensors, strict=True):
            history.index_copy_(0, self.slot_T, x[0, : self.slot_T.numel()])


class Prompts(_View):
    """Whole prompts, one after the other, from position 0."""

    decoding = False

    def __init__(self, cache: PagedCache, rows: Sequence[CacheRow], lengths: Sequence[int]) -> None:
        super().__init__(cache, torch.cat([row.slots(0, n) for row, n in zip(rows, lengths, strict=True)]))

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks_H: Tensor | None, chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        raise AssertionError("prompts attend to themselves")

    def recall(self, mixer: int) -> tuple[list[Tensor], Tensor]:
        raise AssertionError("prompts run by themselves")

    def filled(self, x_BH: Tensor) -> Tensor:
        return x_BH


class NextTokens(_View):
    """One new token for each row.

    Args:
        positions: of the new tokens.
        tokens: of the batch, filler included.
    """

    decoding = True

    def __init__(self, cache: PagedCache, rows: Sequence[CacheRow], positions: Sequence[int], tokens: int) -> None:
        super().__init__(cache, torch.cat([row.slots(p, p + 1) for row, p in zip(rows, positions, strict=True)]))
        self.rows, self.positions, self.tokens = rows, list(positions), tokens

    @cached_property
    def table(self) -> Tensor:
        """int32 [B, n]: blocks of each row, then zeros."""
        widest = max(p // BLOCK + 1 for p in self.positions)
        table_Bn = torch.zeros(len(self.rows), widest, dtype=torch.int32)
        for at, (row, position) in enumerate(zip(self.rows, self.positions, strict=True)):
            n = position // BLOCK + 1
            table_Bn[at, :n] = row.blocks[:n]
        return table_Bn

    def _first(self, window: int | None, chunk: int | None) -> list[int]:
        """First position that each row's new token sees."""
        lows = []
        for p in self.positions:
            low = 0 if window is None else max(p - window + 1, 0)
            lows.append(low if chunk is None else max(low, p // chunk * chunk))
        return lows

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks_H: Tensor | None, chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        q_BHD = query[0].transpose(0, 1)[: len(self.rows)]
        lows = self._first(window, chunk)
        if kernels.takes(q_BHD):
            out = kernels.attend(q_BHD, keys, values, self.table, lows, self.positions, BLOCK, scale, softcap, sinks_H)
        else:
            out = self._attend_in_groups(q_BHD, keys, values, lows, scale, softcap, sinks_H)
        return self.filled(out)[None]

    def _attend_in_groups(
        self, q_BHD: Tensor, keys: Tensor, values: Tensor, lows: Sequence[int], scale: float, softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Rows of similar length together: their blocks are gathered side by side."""
        out = q_BHD.new_empty(len(self.rows), q_BHD.shape[1], values.shape[2])
        counts = [p // BLOCK - low // BLOCK + 1 for low, p in zip(lows, self.positions, strict=True)]
        for group in by_length(counts):
            width = max(counts[b] for b in group)
            blocks_bn = torch.zeros(len(group), width, dtype=torch.int64)
            for at, b in enumerate(group):
                first = lows[b] // BLOCK
                blocks_bn[at, : counts[b]] = self.table[b, first : first + counts[b]]
            at_bL = torch.tensor([[lows[b] // BLOCK * BLOCK] for b in group]) + torch.arange(width * BLOCK)
            seen_bL = (at_bL >= torch.tensor([[lows[b]] for b in group])) & (
                at_bL <= torch.tensor([[self.positions[b]] for b in group])
            )
            picked = torch.tensor(group, device=q_BHD.device)
            k, v = (
                x.view(-1, BLOCK, *x.shape[1:])[blocks_bn.to(x.device)].flatten(1, 2).transpose(1, 2)
                for x in (keys, values)
            )
            out[picked] = kernels.reference(q_BHD[picked], k, v, seen_bL.to(q_BHD.device), scale, softcap, sinks_H)
        return out

    def recall(self, mixer: int) -> tuple[list[Tensor], Tensor]:
        longest = max(self.positions) + 1
        slot_BL = torch.stack([
            row.slots(0, p + 1)[torch.arange(longest).clamp(max=p)]
            for row, p in zip(self.rows, self.positions, strict=True)
        ]).to(self.cache.device)  # fmt: skip
        return [x[slot_BL] for x in self.cache.inputs[mixer]], torch.tensor(self.positions, device=self.cache.device)

    def filled(self, x_BH: Tensor) -> Tensor:
        extra = self.tokens - x_BH.shape[0]
        return x_BH if not extra else torch.cat([x_BH, x_BH.new_zeros(extra, *x_BH.shape[1:])])
