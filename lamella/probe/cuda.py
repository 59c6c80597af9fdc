"""CUDA devices, measured: memory, rates, links to the host and to each other. What is copied where is behind `Cuda`, so that
the order of copies and the arithmetic can be tested without a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Protocol

import torch

from lamella.hardware import nvml as driver
from lamella.hardware.machine import DeviceFacts, HostLink, PeerLink
from lamella.hardware.matmul import matmul_rate
from lamella.hardware.nvml import NvmlDevice, Wire
from lamella.probe.memory import SHAPES, copy_rate, dequantise_rate
from lamella.probe.timing import Effort

LINK_BYTES, LINK_BYTES_QUICK = 256 << 20, 64 << 20
_BF16_FROM = (8, 0)
"""Compute capability from which bf16 is multiplied by the tensor cores; fp16 before."""
REACHED = 0.5
"""Share of a measured matmul rate that training is taken to reach; a step on the device shows its own."""
_SMALL = 1024
"""Bytes of a copy whose time is the link's latency."""


@dataclass(frozen=True)
class Described:
    """A device as the CUDA runtime sees it."""

    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]


class Cuda(Protocol):
    """What is asked of CUDA. Copies are queued on a stream of the device they are given for."""

    def describe(self, device: int) -> Described: ...
    def host(self, nbytes: int, pinned: bool) -> Any: ...
    def device(self, device: int, nbytes: int) -> Any: ...
    def copy(self, target: Any, source: Any, device: int) -> None: ...
    def wait(self, device: int) -> None: ...
    def can_peer(self, a: int, b: int) -> bool: ...
    def seconds(self) -> float: ...


