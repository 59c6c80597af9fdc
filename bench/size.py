"""Models larger than memory, trained under a hard limit: `python -m bench.size`.

For a Qwen3-30B-A3B-shaped and a Qwen3-235B-A22B-shaped store of random weights (`lamella store synth`; the larger one
shares one file between its layers), whole optimizer steps of at least 1,024 tokens are taken by `lamella train`'s own
loop, with LoRA on attention and on experts, in a process of its own under a memory limit that the kernel enforces. A third
case is one row of 16k tokens on the demo's model. One JSON line per case: peak resident set (VmHWM), the bar, the limit and
what held it, seconds, seconds from the process's start to its first step (imports included), tokens/s, bytes read from
storage, and what the receipt says.

    python -m bench.size [--case 30B] [--folder DIR] [--steps 1] [--start-up] [--tiny]

Needs about 20 GB of disk for the 30B store, and 12 GB for the other one and its adapter's state; `--folder` keeps the
stores for the next time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamella.errors import UserError
from lamella.hardware.allocator import restart_tuned
from lamella.hardware.collector import quiet_start
from lamella.hardware.limit import MemoryLimit, memory_limit
from lamella.store.tokens import FIRST_WORD, word

if TYPE_CHECKING:
    from lamella.config import RunConfig
    from lamella.train.loop import TrainResult

ROOT = Path(__file__).parent.parent
GIB = 1 << 30
SLACK = 1.0
"""The hard limit over the bar: none. Page cache counts in a cgroup, but is given back before anything is killed."""


def qwen3_moe(layers: int, hidden: int, heads: int, inner: int, **more: Any) -> dict[str, Any]:
    """config.json of a Qwen3-MoE."""
    return {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936,
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 3 * hidden, "moe_intermediate_size": inner, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "eos_token_id": 151935, "dtype": "bfloat16", **more,
    }  # fmt: skip


SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "intermediate_size": 1536, "max_position_embeddings": 32768, "rope_theta": 100000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "eos_token_id": 49151, "dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A shape, what it may take at most, and how the run is set.

    Attributes:
        bar_bytes: peak RSS allowed; the hard limit too.
        budget: memory.budget of the run.
        state: memory.state of the run.
        shared: layers share one file.
        rows, row_tokens: what one step trains on.
        threads: compute.threads of the run; None: the default.
    """

    name: str
    config: dict[str, Any]
    bar_bytes: int
    budget: str
    state: str = "auto"
    shared: bool = False
    rows: int = 2
    row_tokens: int = 512
    threads: int | None = None


CASES = (
    Case("30B", qwen3_moe(48, 2048, 32, 768), 5 * 10**9, "2.2GB"),
    Case("235B", qwen3_moe(94, 4096, 64, 1536), 8 * 10**9, "6.5GB", shared=True),
    # the demo's model, SmolLM2-135M, on one row of 16k tokens
    Case("16k", SMOLLM2_135M, 4 * 10**9, "2GB", rows=1, row_tokens=16384),
)
_SMALL = {"vocab_size": 2048, "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 32, "max_position_embeddings": 2048,
          "eos_token_id": 2047}  # fmt: skip
TINY = (
    Case("tiny", qwen3_moe(12, 128, 4, 64, **_SMALL), GIB, "7.6MB", rows=2, row_tokens=64, threads=1),
    Case(
        "tiny shared",
        qwen3_moe(12, 128, 4, 64, **_SMALL),
        GIB,
        "7.6MB",
        state="disk",
        shared=True,
        rows=2,
        row_tokens=64,
        threads=1,
    ),
)


