"""A decoder layer's parts as the engine computes them, played on paper (`tape.py`): norms, projections, attention, MLP, experts.

Fused modules are here; a family's own are in `own.py`, routed experts in `routed.py`. Where a layer has no form known here,
`UnknownLayer` bounds it from above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamella.forecast.routed import CudaExperts, Experts, expert_scratch_bytes
from lamella.forecast.shape import Core, LayerShape, Matrix, ModelShape, Site
from lamella.forecast.tape import (
    BACKWARD_SCRATCH,
    CHUNK,
    FORWARD_SCRATCH,
    SHORT_CPU,
    UNDIVIDED,
    WANTED_GRAINS,
    Linears,
    Saved,
    Tape,
    Ways,
    attention_chunks,
    groups_by_length,
)

HEAD_MAX = 256


@dataclass(frozen=True)
class Norm:
    """RMS norm of rows, fused: keeps its input and the inverse roots."""

    width: int

    def keeps_input(self, t: Tape) -> bool:
        return True

    def forward(self, t: Tape, n: int, saved: Saved, name: str) -> float:
        """Bytes of the output; what its backward needs beside the input goes into `saved`."""
        y = t.new(n * self.width)
        saved[name] = sum(t.let_go(t.new(n, 4)))
        return y

    def backward(self, t: Tape, n: int, saved: Saved, name: str, dy: float) -> float:
        """Bytes of the gradient at the input."""
        dx = t.new(n * self.width)
        t.free(dy, saved.pop(name))
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
        return self.ways.cuda or (fits and self.ways.element == 2 and self.ways.kernels)

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

    keeps_input = False
    """It is a norm's output, which is made again in the backward pass."""

    def backward(self, t: Tape, n: int, lengths: Sequence[int], saved: Saved, dy: float) -> float:
        """Bytes of the gradient at the input; `dy`: of the given one, as far as nobody else needs it."""
        dout = self.out.backward(t, n)
        t.free(
            saved.pop("out_xa"), dy, 0.0 if self.by_kernel else saved.pop("out")
        )  # a dropout mask lives as long as the graph
        dqkv = (self._kernel_back if self.by_kernel else self._torch_back)(t, n, lengths, saved, dout)
        dy_all = t.new(n * self.qkv.wide)
        dx, dxa = self.qkv.input_gradient(t, n)
        again = t.new(n * self.hidden) if self.qkv.rank else 0.0
        t.free(t.new(n, 4) if self.qkv.rank else 0.0)
        self.qkv.leaf_gradients(t, n)
        t.free(dy_all, dxa, again, *dqkv, saved.pop("xa"))
        if self.head_norms:
            t.free(saved.pop("y"))
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
        width = core.heads * core.value_dim
        flat = self._joined(t, width, groups)
        out = t.new(n * width) if not in_order else flat or results.pop()
        freed = list(split) + results + ([] if in_order else [flat])
        if not t.keeps:
            t.free(sum(freed) + kept)
            return out
        repeated = core.heads > core.kv_heads
        stay = long * (sizes[0] + width) * t.element
        stay += sum((rows - long if repeated else rows) * w * t.element for w in sizes[1:])
        t.free(sum(freed) - stay)
        return out

    @staticmethod
    def _joined(t: Tape, width: int, groups: list[list[int]]) -> float:
        """Groups laid out by rows (one sequence alone lies so) and, where there are several, put one after the other: bytes of
        all that is then alive."""
        laid = t.new(width * sum(g[0] * len(g) for g in groups if len(g) > 1))
        return laid + (t.new(width * sum(g[0] * len(g) for g in groups)) if len(groups) > 1 else 0.0)

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
        if not in_order:
            gathered = t.new(rows * core.heads * core.value_dim)
            t.free(dout)
            dout = gathered
        grads = []
        for group in groups:
            back = self._short_back if group[0] <= SHORT_CPU else self._long_back
            grads.append(back(t, group[0], len(group), dout if group is groups[-1] else 0.0))
        del saved["turned"]  # let go of group by group
        if not self.head_norms:
            t.free(saved.pop("y"))
        found: list[float] = []
        for part, width in ((2, core.kv_heads * core.value_dim), (1, core.kv_heads * core.head_dim),
                            (0, core.heads * core.head_dim)):  # fmt: skip
            placed = self._joined(t, width, groups)
            if not in_order:
                flat, placed = placed, t.new(n * width)
                t.free(flat)
            t.free(*(g[part] for g in grads))
            picked = t.new(n * width)
            t.free(placed)
            found.insert(0, picked)
        return tuple(found)

    def _short_back(self, t: Tape, length: int, count: int, dout: float) -> tuple[float, float, float]:
        """Gradients at a group's q, k and v; `dout` is let go of once it is laid out."""
        core, element = self.core, t.element
        q, out = (count * length * core.heads * size for size in (core.head_dim, core.value_dim))
        k, v = (count * length * core.kv_heads * size for size in (core.head_dim, core.value_dim))
        square = count * core.heads * length * length
        laid = t.new(out)
        t.free(dout)
        dv, dweights = t.new(v), t.new(square)
        t.free(laid, v * element)
        dscores = t.new(square)
        t.free(dweights, square * element)
        dk, dfolded = t.new(k), t.new(q)
        t.free(dscores, k * element, q * element)
        dq = t.new(q)
        t.free(dfolded)
        return dq, dk, dv

    def _long_back(self, t: Tape, length: int, count: int, dout: float) -> tuple[float, float, float]:
        core, element = self.core, t.element
        q, out = (count * length * core.heads * size for size in (core.head_dim, core.value_dim))
        k, v = (count * length * core.kv_heads * size for size in (core.head_dim, core.value_dim))
        dq, dk, dv = t.new(q), t.new(q), t.new(out)
        t.free(dout, (2 * q + 2 * out) * element, count * length * core.heads * 4)
        if core.heads == core.kv_heads:
            return dq, dk, dv
        summed = t.new(k)
        t.free(dk)
        dk = summed
        summed = t.new(v)
        t.free(dv)
        return dq, dk, summed


