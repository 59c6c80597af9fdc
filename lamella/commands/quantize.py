"""`lamella quantize`: Hugging Face checkpoint -> layer store."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class KeptDtype(StrEnum):
    source = "source"
    bf16 = "bf16"


def register(app: typer.Typer) -> None:
    app.command("quantize")(quantize)


def quantize(
    checkpoint: Annotated[
        str,
        typer.Argument(help="Checkpoint folder (config.json, safetensors), a .gguf file, or a hub id."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="STORE", help="Store to make; must not exist yet.")],
    block_size: Annotated[int, typer.Option(help="Elements per scale, a power of two from 32 to 4096.")] = 64,
    double_quant: Annotated[bool, typer.Option(help="Quantise the scales themselves to 8 bits.")] = True,
    kept_dtype: Annotated[
        KeptDtype, typer.Option(help="Dtype of embeddings, head, norms, routers and biases: as in the source, or bf16.")
    ] = KeptDtype.source,
    formats: Annotated[
        Path | None, typer.Option(metavar="FILE", help="quantize.toml: other formats than NF4, by class and by name.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Quantise a checkpoint to a 4-bit layer store.

    Every linear weight of every decoder layer becomes NF4, experts too; weights that are MXFP4 or bitsandbytes' already
    keep that form.
    Everything else stays as it is, and the report says so by name.
    FILE of --formats: [classes] with experts, attention, mlp = "nf4" | "mxfp4" | "int8" | "bf16" | "source" (head,
    embedding = "bf16" | "source"), and [[names]] with match = "model.layers.0.*" and format. Routers are never quantised.
    Memory does not grow with the checkpoint.
    An interrupted run goes on when started again.
    The store appears under its name only when complete.
    """
    from lamella.models.check import check_checkpoint
    from lamella.store.formats import Formats, read_formats
    from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
    from lamella.store.report import print_report, report_json

    asked = Formats() if formats is None else read_formats(formats)
    settings = QuantizeSettings(
        block_size=block_size, double_quant=double_quant, kept_dtype=kept_dtype.value, formats=asked
    )
    manifest = quantize_checkpoint(checkpoint, out, settings, threads=threads, check=check_checkpoint)
    if as_json:
        typer.echo(json.dumps({"store": str(out), **report_json(manifest)}))
        return
    print_report(manifest, out)
