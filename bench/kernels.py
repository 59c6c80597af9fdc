"""NF4 kernels beside bitsandbytes on this CPU, in one process: `python -m bench.kernels`.

One JSON line a case. Rates are medians, all cores; the sides take turns, a few calls in a row each, the first of
which is not counted: either side leaves caches, page tables and sleeping threads that are not the other's doing. `ours` writes into a
buffer that is reused, as the layer walk does. The peer is measured twice: as its API must be used
(a fresh output each time) and at its best (its C entry point called directly into a reused buffer).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import bitsandbytes
import torch
from bitsandbytes import functional as peer
from bitsandbytes.cextension import lib as peer_lib
from torch import Tensor

from lamella import kernels

SIZES = {"0.5M": 1 << 19, "16M": 1 << 24, "64M": 1 << 26}
BLOCK_SIZE = 64


@dataclass(frozen=True)
class Case:
    """Two ways to do the same work on `n` elements; `amount` is what the rate counts, in units of 1e9."""

    name: str
    unit: str
    amount: float
    ours: Callable[[], object]
    peer: Callable[[], object]
    settings: str
    bar: float | None
    repeats: int


def seconds(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def turn(run: Callable[[], object], calls: int) -> list[float]:
    run()
    return [seconds(run) for _ in range(calls)]


def measure(case: Case) -> dict[str, object]:
    calls = max(2, case.repeats // 5)
    turns = [(turn(case.ours, calls), turn(case.peer, calls)) for _ in range(-(-case.repeats // calls))]
    ours_s = statistics.median(s for ours, _ in turns for s in ours)
    peer_s = statistics.median(s for _, theirs in turns for s in theirs)
    result: dict[str, object] = {
        "case": case.name,
        "unit": case.unit,
        "ours": round(case.amount / ours_s / 1e9, 2),
        "peer": round(case.amount / peer_s / 1e9, 3),
        "ratio": round(peer_s / ours_s, 2),
        "ours_s": ours_s,
        "peer_s": peer_s,
        "peer_name": f"bitsandbytes {bitsandbytes.__version__}",
        "peer_settings": case.settings,
        "backend": kernels.backend(),
        "threads": torch.get_num_threads(),
        "repeats": case.repeats,
    }
    if case.bar is not None:
        result |= {"bar": case.bar, "met": peer_s / ours_s >= case.bar}
    return result


def peer_direct(codes: Tensor, absmax: Tensor, out: Tensor) -> None:
    """bitsandbytes' C function on a given output, past its Python."""
    peer_lib.cdequantize_blockwise_cpu_nf4_bf16(
        ctypes.c_void_p(codes.data_ptr()), ctypes.c_void_p(absmax.data_ptr()), ctypes.c_void_p(out.data_ptr()),
        ctypes.c_longlong(BLOCK_SIZE), ctypes.c_longlong(out.shape[0]), ctypes.c_longlong(out.shape[1]),
    )  # fmt: skip


def dequantize_cases(label: str, n: int, repeats: int) -> Iterator[Case]:
    weight = torch.randn(n // 1024, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    bar = 3.0 if n < 1 << 24 else 10.0
    out = torch.zeros_like(weight)
    amount = out.numel() * out.element_size()
    for double in (False, True):
        codes, state = peer.quantize_4bit(weight, blocksize=BLOCK_SIZE, quant_type="nf4", compress_statistics=double)
        nested = (
            kernels.AbsmaxState(state.absmax, state.state2.code, state.state2.absmax, state.offset) if double else None
        )
        absmax = state.absmax if nested is None else kernels.dequantize_absmax(nested)
        name = f"dequantize bf16 {label}{' double' if double else ''}"

        def ours(codes: Tensor = codes, scales: Tensor | kernels.AbsmaxState = nested or absmax) -> object:
            return kernels.dequantize_nf4(codes, scales, out, BLOCK_SIZE)

        def fresh(codes: Tensor = codes, scales: Tensor | kernels.AbsmaxState = nested or absmax) -> object:
            return kernels.dequantize_nf4(codes, scales, torch.empty_like(out), BLOCK_SIZE)

        def api(codes: Tensor = codes, state: object = state) -> object:
            return peer.dequantize_4bit(codes, state)

        assert torch.equal(ours(), api())
        yield Case(name, "GB/s out", amount, ours, api, "dequantize_4bit, fresh output (its API)", bar, repeats)
        yield Case(
            f"{name}, ours fresh too", "GB/s out", amount, fresh, api, "dequantize_4bit, fresh output", None, repeats
        )
        if not double:

            def direct(codes: Tensor = codes, absmax: Tensor = absmax) -> object:
                return peer_direct(codes, absmax, out)

            yield Case(f"{name}, peer at its best", "GB/s out", amount, ours, direct,
                       "its C function into a reused output", None, repeats)  # fmt: skip


def quantize_cases(label: str, n: int, repeats: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(n // 1024, 1024, generator=generator).to(dtype)
        codes, absmax = kernels.quantize_nf4(weight, BLOCK_SIZE)
        for double in (False, True):

            def ours(
                weight: Tensor = weight, double: bool = double, codes: Tensor = codes, absmax: Tensor = absmax
            ) -> object:
                kernels.quantize_nf4(weight, BLOCK_SIZE, codes=codes, absmax=absmax)
                return kernels.quantize_absmax(absmax) if double else absmax

            def api(weight: Tensor = weight, double: bool = double) -> object:
                return peer.quantize_4bit(weight, blocksize=BLOCK_SIZE, quant_type="nf4", compress_statistics=double)

            name = f"quantize {str(dtype).removeprefix('torch.')} {label}{' double' if double else ''}"
            yield Case(
                name, "G elements/s", n, ours, api, f"quantize_4bit, compress_statistics={double}", 20.0, repeats
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--only", choices=("dequantize", "quantize"))
    args = parser.parse_args()
    for label in args.sizes:
        n = SIZES[label]
        small = n < 1 << 24
        makers = {
            "dequantize": lambda label=label, n=n, small=small: dequantize_cases(label, n, 200 if small else 21),
            "quantize": lambda label=label, n=n, small=small: quantize_cases(label, n, 21 if small else 5),
        }
        for kind, make in makers.items():
            if args.only in (None, kind):
                for case in make():
                    print(json.dumps(measure(case)), flush=True)


if __name__ == "__main__":
    main()
