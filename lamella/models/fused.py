"""Fused norms, gated MLPs and attention inputs in the place of a family's own modules.

A fused module holds its predecessor's children and parameters under their names, so binding, LoRA targets and
state dicts see no difference. It keeps less for backward, and its backward is written out.

Which modules are replaced is `prove.py`'s to say; a fused module hands every call it was not proven for back to the
family's own (`own_calls` counts them).

Shape suffixes: N = T tokens, H hidden, D head size, R rotated part of a head, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lamella.kernels import rows
from lamella.models.groups import LinearGroup


class Fused(nn.Module):
    """Stands in a module's place and shares its parameters, buffers and children."""

    own_calls = 0

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.__dict__["own"] = own  # not a child: names stay as they were
        for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[kind] = own.__dict__[kind]
        self.training = own.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["own"], name)

    def ask_own(self, *args: Any, **kwargs: Any) -> Any:
        """The family's own module: for calls this one was not proven on."""
        self.own_calls += 1
        return self.__dict__["own"](*args, **kwargs)


# ---- norm -----------------------------------------------------------------------------------------------------------


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, module: FusedNorm) -> Tensor:
        y_NH, rstd_N = rows.rms_norm(x_NH, module.weight, module.eps, module.offset)
        ctx.module = module
        ctx.save_for_backward(x_NH, rstd_N)
        return y_NH

    @staticmethod
    def backward(ctx: Any, dy_NH: Tensor) -> tuple[Tensor, None]:
        x_NH, rstd_N = ctx.saved_tensors
        return rows.rms_norm_backward(dy_NH, x_NH, ctx.module.weight, rstd_N, ctx.module.offset), None


class FusedNorm(Fused):
    """y = x / sqrt(mean(x^2) + eps) * (weight + offset)"""

    def __init__(self, own: nn.Module, eps: float, offset: float) -> None:
        super().__init__(own)
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        if not rows.takes(x) or self.weight.dtype != x.dtype:
            return self.ask_own(x)
        flat_NH = x.reshape(-1, x.shape[-1])
        y = _Norm.apply(flat_NH, self).view(x.shape)
        y.lamella_normed = Normed(flat_NH.detach(), self, y._version)
        return y


@dataclass(frozen=True)
class Normed:
    """What an output of a norm was made of. A fused module on it keeps x, which the norm keeps too, in its place and
    makes it again in backward, bit for bit."""

    x_NH: Tensor
    norm: FusedNorm
    version: int

    @staticmethod
    def of(y: Tensor) -> Normed | None:
        """None where y is no norm's output, or was changed since."""
        found = getattr(y, "lamella_normed", None)
        return found if found is not None and found.version == y._version else None


def _to_keep(x_NH: Tensor, normed: Normed | None) -> Tensor:
    return x_NH if normed is None else normed.x_NH


def _as_given(kept_NH: Tensor | None, norm: FusedNorm | None) -> Tensor | None:
    if kept_NH is None or norm is None:
        return kept_NH
    return rows.rms_norm(kept_NH, norm.weight, norm.eps, norm.offset)[0]


# ---- gated MLP ------------------------------------------------------------------------------------------------------


