"""How much of the machine's own matmul rate training reaches: `python -m bench.layers`.

Stores of random weights with a few layers of real size (Qwen3-30B-A3B, an 8B dense model; a small vocabulary, so that the
head, of which there is one, does not stand for more than its share) and the whole small MoE of `bench.train`, resident,
2,048 tokens or more a step. Utilisation is useful FLOPs (forward, input gradients, recompute where done, LoRA; see
`lamella/engine/flops.py`) over the step's time, against the bf16 matmul rate measured in the same process. One JSON line
per case: medians over the steps. `--varied`: as rows of real data, whose lengths differ from step to step, and what memory
grows by meanwhile: 0.7 MB for each product that is compiled for a new number of rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bench.size import qwen3_moe
from bench.train import MOE_115M
from lamella.errors import UserError

ROOT = Path(__file__).parent.parent
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 2048, "hidden_size": 4096,
    "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "eos_token_id": 2047, "dtype": "bfloat16",
}  # fmt: skip


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Case:
    """A model, what is adapted, and the rows of a step."""

    name: str
    config: dict[str, Any]
    targets: Literal["all-linear"] | tuple[str, ...]
    rows: int
    row_tokens: int
    bar: float


_30B = qwen3_moe(3, 2048, 32, 768, vocab_size=2048, eos_token_id=2047)
CASES = (
    Case("Qwen3-30B-A3B layers, LoRA on attention", _30B, ATTENTION, 4, 512, 0.5),
    Case("Qwen3-30B-A3B layers, LoRA on attention and experts", _30B, "all-linear", 4, 512, 0.5),
    Case("8B dense layers, LoRA on attention", QWEN3_8B, ATTENTION, 4, 512, 0.5),
    Case("8B dense layers, LoRA on all linear layers", QWEN3_8B, "all-linear", 4, 512, 0.5),
    Case("moe-115M, LoRA on attention", MOE_115M, ATTENTION, 2, 512, 0.4),
    Case("moe-115M, LoRA on attention and experts", MOE_115M, "all-linear", 2, 512, 0.4),
)


VARIED = 0.1
"""Share by which rows are longer or shorter than a case's."""


def measure(
    case: Case, store_folder: Path, steps: int, recompute: str, threads: int, varied: bool = False
) -> dict[str, Any]:
    """Train some steps; the first two are not counted."""
    from lamella.adapter import Adapter
    from lamella.config import LoraConfig, TrainConfig
    from lamella.engine import Engine
    from lamella.engine.flops import FlopCounter
    from lamella.hardware.matmul import matmul_rate
    from lamella.hardware.memory import rss_bytes
    from lamella.models.layout import pack_rows
    from lamella.store.reader import Store
    from lamella.train.optimizer import Optimizer

    engine = Engine.open(Store.open(store_folder), threads=threads, recompute=recompute)
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=16, alpha=32, targets=case.targets), seed=0)
    engine.attach(adapter)
    settings = TrainConfig(learning_rate=1e-4, schedule="constant", warmup_steps=0)
    optimizer = Optimizer(adapter.parameters(), settings, steps)
    counter = FlopCounter(engine.skeleton, adapter.sites.values())
    generator = torch.Generator().manual_seed(0)
    times, flops, losses, tokens, held_bytes = [], [], [], [], 0
    spread = int(VARIED * case.row_tokens) if varied else 0
    for step in range(steps):
        held_bytes = rss_bytes() if step == 2 else held_bytes
        lengths = case.row_tokens + torch.randint(-spread, spread + 1, (case.rows,), generator=generator)
        rows = [
            torch.randint(5, case.config["vocab_size"], (n,), generator=generator).tolist() for n in lengths.tolist()
        ]
        batch = pack_rows([(row, [i >= len(row) // 2 for i in range(len(row))]) for row in rows])
        tokens.append(batch.tokens)
        start_s = time.perf_counter()
        labels = batch.score_tokens.numel()
        output = engine.step([batch], step_index=step, label_tokens=labels)
        optimizer.step(step, optimizer.grad_norm())
        optimizer.zero_grad()
        times.append(time.perf_counter() - start_s)
        recomputed = range(adapter.first_layer, len(engine.skeleton.layers)) if engine.walk.steps_recomputed else ()
        flops.append(counter.step([batch], recomputed).total)
        losses.append(output.loss_sum / labels)
    rate = matmul_rate(torch.device("cpu"), engine.skeleton.dtype).best
    step_s, step_flops = statistics.median(times[2:]), statistics.median(flops[2:])
    per_s = statistics.median(n / s for n, s in zip(tokens[2:], times[2:], strict=True))
    return {
        "case": case.name, "tokens_per_step": [min(tokens), max(tokens)], "threads": threads, "recompute": recompute,
        "steps": steps, "step_s": round(step_s, 3), "tokens_per_s": round(per_s, 1), "grown_bytes": rss_bytes() - held_bytes,
        "gflops": round(step_flops / step_s / 1e9, 1), "matmul_gflops": round(rate / 1e9, 1),
        "utilisation": round(step_flops / step_s / rate, 3), "bar": case.bar, "loss": round(losses[-1], 4),
        "met": step_flops / step_s / rate >= case.bar,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=7, help="steps a case, of which the first two are not timed")
    parser.add_argument("--recompute", choices=("never", "always"), default="never")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--varied", action="store_true", help="rows of other lengths in every step")
    args = parser.parse_args()
    if args.steps < 3:
        raise UserError(f"--steps is {args.steps}", fix="take 3 or more: two are not timed")
    with tempfile.TemporaryDirectory() as scratch:
        made: dict[str, Path] = {}
        for case in CASES:
            if args.case not in case.name:
                continue
            text = json.dumps(case.config)
            if text not in made:
                made[text] = Path(scratch) / f"store-{len(made)}"
                config = made[text].with_suffix(".json")
                config.write_text(text)
                command = [sys.executable, "-m", "lamella", "store", "synth", str(config), str(made[text])]
                subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            print(
                json.dumps(measure(case, made[text], args.steps, args.recompute, args.threads, args.varied)), flush=True
            )


if __name__ == "__main__":
    main()
