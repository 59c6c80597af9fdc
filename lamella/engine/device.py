"""Packed layers on an accelerator: two slots on the device, filled by a copy stream ahead of the walk.

Host bytes are pinned, so a copy runs beside the arithmetic. A slot is overwritten only after the dequantise
kernels that read it have finished (an event on the compute stream), and is read only after its copy has.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from lamella.store.reader import PackedGroup


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


class DeviceSlots:
    """The packed layer at work and the next one, on the device.

    Args:
        device: where the slots are.
        slot_bytes: size of the largest packed layer.
        copier: orders the copies.
    """

    def __init__(self, device: torch.device, slot_bytes: int, copier: Copier) -> None:
        self.copier = copier
        self.slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self.holds: list[int | None] = [None, None]
        self.copied: list[Any] = [None, None]
        self.read: list[Any] = [None, None]

    def holds_layer(self, layer: int) -> bool:
        return layer in self.holds

    def fetch(self, layer: int, host: PackedGroup, keep: int | None) -> None:
        """Start copying `layer` unless it is here, into the slot that does not hold `keep`."""
        if layer in self.holds:
            return
        slot = 1 - self.holds.index(keep) if keep in self.holds else 0
        self.holds[slot] = layer
        target = self.slots[slot][: host.buffer.numel()]
        self.copied[slot] = self.copier.copy(target, host.buffer, self.read[slot])

    def take(self, layer: int, host: PackedGroup) -> PackedGroup:
        """The layer's bytes on the device; arithmetic given from now on waits for its copy."""
        slot = self.holds.index(layer)
        self.copier.wait(self.copied[slot])
        return PackedGroup(self.slots[slot][: host.buffer.numel()], host.records, host.block_size)

    def done(self, layer: int) -> None:
        """The arithmetic given so far is all that reads this slot."""
        self.read[self.holds.index(layer)] = self.copier.mark()

    def finish(self, layer: int) -> None:
        """Block until the layer's copy has left host memory, so that its host slot may be reused."""
        if layer in self.holds:
            self.copier.finish(self.copied[self.holds.index(layer)])
