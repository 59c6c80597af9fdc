"""`lamella train`: a LoRA adapter on a frozen 4-bit base, with a receipt."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamella.errors import UserError
from lamella.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from lamella.config import RunConfig
    from lamella.forecast.document import PlanFile
    from lamella.launch.supervise import Mode


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("train")(train)


def train(
    run: Annotated[Path, typer.Argument(help="The run's TOML file, or a plan.json of `lamella plan --save`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="dotted.key=value, e.g. train.steps=100")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Insist on going on from a checkpoint.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Drop what an earlier run of this name left.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and the steps; stop.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the receipt (with --dry-run: the resolved config) as one JSON object.")
    ] = False,
) -> None:
    """Train an adapter; a run that was interrupted goes on from its newest complete checkpoint.

    With several [[devices]], or device "cuda" and several GPUs, it starts one process for each.
    """
    from lamella.console import keep_stdout
    from lamella.launch.local import local_ranks, start_ranks
    from lamella.launch.rank import enter, is_restart
    from lamella.ranks.place import started_by_launcher

    if resume and fresh:
        raise UserError("--resume and --fresh together", fix="give one of them")
    if as_json:
        keep_stdout()
    config, plan = _open_run(run, overrides or [])
    if dry_run:
        if as_json:
            typer.echo(json.dumps(config.model_dump(mode="json"), ensure_ascii=False))
        else:
            _show_plan(config)
        return
    mode: Mode = "resume" if resume else "fresh" if fresh else "auto"
    if started_by_launcher():
        enter(config)
        if fresh and is_restart():
            mode = "auto"
    elif (count := local_ranks(config)) > 1:
        _check_inputs(config)
        start_ranks(config, count, [str(run), *(overrides or []), *["--json"] * as_json], mode)
        return
    from lamella.train.loop import train_run

    result = train_run(config, mode, plan=plan, machine=_machine_file(run))
    if as_json and os.environ.get("RANK", "0") == "0":
        typer.echo(result.receipt_path.read_text(encoding="utf-8"))


def _open_run(run: Path, overrides: list[str]) -> tuple[RunConfig, PlanFile | None]:
    """The configuration, and the plan that it is from.

    Raises:
        UserError: see `load_run_config`, `read_plan` and `run_of`; a store or devices that are not the plan's.
    """
    from lamella.config import load_run_config

    if run.suffix != ".json":
        return load_run_config(run, overrides), None
    from lamella.forecast.describe import shape_of
    from lamella.forecast.document import check_store, read_plan, run_of

    plan = read_plan(run)
    config = run_of(plan, run, overrides)
    check_store(plan, shape_of(config.store), config.store)
    _check_devices(plan, config, run)
    return config, plan


def _check_devices(plan: PlanFile, config: RunConfig, path: Path) -> None:
    """Refuse a plan for ranks, GPUs or cores that are not here."""
    from lamella.ranks.place import check_count, started_by_launcher

    fix = "run it where it was made for, or make a plan for this machine: lamella plan MODEL --machine machine.json"
    names = [entry.device for entry in config.devices] or [config.compute.device]
    if started_by_launcher():
        world = int(os.environ["WORLD_SIZE"])
        check_count(config, world)
        if world != len(names):
            raise UserError(f"the plan is for {len(names)} rank{'s' * (len(names) != 1)}, and {world} were started",
                            fix=fix, path=path)  # fmt: skip
        return
    each = [entry.threads or 0 for entry in config.devices if entry.device == "cpu"] or [config.compute.threads or 0]
    cores_planned = max((host.cores for host in plan.machine.hosts), default=0)
    threads = max(max(each), min(sum(each), cores_planned))  # ranks share cores where that was planned
    cores = len(os.sched_getaffinity(0))
    if threads > cores:
        raise UserError(f"the plan is for {threads} CPU threads, and here are {cores} cores", fix=fix, path=path)
    wanted = sum(name.startswith("cuda") for name in names)
    if not wanted:
        return
    import torch

    here = torch.cuda.device_count()
    if here < wanted:
        what = (
            f"the plan is for {wanted} CUDA device{'s' * (wanted != 1)}, and here {'is' if here == 1 else 'are'} {here}"
        )
        raise UserError(what, fix=fix, path=path)
    planned = [device for device in plan.machine.devices if device.kind == "cuda"]
    for k, device in enumerate(planned[:wanted]):
        memory = torch.cuda.get_device_properties(k).total_memory
        if memory < 0.95 * device.memory_bytes:
            raise UserError(f"the plan is for {device.name} with {format_bytes(device.memory_bytes)}, and CUDA device {k} has "
                            f"{format_bytes(memory)}", fix=fix, path=path)  # fmt: skip


def _machine_file(run: Path) -> Path | None:
    """`machine.json` of the working folder, or beside the run's file."""
    from lamella.hardware.machines import MACHINE_FILE

    found = (folder / MACHINE_FILE for folder in (Path(), run.parent))
    return next((path for path in found if path.is_file()), None)


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
