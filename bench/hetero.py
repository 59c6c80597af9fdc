"""Devices of different speed: `python -m bench.hetero`.

Ranks on this machine's cores, one thread each, some slowed down (`[[devices]].slowdown`), train a store of random weights by
`lamella train`'s own loop, in processes that `lamella train` starts. One JSON line per case:

    2 devices   speeds 1 and 0.4: an even token split beside a found one, which adapts to measured times
    3 devices   speeds 1, 0.6 and 0.3: likewise, beside the ideal
    stages      a found pipeline beside its own optimum as simulated with the speeds it measured
    slowed      two equal devices, one slowed to half in mid-run: steps until they are in balance again

Step seconds are medians over steps after the split has settled; the sides run one after the other. What a device can do is
measured in the same runs: its share of the tokens over the seconds it computed. A step's ideal time is its work over the sum
of these speeds: `limit` is the ideal by the even run's speeds as a share of the even step, `over_ideal` the found step over
the ideal by its own speeds. (Ranks share two cores and one unit for bf16 products: in an even split the fast ones wait and
leave them to the slow ones, in a found one all compute all the time, so each is slower; `over_ideal_of_even` has both in it.)

    python -m bench.hetero [--case 2] [--steps 16] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.size import Case, make_store, write_rows
from lamella.errors import UserError
from lamella.hardware.allocator import restart_tuned

ROOT = Path(__file__).parent.parent
SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 8192, "hidden_size": 512,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1024, "moe_intermediate_size": 192, "num_experts": 16, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "eos_token_id": 8191, "dtype": "bfloat16",
}  # fmt: skip
SMALL = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 32, "moe_intermediate_size": 64,
         "vocab_size": 2048, "eos_token_id": 2047}  # fmt: skip
ROWS, ROW_TOKENS = 56, 64
SETTLED = 8
"""Steps that are not counted: the split adapts to measured times in them."""
BALANCED = 1.1
"""Largest ratio of two devices' computing seconds in a step that counts as balance."""


@dataclass(frozen=True)
class Side:
    """One training: slowdown of each device, and its `[split]`."""

    name: str
    slowdowns: tuple[Any, ...]
    split: dict[str, Any]


def run_toml(folder: Path, store: Path, rows: Path, side: Side, args: argparse.Namespace) -> Path:
    file = folder / f"{side.name}.toml"
    lines = [
        f'store = "{store}"', f'runs_dir = "{folder}"', f'name = "{side.name}"', "[data]", f'train = ["{rows}"]',
        "[lora]", "rank = 16", 'targets = ["q_proj", "k_proj", "v_proj", "o_proj"]',
        "[train]", f"steps = {args.steps}", f"rows_per_step = {ROWS}", "warmup_steps = 0", "micro_batch_tokens = 1024",
        "[checkpoint]", "every_steps = 0", "[split]", *(f"{k} = {json.dumps(v)}" for k, v in side.split.items()),
    ]  # fmt: skip
    for slowdown in side.slowdowns:
        lines += ["[[devices]]", "threads = 1", f"slowdown = {json.dumps(slowdown)}"]
    file.write_text("\n".join(lines) + "\n")
    return file


