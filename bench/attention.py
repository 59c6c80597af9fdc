"""Causal attention of short rows, forward and backward, beside `scaled_dot_product_attention`: `python -m bench.attention`.

One JSON line a case; seconds are medians, one thread, bf16. `SHORT_CPU` in `lamella/models/attention.py` rests on these.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lamella.models.attention import _short_attention

CASES = ((8, 80), (4, 160), (2, 320), (2, 512), (1, 1024))
HEADS, SIZE = 9, 64


def seconds(attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], grad: Tensor) -> float:
    taken = []
    for _ in range(6):
        start_s = time.perf_counter()
        attend(*(x.detach().requires_grad_() for x in inputs)).backward(grad)
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken[1:])


def main() -> None:
    torch.set_num_threads(1)
    for rows, length in CASES:
        *inputs, grad = (torch.randn(rows, HEADS, length, SIZE, dtype=torch.bfloat16) for _ in range(4))
        ours_s = seconds(lambda q, k, v: _short_attention(q, k, v, SIZE**-0.5), inputs, grad)
        peer_s = seconds(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, grad)
        line = {"case": f"{rows} x {length} tokens", "ours": ours_s, "peer": peer_s, "ratio": round(peer_s / ours_s, 2),
                "peer_name": f"torch {torch.__version__} scaled_dot_product_attention", "threads": 1}  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
