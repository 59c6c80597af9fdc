"""Which device of a machine each rank of a run is on, what it may use of it, and the rates it then has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lamella.config import ComputeConfig, DeviceConfig, MemoryConfig
from lamella.errors import UserError
from lamella.hardware.machine import DeviceFacts, HostLink, KernelRates, Machine
from lamella.units import format_bytes, parse_bytes

HOST_SHARE = 0.8
"""Of a host's RAM that a plan uses: the rest is the system's, the page cache's, and what other programs hold."""


@dataclass(frozen=True)
class RankPlace:
    """One rank's part of a machine.

    Attributes:
        rank, name: as messages name it.
        index: of the machine's device; host: of its computer.
        facts: the device, with the rates that this rank has of it (its threads, its slowdown).
        memory_bytes: what it may take: of a GPU its memory, of a CPU its part of the host's.
        budgeted: `memory_bytes` is a budget that was asked for.
        threads: of a CPU.
        link: to its host's memory; None for a CPU.
    """

    rank: int
    name: str
    index: int
    host: int
    facts: DeviceFacts
    memory_bytes: int
    budgeted: bool
    threads: int | None
    link: HostLink | None


def places_of(
    machine: Machine, compute: ComputeConfig, memory: MemoryConfig, devices: Sequence[DeviceConfig]
) -> list[RankPlace]:
    """Ranks and their places: one per entry of `devices`, else one per GPU of the machine, else one on its cores.

    Raises:
        UserError: a device that the machine does not have, or more threads than it has.
    """
    entries = list(devices) or _default_entries(machine, compute)
    taken = _assign(machine, entries)
    here = Counter(machine.devices[k].host for k in taken)
    on_device = Counter(taken)
    places = []
    for rank, (entry, k) in enumerate(zip(entries, taken, strict=True)):
        facts = machine.devices[k]
        budget = entry.budget or memory.budget
        threads = None
        if facts.kind == "cpu":
            threads = _threads(facts, entry.threads or compute.threads, on_device[k])
            limit = machine.hosts[facts.host].limit_bytes
            free = int(limit * HOST_SHARE) // here[facts.host]
        else:
            free = facts.memory_bytes if facts.free_bytes is None else facts.free_bytes
            if on_device[k] > 1:
                raise UserError(f"{on_device[k]} entries of [[devices]] are on {facts.name}, which can take one rank",
                                fix="give each GPU one entry")  # fmt: skip
        mine = _scaled(facts, threads, entry.slowdown)
        places.append(
            RankPlace(
                rank,
                f"rank {rank} ({facts.name})" if len(entries) > 1 else facts.name,
                k,
                facts.host,
                mine,
                free if budget is None else parse_bytes(budget),
                budget is not None,
                threads,
                next((link for link in machine.host_links if link.device == k), None),
            )
        )
    _check_budgets(machine, places)
    return places


def _default_entries(machine: Machine, compute: ComputeConfig) -> list[DeviceConfig]:
    gpus = [k for k, device in enumerate(machine.devices) if device.kind == "cuda"]
    if gpus:
        return [DeviceConfig(device="cuda") for _ in gpus]
    return [DeviceConfig(device="cpu", threads=compute.threads)]


def _assign(machine: Machine, entries: Sequence[DeviceConfig]) -> list[int]:
    """Index of the machine's device for each entry: `cuda:N` by number, `cuda` the next free one, `cpu` the cores."""
    gpus = [k for k, device in enumerate(machine.devices) if device.kind == "cuda"]
    cpus = [k for k, device in enumerate(machine.devices) if device.kind == "cpu"]
    found: list[int] = []
    named = {e.device for e in entries}
    free = [k for n, k in enumerate(gpus) if f"cuda:{n}" not in named]
    for entry in entries:
        kind, _, number = entry.device.partition(":")
        if kind == "cuda" and number:
            if not number.isdigit() or int(number) >= len(gpus):
                raise UserError(f"{entry.device!r} is asked for, and machine {machine.name} has {len(gpus)} GPUs",
                                fix="change [[devices]], or give another --machine")  # fmt: skip
            found.append(gpus[int(number)])
        elif kind == "cuda":
            if not free:
                raise UserError(f"{sum(e.device.startswith('cuda') for e in entries)} entries of [[devices]] are GPUs, and machine "
                                f"{machine.name} has {len(gpus)}", fix="change [[devices]], or give another --machine")  # fmt: skip
            found.append(free.pop(0))
        elif kind == "cpu":
            if not cpus:
                raise UserError(f"[[devices]] asks for a CPU, and of machine {machine.name} only GPUs are known",
                                fix="run `lamella probe` there, or leave the entry out")  # fmt: skip
            found.append(cpus[0])
        else:
            raise UserError(f"{entry.device!r} is no device", fix='use "cpu" or "cuda"')
    return found


def _threads(facts: DeviceFacts, asked: int | None, ranks: int) -> int:
    have = facts.threads or 1
    return max(1, have // ranks) if asked is None else asked


def _scaled(facts: DeviceFacts, threads: int | None, slowdown: float | tuple[tuple[int, float], ...]) -> DeviceFacts:
    """The device as a rank with fewer threads, or slowed down, has it. Rates go with the threads."""
    factor = 1.0
    if threads is not None and facts.threads:
        factor = min(1.0, threads / facts.threads)
    slow = slowdown if isinstance(slowdown, float) else slowdown[-1][1]
    factor /= slow
    if factor == 1.0:
        return facts
    return facts.model_copy(
        update={
            "matmul_flops_per_s": facts.matmul_flops_per_s * factor,
            "dequantise_bytes_per_s": facts.dequantise_bytes_per_s * factor,
            "memory_bytes_per_s": facts.memory_bytes_per_s * factor,
            "kernels": None if facts.kernels is None else slower(facts.kernels, factor, slow),
        }
    )


def slower(rates: KernelRates, factor: float, slow: float) -> KernelRates:
    """Kernel rates times `factor`; fixed costs of calls grow with `slow` alone, as they are one thread's."""
    changed: dict[str, object] = {}
    for name, value in rates:
        if isinstance(value, tuple):
            changed[name] = tuple(
                p.model_copy(
                    update={
                        k: v * (slow if k == "seconds" else factor)
                        for k, v in p
                        if k == "seconds" or k.endswith("_per_s")
                    }
                )
                for p in value
            )
        elif name.endswith("_per_s"):
            changed[name] = value * factor
        elif name.endswith("_s"):
            changed[name] = value * slow
    return rates.model_copy(update=changed)


def _check_budgets(machine: Machine, places: Sequence[RankPlace]) -> None:
    for place in places:
        most = machine.hosts[place.host].limit_bytes if place.facts.kind == "cpu" else place.facts.memory_bytes
        if place.budgeted and place.memory_bytes > most:
            raise UserError(f"{place.name}: budget {format_bytes(place.memory_bytes)} is more than the {format_bytes(most)} it has",
                            fix="lower memory.budget, or leave it out")  # fmt: skip
