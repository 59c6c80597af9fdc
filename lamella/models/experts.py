"""Experts of a MoE layer, registered with transformers' `ExpertsInterface` as `lamella`.

Plain SwiGLU experts on a CPU in bf16 run as one fused function (`experts_cpu.py`); this is the general way. Tokens are
sorted by expert once; each expert then works on one contiguous run of rows, with its LoRA pair
in the same pass. Backward is written by hand: input and adapter gradients only, the frozen weights are
read from the module (see `linear.py`).

Shape suffixes: T tokens, K experts per token, S (token, expert) rows sorted by expert (T * K and filler), H hidden,
I inputs, O outputs, r rank, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from lamella import kernels
from lamella.errors import UserError
from lamella.models import experts_cpu
from lamella.models.attention import AttentionLayout
from lamella.models.divided import ExpertPart, nothing
from lamella.models.linear import DropoutClock, LoraSite
from lamella.models.packed import ExpertBytes, ExpertParameter
from lamella.models.pieces import Cut
from lamella.models.several import RowRuns, Several, lora_part

NAME = "lamella"
PAD_ROWS = 16
"""On a CPU in bf16 each expert's rows are filled up to a multiple of this, so that oneDNN meets few shapes: it compiles
a kernel (2 ms, 0.9 MB, kept) for every new number of rows."""


class _GroupedLinear(torch.autograd.Function):
    """Rows offsets[e] .. offsets[e + 1] of x go through expert e: y = x W_e^T + bias_e + scale (drop(x) A_e^T) B_e^T.

    W is [E, O, I], or [E, I, O] where the family stores it transposed; one expert's matrix is good until the next is asked for.
    """

    @staticmethod
    def forward(
        ctx: Any, x_SI: Tensor, a_ErI: Tensor | None, b_EOr: Tensor | None, module: nn.Module, name: str,
        bounds: list[tuple[int, int, int]], scale: float, keep: Tensor | None,
    ) -> Tensor:  # fmt: skip
        weight = _weight(module, name, x_SI.dtype)
        transposed = bool(module.is_transposed)
        y_SO = x_SI.new_empty(x_SI.shape[0], weight.shape[2] if transposed else weight.shape[1])
        rank = 0 if a_ErI is None else a_ErI.shape[1]
        xa_Sr = x_SI.new_empty(x_SI.shape[0], rank)
        dropped_SI = x_SI if keep is None else x_SI * keep
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        for e, first, last in bounds:
            y, w = y_SO[first:last], weight[e]
            if a_ErI is None or b_EOr is None:
                torch.mm(x_SI[first:last], w if transposed else w.T, out=y)
            else:  # LoRA's part first: see `_LoraLinear`
                xa = torch.mm(dropped_SI[first:last], a_ErI[e].T, out=xa_Sr[first:last])
                y.addmm_(xa, b_EOr[e].T, beta=0, alpha=scale)
                y.addmm_(x_SI[first:last], w if transposed else w.T)
            if bias is not None:
                y += bias[e]
        ctx.module, ctx.name, ctx.bounds, ctx.scale, ctx.keep = module, name, bounds, scale, keep
        ctx.lora = a_ErI is not None
        if ctx.lora:
            ctx.save_for_backward(x_SI, a_ErI, b_EOr, xa_Sr)
        return y_SO

    @staticmethod
    def backward(ctx: Any, dy_SO: Tensor) -> tuple[Tensor | None, ...]:
        weight = _weight(ctx.module, ctx.name, dy_SO.dtype)
        transposed = bool(ctx.module.is_transposed)
        dx_SI = da_ErI = db_EOr = None
        if ctx.needs_input_grad[0]:
            dx_SI = dy_SO.new_empty(dy_SO.shape[0], weight.shape[1] if transposed else weight.shape[2])
        if ctx.lora:
            x_SI, a_ErI, b_EOr, xa_Sr = ctx.saved_tensors
            # an expert without tokens gets zero, not a missing gradient
            da_ErI, db_EOr = torch.zeros_like(a_ErI), torch.zeros_like(b_EOr)
            dropped_SI = x_SI if ctx.keep is None else x_SI * ctx.keep
        for e, first, last in ctx.bounds:
            dy = dy_SO[first:last]
            dx = None if dx_SI is None else dx_SI[first:last]
            if da_ErI is not None and db_EOr is not None:
                dxa = (dy @ b_EOr[e]).mul_(ctx.scale)
                torch.mm(dy.T, xa_Sr[first:last], out=db_EOr[e]).mul_(ctx.scale)
                torch.mm(dxa.T, dropped_SI[first:last], out=da_ErI[e])
                if dx is not None:
                    torch.mm(dxa, a_ErI[e], out=dx)
                    if ctx.keep is not None:
                        dx *= ctx.keep[first:last]
            if dx is not None:
                w = weight[e]
                dx.addmm_(dy, w.T if transposed else w, beta=int(ctx.lora))
        return dx_SI, da_ErI, db_EOr, None, None, None, None, None


class _Combine(torch.autograd.Function):
    """Weighted sum of each token's experts: out[t] = sum_k weights[t, k] * y[slot of (t, k)], summed in fp32.

    `gaps`: some slots are -1; their weights are zero.
    """

    @staticmethod
    def forward(ctx: Any, y_SH: Tensor, weights_TK: Tensor, slot_TK: Tensor, gaps: bool) -> Tensor:
        ctx.save_for_backward(y_SH, weights_TK, slot_TK)
        ctx.gaps = gaps
        out_TH = y_SH.new_zeros(weights_TK.shape[0], y_SH.shape[1], dtype=torch.float32)
        for k in range(weights_TK.shape[1]):
            out_TH.addcmul_(y_SH[slot_TK[:, k]].float(), weights_TK[:, k, None].float())
        return out_TH.to(y_SH.dtype)

    @staticmethod
    def backward(ctx: Any, dout_TH: Tensor) -> tuple[Tensor | None, ...]:
        y_SH, weights_TK, slot_TK = ctx.saved_tensors
        dy_SH = torch.zeros_like(y_SH)  # filler rows get zero
        dweights_TK = torch.empty_like(weights_TK)
        for k in range(weights_TK.shape[1]):
            slot_T = slot_TK[:, k]
            grad_TH = dout_TH * weights_TK[:, k, None].to(dout_TH.dtype)
            if ctx.gaps:
                there_T = slot_T >= 0
                dy_SH[slot_T[there_T]] = grad_TH[there_T]
            else:
                dy_SH[slot_T] = grad_TH
            if ctx.needs_input_grad[1]:
                dweights_TK[:, k] = (dout_TH.float() * y_SH[slot_T].float()).sum(-1).to(dweights_TK.dtype)
        return dy_SH, (dweights_TK if ctx.needs_input_grad[1] else None), None, None


def _weight(module: nn.Module, name: str, dtype: torch.dtype) -> Tensor | ExpertParameter:
    """The parameter, or what stands for it where it stays packed; indexing gives one expert's matrix."""
    packed: ExpertBytes | None = module.__dict__.get("lamella_packed")
    if packed is not None and name in packed.plans:
        return packed.parameter(name, dtype)
    return cast(Tensor, getattr(module, name))


