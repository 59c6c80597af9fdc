"""Real loss curves in bf16 and in fp32: `python -m bench.curve`.

Trains the demo's model (SmolLM2-135M) on the demo's rows three times from the same adapter on the same batches:
`bf16` as users train (all fast paths), `bf16-plain` on plain torch (`LAMELLA_KERNELS=torch`), `fp32`, each in a
process of its own. fp32 is the reference; how far plain bf16 lies from it is what bf16 rounding itself costs, and the
change of the loss from one batch to the next is what a user sees as noise.

Each side is a run under `--dir` and goes on from its last checkpoint (every 5 steps) when started again. Writes
`<out>.jsonl` (one line a step) and `<out>.svg`; the last line printed is the statistics.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.plot import Panel, svg
from lamella.errors import UserError
from lamella.files import write_text
from lamella.hardware.allocator import restart_tuned

ROOT = Path(__file__).parent.parent
PLAIN = {"LAMELLA_KERNELS": "torch", "LAMELLA_ATTENTION": "torch"}
SIDES: dict[str, tuple[str, dict[str, str]]] = {
    "bf16": ("bf16", {}),
    "bf16-plain": ("bf16", PLAIN),
    "fp32": ("fp32", {}),
}
"""Name -> (compute.dtype, environment). fp32 is what its tests hold to transformers + PEFT, every gradient to 1e-5
(`tests/engine/test_families.py`); on plain torch it would take an hour."""
REFERENCE = "fp32"


def train_side(side: str, steps: int, runs: Path, cache: Path) -> None:
    """One side, in this process."""
    from lamella.config import CheckpointConfig, ComputeConfig
    from lamella.demo.job import prepare_apart, run_config
    from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
    from lamella.train.loop import train_run

    made = prepare_apart(cache, "dense")
    store = cache / "stores" / made.checkpoint.name
    if not store.exists():
        quantize_checkpoint(str(made.checkpoint), store, QuantizeSettings())
    config = run_config(made, store, "dense", steps, runs)
    changed = {
        "name": run_name(side, steps),
        "compute": ComputeConfig(dtype=SIDES[side][0]),  # type: ignore[arg-type]
        "checkpoint": CheckpointConfig(every_steps=5, keep=1),
    }
    train_run(config.model_copy(update=changed), mode="auto")


def run_name(side: str, steps: int) -> str:
    return f"curve-{steps}-{side}"


def read_side(folder: Path, steps: int) -> list[dict[str, Any]]:
    """A side's metrics, one line a step; fewer than `steps` when it is not done."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return lines[:steps]


def is_done(folder: Path, steps: int) -> bool:
    receipt = folder / "receipt.json"
    return (
        len(read_side(folder, steps)) == steps
        and receipt.is_file()
        and json.loads(receipt.read_text()).get("status") == "ok"
    )


def compare(losses: dict[str, Sequence[float]]) -> dict[str, Any]:
    """Statistics of each side's difference to the reference, and whether the fast one's is noise.

    `batch_sd`: standard deviation of the reference's change from step to step, over sqrt(2): what one batch's loss
    scatters around the curve. `within_noise`: the fast side's differences are no larger than those of plain bf16
    (root mean square, at most 1.25 times) or below a tenth of the batches' scatter, and their mean is within three
    standard errors of zero or below a tenth of that scatter.
    """
    reference = losses[REFERENCE]
    changes = [b - a for a, b in itertools.pairwise(reference)]
    batch_sd = math.sqrt(statistics.fmean(c * c for c in changes) / 2)
    found: dict[str, Any] = {"steps": len(reference), "batch_sd": batch_sd}
    for side in losses:
        if side == REFERENCE:
            continue
        differences = [a - b for a, b in zip(losses[side], reference, strict=True)]
        found[side] = {
            "mean": statistics.fmean(differences),
            "sd": statistics.stdev(differences),
            "rms": math.sqrt(statistics.fmean(d * d for d in differences)),
            "largest": max(map(abs, differences)),
            "last_quarter_mean": statistics.fmean(differences[-max(1, len(differences) // 4) :]),
        }
    fast, plain = found["bf16"], found.get("bf16-plain")
    small = batch_sd / 10
    error = fast["sd"] / math.sqrt(len(reference))
    found["within_noise"] = bool(
        (fast["rms"] <= small or (plain is not None and fast["rms"] <= 1.25 * plain["rms"]))
        and abs(fast["mean"]) <= max(3 * error, small)
    )
    return found


def write(out: Path, losses: dict[str, Sequence[float]], found: dict[str, Any]) -> None:
    """The curves as JSON lines and as a plot."""
    steps = range(1, found["steps"] + 1)
    rows = ({"step": k, **{side: values[k - 1] for side, values in losses.items()}} for k in steps)
    write_text(out.with_suffix(".jsonl"), (json.dumps(row) + "\n" for row in rows))
    gaps = {
        f"{side} - {REFERENCE}": [a - b for a, b in zip(values, losses[REFERENCE], strict=True)]
        for side, values in losses.items()
        if side != REFERENCE
    }
    panels = [
        Panel("Loss per label token, SmolLM2-135M, 8 rows a step", dict(losses)),
        Panel(f"Difference (one batch scatters by {found['batch_sd']:.3f})", gaps),
    ]
    write_text(out.with_suffix(".svg"), svg(list(steps), panels, x_label="step"))


def run_sides(sides: Sequence[str], args: argparse.Namespace) -> None:
    """Train the sides that are not done yet, each in a process of its own."""
    for side in sides:
        if is_done(args.dir / run_name(side, args.steps), args.steps):
            continue
        command = [sys.executable, "-m", "bench.curve", "--side", side, "--steps", str(args.steps), "--dir", str(args.dir),
                   "--cache", str(args.cache)]  # fmt: skip
        subprocess.run(command, env={**os.environ, **SIDES[side][1]}, cwd=ROOT, stdout=sys.stderr, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--without-plain", action="store_true", help="leave the bf16 run on plain torch out")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs", help="folder of the runs")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "demo", help="the demo's cache")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "loss-curve", help="without suffix")
    parser.add_argument("--side", choices=tuple(SIDES), help="train this side alone, and stop")
    args = parser.parse_args()
    args.dir, args.cache = args.dir.resolve(), args.cache.resolve()
    if args.steps < 4:
        raise UserError(f"--steps is {args.steps}", fix="take 4 or more: statistics need some")
    if args.side is not None:
        train_side(args.side, args.steps, args.dir, args.cache)
        return
    sides = [side for side in SIDES if not (args.without_plain and side == "bf16-plain")]
    run_sides(sides, args)
    metrics = {side: read_side(args.dir / run_name(side, args.steps), args.steps) for side in sides}
    batches = {side: [line["rows_hash"] for line in lines] for side, lines in metrics.items()}
    if any(hashes != batches[REFERENCE] for hashes in batches.values()):
        raise RuntimeError("the sides did not train on the same rows")
    losses = {side: [line["loss"] for line in lines] for side, lines in metrics.items()}
    found = compare(losses)
    write(args.out, losses, found)
    rates = {
        side: round(statistics.median(line["tokens_per_s"] for line in lines), 1) for side, lines in metrics.items()
    }
    print(json.dumps({"case": "SmolLM2-135M, demo rows", **found, "tokens_per_s": rates}))


if __name__ == "__main__":
    restart_tuned()
    main()
