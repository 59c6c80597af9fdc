"""The functions of `rows.py` in plain torch, in the dtype of their inputs; backward by autograd's rules, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _activate(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def rms_norm(x_NH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    rstd_N = torch.rsqrt(x_NH.square().mean(-1) + eps)
    return x_NH * rstd_N[:, None] * (weight_H + offset), rstd_N


def rms_norm_backward(dy_NH: Tensor, x_NH: Tensor, weight_H: Tensor, rstd_N: Tensor, offset: float = 0.0) -> Tensor:
    hat_NH = x_NH * rstd_N[:, None]
    g_NH = dy_NH * (weight_H + offset)
    return rstd_N[:, None] * (g_NH - hat_NH * (g_NH * hat_NH).mean(-1, keepdim=True))


def _turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def _turned_back(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((b, -a), dim=-1)


def rotate(
    x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, out_THD: Tensor, weight_D: Tensor | None = None, eps: float = 0.0,
    offset: float = 0.0,
) -> Tensor:  # fmt: skip
    x = x_THD
    if weight_D is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight_D + offset)
    turning, rest = x[..., : cos_TR.shape[1]], x[..., cos_TR.shape[1] :]
    turned = turning * cos_TR[:, None] + _turned(turning) * sin_TR[:, None]
    return out_THD.copy_(torch.cat((turned, rest), dim=-1))


def rotate_backward(
    dy_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, out_THD: Tensor, x_THD: Tensor | None = None,
    weight_D: Tensor | None = None, eps: float = 0.0, offset: float = 0.0,
) -> Tensor:  # fmt: skip
    turning, rest = dy_THD[..., : cos_TR.shape[1]], dy_THD[..., cos_TR.shape[1] :]
    grad = torch.cat((turning * cos_TR[:, None] + _turned_back(turning * sin_TR[:, None]), rest), dim=-1)
    if weight_D is not None:
        assert x_THD is not None
        size = grad.shape[-1]
        flat = x_THD.reshape(-1, size)
        rstd = torch.rsqrt(flat.square().mean(-1) + eps)
        grad = rms_norm_backward(grad.reshape(-1, size), flat, weight_D, rstd, offset).view(grad.shape)
    return out_THD.copy_(grad)


def gated(gate_NI: Tensor, up_NI: Tensor, activation: str) -> Tensor:
    return _activate(gate_NI, activation) * up_NI


def gated_backward_(
    dh_NI: Tensor, gate_NI: Tensor, up_NI: Tensor, activation: str, *, product: bool = False
) -> Tensor | None:
    with torch.enable_grad():
        leaf = gate_NI.detach().clone().requires_grad_()
        value = _activate(leaf, activation)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    h_NI = value.detach() * up_NI if product else None
    gate_NI.copy_(dh_NI * up_NI * slope)
    up_NI.copy_(dh_NI * value.detach())
    return h_NI


def cross_entropy_(logits_NV: Tensor, targets_N: Tensor, scale: float) -> Tensor:
    logp_NV = torch.log_softmax(logits_NV.double(), dim=-1)
    loss_N = -logp_NV.gather(1, targets_N[:, None])[:, 0]
    grad = logp_NV.exp()
    grad.scatter_add_(1, targets_N[:, None], grad.new_full((len(grad), 1), -1.0))
    logits_NV.copy_(grad * scale)
    return loss_N


def peak(x: Tensor) -> float:
    return float(x.abs().amax()) if x.numel() else 0.0
