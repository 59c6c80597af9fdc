"""A MoE layer's router and routed experts, played on paper (`tape.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lamella.forecast.tape import Saved, Tape, Ways

EXPERT_COLUMNS = 64
"""As `kernels.experts.COLUMNS`."""


@dataclass(frozen=True)
class Experts:
    """Router and routed gated experts."""

    hidden: int
    inner: int
    experts: int
    active: int
    rank1: int
    rank2: int
    ways: Ways

    @property
    def by_kernel(self) -> bool:
        """The fused kernels on packed weights serve them."""
        ways = self.ways
        fits = self.hidden % EXPERT_COLUMNS == 0 and self.inner % EXPERT_COLUMNS == 0
        drops = ways.dropout and (self.rank1 or self.rank2)
        return bool(ways.kernels and ways.element == 2 and fits and not drops)

    def _route(self, t: Tape, n: int, saved: Saved) -> float:
        """Router: bytes of the weights that the experts take."""
        logits = t.new(n * self.experts)
        t.multiply("mm", (n, self.hidden, True), (self.hidden, self.experts, False))
        wide = t.new(n * self.experts, 4) if t.element < 4 else 0.0
        chances = t.new(n * self.experts, 4)
        t.free(wide)
        chosen, values = t.new(n * self.active, 8), t.new(n * self.active, 4)
        total = t.new(n, 4)
        saved["router"] = sum(t.let_go(chances, total, chosen))
        if t.keeps:
            saved["router"] += t.new(n * self.active, 4)
        else:
            t.live += chosen
        if t.element < 4:
            narrow = t.new(n * self.active)
            t.free(values)
            values = narrow
        saved["logits"] = logits
        if not t.keeps:
            saved["chosen"] = chosen
        return values

    def forward(self, t: Tape, n: int, saved: Saved) -> float:
        weights = self._route(t, n, saved)
        y = (self._kernel if self.by_kernel else self._one_by_one)(t, n, saved)
        if self.by_kernel or not t.keeps:
            t.free(weights)
        else:
            saved["e.weights"] = weights
        if not t.keeps:
            t.free(saved.pop("chosen"))
        return y

    def _kernel(self, t: Tape, n: int, saved: Saved) -> float:
        rows = n * self.active
        weights = t.new(rows, 4)
        table = t.new(self.experts + 1, 4) + t.new(rows, 4) + t.new(rows, 4) + t.new(rows, 4)
        kept = 0.0
        if t.keeps:
            kept = t.new(2 * rows * self.inner) + t.new(rows * self.rank1) + t.new(rows * self.rank2)
        y = t.new(n * self.hidden)
        t.free(weights)
        saved["experts"] = kept + sum(t.let_go(table))
        return y

    def _one_by_one(self, t: Tape, n: int, saved: Saved) -> float:
        rows = self._rows(n)
        self._count_products(t, n)
        places = t.new(5 * n * self.active + 2 * rows, 8)
        x = t.new(rows * self.hidden)
        both, xa1 = self._grouped(t, rows, self.hidden, 2 * self.inner, self.rank1)
        act, inner = t.new(rows * self.inner), t.new(rows * self.inner)
        t.free(0.0 if t.keeps else act)
        y, xa2 = self._grouped(t, rows, self.inner, self.hidden, self.rank2)
        out = t.new(n * self.hidden, 4)
        t.free(t.new(n * self.hidden) + (t.new(n * self.hidden, 4) if t.element < 4 else 0.0))
        if t.element < 4:
            narrow = t.new(n * self.hidden)
            t.free(out)
            out = narrow
        if not t.keeps:
            t.free(places, x, both, inner, y)
            return out
        slots = n * self.active * 8.0
        t.free(places - slots, *(() if self.rank1 else (x,)), *(() if self.rank2 else (inner,)))
        saved |= {"e.y": y, "e.slots": slots, "e.both": both, "e.act": act, "e.xa1": xa1, "e.xa2": xa2,
                  "e.x": x if self.rank1 else 0.0, "e.inner": inner if self.rank2 else 0.0}  # fmt: skip
        return out

    def _count_products(self, t: Tape, n: int) -> None:
        """Every number of rows an expert has is a shape: its mean within two standard deviations, in steps of 16."""
        mean = n * self.active / self.experts
        steps = math.ceil(4 * math.sqrt(mean) / 16) + 1
        for step in range(steps):
            for which, rank in enumerate((self.rank1, self.rank2)):
                for product in range(8 if rank else 2):
                    t.multiply("expert", (step, which, True), (product, rank, True))

    def _grouped(self, t: Tape, rows: int, inputs: int, outputs: int, rank: int) -> tuple[float, float]:
        """Bytes of one projection of all experts, of x A^T as far as it is kept (a dropout mask is, to the end)."""
        mask = dropped = 0.0
        if rank and self.ways.dropout:
            bits, ones = t.new(rows * inputs, 1), t.new(rows * inputs)
            mask = t.new(rows * inputs)
            t.free(ones)
            y = t.new(rows * outputs)
            xa = t.new(rows * rank)
            dropped = t.new(rows * inputs)
            t.free(bits)
        else:
            y, xa = t.new(rows * outputs), t.new(rows * rank)
        t.free(dropped)
        if t.keeps:
            return y, xa
        t.free(xa, mask)
        return y, 0.0

    def _rows(self, n: int) -> int:
        """(token, expert) rows; in bf16 on a CPU each expert's are filled up to 16, half of that on average."""
        rows = n * self.active
        return rows if self.ways.cuda or self.ways.element == 4 else rows + 8 * min(self.experts, rows)

    def backward(self, t: Tape, n: int, saved: Saved, x: float) -> float:
        """Bytes of the gradient at the input; x: of the input, which the graph kept."""
        dx, dweights = (self._kernel_back if self.by_kernel else self._one_by_one_back)(t, n, saved)
        t.free(x)
        few = [t.new(n * self.active, 4) for _ in range(4)]
        t.free(dweights, *few)
        spread = t.new(n * self.experts, 4)
        dlogits = t.new(n * self.experts, 4)
        t.free(spread, dlogits, saved.pop("router"))
        narrow = t.new(n * self.experts)
        through = t.new(n * self.hidden)
        t.multiply("mm", (n, self.experts, True), (self.experts, self.hidden, True))
        t.free(narrow)
        total = t.new(n * self.hidden)
        t.free(through, dx)
        return total

    def leaf_bytes(self, t: Tape) -> float:
        e = self.experts
        made = 0.0
        if self.rank1:
            made += t.new(e * self.rank1 * self.hidden) + t.new(e * 2 * self.inner * self.rank1)
        return made

    def leaf_bytes_down(self, t: Tape) -> float:
        e = self.experts
        return t.new(e * self.rank2 * self.inner) + t.new(e * self.hidden * self.rank2) if self.rank2 else 0.0

    def _kernel_back(self, t: Tape, n: int, saved: Saved) -> tuple[float, float]:
        rows = n * self.active
        dweight = t.new(rows, 4)
        self.leaf_bytes(t)
        self.leaf_bytes_down(t)
        dx = t.new(n * self.hidden)
        gathered = t.new(rows, 4) + t.new(rows, 4)
        t.free(dweight, gathered, saved.pop("experts"))
        return dx, t.new(rows)

    def _one_by_one_back(self, t: Tape, n: int, saved: Saved) -> tuple[float, float]:
        rows, wide = self._rows(n), t.element < 4
        dy, dweights = t.new(rows * self.hidden), t.new(n * self.active)
        grad = t.new(n * self.hidden)
        wider = t.new(n * self.hidden, 4) if wide else 0.0
        picked = t.new(n * self.hidden)
        if wide:
            wider += t.new(n * self.hidden, 4)
            t.free(picked)
        product = t.new(n * self.hidden, 4)
        picked = wider if wide else picked
        t.free(grad, picked, product, saved.pop("e.y"), saved.pop("e.weights"))
        dinner = t.new(rows * self.inner)
        self.leaf_bytes_down(t)
        t.free(t.new(rows * self.inner) if self.rank2 and self.ways.dropout else 0.0)
        t.free(dy, saved.pop("e.inner"), saved.pop("e.xa2"))
        dact, dup = t.new(rows * self.inner), t.new(rows * self.inner)
        t.free(dinner, saved.pop("e.act"))
        dgate = t.new(rows * self.inner)
        t.free(dact, saved.pop("e.both"))
        both = t.new(2 * rows * self.inner)
        t.free(dgate, dup)
        dx_rows = t.new(rows * self.hidden)
        self.leaf_bytes(t)
        t.free(t.new(rows * self.hidden) if self.rank1 and self.ways.dropout else 0.0)
        t.free(both, saved.pop("e.x"), saved.pop("e.xa1"))
        summed = t.new(n * self.hidden, 4)
        t.free(t.new(n * self.hidden))
        if wide:
            narrow = t.new(n * self.hidden)
            t.free(summed)
            summed = narrow
        t.free(dx_rows, saved.pop("e.slots"))
        return summed, dweights


