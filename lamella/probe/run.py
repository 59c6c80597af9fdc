"""The whole of `lamella probe`: what this computer is and can do, as a `Machine`."""

from __future__ import annotations

import datetime
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lamella import kernels
from lamella.errors import UserError
from lamella.hardware import nvml
from lamella.hardware.allocator import is_tuned
from lamella.hardware.contradictions import check_machine
from lamella.hardware.disk import DiskRates, measure_disk
from lamella.hardware.host import HostFacts, host_facts
from lamella.hardware.machine import Collective, DeviceFacts, Disk, Host, HostLink, Machine, PeerLink
from lamella.hardware.matmul import matmul_rate, native_dtype
from lamella.probe import nvbandwidth
from lamella.probe.collective import SIZES, measure_collectives
from lamella.probe.cuda import measure_gpus
from lamella.probe.imports import import_bytes
from lamella.probe.memory import SHAPES, copy_rate, dequantise_rate
from lamella.probe.rates import measure_kernels
from lamella.probe.timing import Clock, Effort
from lamella.units import format_bytes

Which = Literal["auto", "cpu", "cuda", "all"]
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        disk_bytes, disk_s: written and read, and how long each at most.
        children: whether processes are started for collectives and for the memory of imports.
        parts: that are told of on a CPU, for progress.
        limit_s: of the whole; rounds and settings are left out where a slow machine would take longer.
        in_place: whether steps of small models are taken, for what a layer takes beside its kernels.
    """

    effort: Effort
    disk_bytes: int
    disk_s: float
    children: bool
    quick: bool
    parts: int
    limit_s: float = math.inf
    in_place: bool = True


FULL = Plan(Effort(3, 0.2), 1 << 30, 5.0, True, False, 25, 36.0)
QUICK = Plan(Effort(2, 0.03), 128 << 20, 0.8, False, True, 8, 6.0, False)
CHILD_LIMIT_S = 60.0


def measure_machine(
    plan: Plan, folder: Path, *, files: Sequence[Path] = (), which: Which = "auto", imports: Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda what: None,
) -> Machine:  # fmt: skip
    """Measure this computer.

    Args:
        folder: on the disk where the store lies or is to lie.
        files: files of the store, read in place of one written for this.
        which: devices; `auto` is all GPUs, or the CPU where there is none.
        imports: modules that training imports.
        on_progress: told what is measured next.

    Raises:
        UserError: GPUs are asked for and there are none, or the folder is not there.
    """
    gpus, clock = _gpus_asked(which), Clock(plan.limit_s)
    began = datetime.datetime.now().astimezone()
    facts = host_facts()
    notes = _busy_notes(facts)
    on_progress("copies in RAM")
    copy_bytes_per_s = copy_rate(_CPU, plan.effort)
    devices: list[DeviceFacts] = []
    links: tuple[HostLink, ...] = ()
    peers: tuple[PeerLink, ...] = ()
    if gpus:
        found = measure_gpus(gpus, plan.quick, on_progress)
        tool, why = ({}, "") if plan.quick else nvbandwidth.measure(CHILD_LIMIT_S)
        devices += [_with_tool(device, d, tool) for d, device in zip(gpus, found.devices, strict=True)]
        links, peers, notes = found.host_links, found.peer_links, [*notes, *found.notes, *([why] if why else [])]
    elif which != "cpu":
        notes.append(_no_gpus())
    if which in ("cpu", "all") or not gpus:
        devices.append(measure_cpu(plan, facts, copy_bytes_per_s, on_progress, clock))
    if clock.cut:
        notes.append(f"slow or busy: some rounds were left out to end in time ({plan.limit_s:g} s)")
    on_progress("disk")
    disk = measure_disk(folder.resolve(), plan.disk_bytes, plan.disk_s, files)
    notes += disk.notes
    collectives: list[Collective] = []
    imported = None
    if plan.children:
        on_progress("sums among ranks")
        collectives, why = _collectives(devices, len(gpus))
        notes += [why] if why else []
        on_progress("memory of imports")
        imported, why = import_bytes(imports, CHILD_LIMIT_S)
        notes += [why] if why else []
    else:
        notes.append(
            "--quick: a coarse grid of kernels; sums among ranks, the memory of imports and what calls cost between kernels were not "
            "measured"
        )
    host = _host(facts, copy_bytes_per_s, imported, disk, notes)
    machine = Machine(
        name=facts.name, source="measured", taken=began.isoformat(timespec="seconds"), hosts=(host,),
        devices=tuple(devices), host_links=links, peer_links=peers, collectives=tuple(collectives), notes=tuple(notes),
    )  # fmt: skip
    check_machine(machine)
    return machine


def measure_cpu(
    plan: Plan, facts: HostFacts, copy_bytes_per_s: float, on_progress: Callable[[str], None], clock: Clock
) -> DeviceFacts:
    """The host's cores together, with the threads that training takes."""
    dtype = native_dtype(_CPU)
    on_progress("products and 4-bit weights")
    asked = (dtype,) if plan.quick else (torch.bfloat16, torch.float32)
    rates = {d: matmul_rate(_CPU, d) for d in asked}
    shapes = {shape: dequantise_rate(_CPU, plan.effort, shape) for shape in SHAPES}
    start_s = time.perf_counter()
    detailed = measure_kernels(None, plan.quick, on_progress, clock, plan.in_place)
    return DeviceFacts(
        name=facts.cpu, kind="cpu", memory_bytes=facts.limit_bytes, free_bytes=min(facts.free_bytes, facts.limit_bytes),
        matmul_flops_per_s=rates[dtype].best, dtype="bf16" if dtype == torch.bfloat16 else "fp32",
        dequantise_bytes_per_s=max(shapes.values()), memory_bytes_per_s=copy_bytes_per_s,
        threads=torch.get_num_threads(), kernels=detailed,
        details={
            "cores": facts.cores, "cores_of_machine": facts.cores_of_machine, "matmul_size": rates[dtype].size,
            **{f"{'bf16' if d == torch.bfloat16 else 'fp32'}_flops_per_s": rate.best for d, rate in rates.items()},
            **{f"dequantise_{a}x{b}_bytes_per_s": rate for (a, b), rate in shapes.items()},
            "nf4_kernels": kernels.backend(), "instructions": torch.backends.cpu.get_cpu_capability(),
            "kernels_took_s": round(time.perf_counter() - start_s, 2), "allocator": "tuned" if is_tuned() else "default",
        },
    )  # fmt: skip


