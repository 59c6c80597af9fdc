"""Experts of a MoE layer on a CUDA device, through the Triton kernels: the same sums as `experts.py`.

Nothing here waits for the device: tiles are laid out there, from the counts. The frozen weights are read from the module
in the backward, as in `linear.py`.

Shape suffixes: T tokens, K experts per token, S (token, expert) rows sorted by expert, H hidden, I inputs, O outputs,
r rank, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import moe

from lamella.kernels.triton import grouped, rows
from lamella.kernels.triton.grouped import Groups
from lamella.models.linear import DropoutClock, LoraSite


class _GroupedLinear(torch.autograd.Function):
    """y = x W_e^T + bias_e + scale (drop(x) A_e^T) B_e^T on the rows of each expert."""

    @staticmethod
    def forward(
        ctx: Any, x_SI: Tensor, a_ErI: Tensor | None, b_EOr: Tensor | None, module: nn.Module, name: str, groups: Groups,
        scale: float, keep_SI: Tensor | None,
    ) -> Tensor:  # fmt: skip
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        y_SO, xa_Sr = grouped.grouped_linear(
            x_SI, getattr(module, name), groups, a_ErI, b_EOr, scale, bias_EO=bias, transposed=bool(module.is_transposed),
            dropped_SI=None if keep_SI is None else x_SI * keep_SI,
        )  # fmt: skip
        ctx.module, ctx.name, ctx.groups, ctx.scale, ctx.keep = module, name, groups, scale, keep_SI
        ctx.lora = a_ErI is not None
        if ctx.lora:
            ctx.save_for_backward(x_SI, a_ErI, b_EOr, xa_Sr)
        return y_SO

    @staticmethod
    def backward(ctx: Any, dy_SO: Tensor) -> tuple[Tensor | None, ...]:
        dy_SO = dy_SO.contiguous()
        da_ErI = db_EOr = dx_SI = low = None
        a_ErI = None
        if ctx.lora:
            x_SI, a_ErI, b_EOr, xa_Sr = ctx.saved_tensors
            low = grouped.grouped_low(dy_SO, b_EOr, ctx.groups).mul_(ctx.scale)
            db_EOr = grouped.grouped_outer(dy_SO, xa_Sr, ctx.groups, torch.empty_like(b_EOr), ctx.scale)
            da_ErI = grouped.grouped_outer(
                x_SI, low, ctx.groups, torch.empty_like(a_ErI), keep_SM=ctx.keep, swapped=True
            )  # fmt: skip
        if ctx.needs_input_grad[0]:
            dx_SI = grouped.grouped_input(
                dy_SO, getattr(ctx.module, ctx.name), ctx.groups, a_ErI, low, keep_SI=ctx.keep,
                transposed=bool(ctx.module.is_transposed),
            )  # fmt: skip
        return dx_SI, da_ErI, db_EOr, None, None, None, None, None


class _Spread(torch.autograd.Function):
    """Copy each token to its experts' rows; backward sums them in fp32, in the order of the token's choices."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_S: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TK)
        return x_TH.index_select(0, token_S)

    @staticmethod
    def backward(ctx: Any, dx_SH: Tensor) -> tuple[Tensor, None, None]:
        (slot_TK,) = ctx.saved_tensors
        return rows.combine(dx_SH, slot_TK), None, None


class _Combine(torch.autograd.Function):
    """out[t] = sum_k weights[t, k] y[slot[t, k]], summed in fp32."""

    @staticmethod
    def forward(ctx: Any, y_SH: Tensor, weights_TK: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(y_SH, weights_TK, slot_TK)
        return rows.combine(y_SH, slot_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[Tensor, Tensor, None]:
        y_SH, weights_TK, slot_TK = ctx.saved_tensors
        return *rows.combine_backward(dout_TH, y_SH, slot_TK, weights_TK), None


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up, one pass each way."""

    @staticmethod
    def forward(ctx: Any, gate_up_SO: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_SO)
        return rows.swiglu(gate_up_SO)

    @staticmethod
    def backward(ctx: Any, dout_SI: Tensor) -> Tensor:
        return rows.swiglu_backward(ctx.saved_tensors[0], dout_SI)


def _linear(module: nn.Module, name: str, x_SI: Tensor, groups: Groups, pairs_S2: Tensor) -> Tensor:
    sites: dict[str, LoraSite] = module.__dict__.get("lamella_lora", {})
    site = sites.get(name)
    if site is None:
        return _GroupedLinear.apply(x_SI, None, None, module, name, groups, 1.0, None)
    keep = DropoutClock.keep(x_SI.shape[1], site.dropout, site.site, pairs_S2)
    scaled = None if keep is None else keep.to(x_SI.dtype) / (1 - site.dropout)
    return _GroupedLinear.apply(x_SI, site.a, site.b, module, name, groups, site.scale, scaled)


def _is_swiglu(module: nn.Module) -> bool:
    """Whether the family's gate is the usual one: silu of the first half times the second."""
    usual = getattr(moe, "_default_apply_gate", None)
    silu = (nn.SiLU, type(ACT2FN["silu"]))
    return usual is not None and getattr(type(module), "_apply_gate", None) is usual and isinstance(module.act_fn, silu)


def packed_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`experts.packed_experts` for a module whose family it has accepted: [T, H] from hidden states [T, H] and [T, K]."""
    tokens, per_token = top_k_index.shape
    expert_S, order_S = torch.sort(top_k_index.reshape(-1), stable=True)
    groups = Groups.of_sorted(expert_S, int(module.num_experts))  # type: ignore[arg-type]
    if module.__dict__.get("lamella_hits") is not None:
        module.lamella_hits.add_(groups.counts())  # type: ignore[operator]
    pairs_S2 = torch.stack([torch.div(order_S, per_token, rounding_mode="floor"), expert_S], dim=1)
    slot_TK = torch.empty_like(order_S)
    slot_TK[order_S] = torch.arange(order_S.numel(), device=order_S.device)
    slot_TK = slot_TK.view(tokens, per_token)
    x_SH = _Spread.apply(hidden_states, pairs_S2[:, 0], slot_TK)
    if module.has_gate:
        gate_up_SO = _linear(module, "gate_up_proj", x_SH, groups, pairs_S2)
        swiglu = _is_swiglu(module)
        inner_SI = _SwiGlu.apply(gate_up_SO) if swiglu else module._apply_gate(gate_up_SO)  # type: ignore[operator]
    else:
        inner_SI = module.act_fn(_linear(module, "up_proj", x_SH, groups, pairs_S2))  # type: ignore[operator]
    y_SH = _linear(module, "down_proj", inner_SI, groups, pairs_S2)
    return _Combine.apply(y_SH, top_k_weights, slot_TK)
