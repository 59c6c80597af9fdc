"""Causal attention over packed sequences on a CUDA device, through a kernel that takes their borders.

flash-attn's function where that package is installed, else torch's (`torch.nn.attention.varlen`, torch 2.11 and later).
Both take keys and values with fewer heads as they are, and no padding is computed. Their backward adds in any order unless
told otherwise; here it is told, so a run gives the same bits twice.

Shape suffixes: T tokens, H heads, K kv heads, D head size.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, int | None], Tensor]
"""q [T, H, D], k and v [T, K, D], borders int32 [S + 1], longest sequence, scale, window -> [T, H, D]"""


def _flash_attn() -> Varlen:
    from flash_attn import flash_attn_varlen_func

    def run(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float, window: int | None) -> Tensor:
        left, right = (window - 1, 0) if window is not None else (-1, -1)
        out: Tensor = flash_attn_varlen_func(
            q, k, v, starts, starts, longest, longest, dropout_p=0.0, softmax_scale=scale, causal=True,
            window_size=(left, right), deterministic=True,
        )  # fmt: skip
        return out

    return run


def _torch() -> Varlen | None:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known or "scale" not in known:
        return None
    more: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}

    def run(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float, window: int | None) -> Tensor:
        left = window - 1 if window is not None else -1
        out = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(left, 0), **more)
        assert isinstance(out, Tensor)
        return out

    return run


@cache
def _resolved(index: int) -> tuple[str, Varlen | None]:
    if torch.cuda.get_device_capability(index) >= (8, 0):
        if importlib.util.find_spec("flash_attn") is not None:
            return "flash-attn varlen", _flash_attn()
        varlen = _torch()
        if varlen is not None:
            return "torch varlen", varlen
    return "scaled_dot_product_attention", None


def kernel(device: torch.device) -> str:
    """Which kernel plain causal attention in 16 bit takes on this CUDA device, for the receipt."""
    return _resolved(device.index)[0]


def varlen(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float, window: int | None
) -> Tensor | None:
    """Causal attention of each sequence with itself, or None where no such kernel takes these tensors.

    Args:
        query: [1, H, T, D]; key, value: [1, K, T, D].
        starts: int32 [S + 1].
        window: tokens seen back, the own one included; None: all.

    Returns:
        [1, T, H, D].
    """
    size = query.shape[-1]
    if not query.is_cuda or query.dtype == torch.float32 or size % 8 or size > 256 or value.shape[-1] != size:
        return None
    run = _resolved(query.device.index)[1]
    if run is None:
        return None
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return run(q, k, v, starts, longest, scale, window)[None]


_deterministic_before = False


class _Fence(torch.autograd.Function):
    """Identity whose backward turns torch's deterministic algorithms on, or back to what they were."""

    @staticmethod
    def forward(ctx: Any, on: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.on = on
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        global _deterministic_before
        if ctx.on:
            _deterministic_before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(ctx.on or _deterministic_before)
        return None, *grads


def fenced(run: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`run(query, key, value)` whose backward uses deterministic algorithms alone (attention's would add with atomics)."""
    if not any(t.requires_grad for t in (query, key, value)):
        return run(query, key, value)
    query, key, value = _Fence.apply(False, query, key, value)
    (out,) = _Fence.apply(True, run(query, key, value))
    return out