@dataclass(frozen=True)
class Mlp:
    """down(act(gate(x)) * up(x))"""

    hidden: int
    inner: int
    first: Linears
    down: Linears
    ways: Ways

    keeps_input = False

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
class LayerParts:
    """A pre-norm decoder layer: x + attention(norm(x)), then + mlp(norm(.)), or routed (and shared) experts in its place."""

    hidden: int
    norm: Norm
    attention: Attention
    mlp: Mlp | None
    experts: Experts | None
    sandwich: bool = False
    """Attention's and the MLP's results pass a norm too."""

    def _after(self, t: Tape, n: int, y: float, saved: Saved, name: str) -> float:
        if not self.sandwich:
            return y
        normed = self.norm.forward(t, n, saved, name)
        self._done(t, y, saved, f"{name}.input", self.norm.keeps_input(t))
        return normed

    def _before(self, t: Tape, n: int, saved: Saved, name: str) -> float:
        """Going back through such a norm: bytes of its gradient, to be freed."""
        if not self.sandwich:
            return 0.0
        dx = self.norm.backward(t, n, saved, name, 0.0)
        t.free(saved.pop(f"{name}.input"))
        return dx

    def forward(self, t: Tape, n: int, lengths: Sequence[int]) -> Saved:
        saved: Saved = {}
        width = n * self.hidden
        normed = self.norm.forward(t, n, saved, "norm1")
        attended = self._after(t, n, self.attention.forward(t, n, lengths, saved), saved, "norm3")
        self._done(t, normed, saved, "normed1", self.attention.keeps_input)
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
        self._done(t, normed, saved, "normed2", by_kernel or (self.mlp is not None and self.mlp.keeps_input))
        y = self._after(t, n, y, saved, "norm4")
        out = t.new(width)
        t.free(y)
        self._done(t, middle, saved, "middle", self.norm.keeps_input(t))
        if not t.keeps:
            t.free(out, saved.pop("logits", 0.0))
        return saved

    @staticmethod
    def _done(t: Tape, nbytes: float, saved: Saved, name: str, kept: bool) -> None:
        """A tensor is used for the last time, but for a graph that keeps it."""
        if kept and t.keeps:
            saved[name] = nbytes
        else:
            saved[name] = 0.0
            t.free(nbytes)

    def backward(self, t: Tape, n: int, lengths: Sequence[int], saved: Saved) -> None:
        width = n * self.hidden
        dx = 0.0
        given = self._before(t, n, saved, "norm4")
        if self.mlp is not None:
            dx = self.mlp.backward(t, n, saved, "mlp")
        if self.experts is not None:
            more = self.experts.backward(t, n, saved, saved.pop("normed2"))
            if dx:
                total = t.new(width)
                t.free(dx, more)
                more = total
            dx = more
        t.free(given, saved.pop("normed2", 0.0))
        dx = self.norm.backward(t, n, saved, "norm2", dx)
        t.free(saved.pop("middle"))
        grad = t.new(width)
        t.free(dx)
        given = self._before(t, n, saved, "norm3")
        dx = self.attention.backward(t, n, lengths, saved, given)
        t.free(saved.pop("normed1"))
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


def has_norms_after(hidden: int, layer: LayerShape) -> bool:
    """Four norms, as in Gemma 2 and 3."""
    beside = 2 * layer.core.head_dim if layer.core is not None and has_head_norms(hidden, layer) else 0
    return layer.other_parameters - beside == 4 * hidden


