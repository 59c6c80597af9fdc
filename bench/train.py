"""Training beside transformers + PEFT + bitsandbytes on this CPU: `python -m bench.train`.

Both sides train the same random bf16 checkpoint, quantised to NF4 with double quantisation, on the same batches
(2 sequences of 512 tokens), from the same starting adapter (LoRA r=16), with the same AdamW. Each run is a process of
its own; runs alternate; figures are medians over runs of the median step. Memory is the peak resident set, and that
beyond what the process held after its imports. One JSON line per case, peer setting and figure; `ratio` is how many
times better we are. The peer lives in `.bench-venv`, made on first use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_ENVIRONMENT = dict(os.environ)  # before lamella sets how long threads spin: the peer runs as its users run it

from lamella.config import TrainConfig  # noqa: E402
from lamella.errors import UserError  # noqa: E402
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint  # noqa: E402

ROOT = Path(__file__).parent.parent
PEER_VENV = ROOT / ".bench-venv"
PINS = ("torch==2.13.0", "transformers==5.24.0", "peft==0.21.2", "bitsandbytes==0.50.2", "accelerate==1.15.0")
SEQUENCES, TOKENS, PROMPT_TOKENS = 2, 512, 256
RANK, ALPHA = 16, 32

DENSE_88M: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1600, "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}  # fmt: skip
MOE_115M: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024,
    "moe_intermediate_size": 192, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One model and set of adapters; `peers` maps a peer setting to whether its experts are made 4-bit."""

    name: str
    config: dict[str, Any]
    adapter: str
    peers: dict[str, bool] = field(default_factory=dict)


CASES = (
    Case("dense-88M, LoRA on attention", DENSE_88M, "attention", {"4-bit config": False}),
    Case(
        "moe-115M, LoRA on attention", MOE_115M, "attention",
        {"plain 4-bit config (experts stay bf16)": False, "experts made 4-bit": True},
    ),
    Case(
        "moe-115M, LoRA on attention and experts", MOE_115M, "experts",
        {"plain 4-bit config (experts stay bf16)": False, "experts made 4-bit, LoRA by parametrization": True},
    ),
)  # fmt: skip


def peer_python() -> Path:
    """The peer's interpreter; its environment is made, or brought to the pins, when needed."""
    python = PEER_VENV / "bin" / "python"
    stamp = PEER_VENV / ".pins"
    wanted = "\n".join(PINS)
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"setting up the peer in {PEER_VENV.name}", file=sys.stderr)
        venv.create(PEER_VENV, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PINS]
        subprocess.run(pip, check=True)
        stamp.write_text(wanted)
    return python


def ask(command: list[str], job: dict[str, Any]) -> dict[str, Any]:
    """Run one side on a job and read the JSON line that it ends with."""
    threads = str(job.get("threads", os.cpu_count()))
    env = {**_ENVIRONMENT, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, input=json.dumps(job), capture_output=True, text=True, cwd=ROOT, env=env, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def peer_command() -> list[str]:
    # -P: the bench folder must not shadow packages of the peer (there is a `kernels`).
    return [str(peer_python()), "-P", str(ROOT / "bench" / "peer_train.py")]


def make_inputs(folder: Path, config: dict[str, Any], steps: int) -> int:
    """Checkpoint, starting adapters, batches and our store, in `folder`; the number of parameters comes back."""
    adapters = {"attention": False, **({"experts": True} if "num_experts" in config else {})}
    job = {"verb": "make", "folder": str(folder), "config": config, "seed": 0, "rank": RANK, "alpha": ALPHA,
           "adapters": adapters}  # fmt: skip
    parameters = int(ask(peer_command(), job)["parameters"])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, config["vocab_size"], (steps, SEQUENCES, TOKENS), generator=generator)
    labels = ids.clone()
    labels[:, :, :PROMPT_TOKENS] = -100
    save_file({"input_ids": ids, "labels": labels}, folder / "batches.safetensors")
    quantize_checkpoint(str(folder / "checkpoint"), folder / "store", QuantizeSettings())
    return parameters


