"""`lamella data`: look at what will be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

if TYPE_CHECKING:
    from lamella.data.dataset import EncodedDataset


def register(app: typer.Typer) -> None:
    """Add the verb."""
    group = typer.Typer(no_args_is_help=True, help="Look at training data.")
    group.command("show")(show)
    app.add_typer(group, name="data")


def show(
    run: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="dotted.key=value, e.g. data.max_tokens=512")] = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to print.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print examples with trained tokens marked, token counts, cut and dropped rows with reasons."""
    from lamella.config import load_run_config
    from lamella.data.dataset import encode_dataset
    from lamella.data.encode import load_tokenizer

    config = load_run_config(run, overrides)
    dataset = encode_dataset(config.data, load_tokenizer(config.store))
    if as_json:
        typer.echo(json.dumps({**dataset.report.to_dict(), "rows": _examples(dataset, rows)}, ensure_ascii=False))
        return
    _print(dataset, rows)


def _examples(dataset: EncodedDataset, rows: int) -> list[dict[str, object]]:
    from lamella.data.dataset import iter_label_text

    return [
        {
            "row_id": row.row_id, "path": str(row.source[0]), "line": row.source[1], "tokens": row.tokens,
            "label_tokens": row.label_tokens, "notes": list(row.notes),
            "text": [{"trained": trained, "text": text} for trained, text in iter_label_text(row, dataset.encoder)],
        }
        for row in dataset.rows[:rows]
    ]  # fmt: skip


def _print(dataset: EncodedDataset, rows: int) -> None:
    from lamella.console import out
    from lamella.data.dataset import iter_label_text

    for row in dataset.rows[:rows]:
        path, line = row.source
        out.print(Text(f"--- {path}:{line}  {row.tokens} tokens, {row.label_tokens} trained", style="bold"))
        shown = Text()
        for trained, text in iter_label_text(row, dataset.encoder):
            if not trained:
                shown.append(text, style="dim")
            elif out.is_terminal:
                shown.append(text, style="bold green")
            else:
                shown.append(f"[[{text}]]")
        out.print(shown)
        for note in row.notes:
            out.print(Text(f"note: {note}", style="yellow"))
    out.print(Text("---", style="bold"))
    for text in dataset.report.lines():
        out.print(Text(text, style="yellow" if text.startswith("warning:") else ""))
