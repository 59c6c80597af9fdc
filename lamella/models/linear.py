"""Linear layers on borrowed weights, with an optional LoRA pair.

The frozen weight is bound to a module only while its layer is at work (its bytes lie in a buffer that
the next layer reuses). So the backward of these functions reads the weight from the module, where the
engine has bound it again, and never saves it.

Shape suffixes: N rows (tokens), I inputs, O outputs, r rank, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lamella import kernels
from lamella.models.pieces import Cut
from lamella.models.several import RowRuns, Several, lora_part


@dataclass
class LoraSite:
    """LoRA on one weight, as the layer at work sees it.

    Attributes:
        a, b: compute-dtype leaves, [r, I] and [O, r], or [E, r, I] and [E, O, r] on experts.
        scale: alpha / r, or alpha / sqrt(r).
        dropout: probability of dropping an input of A; masks come from `keep`.
        site: number of this weight among all adapted weights, for the dropout seed.
        inputs: which of the weight's inputs this rank holds; None: all. Masks are drawn for all of them.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0
    site: int = 0
    inputs: Cut | None = None


_SITE_STEP = 0x1B873593CC9E2D  # odd, and small enough that site numbers times it stay in int64


class DropoutClock:
    """What the dropout masks of the micro-batch at work are seeded by.

    A mask is a function of (seed, step, row, position, site) alone: recompute, micro-batch size and device
    do not change it. None: no dropout (evaluation).
    """

    row_keys_T: Tensor | None = None

    @classmethod
    def keep(cls, columns: int, probability: float, site: int, rows_N: Tensor | None = None) -> Tensor | None:
        """Boolean keep mask [N, columns], or None when nothing is dropped.

        Args:
            rows_N: for expert inputs, key offsets of the (token, expert) rows: (token index, expert index) as
                int64 [N, 2]; None: the batch's tokens in order.
        """
        if probability == 0.0 or cls.row_keys_T is None:
            return None
        keys = cls.row_keys_T
        if rows_N is not None:
            keys = keys[rows_N[:, 0]] + (rows_N[:, 1] + 1) * 0x2545F4914F6CDD1D
        return cls.mask(keys, columns, probability, site)

    @staticmethod
    def mask(keys_N: Tensor, columns: int, probability: float, site: int) -> Tensor:
        """Boolean keep mask [N, columns] of these row keys."""
        from lamella.kernels import keep_mask

        return keep_mask(keys_N + (site + 1) * _SITE_STEP, columns, probability)


def _fused(x: Tensor) -> bool:
    """Whether LoRA is added in the epilogue of a kernel of our own."""
    if not kernels.by_triton(x.device):
        return False
    from lamella.kernels.triton import lora

    return lora.choose(x.dtype, x.device)


def _with_lora(x_NI: Tensor, w_OI: Tensor, bias_O: Tensor | None, xa_Nr: Tensor, b_Or: Tensor, scale: float) -> Tensor:
    """x W^T + bias + scale xa B^T"""
    if _fused(x_NI):
        from lamella.kernels.triton.lora import lora_linear

        return lora_linear(x_NI, w_OI, xa_Nr, b_Or, scale, bias_O)
    y_NO = x_NI.new_empty(x_NI.shape[0], b_Or.shape[0]).addmm_(xa_Nr, b_Or.T, beta=0, alpha=scale)
    if bias_O is not None:
        y_NO += bias_O
    return y_NO.addmm_(x_NI, w_OI.T)


def _input_gradient(dy_NO: Tensor, w_OI: Tensor, dxa_Nr: Tensor, a_rI: Tensor) -> Tensor:
    """dy W + dxa A"""
    if _fused(dy_NO):
        from lamella.kernels.triton.lora import lora_linear

        return lora_linear(dy_NO, w_OI.T, dxa_Nr, a_rI.T, 1.0)
    return (dxa_Nr @ a_rI).addmm_(dy_NO, w_OI)


