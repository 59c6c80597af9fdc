"""Memory that all measured shapes share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ALIKE = 1 << 16


class Pool:
    """Tensors of small random numbers by what they are used as; those of one use overlap."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype
        self._numbers = (torch.randn(_ALIKE, generator=torch.Generator().manual_seed(0)) * 0.1).to(dtype)
        self._held: dict[str, Tensor] = {}

    def tensor(self, use: str, *shape: int) -> Tensor:
        """The same numbers come again after 65,536: drawing them would take longer than what is measured."""
        held, numel = self._held.get(use), math.prod(shape)
        if held is None or held.numel() < numel:
            held = self._held[use] = self._numbers.repeat(-(-numel // _ALIKE))
        return held[:numel].view(shape)
