"""The rate at which this machine multiplies large matrices, measured in the running process: what utilisation is a
share of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SIZE_CPU, SIZE_CUDA = 2048, 8192
"""Rows, columns and inner size of the product: beyond caches, small beside a layer's memory."""
_AT_LEAST, _ENOUGH_S = 3, 0.2


@dataclass(frozen=True)
class MatmulRate:
    """FLOP/s of `torch.mm` of two square matrices.

    Attributes:
        best, median: FLOP/s over a few runs; `best` is the machine's rate, as other processes can only slow a run down.
        size: rows, columns and inner size; dtype, device: names; threads: of torch.
    """

    best: float
    median: float
    size: int
    dtype: str
    device: str
    threads: int


def native_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device multiplies it natively, else fp32."""
    if device.type == "cpu":
        capabilities = torch.backends.cpu.get_cpu_capability()
        native = torch.cpu._is_avx512_bf16_supported() if hasattr(torch.cpu, "_is_avx512_bf16_supported") else False
        return torch.bfloat16 if native and capabilities.startswith("AVX512") else torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32


_measured: dict[tuple[str, torch.dtype, int], MatmulRate] = {}


def matmul_rate(device: torch.device, dtype: torch.dtype) -> MatmulRate:
    """Rate of this device in this dtype with the threads in use; measured once per process (0.2 s or little more)."""
    key = str(device), dtype, torch.get_num_threads()
    if key not in _measured:
        size = SIZE_CUDA if device.type == "cuda" else SIZE_CPU
        a, b = (torch.full((size, size), x, dtype=dtype, device=device) for x in (0.5, 0.25))
        out = torch.empty(size, size, dtype=dtype, device=device)

        def once() -> None:
            torch.mm(a, b, out=out)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        times = _timed(once)
        flops = 2.0 * size**3
        name = str(dtype).removeprefix("torch.")
        _measured[key] = MatmulRate(flops / min(times), flops / statistics.median(times), size, name, key[0], key[2])
    return _measured[key]


def _timed(once: Callable[[], None]) -> list[float]:
    """Seconds of each run after one that is not counted: three runs at least, and more until 0.2 s are spent."""
    once()
    times: list[float] = []
    while len(times) < _AT_LEAST or sum(times) < _ENOUGH_S:
        start_s = time.perf_counter()
        once()
        times.append(time.perf_counter() - start_s)
    return times
