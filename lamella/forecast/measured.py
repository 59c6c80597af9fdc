"""Seconds of a step's work from the measured rates of a device's kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from lamella.forecast.grid import Grid
from lamella.forecast.layers import Experts, Linears, Pieces
from lamella.forecast.shape import Core
from lamella.hardware.machine import (
    AttentionPoint,
    ExpertPoint,
    FixedWork,
    KernelRates,
    MatmulPoint,
    ProductForm,
    RowKind,
)
from lamella.plan.costs import visible_pairs

PAD_TOKENS, HEAD_ROWS, LOGITS_BYTES = 32, 256, 64 << 20
"""As `engine.walk`: what micro-batches of dense models are filled up to; positions in the head at once, and their logits."""
Causes = dict[str, float]
CALLS: dict[FixedWork, float] = {"forward": 110, "backward": 150, "backward_again": 250, "bind": 60,
                                 "head": 40, "prologue": 500, "update": 4}  # fmt: skip
"""Operations of torch and steps of the interpreter about as long, by count in a profile: for rates without measured costs."""


class Rates:
    """Measured points as functions of sizes."""

    def __init__(self, rates: KernelRates, dequantise_bytes_per_s: float) -> None:
        self.rates = rates
        self.dequantise_bytes_per_s = dequantise_bytes_per_s
        self.products = _products(rates.matmul)
        self.rows = {
            kind: Grid({(float(p.values),): p.values / p.values_per_s for p in rates.rows if p.kind == kind})
            for kind in {p.kind for p in rates.rows}
        }
        self.expert_grids = _expert_grids(rates.experts)
        self.attention_costs = _attention_costs(rates.attention)
        self.product = lru_cache(maxsize=65536)(self._product)

    def _product(self, form: ProductForm, rows: float, inner: float, columns: float) -> float:
        """Seconds of [rows, inner] x [inner, columns]; a form that was not measured takes its layer's."""
        if not rows or not inner or not columns:
            return 0.0
        found = self.products.get(form)
        if found is None:
            back = form in ("backward", "narrow_back", "widen_back", "gradient")
            found = self.products.get("backward" if back else "forward") or self.products["forward"]
        return found.at(rows, inner, columns)

    def pass_over(self, kind: RowKind, values: float, values_moved: float = 3.0) -> float:
        """Seconds of a pass over so many bf16 values; `values_moved` of each where only bytes are known."""
        found = self.rows.get(kind)
        return found.at(values) if found is not None else 2 * values_moved * values / self.rates.row_bytes_per_s

    def fixed(self, work: FixedWork, experts: bool = False, everywhere: bool = False) -> float:
        """Measured fixed cost of such work; where there is none, of as many calls as it is made of."""
        found = [f for f in self.rates.fixed if f.work == work]
        alike = [f for f in found if f.experts == experts] or found
        exact = [f for f in alike if f.everywhere == everywhere] or alike
        return exact[0].seconds if exact else CALLS[work] * self.rates.call_s

    def dequantised(self, parameters: float) -> float:
        found = self.rows.get("dequantise")
        return 2 * parameters / self.dequantise_bytes_per_s if found is None else found.at(parameters)

    def attention(self, core: Core, lengths: Iterable[int], backward: bool) -> float:
        """Of one pass over these sequences. A kernel's time per visible pair is a + b / length: a grows with the head's size."""
        window = core.window if core.kind == "sliding" else None
        total = 0.0
        size = (core.head_dim + core.value_dim) / 2
        for n in lengths:
            pairs = visible_pairs(n, window)
            flops = 4.0 * size * core.heads * pairs * (2 if backward else 1)
            if self.attention_costs:
                total += flops * self._per_flop(backward, size, 2 * pairs / n)
            else:
                total += flops / max(p.flops_per_s for p in self.rates.matmul)
        return total

    def _per_flop(self, backward: bool, size: float, length: float) -> float:
        by_size = self.attention_costs[backward]
        sizes = sorted(by_size)
        nearest = min(sizes, key=lambda s: abs(s - size))
        below = max((s for s in sizes if s <= size), default=nearest)
        above = min((s for s in sizes if s >= size), default=nearest)
        a, b = (_between_inverse(by_size[s], length) for s in (below, above))
        return a if above == below else a + (b - a) * (size - below) / (above - below)

    def expert(self, experts: Experts, rows_each: float, backward: bool) -> tuple[float, float]:
        """Seconds of one expert with so many rows: without LoRA, and what LoRA adds."""
        plain, adapted = self.expert_grids[backward]
        base = plain.at(rows_each, experts.hidden, experts.inner)
        rank = sum(experts.ranks) / 2
        if not rank or adapted is None:
            return base, 0.0
        with_lora = adapted.at(rank, rows_each, experts.hidden, experts.inner)
        # measured with pairs on both; one alone adds its share
        share = sum(r > 0 for r in experts.ranks) / 2
        return base, max(with_lora - base, 0.0) * share


