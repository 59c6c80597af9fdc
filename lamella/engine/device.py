"""Packed layers on an accelerator: which stay there, and two slots for the others, filled ahead of the walk.

A layer that does not stay on the device comes from pinned host memory (one arena a layer, page-locked once), or, where
host memory ends too, from disk through two pinned slots. Host bytes are pinned, so a copy runs beside the arithmetic. A
slot is overwritten only after the dequantise kernels that read it have finished (an event on the compute stream), and is
read only after its copy has. Where several ranks run on a host, the arenas are the store's files themselves, mapped
read-only and page-locked by each rank: one copy for all (`store/shared.py`). With peers (`gather.py`) a rank copies its part
of a layer alone, and gets the others' from them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lamella.engine.gather import LayerGather
from lamella.errors import UserError
from lamella.forecast.residency import DEVICE_SHARE
from lamella.store.reader import PackedGroup
from lamella.trace.recorder import RECORDER
from lamella.units import format_bytes

T = TypeVar("T")


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

    def run(self, work: Callable[[], None], after: Any) -> Any:
        """Give other work on the slots (an exchange with peers) to where copies are done, once `after` has passed; returns a
        mark of its completion."""


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

    def run(self, work: Callable[[], None], after: Any) -> Any:
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            work()
            return self.stream.record_event()


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

    def run(self, work: Callable[[], None], after: Any) -> Any:
        work()


class Registrar(Protocol):
    """Page-locks host memory for a device."""

    def register(self, memory: Tensor, read_only: bool) -> int:
        """Lock the pages of `memory` (uint8, at a page's start); 0, or the error's number. `read_only`: they are mapped so,
        and the device will not write to them."""

    def unregister(self, address: int) -> None:
        """Undo it."""


class CudaRegistrar:
    """cudaHostRegister (CUDA runtime API, "Memory Management"). Memory that is mapped read-only takes a flag of its own,
    which not every system supports."""

    PORTABLE, READ_ONLY = 1, 8

    def register(self, memory: Tensor, read_only: bool) -> int:
        flags = self.PORTABLE | self.READ_ONLY if read_only else 0
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), flags))
        if code != 0:
            with contextlib.suppress(
                RuntimeError
            ):  # the runtime keeps the error, and torch's next launch would report it
                torch.zeros(1, device="cuda").add_(1)
        return code

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


class PageLock:
    """Keeps host memory page-locked as long as this object lives.

    Raises:
        UserError: the system does not let this much memory be page-locked.
    """

    def __init__(self, memory: Tensor, registrar: Registrar, read_only: bool) -> None:
        code = registrar.register(memory, read_only)
        if code != 0:
            raise UserError(
                f"{format_bytes(memory.numel())} of host memory cannot be page-locked (CUDA error {code})",
                fix="free host memory, or raise the limit of locked memory (ulimit -l)",
            )
        self.memory = memory  # outlives the lock: released after it
        self._unpin = weakref.finalize(self, registrar.unregister, memory.data_ptr())


def can_lock(memory: Tensor, registrar: Registrar) -> int:
    """Whether a file's pages, mapped read-only, can be page-locked: tries the first one. 0, or the error's number."""
    page = memory[: mmap.PAGESIZE]
    code = registrar.register(page, read_only=True)
    if code == 0:
        registrar.unregister(page.data_ptr())
    return code


class HostArena:
    """Host memory of its own pages, page-locked with `pin` (by CUDA, when no other registrar is given).

    (torch's pinned allocator rounds up to a power of two: 2 GB for a layer of 1.3.)

    Attributes:
        bytes: uint8 [n], its data aligned to a page; page-locked as long as this object lives.

    Raises:
        UserError: the system does not let this much memory be page-locked.
    """

    def __init__(self, n: int, pin: bool, registrar: Registrar | None = None) -> None:
        self.bytes = torch.frombuffer(mmap.mmap(-1, max(n, 1)), dtype=torch.uint8)[:n]
        self._lock = PageLock(self.bytes, registrar or CudaRegistrar(), read_only=False) if pin and n else None


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
        gather: brings layers together with other ranks, when `fetch` is told to; the slots then have room for its parts.
    """

    def __init__(
        self, device: torch.device, slot_bytes: int, copier: Copier,
        load: Callable[[int, Tensor], PackedGroup] | None = None, host_slots: Sequence[Tensor] = (),
        gather: LayerGather | None = None,
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
        self._gather = gather
        threaded = bool(self._host_slots) or gather is not None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="lamella-read") if threaded else None

    def holds_layer(self, layer: int) -> bool:
        return layer in self.holds

    def fetch(self, layer: int, host: PackedGroup | None, keep: Iterable[int], together: bool = False) -> None:
        """Start bringing `layer` unless it is here, into a slot that holds none of `keep`.

        Args:
            host: its bytes in pinned memory; None: they are read from disk first, by a thread.
            together: every rank of the group fetches this layer now, each its part; by the thread too, which keeps the
                exchanges in order.
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
        if together:
            assert self._reader is not None
            self._arriving[slot] = self._reader.submit(self._by_parts, layer, host, slot, after)
        elif host is None:
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

    def _free_host_slot(self) -> int:
        turn = self._turn % len(self._host_slots)
        self._turn += 1
        if self._sent[turn] is not None:
            self.copier.finish(self._sent[turn])  # its last layer has left this host buffer
        return turn

    def _from_disk(self, layer: int, slot: int, after: Any) -> tuple[PackedGroup, Any]:
        assert self._load is not None
        turn = self._free_host_slot()
        arrived = self._copy(layer, self._load(layer, self._host_slots[turn]), slot, after)
        self._sent[turn] = arrived[1]
        return arrived

    def _by_parts(self, layer: int, host: PackedGroup | None, slot: int, after: Any) -> tuple[PackedGroup, Any]:
        """This rank's part from the host to its own device, then the group's parts from device to device."""
        gather, target = self._gather, self.slots[slot]
        assert gather is not None
        first, last = gather.own_part(layer)
        if host is not None:
            part = host.buffer[first:last]
            gather.meet(layer, failed=False)
            mark = self.copier.copy(target[first:last], part, after)
        else:
            turn = self._free_host_slot()
            part = self._host_slots[turn][: last - first]
            gather.read_own(layer, part)
            mark = self._sent[turn] = self.copier.copy(target[first:last], part, after)
        self.copied_bytes += last - first
        return gather.store.view(layer, target), self.copier.run(lambda: gather.exchange(layer, target), mark)

    def forget(self) -> None:
        """Hold no layer any more."""
        for arriving in self._arriving:
            if arriving is not None:
                arriving.result()
        self.holds, self._arriving = [None, None], [None, None]

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have the thread do this after what it has to do already."""
        assert self._reader is not None
        return self._reader.submit(work)

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
