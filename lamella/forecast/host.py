"""RAM, page-locked RAM and disk of a host, by part: while training, and while quantising before.

Of the ranks on CPUs the processes' peaks are RAM; of those on GPUs the process beside the device, with what is page-locked:
packed layers that are streamed from there, slots for those on disk, spilled boundaries, and the adapter's gradients on their
way. The frozen base has neither gradients nor optimizer state, and is never in RAM in 16 bit. Pages of mapped files that no
rank counts as its own are the kernel's to take back, and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lamella.forecast.peak import RUNTIME_BYTES
from lamella.forecast.process import Choice, import_bytes
from lamella.forecast.shape import ModelShape, Site
from lamella.hardware.machine import Host
from lamella.plan.costs import GRADIENT_BYTES, STATE_BYTES

CHUNK_BYTES, CHUNKS_IN_FLIGHT, WRITES_IN_FLIGHT = 16 << 20, 4, 8
"""As in `store.pipeline`."""
QUANTISE_PROGRAM_BYTES = 250_000_000
"""Resident set of a process that quantises before its first chunk: Python, torch and the kernels (measured)."""
QUANTISE_HEAP_BYTES = 170_000_000
"""What the tuned heap holds between tensors then (measured: 130 to 200 MB, whatever the checkpoint's size)."""
MOMENT_BYTES, VALUE_BYTES = 8, 4

Parts = dict[str, int]


@dataclass(frozen=True)
class RankMemory:
    """One rank of a host, as chosen.

    Attributes:
        choice: its residency and its peak (`choose_residency`).
        layers: those it holds; parameters: that it trains.
        on_gpu: its peak is of its device.
    """

    choice: Choice
    layers: range
    parameters: int
    on_gpu: bool


def host_needs(shape: ModelShape, ranks: Sequence[RankMemory], host: Host) -> tuple[Parts, Parts]:
    """RAM of a host at the peak of training, and the page-locked part of it, by part, over all its ranks.

    Packed layers in page-locked RAM are counted once: ranks of a host read one copy.
    """
    ram: Parts = {}
    pinned: Parts = {}
    layers: set[int] = set()
    for rank in ranks:
        if not rank.on_gpu:
            _add(ram, rank.choice.plan.groups)
            continue
        residency = rank.choice.residency
        layers |= set(residency.pinned)
        from_disk = len(residency.streamed) > len(residency.pinned)
        largest = max(shape.layers[i].store_bytes for i in rank.layers)
        _add(pinned, {
            "slots of layers from disk": 2 * largest if from_disk else 0,
            "spilled boundaries": round(rank.choice.plan.spilled),
            "gradients on their way": GRADIENT_BYTES * rank.parameters,
        })  # fmt: skip
        _add(ram, {"program": import_bytes(host) + RUNTIME_BYTES, "adapter state": STATE_BYTES * rank.parameters})
    _add(pinned, {"layers": sum(shape.layers[i].store_bytes for i in layers)})
    _add(ram, pinned)
    return ram, pinned


def disk_parts(
    shape: ModelShape, sites: Iterable[Site], *, keep: int, state_on_disk: bool, with_store: bool = True,
    with_checkpoint: bool = False, with_run: bool = True,
) -> Parts:  # fmt: skip
    """Disk that a run takes.

    Args:
        keep: `checkpoint.keep`; one more is being written, and the best one stays.
        with_store: the store is still to be made; with_checkpoint: so is a download of the checkpoint.
        with_run: the run's own files are on this disk.
    """
    parameters = sum(site.parameters for site in sites) if with_run else 0
    found: Parts = {}
    _add(found, {
        "checkpoint": shape.checkpoint_bytes if with_checkpoint else 0,
        "store": shape.store_bytes if with_store else 0,
        "checkpoints": (keep + 2) * (VALUE_BYTES + MOMENT_BYTES) * parameters,
        "adapter": VALUE_BYTES * parameters,
        "adapter state": STATE_BYTES * parameters if state_on_disk else 0,
    })  # fmt: skip
    return found


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


def _add(total: Parts, parts: Parts) -> None:
    for name, n in parts.items():
        if n:
            total[name] = total.get(name, 0) + n


def over(parts: Parts, have: int | None) -> int:
    """Bytes that are missing; 0 where all fits or nothing is known."""
    return 0 if have is None else max(0, sum(parts.values()) - have)
