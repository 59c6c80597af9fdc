"""Step time over layers, tokens and experts: `python -m bench.scale`.

Stores of random weights (`lamella store synth`) that differ in one size are trained for a few steps each, in processes of
their own. For each series one JSON line per point, then one with the least-squares line seconds = a + b x, its R^2 and
its largest residual as a share of the point. `--plot FILE` draws the series.

    layers     a Qwen3-MoE shape with more and more layers
    tokens     the same with more and more sequences in a step (all of one length)
    experts    more and more experts, as many of them active per token as before
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from bench.marks import LineChart, line_chart
from lamella.errors import UserError
from lamella.hardware.allocator import TUNABLES

ROOT = Path(__file__).parent.parent

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 8192, "hidden_size": 512,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1024, "moe_intermediate_size": 192, "num_experts": 32, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 32768,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
LENGTH, SEQUENCES, RANK = 512, 2, 16


@dataclass(frozen=True)
class Point:
    """One measurement: `x` of its series, changes to the shape, sequences in a step."""

    series: str
    x: int
    shape: tuple[tuple[str, int], ...] = ()
    sequences: int = SEQUENCES


def points(series: str) -> list[Point]:
    if series == "layers":
        return [Point(series, n, (("num_hidden_layers", n),)) for n in (4, 8, 16, 24, 32)]
    if series == "tokens":
        return [Point(series, n * LENGTH, (), n) for n in (1, 2, 4, 8, 16)]
    return [Point(series, n, (("num_experts", n),)) for n in (8, 16, 32, 64, 128)]


SERIES = ("layers", "tokens", "experts")


@dataclass(frozen=True)
class Fit:
    """seconds = intercept + slope x; `largest_residual` is a share of the point's seconds."""

    intercept: float
    slope: float
    r2: float
    largest_residual: float


def fit(xs: list[float], ys: list[float]) -> Fit:
    """Least-squares line through two points or more.

    Raises:
        ValueError: fewer than two different x.
    """
    slope, intercept = statistics.linear_regression(xs, ys)
    left = [y - intercept - slope * x for x, y in zip(xs, ys, strict=True)]
    mean = statistics.fmean(ys)
    spread = sum((y - mean) ** 2 for y in ys)
    r2 = 1 - sum(e * e for e in left) / spread if spread else 1.0
    return Fit(intercept, slope, r2, max(abs(e) / y for e, y in zip(left, ys, strict=True)))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Take the steps in this process."""
    import torch

    from lamella.adapter import Adapter
    from lamella.config import LoraConfig, TrainConfig
    from lamella.engine import Engine
    from lamella.models.layout import pack_rows
    from lamella.store.reader import Store
    from lamella.train.optimizer import Optimizer

    torch.set_num_threads(job["threads"])
    engine = Engine.open(Store.open(Path(job["store"])), threads=job["threads"], recompute=job["recompute"])
    adapter = Adapter.create(
        engine.skeleton, LoraConfig(rank=RANK, targets=("q_proj", "k_proj", "v_proj", "o_proj")), 0
    )
    engine.attach(adapter)
    optimizer = Optimizer(adapter.parameters(), TrainConfig(warmup_steps=0), job["steps"])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, SHAPE["vocab_size"], (job["steps"], job["sequences"], LENGTH), generator=generator)
    mask = [False] * (LENGTH // 2) + [True] * (LENGTH - LENGTH // 2)
    seconds, flops = [], 0.0
    for step in range(job["steps"]):
        start_s = time.perf_counter()
        batches = [pack_rows([(row, mask)]) for row in ids[step].tolist()]
        out = engine.step(batches, step_index=step, label_tokens=sum(b.score_tokens.numel() for b in batches))
        optimizer.step(step, optimizer.grad_norm())
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start_s)
        flops = out.flops
    timed = seconds[job["warmup"] :]
    step_s = statistics.median(timed)
    return {"step_s": step_s, "range_s": [min(timed), max(timed)], "gflops": flops / step_s / 1e9,
            "utilisation": flops / step_s / engine.matmul_rate().best}  # fmt: skip


def run_point(point: Point, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Make the point's store where it is not there, and measure in a process of its own."""
    config = {**SHAPE, **dict(point.shape)}
    store = folder / "-".join(str(config[k]) for k in ("num_hidden_layers", "num_experts"))
    if not store.exists():
        file = folder / f"{store.name}.json"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "lamella", "store", "synth", str(file), str(store), "--json"]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    job = {"store": str(store), "sequences": point.sequences, "steps": args.steps, "warmup": args.warmup,
           "threads": args.threads, "recompute": args.recompute}  # fmt: skip
    env = {**os.environ, "GLIBC_TUNABLES": TUNABLES}
    done = subprocess.run([sys.executable, "-m", "bench.scale", "--measure"], input=json.dumps(job), capture_output=True,
                          text=True, cwd=ROOT, env=env, check=False)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{point} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def chart_of(series: str, xs: list[float], ys: list[float], line: Fit) -> LineChart | None:
    label = {
        "layers": "layers",
        "tokens": "tokens per step",
        "experts": f"experts, {SHAPE['num_experts_per_tok']} active",
    }
    title = f"seconds per step: {line.intercept:.3g} + {line.slope:.3g} x, R² {line.r2:.4f}"
    fitted = [line.intercept + line.slope * x for x in xs]
    return line_chart(title, xs, {"fit": fitted, "seen": ys}, x_label=label[series], from_zero=True)


