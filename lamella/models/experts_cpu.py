"""The whole expert block on a CPU as one function of autograd, on the fused C kernels (`lamella/kernels/experts.py`).

Shape suffixes: T tokens, K experts per token, S (token, expert) rows sorted by expert, H hidden, I inner, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from lamella.kernels import experts as kernels
from lamella.models.linear import DropoutClock, LoraSite

_rows: dict[int, Tensor] = {}


def _row_buffer(rows: int, columns: int) -> Tensor:
    """bf16 [rows, columns], overwritten by the next caller: fresh pages cost as much as filling them."""
    buffer = _rows.get(0)
    if buffer is None or buffer.numel() < rows * columns:
        buffer = _rows[0] = torch.empty(rows * columns, dtype=torch.bfloat16)
    return buffer[: rows * columns].view(rows, columns)


def reserve_rows(rows: int, columns: int) -> None:
    """Make the buffer of rows at least this large."""
    if rows and kernels.route() is not None:
        _row_buffer(rows, columns)


class _Experts(torch.autograd.Function):
    """out[t] = sum over k of weight[t, k] * expert_index[t, k](x[t]); LoRA on gate and up (1) and on down (2)."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weight_TK: Tensor, a1: Tensor | None, b1: Tensor | None, a2: Tensor | None,
        b2: Tensor | None, module: nn.Module, index_TK: Tensor, scales: tuple[float, float], keep: bool, real: int,
    ) -> Tensor:  # fmt: skip
        packed = module.lamella_packed.for_kernels()  # type: ignore[union-attr, operator]
        weights_fp32 = weight_TK[:real].float().contiguous()
        first = int(module.lamella_packed.first)  # type: ignore[union-attr, arg-type]
        total = int(module.num_experts)  # type: ignore[arg-type]
        routing = kernels.sort_by_expert(
            index_TK[:real].contiguous(), weights_fp32, packed.table.shape[0], first, total
        )
        hits = module.__dict__.get("lamella_hits")
        if hits is not None:
            hits.add_(routing.offsets_E.diff())
        x_TH = x_TH.contiguous()
        y_SH = _row_buffer(routing.token_S.numel(), packed.hidden)
        lora1, lora2 = _lora(a1, b1, scales[0]), _lora(a2, b2, scales[1])
        saved = kernels.forward(packed, x_TH, routing, y_SH, lora1, lora2, keep)
        out_TH = kernels.combine(y_SH, routing.slot_TK, weights_fp32, x_TH.shape[0])
        if saved is not None:
            ctx.module, ctx.scales, ctx.dtype = module, scales, weight_TK.dtype
            ctx.save_for_backward(
                x_TH, a1, b1, a2, b2, saved.gate, saved.up, saved.xa1, saved.xa2, routing.offsets_E, routing.token_S,
                routing.slot_TK, routing.weight_S,
            )  # fmt: skip
        return out_TH

    @staticmethod
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, a1, b1, a2, b2, gate, up, xa1, xa2, offsets_E, token_S, slot_TK, weight_S = ctx.saved_tensors
        routing = kernels.Routing(offsets_E, token_S, slot_TK, weight_S)
        needs_input = ctx.needs_input_grad[0]
        dx_SH = _row_buffer(token_S.numel(), x_TH.shape[1]) if needs_input else None
        dweight_S, gradients = kernels.backward(
            ctx.module.lamella_packed.for_kernels(), x_TH, routing, kernels.Saved(gate, up, xa1, xa2), dout_TH.contiguous(),
            _lora(a1, b1, ctx.scales[0]), _lora(a2, b2, ctx.scales[1]), dx_SH,
        )  # fmt: skip
        dx_TH = None if dx_SH is None else kernels.combine(dx_SH, slot_TK, None, x_TH.shape[0])
        dweight_TK = None
        if ctx.needs_input_grad[1]:
            gap = dweight_S.new_zeros(1)  # what slots of -1 find
            dweight_TK = torch.cat([dweight_S, gap])[slot_TK].to(ctx.dtype)
            if (filler := x_TH.shape[0] - slot_TK.shape[0]) > 0:
                dweight_TK = torch.cat([dweight_TK, dweight_TK.new_zeros(filler, slot_TK.shape[1])])
        given = iter(gradients)
        da_db = [next(given) if t is not None else None for t in (a1, b1, a2, b2)]
        return dx_TH, dweight_TK, *da_db, None, None, None, None, None


def _lora(a: Tensor | None, b: Tensor | None, scale: float) -> kernels.Lora | None:
    return None if a is None or b is None else kernels.Lora(a.detach(), b.detach(), scale)


def can_fuse(module: nn.Module, x_TH: Tensor, sites: dict[str, LoraSite]) -> bool:
    """Whether the fused kernels compute what this module does: plain SwiGLU experts in bf16, without LoRA dropout now."""
    packed = module.__dict__.get("lamella_packed")
    if packed is None or x_TH.dtype != torch.bfloat16 or kernels.route() is None:
        return False
    if DropoutClock.row_keys_T is not None and any(site.dropout for site in sites.values()):
        return False
    plain = module.has_gate and not module.has_bias and not module.is_transposed and module.is_concatenated
    silu = isinstance(getattr(module, "act_fn", None), (nn.SiLU, SiLUActivation))
    return bool(
        plain and silu and type(module)._apply_gate is _default_apply_gate and packed.for_kernels() is not None  # type: ignore[attr-defined]
    )


def kernel_sizes(module: nn.Module, dtype: torch.dtype, drops: bool) -> tuple[int, int] | None:
    """Hidden and inner size of experts that the fused kernels serve in this dtype; None for other modules."""
    packed = module.__dict__.get("lamella_packed")
    if packed is None or dtype != torch.bfloat16 or drops or kernels.route() is None or packed.table_sizes is None:
        return None
    sizes: tuple[int, int] = packed.table_sizes
    return sizes


def fused_experts(
    module: nn.Module, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor, sites: dict[str, LoraSite],
    real: int | None = None,
) -> Tensor:  # fmt: skip
    """[T, H], zero beyond the first `real` tokens; see `can_fuse`."""
    gate_up, down = sites.get("gate_up_proj"), sites.get("down_proj")
    pairs = [t for site in (gate_up, down) for t in ((site.a, site.b) if site is not None else (None, None))]
    scales = (gate_up.scale if gate_up is not None else 0.0, down.scale if down is not None else 0.0)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_TH, weight_TK, *pairs))
    return _Experts.apply(
        x_TH, weight_TK, *pairs, module, index_TK, scales, keep, x_TH.shape[0] if real is None else real
    )