def write_rows(path: Path, case: Case, steps: int, seed: int = 0) -> None:
    """Rows of random words over the whole vocabulary; each with its chat marks has at least `row_tokens` tokens."""
    rng = random.Random(seed)
    words = case.config["vocab_size"] - FIRST_WORD - 3
    with path.open("w", encoding="utf-8") as stream:
        for i in range(case.rows * steps):
            said = ["".join(f" {word(rng.randrange(words))}" for _ in range(case.row_tokens // 2)) for _ in range(2)]
            turns = [
                {"role": role, "content": text.strip()} for role, text in zip(("user", "assistant"), said, strict=True)
            ]
            stream.write(json.dumps({"id": i, "messages": turns}) + "\n")


def make_store(folder: Path, case: Case) -> Path:
    """The case's store in `folder`, made by the command where it is not there yet."""
    store = folder / f"{case.name.replace(' ', '-')}.store"
    if (store / "manifest.json").is_file():
        return store
    config = folder / f"{case.name.replace(' ', '-')}.json"
    config.write_text(json.dumps(case.config))
    shared = ["--share-layers"] if case.shared else []
    command = [sys.executable, "-m", "lamella", "store", "synth", str(config), str(store), *shared]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return store


def run_toml(case: Case, store: Path, rows: Path, folder: Path, steps: int) -> Path:
    """The run's configuration: LoRA r=16 on attention and experts, recomputing, a checkpoint at the end alone."""
    file = folder / "run.toml"
    longest = 4 * case.row_tokens
    file.write_text(
        f'store = "{store}"\nruns_dir = "{folder}"\nname = "run"\n[data]\ntrain = ["{rows}"]\nmax_tokens = {longest}\n'
        f"[lora]\nrank = 16\n[train]\nsteps = {steps}\nrows_per_step = {case.rows}\nwarmup_steps = 0\n"
        f'micro_batch_tokens = {longest}\n[memory]\nbudget = "{case.budget}"\nrecompute = "always"\n'
        f'state = "{case.state}"\n[checkpoint]\nevery_steps = 0\nkeep = 1\n'
        + (f"[compute]\nthreads = {case.threads}\n" if case.threads else "")
    )
    return file


def read_bytes() -> int:
    """Bytes this process has had read from storage (`read_bytes` of /proc/self/io; page cache hits do not count)."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


class TimedRows:
    """A run's rows, noting when the loop asks for a step's (seconds of `time.monotonic`, one clock for all processes)."""

    def __init__(self, data: Any, starts: list[float], stop: bool = False) -> None:
        self._data, self._starts, self._stop = data, starts, stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def rows_of(self, step_index: int) -> Any:
        self._starts.append(time.monotonic())
        if self._stop:
            raise KeyboardInterrupt
        return self._data.rows_of(step_index)


def timed_run(config: RunConfig) -> tuple[TrainResult, list[float]]:
    """Train by `lamella train`'s own loop, starting over; returns its result and when each step began."""
    from lamella.train.assemble import assemble_parts
    from lamella.train.loop import train_run

    starts: list[float] = []

    def assemble(*args: Any) -> Any:
        parts = assemble_parts(*args)
        return replace(parts, data=TimedRows(parts.data, starts))

    return train_run(config, "fresh", assemble), starts


def start_up(file: Path, spawned_s: float) -> None:
    """As `child`, stopped when the first step is about to begin."""
    from lamella.config import load_run_config
    from lamella.hardware.memory import peak_rss_bytes
    from lamella.train.assemble import assemble_parts
    from lamella.train.loop import train_run

    starts: list[float] = []

    def assemble(*args: Any) -> Any:
        parts = assemble_parts(*args)
        return replace(parts, data=TimedRows(parts.data, starts, stop=True))

    with suppress(KeyboardInterrupt):
        train_run(load_run_config(file), "fresh", assemble)
    print(json.dumps({"start_up_s": round(starts[0] - spawned_s, 2), "peak_rss_bytes": peak_rss_bytes()}))


def child(file: Path, spawned_s: float) -> None:
    """What runs under the limit: the training loop, and its figures on the last line of stdout."""
    from lamella.config import load_run_config
    from lamella.hardware.memory import peak_rss_bytes

    begin_s = time.perf_counter()
    result, starts = timed_run(load_run_config(file))
    figures = {"seconds": time.perf_counter() - begin_s, "peak_rss_bytes": peak_rss_bytes(), "bytes_read": read_bytes(),
               "start_up_s": starts[0] - spawned_s, "receipt": str(result.receipt_path)}  # fmt: skip
    print(json.dumps(figures))


def limited(command: list[str], limit: MemoryLimit) -> subprocess.CompletedProcess[str]:
    """Run a command under the limit; its stderr goes on to ours."""
    return subprocess.run(
        command, preexec_fn=limit.enter, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False
    )  # fmt: skip


def measure(case: Case, folder: Path, steps: int, only_start: bool = False) -> dict[str, Any]:
    """Make the inputs, train under the limit, and put the figures together.

    Args:
        only_start: stop when the first step is about to begin.
    """
    begin_s = time.perf_counter()
    store = make_store(folder, case)
    synth_s = time.perf_counter() - begin_s
    limit_bytes = int(case.bar_bytes * SLACK)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, memory_limit(limit_bytes) as limit:
        rows = Path(scratch) / "rows.jsonl"
        write_rows(rows, case, steps)
        file = run_toml(case, store, rows, Path(scratch), steps)
        part = "--child-start" if only_start else "--child"
        done = limited([sys.executable, "-m", "bench.size", part, str(file), str(time.monotonic())], limit)
        common = {
            "case": case.name, "layers": case.config["num_hidden_layers"], "bar_bytes": case.bar_bytes,
            "limit_bytes": limit_bytes, "limit": limit.kind, "group_peak_bytes": limit.peak_bytes(),
            "synth_s": round(synth_s, 1),
        }  # fmt: skip
        if done.returncode:
            return {**common, "ok": False, "exit_code": done.returncode}
        figures = json.loads(done.stdout.splitlines()[-1])
        if only_start:
            return {**common, **figures, "bar_s": 10, "ok": figures["start_up_s"] < 10}
        receipt = json.loads(Path(figures.pop("receipt")).read_text())
        metrics = [json.loads(line) for line in (file.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    return {**common, **_told(figures, receipt, metrics, case)}


def _told(
    figures: dict[str, Any], receipt: dict[str, Any], metrics: list[dict[str, Any]], case: Case
) -> dict[str, Any]:
    engine, losses = receipt["engine"], [line["loss"] for line in metrics]
    step_s = [line["step_s"] for line in metrics]
    return {
        "ok": receipt["status"] == "ok" and figures["peak_rss_bytes"] <= case.bar_bytes,
        "peak_rss_bytes": figures["peak_rss_bytes"], "seconds": round(figures["seconds"], 1),
        "start_up_s": round(figures["start_up_s"], 2),
        "steps": len(metrics), "step_s": [round(s, 2) for s in step_s],
        "tokens_per_step": [line["tokens"] for line in metrics],
        "tokens_per_s": round(sum(line["tokens"] for line in metrics) / sum(step_s), 2),
        "bytes_read": figures["bytes_read"], "losses": losses, "ln_vocabulary": math.log(case.config["vocab_size"]),
        "receipt": receipt["status"], "trainable": {row["class"]: row["parameters"] for row in receipt["trainable"]},
        "moved": {row["class"]: [row["moved"], row["total"]] for row in receipt["moved"]},
        "state": engine["state"], "layers_resident": engine["layers_resident"],
        "layers_streamed": engine["layers_streamed"], "fixed_bytes": engine["fixed_bytes"],
        "slot_bytes": engine["slot_bytes"], "threads": engine["threads"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps a case")
    parser.add_argument("--folder", type=Path, help="keep the stores here; default: a temporary folder")
    parser.add_argument("--tiny", action="store_true", help="the same way with tiny shapes")
    parser.add_argument("--start-up", action="store_true", help="stop when the first step is about to begin")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--child-start", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(Path(args.child[0]), float(args.child[1]))
        return
    if args.child_start is not None:
        start_up(Path(args.child_start[0]), float(args.child_start[1]))
        return
    if args.steps < 1:
        raise UserError(f"--steps is {args.steps}", fix="take 1 or more")
    wanted = [case for case in (TINY if args.tiny else CASES) if args.case in case.name]
    if not wanted:
        raise UserError(f"no case has {args.case!r} in its name")
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        for case in wanted:
            print(json.dumps(measure(case, args.folder or Path(scratch), args.steps, args.start_up)), flush=True)


if __name__ == "__main__":
    restart_tuned()
    quiet_start()
    main()
