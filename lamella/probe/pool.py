"""Memory that all measured shapes share."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

REGION_BYTES = 1 << 27
"""Of each use: a step's tensors come from all over its memory, so the next run finds its own elsewhere, past the caches."""
_ALIKE = 1 << 16
_MOST_VIEWS = 64
_ALIGN = 32


class Pool:
    """Tensors of small random numbers by what they are used as; those of one use overlap."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, region_bytes: int = REGION_BYTES) -> None:
        self.dtype, self.region = dtype, region_bytes // dtype.itemsize
        self._numbers = (torch.randn(_ALIKE, generator=torch.Generator().manual_seed(0)) * 0.1).to(dtype)
        self._held: dict[str, Tensor] = {}

    def _memory(self, use: str, numel: int) -> Tensor:
        held = self._held.get(use)
        if held is None or held.numel() < numel:
            held = self._held[use] = self._numbers.repeat(-(-numel // _ALIKE))
        return held

    def tensor(self, use: str, *shape: int) -> Tensor:
        """Always the same memory. Numbers come again after 65,536: drawing them would take longer than what is measured."""
        numel = math.prod(shape)
        return self._memory(use, numel)[:numel].view(shape)

    def turning(self, use: str, *shape: int) -> Callable[[], Tensor]:
        """The next tensor of this shape each time it is asked."""
        numel = math.prod(shape)
        memory = self._memory(use, max(numel, self.region))
        apart = -(-numel // _ALIGN) * _ALIGN
        starts = range(0, memory.numel() - numel + 1, apart)[:_MOST_VIEWS]
        return cycle([memory[at : at + numel].view(shape) for at in starts]).__next__
