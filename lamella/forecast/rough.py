"""A machine of which little was measured: for a run that has no machine.json. What is assumed is among its notes."""

from __future__ import annotations

import os
import platform

from lamella.hardware.machine import DeviceFacts, Disk, Host, HostLink, Machine

REACHED = 0.4
"""Share of the matmul rate that training is taken to reach."""
CPU_DEQUANTISE_BYTES_PER_S = 1.0e10
CPU_MEMORY_BYTES_PER_S = 2.0e10
GPU_MEMORY_BYTES_PER_S = 5.0e11
HOST_LINK_BYTES_PER_S = 1.2e10
DISK_BYTES_PER_S = 1.5e9


def rough_machine(
    kinds: tuple[str, ...],
    matmul_flops_per_s: tuple[float, ...],
    memory_bytes: tuple[int, ...],
    ram_limit_bytes: int,
    threads: int,
    taken: str,
) -> Machine:
    """A machine of one host.

    Args:
        kinds: "cpu" or "cuda" of each device; `matmul_flops_per_s`, `memory_bytes`: of each, as measured.
        ram_limit_bytes: what this process may use of the host's memory.
        threads: of the CPU.
        taken: ISO date and time.
    """
    devices = tuple(
        DeviceFacts(
            name=f"{platform.processor() or platform.machine()}, {threads} threads" if kind == "cpu" else f"GPU {k}",
            kind="cpu" if kind == "cpu" else "cuda",
            memory_bytes=memory,
            matmul_flops_per_s=rate,
            reached=REACHED,
            dequantise_bytes_per_s=CPU_DEQUANTISE_BYTES_PER_S if kind == "cpu" else GPU_MEMORY_BYTES_PER_S / 1.26,
            memory_bytes_per_s=CPU_MEMORY_BYTES_PER_S if kind == "cpu" else GPU_MEMORY_BYTES_PER_S,
            threads=threads if kind == "cpu" else None,
        )
        for k, (kind, rate, memory) in enumerate(zip(kinds, matmul_flops_per_s, memory_bytes, strict=True))
    )
    links = tuple(
        HostLink(device=k, to_device_bytes_per_s=HOST_LINK_BYTES_PER_S, from_device_bytes_per_s=HOST_LINK_BYTES_PER_S)
        for k, kind in enumerate(kinds)
        if kind != "cpu"
    )
    host = Host(
        name=platform.node() or "host",
        cores=os.cpu_count() or 1,
        ram_bytes=ram_limit_bytes,
        limit_bytes=ram_limit_bytes,
        disk=Disk(path=".", read_bytes_per_s=DISK_BYTES_PER_S),
    )
    return Machine(
        name=host.name,
        source="measured",
        taken=taken,
        hosts=(host,),
        devices=devices,
        host_links=links,
        notes=(
            "rough: only the matmul rate was measured; `lamella probe` measures the rest",
            f"assumed: training reaches {REACHED:.0%} of the matmul rate, the disk reads {DISK_BYTES_PER_S / 1e9:g} GB/s",
        ),
    )