class _Mlp(torch.autograd.Function):
    """Keeps the input (where gate or up are adapted), gate and up; backward overwrites gate and up."""

    @staticmethod
    def forward(
        ctx: Any, x_NH: Tensor, module: FusedMlp, normed: Normed | None, keys_N: Tensor | None, *leaves: Tensor
    ) -> Tensor:
        first = leaves[: module.first_leaves()]
        both_NI, xa_NR = module.first.forward(x_NH, first, keys_N)
        inner = module.inner
        h_NI = rows.gated(both_NI[:, :inner], both_NI[:, inner:], module.activation)
        y_NH, ha_NR = module.down.forward(h_NI, leaves[len(first) :], keys_N)
        ctx.module, ctx.keys, ctx.split, ctx.norm = module, keys_N, len(first), None if normed is None else normed.norm
        ctx.save_for_backward(_to_keep(x_NH, normed) if first else None, both_NI, xa_NR, ha_NR, *leaves)
        return y_NH

    @staticmethod
    def backward(ctx: Any, dy_NH: Tensor) -> tuple[Tensor | None, ...]:
        kept_NH, both_NI, xa_NR, ha_NR, *leaves = ctx.saved_tensors
        module, keys, inner = ctx.module, ctx.keys, ctx.module.inner
        first, last = leaves[: ctx.split], leaves[ctx.split :]
        dy_NH = dy_NH.contiguous()
        dh_NI, dha_NR = module.down.input_gradient(dy_NH, last, keys)
        gate_NI, up_NI = both_NI[:, :inner], both_NI[:, inner:]
        h_NI = rows.gated_backward_(dh_NI, gate_NI, up_NI, module.activation, product=bool(last))
        last_grads = module.down.leaf_gradients(dy_NH, h_NI, ha_NR, dha_NR, last, keys)
        del dh_NI, h_NI
        dx_NH, dxa_NR = module.first.input_gradient(both_NI, first, keys, ctx.needs_input_grad[0])
        x_NH = _as_given(kept_NH, ctx.norm)
        first_grads = module.first.leaf_gradients(both_NI, x_NH, xa_NR, dxa_NR, first, keys)
        return dx_NH, None, None, None, *first_grads, *last_grads


class FusedMlp(Fused):
    """down(act(gate(x)) * up(x)); gate and up are two layers, or one that gives both.

    Args:
        first: names of the layers on the input: gate and up, or the one.
        activation: of `rows.ACTIVATIONS`.
    """

    def __init__(self, own: nn.Module, first: tuple[str, ...], activation: str) -> None:
        super().__init__(own)
        self.activation = activation
        self.first = LinearGroup([self._modules[name] for name in first])  # type: ignore[misc]
        self.down = LinearGroup([self._modules["down_proj"]])  # type: ignore[list-item]

    @property
    def inner(self) -> int:
        return self.down.inputs

    def first_leaves(self) -> int:
        return len(self.first.leaves())

    def forward(self, x: Tensor) -> Tensor:
        if not rows.takes(x):
            return self.ask_own(x)
        leaves = [*self.first.leaves(), *self.down.leaves()]
        keys_N = self.first.dropout_keys()
        keys_N = self.down.dropout_keys() if keys_N is None else keys_N
        flat_NH = x.reshape(-1, x.shape[-1])
        return _Mlp.apply(flat_NH, self, Normed.of(x), keys_N, *leaves).view(x.shape)


# ---- attention ------------------------------------------------------------------------------------------------------


