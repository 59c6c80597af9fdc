"""Which packed layers stay in memory, and where the others are: the engine's own rules, and what a budget leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamella.errors import UserError
from lamella.units import format_bytes

DEVICE_SHARE = 0.6
"""Of the free device memory, for weights when no budget is given; the rest is for activations."""
HOST_SHARE = 0.7
"""Of a machine's memory, for pinned arenas of layers."""


@dataclass(frozen=True)
class Residency:
    """Which packed layers stay in memory, and what it takes (bytes).

    `fixed`: outer tensors, small tensors, dequantised buffer; `packed`: layers that stay, of those in a shared map this
    rank's part (bytes / ranks that share it); `slots`: two packed layers when any is streamed;
    `pinned`: on a GPU, those of the streamed layers that lie in pinned host memory (the others come from disk).
    """

    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    fixed_bytes: int
    packed_bytes: int
    slot_bytes: int
    pinned: tuple[int, ...] = ()

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.packed_bytes + self.slot_bytes


def plan_residency(
    group_bytes: Sequence[int], fixed_bytes: int, budget_bytes: int | None, first: int = 0, sharers: int = 1
) -> Residency:
    """Keep as many packed layers as fit the budget, lowest first; the rest is streamed through two slots.

    Args:
        group_bytes: of the layers from `first` on.
        sharers: ranks of this host that read one copy of the layers that stay: each counts its part of it. (With unlike
            budgets some layers are held by fewer ranks, which then hold more than they count. These are clean pages of
            files: the kernel takes them back when memory is short.)

    Raises:
        UserError: the budget does not even hold the fixed part and two slots.
    """
    parts = [-(-size // sharers) for size in group_bytes]
    everything = fixed_bytes + sum(parts)
    layers = len(group_bytes)
    if budget_bytes is None or everything <= budget_bytes:
        return Residency(tuple(range(first, first + layers)), (), fixed_bytes, sum(parts), 0)
    slots = 2 * max(group_bytes)
    if fixed_bytes + slots > budget_bytes:
        raise _too_small(budget_bytes, fixed_bytes + slots)
    left = budget_bytes - fixed_bytes - slots
    resident = []
    for i, size in enumerate(parts):
        if size > left:
            break
        left -= size
        resident.append(first + i)
    kept = sum(parts[: len(resident)])
    streamed = tuple(range(first + len(resident), first + layers))
    return Residency(tuple(resident), streamed, fixed_bytes, kept, slots)


def _too_small(budget_bytes: int, least_bytes: int) -> UserError:
    return UserError(
        f"memory.budget is {format_bytes(budget_bytes)}, but embeddings, head, one dequantised layer and two packed "
        f"layers take {format_bytes(least_bytes)}",
        fix=f"set memory.budget to {format_bytes(least_bytes * 1.2)} or more",
    )


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
        raise _too_small(device_bytes, fixed_bytes + slots)
    device = spread(group_bytes, device_bytes - fixed_bytes - slots)
    others = [i for i in layers if i not in device]
    if host_bytes is None or sum(group_bytes[i] for i in others) <= host_bytes:
        return Placement(device, tuple(others), ())
    pinned = tuple(others[j] for j in spread([group_bytes[i] for i in others], host_bytes - slots))
    return Placement(device, pinned, tuple(i for i in others if i not in pinned))


def place_layers(
    group_bytes: Sequence[int], fixed_bytes: int, device_bytes: int | None, host_bytes: int | None, first: int = 0
) -> Residency:
    """`plan_placement` as a `Residency` of the layers from `first` on."""
    placed = plan_placement(group_bytes, fixed_bytes, device_bytes, host_bytes)
    resident, pinned = (tuple(first + i for i in group) for group in (placed.device, placed.pinned))
    streamed = tuple(i for i in range(first, first + len(group_bytes)) if i not in resident)
    kept = sum(group_bytes[i] for i in placed.device)
    return Residency(resident, streamed, fixed_bytes, kept, 2 * max(group_bytes) if streamed else 0, pinned)


def least_bytes(aside_bytes: float, fixed_bytes: int, group_bytes: Sequence[int], sharers: int = 1) -> float:
    """Budget without which a step cannot run: what it takes besides packed layers, and two slots (or all layers, where
    these are smaller)."""
    return aside_bytes + fixed_bytes + min(2 * max(group_bytes), sum(-(-size // sharers) for size in group_bytes))


def keeps_activations(recompute: str, kept_bytes: float, room_bytes: float) -> bool:
    """Whether all layers' activations are kept: asked for, or (auto) they fit."""
    return recompute == "never" or (recompute == "auto" and kept_bytes <= max(room_bytes, 0))
