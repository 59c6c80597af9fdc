"""`lamella plan`: what a run would take, before any weight is loaded. Imports no torch."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamella.errors import DoesNotFit, UserError

if TYPE_CHECKING:
    from lamella.config import RunConfig
    from lamella.forecast.make import Kind, Planned
    from lamella.forecast.rows import Rows
    from lamella.forecast.shape import ModelShape

_ROWS, _TOKENS = 3600, 4096
"""Taken where there are neither data nor --rows and --tokens."""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("plan")(plan)


@dataclass(frozen=True)
class Asked:
    """The command line."""

    data: tuple[Path, ...]
    rows: int | None
    tokens: int | None


@dataclass(frozen=True)
class Model:
    """MODEL, found.

    Attributes:
        name: for `shape_of`; folder: with the tokenizer; None: not at hand.
        run: MODEL is this run.toml; `name` is then its store.
    """

    name: str
    kind: Kind
    path: Path | None
    folder: Path | None
    run: Path | None = None


def plan(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Checkpoint folder, config.json, layer store, hub id, or a run.toml."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="dotted.key=value, e.g. lora.rank=64 memory.budget=40GB")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="JSONL file or folder to train on; may repeat.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="machine.json, a TOML, or words: 4xH100-80 (default: ./machine.json).")
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", help="Without data: this many rows.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Without data: tokens of each row.")] = None,
    formats: Annotated[
        Path | None, typer.Option(metavar="FILE", help="quantize.toml: formats of the store to be made.")
    ] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="US dollars an hour for the whole machine.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Every figure with formula and inputs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan, for `lamella train plan.json`.")] = None,
    compare: Annotated[Path | None, typer.Option(help="A run's folder: its plan beside what was measured.")] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="With --compare: later plans here take what that run has shown.")
    ] = False,
) -> None:
    """Say whether a run fits, where each layer would live, how long it takes, what it costs, and what serving takes.

    Exit code 0: it fits; 3: it does not; 2: bad input.
    """
    if compare is not None:
        if model is not None or data or save is not None:
            raise UserError("--compare takes a run that has its plan with it", fix="leave MODEL, --data and --save out")
        _compare(compare, as_json, calibrate)
        return
    if calibrate:
        raise UserError("--calibrate without a run", fix="give it with --compare runs/NAME")
    if model is None:
        raise UserError("no MODEL given", fix="give a checkpoint folder, config.json, layer store, hub id or run.toml")
    gc.disable()  # a plan makes many small objects and no cycles
    try:
        asked = Asked(tuple(data or ()), rows, tokens)
        planned = _make(model, overrides or [], asked, machine, price_per_hour, formats)
    finally:
        gc.enable()
    if save is not None:
        from lamella.forecast.document import write_plan

        write_plan(save, planned.file)
    _show(planned, explain, as_json, save)


def _make(
    model: str, overrides: list[str], asked: Asked, machine: str | None, price: float | None, formats: Path | None
) -> Planned:
    from lamella.forecast.calibration import beside
    from lamella.forecast.describe import shape_of
    from lamella.forecast.make import make_plan
    from lamella.hardware.machines import MACHINE_FILE, open_machine
    from lamella.store.formats import read_formats

    if asked.data and (asked.rows is not None or asked.tokens is not None):
        raise UserError("--data together with --rows or --tokens", fix="give the data, or the rows that stand for them")
    found = find_model(model, overrides)
    shape = shape_of(found.name, formats=None if formats is None else read_formats(formats))
    folder = found.run.parent if found.run is not None and not Path(MACHINE_FILE).is_file() else Path()
    box = open_machine(machine, folder=folder)
    past = beside(folder / MACHINE_FILE if machine is None else Path(machine))
    config = _config(found, overrides, asked, shape)
    rows = _rows(config, asked, found, shape)
    return make_plan(shape, box, config, rows, kind=found.kind, path=found.path, usd_per_hour=price, calibration=past)


def find_model(text: str, overrides: list[str]) -> Model:
    """What MODEL is.

    Raises:
        UserError: nothing of that kind.
    """
    from lamella.store.manifest import MANIFEST_NAME

    path = Path(text)
    if path.suffix == ".toml":
        from lamella.config import load_run_config

        store = load_run_config(path, overrides).store
        return Model(str(store), "store", store, store, path)
    if path.is_dir():
        if (path / MANIFEST_NAME).is_file():
            return Model(text, "store", path, path)
        return Model(text, "checkpoint", path, path)
    if path.is_file():
        return Model(text, "config", path, path.parent)
    return Model(text, "hub", None, None)


def _config(found: Model, overrides: list[str], asked: Asked, shape: ModelShape) -> RunConfig:
    from lamella.config import build_run_config, load_run_config, merge, read_overrides

    if found.run is not None:
        more = [f"data.train={[str(path) for path in asked.data]!r}"] if asked.data else []
        return load_run_config(found.run, [*overrides, *more])
    tree: dict[str, Any] = {"store": str(found.path or "STORE")}
    if asked.data:
        tree["data"] = {"train": [str(path) for path in asked.data]}
    given = read_overrides(overrides)
    tree = merge(tree, given)
    data = tree.setdefault("data", {})
    if not data.get("train") and isinstance(data, dict) and "max_tokens" not in data:
        data["max_tokens"] = max(asked.tokens or _default_tokens(shape), 2)
    return build_run_config(tree)


def _default_tokens(shape: ModelShape) -> int:
    return _TOKENS if shape.max_tokens is None else min(_TOKENS, shape.max_tokens)


def _rows(config: RunConfig, asked: Asked, found: Model, shape: ModelShape) -> Rows:
    from lamella.forecast.rows import given_rows, rows_of

    hypothetical = asked.rows is not None or asked.tokens is not None
    if config.data.train and not hypothetical:
        return rows_of(config.data, found.folder, config.train.seed)
    count = _ROWS if asked.rows is None else asked.rows
    tokens = min(config.data.max_tokens, _default_tokens(shape)) if asked.tokens is None else asked.tokens
    return given_rows(count, tokens, config.data.max_tokens)


def _show(planned: Planned, explain: bool, as_json: bool, save: Path | None) -> None:
    from lamella.console import notice
    from lamella.forecast.document import to_json
    from lamella.forecast.present import changes_of, explained, whole

    found, document = planned.forecast, planned.file
    if as_json:
        typer.echo(to_json(document), nl=False)
    else:
        from rich.console import Console

        out = Console(highlight=False)
        for part in whole(document, planned.question, found):
            out.print(part)
        if explain:
            out.print("\nEvery figure", style="bold")
            for line in explained(document.numbers):
                typer.echo(line)
    if save is not None:
        notice(f"plan written to {save}")
    if not found.fits:
        raise DoesNotFit("; ".join(found.shortfall) or "nothing fits", fix=changes_of(found))


def _compare(run: Path, as_json: bool, calibrate: bool) -> None:
    from lamella.forecast.compare import compare_run

    comparison = compare_run(run)
    if calibrate:
        _calibrate(run)
    if as_json:
        import json

        typer.echo(json.dumps(comparison.to_dict()))
        return
    from rich.console import Console

    out = Console(highlight=False)
    for part in comparison.render():
        out.print(part)


def _calibrate(run: Path) -> None:
    from lamella.console import notice
    from lamella.forecast.calibration import FILE, calibrate

    path = Path(FILE)
    calibrate(run, path)
    notice(
        f"{path} has what {run} showed; plans with the machine.json beside it take it (remove the file to undo that)"
    )
