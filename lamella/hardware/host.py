"""This computer: cores, memory and its limits, NUMA nodes, load. Imports no torch."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from lamella.hardware.limit import CGROUPS, own_cgroups
from lamella.hardware.memory import memory_limit_bytes

_NODES = Path("/sys/devices/system/node")
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class HostFacts:
    """What the kernel says.

    Attributes:
        cores: that this process may run on, and all of the machine's.
        limit_bytes: the smallest of RAM and the limits of this process's cgroups.
        free_bytes: what it can still take: what the kernel says is available, and no more than its cgroups leave.
        cpu_quota: cores' worth of time that a control group grants; None: no such limit.
        load: runnable processes in the last minute, on average.
    """

    name: str
    cpu: str
    cores: int
    cores_of_machine: int
    ram_bytes: int
    limit_bytes: int
    free_bytes: int
    cpu_quota: float | None
    numa_nodes: int
    load: float

    @property
    def busy(self) -> bool:
        """Whether other processes take a good part of the cores, so that rates come out too low."""
        return self.load > 0.5 * self.cores


def host_facts() -> HostFacts:
    """Of this host, as this process sees it."""
    memory = psutil.virtual_memory()
    return HostFacts(
        name=platform.node() or "host", cpu=cpu_name(), cores=len(os.sched_getaffinity(0)),
        cores_of_machine=os.cpu_count() or 1, ram_bytes=int(memory.total), limit_bytes=memory_limit_bytes(),
        free_bytes=min(int(memory.available), cgroup_room_bytes()),
        cpu_quota=cpu_quota(), numa_nodes=len(numa_nodes()), load=os.getloadavg()[0],
    )  # fmt: skip


def cpu_name(info: Path = _CPU_INFO) -> str:
    """The processor's name as the kernel gives it."""
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model Name", "cpu model") and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine()


def numa_nodes(root: Path = _NODES) -> dict[int, str]:
    """Cores of each NUMA node (`0-15`); one node of all cores where the kernel has no such folder."""
    found = {
        int(node.name[4:]): (node / "cpulist").read_text().strip()
        for node in root.glob("node[0-9]*")
        if (node / "cpulist").is_file()
    }
    return {node: cores for node, cores in sorted(found.items()) if cores} or {0: f"0-{(os.cpu_count() or 1) - 1}"}


def cgroup_room_bytes() -> int:
    """What the limits of this process's cgroups leave: the smallest of limit less use; very large without a limit.

    Page cache counts as use there but is given back on demand, so it does not count here.
    """
    room = 1 << 62
    for _, group in own_cgroups():
        for folder in (group, *group.parents):
            if not folder.is_relative_to(CGROUPS):
                break
            for limit, use, cache in (
                ("memory.max", "memory.current", "file"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
            ):
                most, used = _number(folder / limit), _number(folder / use)
                if most is not None and used is not None:
                    room = min(room, max(0, most - used + _stat(folder / "memory.stat", cache)))
    return room


def cpu_quota(root: Path = CGROUPS, groups: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores' worth of time that this process's cgroups grant: the smallest of all of them."""
    found: list[float] = []
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for base in (root / "cpu", root / "cpu,cpuacct") if controllers else (root, root / "unified"):
            group = base / path.lstrip("/")
            for folder in (group, *group.parents):
                if not folder.is_relative_to(root):
                    break
                found += _quota(folder)
    return min(found, default=None)


def _quota(folder: Path) -> list[float]:
    new, old = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if new.is_file():
        quota, period = new.read_text().split()
        return [] if quota == "max" else [int(quota) / int(period)]
    if old.is_file() and int(old.read_text()) > 0:
        return [int(old.read_text()) / int((folder / "cpu.cfs_period_us").read_text())]
    return []


def _number(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def _stat(file: Path, key: str) -> int:
    for line in file.read_text().splitlines() if file.is_file() else ():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
