"""A linear layer with LoRA in its epilogue: y = x W^T + bias + scale xa B^T in one kernel, y written once.

The product is the grouped kernel's with one group. Where the library's matmul is so much faster that a second pass over y
costs less (Hopper and later), `choose` says so: `models/linear.py` then multiplies with the library and adds LoRA after.

Shape suffixes: N rows, I inputs, O outputs, r rank.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lamella.kernels.triton.grouped import Groups, Tiling, _launch, tiling_of

LIBRARY_CAPABILITY = (9, 0)
"""From this compute capability on the library's matmul uses instructions that the kernel here does not schedule as well.
`python -m bench.gpu --only lora` measures both."""


def choose(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `lora_linear` is used rather than the library's matmul and a second pass."""
    if device.type != "cuda":
        return True
    return dtype != torch.float32 and torch.cuda.get_device_capability(device) < LIBRARY_CAPABILITY


@lru_cache(maxsize=64)
def _one_group(rows: int, device: torch.device) -> Groups:
    return Groups(torch.tensor([0, rows], dtype=torch.int32).to(device), rows)


def lora_linear(
    x_NI: Tensor, w_OI: Tensor, xa_Nr: Tensor, b_Or: Tensor, scale: float, bias_O: Tensor | None = None, *,
    tiling: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """y = x W^T + bias + scale xa B^T, [N, O] in x's dtype, summed in fp32.

    Args:
        xa_Nr: input of B: x (or what dropout left of it) times A^T.
    """
    groups = _one_group(x_NI.shape[0], x_NI.device)
    return _launch(
        x_NI.contiguous(), w_OI.T[None], groups, x_NI.new_empty(x_NI.shape[0], w_OI.shape[0]),
        tiling or tiling_of(x_NI.device, x_NI.dtype), low_Sr=xa_Nr, factor_ErN=b_Or.T[None], scale=scale,
        bias_EN=None if bias_O is None else bias_O[None],
    )  # fmt: skip