def _products(points: Sequence[MatmulPoint]) -> dict[ProductForm, Grid]:
    by_form: dict[ProductForm, dict[tuple[float, ...], float]] = {}
    for p in points:
        seconds = 2.0 * p.rows * p.inner * p.columns / p.flops_per_s
        by_form.setdefault(p.form, {})[float(p.rows), float(p.inner), float(p.columns)] = seconds
    return {form: Grid(seconds) for form, seconds in by_form.items()}


def _expert_grids(points: Sequence[ExpertPoint]) -> dict[bool, tuple[Grid, Grid | None]]:
    """Backward or not -> seconds of one expert over (rows, hidden, inner), and with LoRA over (rank, rows, hidden, inner)."""
    if not points:
        return {}
    found = {}
    for backward in (False, True):
        plain: dict[tuple[float, ...], float] = {}
        adapted: dict[tuple[float, ...], float] = {}
        for p in points:
            rate = p.backward_flops_per_s if backward else p.forward_flops_per_s
            seconds = 6.0 * p.rows * p.hidden * p.inner / rate / p.experts
            sizes = (p.rows / p.experts, float(p.hidden), float(p.inner))
            if p.rank:
                adapted[(float(p.rank), *sizes)] = seconds
            else:
                plain[sizes] = seconds
        found[backward] = (Grid(plain), Grid(adapted) if adapted else None)
    return found


_Costs = dict[float, list[tuple[float, float]]]


def _attention_costs(points: Sequence[AttentionPoint]) -> dict[bool, _Costs]:
    """Backward or not -> head size -> (1 / length, seconds per FLOP), longest first."""
    if not points:
        return {}
    found: dict[bool, _Costs] = {False: {}, True: {}}
    for p in sorted(points, key=lambda p: -p.length):
        for backward, rate in ((False, p.forward_flops_per_s), (True, p.backward_flops_per_s)):
            found[backward].setdefault(float(p.head_dim), []).append((1 / p.length, 1 / rate))
    return found