def run_case(case: Case, folder: Path, parameters: int, args: argparse.Namespace) -> None:
    """Alternate the sides, then print what they gave."""
    job = {
        "verb": "train", "folder": str(folder), "adapter": case.adapter, "rank": RANK, "alpha": ALPHA,
        "moe": "num_experts" in case.config, "train_experts": case.adapter == "experts", "threads": args.threads,
        "steps": args.steps, "warmup": 2, "learning_rate": TrainConfig().learning_rate, "recompute": args.recompute,
    }  # fmt: skip
    own = [sys.executable, "-m", "bench.own_train"]
    ours: list[dict[str, Any]] = []
    theirs: dict[str, list[dict[str, Any]]] = {name: [] for name in case.peers}
    for run in range(args.runs):
        print(f"{case.name}: run {run + 1} of {args.runs}", file=sys.stderr)
        ours.append(ask(own, job))
        for name, quantise in case.peers.items():
            theirs[name].append(ask(peer_command(), {**job, "quantise_experts": quantise}))
    for name, answers in theirs.items():
        report(case, name, parameters, ours, answers)


def report(case: Case, setting: str, parameters: int, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """One line for speed, two for memory, one for the losses."""

    def middle(answers: list[dict[str, Any]], name: str) -> float:
        if name == "beyond":
            return statistics.median(a["peak_rss_bytes"] - a["import_rss_bytes"] for a in answers)
        return statistics.median(a[name] for a in answers)

    def spread(answers: list[dict[str, Any]]) -> list[float]:
        rates = [a["tokens_per_s"] for a in answers]
        return [round(min(rates), 1), round(max(rates), 1)]

    common = {"case": case.name, "peer_setting": setting, "parameters": parameters, "runs": len(ours)}
    if ours[0]["trainable"] != theirs[0]["trainable"]:
        raise RuntimeError(f"{case.name}: {ours[0]['trainable']} and {theirs[0]['trainable']} trainable parameters")
    a, b = middle(ours, "tokens_per_s"), middle(theirs, "tokens_per_s")
    print_line(common, "tokens_per_s", round(a, 1), round(b, 1), a / b,
               ours_range=spread(ours), peer_range=spread(theirs))  # fmt: skip
    for figure, name in (("peak_rss_bytes", "peak_rss_bytes"), ("peak_rss_beyond_imports_bytes", "beyond")):
        a, b = middle(ours, name), middle(theirs, name)
        print_line(common, figure, int(a), int(b), b / a)
    a, b = ours[0]["losses"][-1], theirs[0]["losses"][-1]
    print_line(
        common, "loss_after_steps", round(a, 5), round(b, 5), a / b, steps=len(ours[0]["losses"]),
        ours_first=round(ours[0]["losses"][0], 5), peer_first=round(theirs[0]["losses"][0], 5),
        ours_dead_tensors=ours[0]["dead_tensors"], peer_dead_tensors=theirs[0]["dead_tensors"],
        peer_frozen_bytes=theirs[0]["frozen_bytes"],
    )  # fmt: skip


def print_line(common: dict[str, Any], figure: str, ours: float, peer: float, ratio: float, **more: Any) -> None:
    print(json.dumps({**common, "figure": figure, "ours": ours, "peer": peer, "ratio": round(ratio, 3), **more}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3, help="runs of each side, alternating")
    parser.add_argument("--steps", type=int, default=8, help="steps a run, of which the first two are not timed")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--recompute", choices=("auto", "always", "never"), default="auto", help="our activations")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    if args.steps < 3:
        raise UserError(f"--steps is {args.steps}", fix="take 3 or more: two are not timed")
    wanted = [case for case in CASES if args.case in case.name]
    with tempfile.TemporaryDirectory() as scratch:
        made: dict[str, tuple[Path, int]] = {}
        for case in wanted:
            model = case.config["model_type"]
            if model not in made:
                folder = Path(scratch) / model
                folder.mkdir()
                made[model] = folder, make_inputs(folder, case.config, args.steps)
            run_case(case, *made[model], args)


if __name__ == "__main__":
    main()