class _LoraLinear(torch.autograd.Function):
    """y = x W^T + bias + scale (drop(x) A^T) B^T

    The adapter's part is written first and the frozen matmul added to it: that one sums in fp32 and rounds once. The
    other way round, the adapter would be added to an output already rounded to bf16, where all of it that is smaller
    than half a unit in the last place is lost: more than half of a young adapter's effect.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, a_rI: Tensor, b_Or: Tensor, module: FrozenLinear, keep: Tensor | None
    ) -> Tensor:
        site = module.lora
        assert site is not None
        dropped_NI = x_NI if keep is None else x_NI * keep / (1 - site.dropout)
        xa_Nr = dropped_NI @ a_rI.T
        y_NO = _with_lora(x_NI, module.matrix, module.bias, xa_Nr, b_Or, site.scale)
        ctx.module, ctx.keep = module, keep
        ctx.scale, ctx.dropout = site.scale, site.dropout
        ctx.save_for_backward(x_NI, a_rI, b_Or, xa_Nr)
        return y_NO

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, a_rI, b_Or, xa_Nr = ctx.saved_tensors
        dxa_Nr = (dy_NO @ b_Or).mul_(ctx.scale)
        db_Or = (dy_NO.T @ xa_Nr).mul_(ctx.scale)
        if ctx.keep is None:
            da_rI = dxa_Nr.T @ x_NI
        else:
            da_rI = dxa_Nr.T @ (x_NI * ctx.keep / (1 - ctx.dropout))
        dx_NI = None
        if ctx.needs_input_grad[0]:
            if ctx.keep is None:
                dx_NI = _input_gradient(dy_NO, ctx.module.matrix, dxa_Nr, a_rI)
            else:
                dx_NI = (dxa_Nr @ a_rI) * ctx.keep / (1 - ctx.dropout)
                dx_NI.addmm_(dy_NO, ctx.module.matrix)
        return dx_NI, da_rI, db_Or, None, None


class _PlainLinear(torch.autograd.Function):
    """y = x W^T + bias, keeping nothing but the module."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, module: FrozenLinear) -> Tensor:
        ctx.module = module
        return F.linear(x_NI, module.matrix, module.bias)

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, None]:
        return (dy_NO @ ctx.module.matrix if ctx.needs_input_grad[0] else None), None


class FrozenLinear(nn.Linear):
    """An `nn.Linear` whose weight is bound and unbound by the engine, with an optional LoRA site.

    `bypassed`: the family uses the weight and never calls the layer, so a LoRA pair would do nothing.

    `several`: in inference, the pairs of several adapters, each on its rows (`several.RowRuns`).

    `in_features` and `out_features` are the model's; the bound weight, bias and LoRA pair may be a rank's part of them.
    """

    lora: LoraSite | None = None
    several: Several | None = None
    bypassed = False

    @property
    def matrix(self) -> Tensor:
        """The frozen weight, [O, I]."""
        return self.weight

    @classmethod
    def like(cls, linear: nn.Linear) -> FrozenLinear:
        return cls(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta", dtype=linear.weight.dtype
        )

    def forward(self, input: Tensor) -> Tensor:
        site = self.lora
        x_NI = input.reshape(-1, input.shape[-1])
        if site is not None:
            keep = DropoutClock.keep(self.in_features, site.dropout, site.site)
            if keep is not None and site.inputs is not None:
                keep = site.inputs.of(keep)
            y_NO = _LoraLinear.apply(x_NI, site.a, site.b, self, keep)
        elif self.several is not None:
            y_NO = self._each_its_own(x_NI, self.several)
        elif torch.is_grad_enabled() and x_NI.requires_grad:
            y_NO = _PlainLinear.apply(x_NI, self)
        else:
            y_NO = F.linear(x_NI, self.matrix, self.bias)
        return y_NO.view(*input.shape[:-1], y_NO.shape[-1])

    def _each_its_own(self, x_NI: Tensor, several: Several) -> Tensor:
        w_OI = self.matrix
        y_NO = x_NI.new_empty(x_NI.shape[0], w_OI.shape[0])
        lora_part(x_NI, several, y_NO, RowRuns.here(x_NI.shape[0]).runs)  # first: see `_LoraLinear`
        if self.bias is not None:
            y_NO += self.bias
        return y_NO.addmm_(x_NI, w_OI.T)


class FrozenConv1D(FrozenLinear):
    """GPT-2's linear layer, whose weight lies as [I, O]. Its LoRA pair is as any other's."""

    @classmethod
    def of(cls, layer: Conv1D) -> FrozenConv1D:
        made = cls(layer.nx, layer.nf, layer.bias is not None, device="meta", dtype=layer.weight.dtype)
        made.weight = nn.Parameter(torch.empty(layer.nx, layer.nf, device="meta", dtype=layer.weight.dtype))
        return made

    @property
    def matrix(self) -> Tensor:
        return self.weight.T
