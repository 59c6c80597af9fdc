"""Plain-torch twins of `grouped.py`, `rows.py`, `lora.py` and `loss.py`: same arguments, sums in fp32, loops over experts.

They import no Triton; tests compare the kernels with them, and `bench.gpu --dry-run-cpu` runs on them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _runs(groups: Any) -> list[tuple[int, int, int]]:
    offsets = groups.offsets.tolist()
    return [(e, offsets[e], offsets[e + 1]) for e in range(len(offsets) - 1)]


def grouped_linear(
    x_SI: Tensor, w_EOI: Tensor, groups: Any, a_ErI: Tensor | None = None, b_EOr: Tensor | None = None,
    scale: float = 1.0, *, dropped_SI: Tensor | None = None, bias_EO: Tensor | None = None, transposed: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """See `grouped.grouped_linear`."""
    y_SO = x_SI.new_zeros(x_SI.shape[0], w_EOI.shape[2] if transposed else w_EOI.shape[1])
    dropped_SI = x_SI if dropped_SI is None else dropped_SI
    xa_Sr = None if a_ErI is None else x_SI.new_zeros(x_SI.shape[0], a_ErI.shape[1])
    for e, a, b in _runs(groups):
        weight = w_EOI[e].float() if transposed else w_EOI[e].float().T
        y = x_SI[a:b].float() @ weight
        if bias_EO is not None:
            y = y + bias_EO[e].float()
        if a_ErI is not None and b_EOr is not None and xa_Sr is not None:
            xa_Sr[a:b] = (dropped_SI[a:b].float() @ a_ErI[e].float().T).to(x_SI.dtype)
            y = y + scale * (xa_Sr[a:b].float() @ b_EOr[e].float().T)
        y_SO[a:b] = y.to(x_SI.dtype)
    return y_SO, xa_Sr


def grouped_input(
    dy_SO: Tensor, w_EOI: Tensor, groups: Any, a_ErI: Tensor | None = None, dxa_Sr: Tensor | None = None, *,
    keep_SI: Tensor | None = None, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """See `grouped.grouped_input`."""
    dx_SI = dy_SO.new_zeros(dy_SO.shape[0], w_EOI.shape[1] if transposed else w_EOI.shape[2])
    for e, a, b in _runs(groups):
        dx = dy_SO[a:b].float() @ (w_EOI[e].float().T if transposed else w_EOI[e].float())
        if a_ErI is not None and dxa_Sr is not None:
            low = dxa_Sr[a:b].float() @ a_ErI[e].float()
            dx = dx + (low if keep_SI is None else low * keep_SI[a:b].float())
        dx_SI[a:b] = dx.to(dy_SO.dtype)
    return dx_SI


def grouped_low(dy_SO: Tensor, b_EOr: Tensor, groups: Any) -> Tensor:
    """See `grouped.grouped_low`."""
    out_Sr = dy_SO.new_zeros(dy_SO.shape[0], b_EOr.shape[2])
    for e, a, b in _runs(groups):
        out_Sr[a:b] = (dy_SO[a:b].float() @ b_EOr[e].float()).to(dy_SO.dtype)
    return out_Sr


def grouped_outer(
    big_SM: Tensor, small_Sr: Tensor, groups: Any, out: Tensor, alpha: float = 1.0, *, keep_SM: Tensor | None = None,
    swapped: bool = False,
) -> Tensor:  # fmt: skip
    """See `grouped.grouped_outer`."""
    big_SM = big_SM if keep_SM is None else big_SM * keep_SM
    for e, a, b in _runs(groups):
        made = alpha * (big_SM[a:b].float().T @ small_Sr[a:b].float())
        out[e] = (made.T if swapped else made).to(out.dtype)
    return out


def combine(y_SH: Tensor, slot_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """See `rows.combine`."""
    out_TH = torch.zeros(slot_TK.shape[0], y_SH.shape[1], device=y_SH.device)
    for k in range(slot_TK.shape[1]):
        value = y_SH[slot_TK[:, k]].float()
        out_TH += value if weights_TK is None else value * weights_TK[:, k, None].float()
    return out_TH.to(y_SH.dtype)


def combine_backward(dout_TH: Tensor, y_SH: Tensor, slot_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """See `rows.combine_backward`."""
    dy_SH, dweights_TK = torch.zeros_like(y_SH), torch.zeros_like(weights_TK)
    for k in range(slot_TK.shape[1]):
        slot_T = slot_TK[:, k]
        dy_SH[slot_T] = (dout_TH.float() * weights_TK[:, k, None].float()).to(y_SH.dtype)
        dweights_TK[:, k] = (dout_TH.float() * y_SH[slot_T].float()).sum(-1).to(weights_TK.dtype)
    return dy_SH, dweights_TK


def swiglu(gate_up_SO: Tensor) -> Tensor:
    """See `rows.swiglu`."""
    gate, up = gate_up_SO.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up_SO.dtype)


def swiglu_backward(gate_up_SO: Tensor, dout_SI: Tensor) -> Tensor:
    """See `rows.swiglu_backward`."""
    leaf = gate_up_SO.detach().float().requires_grad_()
    with torch.enable_grad():
        gate, up = leaf.chunk(2, dim=-1)
        (grad,) = torch.autograd.grad(F.silu(gate) * up, leaf, dout_SI.float())
    return grad.to(gate_up_SO.dtype)


def lora_linear(x_NI: Tensor, w_OI: Tensor, xa_Nr: Tensor, b_Or: Tensor, scale: float, bias_O: Tensor | None) -> Tensor:
    """See `lora.lora_linear`."""
    y_NO = x_NI.float() @ w_OI.float().T + scale * (xa_Nr.float() @ b_Or.float().T)
    return (y_NO if bias_O is None else y_NO + bias_O.float()).to(x_NI.dtype)


def linear_cross_entropy(
    hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, factor: float, gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """See `loss.linear_cross_entropy`."""
    leaf = hidden_NH.detach().float().requires_grad_()
    with torch.enable_grad():
        loss_N = F.cross_entropy(leaf @ weight_VH.float().T, target_N, reduction="none")
        if not gradient:
            return loss_N.detach(), None
        (grad,) = torch.autograd.grad(loss_N.sum() * factor, leaf)
    return loss_N.detach(), grad.to(hidden_NH.dtype)
