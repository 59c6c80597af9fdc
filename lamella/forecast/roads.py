"""Links of a machine by name, with their rates, and what bytes of each rank pass: from disk, between host and device, to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamella.forecast.items import Route
from lamella.forecast.places import RankPlace
from lamella.hardware.machine import Collective, DeviceFacts, Machine
from lamella.plan.devices import Link, Links

LOCAL_BYTES_PER_S, LOCAL_LATENCY_S = 1.5e9, 5e-5
"""Between processes on one host's cores, where nothing was measured."""
NETWORK_BYTES_PER_S = 1.25e9
"""Between hosts, where nothing was measured: 10 Gbit/s."""


@dataclass(frozen=True)
class Roads:
    """Links and the ways over them.

    Attributes:
        rates: bytes per second, by link.
        read, copy, back: per rank: disk to host, host to device, device to host.
        between: from rank to rank.
        links: the same for the search of a split.
        notes: what was assumed.
    """

    rates: dict[str, float]
    read: tuple[Route, ...]
    copy: tuple[Route, ...]
    back: tuple[Route, ...]
    between: dict[tuple[int, int], Route]
    links: Links
    notes: tuple[str, ...]


def roads_of(machine: Machine, places: Sequence[RankPlace]) -> Roads:
    """All links that these ranks use."""
    rates: dict[str, float] = {}
    notes: list[str] = []
    for h, host in enumerate(machine.hosts):
        if host.disk is not None:
            rates[f"disk of {_host(machine, h)}"] = host.disk.read_bytes_per_s
        _roots(machine, h, rates)
    read, copy, back = [], [], []
    for place in places:
        disk = f"disk of {_host(machine, place.host)}"
        read.append(Route((disk,)) if disk in rates else Route())
        into, out = _host_ways(machine, place, rates)
        copy.append(into)
        back.append(out)
    between: dict[tuple[int, int], Route] = {}
    pairs: dict[tuple[int, int], Link] = {}
    for a in places:
        for b in places:
            if a.rank != b.rank:
                between[a.rank, b.rank], pairs[a.rank, b.rank] = _between(machine, a, b, rates, notes)
    within = [pairs[a.rank, b.rank] for a in places for b in places if a.rank < b.rank and a.host == b.host]
    across = [pairs[a.rank, b.rank] for a in places for b in places if a.rank < b.rank and a.host != b.host]
    slow = [
        min(group, key=lambda link: link.bytes_per_s) if group else Link(LOCAL_BYTES_PER_S, LOCAL_LATENCY_S)
        for group in (within or across, across or within)
    ]
    return Roads(rates, tuple(read), tuple(copy), tuple(back), between, Links(slow[0], slow[1], pairs), tuple(notes))


def stream_rate(machine: Machine, place: RankPlace, in_host: float, ranks_here: int) -> float:
    """Bytes per second at which a rank gets streamed layers, a share `in_host` of which lies in host memory, the rest on
    disk, which all ranks of its host read at once. A CPU computes where its host's memory is: only the disk counts."""
    disk = machine.hosts[place.host].disk
    disk_rate = disk.read_bytes_per_s / ranks_here if disk is not None else 0.0
    if place.facts.kind == "cpu":
        return disk_rate
    if place.link is None:
        return 0.0
    link = place.link.to_device_together_bytes_per_s or place.link.to_device_bytes_per_s
    if in_host >= 1:
        return link
    if not disk_rate:
        return 0.0
    return 1 / (in_host / link + (1 - in_host) / min(link, disk_rate))


def _host(machine: Machine, h: int) -> str:
    return machine.hosts[h].name if len(machine.hosts) > 1 else "host"


def _roots(machine: Machine, h: int, rates: dict[str, float]) -> None:
    """What all devices of a host reach together, where it is less than each alone."""
    links = [x for x in machine.host_links if machine.devices[x.device].host == h]
    for name, alone, together in (
        ("to devices", "to_device_bytes_per_s", "to_device_together_bytes_per_s"),
        ("from devices", "from_device_bytes_per_s", "from_device_together_bytes_per_s"),
    ):
        if len(links) > 1 and all(getattr(x, together) for x in links):
            total = sum(getattr(x, together) for x in links)
            if total < 0.98 * sum(getattr(x, alone) for x in links):
                rates[f"{_host(machine, h)} {name}"] = total


def _host_ways(machine: Machine, place: RankPlace, rates: dict[str, float]) -> tuple[Route, Route]:
    if place.link is None:
        return Route(), Route()
    ways = []
    for name, root, rate in (
        (f"host to {place.name}", "to devices", place.link.to_device_bytes_per_s),
        (f"{place.name} to host", "from devices", place.link.from_device_bytes_per_s),
    ):
        rates[name] = rate
        shared = f"{_host(machine, place.host)} {root}"
        ways.append(Route((name, shared) if shared in rates else (name,), place.link.latency_s))
    return ways[0], ways[1]


def _between(
    machine: Machine, a: RankPlace, b: RankPlace, rates: dict[str, float], notes: list[str]
) -> tuple[Route, Link]:
    if a.host != b.host:
        rate = machine.network_bytes_per_s
        if rate is None:
            rate = NETWORK_BYTES_PER_S
            _note(notes, f"assumed: {rate / 1e9:g} GB/s between hosts (network_bytes_per_s of the machine)")
        out, into = f"network out of {_host(machine, a.host)}", f"network into {_host(machine, b.host)}"
        rates[out] = rates[into] = rate
        return Route((out, into), machine.network_latency_s), Link(rate, machine.network_latency_s)
    name = f"{a.name} to {b.name}"
    for peer in machine.peer_links:
        if {peer.a, peer.b} == {a.index, b.index} and a.index != b.index:
            rates[name] = peer.bytes_per_s
            return Route((name,), peer.latency_s), Link(peer.bytes_per_s, peer.latency_s)
    if a.facts.kind == b.facts.kind == "cuda" and a.link is not None and b.link is not None:
        rate = min(a.link.from_device_bytes_per_s, b.link.to_device_bytes_per_s) / 2
        latency = a.link.latency_s + b.link.latency_s
        _note(
            notes,
            "assumed: devices without a link of their own exchange through host memory, at half their links' rate",
        )
    else:
        found = _measured(machine.collectives, machine.devices[a.index])
        rate, latency = found or (LOCAL_BYTES_PER_S, LOCAL_LATENCY_S)
        if found is None:
            _note(notes, f"assumed: {rate / 1e9:g} GB/s between processes of one host")
    rates[name] = rate
    return Route((name,), latency), Link(rate, latency)


def _measured(collectives: Sequence[Collective], device: DeviceFacts) -> tuple[float, float] | None:
    """Rate and latency between a CPU's processes: a line through measured transfers of several sizes."""
    if device.kind != "cpu":
        return None
    found = sorted((c for c in collectives if c.backend == "gloo" and c.op == "send"), key=lambda c: c.nbytes)
    if not found:
        return None
    small, large = found[0], found[-1]
    if large.nbytes == small.nbytes or large.seconds <= small.seconds:
        return large.nbytes / large.seconds, LOCAL_LATENCY_S
    rate = (large.nbytes - small.nbytes) / (large.seconds - small.seconds)
    return rate, max(small.seconds - small.nbytes / rate, 1e-6)


def _note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)
