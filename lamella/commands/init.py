"""`lamella init`: a commented run.toml."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamella.errors import UserError

if TYPE_CHECKING:
    from lamella.guide.start import LookedAt


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("init")(init)


def init(
    data: Annotated[
        Path | None, typer.Argument(metavar="DATA.jsonl", help="Rows to train on; read, to choose settings.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Layer store, there or to be made; its tokenizer measures the rows.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder or hub id that the store is to be made of, if it is not there."),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")] = Path("run.toml"),
    name: Annotated[str | None, typer.Option(help="Name of the run. Default: the data file's.")] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="LoRA rank.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    budget: Annotated[str | None, typer.Option(help='Memory for training, such as "8GiB".')] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take what was given, and defaults.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was found and chosen as one JSON object.")
    ] = False,
) -> None:
    """Write a commented run.toml: a few questions, or what a data file tells.

    `lamella train` and `lamella plan` take the file as it is; every other setting stands in it as a comment with its default.
    """
    from lamella.console import notice
    from lamella.guide.start import advised_tokens, look_at, run_toml, write_run

    if out.exists() and not force:
        raise UserError("is there already", fix="give another --out, or --force to replace it", path=out)
    if not yes and sys.stdin.isatty():
        data, store, model, budget = _ask(data, store, model, budget)
    if data is None or (store is None and model is None):
        raise UserError(
            "nothing is said of " + " and ".join(_missing(data, store or model)),
            fix="lamella init DATA.jsonl --store STORE (or --model CHECKPOINT)",
        )
    if store is None:
        assert model is not None
        store = Path("stores") / Path(model).name
    there = (store / "manifest.json").is_file()
    seen = look_at(data, store if there else Path(model) if model is not None and Path(model).is_dir() else None)
    asked: dict[str, Any] = {
        "name": name or _name_of(data), "store": _from(out, store), "data.train": [_from(out, data)], "lora.rank": rank or 16,
        "train.epochs": epochs or 1.0,
    }  # fmt: skip
    if seen.longest_tokens is not None:
        asked["data.max_tokens"] = advised_tokens(seen.longest_tokens)
    if budget is not None:
        asked["memory.budget"] = budget
    steps = _next_steps(out, store, None if there else model)
    config = write_run(out, run_toml(asked, [*seen.lines(), *steps]), force)
    for line in (*seen.lines(), f"written: {out}", *steps):
        notice(line)
    if as_json:
        typer.echo(
            json.dumps({"written": str(out), **_told(seen), "asked": asked, "config": config.model_dump(mode="json")})
        )


def _ask(
    data: Path | None, store: Path | None, model: str | None, budget: str | None
) -> tuple[Path | None, Path | None, str | None, str | None]:
    if data is None:
        data = Path(typer.prompt("Data (JSONL: messages, prompt and completion, ShareGPT or Alpaca)"))
    if store is None and model is None:
        said = typer.prompt("Model (a store, a checkpoint's folder, or a hub id)")
        store, model = (Path(said), None) if (Path(said) / "manifest.json").is_file() else (None, said)
    if budget is None:
        budget = (
            typer.prompt('Memory for training (such as "8GiB"; empty: no limit)', default="", show_default=False)
            or None
        )
    return data, store, model, budget


def _missing(data: Path | None, model: Path | str | None) -> list[str]:
    return [what for what, given in (("the data", data), ("the model", model)) if given is None]


def _name_of(data: Path) -> str:
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in data.stem)
    return kept.strip("-._") or "run"


def _from(out: Path, path: Path) -> str:
    """As the file is to name it: relative to its folder."""
    import os

    return str(path) if path.is_absolute() else os.path.relpath(path, out.parent)


def _next_steps(out: Path, store: Path, model: str | None) -> list[str]:
    made = [f"lamella quantize {model} -o {store}"] if model is not None else []
    return ["next: " + "; ".join([*made, f"lamella plan {out}", f"lamella train {out}"])]


def _told(seen: LookedAt) -> dict[str, Any]:
    return {
        "rows": seen.rows,
        "formats": seen.formats,
        "problems": seen.problems,
        "longest_tokens": seen.longest_tokens,
    }
