"""All that a forecast depends on."""

from __future__ import annotations

from dataclasses import dataclass, field

from lamella.config import (
    CheckpointConfig,
    ComputeConfig,
    DeviceConfig,
    LoraConfig,
    MemoryConfig,
    SplitConfig,
    TrainConfig,
)
from lamella.forecast.calibration import Calibration
from lamella.forecast.rows import Rows
from lamella.forecast.shape import ModelShape
from lamella.hardware.machine import Machine


@dataclass(frozen=True)
class Question:
    """Model, machine, rows and settings.

    Attributes:
        quantised: MODEL is a store already.
        calibration: factors from past runs; None: none.
    """

    shape: ModelShape
    machine: Machine
    rows: Rows
    lora: LoraConfig = field(default_factory=LoraConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    devices: tuple[DeviceConfig, ...] = ()
    split: SplitConfig = field(default_factory=SplitConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    quantised: bool = False
    calibration: Calibration | None = None