def parts_of(shape: ModelShape, layer: int, sites: Sequence[Site], ways: Ways) -> LayerParts | UnknownLayer:
    """The parts of one layer, or an upper estimate where it is of no known form."""
    own = shape.layers[layer]
    if not is_known(own):
        return UnknownLayer.of(shape, layer, sites)
    ranks = {s.matrix.name: s.rank for s in sites if s.layer == layer}
    single = {_last(m.name): m for m in own.matrices if not m.fused_experts}
    core = own.core
    assert core is not None

    def linears(matrices: Sequence[Matrix], grouped: bool) -> Linears:
        of = tuple(ranks.get(m.name, 0) for m in matrices)
        return Linears(matrices[0].inputs, tuple(m.outputs for m in matrices), of, ways.dropout, grouped)

    from lamella.forecast.own import OwnAttention, OwnMlp, OwnNorm

    attention = (Attention if ways.fused else OwnAttention)(
        shape.hidden, core, has_head_norms(shape.hidden, own),
        linears([single[f"{x}_proj"] for x in "qkv"], ways.fused), linears([single["o_proj"]], False), ways,
    )  # fmt: skip
    mlp = None
    if "down_proj" in single:
        first = [single[x] for x in ("gate_proj", "up_proj", "gate_up_proj") if x in single]
        down = single["down_proj"]
        mlp = (Mlp if ways.fused else OwnMlp)(
            shape.hidden, down.inputs, linears(first, ways.fused), linears([down], ways.fused), ways
        )
    routed = {_last(m.name): m for m in own.matrices if m.fused_experts}
    experts = None
    if routed:
        up, down = routed.get("gate_up_proj", routed.get("up_proj")), routed["down_proj"]
        assert up is not None
        experts = (CudaExperts if ways.cuda else Experts)(shape.hidden, down.inputs, down.experts, down.active, ranks.get(up.name, 0),
                          ranks.get(down.name, 0), ways)  # fmt: skip
    norm = Norm(shape.hidden) if ways.fused else OwnNorm(shape.hidden)
    return LayerParts(shape.hidden, norm, attention, mlp, experts, has_norms_after(shape.hidden, own))


@dataclass(frozen=True)
class UnknownLayer:
    """A layer of no known form: an upper estimate.

    Every matrix's output and one more result of its size are kept, inputs of LoRA pairs, four states and two fp32 ones; on
    the way three results of the widest matrix beside.
    """

    hidden: int
    results: int
    inputs: int
    widest: int
    leaf_values: int
    core: Core | None

    @staticmethod
    def of(shape: ModelShape, layer: int, sites: Sequence[Site]) -> UnknownLayer:
        own = shape.layers[layer]
        ranks = {s.matrix.name: s.rank for s in sites if s.layer == layer}
        return UnknownLayer(
            shape.hidden,
            sum(2 * m.outputs * m.active + ranks.get(m.name, 0) * m.active for m in own.matrices),
            sum(m.inputs * m.active for m in own.matrices if m.name in ranks),
            max((m.outputs * m.active for m in own.matrices), default=shape.hidden),
            sum(s.parameters for s in sites if s.layer == layer), own.core,
        )  # fmt: skip

    def forward(self, t: Tape, n: int, lengths: Sequence[int]) -> Saved:
        kept = t.new(n * (self.results + self.inputs + 4 * self.hidden)) + t.new(2 * n * self.hidden, 4)
        if self.core is not None:
            kept += t.new(n * 2 * self.core.heads * (self.core.head_dim + self.core.value_dim))
        on_the_way = t.new(3 * n * self.widest)
        t.free(on_the_way)
        if not t.keeps:
            t.free(kept)
        return {"all": kept}

    def backward(self, t: Tape, n: int, lengths: Sequence[int], saved: Saved) -> None:
        t.new(self.leaf_values)
        t.new(3 * n * self.widest + 2 * n * self.hidden)
        t.new(3 * n * self.hidden, 4)
        t.free(saved.pop("all"))


def expert_bytes(shape: ModelShape, sites: Sequence[Site], layers: range, tokens: int, ways: Ways) -> float:
    """What the expert kernels keep from call to call: rows of all choices, and each thread's scratch."""
    found = 0.0
    ranks: dict[int, list[tuple[str, int]]] = {}
    for site in sites:
        if site.matrix.fused_experts:
            ranks.setdefault(site.layer, []).append((site.matrix.name, site.rank))
    seen: set[tuple[object, ...]] = set()
    for i in layers:
        kind = (id(shape.layers[i]), *ranks.get(i, ()))
        if kind in seen or not any(m.fused_experts for m in shape.layers[i].matrices):
            continue
        seen.add(kind)
        parts = parts_of(shape, i, sites, ways)
        experts = parts.experts if isinstance(parts, LayerParts) else None
        if experts is not None and experts.by_kernel:
            rows = float(ways.element * tokens * experts.active * experts.hidden)
            found = max(
                found,
                rows + ways.threads * expert_scratch_bytes(experts.hidden, experts.inner, experts.rank1, experts.rank2),
            )
    return found
