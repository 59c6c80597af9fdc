"""Where a training step's time goes: `python -m bench.profile --case moe`.

Runs a few steps of a case of `bench.train` under torch.profiler and prints one JSON line a cause, longest first: own
time of torch's operators and of our C functions, by what they are for. What the steps' wall time leaves after all of
these is `python`: the interpreter, autograd's bookkeeping and the calls themselves. Profiling makes calls slower, so
that share is an upper bound; the last line has the step's time with and without the profiler.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from bench.own_train import Side
from bench.train import CASES, Case, make_inputs, make_job
from lamella.errors import UserError
from lamella.hardware.allocator import restart_tuned

PREFIX = "lamella_"
MATMULS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "matmul", "linear", "einsum", "_grouped_mm")
_BY_NAME = (
    ("dequantise", ("nf4", "absmax", "dequant")),
    ("experts", ("expert", "grouped", "spread", "combine")),
    ("attention", ("attention", "attend", "sdpa", "scaled_dot_product")),
    ("loss", ("cross_entropy", "nll_loss", "log_softmax", "logsumexp", "_loss")),
    ("optimizer", ("adam", "optimizer", "clip_grad", "foreach")),
)


class Event(Protocol):
    """What we read of a profiler's event."""

    name: str
    self_cpu_time_total: float
    cpu_parent: Any


def cause(names: Iterable[str]) -> str | None:
    """What an operator is for, by its name and those of the events around it, innermost first; None: not an operator.

    Matmuls inside experts, attention or the loss count there.
    """
    own, *around = (name.lower() for name in names)
    if not own.startswith(("aten::", PREFIX)):
        return None
    for name in (own, *around):
        for label, parts in _BY_NAME:
            if any(part in name for part in parts):
                return label
    return "matmul" if own.removeprefix("aten::") in MATMULS else "norm and elementwise"


def table(events: Iterable[Event], wall_s: float) -> list[dict[str, Any]]:
    """Seconds, share of the wall time, calls and longest operators by cause, longest first."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    longest: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        names, at = [], event
        while at is not None:
            names.append(at.name)
            at = at.cpu_parent
        label = cause(names)
        if label is not None:
            own_s = event.self_cpu_time_total / 1e6
            seconds[label] += own_s
            calls[label] += 1
            longest[label][event.name] += own_s
    seconds["python"] = max(wall_s - sum(seconds.values()), 0.0)
    return [
        {
            "cause": label, "seconds": round(spent, 4), "share": round(spent / wall_s, 4), "calls": calls[label],
            "longest": {
                name: round(s, 4) for name, s in sorted(longest[label].items(), key=lambda item: -item[1])[:4]
            },
        }
        for label, spent in sorted(seconds.items(), key=lambda item: -item[1])
    ]  # fmt: skip


def show_c_functions() -> int:
    """Let the profiler see every C function of ours that was called so far; their number comes back.

    ctypes calls are invisible to it otherwise, and would pass for Python.
    """
    from torch.profiler import record_function

    def shown(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with record_function(name):
                return function(*args)

        return call

    count = 0
    for library in [o for o in gc.get_objects() if issubclass(type(o), ctypes.CDLL)]:
        for name, function in list(vars(library).items()):
            if name.startswith(PREFIX):
                setattr(library, name, shown(name, function))
                count += 1
    return count


def run(case: Case, folder: Path, args: argparse.Namespace) -> None:
    """Profile the case whose inputs are in `folder`."""
    from torch.profiler import ProfilerActivity, profile, record_function

    side = Side(make_job(case, folder, args))
    for k in range(2):
        side.step(k)
    plain = []
    for k in range(2, args.steps):
        start_s = time.perf_counter()
        side.step(k)
        plain.append(time.perf_counter() - start_s)
    functions = show_c_functions()
    steps = args.steps - 2
    step_optimizer = side.optimizer.step

    def shown_step(*given: Any) -> Any:
        with record_function("optimizer"):
            return step_optimizer(*given)

    side.optimizer.step = shown_step  # type: ignore[method-assign]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        start_s = time.perf_counter()
        for k in range(2, args.steps):
            side.step(k)
        wall_s = time.perf_counter() - start_s
    for line in table(recorded.events(), wall_s):
        print(json.dumps({"case": case.name, **line}))
    print(json.dumps({"case": case.name, "cause": "all", "steps": steps, "seconds": round(wall_s, 4),
                      "step_s_profiled": round(wall_s / steps, 4), "step_s": round(statistics.median(plain), 4),
                      "tokens_per_s": round(side.tokens / statistics.median(plain), 1), "c_functions": functions,
                      "threads": args.threads, "engine": side.engine.facts()}))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", default="moe-115M, LoRA on attention", help="first case whose name contains this")
    parser.add_argument("--steps", type=int, default=6, help="steps of which the first two are not recorded")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--recompute", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--inputs", type=Path, help="folder with inputs made before; they are made when it is empty")
    args = parser.parse_args()
    if args.steps < 3:
        raise UserError(f"--steps is {args.steps}", fix="take 3 or more: two are not recorded")
    found = [case for case in CASES if args.case in case.name]
    if not found:
        raise UserError(f"--case {args.case!r} names no case",
                        fix=f"use a part of one of: {'; '.join(case.name for case in CASES)}")  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.inputs or Path(scratch)
        if not (folder / "store" / "manifest.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            print("making inputs", file=sys.stderr)
            make_inputs(folder, found[0].config, args.steps)
        run(found[0], folder, args)


if __name__ == "__main__":
    restart_tuned()
    main()
