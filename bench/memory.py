"""Predicted and measured peak memory of training: `python -m bench.memory`.

For each configuration a store of random weights is made (`lamella store synth`), a process of its own predicts the peak
from the closed form (`lamella.engine.memory`), and another one takes steps and reads its peak resident set (`VmHWM`,
imports included). One JSON line each: configuration, predicted and measured bytes, their ratio, the parts; the last line
has the largest deviation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lamella.errors import UserError
from lamella.hardware.allocator import TUNABLES

ROOT = Path(__file__).parent.parent
BAR = 0.05
SHARES = ("work", "kept", "head", "boundaries")

DENSE: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 768,
    "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1600, "max_position_embeddings": 32768, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
DENSE_WIDE = {**DENSE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048,
              "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
              "intermediate_size": 6144, "vocab_size": 64000}  # fmt: skip
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 32000, "hidden_size": 512,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1024, "moe_intermediate_size": 192, "num_experts": 32, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 32768,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
MOE_WIDE = {**MOE, "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "num_experts": 64,
            "moe_intermediate_size": 512}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        lengths: of the sequences of each micro-batch, in tokens; the later half of each sequence carries labels.
        budget_share: memory for the base, as a share of fixed parts and packed layers together; None: no limit.
    """

    name: str
    model: str
    lengths: tuple[tuple[int, ...], ...]
    targets: tuple[str, ...] | str = ATTENTION
    rank: int = 16
    recompute: str = "never"
    budget_share: float | None = None
    dtype: str = "bf16"


MODELS = {"dense": DENSE, "dense wide": DENSE_WIDE, "moe": MOE, "moe wide": MOE_WIDE}
CASES = (
    Case("dense, kept", "dense", ((512, 512),)),
    Case("dense, recomputed", "dense", ((512, 512),), recompute="always"),
    Case("dense, short rows, all linear", "dense", ((80,) * 12, (96,) * 10), targets="all-linear"),
    Case("dense, 8,192 tokens in one row", "dense", ((8192,),), recompute="always"),
    Case("dense, fp32", "dense", ((256, 256),), dtype="fp32"),
    Case("dense wide, kept", "dense wide", ((1024,),), targets="all-linear", rank=8),
    Case("dense wide, streamed", "dense wide", ((1024,), (1024,)), recompute="always", budget_share=0.87),
    Case("moe, kept", "moe", ((512, 512),)),
    Case("moe, LoRA on experts, rank 64", "moe", ((512, 512),), targets="all-linear", rank=64),
    Case("moe, recomputed, four micro-batches", "moe", ((512,),) * 4, recompute="always"),
    Case("moe wide, streamed, LoRA on experts", "moe wide", ((1024,),), targets="all-linear", recompute="always", budget_share=0.6),
    Case("moe wide, kept", "moe wide", ((1024, 512, 256),)),
)  # fmt: skip


