"""Forecasts beside what happens: `python -m bench.plan_times`.

For each configuration of `bench.plan_cases` a process of its own opens the engine on a store of random weights, predicts
a step from the machine's rates (`lamella.forecast.times`), and takes steps. One JSON line a case: predicted and measured
seconds by cause and their ratio; `drift` is how much slower a reference product was around the steps than when the rates
were measured (nothing is scaled by it). The last line has the median and the worst ratio, and the mean signed error, which
tells what is systematic.

Rates come from `--machine machine.json`, or are measured first, in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.memory import make_store
from bench.plan_cases import HELD_OUT, MODELS, Case
from lamella.errors import UserError
from lamella.hardware.allocator import TUNABLES

ROOT = Path(__file__).parent.parent
TIME_BAR = 0.10
WARM_UP = 2


# ---- in a process of its own ----------------------------------------------------------------------------------------


def reference_flops_per_s() -> float:
    """Of a product that is measured around everything."""
    import torch

    a, b, out = (torch.full((1024, 1024), 0.01, dtype=torch.bfloat16) for _ in range(3))
    seconds = []
    for _ in range(12):
        start_s = time.perf_counter()
        torch.mm(a, b, out=out)
        seconds.append(time.perf_counter() - start_s)
    return 2.0 * 1024**3 / statistics.median(seconds)


def measure_rates(threads: int, quick: bool) -> dict[str, Any]:
    """A `DeviceFacts` of this CPU, with what forecasts of time need."""
    import torch

    from lamella.hardware.machine import DeviceFacts
    from lamella.hardware.matmul import matmul_rate
    from lamella.probe.rates import measure_kernels

    torch.set_num_threads(threads)
    kernels = measure_kernels(threads, quick, lambda what: print(what, file=sys.stderr))
    facts = DeviceFacts(
        name="this CPU", kind="cpu", memory_bytes=1, matmul_flops_per_s=matmul_rate(torch.device("cpu"), torch.bfloat16).best,
        dequantise_bytes_per_s=_dequantise_rate(kernels), memory_bytes_per_s=kernels.row_bytes_per_s, threads=threads,
        kernels=kernels,
    )  # fmt: skip
    return {"facts": facts.model_dump(mode="json"), "reference_flops_per_s": reference_flops_per_s()}


def _dequantise_rate(kernels: Any) -> float:
    return max(2 * p.values_per_s for p in kernels.rows if p.kind == "dequantise")


def time_side(job: dict[str, Any]) -> dict[str, Any]:
    """Predict a step of the case, then take some."""
    import torch

    from lamella.adapter import Adapter
    from lamella.config import LoraConfig, TrainConfig
    from lamella.engine import Engine
    from lamella.forecast.describe import shape_of
    from lamella.forecast.times import times_of
    from lamella.forecast.trainable import sites_of
    from lamella.hardware.machine import DeviceFacts
    from lamella.store.reader import Store
    from lamella.trace.recorder import RECORDER
    from lamella.train.optimizer import Optimizer

    torch.set_num_threads(job["threads"])
    case, store = case_of(job["case"]), Store.open(Path(job["store"]))
    targets: Any = case.targets
    lora = LoraConfig(rank=case.rank, targets=targets)
    shape = shape_of(store.path)
    sites = sites_of(shape, lora)
    times = times_of(shape, sites, DeviceFacts.model_validate(job["facts"], strict=False), case.dtype)
    predicted = predict(case, times, len(shape.layers), sum(s.parameters for s in sites))
    budget = None if case.budget_share is None else round(case.budget_share * job["base_bytes"])
    engine = Engine.open(store, dtype=case.dtype, recompute=case.recompute, threads=job["threads"], budget_bytes=budget)
    adapter = Adapter.create(engine.skeleton, lora, 0)
    engine.attach(adapter)
    optimizer = Optimizer(adapter.parameters(), TrainConfig(warmup_steps=0), job["steps"])
    generator = torch.Generator().manual_seed(0)
    before = reference_flops_per_s()
    seen: dict[str, list[float]] = defaultdict(list)
    RECORDER.keep(1)
    for step in range(job["steps"]):
        batches = [batch_of(lengths, shape.vocab, generator) for lengths in case.lengths]
        RECORDER.begin_step(step)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        engine.step(batches, step_index=step, label_tokens=sum(int(b.score_tokens.numel()) for b in batches))
        walked_s = time.perf_counter() - start_s
        optimizer.step(step, optimizer.grad_norm())
        optimizer.zero_grad()
        step_s = time.perf_counter() - start_s
        if step >= WARM_UP:
            for cause, seconds in by_cause(RECORDER.steps[-1].spans).items():
                seen[cause].append(seconds)
            seen["optimizer"].append(step_s - walked_s)
            seen["step"].append(step_s)
            seen["cpu"].append(time.process_time() - start_cpu_s)
    facts = engine.facts()
    assert facts["steps_kept" if case.recompute == "never" else "steps_recomputed"] == job["steps"]
    assert bool(facts["layers_streamed"]) == (case.budget_share is not None)
    measured = {cause: statistics.median(values) for cause, values in seen.items()}
    after = reference_flops_per_s()
    return {"predicted": predicted, "measured": measured, "drift": 2 * job["reference_flops_per_s"] / (before + after)}


def case_of(given: dict[str, Any]) -> Case:
    """From JSON."""
    lengths = tuple(tuple(x) for x in given["lengths"])
    targets = given["targets"] if isinstance(given["targets"], str) else tuple(given["targets"])
    return Case(**{**given, "lengths": lengths, "targets": targets})


def batch_of(lengths: tuple[int, ...], vocab: int, generator: Any) -> Any:
    """Random tokens; the later half of each sequence carries labels."""
    import torch

    from lamella.models.layout import pack_rows

    ids = [torch.randint(5, vocab, (n,), generator=generator).tolist() for n in lengths]
    return pack_rows([(x, [i >= len(x) // 2 for i in range(len(x))]) for x in ids])


def labels_of(lengths: tuple[int, ...]) -> int:
    """Label tokens of such a batch."""
    return sum(n - n // 2 for n in lengths)


def predict(case: Case, times: Any, layers: int, parameters: int) -> dict[str, float]:
    """Seconds of a step by the spans in which the engine takes them, and its layers' passes by what they do (`of ...`).

    Every layer's turn comes twice, but the last one's once: the walk turns around on it.
    """
    out: dict[str, float] = defaultdict(float)
    for i in range(layers):
        for lengths in case.lengths:
            for name, causes in (("forward", times.forward(i, lengths)),
                                 ("backward", times.backward(i, lengths, case.recompute == "always"))):  # fmt: skip
                out[name] += sum(causes.values())
                for cause, seconds in causes.items():
                    out[f"of {cause}"] += seconds
        out["forward"] += times.hang(i)
        out["backward"] += times.hang(i)
        out["dequantise"] += (1 if i == layers - 1 else 2) * times.dequantise(i)
    for lengths in case.lengths:
        out["head"] += times.head(labels_of(lengths))
        out["embed"] += times.prologue(sum(lengths))
    out["optimizer"] = times.update(parameters)
    out["step"] = sum(out[name] for name in ("forward", "backward", "dequantise", "head", "embed", "optimizer"))
    return dict(out)


def by_cause(spans: Any) -> dict[str, float]:
    """Seconds of a step's spans in the main lane: computing by what it is, the rest by cause."""
    out: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.lane == "main":
            name = span.name.partition(" ")[0] if span.cause == "compute" else span.cause
            out[name] += span.end_s - span.start_s
    return dict(out)


