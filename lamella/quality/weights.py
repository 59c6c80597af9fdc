"""How far a store's weights are from those they were made from, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from lamella.engine.values import CheckpointValues, StoreValues

_PIECE = 4 << 20
"""Values compared at once: a multiple of every block size."""


@dataclass(frozen=True)
class WeightError:
    """Of one quantised tensor: |stored - source| / |source| in the Frobenius norm."""

    name: str
    tensor_class: str
    format: str
    numel: int
    relative: float


def weight_errors(
    plain: CheckpointValues, stored: StoreValues, advance: Callable[[int], None] = lambda _: None
) -> list[WeightError]:
    """Every quantised tensor of a store beside its source, in pieces.

    Args:
        advance: called with the values compared.
    """
    found = []
    for key, group in stored.store.manifest.groups():
        stored.enter(key)
        plain.enter(key)
        for record in group.tensors:
            if record.format == "raw":
                continue
            wrong = whole = 0.0
            step = math.prod(record.shape[1:]) if record.order else _PIECE
            for first in range(0, record.numel, step):
                n = min(step, record.numel - first)
                source, kept = torch.empty(n), torch.empty(n)
                plain.fill(record.name, first, source)
                stored.fill(record.name, first, kept)
                whole += float(source.norm().double() ** 2)
                wrong += float(kept.sub_(source).norm().double() ** 2)
                advance(n)
            relative = math.sqrt(wrong / whole) if whole else 0.0
            found.append(WeightError(record.name, record.tensor_class, record.format, record.numel, relative))
    stored.enter(None)
    plain.enter(None)
    return found


def by_class(errors: Sequence[WeightError]) -> dict[str, float]:
    """Class -> median relative error of its tensors."""
    classes = sorted({e.tensor_class for e in errors})
    return {name: median(e.relative for e in errors if e.tensor_class == name) for name in classes}


def outliers(errors: Sequence[WeightError], factor: float = 1.5) -> list[WeightError]:
    """Tensors whose error is more than `factor` times the median of their class and format, the worst first."""
    groups: dict[tuple[str, str], list[WeightError]] = {}
    for error in errors:
        groups.setdefault((error.tensor_class, error.format), []).append(error)
    found = [e for group in groups.values() for e in group if e.relative > factor * median(x.relative for x in group)]
    return sorted(found, key=lambda e: (-e.relative, e.name))