def _sites(module: nn.Module) -> dict[str, LoraSite]:
    return cast(dict[str, LoraSite], module.__dict__.get("lamella_lora", {}))


def _several(module: nn.Module) -> dict[str, Several]:
    return cast(dict[str, Several], module.__dict__.get("lamella_several", {}))


@dataclass(frozen=True)
class _Shares:
    """Pairs of several adapters by parameter, and the adapter's number of each row."""

    several: dict[str, Several]
    adapter_S: list[int]

    def runs(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Runs of one adapter among these rows, counted from the first: one expert's, whose tokens keep their order."""
        found, at = [], first
        for row in range(first + 1, last + 1):
            if row == last or self.adapter_S[row] != self.adapter_S[at]:
                found.append((at - first, row - first, self.adapter_S[at]))
                at = row
        return found


def _shared(module: nn.Module, name: str, x_SI: Tensor, bounds: list[tuple[int, int, int]], shares: _Shares) -> Tensor:
    """As `_GroupedLinear` without gradients, every row with its own adapter's pair."""
    weight = _weight(module, name, x_SI.dtype)
    transposed = bool(module.is_transposed)
    pairs = shares.several.get(name, ())
    y_SO = x_SI.new_empty(x_SI.shape[0], weight.shape[2] if transposed else weight.shape[1])
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    for e, first, last in bounds:
        y, w = y_SO[first:last], weight[e]
        if pairs:
            lora_part(x_SI[first:last], pairs, y, shares.runs(first, last), expert=e)
        y.addmm_(x_SI[first:last], w if transposed else w.T, beta=int(bool(pairs)))
        if bias is not None:
            y += bias[e]
    return y_SO


def _grouped(
    module: nn.Module,
    sites: dict[str, LoraSite],
    name: str,
    x_SI: Tensor,
    bounds: list[tuple[int, int, int]],
    pairs_S2: Tensor,
    shares: _Shares | None = None,
) -> Tensor:
    if shares is not None:
        return _shared(module, name, x_SI, bounds, shares)
    site = sites.get(name)
    if site is None:
        return _GroupedLinear.apply(x_SI, None, None, module, name, bounds, 1.0, None)
    keep = DropoutClock.keep(x_SI.shape[1], site.dropout, site.site, pairs_S2)
    scaled = None if keep is None else keep.to(x_SI.dtype) / (1 - site.dropout)
    return _GroupedLinear.apply(x_SI, site.a, site.b, module, name, bounds, site.scale, scaled)


def packed_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts function for transformers' `ExpertsInterface`.

    Args:
        hidden_states: [T, H]; top_k_index, top_k_weights: [T, K].

    Returns:
        [T, H].

    Raises:
        UserError: the family adds something to its experts that is not computed here.
    """
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        raise UserError(f"{type(module).__name__}: experts with a norm of their own are not computed here",
                        fix="this model family is not supported yet")  # fmt: skip
    if hidden_states.is_meta:  # a trial (`models/trial.py`): shapes alone
        return torch.empty_like(hidden_states)
    part: ExpertPart | None = module.__dict__.get("lamella_part")
    real = _real_tokens(hidden_states.shape[0])
    if part is None:
        return _experts(module, hidden_states, top_k_index, top_k_weights, None, real)
    x_TH, weights_TK = part.enter(hidden_states, top_k_weights)
    if bool(part.mine(top_k_index[:real]).any()):
        return part.leave(_experts(module, x_TH, top_k_index, weights_TK, part, real))
    leaves = (leaf for site in _sites(module).values() for leaf in (site.a, site.b))
    return part.leave(nothing(x_TH, weights_TK, *leaves))


def _real_tokens(tokens: int) -> int:
    """How many of the batch's tokens are no filler: that goes through no expert, and is not counted."""
    layout = AttentionLayout.current
    return layout.batch.real_tokens if layout is not None and layout.batch.tokens == tokens else tokens


def _experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, part: ExpertPart | None,
    real: int,
) -> Tensor:  # fmt: skip
    """[T, H]: the sum over each token's experts, those of this rank's `part` where there is one; zero beyond the `real`."""
    if several := _several(module):
        runs = RowRuns.here(hidden_states.shape[0])
        return expert_by_expert(module, hidden_states, top_k_index, top_k_weights, {}, adapters=(several, runs))
    if part is None and kernels.by_triton(hidden_states.device):
        from lamella.models import experts_cuda

        return experts_cuda.packed_experts(module, hidden_states, top_k_index, top_k_weights)
    sites = _sites(module)
    if experts_cpu.can_fuse(module, hidden_states, sites):
        return experts_cpu.fused_experts(module, hidden_states, top_k_index, top_k_weights, sites, real)
    held = None if part is None else part.held
    out = expert_by_expert(module, hidden_states[:real], top_k_index[:real], top_k_weights[:real], sites, held)
    return F.pad(out, (0, 0, 0, hidden_states.shape[0] - real)) if real < hidden_states.shape[0] else out


