"""`lamella compare`: several candidates on the same tenants and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("compare")(compare)


def compare(
    file: Annotated[Path, typer.Argument(metavar="COMPARE.toml", help="Task and candidates.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Folder for results and kept answers. Default: runs/compare-NAME."),
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Changed rows to print.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print compare.json's object in place of tables.")] = False,
) -> None:
    """F1, differences with intervals, tokens, latency and money of stores, checkpoints, endpoints and baselines.

    A run that was stopped, by you, an error or its ceiling, goes on where it was: nothing is asked twice.
    """
    from lamella.compare.run import compare as run
    from lamella.compare.settings import load_compare
    from lamella.compare.table import show as tables
    from lamella.console import notice, out

    config = load_compare(file)
    folder = output or Path("runs") / f"compare-{config.name}"
    tree = run(config, folder)
    for candidate in tree["candidates"]:
        for note in candidate["notes"] if candidate["role"] != "baseline" else ():
            notice(f"{candidate['name']}: {note}")
    if as_json:
        typer.echo(json.dumps(tree, ensure_ascii=False))
        return
    lines = [json.loads(line) for line in (folder / "changed.jsonl").read_text(encoding="utf-8").splitlines()]
    out.print(tables(tree, lines, show))
    notice(f"written: {folder / 'compare.json'}, {folder / 'changed.jsonl'}, {folder / 'predictions.jsonl'}")
