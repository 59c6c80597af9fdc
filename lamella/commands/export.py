"""`lamella export`: adapters in other engines' layouts, merged models, and `lamella parity`, the proof."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamella.errors import UserError

if TYPE_CHECKING:
    from lamella.export.run import Export


class EngineDtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine", metavar="NAME[=PYTHON]",
        help="Engine to verify with: transformers (default), transformers-serve, vllm, llama.cpp (default for GGUF), mlx; "
        "PYTHON of its own environment.",
    ),
]  # fmt: skip
Prompts = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="JSONL rows to compare on; default: what the run was trained on."),
]
BaseFolder = Annotated[
    Path | None,
    typer.Option(
        help="Base for the engine to load under an adapter; default: the dequantised store, written for this."
    ),
]
Limit = Annotated[
    float | None,
    typer.Option(help="Largest difference of log p in nats; default: 0.001 where the export is exact, none elsewhere."),
]
DtypeOf = Annotated[EngineDtype, typer.Option("--engine-dtype", help="That the engine computes in.")]


def register(app: typer.Typer) -> None:
    app.command("export")(export)
    app.command("parity")(parity)


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run folder, or an adapter folder of any known layout.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder to make; must not exist yet.")],
    to: Annotated[
        str,
        typer.Option(
            help="Adapter: peft, peft-0.18, vllm, vllm-3d, sglang, mlx, unsloth, gguf. Model: merged (narrowest dtype that "
            "keeps the adapter), bf16, fp16, fp32, fp8, nf4, gguf-f32, -f16, -bf16, -q8_0, -q4_0, -q4_1."
        ),
    ],
    store: Annotated[Path | None, typer.Option(help="Store it was trained on; default: the receipt's.")] = None,
    onto: Annotated[
        str, typer.Option(help="Merge onto the dequantised `store` (what was trained on), or onto this checkpoint.")
    ] = "store",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32: of what fp8 and nf4 leave unquantised.")] = None,
    max_loss: Annotated[
        float | None,
        typer.Option(help="Refuse when rounding loses a larger share of the adapter's change (0.1 in 16 bit)."),
    ] = None,
    another_base: Annotated[
        bool, typer.Option("--another-base", help="Export although the base's weights are not those of the training.")
    ] = False,
    allow: Annotated[
        list[str] | None, typer.Option(help="Modules that the server lets adapters have pairs on; once each.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--verify", help="Load the result in --engine and compare log p on real prompts.")
    ] = False,
    measure: Annotated[
        bool | None, typer.Option(help="KL of a merged model from adapter on base; default: where there are prompts.")
    ] = None,
    engine: Engines = None,
    prompts: Prompts = None,
    base: BaseFolder = None,
    limit: Limit = None,
    engine_dtype: DtypeOf = EngineDtype.float32,
    as_json: Annotated[bool, typer.Option("--json", help="Print export.json's object.")] = False,
) -> None:
    """Write an adapter as another engine reads it, or merged into a model.

    Tokenizer, chat template, stop tokens, the base's identity, receipt and a model card go with it.
    Merges are streamed: memory does not grow with the model.
    What rounding leaves of the adapter is measured on every weight; KL on real prompts says what that does.
    Exit code 1: the engine does not say what Lamella says (or says what the base says).
    """
    from lamella.export.prompts import prompts_of
    from lamella.export.run import Ask, lines, store_of, to_json
    from lamella.export.run import export as run_export

    ask = Ask(source, out, to, store, onto, dtype, max_loss, another_base, tuple(allow or ()))
    ask.check()
    if not check:
        idle = [
            name for name, value in (("--engine", engine), ("--base", base), ("--limit", limit)) if value is not None
        ]
        if idle:
            raise UserError(f"{', '.join(idle)}: about --verify", fix="add --verify, or leave it out")
    if measure and ask.is_adapter:
        raise UserError(f"--measure is about merged models, --to {to} writes an adapter", fix="say --verify")
    if out.exists():
        raise UserError("exists already", fix="give another -o DIR, or delete it first", path=out)
    targets = _targets(engine, to, base, limit) if check else []
    texts = prompts_of(store_of(ask), source, prompts or ()) if check or measure or prompts else ()
    found = run_export(ask, texts if texts and measure is not False and not ask.is_adapter else None)
    if targets:
        _verify(found, targets, texts, base, engine_dtype.value, limit, prompts or [])
    if as_json:
        typer.echo(to_json(found))
        return
    _show(found, lines(found))


def parity(
    folder: Annotated[Path, typer.Argument(metavar="EXPORT", help="Folder that `lamella export` made.")],
    engine: Engines = None,
    prompts: Prompts = None,
    base: BaseFolder = None,
    limit: Limit = None,
    engine_dtype: DtypeOf = EngineDtype.float32,
    as_json: Annotated[bool, typer.Option("--json", help="Print export.json's object.")] = False,
) -> None:
    """Compare an export in other engines with the adapter it was made of, on 20 real prompts.

    The likeliest tokens, log p of all tokens, and whether the base would have said the same.
    Exit code 1 when they do not agree.
    """
    from lamella.export.prompts import prompts_of
    from lamella.export.run import Export, lines, to_json

    found = Export.read(folder)
    targets = _targets(engine, found.to, base, limit)
    texts = prompts_of(found.store, found.source, prompts or ())
    _verify(found, targets, texts, base, engine_dtype.value, limit, prompts or [])
    if as_json:
        typer.echo(to_json(found))
        return
    _show(found, lines(found))


def _targets(
    engines: list[str] | None, to: str, base: Path | None, limit: float | None
) -> list[tuple[object, Path | None]]:
    """The engines asked for, looked at before anything is written."""
    from lamella.export.run import ADAPTERS, check_engine, is_gguf
    from lamella.export.verify import target_of

    if limit is not None and not limit >= 0:
        raise UserError(f"--limit {limit:g} is no difference", fix="give nats from 0, such as 0.001")
    if base is not None and to not in ADAPTERS:
        raise UserError(f"--base goes under adapters, {to!r} is a whole model", fix="leave it out")
    if base is not None and not base.exists():
        raise UserError("no such --base", fix="give a checkpoint folder, or a .gguf file, that is there", path=base)
    targets = [target_of(text) for text in engines or ["llama.cpp" if is_gguf(to) else "transformers"]]
    for target, python in targets:
        check_engine(target, python, to)
    return list(targets)


def _verify(
    found: Export, targets: list[tuple[object, Path | None]], texts: tuple[tuple[int, ...], ...], base: Path | None,
    dtype: str, limit: float | None, files: list[Path],
) -> None:  # fmt: skip
    import tempfile

    import torch

    from lamella.export.engines.server import TransformersServe
    from lamella.export.run import EXPORT_FILE, prove, prove_answers
    from lamella.store.journal import check_writable

    for path in (found.folder, found.folder / EXPORT_FILE):
        check_writable(path, "the comparison", "place for the export")
    with tempfile.TemporaryDirectory(prefix="lamella-export-", dir=found.folder.absolute().parent) as scratch:
        for target, python in targets:
            if isinstance(target, TransformersServe):
                prove_answers(found, target, python, files, dtype=dtype, threads=torch.get_num_threads())
                continue
            prove(found, target, python, texts, Path(scratch), base=base, dtype=dtype, limit=limit,  # type: ignore[arg-type]
                  threads=torch.get_num_threads())  # fmt: skip


def _show(found: Export, told: list[str]) -> None:
    from lamella.console import out

    for line in told:
        out.print(line, markup=False)
    out.print(f"written to {found.folder}", markup=False)
