"""From a model, a machine, settings and rows to a plan: the forecast, its costs, and serving, in one document."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lamella import __version__
from lamella.config import RunConfig
from lamella.forecast.calibration import Calibration
from lamella.forecast.document import PlanFile, PlannedRows, asked_of, now, plain, planned_model
from lamella.forecast.figures import numbers_of
from lamella.forecast.forecast import Question, forecast
from lamella.forecast.money import money_numbers, money_of
from lamella.forecast.outcome import Forecast
from lamella.forecast.rows import Rows, check_context
from lamella.forecast.serving import Serving, catalogue_devices, preview, serving_numbers
from lamella.forecast.shape import ModelShape
from lamella.forecast.trainable import alternatives, trainable_set
from lamella.forecast.ways import identities_of
from lamella.hardware.machine import Machine

Kind = Literal["store", "checkpoint", "config", "hub"]


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made of."""

    question: Question
    forecast: Forecast
    file: PlanFile


def question_of(shape: ModelShape, machine: Machine, config: RunConfig, rows: Rows, quantised: bool) -> Question:
    """What a run's forecast depends on; `quantised`: the shape is a store's."""
    return Question(
        shape=shape, machine=machine, lora=config.lora, train=config.train, memory=config.memory, compute=config.compute,
        devices=config.devices, split=config.split, checkpoint=config.checkpoint, rows=rows, quantised=quantised,
    )  # fmt: skip


def make_plan(
    shape: ModelShape, machine: Machine, config: RunConfig, rows: Rows, *, kind: Kind, path: Path | None = None,
    usd_per_hour: float | None = None, calibration: Calibration | None = None, serving: bool = True, explain: bool = True,
) -> Planned:  # fmt: skip
    """Make the plan.

    Args:
        kind, path: what `shape` is from, and where that lies.
        usd_per_hour: in place of the machine's own prices.
        calibration: what past runs say of the machine.
        serving: look at serving too; explain: keep every figure's formula and inputs.

    Raises:
        UserError: settings that contradict the model, the machine or each other; rows over the model's context.
    """
    check_context(rows, shape.max_tokens, shape.name)
    question = replace(question_of(shape, machine, config, rows, kind == "store"), calibration=calibration)
    found = forecast(question)
    epochs = found.steps / rows.steps_per_epoch(config.train)
    money = money_of(machine, found.run_s / 3600, found.run_tokens, epochs, usd_per_hour)
    seen = _serving(question, found) if serving else None
    numbers = []
    if explain:
        numbers = numbers_of(question, found) + money_numbers(money, found.run_tokens, epochs)
        numbers += serving_numbers(shape, seen) if seen is not None else []
    asked = asked_of(config)
    if kind != "store":
        asked.pop("store", None)
    notes = dict.fromkeys([*rows.notes, *shape.notes, *machine.notes, *found.notes])
    document = PlanFile(
        made=now(), lamella=__version__, model=planned_model(shape, kind, path), machine=machine,
        rows=PlannedRows(
            source=rows.source, how=rows.how, rows=len(rows.lengths), tokens=rows.tokens, label_tokens=rows.label_tokens,
            lengths=rows.percentiles, encoded=rows.encoded, dropped=rows.dropped,
        ),
        asked=asked, settled=found.settled, fits=found.fits, figures=figures_of(question, found), money=money,
        serving=seen, numbers=tuple(numbers), notes=tuple(notes),
    )  # fmt: skip
    return Planned(question, found, document)


def _serving(question: Question, found: Forecast) -> Serving:
    longest, most = max(question.rows.lengths), question.shape.max_tokens
    length = max(1024, 1 << (longest - 1).bit_length())
    length = length if most is None else min(length, most)
    return preview(question.shape, question.machine, catalogue_devices(), length, found.sites)


def figures_of(question: Question, found: Forecast) -> dict[str, Any]:
    """All figures as values for JSON."""
    shape = question.shape
    figures: dict[str, Any] = plain(replace(found, played=None))
    for name in ("settled", "notes", "sites", "plan"):
        del figures[name]
    figures["played"] = None if found.played is None else found.played.to_dict()
    figures["model"] = {
        "parameters": shape.parameters, "active": shape.active, "total": shape.total_parameters,
        "total_active": shape.active_parameters, "beyond": shape.beyond_parameters,
        "checkpoint_bytes": shape.checkpoint_bytes, "store_bytes": shape.store_bytes,
        "outer_store_bytes": shape.outer_store_bytes, "layer_store_bytes": [x.store_bytes for x in shape.layers],
        "source": shape.source, "hidden": shape.hidden, "vocab": shape.vocab, "max_tokens": shape.max_tokens,
    }  # fmt: skip
    past = question.calibration or Calibration()
    figures["calibrated"] = [
        {"identity": one.model_dump(mode="json"), "factors": past.factors(one)}
        for one in identities_of(question, [rank.keeps for rank in found.ranks])
    ]
    figures["trained"] = plain(trainable_set(found.sites))
    figures["alternatives"] = plain(alternatives(shape, question.lora))
    return figures
