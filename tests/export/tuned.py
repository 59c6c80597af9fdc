"""Adapters that were trained on tiny stores, with the logits that merged models must give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lamella.engine import Engine
from lamella.models.layout import pack_rows
from lamella.store.reader import Store
from tests.conftest import random_rows
from tests.engine.test_families import trained_adapter

ROWS = random_rows((5, 23, 9, 30))


@dataclass(frozen=True)
class Tuned:
    """A store, an adapter on it, and fp32 logits of both with and without it."""

    store: Store
    base: Path
    adapter: Path
    tuned: torch.Tensor
    bare: torch.Tensor


def logits_of(model) -> torch.Tensor:
    """Of a transformers model, over `ROWS`, fp32."""
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([ids])).logits[0].float() for ids, _ in ROWS])


def divergence(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Mean KL in nats a token."""
    a, b = wanted.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((a.exp() * (a - b)).sum(-1).mean())


def tune(store: Store, base: Path, adapter: Path, scale: float = 1.0, **over) -> Tuned:
    """B drawn, and multiplied by `scale`."""
    engine = Engine.open(store, dtype="fp32")
    bare = engine.logits(pack_rows(ROWS))
    made = trained_adapter(engine, **over)
    with torch.no_grad():
        for name, p in made.parameters().items():
            if name.endswith("lora_B"):
                p.mul_(scale)
    tuned = engine.logits(pack_rows(ROWS))
    made.save(adapter, facts={"base_fingerprint": store.manifest.source_fingerprint})
    return Tuned(store, base, adapter, tuned, bare)
