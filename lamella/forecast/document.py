"""`plan.json`: a plan as a file. What was asked, what was settled, what it should take, and how every figure came about.

`lamella train plan.json` runs it: the asked settings, with those that were settled in their place.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from lamella import __version__
from lamella.config import RunConfig, Section, build_run_config, differences, explain_validation, merge, read_overrides
from lamella.errors import UserError
from lamella.files import write_text
from lamella.forecast.money import Money
from lamella.forecast.number import Number
from lamella.forecast.serving import Serving
from lamella.forecast.shape import ModelShape
from lamella.hardware.machine import Machine

FORMAT_VERSION = 1
_MARK = "lamella plan"
_FIXED = ("memory.", "compute.", "devices", "split.", "lora.", "train.rows_per_step", "train.tokens_per_step",
          "train.micro_batch_tokens", "train.router_aux_coef", "data.max_tokens")  # fmt: skip
"""Settings that a plan's figures follow from: another value needs another plan."""
_FREE = ("lora.alpha", "lora.rslora", "split.rebalance")


class PlannedModel(Section):
    """The model of a plan."""

    name: str
    kind: Literal["store", "checkpoint", "config", "hub"]
    """What the plan was made of."""
    path: Path | None
    """Of a store, checkpoint or config.json."""
    model_type: str
    layers: int
    total_parameters: int
    store_bytes: int


class PlannedRows(Section):
    """The data of a plan."""

    source: str
    how: Literal["counted", "sampled", "characters", "given"]
    rows: int
    tokens: int
    label_tokens: int
    lengths: dict[str, int]
    """Percentiles in tokens."""
    encoded: int
    dropped: int


class PlanFile(Section):
    """A plan, whole."""

    kind: Literal["lamella plan"] = "lamella plan"
    format_version: int = FORMAT_VERSION
    made: str
    """ISO date and time."""
    lamella: str
    """Version that made it."""
    model: PlannedModel
    machine: Machine
    rows: PlannedRows
    asked: dict[str, Any]
    """Settings as given, a tree like run.toml; paths are absolute."""
    settled: dict[str, Any]
    """Settings that the plan chose; they take the place of asked ones."""
    fits: bool
    figures: dict[str, Any]
    """All figures of the forecast."""
    money: Money
    serving: Serving | None
    numbers: tuple[Number, ...] = Field(repr=False)
    """Figures with formula and inputs."""
    notes: tuple[str, ...]
    """What was assumed."""


def now() -> str:
    """ISO date and time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def planned_model(
    shape: ModelShape, kind: Literal["store", "checkpoint", "config", "hub"], path: Path | None
) -> PlannedModel:
    """The model's part of the file."""
    return PlannedModel(
        name=shape.name, kind=kind, path=None if path is None else path.resolve(), model_type=shape.model_type,
        layers=len(shape.layers), total_parameters=shape.total_parameters, store_bytes=shape.store_bytes,
    )  # fmt: skip


def plain(value: Any) -> Any:
    """Dataclasses, sections, tuples and paths as values for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {_key(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def _key(key: Any) -> str:
    return "-".join(map(str, key)) if isinstance(key, tuple) else str(key)


def asked_of(config: RunConfig) -> dict[str, Any]:
    """The settings that were given, as a tree, with absolute paths."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    for names in (("store",), ("runs_dir",), ("init_adapter",), ("data", "train"), ("data", "chat_template"),
                  ("validation", "data")):  # fmt: skip
        node: Any = tree
        for name in names[:-1]:
            node = node.get(name, {})
        value = node.get(names[-1])
        if isinstance(value, str):
            node[names[-1]] = str(Path(value).resolve())
        elif isinstance(value, list):
            node[names[-1]] = [str(Path(v).resolve()) for v in value]
    return tree


def to_json(plan: PlanFile) -> str:
    """One JSON object."""
    return plan.model_dump_json(indent=1) + "\n"


def write_plan(path: Path, plan: PlanFile) -> None:
    """Write atomically. Raises `UserError` when that cannot be done."""
    try:
        write_text(path, to_json(plan))
    except OSError as error:
        raise UserError(
            f"the plan cannot be written: {error.strerror}", fix="give another --save path", path=path
        ) from error


def read_plan(path: Path) -> PlanFile:
    """Read a plan.

    Raises:
        UserError: no such file, no plan, made by a newer version, or damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text)
    except FileNotFoundError as error:
        raise UserError("no such file", fix="make one: lamella plan MODEL --save plan.json", path=path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot be read: {error}", fix="give a text file in UTF-8 that you may read", path=path
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"not JSON: {error.msg}", fix="make it again: lamella plan MODEL --save plan.json",
            path=path, line=error.lineno, column=error.colno,
        ) from error  # fmt: skip
    if not isinstance(tree, dict) or tree.get("kind") != _MARK:
        raise UserError(
            "not a plan of `lamella plan`", fix="give a file that `lamella plan --save` wrote, or a run.toml", path=path
        )
    version = tree.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"the plan has format version {version!r}, this is lamella {__version__} and reads version {FORMAT_VERSION}",
            fix="make the plan again with this version", path=path,
        )  # fmt: skip
    try:
        return PlanFile.model_validate_json(text)
    except ValidationError as error:
        raise explain_validation(error, path, PlanFile) from error


def run_of(plan: PlanFile, path: Path, overrides: list[str] | None = None) -> RunConfig:
    """The run that a plan describes, with overrides of what it left open.

    Raises:
        UserError: a plan that does not fit its machine, or of a checkpoint while no store is given; an override that
            contradicts what the plan was made for.
    """
    if not plan.fits:
        raise UserError(
            "this plan does not fit its machine", fix="see what would: lamella plan with the same arguments", path=path
        )
    over = read_overrides(overrides or [])
    if plan.model.kind != "store" and "store" not in over:
        origin = plan.model.name if plan.model.kind == "hub" else plan.model.path
        raise UserError(
            f"the plan was made of {origin}, and training reads a store",
            fix=f"quantise first: lamella quantize {origin} STORE, then lamella train {path} store=STORE",
            path=path,
        )
    base = merge(plan.asked, plan.settled)
    planned = build_run_config(merge(base, {"store": over["store"]} if "store" in over else {}), path)
    wanted = build_run_config(merge(base, over))
    changed = differences(planned.model_dump(mode="json"), wanted.model_dump(mode="json"))
    against = {key: values for key, values in changed.items() if key.startswith(_FIXED) and key not in _FREE}
    if against:
        raise UserError(
            "the plan was made for other settings:\n"
            + "\n".join(
                f"    {key}: {old!r} in the plan, {new!r} asked for now" for key, (old, new) in against.items()
            ),
            fix="leave them out, or make a new plan with them",
            path=path,
        )
    return wanted


def check_store(plan: PlanFile, shape: ModelShape, path: Path) -> None:
    """Raises `UserError` when a store holds another model than the plan's."""
    model = plan.model
    found = (shape.model_type, len(shape.layers), shape.total_parameters)
    if found != (model.model_type, model.layers, model.total_parameters):
        raise UserError(
            f"the plan is for {model.name} ({model.model_type}, {model.layers} layers, {model.total_parameters:,} parameters); "
            f"the store holds {shape.name} ({found[0]}, {found[1]} layers, {found[2]:,} parameters)",
            fix="give the plan's own store, or make a new plan", path=path,
        )  # fmt: skip
