"""Devices and the links between them, as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        host: devices of one host share its memory and its network link.
        flops_per_s: reached in training, not the peak.
        dequantise_bytes_per_s: dequantised bytes written.
        read_bytes_per_s: packed bytes read from the host's memory or disk; 0: nothing can be streamed, all layers have
            to be held.
        memory_bytes: for all that training holds; None: no limit.
        spills: boundary inputs that find no room go to the host's memory (a GPU's).
        fixed_bytes: of that memory, what the program takes before it holds anything (a GPU's context).
    """

    name: str
    host: str
    flops_per_s: float
    dequantise_bytes_per_s: float
    read_bytes_per_s: float
    memory_bytes: int | None = None
    spills: bool = False
    fixed_bytes: int = 0


@dataclass(frozen=True)
class Link:
    """One direction of a link."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Links:
    """Links between devices of one host, between hosts, and those of single pairs (either order) that differ."""

    local: Link
    remote: Link
    pairs: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def between(self, devices: Sequence[Device], a: int, b: int) -> Link:
        """The link from device a to device b (indices)."""
        found = self.pairs.get((a, b)) or self.pairs.get((b, a))
        if found is not None:
            return found
        return self.local if devices[a].host == devices[b].host else self.remote

    def ring_seconds(self, devices: Sequence[Device], ranks: Sequence[int], nbytes: float) -> float:
        """A ring all-reduce: 2 (N - 1) turns of 1/N of the bytes over the slowest link of the ring."""
        n = len(ranks)
        if n < 2:
            return 0.0
        ring = [self.between(devices, ranks[i], ranks[(i + 1) % n]) for i in range(n)]
        return 2 * (n - 1) * max(nbytes / n / link.bytes_per_s + link.latency_s for link in ring)