def base_bytes(store: Path, dtype: str) -> int:
    """Bytes of a store's base in memory with every layer resident."""
    from bench.memory import base_bytes as counted

    return counted(store, dtype)


# ---- the whole ------------------------------------------------------------------------------------------------------


def ask(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job in a process of its own, started as `lamella` starts itself."""
    env = {**os.environ, "GLIBC_TUNABLES": TUNABLES}
    done = subprocess.run([sys.executable, "-m", "bench.plan_times", "--side"], input=json.dumps(job), stdout=subprocess.PIPE,
                          text=True, cwd=ROOT, env=env, check=False)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{job['verb']} ended with {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def side(job: dict[str, Any]) -> dict[str, Any]:
    if job["verb"] == "rates":
        return measure_rates(job["threads"], job["quick"])
    if job["verb"] == "base":
        return {"bytes": base_bytes(Path(job["store"]), job["dtype"])}
    return time_side(job)


def rates_of(args: argparse.Namespace) -> dict[str, Any]:
    """Facts of the device: the file's first CPU, or measured now."""
    if args.machine is None:
        return ask({"verb": "rates", "threads": args.threads, "quick": args.quick})
    given = json.loads(args.machine.read_text())
    if "facts" in given:
        return dict(given)
    cpu = next((d for d in given["devices"] if d["kind"] == "cpu" and d.get("kernels")), None)
    if cpu is None:
        raise UserError("the machine has no CPU whose kernels were measured", fix="write it with `lamella probe`",
                        path=args.machine)  # fmt: skip
    return {"facts": cpu, "reference_flops_per_s": math.nan}


def compare_times(cases: list[Case], folder: Path, args: argparse.Namespace) -> None:
    """A line a case, and what they say together."""
    rates = rates_of(args)
    if args.save is not None:
        args.save.write_text(json.dumps(rates))
    ratios = []
    for case in cases:
        store = make_store(folder, case.model, MODELS)
        job = {
            "verb": "time",
            "case": asdict(case),
            "store": str(store),
            "threads": args.threads,
            "steps": args.steps,
            **rates,
        }
        if case.budget_share is not None:
            job["base_bytes"] = ask({"verb": "base", "store": str(store), "dtype": case.dtype})["bytes"]
        found = ask(job)
        ratio = found["predicted"]["step"] / found["measured"]["step"]
        ratios.append(ratio)
        print(json.dumps({"case": case.name, "model": case.model, "threads": args.threads, "ratio": round(ratio, 4),
                          "ratio_cpu": round(found["predicted"]["step"] / found["measured"]["cpu"], 4),
                          "drift": round(found["drift"], 3), "predicted_s": _rounded(found["predicted"]),
                          "measured_s": _rounded(found["measured"])}), flush=True)  # fmt: skip
    print(json.dumps(verdict(ratios)))


def verdict(ratios: list[float]) -> dict[str, Any]:
    """Of all cases: predicted over measured."""
    errors = [math.log(ratio) for ratio in ratios]
    return {"figure": "step time, predicted over measured", "cases": len(ratios), "median": round(statistics.median(ratios), 4),
            "worst": round(math.exp(max(errors, key=abs)), 4), "within_bar": sum(abs(r - 1) <= TIME_BAR for r in ratios),
            "mean_signed_error": round(statistics.mean(errors), 4), "bar": TIME_BAR,
            "met": abs(statistics.mean(errors)) <= TIME_BAR}  # fmt: skip


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--steps", type=int, default=7, help=f"steps a case, of which the first {WARM_UP} are not counted"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--machine", type=Path, help="machine.json, or what --save wrote; measured when not given")
    parser.add_argument("--quick", action="store_true", help="measure rates as `lamella probe --quick` does")
    parser.add_argument("--save", type=Path, help="write the rates here")
    parser.add_argument("--folder", type=Path, help="keep the stores here for the next time")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(side(json.load(sys.stdin))))
        return
    if args.steps <= WARM_UP:
        raise UserError(f"--steps is {args.steps}", fix=f"take more than {WARM_UP}: so many are not counted")
    wanted = [case for case in HELD_OUT if args.case in case.name]
    if not wanted:
        raise UserError(f"--case {args.case!r} names no case", fix=f"cases: {', '.join(c.name for c in HELD_OUT)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        compare_times(wanted, folder, args)


if __name__ == "__main__":
    main()
