"""Packed layers on an accelerator: which stay there, and two slots for the others, filled ahead of the walk.

A layer that does not stay on the device comes from pinned host memory (one arena a layer, page-locked once), or, where
host memory ends too, from disk through two pinned slots. Host bytes are pinned, so a copy runs beside the arithmetic. A
slot is overwritten only after the dequantise kernels that read it have finished (an event on the compute stream), and is
read only after its copy has.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lamella.errors import UserError
from lamella.store.reader import PackedGroup
from lamella.trace.recorder import RECORDER
from lamella.units import format_bytes

T = TypeVar("T")

DEVICE_SHARE = 0.6
"""Of the free device memory, for weights when no budget is given; the rest is for activations."""
HOST_SHARE = 0.7
"""Of this machine's memory, for pinned arenas of layers."""


class Copier(Protocol):
    """Orders copies against the arithmetic."""

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Start copying once `after` (a mark or None) has passed; returns a mark of its completion."""

    def mark(self) -> Any:
        """A mark behind everything given to the arithmetic so far."""

    def wait(self, mark: Any) -> None:
        """Make later arithmetic wait for a mark."""

    def finish(self, mark: Any) -> None:
        """Block the host until a mark has passed."""


class CudaCopier:
    """A copy stream of its own beside the current stream; marks are CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def mark(self) -> Any:
        return torch.cuda.current_stream().record_event()

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def finish(self, mark: Any) -> None:
        mark.synchronize()


class HostCopier:
    """Copies at once: for devices without streams, and to test the slots on a CPU."""

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        target.copy_(source)

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        pass

    def finish(self, mark: Any) -> None:
        pass


class HostArena:
    """Host memory of its own pages, page-locked with `pin`.

    (torch's pinned allocator rounds up to a power of two: 2 GB for a layer of 1.3.)

    Attributes:
        bytes: uint8 [n], its data aligned to a page; page-locked as long as this object lives.

    Raises:
        UserError: the system does not let this much memory be page-locked.
    """

    def __init__(self, n: int, pin: bool) -> None:
        self.bytes = torch.frombuffer(mmap.mmap(-1, max(n, 1)), dtype=torch.uint8)[:n]
        if pin and n:
            runtime, address = torch.cuda.cudart(), self.bytes.data_ptr()
            code = int(runtime.cudaHostRegister(address, n, 0))
            if code != 0:
                raise UserError(f"{format_bytes(n)} of host memory cannot be page-locked (CUDA error {code})",
                                fix="free host memory, or raise the limit of locked memory (ulimit -l)")  # fmt: skip
            self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, address)


