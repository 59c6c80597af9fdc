"""Adapters of several tenants for a tiny model, and what each answers alone."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine

KINDS = ((4, "all-linear", 0.3), (2, ("q_proj", "o_proj"), 0.5), (3, "all-linear", 0.4))
"""Rank, targets and size of B: adapters differ in all of them, so pairs of one batch do not fit each other."""


def save_adapters(engine: Engine, folder: Path, count: int = 3) -> dict[str, Path]:
    """Adapters t0, t1 ... with strong effects, saved as PEFT folders."""
    folders = {}
    for n in range(count):
        rank, targets, size = KINDS[n % len(KINDS)]
        adapter = Adapter.create(engine.skeleton, LoraConfig(rank=rank, alpha=2 * rank, targets=targets), seed=n)
        generator = torch.Generator().manual_seed(100 + n)
        with torch.no_grad():
            for name, p in adapter.parameters().items():
                if name.endswith("lora_B"):
                    p.copy_(torch.randn(p.shape, generator=generator) * size)
        folders[f"t{n}"] = folder / f"t{n}"
        adapter.save(folders[f"t{n}"])
    return folders


def prompt(tokens: int, seed: int, vocabulary: int = 500) -> tuple[int, ...]:
    rnd = random.Random(seed)
    return tuple(rnd.randrange(vocabulary) for _ in range(tokens))


def attached(engine: Engine, folders: dict[str, Path], name: str | None) -> Engine:
    """The engine with this adapter alone, as `lamella eval` has it."""
    engine.attach(None if name is None else Adapter.load(folders[name], engine.skeleton))
    return engine
