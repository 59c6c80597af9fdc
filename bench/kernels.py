"""NF4, int8 and MXFP4 kernels beside bitsandbytes and transformers on this CPU, in one process: `python -m bench.kernels`.

One JSON line a case. Rates are medians, all cores; the sides take turns, a few calls in a row each, the first of
which is not counted: either side leaves caches, page tables and sleeping threads that are not the other's doing. `ours` writes into a
buffer that is reused, as the layer walk does. NF4's peer is measured twice: as its API must be used
(a fresh output each time) and at its best (its C entry point called directly into a reused buffer). int8's is bitsandbytes'
row-wise format (one scale a row), MXFP4's the function by which transformers undoes GPT-OSS' experts.
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
import transformers
from bitsandbytes import functional as peer
from bitsandbytes.cextension import lib as peer_lib
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

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
    peer_name: str = f"bitsandbytes {bitsandbytes.__version__}"


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
        "peer_name": case.peer_name,
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


def int8_cases(label: str, n: int, repeats: int) -> Iterator[Case]:
    weight = torch.randn(n // 1024, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    out = torch.zeros_like(weight)
    amount = out.numel() * out.element_size()
    for block in (1024, BLOCK_SIZE):
        codes, scales = kernels.quantize_int8(weight, block)
        name = f"int8 {'a row' if block == 1024 else f'blocks of {block}'} {label}"

        def ours(codes: Tensor = codes, scales: Tensor = scales, block: int = block) -> object:
            return kernels.dequantize_int8(codes, scales, out, block)

        def make(codes: Tensor = codes, scales: Tensor = scales, block: int = block) -> object:
            return kernels.quantize_int8(weight, block, codes=codes, scales=scales)

        rows, absmax = codes.view(weight.shape), weight.abs().amax(1).float()

        def undone(rows: Tensor = rows, absmax: Tensor = absmax) -> object:
            return peer.int8_vectorwise_dequant(rows, absmax).to(torch.bfloat16)

        half = weight.half()

        def made(half: Tensor = half) -> object:
            return peer.int8_vectorwise_quant(half)

        yield Case(f"dequantize bf16 {name}", "GB/s out", amount, ours, undone, "int8_vectorwise_dequant, a row, to bf16",
                   None, repeats)  # fmt: skip
        yield Case(f"quantize bfloat16 {name}", "G elements/s", n, make, made, "int8_vectorwise_quant, a row, fp16", None,
                   repeats)  # fmt: skip


def mxfp4_cases(label: str, n: int, repeats: int) -> Iterator[Case]:
    weight = torch.randn(4, n // 4096, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    out = torch.zeros_like(weight)
    codes, scales = kernels.quantize_mxfp4(weight)
    blocks, exponents = codes.view(4, n // 4096, 32, 16), scales.view(4, n // 4096, 32)

    def ours() -> object:
        return kernels.dequantize_mxfp4(codes, scales, out)

    def undone() -> object:
        return convert_moe_packed_tensors(blocks, exponents, dtype=torch.bfloat16)

    def make() -> object:
        return kernels.quantize_mxfp4(weight, codes=codes, scales=scales)

    nf4_codes, nf4_absmax = kernels.quantize_nf4(weight, 64)

    def nf4() -> object:
        return kernels.quantize_nf4(weight, 64, codes=nf4_codes, absmax=nf4_absmax)

    ours()
    assert torch.equal(out.transpose(1, 2), convert_moe_packed_tensors(blocks, exponents, dtype=torch.bfloat16))
    their_name = f"transformers {transformers.__version__}"
    yield Case(f"dequantize bf16 mxfp4 {label}", "GB/s out", out.numel() * 2, ours, undone,
               "convert_moe_packed_tensors, fresh output", None, repeats, their_name)  # fmt: skip
    yield Case(f"quantize bfloat16 mxfp4 {label}", "G elements/s", n, make, nf4, "our own NF4, blocks of 64", None, repeats,
               "lamella")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--only", choices=("dequantize", "quantize", "int8", "mxfp4"))
    args = parser.parse_args()
    for label in args.sizes:
        n = SIZES[label]
        small = n < 1 << 24
        makers = {
            "dequantize": lambda label=label, n=n, small=small: dequantize_cases(label, n, 200 if small else 21),
            "quantize": lambda label=label, n=n, small=small: quantize_cases(label, n, 21 if small else 5),
            "int8": lambda label=label, n=n, small=small: int8_cases(label, n, 100 if small else 11),
            "mxfp4": lambda label=label, n=n, small=small: mxfp4_cases(label, n, 100 if small else 11),
        }
        for kind, make in makers.items():
            if args.only in (None, kind):
                for case in make():
                    print(json.dumps(measure(case)), flush=True)


if __name__ == "__main__":
    main()
