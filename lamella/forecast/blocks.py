"""A decoder layer's parts as the engine computes them, played on paper (`tape.py`): norms, projections, attention, MLP, experts.

Where a family's layer has no form known here, every matrix's output counts as kept, with what the attention and two rows of
fp32 beside each norm take: an upper estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lamella.forecast.shape import Core, LayerShape, Matrix, ModelShape, Site
from lamella.forecast.tape import (
    BACKWARD_SCRATCH,
    CHUNK,
    FORWARD_SCRATCH,
    SHORT_CPU,
    UNDIVIDED,
    WANTED_GRAINS,
    Linears,
    Tape,
    attention_chunks,
    groups_by_length,
)

HEAD_MAX, EXPERT_COLUMNS = 256, 64


@dataclass(frozen=True)
class Ways:
    """How layers are computed: by the fused kernels of a CPU or the family's own modules; attention by the C kernels, CUDA's,
    or torch's."""

    fused: bool
    cuda: bool
    element: int
    dropout: bool
    threads: int

    @staticmethod
    def of(device_kind: str, element: int, fused: bool, dropout: bool, threads: int) -> Ways:
        cuda = device_kind == "cuda"
        return Ways(fused and not cuda, cuda, element, dropout, threads)


Saved = dict[str, float]


@dataclass(frozen=True)
class Norm:
    """RMS norm of rows."""

    width: int
    fused: bool

    def forward(self, t: Tape, n: int, into: Saved, name: str) -> float:
        """Bytes of the output; what its backward needs beside the input goes into `into`."""
        if self.fused:
            y = t.new(n * self.width)
            into[name] = sum(t.let_go(t.new(n, 4)))
            return y
        if t.element == 4:  # the family's own: square, mean, root, product, weight
            square = t.new(n * self.width, 4)
            roots = t.new(n, 4) + t.new(n, 4)
            t.free(square)
            scaled = t.new(n * self.width, 4)
            y = t.new(n * self.width)
            into[name] = sum(t.let_go(roots))
            t.free(scaled)
            return y
        wide = t.new(n * self.width, 4)
        square = t.new(n * self.width, 4)
        roots = t.new(n, 4) + t.new(n, 4)
        t.free(square)
        scaled = t.new(n * self.width, 4)
        narrow = t.new(n * self.width)
        t.free(scaled)
        y = t.new(n * self.width)
        t.free(narrow)
        into[name] = sum(t.let_go(wide, roots))
        return y

    def backward(self, t: Tape, n: int, saved: Saved, name: str, dy: float) -> float:
        """Bytes of the gradient at the input."""
        if self.fused:
            dx = t.new(n * self.width)
            t.free(dy, saved.pop(name))
            return dx
        wide = [t.new(n * self.width, 4) for _ in range(3)]
        t.free(dy, saved.pop(name))
        dx = t.new(n * self.width)
        t.free(*wide)
        return dx


