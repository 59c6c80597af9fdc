"""`lamella quantize`: Hugging Face checkpoint -> layer store."""

from __future__ import annotations

import json
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamella.console import notice
from lamella.errors import UserError

if TYPE_CHECKING:
    from lamella.quality.texts import Texts
    from lamella.store.manifest import Manifest
    from lamella.store.quantize import QuantizeSettings


class CheckDtype(StrEnum):
    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


class KeptDtype(StrEnum):
    source = "source"
    bf16 = "bf16"


def register(app: typer.Typer) -> None:
    app.command("quantize")(quantize)


def quantize(
    ctx: typer.Context,
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
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXT.jsonl",
            help="Compare store and checkpoint on these texts (rows as for training, or "
            '{"text": ...}), layer by layer; a finished STORE of this checkpoint is compared as it is.',
        ),
    ] = None,
    check_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of text to compare on, in all; rows are spread over the file.")
    ] = 16384,
    check_dtype: Annotated[
        CheckDtype,
        typer.Option(help="Compute dtype of the comparison; auto: fp32 up to 2 billion parameters, else bf16."),
    ] = CheckDtype.auto,
    strict: Annotated[
        bool, typer.Option("--strict", help="With --check: exit code 3 unless the verdict is fine. Without it, 0.")
    ] = False,
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

    With --check it then says what that has cost: KL divergence of the logits, top-1 agreement and perplexity beside the
    checkpoint's, for the whole store and for each class of weights alone, and what to keep at higher precision.
    The figures are written to STORE/quality.json.
    """
    from lamella.store.formats import Formats, read_formats
    from lamella.store.quantize import QuantizeSettings
    from lamella.store.report import print_report, report_json

    asked = Formats() if formats is None else read_formats(formats)
    settings = QuantizeSettings(
        block_size=block_size, double_quant=double_quant, kept_dtype=kept_dtype.value, formats=asked
    )
    if check is None:
        if strict:
            raise UserError("--strict is about the verdict of --check", fix="give --check TEXT.jsonl, or leave it out")
        manifest = _make(checkpoint, out, settings, threads)
        if as_json:
            typer.echo(json.dumps({"store": str(out), **report_json(manifest)}))
        else:
            print_report(manifest, out)
        return
    from lamella.quality.gate import check_store, differs
    from lamella.quality.show import print_quality
    from lamella.store.manifest import MANIFEST_NAME, read_manifest

    texts = _texts_first(checkpoint, check, check_tokens)
    if (out / MANIFEST_NAME).is_file():
        given = [key for key in ("block_size", "double_quant", "kept_dtype", "formats") if _was_given(ctx, key)]
        other = differs(checkpoint, out, settings, given)
        if other:
            raise UserError(f"is a store already, with {', '.join(other)}",
                            fix="give another -o STORE, or leave these options out", path=out)  # fmt: skip
        notice(f"{out} is finished: nothing is quantised again")
        manifest = read_manifest(out)
    else:
        manifest = _make(checkpoint, out, settings, threads)
    if not as_json:
        print_report(manifest, out)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    quality = check_store(checkpoint, out, texts, check_dtype.value)
    if as_json:
        typer.echo(json.dumps({"store": str(out), **report_json(manifest), "quality": quality.to_json()}))
    else:
        print_quality(quality)
    if quality.verdict.level != "fine":
        notice(f"WARNING: {quality.verdict.text} ({'; '.join(quality.verdict.reasons)})")
        if strict:
            raise typer.Exit(3)


def _texts_first(checkpoint: str, file: Path, tokens: int) -> Texts:
    """Encoded before the store is made: hours of quantising must not end in a bad file name."""
    from lamella.checkpoint.source import Checkpoint
    from lamella.quality.gate import texts_for
    from lamella.store.gguf_files import write_gguf_files

    if Path(checkpoint).suffix != ".gguf":
        return texts_for(checkpoint, file, tokens)
    with tempfile.TemporaryDirectory(prefix="lamella-quantize-") as folder, Checkpoint.open(checkpoint) as opened:
        write_gguf_files(opened.path, opened.config, Path(folder))
        return texts_for(folder, file, tokens)


def _make(checkpoint: str, out: Path, settings: QuantizeSettings, threads: int | None) -> Manifest:
    from lamella.models.check import check_checkpoint
    from lamella.store.quantize import quantize_checkpoint

    return quantize_checkpoint(checkpoint, out, settings, threads=threads, check=check_checkpoint)


def _was_given(ctx: typer.Context, key: str) -> bool:
    source = ctx.get_parameter_source(key)
    return source is not None and source.name == "COMMANDLINE"