@dataclass(frozen=True)
class CudaExperts(Experts):
    """By the Triton kernels (`models/experts_cuda.py`): gate, up and their product are made and undone in one pass each."""

    def _one_by_one(self, t: Tape, n: int, saved: Saved) -> float:
        rows = n * self.active
        places = t.new(5 * rows, 8)
        x = t.new(rows * self.hidden)
        both, xa1 = self._grouped(t, rows, self.hidden, 2 * self.inner, self.rank1)
        inner = t.new(rows * self.inner)
        y, xa2 = self._grouped(t, rows, self.inner, self.hidden, self.rank2)
        out = t.new(n * self.hidden)
        if not t.keeps:
            t.free(places, x, both, inner, y)
            return out
        t.free(*(() if self.rank1 else (x,)), *(() if self.rank2 else (inner,)))
        saved |= {"e.y": y, "e.slots": places, "e.both": both, "e.xa1": xa1, "e.xa2": xa2,
                  "e.x": x if self.rank1 else 0.0, "e.inner": inner if self.rank2 else 0.0}  # fmt: skip
        return out

    def _one_by_one_back(self, t: Tape, n: int, saved: Saved) -> tuple[float, float]:
        rows = n * self.active
        dy, dweights = t.new(rows * self.hidden), t.new(rows)
        t.free(saved.pop("e.y"), saved.pop("e.weights"))
        low = t.new(rows * self.rank2)
        self.leaf_bytes_down(t)
        dinner = t.new(rows * self.inner)
        t.free(dy, low, saved.pop("e.inner"), saved.pop("e.xa2"))
        dboth = t.new(2 * rows * self.inner)
        t.free(dinner, saved.pop("e.both"))
        low = t.new(rows * self.rank1)
        self.leaf_bytes(t)
        dx_rows = t.new(rows * self.hidden)
        t.free(dboth, low, saved.pop("e.x"), saved.pop("e.xa1"))
        dx = t.new(n * self.hidden)
        t.free(dx_rows, saved.pop("e.slots"))
        return dx, dweights