@dataclass(frozen=True)
class Attention:
    """Projections, positions, attention of packed sequences, and the projection of its result."""

    hidden: int
    core: Core
    head_norms: bool
    qkv: Linears
    out: Linears
    ways: Ways

    @property
    def by_kernel(self) -> bool:
        fits = all(size % 32 == 0 and 0 < size <= HEAD_MAX for size in (self.core.head_dim, self.core.value_dim))
        return self.ways.cuda or (fits and self.ways.element == 2 and self.ways.fused)

    def forward(self, t: Tape, n: int, lengths: Sequence[int], saved: Saved) -> float:
        """Bytes of the result; its input is the caller's."""
        core = self.core
        y, xa = self.qkv.forward(t, n)
        turned = t.new(n * (core.heads + core.kv_heads) * core.head_dim) if self.head_norms else 0.0
        if not t.keeps:
            t.free(xa)
        out = (self._kernel if self.by_kernel else self._torch)(t, n, lengths, saved)
        result, out_xa = self.out.forward(t, n)
        if not t.keeps:
            t.free(out_xa, y, turned, out)
            return result
        saved |= {"y": y, "xa": xa, "turned": turned, "out": out, "out_xa": out_xa}
        if not self.by_kernel:  # torch has copies of its own
            gone = ["turned"] + ([] if self.head_norms else ["y"]) + ([] if self.out.rank else ["out"])
            t.free(*(saved[name] for name in gone))
            saved |= dict.fromkeys(gone, 0.0)
        return result

    def backward(self, t: Tape, n: int, lengths: Sequence[int], saved: Saved, dy: float, own_dy: bool) -> float:
        """Bytes of the gradient at the input; `own_dy`: the given gradient may be freed."""
        core = self.core
        dout = self.out.backward(t, n)
        t.free(saved.pop("out_xa"), dy if own_dy else 0.0)  # a dropout mask lives as long as the graph
        dqkv = (self._kernel_back if self.by_kernel else self._torch_back)(t, n, lengths, saved, dout)
        dy_all = t.new(n * self.qkv.wide)
        dx, dxa = self.qkv.input_gradient(t, n)
        again = t.new(n * self.hidden) if self.qkv.rank else 0.0
        t.free(t.new(n, 4) if self.qkv.rank else 0.0)
        self.qkv.leaf_gradients(t, n)
        t.free(dy_all, dxa, again, *dqkv, saved.pop("xa"))
        if self.head_norms:
            t.free(saved.pop("y"))
        assert core.heads
        picked = t.new(n * self.hidden)  # the gradient of `hidden_states[0]`
        t.free(dx)
        return picked

    # ---- by the C kernels (or CUDA's, which keep the same tensors) ----

    def _kernel(self, t: Tape, n: int, lengths: Sequence[int], saved: Saved) -> float:
        core, chunks = self.core, attention_chunks(lengths)
        out = t.new(n * core.heads * core.value_dim)
        lse = t.new(core.heads * n, 4)
        if not self.ways.cuda:
            packed = t.new(chunks * core.kv_heads * core.value_dim * 64 + 64, 1)
            scratch = t.new(self.ways.threads * FORWARD_SCRATCH + 64, 1)
            t.free(packed, scratch)
        saved["lse"] = sum(t.let_go(lse))
        return out

    def _kernel_back(self, t: Tape, n: int, lengths: Sequence[int], saved: Saved, dout: float) -> tuple[float, ...]:
        core, chunks = self.core, attention_chunks(lengths)
        grads = (
            t.new(n * core.heads * core.head_dim),
            t.new(n * core.kv_heads * core.head_dim),
            t.new(n * core.kv_heads * core.value_dim),
        )
        if self.ways.cuda:
            delta = t.new(core.heads * n, 4) + t.new(n * core.heads * core.head_dim, 4)
            t.free(delta)
        else:
            both = core.head_dim + core.value_dim
            longest = max(-(-x // CHUNK) for x in lengths)
            cut = longest > UNDIVIDED and core.kv_heads < WANTED_GRAINS
            parts, undivided = (-(-WANTED_GRAINS // core.kv_heads), UNDIVIDED) if cut else (1, longest)
            floats = parts * core.kv_heads * chunks * both * CHUNK if cut else 0
            made = [
                t.new(4 * floats + 64, 1),
                t.new(chunks * core.kv_heads * core.head_dim * 64 + 64, 1),
                t.new(self.ways.threads * (BACKWARD_SCRATCH + undivided * both * CHUNK * 4) + 64, 1),
            ]
            t.free(*made)
        values = 0.0 if self.head_norms else saved.pop("y")
        t.free(dout, values, saved.pop("turned"), saved.pop("out"), saved.pop("lse"))
        return grads

    # ---- by torch, sequences of similar length together ----

    def _torch(self, t: Tape, n: int, lengths: Sequence[int], saved: Saved) -> float:
        core, groups = self.core, groups_by_length(lengths)
        in_order = len(groups) == 1 and len(set(lengths)) <= 1
        rows = sum(group[0] * len(group) for group in groups)
        sizes = (core.heads * core.head_dim, core.kv_heads * core.head_dim, core.kv_heads * core.value_dim)
        split = []
        for width in sizes:
            gathered = 0.0 if in_order else t.new(rows * width)
            split.append(t.new(rows * width))
            t.free(gathered)
        results, kept = [], 0.0
        for group in groups:
            result, more = self._group(t, group[0], len(group))
            results.append(result)
            kept += more
        long = sum(g[0] * len(g) for g in groups if g[0] > SHORT_CPU)
        flat = t.new(rows * core.heads * core.value_dim)
        out = flat if in_order else t.new(n * core.heads * core.value_dim)
        saved["groups"] = kept
        freed = list(split) + results + ([] if in_order else [flat])
        if t.keeps:
            stay_q = long * sizes[0] * t.element
            repeated = core.heads > core.kv_heads
            stay_kv = [(rows - long if repeated else rows) * w * t.element for w in sizes[1:]]
            stay_out = long * core.heads * core.value_dim * t.element
            stay = stay_q + sum(stay_kv) + stay_out
            saved["split"] = stay
            t.free(sum(freed) - stay)
        else:
            t.free(sum(freed) + kept)
        return out

    def _group(self, t: Tape, length: int, count: int) -> tuple[float, float]:
        core = self.core
        q = count * length * core.heads * core.head_dim
        if length <= SHORT_CPU:
            folded = t.new(q)
            scores = t.new(count * core.heads * length * length)
            ahead = t.new(length * length)
            t.free(t.new(length * length))
            summed = t.new(count * core.heads * length * length)
            weights = t.new(count * core.heads * length * length)
            t.free(summed)
            result = t.new(count * length * core.heads * core.value_dim)
            t.free(scores, ahead)
            if t.keeps:
                return result, folded + weights
            t.free(folded, weights)
            return result, 0.0
        repeated = core.heads > core.kv_heads
        k = t.new(q) if repeated else 0.0
        v = t.new(count * length * core.heads * core.value_dim) if repeated else 0.0
        result = t.new(count * length * core.heads * core.value_dim)
        lse = t.new(count * length * core.heads, 4)
        if t.keeps:
            return result, k + v + lse
        t.free(lse, k, v)
        return result, 0.0

    def _torch_back(self, t: Tape, n: int, lengths: Sequence[int], saved: Saved, dout: float) -> tuple[float, ...]:
        core, groups = self.core, groups_by_length(lengths)
        in_order = len(groups) == 1 and len(set(lengths)) <= 1
        rows = sum(group[0] * len(group) for group in groups)
        per_head = core.head_dim
        if not in_order:
            gathered = t.new(rows * core.heads * core.value_dim)
            t.free(dout)
            dout = gathered
        grads = []
        for group in groups:
            length, count = group[0], len(group)
            q = count * length * core.heads * per_head
            kv = count * length * core.kv_heads * per_head
            if length <= SHORT_CPU:
                laid = t.new(count * length * core.heads * core.value_dim)
                dv = t.new(kv)
                dweights = t.new(count * core.heads * length * length)
                t.free(laid)
                dscores = t.new(count * core.heads * length * length)
                t.free(dweights)
                dk, dfolded = t.new(kv), t.new(q)
                t.free(dscores)
                dq = t.new(q)
                t.free(dfolded)
            else:
                made = t.new(q) + t.new(q) + t.new(q)
                dk, dv = t.new(kv), t.new(kv)
                dq = q * t.element
                t.free(made - dq)
            grads.append((dq, dk, dv))
        t.free(dout, saved.pop("out"), saved.pop("turned"), saved.pop("groups"), saved.pop("split"))
        if not self.head_norms:
            t.free(saved.pop("y"))
        found = []
        for part, width in enumerate((core.heads * per_head, core.kv_heads * per_head, core.kv_heads * core.value_dim)):
            flat = t.new(rows * width)
            t.free(*(g[part] for g in grads))
            placed = flat
            if not in_order:
                placed = t.new(n * width)
                t.free(flat)
            picked = t.new(n * width)
            t.free(placed)
            found.append(picked)
        return tuple(found)


@dataclass(frozen=True)
class Mlp:
    """down(act(gate(x)) * up(x))"""

    hidden: int
    inner: int
    first: Linears
    down: Linears
    ways: Ways

    def forward(self, t: Tape, n: int, saved: Saved, name: str) -> float:
        both, xa = self.first.forward(t, n)
        product = t.new(n * self.inner)
        y, down_xa = self.down.forward(t, n)
        t.free(product)
        if t.keeps:
            saved |= {f"{name}.both": both, f"{name}.xa": xa, f"{name}.down_xa": down_xa}
        else:
            t.free(both, xa, down_xa)
        return y

    def backward(self, t: Tape, n: int, saved: Saved, name: str) -> float:
        """Bytes of the gradient at the input."""
        dh, dha = self.down.input_gradient(t, n)
        again = t.new(n * self.inner) if self.down.rank else 0.0
        self.down.leaf_gradients(t, n)
        t.free(dh, again)
        dx, dxa = self.first.input_gradient(t, n)
        x = t.new(n * self.hidden) if self.first.rank else 0.0
        t.free(t.new(n, 4) if self.first.rank else 0.0)
        self.first.leaf_gradients(t, n)
        t.free(dha, dxa, x, *(saved.pop(f"{name}.{part}") for part in ("both", "xa", "down_xa")))
        return dx


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
        return bool(ways.fused and ways.element == 2 and fits and not drops)

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
class LayerParts:
    """A pre-norm decoder layer: x + attention(norm(x)), then + mlp(norm(.)), or routed (and shared) experts in its place."""

    hidden: int
    norm: Norm
    attention: Attention
    mlp: Mlp | None
    experts: Experts | None

    def forward(self, t: Tape, n: int, lengths: Sequence[int]) -> Saved:
        saved: Saved = {}
        width = n * self.hidden
        fused = self.norm.fused
        normed = self.norm.forward(t, n, saved, "norm1")
        attended = self.attention.forward(t, n, lengths, saved)
        kept = self._keeps_normed(self.attention.qkv, fused)
        saved["normed1"] = normed if kept and t.keeps else 0.0
        t.free(0.0 if kept and t.keeps else normed)
        middle = t.new(width)
        t.free(attended)
        normed = self.norm.forward(t, n, saved, "norm2")
        y = self.experts.forward(t, n, saved) if self.experts is not None else 0.0
        if self.mlp is not None:
            more = self.mlp.forward(t, n, saved, "mlp")
            if y:
                total = t.new(width)
                t.free(y, more)
                more = total
            y = more
        by_kernel = self.experts is not None and self.experts.by_kernel
        kept = by_kernel or (self.mlp is not None and self._keeps_normed(self.mlp.first, fused))
        saved["normed2"] = normed if kept and t.keeps else 0.0
        t.free(0.0 if kept and t.keeps else normed)
        out = t.new(width)
        t.free(y)
        saved["middle"] = middle
        if not t.keeps:
            t.free(middle, out, saved.pop("logits", 0.0))
        return saved

    @staticmethod
    def _keeps_normed(linears: Linears, fused: bool) -> bool:
        """Without fused modules a norm's output is kept where a LoRA pair reads it."""
        return not fused and bool(linears.rank)

    def backward(self, t: Tape, n: int, lengths: Sequence[int], saved: Saved) -> None:
        width = n * self.hidden
        dx = 0.0
        if self.mlp is not None:
            dx = self.mlp.backward(t, n, saved, "mlp")
        if self.experts is not None:
            more = self.experts.backward(t, n, saved, saved.pop("normed2"))
            if dx:
                total = t.new(width)
                t.free(dx, more)
                more = total
            dx = more
        t.free(saved.pop("normed2", 0.0))
        dx = self.norm.backward(t, n, saved, "norm2", dx)
        t.free(saved.pop("middle"))
        grad = t.new(width)
        t.free(dx)
        dx = self.attention.backward(t, n, lengths, saved, grad, own_dy=False)
        t.free(saved.pop("normed1", 0.0))
        dx = self.norm.backward(t, n, saved, "norm1", dx)
        t.new(width)
        t.free(dx, grad)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def is_known(layer: LayerShape) -> bool:
    """Attention with separate projections of query, key and value, and a gated MLP or routed experts."""
    names = {_last(m.name) for m in layer.matrices if not m.fused_experts}
    mlp = {"gate_proj", "up_proj", "down_proj"} <= names or {"gate_up_proj", "down_proj"} <= names
    routed = any(m.fused_experts for m in layer.matrices)
    return layer.core is not None and {"q_proj", "k_proj", "v_proj", "o_proj"} <= names and (mlp or routed)


def has_head_norms(hidden: int, layer: LayerShape) -> bool:
    """Queries and keys are normalised per head: two weights of a head's size beside two (or four) norms."""
    core = layer.core
    return core is not None and layer.other_parameters - 2 * core.head_dim in (2 * hidden, 4 * hidden)


def parts_of(shape: ModelShape, layer: int, sites: Sequence[Site], ways: Ways) -> LayerParts:
    """The parts of one layer of a known form."""
    own = shape.layers[layer]
    ranks = {s.matrix.name: s.rank for s in sites if s.layer == layer}
    single = {_last(m.name): m for m in own.matrices if not m.fused_experts}
    core = own.core
    assert core is not None

    def linears(matrices: Sequence[Matrix], grouped: bool) -> Linears:
        of = tuple(ranks.get(m.name, 0) for m in matrices)
        return Linears(matrices[0].inputs, tuple(m.outputs for m in matrices), of, ways.dropout, grouped)

    attention = Attention(
        shape.hidden, core, has_head_norms(shape.hidden, own),
        linears([single[f"{x}_proj"] for x in "qkv"], ways.fused), linears([single["o_proj"]], False), ways,
    )  # fmt: skip
    mlp = None
    if "down_proj" in single:
        first = [single[x] for x in ("gate_proj", "up_proj", "gate_up_proj") if x in single]
        down = single["down_proj"]
        mlp = Mlp(shape.hidden, down.inputs, linears(first, ways.fused), linears([down], ways.fused), ways)
    routed = {_last(m.name): m for m in own.matrices if m.fused_experts}
    experts = None
    if routed:
        up, down = routed.get("gate_up_proj", routed.get("up_proj")), routed["down_proj"]
        assert up is not None
        experts = Experts(shape.hidden, down.inputs, down.experts, down.active, ranks.get(up.name, 0),
                          ranks.get(down.name, 0), ways)  # fmt: skip
    return LayerParts(shape.hidden, Norm(shape.hidden, ways.fused), attention, mlp, experts)


def vocabulary_loss(rows: int, hidden: int, vocab: int, element: int) -> float:
    """The loss slice by slice of the vocabulary on a CUDA device."""
    return float(rows * hidden * (4 * element + 4))
