"""This package's own kernels as work to be timed: experts on packed weights, attention, and the row-wise parts of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lamella.hardware.machine import AttentionPoint, ExpertPoint, RowKind, RowPoint
from lamella.kernels import AbsmaxState, attention, dequantize_nf4, experts, rows
from lamella.probe.pool import Pool
from lamella.probe.timing import Piece

BLOCK = 64
HEADS, KV_HEADS = 8, 4
TOKENS = 2048
"""Of a batch of sequences in attention: short sequences come several at once."""

# ---- experts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertGrid:
    """Shapes measured: rows per expert, hidden and inner sizes, LoRA ranks (0: none), with so many experts."""

    rows: tuple[int, ...]
    hidden: tuple[int, ...]
    inner: tuple[int, ...]
    ranks: tuple[int, ...]
    experts: int


EXPERTS = ExpertGrid((1, 8, 32, 128, 512), (512, 2048), (192, 768), (0, 1, 16, 64), 8)
EXPERTS_QUICK = ExpertGrid((8, 128), (512, 2048), (192, 768), (0, 16), 4)


def packed_experts(count: int, hidden: int, inner: int, pool: Pool) -> Callable[[], experts.PackedExperts]:
    """Random NF4 experts with double-quantised scales, as a layer's packed bytes hold them; others each time, as every layer
    has its own."""
    numel = hidden * inner
    blocks, layer_bytes = numel // BLOCK, 3 * count * numel // 2
    region = max(pool.region * pool.dtype.itemsize // 2, layer_bytes)
    scales = [
        torch.randint(0, 256, (count * 3 * blocks,), dtype=torch.uint8),
        torch.linspace(-0.01, 0.01, 256).view(torch.uint8),
        torch.ones(-(-count * 3 * blocks // 256)).view(torch.uint8),
        torch.tensor([0.03]).view(torch.uint8),
    ]
    at = [region]
    for part in scales:
        at.append(at[-1] + -(-part.numel() // 64) * 64)
    buffer = pool.tensor(f"experts {hidden} x {inner}", -(-at[-1] // pool.dtype.itemsize)).view(torch.uint8)

    def place(first: int) -> experts.PackedExperts:
        table = [[first + m * numel // 2, -1, at[0], at[1], at[2], at[3], m * blocks] for m in range(3 * count)]
        return experts.PackedExperts(buffer, torch.tensor(table).view(count, 3, experts.PARTS), hidden, inner)

    sets = cycle([place(k * layer_bytes) for k in range(min(region // layer_bytes, 16))])

    for start, part in zip(at, scales, strict=False):
        buffer[start : start + part.numel()] = part
    return sets.__next__


@dataclass(frozen=True)
class ExpertRun:
    """Experts with so many rows each, and LoRA of this rank on all; forward, or backward with the input's gradient."""

    rows_each: int
    experts: int
    hidden: int
    inner: int
    rank: int
    backward: bool


def expert_pieces(grid: ExpertGrid, pool: Pool) -> list[Piece[ExpertRun]]:
    """Forward (keeping what backward needs) and backward of every shape; none where the kernels cannot run."""
    if experts.route() is None or pool.dtype != torch.bfloat16:
        return []
    return [
        piece
        for hidden in grid.hidden
        for inner in grid.inner
        for packed in [packed_experts(grid.experts, hidden, inner, pool)]
        for rank in grid.ranks
        for rows_each in grid.rows
        for piece in _expert_pair(packed, ExpertRun(rows_each, grid.experts, hidden, inner, rank, False), pool)
    ]


def _expert_pair(packed: Callable[[], experts.PackedExperts], run: ExpertRun, pool: Pool) -> list[Piece[ExpertRun]]:
    count, hidden, inner, rank = run.experts, run.hidden, run.inner, run.rank
    tokens = run.rows_each * count
    one = two = xa1 = xa2 = None
    if rank:
        one = experts.Lora(pool.tensor("a1", count, rank, hidden), pool.tensor("b1", count, 2 * inner, rank), 2.0)
        two = experts.Lora(pool.tensor("a2", count, rank, inner), pool.tensor("b2", count, hidden, rank), 2.0)
        xa1, xa2 = pool.tensor("xa1", tokens, rank), pool.tensor("xa2", tokens, rank)
    x_TH, y_SH, dx_SH = (pool.turning(use, tokens, hidden) for use in ("a", "out", "b"))
    gate, up = (pool.turning(use, tokens, inner) for use in ("gate", "up"))
    index_T1 = (torch.arange(tokens) % count).view(-1, 1)  # one expert a token
    routing = experts.sort_by_expert(index_T1, torch.ones(tokens, 1), count)

    def forward() -> None:
        experts.forward(packed(), x_TH(), routing, y_SH(), one, two, True)

    def backward() -> None:
        saved = experts.Saved(gate(), up(), xa1, xa2)
        experts.backward(packed(), x_TH(), routing, saved, y_SH(), one, two, dx_SH())

    return [Piece(run, forward), Piece(replace(run, backward=True), backward)]


