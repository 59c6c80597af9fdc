"""`lamella store`: look at a layer store, or check every byte of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

_StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="Folder made by `lamella quantize`.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Look at a layer store, or check every byte of it.")
    group.command("info")(info)
    group.command("verify")(verify)
    app.add_typer(group, name="store")


def info(store: _StorePath, as_json: _Json = False) -> None:
    """Print what a store holds, by class of tensors."""
    from lamella.store.manifest import read_manifest
    from lamella.store.report import print_report, report_json

    manifest = read_manifest(store)
    if as_json:
        typer.echo(json.dumps({"store": str(store), **report_json(manifest)}))
        return
    print_report(manifest, store)


def verify(store: _StorePath, as_json: _Json = False) -> None:
    """Read every byte and compare it with its checksum; exit code 2 names what differs."""
    from lamella.console import progress
    from lamella.errors import UserError
    from lamella.store.manifest import read_manifest
    from lamella.store.verify import verify_store
    from lamella.units import format_bytes

    manifest = read_manifest(store)
    tensors = [record for _, group in manifest.groups() for record in group.tensors]
    with progress("verify", sum(record.nbytes for record in tensors), "B") as meter:
        wrong = verify_store(store, manifest, meter.advance)
    nbytes = sum(group.nbytes for _, group in manifest.groups())
    if as_json:
        typer.echo(json.dumps({"store": str(store), "tensors": len(tensors), "bytes": nbytes, "wrong": wrong}))
    if wrong:
        shown = ", ".join(wrong[:10]) + (f" and {len(wrong) - 10} more" if len(wrong) > 10 else "")
        raise UserError(f"bytes changed since the store was written: {shown}",
                        fix="make the store again with `lamella quantize`", path=store)  # fmt: skip
    if not as_json:
        typer.echo(f"{store}: {len(tensors)} tensors, {format_bytes(nbytes)}, every checksum right")
