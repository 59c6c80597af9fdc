"""Where a rank runs: its entry of `[[devices]]`, its share of the cores. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lamella.config import DeviceConfig, RunConfig
from lamella.errors import UserError
from lamella.units import parse_bytes


@dataclass(frozen=True)
class Place:
    """What one rank may use.

    Attributes:
        device: torch device; with an index for a GPU of several.
        threads: CPU threads; None: torch's own choice.
        budget_bytes: as `memory.budget`; None: no limit of ours.
        slowdown: see `DeviceConfig`.
    """

    device: str
    threads: int | None
    budget_bytes: int | None
    slowdown: float | tuple[tuple[int, float], ...]


def started_by_launcher(env: Mapping[str, str] | None = None) -> bool:
    """Whether this process is a rank of a group that `torchrun` or a like of it started."""
    env = os.environ if env is None else env
    return "RANK" in env and "WORLD_SIZE" in env


def check_count(config: RunConfig, world: int) -> None:
    """Raises `UserError` when there are `[[devices]]`, but not as many as ranks."""
    if config.devices and len(config.devices) != world:
        raise UserError(
            f"{len(config.devices)} entries in [[devices]], but {world} rank{'s' * (world != 1)}",
            fix="start one rank per entry: nodes x --nproc-per-node of torchrun, or change [[devices]]",
        )


def place_of(config: RunConfig, rank: int, world: int, env: Mapping[str, str] | None = None) -> Place:
    """The place of one rank. LOCAL_RANK and LOCAL_WORLD_SIZE of `env` (default: this process's) say what shares its host.

    Raises:
        UserError: another number of `[[devices]]` than of ranks.
    """
    env = os.environ if env is None else env
    check_count(config, world)
    local_rank, local_world = int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", world))
    compute, budget = config.compute, config.memory.budget
    entry = config.devices[rank] if config.devices else DeviceConfig(device=compute.device)
    threads = entry.threads or compute.threads
    if threads is None and world > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // local_world)
    device = entry.device
    if device == "cuda" and world > 1:
        before = config.devices[rank - local_rank : rank] if config.devices else ()
        index = sum(other.device == "cuda" for other in before) if config.devices else local_rank
        device = f"cuda:{index}"
    budget = entry.budget or budget
    return Place(device, threads, None if budget is None else parse_bytes(budget), entry.slowdown)
