"""`lamella train`: a LoRA adapter on a frozen 4-bit base, with a receipt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamella.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from lamella.config import RunConfig
    from lamella.launch.supervise import Mode


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("train")(train)


def train(
    run: Annotated[Path, typer.Argument(help="The run's TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="dotted.key=value, e.g. train.steps=100")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Insist on going on from a checkpoint.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Drop what an earlier run of this name left.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and the steps; stop.")] = False,
) -> None:
    """Train an adapter; a run that was interrupted goes on from its newest complete checkpoint.

    With several [[devices]], or device "cuda" and several GPUs, it starts one process for each.
    """
    from lamella.config import load_run_config
    from lamella.launch.local import local_ranks, start_ranks
    from lamella.launch.rank import enter, is_restart
    from lamella.ranks.place import started_by_launcher

    if resume and fresh:
        raise UserError("--resume and --fresh together", fix="give one of them")
    config = load_run_config(run, overrides)
    if dry_run:
        _show_plan(config)
        return
    mode: Mode = "resume" if resume else "fresh" if fresh else "auto"
    if started_by_launcher():
        enter(config)
        if fresh and is_restart():
            mode = "auto"
    elif (count := local_ranks(config)) > 1:
        _check_inputs(config)
        start_ranks(config, count, [str(run), *(overrides or [])], mode)
        return
    from lamella.train.loop import train_run

    train_run(config, mode)


def _check_inputs(config: RunConfig) -> None:
    """What can be found wrong without starting a rank."""
    from lamella.store.reader import Store
    from lamella.train.state import check_validation

    check_validation(config.validation)
    Store.open(config.store)


def _show_plan(config: RunConfig, most: int = 10) -> None:
    """Encode the data and print the resolved config and the first steps; loads no weights."""
    from rich.table import Table

    from lamella.console import out
    from lamella.data.encode import load_tokenizer
    from lamella.train.assemble import check_metric, open_rows
    from lamella.train.optimizer import learning_rate

    check_metric(config)
    rows = open_rows(config, load_tokenizer(config.store))
    out.print_json(config.model_dump_json())
    if config.devices:
        out.print(_devices(config))
    table = Table(show_edge=False, pad_edge=False)
    for title in ("step", "epoch", "rows", "tokens", "label tokens", "micro-batches", "learning rate"):
        table.add_column(title, justify="right")
    tokens = labels = 0
    for k in range(rows.steps):
        step = rows.rows_of(k)
        step_tokens, step_labels = sum(map(rows.tokens, step.rows)), sum(map(rows.label_tokens, step.rows))
        tokens, labels = tokens + step_tokens, labels + step_labels
        if k < most:
            rate = learning_rate(config.train, k, rows.steps)
            counts = (k + 1, step.epoch, len(step.rows), step_tokens, step_labels, len(rows.pack(step.rows)))
            table.add_row(*map(str, counts), f"{rate:.3g}")
    out.print(table)
    if rows.steps > most:
        out.print(f"... {rows.steps - most} more")
    out.print(f"{rows.steps} steps, {tokens} tokens, {labels} label tokens")


def _devices(config: RunConfig) -> Table:
    from rich.table import Table

    from lamella.ranks.place import place_of
    from lamella.units import format_bytes

    world = len(config.devices)
    table = Table(show_edge=False, pad_edge=False)
    for title in ("rank", "device", "threads", "budget", "slowdown"):
        table.add_column(title, justify="right")
    for rank in range(world):
        place = place_of(config, rank, world, {})
        budget = "none" if place.budget_bytes is None else format_bytes(place.budget_bytes)
        slowdown = f"{place.slowdown:g}" if isinstance(place.slowdown, float) else str(place.slowdown)
        table.add_row(str(rank), place.device, str(place.threads or "all"), budget, slowdown)
    return table
