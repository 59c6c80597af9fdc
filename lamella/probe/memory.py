"""Rates that memory sets: plain copies, and undoing NF4 at the shapes of real layers. Devices of any kind."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lamella.kernels import dequantize_nf4
from lamella.kernels.layout import ABSMAX_BLOCK, AbsmaxState, dynamic_code
from lamella.probe.timing import Effort, best_s

COPIED_BYTES = 256 << 20
"""Beyond caches on most machines."""
SHAPES = ((4096, 4096), (14336, 4096))
"""Of layers of an 8B model: an attention projection, an MLP projection."""
_BLOCK = 64


def copy_rate(device: torch.device, effort: Effort, nbytes: int = COPIED_BYTES) -> float:
    """Bytes read and written per second, together, of copies within the device's memory (a CPU's: with torch's threads)."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / best_s(_ended(device, lambda: target.copy_(source)), effort)


def dequantise_rate(device: torch.device, effort: Effort, shape: tuple[int, int]) -> float:
    """16-bit bytes written per second by the kernel that training uses, scales quantised twice."""
    n = shape[0] * shape[1]
    blocks = n // _BLOCK
    codes = torch.arange(n // 2, device=device).to(torch.uint8)
    state = AbsmaxState(
        q=torch.arange(blocks, device=device).to(torch.uint8),
        code=dynamic_code().to(device),
        absmax2=torch.full((-(-blocks // ABSMAX_BLOCK),), 0.01, device=device),
        offset=torch.tensor(0.02, device=device),
    )
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return 2 * n / best_s(_ended(device, lambda: dequantize_nf4(codes, state, out, _BLOCK)), effort)


def _ended(device: torch.device, work: Callable[[], object]) -> Callable[[], object]:
    """Work that is over when the call is."""
    if device.type != "cuda":
        return work

    def once() -> None:
        work()
        torch.cuda.synchronize(device)

    return once