def _gpus_asked(which: Which) -> list[int]:
    if which == "cpu":
        return []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if which == "cuda" and not count:
        raise UserError(
            "--device cuda, and torch sees no CUDA device here", fix="take --device cpu, or install a CUDA torch"
        )
    return list(range(count))


def _no_gpus() -> str:
    library, why = nvml.load()
    if library is None:
        return why
    try:
        count = library.nvmlDeviceGetCount()
    finally:
        library.nvmlShutdown()
    return f"the NVIDIA driver has {count} devices, and torch sees none: a CUDA build of torch is needed to use them"


def _busy_notes(facts: HostFacts) -> list[str]:
    if not facts.busy:
        return []
    return [f"busy: {facts.load:.1f} processes ran on average in the last minute, on {facts.cores} cores; rates are the best "
            "of several runs and may still be too low"]  # fmt: skip


def _collectives(devices: Sequence[DeviceFacts], gpus: int) -> tuple[list[Collective], str]:
    with tempfile.TemporaryDirectory(prefix="lamella-probe-") as scratch:
        if gpus > 1:
            return measure_collectives(list(range(gpus)), "cuda", SIZES, Path(scratch), CHILD_LIMIT_S)
        if gpus == 1:
            return [], ""  # one rank sums with nobody
        return measure_collectives([len(devices) - 1] * 2, "cpu", SIZES, Path(scratch), CHILD_LIMIT_S)


def _with_tool(device: DeviceFacts, place: int, tool: dict[str, float]) -> DeviceFacts:
    mine = {f"{nvbandwidth.TOOL} {name.rpartition(' ')[0]} GB/s": rate for name, rate in tool.items()
            if name.endswith(f" {place}")}  # fmt: skip
    return device.model_copy(update={"details": {**device.details, **mine}}) if mine else device


def _host(facts: HostFacts, copy_bytes_per_s: float, imported: int | None, disk: DiskRates, notes: list[str]) -> Host:
    if facts.cpu_quota is not None and facts.cpu_quota < facts.cores:
        notes.append(
            f"cores: a control group grants the time of {facts.cpu_quota:g} of the {facts.cores} cores seen here; set "
            f"compute.threads = {max(1, int(facts.cpu_quota))}, and OMP_NUM_THREADS alike when probing"
        )
    if facts.limit_bytes < facts.ram_bytes:
        notes.append(
            f"memory: a control group limits this process to {format_bytes(facts.limit_bytes)} of the host's "
            f"{format_bytes(facts.ram_bytes)}"
        )
    known = None
    if disk.read_bytes_per_s is not None:
        known = Disk(path=disk.path, read_bytes_per_s=disk.read_bytes_per_s, write_bytes_per_s=disk.write_bytes_per_s,
                     free_bytes=disk.free_bytes, kind=disk.kind)  # fmt: skip
    return Host(
        name=facts.name, cores=facts.cores, ram_bytes=facts.ram_bytes, limit_bytes=facts.limit_bytes,
        free_bytes=min(facts.free_bytes, facts.limit_bytes), numa_nodes=facts.numa_nodes,
        memory_bytes_per_s=copy_bytes_per_s, import_bytes=imported, disk=known,
    )  # fmt: skip
