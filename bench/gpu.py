"""Speed on a CUDA device at the size of Qwen3-235B-A22B's layers: `python -m bench.gpu`.

JSON lines, then one table. First the device itself, in this process: its bf16 matmul rate, copies on it and over its host
link. Then the kernels beside what they replace. Then whole steps through the engine: one layer of random NF4 weights,
repeated (the store's layers are one file under several names), LoRA on attention and on experts, sequences of 4,096 tokens,
all layers on the device, then all of them streamed from pinned host memory (and every boundary spilled there). FLOPs are
those of the arithmetic: forward, input gradients, and the recomputed forward, which `useful` leaves out.

`--dry-run-cpu` runs the same code at tiny shapes on the CPU, the Triton kernels' twins in their place.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamella import kernels
from lamella.kernels import reference
from lamella.kernels.layout import dynamic_code
from lamella.kernels.triton import twins

PARTS = ("device", "dequantize", "grouped", "lora", "loss", "step")


@dataclass(frozen=True)
class Size:
    """Shapes of the model and of the runs."""

    hidden: int = 4096
    heads: int = 64
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    per_token: int = 8
    inner: int = 1536
    vocabulary: int = 151_936
    layers: int = 6
    sequence: int = 4096
    micro_batch: int = 8192
    tokens: tuple[int, ...] = (8192, 32_768, 65_536)
    square: int = 8192
    rank: int = 16

    def forward_flops(self) -> float:
        """Of one token in one layer."""
        attention = 2 * self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        experts = 2 * 3 * self.hidden * self.inner * self.per_token + 2 * self.hidden * self.experts
        return attention + experts + self.score_flops()

    def score_flops(self) -> float:
        """Of causal attention alone: scores and their product with v, over half a sequence on average."""
        return 4 * self.heads * self.head_dim * self.sequence / 2

    def input_flops(self) -> float:
        """Of the gradient at a layer's input: the matmuls once, attention two and a half times."""
        return self.forward_flops() + 1.5 * self.score_flops()


TINY = Size(
    hidden=64, heads=4, kv_heads=2, head_dim=16, experts=4, per_token=2, inner=64, vocabulary=128, layers=3, sequence=16,
    micro_batch=32, tokens=(32, 64), square=64, rank=4,
)  # fmt: skip


class Device:
    """Where things run, and a clock that waits for it."""

    def __init__(self, cpu: bool) -> None:
        self.cuda = not cpu
        self.device = torch.device("cpu" if cpu else "cuda", None if cpu else torch.cuda.current_device())
        self.dtype = torch.float32 if cpu else torch.bfloat16

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], repeats: int = 7) -> float:
        """Median of `repeats` runs after two that are not counted."""
        found = []
        for _ in range(repeats + 2):
            self.wait()
            start_s = time.perf_counter()
            run()
            self.wait()
            found.append(time.perf_counter() - start_s)
        return statistics.median(found[2:])

    def peak_bytes(self, reset: bool = False) -> int:
        if not self.cuda:
            return 0
        peak = torch.cuda.max_memory_allocated()
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return peak

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype) * scale


def device_cases(on: Device, size: Size) -> Iterator[dict[str, Any]]:
    a, b = on.random(size.square, size.square), on.random(size.square, size.square)
    out = torch.empty_like(a)
    rate = 2 * size.square**3 / on.seconds(lambda: torch.mm(a, b, out=out))
    yield {"case": "matmul", "shape": [size.square] * 3, "tflops": rate / 1e12}
    layer = layer_values(size) // 2
    source, target = (torch.zeros(layer, dtype=torch.uint8, device=on.device) for _ in range(2))
    yield {"case": "copy on the device", "gb_per_s": 2 * layer / on.seconds(lambda: target.copy_(source)) / 1e9}
    host = torch.zeros(layer, dtype=torch.uint8, pin_memory=on.cuda)
    for name, run in (("host to device", lambda: target.copy_(host, non_blocking=True)),
                      ("device to host", lambda: host.copy_(source, non_blocking=True))):  # fmt: skip
        yield {"case": name, "gb_per_s": layer / on.seconds(run) / 1e9}


def layer_values(size: Size) -> int:
    attention = size.hidden * size.head_dim * (2 * size.heads + 2 * size.kv_heads)
    return attention + 3 * size.hidden * size.inner * size.experts