class _HeadsIn(torch.autograd.Function):
    """Query, key and value of one input: projections, norms over the heads, rotary positions.

    Without norms the rotation happens where the projection lies, and nothing but the input is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NH: Tensor, cos_TR: Tensor, sin_TR: Tensor, module: FusedAttention, normed: Normed | None,
        keys_N: Tensor | None, *leaves: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        y_NO, xa_NR = module.group.forward(x_NH, leaves, keys_N)
        q_THD, k_THD, v_THD = module.heads(y_NO)
        raw_NO = None if module.q_form is None else y_NO
        if raw_NO is not None:
            turned = x_NH.new_empty(q_THD.shape[0], q_THD.shape[1] + k_THD.shape[1], q_THD.shape[2])
            q_out, k_out = turned[:, : q_THD.shape[1]], turned[:, q_THD.shape[1] :]
        else:
            q_out, k_out = q_THD, k_THD
        q_out = rows.rotate(q_THD, cos_TR, sin_TR, q_out, *module.norm_of("q"))
        k_out = rows.rotate(k_THD, cos_TR, sin_TR, k_out, *module.norm_of("k"))
        ctx.module, ctx.keys, ctx.norm = module, keys_N, None if normed is None else normed.norm
        ctx.save_for_backward(_to_keep(x_NH, normed) if leaves else None, xa_NR, raw_NO, cos_TR, sin_TR, *leaves)
        return q_out, k_out, v_THD

    @staticmethod
    def backward(ctx: Any, dq_THD: Tensor, dk_THD: Tensor, dv_THD: Tensor) -> tuple[Tensor | None, ...]:
        kept_NH, xa_NR, raw_NO, cos_TR, sin_TR, *leaves = ctx.saved_tensors
        module, keys = ctx.module, ctx.keys
        dy_NO = dq_THD.new_empty(dq_THD.shape[0], module.group.outputs)
        q_out, k_out, v_out = module.heads(dy_NO)
        q_raw, k_raw, _ = (None, None, None) if raw_NO is None else module.heads(raw_NO)
        rows.rotate_backward(dq_THD, cos_TR, sin_TR, q_out, q_raw, *module.norm_of("q"))
        rows.rotate_backward(dk_THD, cos_TR, sin_TR, k_out, k_raw, *module.norm_of("k"))
        v_out.copy_(dv_THD)
        del raw_NO, q_raw, k_raw
        dx_NH, dxa_NR = module.group.input_gradient(dy_NO, leaves, keys, ctx.needs_input_grad[0])
        x_NH = _as_given(kept_NH, ctx.norm)
        grads = module.group.leaf_gradients(dy_NO, x_NH, xa_NR, dxa_NR, leaves, keys)
        return dx_NH, None, None, None, None, None, *grads


class FusedAttention(Fused):
    """o_proj(attention(rotary(norm(q_proj(x))), rotary(norm(k_proj(x))), v_proj(x))), norms optional.

    Args:
        attend: attention function of transformers' interface.
        arguments: what the family passes it beside the call's own.
        q_form, k_form: (eps, offset) of the norm over each head, or None.
    """

    def __init__(
        self, own: nn.Module, attend: Callable[..., tuple[Tensor, None]], arguments: dict[str, Any],
        q_form: tuple[float, float] | None, k_form: tuple[float, float] | None, rotary: int,
    ) -> None:  # fmt: skip
        super().__init__(own)
        self.attend, self.arguments = attend, arguments
        self.q_form, self.k_form, self.rotary = q_form, k_form, rotary
        self.group = LinearGroup([self._modules[f"{x}_proj"] for x in "qkv"])  # type: ignore[misc]

    def heads(self, y_NO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, heads, D] views of query, key and value in the group's outputs."""
        size = int(self.head_dim)
        q, k, v = (y_NO[:, s].unflatten(1, (-1, size)) for s in self.group.slices)
        return q, k, v

    def norm_of(self, which: str) -> tuple[Tensor | None, float, float]:
        form = self.q_form if which == "q" else self.k_form
        if form is None:
            return None, 0.0, 0.0
        return self._modules[f"{which}_norm"].weight, *form  # type: ignore[union-attr, return-value]

    def _takes(self, x: Tensor, position_embeddings: Any, kwargs: dict[str, Any]) -> bool:
        if kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None:
            return False
        if not isinstance(position_embeddings, tuple) or len(position_embeddings) != 2:
            return False
        cos, sin = position_embeddings
        return (
            rows.takes(x) and x.dim() == 3 and x.shape[0] == 1 and cos.shape == sin.shape == (1, x.shape[1], self.rotary)
            and cos.dtype in rows.DTYPES
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if not self._takes(hidden_states, position_embeddings, kwargs):
            return self.ask_own(
                hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **kwargs
            )
        cos, sin = position_embeddings
        leaves = self.group.leaves()
        q_THD, k_THD, v_THD = _HeadsIn.apply(
            hidden_states[0], cos[0], sin[0], self, Normed.of(hidden_states), self.group.dropout_keys(), *leaves
        )
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
        out, _ = self.attend(self, q, k, v, attention_mask, **{**kwargs, **self.arguments})
        return self._modules["o_proj"](out.reshape(*hidden_states.shape[:2], -1)), None  # type: ignore[misc]
