"""Causal attention, forward and backward, three ways: `python -m bench.attention [--threads N]`.

`kernels` is what a bf16 engine uses (`lamella/kernels/attention.py`; one line for each way this machine can compute
it), `matmul` and `sdpa` are torch's: scores written out, and `scaled_dot_product_attention`. One JSON line a case;
seconds are the least over runs taken in turns, so that a busy machine disturbs all alike. `ratio` is the time of the best of
torch over the time of the best kernel. `SHORT_CPU` in `lamella/models/attention.py` rests on `matmul` and `sdpa`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lamella.kernels import attention as kernels
from lamella.models.attention import _short_attention

CASES = (  # rows, tokens, heads, kv heads, size
    (8, 80, 9, 3, 64), (2, 320, 9, 3, 64), (2, 512, 12, 12, 64), (2, 512, 8, 4, 64), (1, 2048, 8, 2, 128), (1, 8192, 4, 1, 64),
)  # fmt: skip
MATMUL_TOKENS = 2048
RUNS = 9


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _short_attention(q, k, v, q.shape[-1] ** -0.5)


def torch_way(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor], rows: int
) -> Callable[[], tuple]:
    """Forward and backward of torch's functions; their [n, H, L, D] layout is made beforehand."""
    *inputs, grad = (x.unflatten(0, (rows, -1)).transpose(1, 2).contiguous() for x in tensors)

    def run() -> tuple[float, float]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        start_s = time.perf_counter()
        out = attend(*leaves)
        middle_s = time.perf_counter()
        out.backward(grad)
        return middle_s - start_s, time.perf_counter() - middle_s

    return run


def kernel_way(name: str, tensors: list[Tensor], rows: int) -> Callable[[], tuple]:
    *qkv, grad = tensors
    q, k, v = (x.transpose(0, 1) for x in qkv)
    tokens = len(grad)
    length = tokens // rows
    index = torch.arange(tokens)
    segments = kernels.Segments.of(index // length * length + length, index % length, torch.arange(rows + 1) * length)
    scale = q.shape[-1] ** -0.5

    def run() -> tuple[float, float]:
        start_s = time.perf_counter()
        out, lse = kernels.forward(q, k, v, segments, scale, name=name)
        middle_s = time.perf_counter()
        kernels.backward(grad, q, k, v, out, lse, segments, scale, name=name)
        return middle_s - start_s, time.perf_counter() - middle_s

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    for rows, length, heads, kv_heads, size in CASES:
        tensors = [
            torch.randn(rows * length, h, size, dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads, heads)
        ]
        ways = {"sdpa": torch_way(sdpa, tensors, rows)}
        if length <= MATMUL_TOKENS:
            ways["matmul"] = torch_way(matmul, tensors, rows)
        for name in kernels.supported():
            ways[f"kernels {name}"] = kernel_way(name, tensors, rows)
        taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(RUNS):
            for way, run in ways.items():
                taken[way].append(run())
        least = {way: [min(part) for part in zip(*runs, strict=True)] for way, runs in taken.items()}
        total = {way: sum(parts) for way, parts in least.items()}
        ours = min((s for way, s in total.items() if way.startswith("kernels")), default=None)
        theirs = min(s for way, s in total.items() if not way.startswith("kernels"))
        line = {
            "case": f"{rows} x {length} tokens, {heads} heads of {size}, {kv_heads} kv heads", "threads": threads,
            "forward_backward_s": {way: [round(s, 6) for s in parts] for way, parts in least.items()},
            "ratio": round(theirs / ours, 2) if ours else None, "peer": f"torch {torch.__version__}",
        }  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