def train(folder: Path, store: Path, rows: Path, side: Side, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` of one training."""
    file = run_toml(folder, store, rows, side, args)
    env = {**os.environ, "LAMELLA_SILENCE_S": "120"}
    command = [sys.executable, "-m", "lamella", "train", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{side.name} failed:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in (folder / side.name / "metrics.jsonl").read_text().splitlines()]


def step_seconds(lines: list[dict[str, Any]]) -> float:
    return statistics.median(line["step_s"] for line in lines[SETTLED:])


def computing(line: dict[str, Any]) -> list[float]:
    return [device["compute_s"] for device in line["devices"]]


def idle(lines: list[dict[str, Any]]) -> list[float]:
    """Per device, median share of a step in which it does not compute, dequantise, update or save."""
    shares = [[1 - d["busy_s"] / d["step_s"] for d in line["devices"]] for line in lines[SETTLED:]]
    return [round(statistics.median(device), 4) for device in zip(*shares, strict=True)]


def speeds(even: list[dict[str, Any]]) -> list[float]:
    """Steps per second of each device alone, from its tokens and computing seconds in an even split."""
    found = []
    for rank in range(len(even[0]["devices"])):
        each = [line["devices"][rank]["tokens"] / line["tokens"] / computing(line)[rank] for line in even[SETTLED:]]
        found.append(statistics.median(each))
    return found


def beside_even(name: str, factors: tuple[float, ...], bars: dict[str, float], run: Any) -> dict[str, Any]:
    """A found token split beside an even one."""
    slow = tuple(1 / factor for factor in factors)
    share = [1 / len(slow)] * len(slow)
    even = run(Side(f"even-{len(slow)}", slow, {"kind": "tokens", "shares": share, "rebalance": False}))
    found = run(Side(f"found-{len(slow)}", slow, {"kind": "tokens"}))
    able = speeds(even)
    even_s, found_s, ideal_s = step_seconds(even), step_seconds(found), 1 / sum(able)
    both = speeds(found)
    figures = {
        "even_s": round(even_s, 4), "found_s": round(found_s, 4), "share_of_even": round(found_s / even_s, 4),
        "limit": round(ideal_s / even_s, 4), "over_ideal": round(found_s * sum(both), 4),
        "over_ideal_of_even": round(found_s / ideal_s, 4), "idle": idle(found),
        "speeds_in_even": [round(s / able[0], 3) for s in able], "speeds_in_found": [round(s / able[0], 3) for s in both],
        "loss": [even[-1]["loss"], found[-1]["loss"]],
    }  # fmt: skip
    ok = all(figures[key] <= bar for key, bar in bars.items() if key != "idle") and (
        max(figures["idle"]) <= bars.get("idle", 1.0)
    )
    return {"case": name, **figures, "bars": bars, "ok": ok}


def stages(run: Any) -> dict[str, Any]:
    """A pipeline beside what its own plan says with the speeds measured."""
    lines = run(Side("stages", (1.0, 2.5), {"kind": "stages"}))
    step_s = step_seconds(lines)
    planned_s = statistics.median(line["planned_s"] for line in lines[SETTLED:])
    over = step_s / planned_s
    return {"case": "stages, 1 and 0.4", "step_s": round(step_s, 4), "simulated_s": round(planned_s, 4),
            "over_simulated": round(over, 4), "idle": idle(lines), "bars": {"over_simulated": 1.1}, "ok": over <= 1.1}  # fmt: skip


def slowed(run: Any, at: int) -> dict[str, Any]:
    """Steps until two devices' computing times are within `BALANCED` again, after one of them slows to half."""
    lines = run(Side("slowed", (1.0, [[0, 1.0], [at, 2.0]]), {"kind": "tokens"}))
    ratios = [max(computing(line)) / min(computing(line)) for line in lines]
    balanced = next((k for k in range(at, len(lines)) if max(ratios[k : k + 3]) <= BALANCED), None)
    steps = None if balanced is None else balanced - at
    return {"case": "slowed to half in mid-run", "ratios": [round(r, 3) for r in ratios], "at": at, "steps": steps,
            "bars": {"steps": 5}, "ok": steps is not None and steps <= 5}  # fmt: skip


CASES = ("2 devices", "3 devices", "stages", "slowed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--steps", type=int, default=20, help=f"steps a training, of which {SETTLED} are not counted")
    parser.add_argument("--tiny", action="store_true", help="the same way with a tiny model")
    args = parser.parse_args()
    if args.steps < SETTLED + 3:
        raise UserError(f"--steps is {args.steps}", fix=f"take {SETTLED + 3} or more")
    wanted = [name for name in CASES if args.case in name]
    if not wanted:
        raise UserError(f"no case has {args.case!r} in its name", fix=f"one of: {', '.join(CASES)}")
    case = Case("hetero", {**SHAPE, **(SMALL if args.tiny else {})}, 0, "", rows=ROWS, row_tokens=ROW_TOKENS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        store, rows = make_store(folder, case), folder / "rows.jsonl"
        write_rows(rows, case, args.steps)

        def run(side: Side) -> list[dict[str, Any]]:
            return train(folder, store, rows, side, args)

        for name in wanted:
            if name == "2 devices":
                line = beside_even(name, (1.0, 0.4), {"share_of_even": 0.6, "idle": 0.06}, run)
            elif name == "3 devices":
                line = beside_even(name, (1.0, 0.6, 0.3), {"over_ideal": 1.1}, run)
            elif name == "stages":
                line = stages(run)
            else:
                line = slowed(run, at=args.steps // 2)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    restart_tuned()
    main()
