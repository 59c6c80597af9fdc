"""Which settings are a peer's best: `python -m bench.peer_settings --model moe`.

Each setting differs from the first in one thing; runs alternate with the first one's, since only ratios taken side by
side mean anything. One JSON line a setting: tokens/s and peak memory beyond imports over the first setting's; `cpu_ratio` is
that of CPU time a step, which on one thread (`--threads 1`) hardly feels other processes.
`bench.train` uses the best of these.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import peers
from bench.report import middle
from bench.train import CASES, make_inputs, make_job
from lamella.errors import UserError


def settings(moe: bool) -> dict[str, peers.Peer]:
    """What is tried, the base first."""
    base = peers.transformers("base")
    tried = {
        "transformers: sdpa, fp32 adapter": base,
        "transformers: bf16 autocast": peers.transformers("", autocast=True),
        "transformers: eager attention": peers.transformers("", attention="eager"),
        "transformers: checkpointing": peers.transformers("", checkpointing=True),
        "transformers: compiled layers": peers.transformers("", compile=True),
        "Unsloth": peers.unsloth(""),
        "Unsloth: compiled layers": peers.unsloth("", compiled=True),
        "ms-swift": peers.swift(""),
    }
    if moe:
        tried |= {
            "transformers: batched_mm experts": peers.transformers("", experts="batched_mm"),
            "transformers: eager experts": peers.transformers("", experts="eager"),
            "transformers: experts made 4-bit": peers.transformers("", quantise_experts=True),
        }
    return tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    models = sorted({case.model for case in CASES})
    parser.add_argument("--model", choices=models, default="moe")
    parser.add_argument("--adapter", choices=("attention", "experts"), default="attention")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="steps a run, of which the first two are not timed")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="only settings whose name contains this (the base always runs)")
    args = parser.parse_args()
    args.recompute = "auto"
    found = [case for case in CASES if (case.model, case.adapter) == (args.model, args.adapter)]
    if not found:
        raise UserError(f"--model {args.model} has no case with --adapter {args.adapter}", fix="take a MoE model")
    case = found[0]
    tried = settings("num_experts" in case.config)
    base_name = next(iter(tried))
    with tempfile.TemporaryDirectory() as scratch:
        make_inputs(Path(scratch), case.config, args.steps)
        job = make_job(case, Path(scratch), args)
        for name, peer in tried.items():
            if name != base_name and args.only in name:
                print(json.dumps({"case": case.name, "setting": name, **against(tried[base_name], peer, job, args.runs)}),
                      flush=True)  # fmt: skip


def against(base: peers.Peer, peer: peers.Peer, job: dict[str, Any], runs: int) -> dict[str, Any]:
    """The setting over the base, runs alternating."""
    answers: dict[str, list[dict[str, Any]]] = {"base": [], "tried": []}
    for run in range(runs):
        print(f"run {run + 1} of {runs}", file=sys.stderr)
        for key, side in (("base", base), ("tried", peer)):
            try:
                answers[key].append(peers.ask(side.command(), {**job, **side.options}, side.variables))
            except peers.SideFailed as error:
                return {"error": error.reason, "side": key}
    speeds = {key: middle(found, "tokens_per_s") for key, found in answers.items()}
    cpu = {key: middle(found, "cpu_s_per_step") for key, found in answers.items()}
    memory = {key: middle(found, "beyond") for key, found in answers.items()}
    return {
        "tokens_per_s": round(speeds["tried"], 1),
        "base_tokens_per_s": round(speeds["base"], 1),
        "ratio": round(speeds["tried"] / speeds["base"], 3),
        "cpu_ratio": round(cpu["base"] / cpu["tried"], 3),
        "memory_ratio": round(memory["tried"] / memory["base"], 3),
        "threads": job["threads"],
    }


if __name__ == "__main__":
    main()
