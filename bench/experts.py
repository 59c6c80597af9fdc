"""The fused expert kernels beside one oneDNN matmul per expert: `python -m bench.experts`.

Both sides start from the same packed NF4 bytes, activations and routing and end with the block's output, then with the
gradients of its input, routing weights and LoRA pairs. "onednn" dequantises the layer's experts into a kept buffer once a
pass (as it would for all micro-batches together) and then calls `torch.mm` per expert and projection (`models/experts.py`).
Runs alternate; times are medians. One JSON line per shape; `ratio` is how many times faster the fused kernels are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from lamella.errors import UserError
from lamella.kernels import AbsmaxState, dequantize_nf4
from lamella.kernels import experts as kernels
from lamella.models import experts, experts_cpu
from lamella.models.linear import LoraSite

# name: experts, hidden, inner, experts per token. Of the largest only a part of the experts, for memory's sake.
SHAPES = {
    "moe-115M": (32, 512, 192, 4),
    "moe-1.2B": (64, 1024, 512, 4),
    "Qwen3-30B-A3B": (128, 2048, 768, 8),
    "Qwen3-235B-A22B (32 of 128 experts)": (32, 4096, 1536, 8),
}
ROWS_PER_EXPERT = (8, 32, 128, 512)


class _Packed:
    """Stands for `ExpertBytes` on random bytes."""

    first = 0

    def __init__(self, count: int, hidden: int, inner: int) -> None:
        numel = hidden * inner
        blocks = numel // 64
        q = torch.randint(0, 256, (count * 3 * blocks,), dtype=torch.uint8)
        code = torch.linspace(-0.01, 0.01, 256)
        state = AbsmaxState(q, code, torch.ones(-(-q.numel() // 256)), torch.tensor(0.03))
        self.codes = torch.randint(0, 256, (count * 3 * numel // 2,), dtype=torch.uint8)
        self.state = state
        parts = [
            self.codes,
            q,
            code.view(torch.uint8),
            state.absmax2.view(torch.uint8),
            state.offset.view(1).view(torch.uint8),
        ]
        at = [0]
        for part in parts:
            at.append(at[-1] + part.numel())
        row = [[0, -1, at[1], at[2], at[3], at[4], (3 * e + m) * blocks] for e in range(count) for m in range(3)]
        table = torch.tensor(row, dtype=torch.int64).view(count, 3, kernels.PARTS)
        table[..., 0] = table[..., 6] * 32
        self.plans: dict[str, Any] = {}
        self.packed = kernels.PackedExperts(torch.cat(parts), table, hidden, inner)

    def for_kernels(self) -> kernels.PackedExperts:
        return self.packed


class Block(nn.Module):
    """A MoE block's experts with the attributes that transformers gives them."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True
    _apply_gate = _default_apply_gate

    def __init__(self, count: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.num_experts, self.act_fn = count, SiLUActivation()
        self.__dict__["lamella_packed"] = _Packed(count, hidden, inner)
        self.flat = torch.empty(count * 3 * hidden * inner, dtype=torch.bfloat16)
        matrices = self.flat.view(count, 3, hidden * inner)
        self.gate_up_proj = matrices[:, :2].reshape(count, 2 * inner, hidden)
        self.down_proj = matrices[:, 2].reshape(count, hidden, inner)

    def dequantize(self) -> None:
        packed = self.__dict__["lamella_packed"]
        dequantize_nf4(packed.codes, packed.state, self.flat)


def random_leaf(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).bfloat16().requires_grad_()


def run(forward: Callable[[], Tensor], dout: Tensor, leaves: list[Tensor]) -> tuple[float, float]:
    start_s = time.perf_counter()
    out = forward()
    middle_s = time.perf_counter()
    torch.autograd.grad(out, leaves, dout)
    return middle_s - start_s, time.perf_counter() - middle_s


def bench(name: str, rows: int, rank: int, runs: int) -> dict[str, Any]:
    """One shape: medians of both sides in milliseconds, and the fused side's rate."""
    count, hidden, inner, per_token = SHAPES[name]
    tokens = rows * count // per_token
    torch.manual_seed(0)
    block = Block(count, hidden, inner)
    index = torch.rand(tokens, count).topk(per_token).indices
    weight, x = torch.rand(tokens, per_token).requires_grad_(), random_leaf(tokens, hidden)
    sites, leaves = {}, [x, weight]
    if rank:
        sites = {
            "gate_up_proj": LoraSite(
                random_leaf(count, rank, hidden, scale=0.02), random_leaf(count, 2 * inner, rank), 2.0
            ),
            "down_proj": LoraSite(random_leaf(count, rank, inner, scale=0.02), random_leaf(count, hidden, rank), 2.0),
        }
        leaves += [t for site in sites.values() for t in (site.a, site.b)]
        block.__dict__["lamella_lora"] = sites
    dout = torch.randn(tokens, hidden).bfloat16()

    def fused() -> Tensor:
        return experts_cpu.fused_experts(block, x, index, weight, sites)

    def per_expert() -> Tensor:
        block.dequantize()
        return experts.expert_by_expert(block, x, index, weight, sites)

    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    for turn in range(runs + 1):
        mine = run(fused, dout, leaves)
        other = run(per_expert, dout, leaves)
        start_s = time.perf_counter()
        block.dequantize()
        other = (other[0], other[1] + time.perf_counter() - start_s)
        if turn:
            ours.append(mine)
            theirs.append(other)
    flops = 2 * 3 * tokens * per_token * hidden * inner
    line: dict[str, Any] = {"case": name, "rows_per_expert": rows, "lora_rank": rank, "kernels": kernels.route()}
    for part, k in (("forward", 0), ("backward", 1)):
        a, b = (statistics.median(t[k] for t in times) for times in (ours, theirs))
        line |= {f"{part}_ms": round(a * 1e3, 2), f"{part}_onednn_ms": round(b * 1e3, 2), f"{part}_ratio": round(b / a, 2),
                 f"{part}_gflops": round(flops / a / 1e9)}  # fmt: skip
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rank", type=int, nargs="*", default=[0, 4], help="LoRA ranks to try")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS_PER_EXPERT), help="rows per expert")
    parser.add_argument("--case", default="", help="only shapes whose name contains this")
    args = parser.parse_args()
    if kernels.route() is None:
        raise UserError("the fused kernels cannot run on this machine", fix="they need AVX-512 BF16")
    for name in SHAPES:
        for rows in args.rows if args.case in name else ():
            for rank in args.rank:
                print(json.dumps(bench(name, rows, rank, args.runs)), flush=True)


if __name__ == "__main__":
    main()