def expert_scratch_bytes(hidden: int, inner: int, rank1: int, rank2: int) -> float:
    """Bytes of a thread's scratch in `kernels/cpu/amx_experts.c`, for backward."""
    h, i, chunk = hidden, inner, min(512, (1 << 19) // (2 * hidden) // 32 * 32)
    if chunk < 128:
        chunk = max(32, min(128, (1 << 20) // (2 * hidden) // 32 * 32))
    tiles, kh, ki = chunk // 16, h // 32, i // 32
    r1, r2 = (-(-r // 16) for r in (rank1, rank2))
    k1, k2 = (-(-r // 32) for r in (rank1, rank2))
    in_tiles = tiles * (kh + 3 * ki + 2 * k1 + 2 * k2)
    in_tiles += (r1 + 1) * kh + 2 * i // 16 * k1 + r1 * 2 * ki + (r2 + 1) * ki + h // 16 * k2 + r2 * kh
    in_tiles += h // 16 * k1 + i // 16 * k2 + (max(r1, r2) * 4 + 2) * chunk // 32
    padded1, padded2 = (-(-r // 2) * 4 * 256 for r in (r1, r2))
    in_tiles += 2 * max(2 * max(kh, ki), 16 * min(max(kh, 2 * ki), 12))
    floats = (
        3 * h * i // 64
        + -(-tiles // 2) * 8 * 4 * 256
        + chunk * 16
        + padded1 * (h // 32 + 2 * i // 32)
        + padded2 * (i // 32 + h // 32)
    )
    return float(in_tiles * 1024 + 4 * floats)