def expert_by_expert(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, sites: dict[str, LoraSite],
    held: Cut | None = None, adapters: tuple[dict[str, Several], RowRuns] | None = None,
) -> Tensor:  # fmt: skip
    """The general way, one matmul per expert and projection: any activation, bias, transposed weights, LoRA dropout.

    `held`: the experts whose weights are here, numbered from the first of them; choices of others (not all) add nothing.
    `adapters`: in inference, pairs of several adapters and whose each token is, in the place of `sites`.
    """
    before_held = 0 if held is None else held.first
    experts = int(module.num_experts) if held is None else held.last - held.first  # type: ignore[arg-type]
    tokens, per_token = top_k_index.shape
    wanted = top_k_index.reshape(-1) - before_held
    if held is not None:
        wanted = torch.where((wanted >= 0) & (wanted < experts), wanted, experts)  # others' come last
    expert_S, order_S = torch.sort(wanted, stable=True)
    counts = torch.bincount(expert_S, minlength=experts).tolist()[:experts]
    if held is not None:
        expert_S, order_S = expert_S[: sum(counts)], order_S[: sum(counts)]
    onednn = hidden_states.device.type == "cpu" and hidden_states.dtype == torch.bfloat16
    multiple = PAD_ROWS if onednn else 1
    bounds, shift_E, first, before = [], [], 0, 0
    for e, count in enumerate(counts):
        shift_E.append(first - before)
        before += count
        room = -(-count // multiple) * multiple
        if count:
            bounds.append((e, first, first + room))
        first += room
    if module.__dict__.get("lamella_hits") is not None:
        module.lamella_hits.add_(torch.tensor(counts, device=hidden_states.device))  # type: ignore[operator]
    row_S = (
        torch.arange(expert_S.numel(), device=order_S.device) + torch.tensor(shift_E, device=order_S.device)[expert_S]
    )
    pairs_S2 = order_S.new_zeros(first, 2)  # filler rows copy token 0 and get no gradient
    pairs_S2[row_S, 0] = torch.div(order_S, per_token, rounding_mode="floor")
    pairs_S2[row_S, 1] = expert_S + before_held
    slot_TK = torch.full_like(wanted, -1)
    slot_TK[order_S] = row_S
    slot_TK = slot_TK.view(tokens, per_token)
    if held is not None:  # choices without a row of ours weigh nothing, wherever they look
        top_k_weights = top_k_weights.masked_fill(slot_TK < 0, 0)
    shares = None
    if adapters is not None:
        shares = _Shares(adapters[0], adapters[1].adapter_N[pairs_S2[:, 0].cpu()].tolist())
    x_SH = _Spread.apply(hidden_states, pairs_S2[:, 0], slot_TK, held is not None)
    if module.has_gate:
        up_SO = _grouped(module, sites, "gate_up_proj", x_SH, bounds, pairs_S2, shares)
        inner_SI = module._apply_gate(up_SO)  # type: ignore[operator]
    else:
        inner_SI = module.act_fn(_grouped(module, sites, "up_proj", x_SH, bounds, pairs_S2, shares))  # type: ignore[operator]
    y_SH = _grouped(module, sites, "down_proj", inner_SI, bounds, pairs_S2, shares)
    return _Combine.apply(y_SH, top_k_weights, slot_TK, held is not None)


class _Spread(torch.autograd.Function):
    """Copy each token to its experts' rows; backward sums them in fp32, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_S: Tensor, slot_TK: Tensor, gaps: bool) -> Tensor:
        ctx.save_for_backward(slot_TK)
        ctx.gaps = gaps
        return x_TH.index_select(0, token_S)

    @staticmethod
    def backward(ctx: Any, dx_SH: Tensor) -> tuple[Tensor, None, None, None]:
        (slot_TK,) = ctx.saved_tensors
        if ctx.gaps:
            dx_SH = torch.cat([dx_SH, dx_SH.new_zeros(1, dx_SH.shape[1])])  # what slots of -1 find
        dx_TH = dx_SH[slot_TK[:, 0]].float()
        for k in range(1, slot_TK.shape[1]):
            dx_TH += dx_SH[slot_TK[:, k]]
        return dx_TH.to(dx_SH.dtype), None, None, None


ExpertsInterface.register(NAME, packed_experts)
