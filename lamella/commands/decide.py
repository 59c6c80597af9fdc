"""`lamella decide`: whether deploying is worth it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("decide")(decide)


def decide(
    file: Annotated[Path, typer.Argument(metavar="DECIDE.toml", help="Options, volumes, what quality is worth.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for decide.json. Default: runs/decide-NAME.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print every figure with its formula and inputs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print decide.json's object in place of tables.")] = False,
) -> None:
    """Cost per 1,000 documents and per month of each option, break-even, what quality is worth, one verdict and what would change it."""
    from lamella.console import notice, out
    from lamella.decide.run import decide as run
    from lamella.decide.settings import load_decide
    from lamella.decide.table import show
    from lamella.errors import UserError
    from lamella.files import write_json

    config = load_decide(file)
    tree, figures = run(config)
    folder = output or Path("runs") / f"decide-{config.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "decide.json", tree)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}", fix="give another folder with -o", path=folder
        ) from error
    if as_json:
        typer.echo(
            json.dumps({**tree, "explained": [f.__dict__ for f in figures]} if explain else tree, ensure_ascii=False)
        )
        return
    out.print(show(tree))
    if explain:
        for figure in figures:
            out.print(figure.text(), markup=False)
        for what, source in tree["sources"].items():
            out.print(f"{what}: {source}", markup=False)
    notice(f"written: {folder / 'decide.json'}")
