"""What each device holds, in closed form, by parts that can be named.

    program (of a GPU: its context)
    + packed layers + two slots when any is streamed + dequantised layer + embeddings, head + adapter state
    + activations of one layer on the largest micro-batch + boundary inputs of every layer for the groups in flight
      (on a device that spills: as far as there is room)

All but the packed layers has to fit; they stay as far as there is room and are streamed beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamella.plan.costs import CostTable, ModelCost, RowCost
from lamella.plan.devices import Device
from lamella.plan.schedule import held
from lamella.plan.split import Split, Stage
from lamella.plan.work import StepPlan
from lamella.units import format_bytes


@dataclass(frozen=True)
class DeviceMemory:
    """One device's memory.

    Attributes:
        parts: bytes by name; packed layers are those that stay.
        layers_held: how many of its layers stay.
        streamed_bytes: packed bytes that each pass reads.
        have: bytes; None: no limit.
    """

    parts: dict[str, int]
    layers_held: int
    streamed_bytes: int
    have: int | None

    @property
    def need(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.have is None or self.need <= self.have

    def line(self) -> str:
        """`need 9.3 GB, have 8 GB: packed layers 4.1 GB, ...`, largest part first."""
        parts = sorted(((n, name) for name, n in self.parts.items() if n), key=lambda x: (-x[0], x[1]))
        have = "no limit" if self.have is None else f"have {format_bytes(self.have)}"
        return f"need {format_bytes(self.need)}, {have}: " + ", ".join(f"{name} {format_bytes(n)}" for n, name in parts)


def memory_of(
    split: Split,
    model: ModelCost,
    devices: Sequence[Device],
    plan: StepPlan,
    rows: Sequence[RowCost],
    table: CostTable | None = None,
) -> list[DeviceMemory]:
    """Memory of each device under a split and a step's plan (a device that is in no stage needs nothing)."""
    table = table or CostTable(model)
    tokens = [sum(rows[i].tokens for i in item) for item in plan.items]
    found = [DeviceMemory({}, 0, 0, device.memory_bytes) for device in devices]
    for s, stage in enumerate(split.stages):
        flying = held([(action.kind, action.group) for action in plan.actions[s]])
        for rank in stage.ranks:
            mine = [[tokens[m] for m in group if rank in plan.owners[s][m]] for group in plan.groups]  # of each group
            most = max((sum(sum(mine[g]) for g in groups) for groups in flying), default=0)
            largest = max((t for group in mine for t in group), default=0)
            found[rank] = stage_memory(table, stage, rank, devices[rank], most, largest)
    return found


def in_flight_of(plan: StepPlan) -> int:
    """The limit, as `plan_step` takes it, that a plan keeps to: stage s holds s groups fewer than that at most."""
    found = 1
    for s, actions in enumerate(plan.actions):
        most = max(map(len, held([(action.kind, action.group) for action in actions])), default=0)
        found = max(found, most + s if most > 1 else 1)
    return found


def stage_memory(
    table: CostTable, stage: Stage, rank: int, device: Device, in_flight_tokens: int, micro_batch_tokens: int
) -> DeviceMemory:
    """Memory of one rank of a stage.

    Args:
        in_flight_tokens: of this rank, between forward and back, at most.
        micro_batch_tokens: of its largest micro-batch.
    """
    layers = table.model.layers[stage.first : stage.last]
    parts_of = [1.0] * len(layers)
    if stage.way == "experts":
        share = stage.shares[stage.ranks.index(rank)]
        parts_of = [1 - layer.divisible + layer.divisible * share for layer in layers]
    packed = [int(layer.packed_bytes * part) for layer, part in zip(layers, parts_of, strict=True)]
    parts = {
        **({"program": device.fixed_bytes} if device.fixed_bytes else {}),
        "embeddings": table.model.first_bytes if stage.first == 0 else 0,
        "head": table.model.last_bytes if stage.last == table.layers else 0,
        "adapter state": int(sum(layer.adapter_bytes * p for layer, p in zip(layers, parts_of, strict=True))),
        "dequantised layer": max(int(x.dequantised_bytes * p) for x, p in zip(layers, parts_of, strict=True)),
        "activations": int(micro_batch_tokens * max(layer.activation_bytes_per_token for layer in layers)),
        "boundaries": int(in_flight_tokens * sum(layer.boundary_bytes_per_token for layer in layers)),
    }
    if device.spills and device.memory_bytes is not None:
        others = sum(parts.values()) - parts["boundaries"] + 2 * max(packed)
        parts["boundaries"] = max(0, min(parts["boundaries"], device.memory_bytes - others))
    room = None if device.memory_bytes is None else device.memory_bytes - sum(parts.values())
    if room is None or sum(packed) <= room or device.read_bytes_per_s <= 0:
        return DeviceMemory({"packed layers": sum(packed), **parts}, len(layers), 0, device.memory_bytes)
    slots = 2 * max(packed)
    kept = kept_bytes = 0
    for nbytes in packed:
        if kept_bytes + nbytes + slots > room:
            break
        kept += 1
        kept_bytes += nbytes
    parts = {"packed layers": kept_bytes, "slots": slots, **parts}
    return DeviceMemory(parts, kept, sum(packed) - kept_bytes, device.memory_bytes)
