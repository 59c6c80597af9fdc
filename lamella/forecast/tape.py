"""Tensors that work makes and lets go of, on paper: the bytes alive, the most there were, and the products computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BLOCK_RANK = 64
"""As `models.groups.BLOCK_RANK`: up to this rank sum the B matrices of a group are multiplied as one block matrix."""
CHUNK = 32
WANTED_GRAINS, UNDIVIDED = 8, 16
FORWARD_SCRATCH, BACKWARD_SCRATCH = 164_352, 533_504
"""Of a thread in `kernels/cpu/amx_attention.c`; backward also has sums of keys and values for the longest sequence."""
SHORT_CPU = 320
"""As `models.attention.SHORT_CPU`: shorter sequences have their scores written out where the C kernels do not serve."""
MAX_PADDING = 1.3
"""As `models.attention`: of sequences computed together, rows per real row at most."""


@dataclass(frozen=True)
class Ways:
    """How layers are computed: norms, heads and MLPs by the fused modules of a CPU or by the family's own; attention by the C
    kernels, CUDA's, or torch's.

    Attributes:
        fused: fused modules; kernels: the CPU has the instructions for C kernels of attention and experts.
        element: bytes of the compute dtype.
    """

    fused: bool
    kernels: bool
    cuda: bool
    element: int
    dropout: bool
    threads: int

    @staticmethod
    def of(device_kind: str, element: int, fused: bool, dropout: bool, threads: int) -> Ways:
        cuda = device_kind == "cuda"
        return Ways(fused and not cuda, fused and not cuda, cuda, element, dropout, threads)


Saved = dict[str, float]
"""What a graph keeps, by name, in bytes."""


class Tape:
    """Bytes as work goes on.

    Args:
        element: bytes of a value in the compute dtype.
        keeps: a graph is kept for a backward pass.
    """

    def __init__(self, element: int, keeps: bool) -> None:
        self.element, self.keeps = element, keeps
        self.live = self.peak = 0.0
        self.products: set[tuple[Any, ...]] = set()

    def new(self, values: float, element: int | None = None) -> float:
        """A tensor of so many values; gives its bytes, to be let go of with `free`."""
        nbytes = values * (self.element if element is None else element)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        return nbytes

    def free(self, *sizes: float) -> None:
        self.live -= sum(sizes)

    def let_go(self, *sizes: float) -> tuple[float, ...]:
        """Free what only a graph would keep; gives what is kept, to be freed in the backward pass."""
        if self.keeps:
            return sizes
        self.free(*sizes)
        return ()

    def mark(self) -> None:
        """Begin a new peak."""
        self.peak = self.live

    def multiply(self, name: str, *operands: tuple[int, int, bool]) -> None:
        """Note a product of (rows, columns, as they lie in memory) operands."""
        self.products.add((name, *operands))


@dataclass(frozen=True)
class Linears:
    """Linear layers on one input, computed as one.

    Attributes:
        outputs: features of each.
        ranks: of the LoRA pair of each, 0: none.
        dropout: of inputs of the pairs.
        grouped: computed by `models.groups`; else a `FrozenLinear` alone.
    """

    inputs: int
    outputs: tuple[int, ...]
    ranks: tuple[int, ...]
    dropout: bool = False
    grouped: bool = True

    @property
    def wide(self) -> int:
        return sum(self.outputs)

    @property
    def rank(self) -> int:
        return sum(self.ranks)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(outputs, rank) of the adapted ones."""
        return [(o, r) for o, r in zip(self.outputs, self.ranks, strict=True) if r]

    @property
    def _whole(self) -> bool:
        """One B serves all outputs as it is."""
        return len(self.pairs) == 1 and self.pairs[0][0] == self.wide

    @property
    def _block(self) -> int:
        """Values of the block matrix that is made of the B matrices."""
        return 0 if self._whole or self.rank > BLOCK_RANK or not self.grouped else self.wide * self.rank

    @property
    def _stacked(self) -> int:
        return 0 if len(self.pairs) < 2 else self.rank * self.inputs

    def forward(self, t: Tape, n: int) -> tuple[float, float]:
        """Bytes of the outputs and of x A^T, on `n` rows."""
        i, o, r = self.inputs, self.wide, self.rank
        if not r:
            y = t.new(n * o)
            t.multiply("mm", (n, i, True), (i, o, False))
            return y, 0.0
        if self.dropout:
            parts = [self._dropped_product(t, n, rank) for _, rank in self.pairs]
            xa = t.new(n * r) if self.grouped else parts.pop()
            t.free(*parts)
        else:
            stacked = t.new(self._stacked)
            xa = t.new(n * r)
            t.multiply("mm", (n, i, True), (i, r, False))
            t.free(stacked)
        block = t.new(self._block)
        y = t.new(n * o)
        self._up(t, n)
        t.multiply("addmm_", (n, o, True), (n, i, True), (i, o, False))
        t.free(block)
        return y, xa

    def _dropped_product(self, t: Tape, n: int, rank: int) -> float:
        mask = t.new(n * self.inputs, 1)
        kept = t.new(n * self.inputs)
        scaled = t.new(n * self.inputs)
        t.free(kept)
        xa = t.new(n * rank)
        t.multiply("mm", (n, self.inputs, True), (self.inputs, rank, False))
        t.free(scaled)
        if not (t.keeps and not self.grouped):
            t.free(mask)
        return xa

    def _up(self, t: Tape, n: int) -> None:
        if self._block or self._whole or not self.grouped:
            t.multiply("addmm_", (n, self.wide, True), (n, self.rank, True), (self.rank, self.wide, False))
            return
        for o, r in self.pairs:
            t.multiply("addmm_", (n, o, True), (n, r, True), (r, o, False))

    def input_gradient(self, t: Tape, n: int) -> tuple[float, float]:
        """Bytes of the gradients at the input and at x A^T."""
        i, o, r = self.inputs, self.wide, self.rank
        if not r:
            dx = t.new(n * i)
            t.multiply("mm", (n, o, True), (o, i, True))
            return dx, 0.0
        block = t.new(self._block)
        if self._block or self._whole:
            dxa = t.new(n * r)
            t.multiply("mm", (n, o, True), (o, r, True))
        else:
            parts = [t.new(n * rank) for _, rank in self.pairs]
            for out, rank in self.pairs:
                t.multiply("mm", (n, out, True), (out, rank, True))
            dxa = t.new(n * r)
            t.free(*parts)
        dx = self._input_part(t, n)
        t.multiply("addmm_", (n, i, True), (n, o, True), (o, i, True))
        t.free(block)
        return dx, dxa

    def _input_part(self, t: Tape, n: int) -> float:
        i = self.inputs
        if not self.dropout:
            stacked = t.new(self._stacked)
            dx = t.new(n * i)
            t.multiply("mm", (n, self.rank, True), (self.rank, i, True))
            t.free(stacked)
            return dx
        parts = []
        for _, rank in self.pairs:
            product, mask = t.new(n * i), t.new(n * i, 1)
            kept, scaled = t.new(n * i), t.new(n * i)
            t.multiply("mm", (n, rank, True), (rank, i, True))
            t.free(product, mask, kept)
            parts.append(scaled)
        if not self.grouped:
            return parts[0]
        stacked = t.new(n * i * len(parts))
        t.free(*parts)
        dx = t.new(n * i)
        t.free(stacked)
        return dx

    def leaf_gradients(self, t: Tape, n: int) -> None:
        """Gradients at the pairs; they stay until all of the layer are there."""
        if not self.rank:
            return
        if self._block or self._whole:
            t.new(self.rank * self.wide)
            t.multiply("mm", (self.rank, n, False), (n, self.wide, True))
        else:
            for o, r in self.pairs:
                t.new(r * o)
                t.multiply("mm", (r, n, False), (n, o, True))
        if not self.dropout:
            t.new(self.rank * self.inputs)
            t.multiply("mm", (self.rank, n, False), (n, self.inputs, True))
            return
        for _, r in self.pairs:
            mask, kept, scaled = t.new(n * self.inputs, 1), t.new(n * self.inputs), t.new(n * self.inputs)
            t.new(r * self.inputs)
            t.multiply("mm", (r, n, False), (n, self.inputs, True))
            t.free(mask, kept, scaled)

    # ---- alone (`models.linear.FrozenLinear`) ----

    def backward(self, t: Tape, n: int) -> float:
        """Bytes of the gradient at the input; what forward kept is the caller's to free."""
        i, o, r = self.inputs, self.wide, self.rank
        if not r:
            dx = t.new(n * i)
            t.multiply("mm", (n, o, True), (o, i, True))
            return dx
        dxa = t.new(n * r)
        t.multiply("mm", (n, o, True), (o, r, True))
        t.new(o * r)
        t.multiply("mm", (o, n, False), (n, r, True))
        if self.dropout:
            kept, scaled = t.new(n * i), t.new(n * i)
            t.free(kept)
            t.new(r * i)
            t.free(scaled)
            product, kept = t.new(n * i), t.new(n * i)
            t.free(product)
            dx = t.new(n * i)
            t.free(kept)
        else:
            t.new(r * i)
            dx = t.new(n * i)
        t.multiply("mm", (r, n, False), (n, i, True))
        t.multiply("mm", (n, r, True), (r, i, True))
        t.multiply("addmm_", (n, i, True), (n, o, True), (o, i, True))
        t.free(dxa)
        return dx


def attention_chunks(lengths: Sequence[int]) -> int:
    """Blocks of 32 tokens that the C kernels see."""
    return sum(-(-x // CHUNK) for x in lengths)


def groups_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """As `models.attention` puts sequences of similar length together."""
    if len(set(lengths)) <= 1:
        return [list(lengths)] if lengths else []
    groups: list[list[int]] = []
    real = 0
    for x in sorted(lengths, reverse=True):
        if groups and groups[-1][0] * (len(groups[-1]) + 1) <= MAX_PADDING * (real + x):
            groups[-1].append(x)
            real += x
        else:
            groups.append([x])
            real = x
    return groups