def dequantize_cases(on: Device, size: Size) -> Iterator[dict[str, Any]]:
    """Expert weights gate and up of one layer, random codes and scales, as the store holds them."""
    each = 2 * size.hidden * size.inner
    blocks = each // 64
    codes = torch.randint(256, (size.experts * each // 2,), dtype=torch.uint8, device=on.device)
    run = kernels.AbsmaxRun(
        torch.randint(256, (size.experts, blocks), dtype=torch.uint8, device=on.device),
        dynamic_code().to(on.device),
        torch.full((size.experts, -(-blocks // 256)), 1e-3, device=on.device),
        torch.full((size.experts,), 0.02, device=on.device),
    )
    out = torch.empty(size.experts * each, dtype=on.dtype, device=on.device)
    took_s = on.seconds(lambda: kernels.dequantize_nf4_run(codes, run, out))
    moved = codes.numel() + run.q.numel() + out.nbytes
    copied = torch.empty(moved // 2, dtype=torch.uint8, device=on.device)
    source = torch.zeros_like(copied)
    copy_s = on.seconds(lambda: copied.copy_(source))
    check = slice(0, each)
    wanted = reference.dequantize_nf4_run(
        codes[: each // 2], kernels.AbsmaxRun(run.q[:1], run.code, run.absmax2[:1], run.offset[:1]), out[check].clone()
    )
    assert torch.equal(out[check], wanted)
    yield {"case": "dequantize", "gb_per_s_out": out.nbytes / took_s / 1e9, "gb_per_s_moved": moved / took_s / 1e9,
           "of_copy": copy_s / took_s}  # fmt: skip


def sorted_rows(on: Device, size: Size, tokens: int) -> Tensor:
    """Expert of each row, sorted: uneven loads, none empty on average."""
    weights = torch.rand(size.experts, generator=torch.Generator().manual_seed(0)) + 0.5
    chosen = torch.multinomial(weights, tokens * size.per_token, True, generator=torch.Generator().manual_seed(1))
    return chosen.sort().values.to(on.device)


def grouped_cases(on: Device, size: Size, rate: float) -> Iterator[dict[str, Any]]:
    """Gate and up of all experts with LoRA: our kernel, the library's and a pass for LoRA; forward and input gradient."""
    rank = max(1, size.rank // size.per_token)
    weight = on.random(size.experts, 2 * size.inner, size.hidden, scale=0.02)
    a, b = on.random(size.experts, rank, size.hidden), on.random(size.experts, 2 * size.inner, rank)
    for tokens in size.tokens:
        tokens = min(tokens, 4 * size.micro_batch)
        expert_S = sorted_rows(on, size, tokens)
        rows = expert_S.numel()
        flops = 2.0 * rows * size.hidden * 2 * size.inner
        x, dy = on.random(rows, size.hidden), on.random(rows, 2 * size.inner)
        for name, forward, backward in grouped_ways(on, size, expert_S, weight, a, b, x, dy):
            for kind, run in (("forward", forward), ("input gradient", backward)):
                took_s = on.seconds(run, repeats=5)
                yield {"case": f"grouped {kind}", "how": name, "rows_per_expert": rows // size.experts,
                       "tflops": flops / took_s / 1e12, "of_matmul": flops / took_s / rate}  # fmt: skip
        del x, dy


Way = tuple[str, Callable[[], object], Callable[[], object]]


def grouped_ways(
    on: Device, size: Size, expert_S: Tensor, weight: Tensor, a: Tensor, b: Tensor, x: Tensor, dy: Tensor
) -> Iterator[Way]:
    if not on.cuda:
        offsets = torch.searchsorted(expert_S, torch.arange(size.experts + 1), out_int32=True)
        groups = argparse.Namespace(offsets=offsets)
        low = twins.grouped_low(dy, b, groups)
        yield ("twin", lambda: twins.grouped_linear(x, weight, groups, a, b, 2.0),
               lambda: twins.grouped_input(dy, weight, groups, a, low))  # fmt: skip
        return
    from lamella.kernels.triton import grouped

    groups = grouped.Groups.of_sorted(expert_S, size.experts)
    low = grouped.grouped_low(dy, b, groups)
    tilings = (grouped.WIDE, grouped.Tiling(128, 128, 64, 8, 4), grouped.Tiling(128, 256, 64, 8, 4), grouped.NARROW)
    shared = torch.cuda.get_device_properties(on.device).shared_memory_per_block_optin
    for tiling in tilings:
        if tiling.stages * (tiling.m + tiling.n) * tiling.k * x.element_size() + (16 << 10) > shared:
            continue
        name = f"triton {tiling.m}x{tiling.n}x{tiling.k} {tiling.warps}w {tiling.stages}s"
        yield (name, lambda t=tiling: grouped.grouped_linear(x, weight, groups, a, b, 2.0, how="triton", tiling=t),
               lambda t=tiling: grouped.grouped_input(dy, weight, groups, a, low, how="triton", tiling=t))  # fmt: skip
    if hasattr(torch.nn.functional, "grouped_mm"):
        yield ("library", lambda: grouped.grouped_linear(x, weight, groups, a, b, 2.0, how="library"),
               lambda: grouped.grouped_input(dy, weight, groups, a, low, how="library"))  # fmt: skip


def lora_cases(on: Device, size: Size, rate: float) -> Iterator[dict[str, Any]]:
    """The query projection with LoRA: in the epilogue of our kernel, and after the library's matmul."""
    outputs = size.heads * size.head_dim
    x, w = on.random(size.micro_batch, size.hidden), on.random(outputs, size.hidden, scale=0.02)
    xa, b = on.random(size.micro_batch, size.rank), on.random(outputs, size.rank)
    flops = 2.0 * size.micro_batch * size.hidden * outputs

    def after() -> Tensor:
        return torch.nn.functional.linear(x, w).addmm_(xa, b.T, alpha=2.0)

    ways = {"library and a pass": after}
    if on.cuda:
        from lamella.kernels.triton.lora import lora_linear

        ways["fused"] = lambda: lora_linear(x, w, xa, b, 2.0)
    else:
        ways["twin"] = lambda: twins.lora_linear(x, w, xa, b, 2.0, None)
    for name, run in ways.items():
        took_s = on.seconds(run)
        yield {"case": "lora linear", "how": name, "tflops": flops / took_s / 1e12, "of_matmul": flops / took_s / rate}


def loss_cases(on: Device, size: Size, rate: float) -> Iterator[dict[str, Any]]:
    """Loss and its gradient at the hidden states; FLOPs of three products, of which one is done again."""
    states = on.random(size.micro_batch, size.hidden)
    weight = on.random(size.vocabulary, size.hidden, scale=0.02)
    target = torch.randint(size.vocabulary, (size.micro_batch,), device=on.device)
    if on.cuda:
        from lamella.kernels.triton.loss import linear_cross_entropy as run
    else:
        run = twins.linear_cross_entropy
    on.peak_bytes(reset=True)
    took_s = on.seconds(lambda: run(states, weight, target, 1 / size.micro_batch), repeats=3)
    flops = 6.0 * size.micro_batch * size.vocabulary * size.hidden
    yield {"case": "loss", "positions": size.micro_batch, "tflops": flops / took_s / 1e12,
           "of_matmul": flops / took_s / rate, "peak_bytes": on.peak_bytes()}  # fmt: skip


def make_store(size: Size, folder: Path) -> Any:
    """A store of this shape: one layer of random weights under several names."""
    from lamella.models.names import checkpoint_shapes
    from lamella.models.skeleton import Skeleton, read_config
    from lamella.store.reader import Store
    from lamella.store.synth import synthesize_store

    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": size.hidden,
        "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim,
        "num_experts": size.experts, "num_experts_per_tok": size.per_token, "moe_intermediate_size": size.inner,
        "intermediate_size": 3 * size.hidden, "num_hidden_layers": size.layers, "vocab_size": size.vocabulary,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "max_position_embeddings": 40_960,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    synthesize_store(
        file, folder / "store", lambda f: checkpoint_shapes(Skeleton(read_config(f), torch.bfloat16)), share_layers=True
    )
    return Store.open(folder / "store")


def step_cases(on: Device, size: Size, rate: float) -> Iterator[dict[str, Any]]:
    """Whole steps, resident then streamed: forward alone, then forward and backward."""
    from lamella.adapter import Adapter
    from lamella.config import LoraConfig
    from lamella.engine import Engine

    with tempfile.TemporaryDirectory() as folder:
        store = make_store(size, Path(folder))
        dtype = "bf16" if on.cuda else "fp32"
        largest = max(store.group_bytes(i) for i in range(size.layers))
        fixed = 0
        for streamed in (False, True):
            budget = fixed + 2 * largest if streamed else None
            engine = Engine.open(store, dtype=dtype, device=on.device.type, budget_bytes=budget, recompute="always")
            fixed = engine.walk.weights.residency.fixed_bytes  # of the resident one, for the streamed one's budget
            assert bool(engine.walk.weights.residency.streamed) == streamed, "the device is too small for this bench"
            adapter = Adapter.create(engine.skeleton, LoraConfig(rank=size.rank), 0)
            engine.attach(adapter)
            for tokens in size.tokens:
                yield step_case(on, size, rate, engine, tokens, "streamed" if streamed else "resident")
            engine.close()
            del engine, adapter
            if on.cuda:
                torch.cuda.empty_cache()


def step_case(on: Device, size: Size, rate: float, engine: Any, tokens: int, where: str) -> dict[str, Any]:
    from lamella.models.layout import pack_rows

    generator = torch.Generator().manual_seed(2)
    rows = [(torch.randint(size.vocabulary, (size.sequence,), generator=generator).tolist(),
             [False] * (size.sequence // 2) + [True] * (size.sequence - size.sequence // 2))
            for _ in range(tokens // size.sequence)]  # fmt: skip
    each = size.micro_batch // size.sequence
    batches = [pack_rows(rows[i : i + each]) for i in range(0, len(rows), each)]
    labels = sum(b.score_tokens.numel() for b in batches)
    losses = []

    def step() -> None:
        for p in engine.adapter.parameters().values():
            p.grad = None
        losses.append(engine.step(batches, step_index=0, label_tokens=labels).loss_sum)

    on.peak_bytes(reset=True)
    forward_s = on.seconds(lambda: engine.walk.forward(batches), repeats=2)
    before = engine.walk.weights.copied_bytes
    step_s = on.seconds(step, repeats=2)
    link_bytes = (engine.walk.weights.copied_bytes - before) / len(losses)
    assert len(set(losses)) == 1, f"the same step gave {sorted(set(losses))}"
    work = tokens * size.layers
    forward, inputs = size.forward_flops() * work, size.input_flops() * work
    backward_s = step_s - forward_s
    head = 6.0 * labels * size.vocabulary * size.hidden
    return {
        "case": "step", "tokens": tokens, "weights": where, "layers": size.layers, "step_s": step_s, "forward_s": forward_s,
        "forward_tflops": forward / forward_s / 1e12, "backward_tflops": (forward + inputs + head) / backward_s / 1e12,
        "of_matmul": (2 * forward + inputs + head) / step_s / rate, "useful_of_matmul": (forward + inputs + head) / step_s / rate,
        "link_gb_per_s": link_bytes / step_s / 1e9, "peak_bytes": on.peak_bytes(), "loss": losses[0] / labels,
        "attention_paths": engine.facts()["attention_paths"], "loss_by": engine.facts()["loss"],
        "boundary_bytes_spilled": engine.walk.boundaries.spilled_bytes,
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> str:
    """All results, one line each: what, how, and the figures."""
    known = ("case", "how", "weights", "tokens", "rows_per_expert")
    lines = []
    for r in results:
        name = " ".join(str(r[k]) for k in known if k in r)
        figures = [f"{k} {v:.3g}" for k, v in r.items() if isinstance(v, float)]
        if "peak_bytes" in r:
            figures.append(f"peak {r['peak_bytes'] / 1e9:.1f} GB")
        lines.append(f"{name:<60} {', '.join(figures)}")
    resident = {r["tokens"]: r["step_s"] for r in results if r.get("weights") == "resident"}
    for r in results:
        if r.get("weights") == "streamed":
            share = resident[r["tokens"]] / r["step_s"]
            lines.append(f"streamed at {r['tokens']} tokens: {share:.1%} of resident")
    return "\n".join(lines)


def run(on: Device, size: Size, only: list[str]) -> list[dict[str, Any]]:
    """Yield of all parts, printed as it comes."""
    results: list[dict[str, Any]] = []

    def take(cases: Iterator[dict[str, Any]]) -> None:
        for case in cases:
            results.append(case)
            print(json.dumps(case), flush=True)

    take(device_cases(on, size))  # the matmul rate is what the others are measured by
    rate = results[0]["tflops"] * 1e12
    if "dequantize" in only:
        take(dequantize_cases(on, size))
    for name, cases in (("grouped", grouped_cases), ("lora", lora_cases), ("loss", loss_cases), ("step", step_cases)):
        if name in only:
            take(cases(on, size, rate))
            if on.cuda:
                torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dry-run-cpu", action="store_true", help="tiny shapes on the CPU")
    args = parser.parse_args()
    if not args.dry_run_cpu and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry-run-cpu runs tiny shapes on the CPU")
    on = Device(args.dry_run_cpu)
    about: dict[str, Any] = {"torch": torch.__version__, "device": "cpu"}
    if on.cuda:
        about["device"] = torch.cuda.get_device_name(on.device)
        about["kernels"] = kernels.cuda_backend()
    print(json.dumps(about), flush=True)
    print(table(run(on, TINY if args.dry_run_cpu else Size(), args.only)))


if __name__ == "__main__":
    main()
