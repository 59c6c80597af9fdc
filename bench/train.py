"""Training beside its peers on this CPU: `python -m bench.train`.

Peers: transformers + PEFT + bitsandbytes, Unsloth and ms-swift, each at its best settings (`bench.peer_settings` is how
they were found). All sides train the same random bf16 checkpoint, quantised to NF4 with double quantisation, on the
same batches (2 sequences of 512 tokens), from the same starting adapter (LoRA r=16), with the same AdamW. Each run is
a process of its own; runs alternate; figures are medians over runs of the median step. Memory is the peak resident
set, and that beyond what the process held after its imports. One JSON line per case, peer and figure; `ratio` is how
many times better we are. Each case ends with the line `fastest_peer`: the ratios to the fastest of all peers, and
whether the bars are met. The peers live in `.bench-venv*`, made on first use.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import peers  # first: it notes the environment before lamella changes it

import torch  # isort: skip
from safetensors.torch import save_file  # isort: skip

from bench.report import Line, compare, fastest_peer
from lamella.config import TrainConfig
from lamella.errors import UserError
from lamella.hardware.allocator import TUNABLES
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint

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
MOE_1B: dict[str, Any] = {
    **MOE_115M, "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_experts": 64,
    "moe_intermediate_size": 512,
}  # fmt: skip

DENSE_PEERS = (
    peers.transformers("4-bit config"),
    peers.unsloth("4-bit load"),
    peers.swift("bnb 4 bit"),
)
MOE_PEERS = (
    peers.transformers("4-bit config (experts stay bf16)"),
    peers.transformers("experts made 4-bit", quantise_experts=True),
    peers.unsloth("4-bit load (experts stay bf16)"),
    peers.swift("bnb 4 bit (experts stay bf16)"),
)


@dataclass(frozen=True)
class Case:
    """One model and set of adapters; `bar` is how many times the fastest peer's tokens/s are asked for."""

    name: str
    model: str
    config: dict[str, Any]
    adapter: str
    peers: tuple[peers.Peer, ...]
    bar: float


CASES = (
    Case("dense-88M, LoRA on attention", "dense", DENSE_88M, "attention", DENSE_PEERS, 1.7),
    Case("moe-115M, LoRA on attention", "moe", MOE_115M, "attention", MOE_PEERS, 2.5),
    Case("moe-115M, LoRA on attention and experts", "moe", MOE_115M, "experts", MOE_PEERS, 3.0),
    Case("moe-1.2B, LoRA on attention", "moe-1B", MOE_1B, "attention", MOE_PEERS, 3.0),
    Case("moe-1.2B, LoRA on attention and experts", "moe-1B", MOE_1B, "experts", MOE_PEERS, 3.0),
)
PEER_DEFAULTS: dict[str, Any] = {
    "attention": "sdpa", "experts": "grouped_mm", "checkpointing": False, "autocast": False, "compile": False,
    "quantise_experts": False,
}  # fmt: skip


def make_inputs(folder: Path, config: dict[str, Any], steps: int) -> int:
    """Checkpoint, starting adapters, batches and our store, in `folder`; the number of parameters comes back."""
    adapters = {"attention": False, **({"experts": True} if "num_experts" in config else {})}
    job = {"verb": "make", "folder": str(folder), "config": config, "seed": 0, "rank": RANK, "alpha": ALPHA,
           "adapters": adapters}  # fmt: skip
    parameters = int(peers.ask(peers.transformers("").command(), job)["parameters"])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, config["vocab_size"], (steps, SEQUENCES, TOKENS), generator=generator)
    labels = ids.clone()
    labels[:, :, :PROMPT_TOKENS] = -100
    save_file({"input_ids": ids, "labels": labels}, folder / "batches.safetensors")
    quantize_checkpoint(str(folder / "checkpoint"), folder / "store", QuantizeSettings())
    return parameters


def make_job(case: Case, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What every side is given."""
    return {
        "verb": "train", "folder": str(folder), "adapter": case.adapter, "rank": RANK, "alpha": ALPHA,
        "moe": "num_experts" in case.config, "train_experts": case.adapter == "experts", "threads": args.threads,
        "steps": args.steps, "warmup": 2, "learning_rate": TrainConfig().learning_rate, "recompute": args.recompute,
        **PEER_DEFAULTS,
    }  # fmt: skip


def run_case(case: Case, folder: Path, parameters: int, args: argparse.Namespace) -> None:
    """Alternate the sides, then print what they gave. A peer that fails is named with its error, and left out."""
    job = make_job(case, folder, args)
    chosen = [peer for peer in case.peers if args.peer in ("all", peer.group)]
    ours: list[dict[str, Any]] = []
    theirs: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in chosen}
    failed: dict[str, str] = {}
    for run in range(args.runs):
        print(f"{case.name}: run {run + 1} of {args.runs}", file=sys.stderr)
        # the heap's settings that the `lamella` command gives itself
        ours.append(peers.ask([sys.executable, "-m", "bench.own_train"], job, {"GLIBC_TUNABLES": TUNABLES}))
        for peer in chosen:
            if peer.name in failed:
                continue
            try:
                theirs[peer.name].append(peers.ask(peer.command(), {**job, **peer.options}, peer.variables))
            except peers.SideFailed as error:
                failed[peer.name] = error.reason
    common = {"case": case.name, "parameters": parameters, "runs": args.runs}
    for peer in chosen:
        if peer.name in failed:
            emit({**common, "peer": peer.name, "error": failed[peer.name], "pins": list(peer.environment.pins)})
        else:
            for line in compare(ours, theirs[peer.name]):
                emit({**common, "peer": peer.name, **line})
    measured = {name: answers for name, answers in theirs.items() if name not in failed}
    if measured:
        emit({**common, **fastest_peer(ours, measured, case.bar)})


def emit(line: Line) -> None:
    print(json.dumps(line), flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked; `cases` holds those chosen.

    Raises:
        UserError: too few steps or runs, or no such case.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3, help="runs of each side, alternating")
    parser.add_argument("--steps", type=int, default=8, help="steps a run, of which the first two are not timed")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--recompute", choices=("auto", "always", "never"), default="auto", help="our activations")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--peer", choices=("all", "transformers", "unsloth", "ms-swift"), default="all")
    args = parser.parse_args(arguments)
    if args.steps < 3:
        raise UserError(f"--steps is {args.steps}", fix="take 3 or more: two are not timed")
    if args.runs < 1:
        raise UserError(f"--runs is {args.runs}", fix="take 1 or more")
    args.cases = [case for case in CASES if args.case in case.name]
    if not args.cases:
        names = "; ".join(case.name for case in CASES)
        raise UserError(f"--case {args.case!r} names no case", fix=f"use a part of one of: {names}")
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        made: dict[str, tuple[Path, int]] = {}
        for case in args.cases:
            if case.model not in made:
                folder = Path(scratch) / case.model
                folder.mkdir()
                made[case.model] = folder, make_inputs(folder, case.config, args.steps)
            run_case(case, *made[case.model], args)


if __name__ == "__main__":
    main()
