"""From tokens to (token, expert) rows and back, and the gate between an expert's matmuls: passes over memory, fused.

Sums over a token's experts are in fp32 in the order of its choices, whatever lies where.

Shape suffixes: T tokens, K experts per token, S = T * K rows, H hidden, I inner.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _combine(y, weights, slot, out, H, K: tl.constexpr, WEIGHTED: tl.constexpr, TILE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(slot + t * K + k).to(tl.int64)
        value = tl.load(y + row * H + h, mask=h < H, other=0.0).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weights + t * K + k).to(tl.float32)
        acc += value
    tl.store(out + t * H + h, acc.to(out.dtype.element_ty), mask=h < H)


@triton.jit
def _combine_backward(dout, y, weights, slot, dy, dweights, H, K: tl.constexpr, TILE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    row = tl.load(slot + t * K + k).to(tl.int64)
    weight = tl.load(weights + t * K + k).to(tl.float32)
    acc = tl.zeros((TILE,), tl.float32)
    for start in range(0, H, TILE):
        h = start + tl.arange(0, TILE)
        grad = tl.load(dout + t * H + h, mask=h < H, other=0.0).to(tl.float32)
        tl.store(dy + row * H + h, (grad * weight).to(dy.dtype.element_ty), mask=h < H)
        acc += grad * tl.load(y + row * H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(dweights + t * K + k, tl.sum(acc).to(dweights.dtype.element_ty))


@triton.jit
def _swiglu(gate_up, out, I, TILE: tl.constexpr):  # noqa: E741
    s = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = i < I
    gate = tl.load(gate_up + s * 2 * I + i, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + s * 2 * I + I + i, mask=real, other=0.0).to(tl.float32)
    tl.store(out + s * I + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=real)


@triton.jit
def _swiglu_backward(gate_up, dout, dgate_up, I, TILE: tl.constexpr):  # noqa: E741
    s = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = i < I
    gate = tl.load(gate_up + s * 2 * I + i, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + s * 2 * I + I + i, mask=real, other=0.0).to(tl.float32)
    grad = tl.load(dout + s * I + i, mask=real, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dgate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    at = dgate_up + s * 2 * I + i
    tl.store(at, dgate.to(dgate_up.dtype.element_ty), mask=real)
    tl.store(at + I, (grad * gate * sigmoid).to(dgate_up.dtype.element_ty), mask=real)


def _tile(width: int) -> int:
    return min(1024, max(16, triton.next_power_of_2(width)))


def combine(y_SH: Tensor, slot_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """out[t] = sum_k weights[t, k] y[slot[t, k]] (weights None: 1), [T, H] in y's dtype."""
    (tokens, per_token), hidden = slot_TK.shape, y_SH.shape[1]
    out_TH = y_SH.new_empty(tokens, hidden)
    if out_TH.numel():
        tile = _tile(hidden)
        _combine[(tokens, triton.cdiv(hidden, tile))](
            y_SH.contiguous(), slot_TK if weights_TK is None else weights_TK.contiguous(), slot_TK.contiguous(), out_TH,
            hidden, K=per_token, WEIGHTED=weights_TK is not None, TILE=tile,
        )  # fmt: skip
    return out_TH


def combine_backward(dout_TH: Tensor, y_SH: Tensor, slot_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `combine` at y [S, H] and at the weights [T, K]; each row is some token's."""
    (tokens, per_token), hidden = slot_TK.shape, y_SH.shape[1]
    assert y_SH.shape[0] == tokens * per_token
    dy_SH, dweights_TK = torch.empty_like(y_SH), torch.empty_like(weights_TK)
    if dy_SH.numel():
        _combine_backward[(tokens, per_token)](
            dout_TH.contiguous(), y_SH, weights_TK.contiguous(), slot_TK.contiguous(), dy_SH, dweights_TK, hidden,
            K=per_token, TILE=_tile(hidden),
        )  # fmt: skip
    return dy_SH, dweights_TK


def swiglu(gate_up_SO: Tensor) -> Tensor:
    """silu(gate) * up for [S, 2 I] with the gate in the first half, computed in fp32: [S, I]."""
    rows, inner = gate_up_SO.shape[0], gate_up_SO.shape[1] // 2
    out_SI = gate_up_SO.new_empty(rows, inner)
    if out_SI.numel():
        tile = _tile(inner)
        _swiglu[(rows, triton.cdiv(inner, tile))](gate_up_SO.contiguous(), out_SI, inner, TILE=tile)
    return out_SI


def swiglu_backward(gate_up_SO: Tensor, dout_SI: Tensor) -> Tensor:
    """Gradient of `swiglu` at its input, [S, 2 I]."""
    dgate_up_SO = torch.empty_like(gate_up_SO)
    rows, inner = dout_SI.shape
    if dout_SI.numel():
        tile = _tile(inner)
        _swiglu_backward[(rows, triton.cdiv(inner, tile))](
            gate_up_SO.contiguous(), dout_SI.contiguous(), dgate_up_SO, inner, TILE=tile
        )  # fmt: skip
    return dgate_up_SO
