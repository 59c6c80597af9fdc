"""`lamella probe`: measure this machine into `machine.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

IMPORTS = ("lamella.train.loop", "lamella.train.assemble")
"""What a process of `lamella train` imports before it opens the store."""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("probe")(probe)


def probe(
    out: Annotated[Path, typer.Option(help="Where to write what was measured.")] = Path("machine.json"),
    quick: Annotated[bool, typer.Option("--quick", help="A rough picture in under 10 s.")] = False,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Store, or folder for one: its disk is measured; default: the working folder."
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda", "all"],
        typer.Option(help="auto: all GPUs, or the CPU where there is none; all: both."),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print machine.json's object in place of tables.")] = False,
) -> None:
    """Measure devices, memory, links and disk of this machine.

    Plans read the result: `lamella plan MODEL --machine machine.json`. Under a minute; stop it at any time, nothing
    half-written is left.
    """
    from lamella.errors import UserError
    from lamella.files import write_json

    folder = store if store is not None else Path()
    if not folder.is_dir():
        raise UserError(
            "no such folder", fix="give --store a store, or a folder on the disk where one is to lie", path=folder
        )
    if not out.absolute().parent.is_dir():
        raise UserError("no such folder", fix="make it first, or give another --out", path=out.absolute().parent)
    from lamella.console import out as console
    from lamella.console import progress
    from lamella.probe.run import FULL, QUICK, STEPS, measure_machine
    from lamella.probe.table import show

    files = sorted((folder / "layers").glob("*.bin")) if (folder / "manifest.json").is_file() else []
    with progress("probe", STEPS, "parts") as meter:
        machine = measure_machine(
            QUICK if quick else FULL, folder, files=files, which=device, imports=IMPORTS,
            on_progress=lambda what: meter.advance(1, what),
        )  # fmt: skip
    tree = machine.model_dump(mode="json")
    write_json(out, tree)
    if as_json:
        typer.echo(machine.model_dump_json(indent=1))
        return
    show(machine, console)
    console.print(f"written to {out}")
