"""`lamella eval`: measure a store, with and without adapters, on a classification task."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ModeName(StrEnum):
    likelihood = "likelihood"
    constrained = "constrained"
    generate = "generate"


class DtypeName(StrEnum):
    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def register(app: typer.Typer) -> None:
    app.command(name="eval")(eval_task)


def eval_task(
    task_file: Annotated[Path, typer.Argument(metavar="TASK.toml", help="Rows, prompt and labels of the task.")],
    store: Annotated[Path, typer.Option(help="Layer store made by `lamella quantize`.")],
    adapter: Annotated[
        list[Path] | None, typer.Option(help="Adapter folder of any known layout; once per tuned system.")
    ] = None,
    mode: Annotated[ModeName, typer.Option(help="Likeliest label, greedy among labels, or free text.")] = (
        ModeName.likelihood
    ),
    few_shot: Annotated[
        int | None,
        typer.Option(min=0, help="Examples in the few-shot prompt, 0 for none. Default: 8 with training rows."),
    ] = None,
    baseline: Annotated[
        bool | None, typer.Option(help="Majority label and TF-IDF + logistic regression. Default: with training rows.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many test rows per tenant.")] = None,
    budget: Annotated[str | None, typer.Option(help='Memory for weights and activations, such as "2GiB".')] = None,
    batch_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens of a micro-batch: memory and speed. In fp32 the figures stay the same; in bf16 and fp16 scores "
            "move by rounding, so labels that are nearly tied may change.",
        ),
    ] = 4096,
    length_normalise: Annotated[
        bool, typer.Option("--length-normalise", help="Compare labels per token (mode likelihood).")
    ] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token limit of mode generate. Default: the task's.")
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Compute dtype.")] = DtypeName.auto,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores by default.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Chooses few-shot examples and bootstrap resamples.")
    ] = 0,
    resamples: Annotated[int, typer.Option(min=100, help="Bootstrap resamples.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as one JSON object.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for results. Default: runs/eval-TASK.")
    ] = None,
) -> None:
    """Macro-F1 per tenant with intervals: zero-shot, few-shot, tuned and TF-IDF in one table."""
    from lamella.console import notice, out
    from lamella.eval.systems import measure_systems
    from lamella.eval.table import compare_table, to_json, write_results
    from lamella.eval.task import load_task
    from lamella.units import parse_bytes

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
    results, in_effect = measure_systems(
        task, store, adapter or [], mode=mode.value, shots=shots, baseline=with_baseline, budget_bytes=budget_bytes,
        batch_tokens=batch_tokens, length_normalise=length_normalise, max_new_tokens=max_new_tokens,
        dtype=dtype.value, device=device, threads=threads, seed=seed, resamples=resamples,
    )  # fmt: skip
    folder = output or Path("runs") / f"eval-{task.config.name}"
    asked = {"store": str(store), "adapters": [str(a) for a in adapter or []], "dtype": dtype.value, "device": device,
             "limit": limit, "budget_bytes": budget_bytes, "batch_tokens": batch_tokens,
             "length_normalise": length_normalise, "seed": seed}  # fmt: skip
    facts = {"asked": asked, "in_effect": in_effect}
    write_results(folder, task, results, facts)
    for result in results:
        for warning in result.warnings if result.name != "majority" else ():
            notice(f"warning: {result.name}: {warning}")
    if as_json:
        typer.echo(json.dumps({**facts, **to_json(task, results)}, ensure_ascii=False))
    else:
        out.print(compare_table(results))
        notice(f"written: {folder / 'metrics.json'}, {folder / 'predictions.jsonl'}")
