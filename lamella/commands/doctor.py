"""`lamella doctor`: what this environment can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor")(doctor)


def doctor(
    folder: Annotated[
        Path,
        typer.Option(exists=True, file_okay=False, help="Where stores and runs are to lie: its disk is looked at."),
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print all checks as one JSON object.")] = False,
) -> None:
    """Check compiler, kernels, torch, GPUs, memory, disk, versions and limits; say what to do.

    Exit code 0: work can begin (slowly, where there are warnings); 1: something prevents it.
    """
    from rich.markup import escape
    from rich.table import Table

    from lamella.console import out
    from lamella.guide.doctor import examine, to_json, works

    findings = examine(folder)
    if as_json:
        typer.echo(json.dumps(to_json(findings), ensure_ascii=False))
    else:
        table = Table(box=None, pad_edge=False)
        for head in ("check", "", "found", "what to do"):
            table.add_column(head, overflow="fold")
        for f in findings:
            table.add_row(f.name, f.state, escape(f.said), escape(f.fix))
        out.print(table)
    if not works(findings):
        raise typer.Exit(1)