class TorchCuda:
    """CUDA through torch."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}

    def describe(self, device: int) -> Described:
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        uuid = str(properties.uuid)
        return Described(properties.name, uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}", total, free,
                         (properties.major, properties.minor))  # fmt: skip

    def host(self, nbytes: int, pinned: bool) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)

    def device(self, device: int, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8, device=f"cuda:{device}")

    def copy(self, target: torch.Tensor, source: torch.Tensor, device: int) -> None:
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def wait(self, device: int) -> None:
        torch.cuda.synchronize(device)

    def can_peer(self, a: int, b: int) -> bool:
        return torch.cuda.can_device_access_peer(a, b)

    def seconds(self) -> float:
        return time.perf_counter()


# ---- links ----------------------------------------------------------------------------------------


def copy_s(
    cuda: Cuda, copies: Sequence[tuple[Any, Any, int]], repeats: int, during: Callable[[], None] | None = None
) -> float:
    """Seconds until all of `copies` (target, source, device), started together, have ended: the best of `repeats` after one
    that is not counted. `during` is called while the first counted ones are under way."""
    best = float("inf")
    devices = [device for _, _, device in copies]
    for turn in range(repeats + 1):
        for device in devices:
            cuda.wait(device)
        start_s = cuda.seconds()
        for target, source, device in copies:
            cuda.copy(target, source, device)
        if turn == 0:
            if during is not None:
                during()
            start_s = float("-inf")  # warm-up
        for device in devices:
            cuda.wait(device)
        if turn > 0:
            best = min(best, cuda.seconds() - start_s)
    return best


def host_links(
    cuda: Cuda, devices: Sequence[int], nbytes: int, repeats: int, wire_of: Callable[[int], Wire | None]
) -> tuple[list[HostLink], dict[int, Wire]]:
    """Links between devices and the host: pinned both ways, pageable, each alone and all at once.

    Returns:
        One link a device (numbered by place in `devices`), and the PCIe links as they were while copies ran.
    """
    there = {d: cuda.device(d, nbytes) for d in devices}
    here = {d: cuda.host(nbytes, True) for d in devices}
    pageable = cuda.host(nbytes, False)
    found: list[HostLink] = []
    wires: dict[int, Wire] = {}
    for place, d in enumerate(devices):

        def look(d: int = d) -> None:
            wire = wire_of(d)
            if wire is not None:
                wires[d] = wire

        found.append(HostLink(
            device=place,
            to_device_bytes_per_s=nbytes / copy_s(cuda, [(there[d], here[d], d)], repeats, look),
            from_device_bytes_per_s=nbytes / copy_s(cuda, [(here[d], there[d], d)], repeats),
            pageable_bytes_per_s=nbytes / copy_s(cuda, [(there[d], pageable, d)], max(1, repeats // 2)),
            latency_s=copy_s(cuda, [(cuda.device(d, _SMALL), cuda.host(_SMALL, True), d)], 10),
        ))  # fmt: skip
    if len(devices) > 1:
        to_s = copy_s(cuda, [(there[d], here[d], d) for d in devices], repeats)
        from_s = copy_s(cuda, [(here[d], there[d], d) for d in devices], repeats)
        found = [
            link.model_copy(update={"to_device_together_bytes_per_s": nbytes / to_s,
                                    "from_device_together_bytes_per_s": nbytes / from_s})
            for link in found
        ]  # fmt: skip
    return found, wires


def peer_links(
    cuda: Cuda, devices: Sequence[int], nbytes: int, repeats: int, known: dict[int, NvmlDevice]
) -> list[PeerLink]:
    """All pairs; the slower direction counts."""
    found = []
    for a, b in combinations(range(len(devices)), 2):
        x, y = devices[a], devices[b]
        ends = {d: cuda.device(d, nbytes) for d in (x, y)}
        there = copy_s(cuda, [(ends[y], ends[x], x)], repeats)
        back = copy_s(cuda, [(ends[x], ends[y], y)], repeats)
        small = {d: cuda.device(d, _SMALL) for d in (x, y)}
        links = driver.joined(known[x], known[y]) if x in known and y in known else 0
        kind = "nvlink" if links else "pcie" if cuda.can_peer(x, y) and cuda.can_peer(y, x) else "host"
        found.append(PeerLink(a=a, b=b, bytes_per_s=nbytes / max(there, back), kind=kind,
                              latency_s=copy_s(cuda, [(small[y], small[x], x)], 10)))  # fmt: skip
    return found


# ---- devices --------------------------------------------------------------------------------------


def device_facts(described: Described, known: NvmlDevice | None, wire: Wire | None, version: str) -> DeviceFacts:
    """A device with its memory and what the driver says; rates are still to be measured (1 stands for them)."""
    details: dict[str, str | int | float] = {
        "capability": ".".join(map(str, described.capability)), "uuid": described.uuid,
    }  # fmt: skip
    if known is not None:
        details |= {"bus": known.bus, "driver": version}
        if known.numa_node is not None:
            details["numa_node"] = known.numa_node
        if known.nvlinks:
            details["nvlinks"] = ", ".join(f"{count} to {end}" for end, count in sorted(known.nvlinks.items()))
    if wire is not None:
        details["pcie"] = str(wire)
    return DeviceFacts(
        name=described.name, kind="cuda", memory_bytes=described.total_bytes, free_bytes=described.free_bytes,
        matmul_flops_per_s=1.0, reached=REACHED, dtype="bf16" if described.capability >= _BF16_FROM else "fp16",
        dequantise_bytes_per_s=1.0, memory_bytes_per_s=1.0, details=details,
    )  # fmt: skip


def with_rates(facts: DeviceFacts, device: int, effort: Effort) -> DeviceFacts:
    """Products in the device's own 16-bit dtype, undoing NF4, copies within its memory."""
    place = torch.device("cuda", device)
    matmul = matmul_rate(place, torch.bfloat16 if facts.dtype == "bf16" else torch.float16)
    return facts.model_copy(update={
        "matmul_flops_per_s": matmul.best,
        "dequantise_bytes_per_s": max(dequantise_rate(place, effort, shape) for shape in SHAPES),
        "memory_bytes_per_s": copy_rate(place, effort, min(1 << 30, (facts.free_bytes or 0) // 8)),
        "details": {**facts.details, "matmul_size": matmul.size},
    })  # fmt: skip


@dataclass(frozen=True)
class Gpus:
    """What was found."""

    devices: tuple[DeviceFacts, ...]
    host_links: tuple[HostLink, ...]
    peer_links: tuple[PeerLink, ...]
    notes: tuple[str, ...]


def measure_gpus(devices: Sequence[int], quick: bool, on_progress: Callable[[str], None]) -> Gpus:
    """All of `devices` (torch's numbers)."""
    cuda = TorchCuda()
    nbytes, repeats = (LINK_BYTES_QUICK, 3) if quick else (LINK_BYTES, 5)
    effort = Effort(2, 0.03) if quick else Effort(3, 0.2)
    notes: list[str] = []
    described = {d: cuda.describe(d) for d in devices}
    nbytes = min(nbytes, *(seen.free_bytes // 8 for seen in described.values()))
    library, why = driver.load()
    known: dict[int, NvmlDevice] = {}
    version = ""
    if library is None:
        notes.append(f"{why}: nothing known of PCIe, NVLink and NUMA")
    try:
        if library is not None:
            version = driver.driver(library)
            for d, seen in described.items():
                try:
                    known[d] = driver.device_by_uuid(library, seen.uuid)
                except library.NVMLError as error:
                    notes.append(f"device {d} ({seen.name}): NVML says nothing of it: {error}")

        def wire_of(d: int) -> Wire | None:
            return driver.wire(library, described[d].uuid) if library is not None and d in known else None

        on_progress("links to the host")
        links, wires = host_links(cuda, devices, nbytes, repeats, wire_of)
        on_progress("links between devices")
        peers = peer_links(cuda, devices, nbytes, repeats, known)
        found = []
        for d in devices:
            on_progress(f"rates of device {d}")
            facts = device_facts(described[d], known.get(d), wires.get(d), version)
            found.append(with_rates(facts, d, effort))
    finally:
        if library is not None:
            library.nvmlShutdown()
    for d, wire in wires.items():
        full = replace(wire, generation=wire.most_generation, width=wire.most_width)
        if wire != full:
            notes.append(f"device {d} ({described[d].name}): PCIe {wire} while copies run")
    notes.append(f"assumed: training reaches {REACHED:.0%} of the measured matmul rates of GPUs")
    return Gpus(tuple(found), tuple(links), tuple(peers), tuple(notes))
