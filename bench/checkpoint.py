"""What a checkpoint after every step costs: `python -m bench.checkpoint`.

A demo-size model (SmolLM2-135M-shaped random store, LoRA r=16 on all linear layers: 4.9M trained parameters, 59 MB a
checkpoint) is trained by `lamella train`'s own loop, saving at every fourth step. A save's cost is what its step and
the one after it, beside which it is written, take longer than the two others.
Prints one JSON line: medians, their difference as a share of the step, and the bar.

    python -m bench.checkpoint [--steps 64] [--tokens 1024] [--tiny]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path

from bench.size import SMOLLM2_135M, Case, make_store, timed_run, write_rows
from lamella.config import build_run_config
from lamella.errors import UserError
from lamella.hardware.allocator import restart_tuned

BAR = 0.02


def turns_of(case: Case, folder: Path, steps: int, every: int) -> tuple[list[float], int]:
    """Seconds of each whole turn of the loop (step, metrics, save), and the bytes of a checkpoint."""
    rows = folder / "rows.jsonl"
    write_rows(rows, case, steps)
    config = build_run_config({
        "store": str(make_store(folder, case)), "runs_dir": str(folder), "name": f"every-{every}",
        "data": {"train": [str(rows)], "max_tokens": 4 * case.row_tokens}, "lora": {"rank": 16},
        "train": {"steps": steps, "rows_per_step": case.rows, "micro_batch_tokens": 4 * case.row_tokens},
        "checkpoint": {"every_steps": every},
    })  # fmt: skip
    result, starts = timed_run(config)
    newest = max((result.run_dir / "checkpoints").iterdir())
    turns = [b - a for a, b in itertools.pairwise(starts)]
    return turns, sum(p.stat().st_size for p in newest.iterdir())


def share(turns: list[float], every: int) -> tuple[float, float]:
    """Median seconds of a turn without any work of a save, and what one save adds to its turn and the next one.

    Turn k (from 0) saves when (k + 1) % every == 0; the turn after it shares the machine with the flushing.
    """
    groups: list[list[float]] = [[] for _ in range(every)]
    for k, turn in enumerate(turns):
        groups[(k + 1) % every].append(turn)
    saving, after, plain = groups[0], groups[1], [t for g in groups[2:] for t in g]
    base = statistics.median(plain)
    return base, statistics.median(saving) + statistics.median(after) - 2 * base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=64, help="optimizer steps; four are not counted")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens a step")
    parser.add_argument("--tiny", action="store_true", help="the same way with a tiny model")
    args = parser.parse_args()
    if args.steps < 16:
        raise UserError(f"--steps is {args.steps}", fix="take 16 or more")
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "intermediate_size": 128, "vocab_size": 2048, "eos_token_id": 2047}  # fmt: skip
    config = {**SMOLLM2_135M, **(small if args.tiny else {})}
    case = Case("smollm2-135m", config, 0, "", rows=4, row_tokens=max(args.tokens // 4, 8))
    every = 4
    with tempfile.TemporaryDirectory() as scratch:
        turns, nbytes = turns_of(case, Path(scratch), args.steps, every)
    step_s, save_s = share(turns[4:], every)
    print(json.dumps({
        "case": "checkpoint after every step", "parameters_bytes": nbytes, "tokens_per_step": args.tokens,
        "steps": args.steps, "step_s": round(step_s, 4), "save_s": round(save_s, 4),
        "share": round(save_s / step_s, 4), "bar": BAR, "ok": save_s / step_s <= BAR,
    }))  # fmt: skip


if __name__ == "__main__":
    restart_tuned()
    main()
