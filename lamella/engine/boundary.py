"""What a step keeps between its two walks: boundary activations, and the gradients of the adapter.

On a CPU both stay where they are made. On a GPU a boundary that does not fit the room given to boundaries is copied to
pinned host memory, the oldest first (the backward walk needs the youngest first), and fetched ahead of its turn; adapter
gradients are summed on the device, and each layer's are copied to pinned memory while the next layer runs. Nothing here
makes the host wait, except the end of a step for its last copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lamella.adapter import Adapter
from lamella.engine.device import Copier, HostArena
from lamella.models.pieces import Cut
from lamella.trace.recorder import RECORDER

Key = tuple[int, int]
"""Layer and number of the micro-batch."""

AHEAD = 2
"""Boundaries fetched ahead of the one in use."""


class _HostPool:
    """Pinned host buffers, reused by size."""

    def __init__(self, pin: bool) -> None:
        self.pin = pin
        self.allocated_bytes = 0
        self._free: dict[int, list[HostArena]] = {}

    def take(self, nbytes: int) -> HostArena:
        free = self._free.setdefault(nbytes, [])
        if free:
            return free.pop()
        self.allocated_bytes += nbytes
        return HostArena(nbytes, self.pin)

    def give(self, arena: HostArena) -> None:
        self._free[arena.bytes.numel()].append(arena)


@dataclass
class _Spilled:
    arena: HostArena
    shape: torch.Size
    dtype: torch.dtype
    sent: Any
    leaving: Tensor | None


@dataclass
class _Fetched:
    tensor: Tensor
    arrived: Any
    arena: HostArena


class Boundaries:
    """Boundary inputs of layers, by layer and micro-batch.

    Args:
        make_copier: makes what orders copies on a device, one for each direction; None: everything stays where it is.
        room_bytes: of boundaries kept on the device; None: all.
        pin: page-lock host memory.
    """

    def __init__(
        self, make_copier: Callable[[], Copier] | None, room_bytes: int | None = None, pin: bool = False
    ) -> None:
        self.room_bytes = room_bytes if make_copier is not None else None
        self._out = make_copier() if make_copier is not None else None
        self._in = make_copier() if make_copier is not None else None
        self._pool = _HostPool(pin)
        self._here: dict[Key, Tensor] = {}
        self._spilled: dict[Key, _Spilled] = {}
        self._fetched: dict[Key, _Fetched] = {}
        self._leaving: list[_Spilled] = []
        self.here_bytes = 0
        self.spilled_bytes = 0

    @property
    def host_bytes(self) -> int:
        """Pinned host memory taken so far."""
        return self._pool.allocated_bytes

    def put(self, layer: int, item: int, tensor: Tensor) -> None:
        """Keep a boundary; the oldest ones on the device make room for it."""
        self._let_go()
        self._here[layer, item] = tensor
        self.here_bytes += tensor.nbytes
        if self.room_bytes is not None:
            while self.here_bytes > self.room_bytes and self._here:
                self._spill(next(iter(self._here)))

    def clear(self) -> None:
        """Forget what an interrupted step left."""
        self._let_go()
        for spilled in self._spilled.values():
            self._pool.give(spilled.arena)
        for fetched in self._fetched.values():
            assert self._in is not None
            self._in.wait(fetched.arrived)
            self._pool.give(fetched.arena)
        for kept in (self._here, self._spilled, self._fetched):
            kept.clear()
        self.here_bytes = 0

    def _let_go(self) -> None:
        """Drop device tensors whose copies were started before: what is computed from now on waits for those, so their
        memory may be given to it."""
        for spilled in self._leaving:
            assert self._out is not None
            self._out.wait(spilled.sent)
            spilled.leaving = None
        self._leaving.clear()

    def _spill(self, key: Key) -> None:
        assert self._out is not None
        tensor = self._here.pop(key).contiguous()
        self.here_bytes -= tensor.nbytes
        self.spilled_bytes += tensor.nbytes
        arena = self._pool.take(tensor.nbytes)
        with RECORDER.span("wait_host", f"spill {key[0]}", tensor.nbytes, lane="spill"):
            sent = self._out.copy(arena.bytes, tensor.view(-1).view(torch.uint8), self._out.mark())
        spilled = _Spilled(arena, tensor.shape, tensor.dtype, sent, tensor)
        self._spilled[key] = spilled
        self._leaving.append(spilled)

    def prefetch(self, layer: int, item: int, device: torch.device) -> None:
        """Start bringing a spilled boundary back; nothing to do for one that is here."""
        spilled = self._spilled.pop((layer, item), None)
        if spilled is None:
            return
        assert self._in is not None
        assert self._out is not None
        # Behind everything computed so far, whose memory this may be, and behind the copy that sent the bytes away.
        self._out.wait(spilled.sent)
        target = torch.empty(spilled.shape, dtype=spilled.dtype, device=device)
        with RECORDER.span("wait_host", f"fetch {layer}", target.nbytes, lane="fetch"):
            arrived = self._in.copy(target.view(-1).view(torch.uint8), spilled.arena.bytes, self._in.mark())
        self._fetched[layer, item] = _Fetched(target, arrived, spilled.arena)

    def get(self, layer: int, item: int, device: torch.device) -> Tensor:
        """Take a boundary out, and start fetching the next ones of the backward walk."""
        self._let_go()
        key = (layer, item)
        if key in self._here:
            tensor = self._here.pop(key)
            self.here_bytes -= tensor.nbytes
        else:
            self.prefetch(layer, item, device)
            fetched = self._fetched.pop(key)
            assert self._in is not None
            self._in.wait(fetched.arrived)
            self._pool.give(fetched.arena)
            tensor = fetched.tensor
        if self._spilled and len(self._fetched) < AHEAD:
            for n_layer, n_item in sorted(self._spilled, key=lambda k: (-k[0], k[1]))[: AHEAD - len(self._fetched)]:
                self.prefetch(n_layer, n_item, device)
        return tensor


class GradientSums:
    """Sums the adapter's gradients over micro-batches and adds them to its masters' (fp32).

    Args:
        copier: orders copies to the host where masters are not on the device; None: gradients are added at once.
        pin: page-lock host memory.

    Attributes:
        cuts: parameter -> the part of it that is summed here, where a rank holds no more.
    """

    def __init__(self, copier: Copier | None, pin: bool = False) -> None:
        self._copier, self._pin = copier, pin
        self.cuts: dict[str, Cut] = {}
        self._sums: dict[str, Tensor] = {}
        self._arenas: dict[str, HostArena] = {}
        self._sent: list[tuple[str, Tensor, Any]] = []
        self._leaving: list[tuple[Tensor, Any]] = []

    def clear(self) -> None:
        """Forget what an interrupted step left."""
        for _, _, mark in self._sent:
            assert self._copier is not None
            self._copier.finish(mark)
        self._sent.clear()
        self._sums.clear()

    def add(self, adapter: Adapter, name: str, grad: Tensor) -> None:
        """Add a gradient of the parameter `name`."""
        if self._copier is None:
            adapter.add_gradient(name, grad, self.cuts.get(name))
        elif name in self._sums:
            self._sums[name].add_(grad)
        else:
            self._sums[name] = grad.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def layer_done(self, layer: int) -> None:
        """Start sending the sums of the layer that is finished."""
        if self._copier is None:
            return
        for _, mark in self._leaving:
            self._copier.wait(mark)
        self._leaving.clear()
        after = self._copier.mark() if self._sums else None
        nbytes = sum(total.nbytes for total in self._sums.values())
        with RECORDER.span("wait_host", f"gradients {layer}", nbytes, lane="gradients"):
            for name, total in self._sums.items():
                if name not in self._arenas or self._arenas[name].bytes.numel() != total.nbytes:
                    self._arenas[name] = HostArena(total.nbytes, self._pin)
                host = self._arenas[name].bytes
                mark = self._copier.copy(host, total.view(-1).view(torch.uint8), after)
                self._sent.append((name, host.view(torch.float32).view(total.shape), mark))
                self._leaving.append((total, mark))
        self._sums.clear()

    def step_done(self, adapter: Adapter) -> None:
        """Wait for the copies and add them to the masters' gradients."""
        for name, host, mark in self._sent:
            assert self._copier is not None
            self._copier.finish(mark)
            adapter.add_gradient(name, host, self.cuts.get(name))
        self._sent.clear()
        if self._copier is not None:
            for _, mark in self._leaving:
                self._copier.wait(mark)
            self._leaving.clear()