def _between_inverse(costs: Sequence[tuple[float, float]], length: float) -> float:
    """Linear in 1 / length; the longest's beyond it, and below the shortest all the time that it took."""
    x = 1 / length
    if x <= costs[0][0]:
        return costs[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(costs):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return costs[-1][1] * x / costs[-1][0]


class KernelTimes:
    """`StepTimes` of one device with measured kernels.

    The pieces are those of `models/fused.py`, `models/groups.py` and `engine/walk.py`; T tokens, R sum of a group's ranks,
    O its outputs, I its inputs:

        linear    forward T I O; backward T O I where the input needs a gradient
        lora      forward x A^T and xa B^T; backward dy B, dxa A, and the two gradients
        experts   of the (token, expert) rows, spread over the experts as evenly as multinomial choice does; sorting the rows
                  and summing a token's
        attention by sequence and visible pair, each length at its own measured rate
        rows      norms, rotary positions, gated activations, residual sums, routing
        calls     what a small model's layers were seen to take beyond their kernels (`FixedCost`)
    """

    def __init__(
        self, pieces: Sequence[Pieces], kept: Sequence[Pieces], hidden: int, vocab: int, rates: KernelRates,
        dequantise_bytes_per_s: float,
    ) -> None:  # fmt: skip
        self.pieces, self.kept, self.hidden, self.vocab = list(pieces), list(kept), hidden, vocab
        self.rates = Rates(rates, dequantise_bytes_per_s)
        self.tensors = sum(p.tensors for p in pieces)
        self.trained = sum(p.trained for p in pieces)
        self._forward = lru_cache(maxsize=4096)(self._forward_of)
        self._backward = lru_cache(maxsize=4096)(self._backward_of)

    def filled(self, tokens: int) -> int:
        return -(-tokens // PAD_TOKENS) * PAD_TOKENS

    # ---- the protocol -----------------------------------------------------------------------------------------------

    def forward(self, layer: int, lengths: Sequence[int]) -> Causes:
        pieces = self.pieces[layer]
        calls = self.rates.fixed("forward", *_kind(pieces))
        return {**self._forward(pieces, tuple(lengths), first=True), "calls": calls}

    def backward(self, layer: int, lengths: Sequence[int], recompute: bool) -> Causes:
        pieces = self.pieces[layer]
        if not pieces.trains:
            return _Sum().seconds
        back = self._backward(pieces if recompute else self.kept[layer], tuple(lengths))
        again = self._forward(pieces, tuple(lengths), first=False) if recompute else {}
        calls = self.rates.fixed("backward_again" if recompute else "backward", *_kind(pieces))
        return {cause: s + again.get(cause, 0.0) for cause, s in back.items()} | {"calls": calls}

    def dequantise(self, layer: int) -> float:
        pieces = self.pieces[layer]
        packed = () if self.rates.expert_grids else (pieces.quantised_experts,)
        return sum(map(self.rates.dequantised, (*pieces.dequantised, *packed))) + self.rates.fixed(
            "bind", *_kind(pieces)
        )

    def hang(self, layer: int) -> float:
        return self.rates.pass_over("cast", self.pieces[layer].trained)

    def prologue(self, tokens: int) -> float:
        return self.rates.pass_over("copy", self.filled(tokens) * self.hidden) + self.rates.fixed("prologue")

    def head(self, label_tokens: int) -> float:
        most = max(16, min(HEAD_ROWS, LOGITS_BYTES // (2 * self.vocab)))
        most = most // PAD_TOKENS * PAD_TOKENS or most
        whole, rest = divmod(label_tokens, most)
        last = self._head_chunk(-(-rest // PAD_TOKENS) * PAD_TOKENS) if rest else 0.0
        return (whole * self._head_chunk(most) if whole else 0.0) + last + self.rates.fixed("head")

    def update(self, parameters: int) -> float:
        tensors = self.tensors * parameters / self.trained if self.trained else 0.0
        return parameters / self.rates.rates.update_parameters_per_s + self.rates.fixed("update") * tensors

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def _head_chunk(self, rows: int) -> float:
        r = self.rates
        values = rows * self.hidden
        row_work = 2 * r.pass_over("copy", values) + r.pass_over("norm", values) + r.pass_over("norm_back", values)
        return (r.product("forward", rows, self.hidden, self.vocab) + r.product("backward", rows, self.vocab, self.hidden)
                + r.pass_over("loss", rows * self.vocab) + row_work)  # fmt: skip

    def _forward_of(self, pieces: Pieces, lengths: tuple[int, ...], first: bool) -> Causes:
        """`first`: of a step's two passes; what is counted once a step is counted there."""
        r = self.rates
        tokens = self.filled(sum(lengths))
        values = tokens * pieces.hidden
        out = _Sum()
        out.add("rows", 2 * r.pass_over("norm", values) + 2 * r.pass_over("add", values))
        for group in pieces.linears:
            self._linears_forward(out, group, tokens)
            if group.router:
                logits = tokens * group.width
                out.add("rows", r.pass_over("router", logits) + (r.pass_over("balance", logits) if first else 0.0))
        if pieces.core is not None:
            heads = tokens * (pieces.core.heads + pieces.core.kv_heads) * pieces.core.head_dim
            out.add("rows", r.pass_over("rotate", heads))
            out.add("attention", r.attention(pieces.core, lengths, False))
        if pieces.gated:
            out.add("rows", r.pass_over("gated", tokens * pieces.gated))
        if pieces.experts is not None:
            self._experts(out, pieces.experts, sum(lengths), backward=False)
        if first:
            out.add("rows", r.pass_over("peak", values, 1.0))
        return out.seconds

    def _backward_of(self, pieces: Pieces, lengths: tuple[int, ...]) -> Causes:
        r = self.rates
        tokens = self.filled(sum(lengths))
        values = tokens * pieces.hidden
        out = _Sum()
        out.add("rows", (1 + pieces.needs_input) * (r.pass_over("norm_back", values) + r.pass_over("add", values)))
        for group in pieces.linears:
            self._linears_backward(out, group, tokens)
            if group.router and group.needs_input:
                out.add("rows", r.pass_over("router_back", tokens * group.width) + r.pass_over("add", values))
        if pieces.core is not None and pieces.core_trains:
            heads = tokens * (pieces.core.heads + pieces.core.kv_heads) * pieces.core.head_dim
            out.add("rows", r.pass_over("rotate_back", heads))
            out.add("rows", r.pass_over("copy", tokens * pieces.core.kv_heads * pieces.core.value_dim))
            out.add("attention", r.attention(pieces.core, lengths, True))
        if pieces.gated:
            out.add("rows", r.pass_over("gated_back", tokens * pieces.gated))
        if pieces.experts is not None:
            self._experts(out, pieces.experts, sum(lengths), backward=True)
        out.add("lora", r.pass_over("accumulate", pieces.trained))
        return out.seconds

    def _linears_forward(self, out: _Sum, group: Linears, tokens: int) -> None:
        r = self.rates
        out.add("linear", r.product("forward", tokens, group.inputs, group.width))
        if not group.rank:
            return
        out.add("lora", r.product("narrow", tokens, group.inputs, group.rank))
        if group.as_block:
            out.add("lora", r.product("widen", tokens, group.rank, group.width))
        else:
            out.add("lora", r.pass_over("copy", tokens * group.width))
            out.add(
                "lora",
                sum(r.product("widen", tokens, rank, o) for o, rank in zip(group.outputs, group.ranks, strict=True)),
            )

    def _linears_backward(self, out: _Sum, group: Linears, tokens: int) -> None:
        r, rank = self.rates, group.rank
        if group.needs_input:
            out.add("linear", r.product("backward", tokens, group.width, group.inputs))
        if not rank:
            return
        if group.as_block:
            out.add("lora", r.product("narrow_back", tokens, group.width, rank))
            out.add("lora", r.product("gradient", rank, tokens, group.width))
        else:
            pairs = list(zip(group.outputs, group.ranks, strict=True))
            out.add("lora", sum(r.product("narrow_back", tokens, o, k) for o, k in pairs))
            out.add("lora", sum(r.product("gradient", k, tokens, o) for o, k in pairs))
        out.add("lora", r.product("gradient", rank, tokens, group.inputs))
        if group.needs_input:
            out.add("lora", r.product("widen_back", tokens, rank, group.inputs))
        if group.after_norm:
            out.add("rows", r.pass_over("norm", tokens * group.inputs))

    def _experts(self, out: _Sum, experts: Experts, tokens: int, backward: bool) -> None:
        r = self.rates
        rows = tokens * experts.active
        # of `count` experts those that some token chose; each choice falls on one of them with probability 1 / count
        hit = experts.count * (1 - (1 - experts.active / experts.count) ** tokens)
        if r.expert_grids:
            base, lora = r.expert(experts, rows / hit, backward)
        else:
            product: Callable[..., float] = r.product
            form = "backward" if backward else "forward"
            base, lora = 3 * product(form, rows / hit, experts.hidden, experts.inner), 0.0
        out.add("experts", hit * base)
        out.add("lora", hit * lora)
        out.add("experts", r.pass_over("spread", rows * experts.hidden))


class _Sum:
    def __init__(self) -> None:
        self.seconds: Causes = dict.fromkeys(("linear", "experts", "attention", "lora", "rows", "calls"), 0.0)

    def add(self, cause: str, seconds: float) -> None:
        self.seconds[cause] += seconds


def _kind(pieces: Pieces) -> tuple[bool, bool]:
    """As `FixedCost` tells layers apart."""
    return pieces.experts is not None, pieces.everywhere