def expert_points(seconds: dict[ExpertRun, float]) -> list[ExpertPoint]:
    """Forward and backward of one shape together; FLOPs of the three products, LoRA's not counted."""
    points = []
    for run, forward_s in seconds.items():
        if run.backward:
            continue
        back = ExpertRun(run.rows_each, run.experts, run.hidden, run.inner, run.rank, backward=True)
        tokens = run.rows_each * run.experts
        flops = 6.0 * tokens * run.hidden * run.inner
        points.append(ExpertPoint(rows=tokens, experts=run.experts, hidden=run.hidden, inner=run.inner, rank=run.rank,
                                  forward_flops_per_s=flops / forward_s, backward_flops_per_s=flops / seconds[back]))  # fmt: skip
    return points


# ---- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionRun:
    """Causal attention of `count` sequences of one length, `HEADS` heads on `KV_HEADS`."""

    length: int
    count: int
    head_dim: int
    backward: bool


def _segments(length: int, count: int) -> attention.Segments:
    starts = torch.arange(count + 1) * length
    return attention.Segments.of(
        torch.repeat_interleave(starts[1:], length), torch.arange(length).repeat(count), starts
    )


def attention_pieces(lengths: Sequence[int], sizes: Sequence[int], pool: Pool) -> list[Piece[AttentionRun]]:
    """Forward and backward of every length and head size; none where the kernels cannot run."""
    if attention.implementation() == "torch" or pool.dtype != torch.bfloat16:
        return []

    def pair(length: int, size: int) -> list[Piece[AttentionRun]]:
        count = max(1, TOKENS // length)
        tokens, scale, segments = count * length, size**-0.5, _segments(length, count)
        q = pool.tensor("a", tokens, HEADS, size).transpose(0, 1)
        k, v = (pool.tensor(use, tokens, KV_HEADS, size).transpose(0, 1) for use in ("gate", "up"))
        grad = pool.tensor("b", tokens, HEADS, size)
        out, lse = attention.forward(q, k, v, segments, scale)
        return [
            Piece(AttentionRun(length, count, size, False), lambda: attention.forward(q, k, v, segments, scale)),
            Piece(AttentionRun(length, count, size, True),
                  lambda: attention.backward(grad, q, k, v, out, lse, segments, scale)),
        ]  # fmt: skip

    return [piece for size in sizes for length in lengths for piece in pair(length, size)]


def attention_points(seconds: dict[AttentionRun, float]) -> list[AttentionPoint]:
    """Forward and backward of one shape together; FLOPs of visible pairs."""
    points = []
    for run, forward_s in seconds.items():
        if not run.backward:
            backward_s = seconds[AttentionRun(run.length, run.count, run.head_dim, True)]
            flops = 4.0 * run.head_dim * HEADS * run.count * run.length * (run.length + 1) / 2
            points.append(AttentionPoint(length=run.length, heads=HEADS, head_dim=run.head_dim,
                                         forward_flops_per_s=flops / forward_s,
                                         backward_flops_per_s=2 * flops / backward_s))  # fmt: skip
    return points


# ---- rows -----------------------------------------------------------------------------------------------------------

WIDTH, HEAD = 1024, 128
CHOICES, ROUTES = 64, 4
"""Experts to choose from, and of them a token takes, where routing is measured."""


@dataclass(frozen=True)
class RowRun:
    """A pass over so many values."""

    kind: RowKind
    values: int

    def point(self, seconds: float) -> RowPoint:
        return RowPoint(kind=self.kind, values=self.values, values_per_s=self.values / seconds)


def _routed(logits_TE: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
    """As families' routers do it."""
    probability_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    value_TK, index_TK = torch.topk(probability_TE, per_token, dim=-1)
    return (value_TK / value_TK.sum(-1, keepdim=True)).to(logits_TE.dtype), index_TK


def _balance(logits_TE: Tensor, index_TK: Tensor) -> Tensor:
    """As `engine.step.Routing` does it."""
    probability_TE, chosen = torch.softmax(logits_TE.float(), dim=-1), index_TK.flatten()
    count_E = torch.zeros(logits_TE.shape[1], dtype=torch.float64)
    count_E.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.float64))
    return count_E + probability_TE.double().sum(0)


