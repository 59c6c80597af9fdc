"""What of an adapter a rounded file keeps: the recovered delta, stored - base, beside the delta itself.

    error = ||recovered - delta|| / ||delta||        0: all of it, unchanged; 1: no nearer than the base alone
    kept  = <recovered, delta> / ||delta||^2         the delta's own part: 1 kept, 0 eaten

Rounding to a grid that the base does not lie on adds noise and keeps the delta on the average (error > 0, kept near 1); rounding
back to the grid that the base does lie on eats it (kept near 0).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamella.errors import UserError

MAX_ERROR = 0.10
"""Default limit for 16 and 32 bit: bf16 of a delta of mean 1e-4 on weights of 0.02 loses 26 %, fp16 3 %; of mean 1e-3 bf16
2.6 %. Below a tenth, what is lost is small beside what one more epoch changes."""
MIN_KEPT = 0.9
"""Default limit for 8 and 4 bit, whose noise on the weights is what was asked for. In the same setting NF4 keeps 1.5 % of a delta
of 1e-5 and 1e-4, 53 % of 1e-3 and 99 % of 5e-3; FP8 all of each, under noise of 41, 4.1, 0.42 and 0.09 times the delta."""
NEXT_WIDER = {"nf4": "fp8, or bf16", "fp8": "bf16", "bf16": "fp16", "fp16": "fp32", "fp32": "fp32"}


@dataclass
class Loss:
    """Sums over values; add to them piece by piece."""

    error2: float = 0.0
    delta2: float = 0.0
    dot: float = 0.0
    delta_abs: float = 0.0
    values: int = 0
    changed: bool = False

    def add(self, stored: Tensor, base: Tensor, delta: Tensor) -> None:
        """A piece: flat fp32 tensors of one size; `base` is overwritten."""
        self.changed = self.changed or not torch.equal(stored, base)
        recovered = torch.sub(stored, base, out=base)
        self.dot += float(torch.dot(recovered, delta))
        self.delta2 += float(torch.dot(delta, delta))
        self.delta_abs += float(torch.linalg.vector_norm(delta, 1))
        recovered -= delta
        self.error2 += float(torch.dot(recovered, recovered))
        self.values += delta.numel()

    def merge(self, other: Loss) -> None:
        self.error2 += other.error2
        self.delta2 += other.delta2
        self.dot += other.dot
        self.delta_abs += other.delta_abs
        self.values += other.values
        self.changed = self.changed or other.changed

    @property
    def error(self) -> float:
        return math.sqrt(self.error2 / self.delta2) if self.delta2 else 0.0  # no change, none to lose

    @property
    def kept(self) -> float:
        return self.dot / self.delta2 if self.delta2 else 1.0

    @property
    def mean_delta(self) -> float:
        return self.delta_abs / self.values if self.values else 0.0


@dataclass(frozen=True)
class TensorLoss:
    """Of one stored tensor."""

    name: str
    layer: int
    weight_class: str
    loss: Loss


def by_class(losses: Sequence[TensorLoss]) -> dict[str, Loss]:
    """Summed by class (attention, mlp, experts)."""
    found: dict[str, Loss] = defaultdict(Loss)
    for one in losses:
        found[one.weight_class].merge(one.loss)
    return dict(found)


def by_layer(losses: Sequence[TensorLoss]) -> dict[tuple[int, str], Loss]:
    """Summed by (layer, class)."""
    found: dict[tuple[int, str], Loss] = defaultdict(Loss)
    for one in losses:
        found[one.layer, one.weight_class].merge(one.loss)
    return dict(found)


def worst(losses: Sequence[TensorLoss], count: int = 5) -> list[TensorLoss]:
    """Largest errors first; tensors whose delta is zero lose nothing."""
    return sorted((one for one in losses if one.loss.delta2), key=lambda one: -one.loss.error)[:count]


def complaint(losses: Sequence[TensorLoss], form: str, max_loss: float | None, slack: float = 1.0) -> str:
    """What is wrong with a form for this adapter, or "".

    Args:
        form: "bf16", "fp16", "fp32", or a block-wise one.
        max_loss: limit on each class's error; None: the defaults.
        slack: the limits are taken so much looser.
    """
    plain = form in ("bf16", "fp16", "fp32")
    for name, loss in by_class(losses).items():
        if max_loss is not None or plain:
            limit = MAX_ERROR if max_loss is None else max_loss
            if loss.error > limit * slack:
                return (f"{form} would lose {loss.error:.3g} of the adapter's change of {name} (mean |delta| {loss.mean_delta:.2g}), "
                        f"limit {limit:.2g}")  # fmt: skip
        elif loss.kept < MIN_KEPT / slack:
            return (f"{form} would keep {max(loss.kept, 0.0):.0%} of the adapter's change of {name} (mean |delta| "
                    f"{loss.mean_delta:.2g}), least {MIN_KEPT:.0%}: rounding eats the rest")  # fmt: skip
    return ""


def refuse(losses: Sequence[TensorLoss], form: str, max_loss: float | None, slack: float = 1.0) -> None:
    """Raises `UserError` where `complaint` has one."""
    what = complaint(losses, form, max_loss, slack)
    if what:
        raise UserError(
            what, fix=f"export {NEXT_WIDER.get(form, 'bf16')}, export the adapter beside the base, or raise --max-loss"
        )


def lines(losses: Sequence[TensorLoss], form: str) -> list[str]:
    """What people read: by class, the worst layer of each, the worst tensors."""
    layers = by_layer(losses)
    told = []
    for name, loss in by_class(losses).items():
        (layer, _), most = max(((k, v) for k, v in layers.items() if k[1] == name), key=lambda item: item[1].error)
        told.append(f"{form}, {name}: mean |delta| {loss.mean_delta:.2g}, error of the recovered delta {loss.error:.2%}, "
                    f"kept {loss.kept:.2%}; worst layer {layer}: {most.error:.2%}")  # fmt: skip
    told += [f"  {one.name}: {one.loss.error:.2%}, kept {one.loss.kept:.2%}" for one in worst(losses, 3)]
    return told
