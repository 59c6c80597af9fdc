"""The row-wise parts of a decoder layer on CPU tensors: one C kernel each, forward and backward.

bf16 or fp32 in memory, fp32 inside. They need AVX-512 with bf16 conversions (`supported`); `rows_reference.py` says
the same in plain torch. Results do not depend on the number of threads.

Shape suffixes: N rows or tokens, H width, T tokens, D head size, R rotated part of a head, I inner size, V vocabulary.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from lamella import kernels
from lamella.kernels import build, library

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


@cache
def _lib() -> ctypes.CDLL | None:
    if kernels.backend() != "c-avx512":
        return None
    lib = library.load(build.find() or build.build())
    if not lib.lamella_rows_supported():
        return None
    p, f, i, n = c_void_p, c_float, c_int, c_int64
    lib.lamella_rms_norm.argtypes = [p, p, f, f, p, p, n, n, i, i, i]
    lib.lamella_rms_norm_backward.argtypes = [p, p, p, f, p, p, n, n, i, i, i]
    lib.lamella_rotate.argtypes = [p, n, n, p, f, f, p, p, n, p, n, n, n, n, n, i, i, i, i]
    lib.lamella_rotate_backward.argtypes = [p, n, n, p, n, n, p, f, f, p, p, n, p, n, n, n, n, n, i, i, i, i]
    lib.lamella_gated.argtypes = [p, n, p, n, p, n, n, i, i, i]
    lib.lamella_gated_backward.argtypes = [p, p, n, p, n, p, p, p, n, n, i, i, i]
    lib.lamella_cross_entropy.argtypes = [p, p, f, p, n, n, i, i]
    lib.lamella_peak.argtypes = [p, n, i, i]
    lib.lamella_peak.restype = f
    for name in (
        "rms_norm",
        "rms_norm_backward",
        "rotate",
        "rotate_backward",
        "gated",
        "gated_backward",
        "cross_entropy",
    ):
        getattr(lib, f"lamella_{name}").restype = None
    return lib


def supported() -> bool:
    """Whether these kernels can run here."""
    return _lib() is not None


def takes(x: Tensor) -> bool:
    """Whether these kernels can work on such a tensor."""
    return x.device.type == "cpu" and x.dtype in DTYPES and supported()


def head_max() -> int:
    """Largest head size `rotate` takes."""
    return int(_need().lamella_head_max())


def _need() -> ctypes.CDLL:
    lib = _lib()
    assert lib is not None, "ask supported() first"
    return lib


def _threads() -> int:
    return torch.get_num_threads()


def _check(dtype: torch.dtype, *tensors: Tensor) -> None:
    for t in tensors:
        assert t.dtype == dtype, (t.dtype, dtype)
        assert t.device.type == "cpu"


def rms_norm(x_NH: Tensor, weight_H: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """y = x / sqrt(mean(x^2) + eps) * (weight + offset), and fp32 [N] of the inverse roots (Zhang, Sennrich 2019)."""
    x_NH, weight_H = x_NH.contiguous(), weight_H.contiguous()
    rows, width = x_NH.shape
    assert weight_H.shape == (width,)
    y_NH = torch.empty_like(x_NH)
    rstd_N = torch.empty(rows, dtype=torch.float32)
    _need().lamella_rms_norm(
        x_NH.data_ptr(), weight_H.data_ptr(), eps, offset, y_NH.data_ptr(), rstd_N.data_ptr(), rows, width,
        DTYPES[x_NH.dtype], DTYPES[weight_H.dtype], _threads(),
    )  # fmt: skip
    return y_NH, rstd_N


def rms_norm_backward(dy_NH: Tensor, x_NH: Tensor, weight_H: Tensor, rstd_N: Tensor, offset: float = 0.0) -> Tensor:
    """Gradient at x of `rms_norm`."""
    _check(x_NH.dtype, dy_NH)
    dy_NH, x_NH, weight_H = dy_NH.contiguous(), x_NH.contiguous(), weight_H.contiguous()
    rows, width = x_NH.shape
    assert dy_NH.shape == x_NH.shape
    dx_NH = torch.empty_like(x_NH)
    _need().lamella_rms_norm_backward(
        dy_NH.data_ptr(), x_NH.data_ptr(), weight_H.data_ptr(), offset, rstd_N.data_ptr(), dx_NH.data_ptr(), rows,
        width, DTYPES[x_NH.dtype], DTYPES[weight_H.dtype], _threads(),
    )  # fmt: skip
    return dx_NH


def _heads(x_THD: Tensor) -> Tensor:
    return x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()


def _tables(cos_TR: Tensor, sin_TR: Tensor, tokens: int, size: int) -> tuple[Tensor, Tensor, int]:
    rotary = cos_TR.shape[1]
    assert cos_TR.shape == sin_TR.shape == (tokens, rotary), (cos_TR.shape, tokens)
    assert rotary % 2 == 0
    assert rotary <= size <= head_max()
    assert cos_TR.dtype == sin_TR.dtype
    return cos_TR.contiguous(), sin_TR.contiguous(), rotary


def rotate(
    x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, out_THD: Tensor, weight_D: Tensor | None = None, eps: float = 0.0,
    offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """Norm over each head (with a weight), then rotary positions on its first R values, in halves (Su et al. 2021).

    Args:
        x_THD: any strides over tokens and heads.
        cos_TR, sin_TR: per token, the angle of value i standing at i and R / 2 + i.
        out_THD: where to write; may be `x_THD` itself.
    """
    tokens, heads, size = x_THD.shape
    _check(x_THD.dtype, out_THD)
    assert x_THD.stride(2) == out_THD.stride(2) == 1
    assert out_THD.shape == x_THD.shape
    cos_TR, sin_TR, rotary = _tables(cos_TR, sin_TR, tokens, size)
    weight_D = None if weight_D is None else weight_D.contiguous()
    _need().lamella_rotate(
        x_THD.data_ptr(), x_THD.stride(0), x_THD.stride(1), None if weight_D is None else weight_D.data_ptr(), eps, offset,
        cos_TR.data_ptr(), sin_TR.data_ptr(), rotary, out_THD.data_ptr(), out_THD.stride(0), out_THD.stride(1), tokens,
        heads, size, DTYPES[x_THD.dtype], DTYPES[(x_THD if weight_D is None else weight_D).dtype], DTYPES[cos_TR.dtype],
        _threads(),
    )  # fmt: skip
    return out_THD


def rotate_backward(
    dy_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, out_THD: Tensor, x_THD: Tensor | None = None,
    weight_D: Tensor | None = None, eps: float = 0.0, offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """Gradient at x of `rotate`, into `out_THD` (which may be `dy_THD`, or `x_THD` where there is a norm).

    Args:
        x_THD: what `rotate` was given; needed where there is a norm.
    """
    tokens, heads, size = dy_THD.shape
    assert (weight_D is None) == (x_THD is None)
    dy_THD = _heads(dy_THD)
    x_THD = dy_THD if x_THD is None else x_THD
    _check(dy_THD.dtype, out_THD, x_THD)
    assert out_THD.shape == x_THD.shape == dy_THD.shape
    assert x_THD.stride(2) == out_THD.stride(2) == 1
    cos_TR, sin_TR, rotary = _tables(cos_TR, sin_TR, tokens, size)
    weight_D = None if weight_D is None else weight_D.contiguous()
    _need().lamella_rotate_backward(
        dy_THD.data_ptr(), dy_THD.stride(0), dy_THD.stride(1), x_THD.data_ptr(), x_THD.stride(0), x_THD.stride(1),
        None if weight_D is None else weight_D.data_ptr(), eps, offset, cos_TR.data_ptr(), sin_TR.data_ptr(), rotary,
        out_THD.data_ptr(), out_THD.stride(0), out_THD.stride(1), tokens, heads, size, DTYPES[dy_THD.dtype],
        DTYPES[(x_THD if weight_D is None else weight_D).dtype], DTYPES[cos_TR.dtype], _threads(),
    )  # fmt: skip
    return out_THD


def _gated_shapes(gate_NI: Tensor, up_NI: Tensor) -> tuple[int, int]:
    _check(gate_NI.dtype, up_NI)
    assert gate_NI.shape == up_NI.shape
    assert gate_NI.stride(1) == up_NI.stride(1) == 1
    rows, width = gate_NI.shape
    return rows, width


def gated(gate_NI: Tensor, up_NI: Tensor, activation: str) -> Tensor:
    """act(gate) * up, [N, I] contiguous; gate and up may be halves of one [N, 2I].

    Args:
        activation: `silu`, `gelu_tanh` or `gelu`.
    """
    rows, width = _gated_shapes(gate_NI, up_NI)
    h_NI = torch.empty(rows, width, dtype=gate_NI.dtype)
    _need().lamella_gated(
        gate_NI.data_ptr(), gate_NI.stride(0), up_NI.data_ptr(), up_NI.stride(0), h_NI.data_ptr(), rows, width,
        ACTIVATIONS[activation], DTYPES[gate_NI.dtype], _threads(),
    )  # fmt: skip
    return h_NI


def gated_backward_(
    dh_NI: Tensor, gate_NI: Tensor, up_NI: Tensor, activation: str, *, product: bool = False
) -> Tensor | None:
    """Overwrite gate and up with their gradients.

    Args:
        product: also give act(gate) * up again.
    """
    rows, width = _gated_shapes(gate_NI, up_NI)
    _check(gate_NI.dtype, dh_NI)
    dh_NI = dh_NI.contiguous()
    assert dh_NI.shape == gate_NI.shape
    h_NI = torch.empty_like(dh_NI) if product else None
    _need().lamella_gated_backward(
        dh_NI.data_ptr(), gate_NI.data_ptr(), gate_NI.stride(0), up_NI.data_ptr(), up_NI.stride(0), gate_NI.data_ptr(),
        up_NI.data_ptr(), None if h_NI is None else h_NI.data_ptr(), rows, width, ACTIVATIONS[activation],
        DTYPES[gate_NI.dtype], _threads(),
    )  # fmt: skip
    return h_NI


def cross_entropy_(logits_NV: Tensor, targets_N: Tensor, scale: float) -> Tensor:
    """Overwrite logits with scale * (softmax - onehot), the gradient of scale * loss.

    Args:
        logits_NV: contiguous, bf16 or fp32.
        targets_N: int64, each in [0, V).

    Returns:
        -log p of the targets, fp64 [N].
    """
    rows, vocabulary = logits_NV.shape
    targets_N = targets_N.contiguous()
    assert logits_NV.is_contiguous()
    assert targets_N.shape == (rows,)
    assert targets_N.dtype == torch.int64
    assert not rows or (int(targets_N.min()) >= 0 and int(targets_N.max()) < vocabulary), "target beyond the vocabulary"
    loss_N = torch.empty(rows, dtype=torch.float64)
    _need().lamella_cross_entropy(
        logits_NV.data_ptr(), targets_N.data_ptr(), scale, loss_N.data_ptr(), rows, vocabulary,
        DTYPES[logits_NV.dtype], _threads(),
    )  # fmt: skip
    return loss_N


def peak(x: Tensor) -> float:
    """Largest |value|; NaN where one is NaN."""
    x = x.contiguous()
    return float(_need().lamella_peak(x.data_ptr(), x.numel(), DTYPES[x.dtype], _threads()))
