"""Real models with real adapters: SmolLM2-135M-Instruct and its mixture of experts, a few steps trained on real rows."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lamella.config import CheckpointConfig, DataConfig, LoraConfig, RunConfig, TrainConfig
from lamella.demo.prepare import prepare
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from lamella.train.loop import train_run

CACHE = Path(__file__).parent.parent.parent / ".cache" / "demo"
STEPS = 12


def trained(kind: Literal["dense", "moe"]) -> tuple[Path, Path, Path]:
    """Checkpoint, store, run; made once in the demo's cache."""
    made = prepare(CACHE, kind)
    store = CACHE / "stores" / made.checkpoint.name
    if not store.exists():
        quantize_checkpoint(str(made.checkpoint), store, QuantizeSettings())
    runs = CACHE / "runs"
    run = runs / f"engines-{kind}"
    if not (run / "adapter_model.safetensors").exists():
        train_run(
            RunConfig(
                name=run.name, runs_dir=runs, store=store, data=DataConfig(train=(made.messages,), max_tokens=512),
                lora=LoraConfig(rank=16, alpha=32.0), checkpoint=CheckpointConfig(every_steps=STEPS, keep=1),
                train=TrainConfig(steps=STEPS, rows_per_step=8, learning_rate=1e-3, warmup_steps=2),
            ),
            mode="fresh",
        )  # fmt: skip
    return made.checkpoint, store, run
