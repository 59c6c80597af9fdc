"""What `[split]` asks for, checked against the model and the devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lamella.config import SplitConfig
from lamella.errors import UserError
from lamella.plan.costs import ModelCost
from lamella.plan.devices import Device


@dataclass(frozen=True)
class Asked:
    """What is fixed by hand.

    Attributes:
        ways: kinds of split to look at: "tokens", "stages", "experts".
        stages: ranks of each stage; None: found.
        ends: where each stage's layers end; None: found.
        shares: of each device; None: found.
        groups: in flight; None: found.
    """

    ways: tuple[str, ...]
    stages: tuple[tuple[int, ...], ...] | None
    ends: tuple[int, ...] | None
    shares: tuple[float, ...] | None
    groups: int | None


def check_asked(asked: SplitConfig, model: ModelCost, devices: Sequence[Device]) -> Asked:
    """Check the settings.

    Raises:
        UserError: they contradict each other, the model or the devices.
    """
    n, count = len(devices), len(model.layers)
    names = ", ".join(device.name for device in devices)
    if asked.kind in ("stages", "experts") and n < 2:
        raise UserError(
            f'[split] kind = "{asked.kind}" needs two devices or more, and there is one ({names})',
            fix='set kind = "auto", or list more [[devices]]',
        )
    if asked.kind == "tokens":
        for key in ("stages", "layers", "groups"):
            if (value := getattr(asked, key)) is not None:
                raise UserError(
                    f'[split] {key} = {_show(value)} goes with kind = "stages", and kind is "tokens"',
                    fix=f'remove {key}, or set kind = "stages"',
                )
    if asked.kind == "experts" and not any(layer.divisible > 0 for layer in model.layers):
        raise UserError(
            '[split] kind = "experts" divides experts and heads, and this model has none that can be divided',
            fix='set kind = "tokens" or "stages"',
        )
    stages = _check_stages(asked, n, count, names)
    ends = _check_layers(asked, stages, n, count)
    if ends is not None and stages is None:
        stages = tuple((r,) for r in range(n))
    _check_shares(asked, n, names)
    by_hand = stages is not None
    if asked.kind == "experts":
        ways: tuple[str, ...] = ("experts",)
    elif by_hand or asked.kind == "stages" or (asked.groups is not None and asked.kind == "auto"):
        ways = ("stages",)
    else:
        ways = ("tokens",) if asked.kind == "tokens" or n == 1 else ("tokens", "stages", "experts")
    if asked.groups is not None and n == 1:
        raise UserError(
            f"[split] groups = {asked.groups} are in flight between stages, and there is one device ({names})",
            fix="remove groups",
        )
    return Asked(ways, stages, ends, asked.shares, asked.groups)


def _check_stages(asked: SplitConfig, n: int, count: int, names: str) -> tuple[tuple[int, ...], ...] | None:
    if asked.stages is None:
        return None
    if not asked.stages or min(asked.stages) < 1:
        raise UserError(
            f"[split] stages = {_show(asked.stages)}: every stage needs a device",
            fix="write how many devices each stage has, such as stages = [2, 1]",
        )
    if sum(asked.stages) != n:
        raise UserError(
            f"[split] stages = {_show(asked.stages)} have {sum(asked.stages)} devices, and there are {n} ({names})",
            fix=f"write numbers that sum to {n}",
        )
    if len(asked.stages) > count:
        raise UserError(
            f"[split] stages = {_show(asked.stages)} are {len(asked.stages)} stages, and the model has {count} layers",
            fix=f"use {count} stages at most; several devices may share one",
        )
    ranks = iter(range(n))
    return tuple(tuple(next(ranks) for _ in range(size)) for size in asked.stages)


def _check_layers(
    asked: SplitConfig, stages: tuple[tuple[int, ...], ...] | None, n: int, count: int
) -> tuple[int, ...] | None:
    if asked.layers is None:
        return None
    wanted = n if stages is None else len(stages)
    if len(asked.layers) != wanted:
        raise UserError(
            f"[split] layers = {_show(asked.layers)} are for {len(asked.layers)} stages, and there are {wanted}",
            fix=f"write {wanted} numbers, or set stages = [...] too",
        )
    if min(asked.layers) < 1:
        raise UserError(
            f"[split] layers = {_show(asked.layers)}: every stage needs a layer",
            fix="write 1 or more for each stage",
        )
    if sum(asked.layers) != count:
        raise UserError(
            f"[split] layers = {_show(asked.layers)} sum to {sum(asked.layers)}, and the model has {count} layers",
            fix=f"write numbers that sum to {count}",
        )
    return tuple(sum(asked.layers[: k + 1]) for k in range(wanted))


def _check_shares(asked: SplitConfig, n: int, names: str) -> None:
    if asked.shares is None:
        return
    if len(asked.shares) != n:
        raise UserError(
            f"[split] shares = {_show(asked.shares)} are {len(asked.shares)}, and there are {n} devices ({names})",
            fix=f"write {n} shares, one for each device",
        )
    wrong = [x for x in asked.shares if not (math.isfinite(x) and x > 0)]
    if wrong:
        raise UserError(
            f"[split] shares = {_show(asked.shares)}: {wrong[0]:g} is not positive",
            fix="write a positive number for each device, or leave that device out of [[devices]]",
        )


def _show(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
