"""What schedules that move every weight for every micro-batch cannot go below, to set beside a layer-major walk.

With ZeRO-3 and its parameters in host memory each rank runs its micro-batches one after the other through the whole model,
and each micro-batch needs all layers' bytes on the device in the forward pass and again in the backward pass. (Activation
checkpointing may fetch them a third time.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadFloor:
    """Least seconds of an epoch, whatever the software does well.

    Attributes:
        bytes_per_device: that pass each device's host link.
        link_s: seconds of that; compute_s: of the arithmetic; the longer of both is the floor.
    """

    bytes_per_device: float
    link_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        return max(self.link_s, self.compute_s)


def offload_floor(
    layer_bytes: float,
    micro_batches: int,
    devices: int,
    link_bytes_per_s: float,
    compute_s: float,
    *,
    passes: int = 2,
    whole_copies: bool = True,
) -> OffloadFloor:
    """Floor of an epoch under ZeRO-3 offload.

    bytes per device = passes x layer bytes x micro-batches / devices, of which 1/devices alone crosses a device's host link where
    ranks hold shards and gather them over links between devices (`whole_copies` False).

    Args:
        layer_bytes: of all layers as they lie in host memory.
        micro_batches: of the epoch, all devices together.
        link_bytes_per_s: of one device's host link.
        compute_s: of the epoch's arithmetic on all devices.
        passes: fetches of each layer per micro-batch.
    """
    per_device = passes * layer_bytes * micro_batches / devices
    if not whole_copies:
        per_device /= devices
    return OffloadFloor(per_device, per_device / link_bytes_per_s, compute_s)
