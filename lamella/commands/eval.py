"""`lamella eval`: measure a store, with and without adapters, on a classification task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, cast, get_args

import typer

Dtype = Literal["auto", "bf16", "fp16", "fp32"]


def register(app: typer.Typer) -> None:
    app.command(name="eval")(eval_task)


def eval_task(
    task_file: Path = typer.Argument(metavar="TASK.toml", help="Rows, prompt and labels of the task."),
    store: Path = typer.Option(..., "--store", help="Layer store made by `lamella quantize`."),
    adapter: list[Path] = typer.Option([], "--adapter", help="Adapter folder (PEFT format); once per tuned system."),
    mode: str = typer.Option("likelihood", help="likelihood, constrained or generate."),
    few_shot: int | None = typer.Option(
        None, "--few-shot", min=0, help="Examples in the few-shot prompt; 0: no few-shot row. Default: 8 if the task has train."
    ),
    baseline: bool | None = typer.Option(
        None, "--baseline/--no-baseline", help="Majority label and TF-IDF + logistic regression. Default: if the task has train."
    ),
    limit: int | None = typer.Option(None, min=1, help="At most so many test rows per tenant."),
    budget: str | None = typer.Option(None, help='Memory for weights and activations, such as "2GiB".'),
    batch_tokens: int = typer.Option(4096, min=1, help="Tokens per micro-batch; changes memory and speed, not the numbers."),
    length_normalise: bool = typer.Option(False, help="Compare labels by log-probability per token (mode likelihood)."),
    max_new_tokens: int | None = typer.Option(None, min=1, help="Limit of mode generate. Default: the task's."),
    dtype: str = typer.Option("auto", help="Compute dtype: auto, bf16, fp16 or fp32."),
    device: str = typer.Option("cpu", help="Torch device."),
    seed: int = typer.Option(0, help="Chooses few-shot examples and bootstrap resamples."),
    resamples: int = typer.Option(1000, min=100, help="Bootstrap resamples."),
    as_json: bool = typer.Option(False, "--json", help="Print the metrics as one JSON object."),
    output: Path | None = typer.Option(None, "-o", "--output", help="Folder for results. Default: runs/eval-TASK."),
) -> None:
    """Macro-F1 per tenant with intervals: zero-shot, few-shot, tuned and TF-IDF in one table."""
    from lamella.console import notice, out
    from lamella.errors import UserError
    from lamella.eval.run import Mode
    from lamella.eval.systems import measure_systems
    from lamella.eval.table import compare_table, to_json, write_results
    from lamella.eval.task import load_task
    from lamella.units import parse_bytes

    for value, allowed, option in ((mode, get_args(Mode), "--mode"), (dtype, get_args(Dtype), "--dtype")):
        if value not in allowed:
            raise UserError(f"{option} {value!r} is unknown", fix=f"use one of {', '.join(allowed)}")
    budget_bytes = None if budget is None else parse_bytes(budget)
    task = load_task(task_file)
    if limit is not None:
        task = task.limited(limit)
    for note in task.notes:
        notice(note)
    if not task.train and few_shot is None and baseline is None:
        notice("the task names no training rows: few-shot and baselines are left out")
    shots = few_shot if few_shot is not None else (8 if task.train else 0)
    with_baseline = baseline if baseline is not None else bool(task.train)
    results = measure_systems(
        task, store, adapter, mode=cast(Any, mode), shots=shots, baseline=with_baseline, budget_bytes=budget_bytes,
        batch_tokens=batch_tokens, length_normalise=length_normalise, max_new_tokens=max_new_tokens, dtype=dtype,
        device=device, seed=seed, resamples=resamples,
    )  # fmt: skip
    folder = output or Path("runs") / f"eval-{task.config.name}"
    asked = {"store": str(store), "adapters": [str(a) for a in adapter], "dtype": dtype, "device": device, "limit": limit,
             "batch_tokens": batch_tokens, "length_normalise": length_normalise, "seed": seed}  # fmt: skip
    write_results(folder, task, results, {"asked": asked})
    for result in results:
        for warning in result.metrics.warnings:
            notice(f"warning: {result.name}: {warning}")
    if as_json:
        typer.echo(json.dumps({"asked": asked, **to_json(task, results)}, ensure_ascii=False))
    else:
        out.print(compare_table(results))
        notice(f"written: {folder / 'metrics.json'}, {folder / 'predictions.jsonl'}")