def side(job: dict[str, Any]) -> dict[str, Any]:
    """Predict, or take the steps and look, in this process."""
    import torch

    from lamella.adapter import Adapter
    from lamella.config import LoraConfig, TrainConfig
    from lamella.engine import Engine
    from lamella.engine.memory import predict, shape_of
    from lamella.hardware.allocator import is_tuned
    from lamella.hardware.memory import peak_rss_bytes, rss_bytes
    from lamella.models.layout import pack_rows
    from lamella.store.reader import Store
    from lamella.train.optimizer import Optimizer

    torch.set_num_threads(job["threads"])
    imports_bytes = rss_bytes()
    case, store = Case(**job["case"]), Store.open(Path(job["store"]))
    options = {"dtype": case.dtype, "recompute": case.recompute, "threads": job["threads"]}
    budget = None
    if case.budget_share is not None:
        budget = round(case.budget_share * job["base_bytes"])
    engine = Engine.open(store, budget_bytes=budget, **options)
    targets = case.targets if isinstance(case.targets, str) else tuple(case.targets)
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=case.rank, targets=targets), 0)
    engine.attach(adapter)
    generator = torch.Generator().manual_seed(0)

    def batch(lengths: tuple[int, ...]) -> Any:
        ids = [torch.randint(5, 32000, (n,), generator=generator).tolist() for n in lengths]
        return pack_rows([(x, [i >= len(x) // 2 for i in range(len(x))]) for x in ids])

    if job["verb"] == "predict":
        batches = [batch(x) for x in case.lengths]
        plan = predict(engine.walk, *shape_of(batches), kept=case.recompute == "never", imports_bytes=imports_bytes,
                       tuned_heap=is_tuned())  # fmt: skip
        return {"bytes": plan.peak_bytes, "moment": plan.moment, "parts": plan.parts, "heap": plan.heap[plan.moment]}
    optimizer = Optimizer(adapter.parameters(), TrainConfig(warmup_steps=0), job["steps"])
    for step in range(job["steps"]):
        batches = [batch(x) for x in case.lengths]
        label_tokens = sum(int(b.score_tokens.numel()) for b in batches)
        engine.step(batches, step_index=step, label_tokens=label_tokens)
        optimizer.step(step, optimizer.grad_norm())
        optimizer.zero_grad()
    facts = engine.facts()
    assert facts["steps_kept" if case.recompute == "never" else "steps_recomputed"] == job["steps"]
    assert bool(facts["layers_streamed"]) == (case.budget_share is not None)
    return {"bytes": peak_rss_bytes(), "imports": imports_bytes}


def base_bytes(store: Path, dtype: str) -> int:
    """Bytes of a store's base in memory with every layer resident."""
    import torch

    from lamella.engine.engine import DTYPES
    from lamella.engine.weights import LayerWeights
    from lamella.models.skeleton import Skeleton, load_config
    from lamella.store.reader import Store

    opened = Store.open(store)
    config = load_config(store, opened.manifest.tie_word_embeddings)
    weights = LayerWeights(opened, Skeleton(config, DTYPES[dtype]), torch.device("cpu"))
    total = weights.residency.total_bytes
    weights.close()
    return total


def ask(job: dict[str, Any], tuned: bool) -> dict[str, Any]:
    """Run one side in a process of its own, started as `lamella` starts itself (or with the C library's defaults)."""
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    env |= {"GLIBC_TUNABLES": TUNABLES} if tuned else {}
    command = [sys.executable, "-m", "bench.memory", "--side"]
    done = subprocess.run(
        command, input=json.dumps(job), capture_output=True, text=True, cwd=ROOT, env=env, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{job['verb']} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def best_shares(seen: list[tuple[list[float], float, float]]) -> dict[str, float]:
    """Least squares of what is left over the bytes that shares apply to, each case weighted by its peak."""
    import numpy as np

    weight = np.array([1 / peak for _, _, peak in seen])
    solution, *_ = np.linalg.lstsq(np.array([x for x, _, _ in seen]) * weight[:, None],
                                   np.array([y for _, y, _ in seen]) * weight, rcond=None)  # fmt: skip
    return dict(zip(SHARES, [round(float(x), 3) for x in solution], strict=True))


def make_store(folder: Path, name: str, models: dict[str, dict[str, Any]] = MODELS) -> Path:
    """A store of random weights of one of these models, made once."""
    store = folder / name.replace(" ", "-")
    if not store.exists():
        config = folder / f"{store.name}.json"
        config.write_text(json.dumps(models[name]))
        command = [sys.executable, "-m", "lamella", "store", "synth", str(config), str(store), "--json"]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, help="keep the stores here for the next time")
    parser.add_argument("--default-heap", action="store_true", help="run on the C library's own settings")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(side(json.load(sys.stdin))))
        return
    wanted = [case for case in CASES if args.case in case.name]
    if not wanted:
        raise UserError(f"--case {args.case!r} names no case", fix=f"cases: {', '.join(c.name for c in CASES)}")
    worst = 0.0
    seen: list[tuple[list[float], float, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for case in wanted:
            store = make_store(folder, case.model)
            job = {"case": asdict(case), "store": str(store), "threads": args.threads, "steps": args.steps,
                   "base_bytes": base_bytes(store, case.dtype)}  # fmt: skip
            predicted = ask({**job, "verb": "predict"}, not args.default_heap)
            measured = ask({**job, "verb": "measure"}, not args.default_heap)
            ratio = predicted["bytes"] / measured["bytes"]
            worst = max(worst, abs(ratio - 1))
            print(json.dumps({**asdict(case), "predicted_bytes": predicted["bytes"], "measured_bytes": measured["bytes"],
                              "ratio": round(ratio, 4), "imports_bytes": measured["imports"],
                              "moment": predicted["moment"], "parts": predicted["parts"]}), flush=True)  # fmt: skip
            left = measured["bytes"] - predicted["bytes"] + predicted["parts"].get("heap between tensors", 0)
            seen.append(([predicted["heap"].get(name, 0.0) for name in SHARES], left, measured["bytes"]))
    print(json.dumps({"figure": "largest deviation", "value": round(worst, 4), "bar": BAR, "cases": len(wanted)}))
    if len(seen) >= len(SHARES):
        print(json.dumps({"figure": "shares of the heap that fit best", "value": best_shares(seen)}))


if __name__ == "__main__":
    main()