def _passes(values: int, pool: Pool) -> list[Piece[RowRun]]:
    n, tokens = values // WIDTH, values // (8 * HEAD)
    x, y, grad = (pool.turning(use, n, WIDTH) for use in ("a", "out", "b"))
    q, dq, out = (pool.turning(use, tokens, 8, HEAD) for use in ("a", "b", "out"))
    both = pool.turning("both", n, 2 * WIDTH)
    gain, gain_D = pool.tensor("gain", WIDTH), pool.tensor("gain", HEAD)
    _, rstd = rows.rms_norm(x(), gain, 1e-6)
    cos, sin = (pool.tensor(use, tokens, HEAD) for use in ("gate", "up"))
    master = torch.zeros(values)
    vocabulary = 32 * WIDTH
    logits = pool.tensor("out", max(values // vocabulary, 1), vocabulary)  # there from the product before
    targets = torch.zeros(len(logits), dtype=torch.int64)

    def gated() -> Tensor:
        gate_up = both()
        return rows.gated(gate_up[:, :WIDTH], gate_up[:, WIDTH:], "silu")

    def gated_back() -> Tensor | None:
        gate_up = both()
        return rows.gated_backward_(grad(), gate_up[:, :WIDTH], gate_up[:, WIDTH:], "silu", product=True)

    passes: dict[RowKind, Callable[[], object]] = {
        "norm": lambda: rows.rms_norm(x(), gain, 1e-6),
        "norm_back": lambda: rows.rms_norm_backward(grad(), x(), gain, rstd),
        "rotate": lambda: rows.rotate(q(), cos, sin, out(), gain_D, 1e-6),
        "rotate_back": lambda: rows.rotate_backward(dq(), cos, sin, out(), q(), gain_D, 1e-6),
        "gated": gated,
        "gated_back": gated_back,
        "add": lambda: torch.add(x(), grad(), out=y()),
        "copy": lambda: y().copy_(x()),
        "cast": lambda: master.to(torch.bfloat16),
        "accumulate": lambda: master.add_(x().view(-1)),
        "peak": lambda: rows.peak(x()),
        "loss": lambda: rows.cross_entropy_(logits, targets, 1e-3),
    }
    return [Piece(RowRun(kind, logits.numel() if kind == "loss" else values), once) for kind, once in passes.items()]


def _routing(tokens: int, pool: Pool) -> list[Piece[RowRun]]:
    logits_TE = pool.tensor("logits", tokens, CHOICES)
    leaf = logits_TE.clone().requires_grad_()
    weight_TK, index_TK = _routed(leaf, ROUTES)
    grad_TK = torch.ones_like(weight_TK)
    weights = weight_TK.detach().float()
    y_SH = pool.tensor("a", tokens * ROUTES, WIDTH)
    slot_TK = experts.sort_by_expert(index_TK, weights, CHOICES).slot_TK

    def spread() -> None:
        experts.sort_by_expert(index_TK, weights, CHOICES)
        experts.combine(y_SH, slot_TK, weights)

    passes: dict[RowKind, Callable[[], object]] = {
        "router": lambda: _routed(logits_TE, ROUTES),
        "router_back": lambda: torch.autograd.grad(weight_TK, leaf, grad_TK, retain_graph=True),
        "balance": lambda: _balance(logits_TE, index_TK),
        "spread": spread,
    }
    return [Piece(RowRun(kind, y_SH.numel() if kind == "spread" else logits_TE.numel()), once)
            for kind, once in passes.items()]  # fmt: skip


def row_pieces(sizes: Sequence[int], tokens: Sequence[int], pool: Pool) -> list[Piece[RowRun]]:
    """Every kind of pass over so many values, and routing of so many tokens; none where the kernels cannot run."""
    if not rows.supported():
        return []
    passes = [piece for values in sizes for piece in _passes(values, pool)]
    routed = experts.route() is not None and pool.dtype == torch.bfloat16
    return passes + ([piece for n in tokens for piece in _routing(n, pool)] if routed else [])


# ---- 4-bit weights --------------------------------------------------------------------------------------------------


def dequantise_pieces(sizes: Sequence[int], pool: Pool) -> list[Piece[RowRun]]:
    """Matrices of so many weights, double quantised, to bf16; what comes out is read soon after and lies in one place."""

    def piece(values: int) -> Piece[RowRun]:
        blocks = values // BLOCK
        codes = pool.tensor("codes", values // 2 // pool.dtype.itemsize).view(torch.uint8)
        state = AbsmaxState(
            torch.randint(0, 256, (blocks,), dtype=torch.uint8), torch.linspace(-0.01, 0.01, 256),
            torch.ones(-(-blocks // 256)), torch.tensor(0.03),
        )  # fmt: skip
        out = pool.tensor("weights", values)
        return Piece(RowRun("dequantise", values), lambda: dequantize_nf4(codes, state, out))

    return [piece(values) for values in sizes]


# ---- optimizer ------------------------------------------------------------------------------------------------------


def updating(parameters: Sequence[torch.nn.Parameter]) -> Callable[[], None]:
    """Gradient norm, clipping and AdamW of these, as `train.optimizer` does them."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def update() -> None:
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        clip_grads_with_norm_(parameters, 1.0, torch.tensor(float(norm)))
        optimizer.step()

    return update
