"""RAM, page-locked RAM and disk of a host, by part: while training, and while quantising before.

Of the ranks on CPUs the processes' peaks are RAM; of those on GPUs the process beside the device, with what is page-locked:
packed layers that are streamed from there, slots for those on disk, spilled boundaries, and the adapter's gradients on their
way. The frozen base has neither gradients nor optimizer state, and is never in RAM in 16 bit. Pages of mapped files that no
rank counts as its own are the kernel's to take back, and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lamella.forecast.peak import RUNTIME_BYTES
from lamella.forecast.process import Base, Choice, import_bytes
from lamella.forecast.shape import ModelShape, Site
from lamella.hardware.machine import Host
from lamella.plan.costs import STATE_BYTES

CHUNK_BYTES, CHUNKS_IN_FLIGHT, WRITES_IN_FLIGHT = 16 << 20, 4, 8
"""As in `store.pipeline`."""
QUANTISE_PROGRAM_BYTES = 250_000_000
"""Resident set of a process that quantises before its first chunk: Python, torch and the kernels (measured)."""
QUANTISE_HEAP_BYTES = 170_000_000
"""What the tuned heap holds between tensors then (measured: 130 to 200 MB, whatever the checkpoint's size)."""
MOMENT_BYTES, VALUE_BYTES = 8, 4
FILE_MARGIN_BYTES = 1 << 20
"""Of a run's folder beside the large files: metrics, receipt, headers."""

Parts = dict[str, int]


@dataclass(frozen=True)
class RankMemory:
    """One rank of a host, as chosen.

    Attributes:
        choice: its residency and its peak (`choose_residency`).
        base: its base weights (`base_of`); parameters: that it trains.
        on_gpu: its peak is of its device.
        first_of_copy: of the ranks that share one copy of the base, the one that counts all of it in page-locked RAM.
        boundary_bytes: of all boundary inputs of a step.
    """

    choice: Choice
    base: Base
    parameters: int
    on_gpu: bool
    first_of_copy: bool = True
    boundary_bytes: float = 0.0
    first_layer: int = 0


@dataclass(frozen=True)
class HostNeeds:
    """What a host is asked for, by part: RAM (page-locked RAM within it), and page-locked RAM."""

    ram: Parts = field(default_factory=dict)
    pinned: Parts = field(default_factory=dict)


def pinned_parts(rank: RankMemory) -> Parts:
    """Page-locked RAM of a rank on a GPU."""
    residency = rank.choice.residency
    sizes = {rank.first_layer + i: n for i, n in enumerate(rank.base.group_bytes)}
    on_disk = [i for i in residency.streamed if i not in residency.pinned]
    spilled = 0.0
    if rank.choice.boundary_room is not None and not rank.choice.kept:
        spilled = max(0.0, rank.boundary_bytes - rank.choice.boundary_room)
    return _some({
        "packed layers": sum(sizes[i] for i in residency.pinned) if rank.first_of_copy else 0,
        "slots for layers on disk": 2 * max(sizes[i] for i in residency.streamed) if on_disk else 0,
        "spilled boundaries": round(spilled),
        "adapter gradients on their way": VALUE_BYTES * rank.parameters,
    })  # fmt: skip


def host_needs(ranks: Sequence[RankMemory], host: Host) -> HostNeeds:
    """RAM of a host at the peak of training, summed over its ranks."""
    ram: Parts = {}
    pinned: Parts = {}
    for rank in ranks:
        if not rank.on_gpu:
            _add(ram, rank.choice.plan.groups)
            continue
        locked = pinned_parts(rank)
        _add(pinned, locked)
        _add(ram, {
            "program": import_bytes(host) + RUNTIME_BYTES, "adapter": VALUE_BYTES * rank.parameters,
            "gradients": VALUE_BYTES * rank.parameters, "optimizer": MOMENT_BYTES * rank.parameters,
            "page-locked": sum(locked.values()),
        })  # fmt: skip
    return HostNeeds(_some(ram), pinned)


def disk_parts(
    shape: ModelShape, sites: Iterable[Site], *, keep: int, state_on_disk: bool, with_store: bool = True,
    with_checkpoint: bool = False,
) -> Parts:  # fmt: skip
    """Disk that a run takes.

    Args:
        keep: `checkpoint.keep`; one more is being written, and the best one stays.
        with_store: the store is still to be made; with_checkpoint: so is a download of the checkpoint.
    """
    parameters = sum(site.parameters for site in sites)
    return _some({
        "checkpoint": shape.checkpoint_bytes if with_checkpoint else 0,
        "store": shape.store_bytes if with_store else 0,
        "adapter checkpoints": (keep + 2) * (VALUE_BYTES + MOMENT_BYTES) * parameters,
        "adapter": VALUE_BYTES * parameters,
        "state file": STATE_BYTES * parameters if state_on_disk else 0,
        "run folder": FILE_MARGIN_BYTES,
    })  # fmt: skip


def quantise_parts(shape: ModelShape, checkpoint_element: int = 2) -> Parts:
    """RAM while quantising: chunks being read, codes being written, one tensor's scales; whatever the model's size.

    Args:
        checkpoint_element: bytes of a value in the checkpoint.
    """
    largest = max(
        (m.outputs * m.inputs * m.experts for layer in shape.layers for m in layer.matrices if m.quantised), default=0
    )
    codes = CHUNK_BYTES // checkpoint_element // 2
    return {
        "program": QUANTISE_PROGRAM_BYTES,
        "chunks": CHUNKS_IN_FLIGHT * CHUNK_BYTES,
        "codes being written": (WRITES_IN_FLIGHT + 2) * codes,
        "scales": 2 * largest // 64 * 4 + largest // 64,
        "one chunk's values in another dtype": 2 * CHUNK_BYTES,
        "heap between tensors": QUANTISE_HEAP_BYTES,
    }


def _some(parts: Parts) -> Parts:
    return {name: n for name, n in parts.items() if n}


def _add(total: Parts, parts: Parts) -> None:
    for name, n in parts.items():
        total[name] = total.get(name, 0) + n


def over(parts: Parts, have: int | None) -> int:
    """Bytes that are missing; 0 where all fits or nothing is known."""
    return 0 if have is None else max(0, sum(parts.values()) - have)
