"""The plan of a run that was given none: made from what is open already, never a reason for a run not to start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lamella.config import DeviceConfig, RunConfig
from lamella.console import notice
from lamella.errors import UserError
from lamella.hardware.machine import Machine
from lamella.hardware.memory import memory_limit_bytes
from lamella.ranks.place import place_of

if TYPE_CHECKING:
    from lamella.data.encode import EncodedRow
    from lamella.engine import Engine
    from lamella.forecast.document import PlanFile


def plan_for_run(
    config: RunConfig, rows: Sequence[EncodedRow], engine: Engine, world: int, machine: Path | None
) -> PlanFile | None:
    """The plan, with its short form said; None, and one notice, where there can be none.

    Args:
        rows: the training data, encoded.
        world: ranks of the run.
        machine: file of `lamella probe`; None: a rough machine with the rate that the engine measured.
    """
    from lamella.forecast.calibration import beside
    from lamella.forecast.describe import shape_of_store
    from lamella.forecast.make import make_plan
    from lamella.forecast.present import short
    from lamella.forecast.rows import counted_rows
    from lamella.hardware.machines import read_machine

    try:
        box = rough(engine, config, world) if machine is None else read_machine(machine)
        if world > 1 and not config.devices:
            places = [place_of(config, rank, world) for rank in range(world)]
            devices = tuple(DeviceConfig(device=place.device, threads=place.threads) for place in places)
            config = config.model_copy(update={"devices": devices})
        planned = make_plan(
            shape_of_store(config.store, engine.store.manifest), box, config, counted_rows(rows), kind="store",
            path=config.store, serving=False, explain=False, calibration=None if machine is None else beside(machine),
        )  # fmt: skip
    except UserError as error:
        notice(f"no plan: {error.what}")
        return None
    for line in short(planned.file, planned.forecast):
        notice(line)
    return planned.file


def rough(engine: Engine, config: RunConfig, world: int) -> Machine:
    """This host as far as the engine has measured it."""
    from lamella.forecast.document import now
    from lamella.forecast.rough import rough_machine

    limit = memory_limit_bytes()
    rate = engine.matmul_rate().best
    device = engine.walk.weights.device
    if device.type == "cuda":
        memory = tuple(torch.cuda.get_device_properties(k).total_memory for k in range(torch.cuda.device_count()))
        box = rough_machine(("cuda",) * len(memory), (rate,) * len(memory), memory, limit, os.cpu_count() or 1, now())
    else:
        cores = len(os.sched_getaffinity(0))
        whole = rate * max(1.0, cores / torch.get_num_threads())
        box = rough_machine(("cpu",), (whole,), (limit,), limit, cores, now())
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[engine.skeleton.dtype]
    return box.model_copy(update={"devices": tuple(x.model_copy(update={"dtype": dtype}) for x in box.devices)})