_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 300, 200, 42, 34, 36


def svg(charts: list[LineChart]) -> str:
    """The charts side by side: dots are measured, lines fitted."""
    w, h = _WIDTH - _LEFT - 12, _HEIGHT - _TOP - _BOTTOM
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH * len(charts)}" height="{_HEIGHT}" '
           'font-family="sans-serif" font-size="10" fill="#333"><rect width="100%" height="100%" fill="white"/>']  # fmt: skip
    for n, chart in enumerate(charts):
        out.append(f'<g transform="translate({n * _WIDTH + _LEFT} {_TOP})">')
        out.append(f'<text x="0" y="-16">{escape(chart.title)}</text>')
        for tick in chart.y_ticks:
            y = h * (1 - tick.at / 100)
            out.append(f'<path d="M0 {y:.1f}H{w}" stroke="#ddd"/>'
                       f'<text x="-4" y="{y + 3:.1f}" text-anchor="end">{tick.label}</text>')  # fmt: skip
        for tick in chart.x_ticks:
            out.append(f'<text x="{w * tick.at / 100:.1f}" y="{h + 14}" text-anchor="middle">{tick.label}</text>')
        out.append(f'<text x="{w / 2}" y="{h + 28}" text-anchor="middle">{escape(chart.x_label)}</text>')
        for line in chart.lines:
            places = [tuple(float(v) / 100 for v in p.split(",")) for p in line.points.split()]
            scaled = [(x * w, y * h) for x, y in places]
            if line.name == "fit":
                out.append(
                    '<polyline fill="none" stroke="#888" points="'
                    + " ".join(f"{x:.1f},{y:.1f}" for x, y in scaled)
                    + '"/>'
                )
            else:
                out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#1f6feb"/>' for x, y in scaled]
        out.append("</g>")
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--series", choices=SERIES, action="append", help="only this one; may be given again")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not timed")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--recompute", choices=("auto", "always", "never"), default="always")
    parser.add_argument("--folder", type=Path, help="keep the stores here for the next time")
    parser.add_argument("--plot", type=Path, help="write the plot (SVG) here")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(json.load(sys.stdin))))
        return
    if not 0 <= args.warmup < args.steps:
        raise UserError(f"--warmup {args.warmup} of --steps {args.steps}", fix="leave at least one step to time")
    charts = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for series in args.series or SERIES:
            xs: list[float] = []
            ys: list[float] = []
            for point in points(series):
                found = run_point(point, folder, args)
                xs.append(float(point.x))
                ys.append(found["step_s"])
                print(json.dumps({"series": series, "x": point.x, **found}), flush=True)
            line = fit(xs, ys)
            print(json.dumps({"series": series, "intercept_s": line.intercept, "slope_s": line.slope, "r2": line.r2,
                              "largest_residual": line.largest_residual}), flush=True)  # fmt: skip
            chart = chart_of(series, xs, ys, line)
            if chart is not None:
                charts.append(chart)
    if args.plot is not None:
        args.plot.write_text(svg(charts))


if __name__ == "__main__":
    main()