def spread(sizes: Sequence[int], budget: int) -> tuple[int, ...]:
    """As many of these as fit the budget, at even distances: between two others there is always one at hand.

    Returns:
        indexes, ascending.
    """
    count = len(sizes)
    for k in range(count, 0, -1):
        chosen = tuple((2 * j + 1) * count // (2 * k) for j in range(k))
        if sum(sizes[i] for i in chosen) <= budget:
            return chosen
    return ()


@dataclass(frozen=True)
class Placement:
    """Where each packed layer lives: on the device, in pinned host memory, or on disk alone."""

    device: tuple[int, ...]
    pinned: tuple[int, ...]
    disk: tuple[int, ...]


def plan_placement(
    group_bytes: Sequence[int], fixed_bytes: int, device_bytes: int | None, host_bytes: int | None
) -> Placement:
    """Fill the device, then host memory; the rest is read from disk.

    Args:
        group_bytes: packed size of each layer.
        fixed_bytes: what lies on the device besides: outer and small tensors, the dequantised buffer.
        device_bytes, host_bytes: budgets for weights; None: no limit.

    Raises:
        UserError: the device's budget does not even hold the fixed part and two slots.
    """
    layers = tuple(range(len(group_bytes)))
    if device_bytes is None or fixed_bytes + sum(group_bytes) <= device_bytes:
        return Placement(layers, (), ())
    slots = 2 * max(group_bytes)
    if fixed_bytes + slots > device_bytes:
        raise UserError(
            f"memory.budget is {format_bytes(device_bytes)}, but embeddings, head, one dequantised layer and two packed "
            f"layers take {format_bytes(fixed_bytes + slots)}",
            fix=f"set memory.budget to {format_bytes((fixed_bytes + slots) * 1.2)} or more",
        )
    device = spread(group_bytes, device_bytes - fixed_bytes - slots)
    others = [i for i in layers if i not in device]
    if host_bytes is None or sum(group_bytes[i] for i in others) <= host_bytes:
        return Placement(device, tuple(others), ())
    pinned = tuple(others[j] for j in spread([group_bytes[i] for i in others], host_bytes - slots))
    return Placement(device, pinned, tuple(i for i in others if i not in pinned))


def arrived_from_disk(read: Future[T], layer: int | None) -> T:
    """What a reader's thread brings; a wait for it is recorded."""
    if not read.done():
        with RECORDER.span("wait_disk", f"layer {layer}"):
            return read.result()
    return read.result()


class DeviceSlots:
    """The packed layer at work and the next one, on the device.

    Args:
        device: where the slots are.
        slot_bytes: size of the largest packed layer.
        copier: orders the copies.
        load: reads a layer's file into the given host bytes; for layers that are not in host memory.
        host_slots: two pinned host buffers for it; none when all layers are in host memory.
    """

    def __init__(
        self, device: torch.device, slot_bytes: int, copier: Copier,
        load: Callable[[int, Tensor], PackedGroup] | None = None, host_slots: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        self.copier = copier
        self.slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self.holds: list[int | None] = [None, None]
        self.read: list[Any] = [None, None]
        self._arriving: list[Future[tuple[PackedGroup, Any]] | None] = [None, None]
        self._load, self._host_slots = load, list(host_slots)
        self._sent: list[Any] = [None] * len(self._host_slots)
        self._turn = 0
        self.copied_bytes = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="lamella-read") if self._host_slots else None

    def holds_layer(self, layer: int) -> bool:
        return layer in self.holds

    def fetch(self, layer: int, host: PackedGroup | None, keep: Iterable[int]) -> None:
        """Start bringing `layer` unless it is here, into a slot that holds none of `keep`.

        Args:
            host: its bytes in pinned memory; None: they are read from disk first, by a thread.
        """
        if layer in self.holds:
            return
        kept = set(keep)
        slot = next(s for s in range(2) if self.holds[s] not in kept)
        before = self._arriving[slot]
        if before is not None:
            arrived_from_disk(before, self.holds[slot])  # fetched and never taken: nobody may still write here
        self.holds[slot] = layer
        after = self.read[slot]
        if host is None:
            assert self._reader is not None
            self._arriving[slot] = self._reader.submit(self._from_disk, layer, slot, after)
        else:
            arrived: Future[tuple[PackedGroup, Any]] = Future()
            arrived.set_result(self._copy(layer, host, slot, after))
            self._arriving[slot] = arrived

    def _copy(self, layer: int, host: PackedGroup, slot: int, after: Any) -> tuple[PackedGroup, Any]:
        target = self.slots[slot][: host.buffer.numel()]
        with RECORDER.span("wait_host", f"layer {layer}", nbytes=host.buffer.numel(), lane="copy"):
            mark = self.copier.copy(target, host.buffer, after)
        self.copied_bytes += host.buffer.numel()
        return PackedGroup(target, host.records, host.block_size), mark

    def _from_disk(self, layer: int, slot: int, after: Any) -> tuple[PackedGroup, Any]:
        assert self._load is not None
        turn = self._turn % len(self._host_slots)
        self._turn += 1
        if self._sent[turn] is not None:
            self.copier.finish(self._sent[turn])  # its last layer has left this host buffer
        arrived = self._copy(layer, self._load(layer, self._host_slots[turn]), slot, after)
        self._sent[turn] = arrived[1]
        return arrived

    def take(self, layer: int) -> PackedGroup:
        """The layer's bytes on the device; arithmetic given from now on waits for its copy."""
        arriving = self._arriving[self.holds.index(layer)]
        assert arriving is not None
        packed, mark = arrived_from_disk(arriving, layer)
        with RECORDER.span("wait_host", f"layer {layer}"):
            self.copier.wait(mark)
        return packed

    def done(self, layer: int) -> None:
        """The arithmetic given so far is all that reads this slot."""
        self.read[self.holds.index(layer)] = self.copier.mark()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.shutdown()


def default_budget(device: torch.device) -> int:
    """Device memory for weights when none is asked for: a share of what is free."""
    return int(torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE)


def activation_room(device: torch.device) -> int:
    """Device memory for boundaries and kept activations when no budget is given: half of what weights left free."""
    return int(torch.cuda.mem_get_info(device)[0] // 2)


def prepare(device: torch.device) -> torch.device:
    """The device with its number, made the current one; cuBLAS keeps to workspaces that give the same bits each run."""
    if device.type != "cuda":
        return device
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    torch.cuda.set_device(device)
    return device
