"""Where a run stands: all that a checkpoint holds besides the adapter and the optimizer's moments.

No random state is kept: row order, dropout and initial values follow from the seed and the position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

from lamella.adapter.lora import is_zero
from lamella.config import ValidationConfig
from lamella.errors import UserError
from lamella.train.parts import Redraw

_DIRECTIONS = {"loss": "min", "perplexity": "min", "nll": "min", "accuracy": "max", "f1": "max"}


def units(name: str, tensor: Tensor, kind: str) -> dict[str, Tensor]:
    """What a trainable tensor consists of: each expert of a stack [E, ., .] trains by itself (`name[e]`)."""
    if kind == "experts" and tensor.dim() == 3:
        return {f"{name}[{e}]": part for e, part in enumerate(tensor)}
    return {name: tensor}


def unit_names(parameters: Mapping[str, Tensor], class_of: Callable[[str], str]) -> list[str]:
    """Names of all units; no value is looked at."""
    found = []
    for name, p in zip(parameters, parameters.values(), strict=True):
        stack = class_of(name) == "experts" and p.dim() == 3
        found += [f"{name}[{e}]" for e in range(p.shape[0])] if stack else [name]
    return found


def tensor_of(unit: str) -> str:
    """Name of the tensor that a unit is part of."""
    return unit.rpartition("[")[0] if unit.endswith("]") else unit


def sibling(unit: str) -> str:
    """The other one of a pair: `x.lora_A[3]` -> `x.lora_B[3]`."""
    return unit.replace("lora_A", "lora_B") if "lora_A" in unit else unit.replace("lora_B", "lora_A")


def digests(parameters: Mapping[str, Tensor], class_of: Callable[[str], str]) -> dict[str, str]:
    """Checksum of each unit's bytes: whether it moved, without a second copy of it."""
    found: dict[str, str] = {}
    for name, p in parameters.items():
        values = p.detach().cpu().contiguous().numpy()  # slices of numpy arrays: a stack has hundreds
        if class_of(name) == "experts" and values.ndim == 3:
            found |= {f"{name}[{e}]": xxhash.xxh3_128_hexdigest(part.data) for e, part in enumerate(values)}
        else:
            found[name] = xxhash.xxh3_128_hexdigest(values.data)
    return found


class Start:
    """The adapter's values before the first step: what moved is told against them.

    Args:
        redraw: makes them again; None: they are known by what the parameters hold now alone.
        later: read nothing now; checksums are of values made again, when they are first asked for.

    Attributes:
        checksum: of what the values are a function of, or of the values.
        zero: parameters that begin as zero.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], class_of: Callable[[str], str], redraw: Redraw | None = None,
        later: bool = False,
    ) -> None:  # fmt: skip
        self._class_of, self._redraw = class_of, redraw
        self._names = list(parameters)
        self._digests = None if redraw is not None and later else digests(parameters, class_of)
        if redraw is None:
            self.zero = tuple(name for name, p in parameters.items() if is_zero(p))
            self.checksum = digest_of(self.digests())
        else:
            self.zero = tuple(name for name in parameters if redraw.begins_zero(name))
            self.checksum = xxhash.xxh3_128_hexdigest(redraw.recipe().encode())

    def digests(self) -> dict[str, str]:
        """Checksum of each unit (see `units`)."""
        if self._digests is None:
            assert self._redraw is not None
            self._digests = {}
            for name in self._names:
                self._digests |= digests({name: self._redraw.initial(name)}, self._class_of)
        return self._digests


def without_gradient(
    names: list[str], parameters: dict[str, torch.nn.Parameter], class_of: Callable[[str], str]
) -> list[str]:
    """Those of the units `names` whose gradient is missing or all zero now."""
    left = set(names)
    for name in {tensor_of(unit): None for unit in names}:
        grad = parameters[name].grad
        if grad is not None:
            parts = units(name, grad, class_of(name))
            left -= {unit for unit in parts if unit in left and bool(parts[unit].any())}
    return [unit for unit in names if unit in left]


def digest_of(parts: dict[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(f"{name}={value};" for name, value in parts.items()).encode())


@dataclass
class Best:
    """Best measurement so far; `value` of `metric` after `step`."""

    metric: str
    mode: str
    value: float | None = None
    step: int | None = None

    def offer(self, value: float, step: int) -> bool:
        """Take `value` when it is better. NaN and infinities never are."""
        if not math.isfinite(value):
            return False
        if self.value is not None and not (value < self.value if self.mode == "min" else value > self.value):
            return False
        self.value, self.step = value, step
        return True


def direction(config: ValidationConfig) -> str:
    """`min` or `max` for the chosen metric: as configured, else known by the metric's last word.

    Raises:
        UserError: a metric whose direction is not known and not given.
    """
    if config.mode != "auto":
        return config.mode
    known = _DIRECTIONS.get(config.metric.rsplit("_", 1)[-1])
    if known is None:
        raise UserError(
            f"validation.metric = {config.metric!r}: is more better, or less?",
            fix='set validation.mode to "min" or "max"',
        )
    return known


def check_validation(config: ValidationConfig) -> None:
    """Raises `UserError` for a metric whose direction is not known, or one asked for without data to measure it on."""
    if config.data:
        direction(config)
    elif config.metric != ValidationConfig().metric:
        raise UserError(
            f"validation.metric = {config.metric!r}, but there is no validation.data to measure it on",
            fix="set validation.data, or leave validation.metric out",
        )


@dataclass
class RunState:
    """Position and history.

    Attributes:
        step: steps done, skipped ones included.
        updates: steps that changed the adapter.
        bad_steps, bad_in_row: steps skipped for a non-finite loss or gradient; the last of them in a row.
        empty_steps: steps without label tokens.
        untouched: units (see `units`) that have not seen a gradient other than zero.
        dead: experts' A that had no gradient although their B moved and got one.
        start: loss per label token before the first step, without and with the adapter.
        initial: checksum of the adapter's initial values.
        split: how the ranks shared the work, and how many there were.
    """

    config: dict[str, Any]
    data_fingerprint: str
    store_fingerprint: str
    initial: str
    untouched: list[str]
    dead: list[str] = field(default_factory=list)
    start: dict[str, float] = field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    index: int = 0
    updates: int = 0
    bad_steps: int = 0
    bad_in_row: int = 0
    empty_steps: int = 0
    best: Best | None = None
    warnings: list[str] = field(default_factory=list)
    split: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint's state. The configuration was compared before.

        Raises:
            UserError: other data, another store or other initial values than the checkpoint's.
        """
        for name, what in (
            ("data_fingerprint", "training data"),
            ("store_fingerprint", "store"),
            ("initial", "initial adapter"),
        ):
            if saved[name] != getattr(self, name):
                raise UserError(
                    f"the {what} is not the checkpoint's: fingerprint {saved[name]} there, {getattr(self, name)} now",
                    fix=f"bring back the {what}, set another name, or start over with --fresh",
                )
        for name in ("step", "epoch", "index", "updates", "bad_steps", "bad_in_row", "empty_steps", "untouched", "dead",
                     "warnings", "start"):  # fmt: skip
            setattr(self, name, saved[name])
        self.split = saved.get("split")
        if saved["best"] is not None:
            self.best = Best(**saved["best"])
