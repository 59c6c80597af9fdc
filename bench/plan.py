"""Plans beside the runs they are for: `python -m bench.plan`.

For each configuration the commands are run as a user runs them: `lamella plan RUN.toml --machine machine.json --save plan.json`,
`lamella train plan.json`, in processes of their own, on stores of random weights. One JSON line per case: seconds of a step planned
and measured (median, the first steps left out), peak memory of every rank planned and measured (`VmHWM`), their ratios, and how
fast the machine multiplied in the run beside what was probed. Before, a few runs of other configurations calibrate the plans
(`--bare`: none), as past runs do for users; `uncalibrated_ratio` is without. The last line sums up: mean and median of log
ratios (a systematic error), the largest deviations. None of these configurations was used to fit any constant.

    python -m bench.plan [--case NAME] [--machine machine.json] [--folder DIR] [--steps 10] [--bare] [--tiny]

Without --machine the machine is probed first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import size
from lamella.errors import UserError
from lamella.store.tokens import FIRST_WORD, word

ROOT = Path(__file__).parent.parent
SETTLED = 2
"""First steps that are not counted."""
BARS = {"step": 0.10, "step, uncalibrated": 0.10, "memory": 0.05}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MARKS = 22
"""Tokens of a row's chat marks and roles, about."""


def dense(hidden: int, layers: int, inner: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16384, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64,
        "intermediate_size": inner, "max_position_embeddings": 16384, "tie_word_embeddings": True, "eos_token_id": 16383,
        "dtype": "bfloat16", **more,
    }  # fmt: skip


def moe(hidden: int, layers: int, experts: int, active: int, inner: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 16384, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": 64,
        "intermediate_size": 4 * hidden, "moe_intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": active,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 16384,
        "tie_word_embeddings": False, "eos_token_id": 16383, "dtype": "bfloat16", **more,
    }  # fmt: skip


QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "dense 640": dense(640, 10, 1792, 10, 5),
    "dense 1280": dense(1280, 8, 3584, 20, 4, **QWEN3),
    "dense 512": dense(512, 8, 1408, 8, 4),
    "dense 1024": dense(1024, 6, 2816, 16, 8, **QWEN3),
    "moe 512": moe(512, 8, 32, 4, 192, 8),
    "moe 384": moe(384, 6, 16, 2, 256, 8),
    "moe 768": moe(768, 8, 48, 6, 384, 12),
}


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        lengths: of a step's rows, in tokens (about: chat marks come on top).
        run: settings beside store and data, a flat dotted tree.
        devices: entries of `[[devices]]`.
    """

    name: str
    model: str
    lengths: tuple[int, ...]
    run: dict[str, Any] = field(default_factory=dict)
    devices: tuple[dict[str, Any], ...] = ()


def _attention(**more: Any) -> dict[str, Any]:
    return {"lora.targets": list(ATTENTION), **more}


def _ranks(*slowdowns: float) -> tuple[dict[str, Any], ...]:
    return tuple({"threads": 1, "slowdown": s} for s in slowdowns)


FITTING = (
    Case("fit: dense, attention", "dense 512", (256,) * 4, _attention()),
    Case("fit: dense, all linear, recomputed", "dense 1024", (500, 300), {"memory.recompute": "always"}),
    Case("fit: moe, attention", "moe 512", (512,) * 2, _attention()),
    Case("fit: moe, experts too, recomputed", "moe 512", (300,) * 3, {"memory.recompute": "always"}),
    Case("fit: dense, all linear, kept", "dense 1024", (500, 300)),
    Case("fit: moe, experts too, kept", "moe 512", (300,) * 3),
    Case("fit: dense, short rows", "dense 512", (80,) * 16, _attention(**{"memory.recompute": "always"})),
    Case("fit: dense, 2 ranks", "dense 512", (150,) * 10, _attention(), _ranks(1.0, 1.0)),
    Case("fit: moe, 2 ranks", "moe 512", (150,) * 12, _attention(), _ranks(1.0, 1.0)),
)
"""Runs that plans are calibrated by (`lamella plan --compare RUN --calibrate`) before the others are planned."""
SHORT = (60, 75, 90, 110) * 6
CASES = (
    Case("dense, attention, kept", "dense 640", (300,) * 4, _attention()),
    Case("dense, all linear, short rows", "dense 640", SHORT, {"lora.rank": 8}),
    Case("dense, one long row, recomputed", "dense 640", (6000,), _attention(**{"memory.recompute": "always"})),
    Case("dense wide, all linear, kept", "dense 1280", (700, 500), {"lora.rank": 32}),
    Case("dense wide, streamed", "dense 1280", (900,) * 3, _attention(**{"memory.budget": "400MB"})),
    Case("dense wide, recomputed, micro-batches of 512", "dense 1280", (250,) * 8,
         _attention(**{"memory.recompute": "always", "train.micro_batch_tokens": 512})),
    Case("moe, attention, kept", "moe 384", (400,) * 4, _attention()),
    Case("moe, experts too", "moe 384", (256,) * 8, {"lora.rank": 32}),
    Case("moe, long rows, recomputed", "moe 384", (3000, 2000), _attention(**{"memory.recompute": "always"})),
    Case("moe wide, attention, kept", "moe 768", (900, 600), _attention()),
    Case("moe wide, experts too, rank 24", "moe 768", (500,) * 4, {"lora.rank": 24}),
    Case("moe wide, streamed, experts too", "moe 768", (600,) * 3, {"memory.budget": "330MB"}),
    Case("moe wide, short rows", "moe 768", SHORT, _attention(**{"memory.recompute": "always"})),
    Case("2 ranks, one slow, sequences", "dense 640", (200,) * 12, _attention(), _ranks(1.0, 2.5)),
    Case("2 ranks, one slow, stages", "moe 384", (200,) * 12, _attention(**{"split.kind": "stages"}), _ranks(1.0, 2.0)),
    Case("3 ranks, all unlike, sequences", "moe 384", (120,) * 24, _attention(), _ranks(1.0, 1.7, 3.0)),
)  # fmt: skip


def write_rows(path: Path, lengths: tuple[int, ...], steps: int, vocab: int) -> None:
    """Rows of random words, of about these lengths, for so many steps."""
    rng = random.Random(len(lengths))
    words = vocab - FIRST_WORD - 3
    with path.open("w", encoding="utf-8") as stream:
        for number, length in enumerate(list(lengths) * steps):
            each = max(length - MARKS, 8)
            said = ["".join(f" {word(rng.randrange(words))}" for _ in range(n)) for n in (each // 2, each - each // 2)]
            turns = [{"role": r, "content": text.strip()} for r, text in zip(("user", "assistant"), said, strict=True)]
            stream.write(json.dumps({"id": number, "messages": turns}) + "\n")


def run_toml(case: Case, store: Path, folder: Path, steps: int) -> Path:
    rows = folder / "rows.jsonl"
    write_rows(rows, case.lengths, steps, MODELS[case.model]["vocab_size"])
    tree: dict[str, dict[str, Any]] = {
        "data": {"train": [str(rows)], "max_tokens": 16384},
        "train": {"steps": steps, "rows_per_step": len(case.lengths), "warmup_steps": 0},
        "checkpoint": {"every_steps": 0},
    }
    for key, value in case.run.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    lines = [f'store = "{store}"', f'runs_dir = "{folder}"', 'name = "run"']
    for section, values in tree.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    for device in case.devices:
        lines += ["[[devices]]", *(f"{name} = {json.dumps(value)}" for name, value in device.items())]
    file = folder / "run.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def command(*words: str, folder: Path = ROOT) -> None:
    """One `lamella` command, run in a folder; its messages on failure.

    Raises:
        SystemExit: it failed.
    """
    env = {**os.environ, "LAMELLA_SILENCE_S": "120"}
    done = subprocess.run([sys.executable, "-m", "lamella", *words], cwd=folder, env=env, capture_output=True, text=True,
                          check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(
            f"lamella {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        )


def measure(
    case: Case, store: Path, machine: Path, folder: Path, steps: int, calibrate: bool = False
) -> dict[str, Any]:
    """Plan, train, look; and take the run into the calibration beside the machine."""
    folder.mkdir(parents=True)
    run, plan = run_toml(case, store, folder, steps), folder / "plan.json"
    bare, alone = folder / "bare.json", folder / "machine.json"  # no calibration lies beside this one
    alone.write_text(machine.read_text())
    command("plan", str(run), "--machine", str(alone), "--save", str(bare))
    command("plan", str(run), "--machine", str(machine), "--save", str(plan))
    command("train", str(plan), "--fresh")
    if calibrate:
        command("plan", "--compare", str(folder / "run"), "--calibrate", folder=machine.parent)
    made = json.loads(plan.read_text())
    bare_s = json.loads(bare.read_text())["figures"]["step_s"]
    figures = made["figures"]
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = lines[SETTLED:]
    step_s = statistics.median(line["step_s"] for line in counted)
    peaks = [device["peak_bytes"] for device in lines[-1]["devices"]]
    needs = [rank["need"] for rank in figures["ranks"]]
    rate = statistics.median(line["flop_per_s"] / line["utilisation"] for line in counted)
    probed = sum(device["matmul_flops_per_s"] for device in made["machine"]["devices"])
    return {
        "case": case.name, "model": case.model, "fits": made["fits"],
        "step_s": {"planned": round(figures["step_s"], 4), "measured": round(step_s, 4)},
        "step_ratio": round(figures["step_s"] / step_s, 4), "uncalibrated_ratio": round(bare_s / step_s, 4),
        "memory": {"planned": needs, "measured": peaks},
        "memory_ratio": [round(n / p, 4) for n, p in zip(needs, peaks, strict=True)],
        "tokens": counted[0]["tokens"], "matmul_over_probed": round(rate / probed / max(len(case.devices), 1), 3),
        "steps_range_s": [round(min(x["step_s"] for x in counted), 4), round(max(x["step_s"] for x in counted), 4)],
    }  # fmt: skip


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """A systematic error is a mean of log ratios far from zero beside their scatter; single ones scatter with the machine."""
    found: dict[str, Any] = {"cases": len(lines)}
    ratios = {
        "step": [line["step_ratio"] for line in lines],
        "memory": [r for line in lines for r in line["memory_ratio"]],
    }
    for what, values in ratios.items():
        logs = [math.log(value) for value in values]
        within = sum(abs(value - 1) <= BARS[what] for value in values)
        found[what] = {
            "mean_log": round(statistics.fmean(logs), 4), "median": round(statistics.median(values), 4),
            "scatter": round(statistics.pstdev(logs), 4), "worst": max(values, key=lambda v: abs(math.log(v))),
            "bar": BARS[what], "within_bar": within, "of": len(values),
            "systematic": abs(statistics.median(values) - 1) > BARS[what],
        }  # fmt: skip
    return found


TINY = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 2048,
        "eos_token_id": 2047}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--machine", type=Path, help="machine.json; default: probe first")
    parser.add_argument("--folder", type=Path, help="keep stores and runs here")
    parser.add_argument("--steps", type=int, default=10, help=f"steps a run, of which {SETTLED} are not counted")
    parser.add_argument("--bare", action="store_true", help="without calibrating runs")
    parser.add_argument("--tiny", action="store_true", help="the same way with tiny models")
    args = parser.parse_args()
    wanted = [case for case in CASES if args.case in case.name]
    if not wanted:
        raise UserError(f"--case {args.case!r} names no case", fix=f"cases: {', '.join(c.name for c in CASES)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        machine = args.machine or folder / "machine.json"
        if not machine.is_file():
            command("probe", "--out", str(machine), *(["--quick"] if args.tiny else []))
        machine = _copy(machine, folder / "calibrated")
        lines = []
        for number, case in enumerate((*(() if args.bare else _fitting(wanted)), *wanted)):
            config = {**MODELS[case.model], **(TINY if args.tiny else {})}
            store = size.make_store(folder, size.Case(f"{case.model}{' tiny' if args.tiny else ''}", config, 0, ""))
            with tempfile.TemporaryDirectory(dir=folder) as runs:
                line = measure(case, store, machine, Path(runs) / str(number), args.steps, case in FITTING)
            print(json.dumps(line), flush=True)
            lines += [] if case in FITTING else [line]
        print(json.dumps(summary(lines)), flush=True)


def _fitting(wanted: list[Case]) -> list[Case]:
    """Runs on devices like those of the cases: calibrations know a device by its threads."""
    kinds = {bool(case.devices) for case in wanted}
    return [case for case in FITTING if bool(case.devices) in kinds]


def _copy(machine: Path, folder: Path) -> Path:
    """machine.json in a folder of its own, where no calibration is yet."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return Path(shutil.copy(machine, folder / "machine.json"))


if __name__ == "__main__":
    main()
