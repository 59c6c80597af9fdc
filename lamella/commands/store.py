"""`lamella store`: look at a layer store, check every byte of it, or make one of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

_StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="Folder made by `lamella quantize`.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Look at a layer store, check it, or make one of random weights.")
    group.command("info")(info)
    group.command("verify")(verify)
    group.command("synth")(synth)
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


def synth(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A config.json, or a folder that holds one.")],
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Store to make; must not exist yet.")],
    share_layers: Annotated[
        bool, typer.Option("--share-layers", help="Layers of equal structure share one file by hard links.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights.")] = 0,
    block_size: Annotated[int, typer.Option(help="Elements per scale, a power of two from 32 to 4096.")] = 64,
    double_quant: Annotated[bool, typer.Option(help="Quantise the scales themselves to 8 bits.")] = True,
    formats: Annotated[
        Path | None, typer.Option(metavar="FILE", help="quantize.toml, as of `lamella quantize`.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Files written at once; all cores by default.")] = None,
    as_json: _Json = False,
) -> None:
    """Make a store of random weights from a config.json alone.

    To measure speed and memory at sizes for which there are no weights at hand.
    The manifest says that it is synthetic.
    """
    import torch

    from lamella.models.names import checkpoint_shapes
    from lamella.models.skeleton import Skeleton, read_config
    from lamella.store.formats import Formats, read_formats
    from lamella.store.quantize import QuantizeSettings
    from lamella.store.report import print_report, report_json
    from lamella.store.synth import synthesize_store

    asked = Formats() if formats is None else read_formats(formats)
    manifest = synthesize_store(
        config, store, lambda file: checkpoint_shapes(Skeleton(read_config(file), torch.bfloat16)),
        QuantizeSettings(block_size=block_size, double_quant=double_quant, formats=asked), seed=seed,
        share_layers=share_layers, threads=threads,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps({"store": str(store), **report_json(manifest)}))
        return
    print_report(manifest, store)
