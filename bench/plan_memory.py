"""Peak memory forecast from shapes alone beside what processes reach: `python -m bench.plan_memory`.

For each configuration of `CASES` a store of random weights is made; one process predicts the peak from the store's names and
shapes and the settings (`lamella.forecast.process`, no torch), others open the engine, take steps, and read their peak
resident set (`VmHWM`, imports included). With several ranks each is a process, started by `lamella train`. None of the
configurations was used to fit a constant (those of `bench.memory` were).

One JSON line each; the last ones have the worst and the mean signed deviation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.memory import DENSE, MOE, make_store
from lamella.errors import UserError
from lamella.hardware.allocator import TUNABLES

ROOT = Path(__file__).parent.parent
BAR = 0.05
MEAN_BAR = 0.025
"""Of the mean signed deviation: more is a systematic error."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

MODELS: dict[str, dict[str, Any]] = {
    "dense 896": {**DENSE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 896,
                  "num_hidden_layers": 9, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
                  "vocab_size": 48000},
    "dense 1536": {**DENSE, "hidden_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 24, "num_key_value_heads": 8,
                   "intermediate_size": 4096, "vocab_size": 24000, "tie_word_embeddings": False},
    "dense 3072": {**DENSE, "hidden_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 24, "num_key_value_heads": 8,
                   "head_dim": 128, "intermediate_size": 8192, "vocab_size": 16000},
    "moe 640": {**MOE, "hidden_size": 640, "num_hidden_layers": 10, "num_attention_heads": 10, "num_key_value_heads": 2,
                "moe_intermediate_size": 256, "num_experts": 24, "num_experts_per_tok": 3, "vocab_size": 20000},
    "moe 1536": {**MOE, "hidden_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 24, "num_key_value_heads": 4,
                 "moe_intermediate_size": 384, "num_experts": 48, "num_experts_per_tok": 6, "vocab_size": 24000},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        lengths: of the sequences of each micro-batch, in tokens; the later half of each sequence carries labels.
        budget_share: memory for the base, as a share of all of it; None: no limit.
    """

    name: str
    model: str
    lengths: tuple[tuple[int, ...], ...]
    targets: tuple[str, ...] | str = ATTENTION
    rank: int = 16
    recompute: str = "never"
    budget_share: float | None = None
    dtype: str = "bf16"
    dropout: float = 0.0


CASES = (
    Case("dense, kept, uneven rows", "dense 896", ((700, 411, 90), (350, 620))),
    Case("dense, recomputed, all linear, rank 24", "dense 896", ((768, 256), (900,)), "all-linear", 24, "always"),
    Case("dense, short rows, all linear", "dense 1536", ((57, 80, 101, 64, 90, 73, 88),) * 2, "all-linear", 8),
    Case("dense, 6,000 tokens in one row, recomputed", "dense 1536", ((6000,),), recompute="always"),
    Case("dense, streamed, four micro-batches", "dense 1536", ((512,), (700,), (300, 200), (640,)), recompute="always",
         budget_share=0.7),
    Case("large layers, streamed, all linear", "dense 3072", ((1024,),), "all-linear", recompute="always", budget_share=0.8),
    Case("large layers, kept", "dense 3072", ((640,),), ("q_proj", "v_proj"), 32),
    Case("dense, fp32, recomputed", "dense 896", ((300, 290), (256,)), recompute="always", dtype="fp32"),
    Case("dense, dropout, all linear, kept", "dense 896", ((640, 300),), "all-linear", dropout=0.1),
    Case("moe, kept, uneven rows", "moe 640", ((800, 350), (500,))),
    Case("moe, LoRA on experts, kept", "moe 640", ((512, 300),), "all-linear", 32),
    Case("moe, recomputed, long row", "moe 640", ((4000,),), "all-linear", recompute="always"),
    Case("moe, streamed, LoRA on experts", "moe 1536", ((700, 324),), "all-linear", 48, "always", 0.8),
    Case("moe, kept, large layers", "moe 1536", ((1100,),), "all-linear"),
    Case("moe, short rows, recomputed", "moe 1536", ((80, 75, 60, 96),) * 3, recompute="always"),
    Case("moe, fp32, LoRA on experts, recomputed", "moe 640", ((256, 200),), "all-linear", recompute="always", dtype="fp32"),
)  # fmt: skip


def case_of(given: dict[str, Any]) -> Case:
    """From JSON."""
    lengths = tuple(tuple(x) for x in given["lengths"])
    targets = given["targets"] if isinstance(given["targets"], str) else tuple(given["targets"])
    return Case(**{**given, "lengths": lengths, "targets": targets})


def positions(lengths: tuple[int, ...]) -> int:
    return sum(n - n // 2 for n in lengths)


def imports() -> dict[str, Any]:
    """Resident set of a process that has imported what the measuring ones import, as `lamella probe` finds it."""
    from lamella.hardware.memory import rss_bytes

    load()
    return {"bytes": rss_bytes()}


def load() -> None:
    import torch

    import lamella.adapter
    import lamella.engine
    import lamella.train.optimizer  # noqa: F401

    torch.set_num_threads(os.cpu_count() or 1)


def predict(job: dict[str, Any]) -> dict[str, Any]:
    """From shapes alone, without torch."""
    from lamella.config import LoraConfig
    from lamella.forecast.describe import shape_of
    from lamella.forecast.process import base_of, peak_of
    from lamella.forecast.residency import plan_residency
    from lamella.forecast.trainable import sites_of
    from lamella.hardware.machine import DeviceFacts, Host

    case = case_of(job["case"])
    shape = shape_of(job["store"])
    sites = sites_of(shape, LoraConfig(rank=case.rank, targets=case.targets, dropout=case.dropout))  # type: ignore[arg-type]
    base = base_of(shape, case.dtype, "cpu")
    everything = base.fixed + sum(base.group_bytes)
    budget = None if case.budget_share is None else round(case.budget_share * everything)
    device = DeviceFacts(name="cpu", kind="cpu", memory_bytes=1 << 40, matmul_flops_per_s=1, dequantise_bytes_per_s=1,
                         memory_bytes_per_s=1, threads=job["threads"])  # fmt: skip
    host = Host(name="host", cores=1, ram_bytes=1 << 40, limit_bytes=1 << 40, import_bytes=job["imports"])
    plan = peak_of(
        shape, sites, case.lengths, [positions(x) for x in case.lengths], kept=case.recompute == "never", dtype=case.dtype,
        device=device, host=host, residency=plan_residency(base.group_bytes, base.fixed, budget), dropout=case.dropout > 0,
    )  # fmt: skip
    assert "torch" not in sys.modules
    return {
        "bytes": plan.peak_bytes,
        "moment": plan.moment,
        "parts": plan.parts,
        "groups": plan.groups,
        "budget": budget,
    }


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Take steps and look."""
    import torch

    from lamella.adapter import Adapter
    from lamella.config import LoraConfig, TrainConfig
    from lamella.engine import Engine
    from lamella.hardware.memory import peak_rss_bytes
    from lamella.models.layout import pack_rows
    from lamella.store.reader import Store
    from lamella.train.optimizer import Optimizer

    case, store = case_of(job["case"]), Store.open(Path(job["store"]))
    torch.set_num_threads(job["threads"])
    engine = Engine.open(
        store, dtype=case.dtype, recompute=case.recompute, threads=job["threads"], budget_bytes=job["budget"]
    )
    lora = LoraConfig(rank=case.rank, targets=case.targets, dropout=case.dropout)  # type: ignore[arg-type]
    adapter = Adapter.create(engine.skeleton, lora, 0)
    engine.attach(adapter)
    optimizer = Optimizer(adapter.parameters(), TrainConfig(warmup_steps=0), job["steps"])
    generator = torch.Generator().manual_seed(0)
    vocab = int(engine.config.vocab_size)
    for step in range(job["steps"]):
        batches = []
        for lengths in case.lengths:
            rows = [torch.randint(5, vocab, (n,), generator=generator).tolist() for n in lengths]
            batches.append(pack_rows([(x, [i >= len(x) // 2 for i in range(len(x))]) for x in rows]))
        labels = sum(int(b.score_tokens.numel()) for b in batches)
        engine.step(batches, step_index=step, label_tokens=labels)
        optimizer.step(step, optimizer.grad_norm())
        optimizer.zero_grad()
    facts = engine.facts()
    assert facts["steps_kept" if case.recompute == "never" else "steps_recomputed"] == job["steps"]
    assert bool(facts["layers_streamed"]) == (case.budget_share is not None)
    return {"bytes": peak_rss_bytes()}


VERBS = {"predict": predict, "measure": measure, "imports": lambda job: imports()}


def ask(job: dict[str, Any]) -> dict[str, Any]:
    """One side in a process of its own, started as `lamella` starts itself."""
    env = {**os.environ, "GLIBC_TUNABLES": TUNABLES}
    done = subprocess.run([sys.executable, "-m", "bench.plan_memory", "--side"], input=json.dumps(job), capture_output=True,
                          text=True, cwd=ROOT, env=env, check=False)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{job['verb']} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def verdict(ratios: list[float]) -> dict[str, Any]:
    """Of all cases: predicted over measured."""
    worst = max(ratios, key=lambda r: abs(r - 1))
    mean = statistics.mean(ratios) - 1
    return {"figure": "peak memory, predicted over measured", "cases": len(ratios), "worst": round(worst, 4),
            "mean_signed": round(mean, 4), "within_bar": sum(abs(r - 1) <= BAR for r in ratios), "bar": BAR,
            "met": abs(worst - 1) <= BAR and abs(mean) <= MEAN_BAR}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, help="keep the stores here for the next time")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        job = json.load(sys.stdin)
        print(json.dumps(VERBS[job["verb"]](job)))
        return
    wanted = [case for case in CASES if args.case in case.name]
    if not wanted:
        raise UserError(f"--case {args.case!r} names no case", fix=f"cases: {', '.join(c.name for c in CASES)}")
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = ask({"verb": "imports"})["bytes"]
        for case in wanted:
            store = make_store(folder, case.model, MODELS)
            job = {
                "case": asdict(case),
                "store": str(store),
                "threads": args.threads,
                "steps": args.steps,
                "imports": found,
            }
            predicted = ask({**job, "verb": "predict"})
            measured = ask({**job, "verb": "measure", "budget": predicted["budget"]})
            ratios.append(predicted["bytes"] / measured["bytes"])
            print(json.dumps({"case": case.name, "model": case.model, "ratio": round(ratios[-1], 4),
                              "predicted_bytes": predicted["bytes"], "measured_bytes": measured["bytes"], "imports": found,
                              "moment": predicted["moment"], "parts": predicted["parts"]}), flush=True)  # fmt: skip
    print(json.dumps(verdict(ratios)))


if __name__ == "__main__":
    main()
