"""What cannot be true of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from lamella.errors import UserError
from lamella.hardware.machine import DeviceFacts, Host, HostLink, Machine, PeerLink
from lamella.units import format_bytes


def check_machine(machine: Machine, path: Path | None = None) -> None:
    """Refuse a machine that contradicts itself.

    Raises:
        UserError: every contradiction with the values seen.
    """
    found = [*_frame(machine), *_hosts(machine), *_devices(machine), *_links(machine)]
    if found:
        fix = "correct the file" if path is not None and path.suffix == ".toml" else "run `lamella probe` again"
        raise UserError("\n  ".join(found), fix=fix if path is not None else "correct --machine", path=path)


def _frame(machine: Machine) -> Iterator[str]:
    if not machine.hosts:
        yield "there is no host"
    if not machine.devices:
        yield "there is no device"
    if len(machine.hosts) > 1 and machine.network_bytes_per_s is None:
        yield (
            f"there are {len(machine.hosts)} hosts, and no rate of the network between them "
            '(in a TOML: network = "3GB/s"; after devices: +network=3GB/s)'
        )
    if machine.network_bytes_per_s is not None and machine.network_bytes_per_s <= 0:
        yield f"the network's rate is {machine.network_bytes_per_s:g} bytes/s; a rate is above zero"
    if machine.network_latency_s < 0:
        yield f"the network's latency is {machine.network_latency_s:g} s"


def _hosts(machine: Machine) -> Iterator[str]:
    for index, host in enumerate(machine.hosts):
        what = f"host {index} ({host.name})"
        yield from _rates(what, host)
        yield from _sizes(what, host)
        if host.limit_bytes > host.ram_bytes:
            yield f"{what}: its memory limit, {format_bytes(host.limit_bytes)}, is above its RAM, {format_bytes(host.ram_bytes)}"
        if host.free_bytes is not None and host.free_bytes > host.ram_bytes:
            yield f"{what}: {format_bytes(host.free_bytes)} are free of {format_bytes(host.ram_bytes)} of RAM"
        if host.cores < 1:
            yield f"{what}: {host.cores} cores"
        if host.numa_nodes < 1:
            yield f"{what}: {host.numa_nodes} NUMA nodes"
        if host.disk is not None:
            yield from _rates(f"{what}, disk {host.disk.path}".rstrip(), host.disk)
        if host.price is not None and host.price.usd_per_hour < 0:
            yield f"{what}: a price of {host.price.usd_per_hour:g} dollars an hour"


def _devices(machine: Machine) -> Iterator[str]:
    cpus: dict[int, int] = {}
    for index, device in enumerate(machine.devices):
        what = f"device {index} ({device.name})"
        yield from _rates(what, device)
        if device.kernels is not None:
            yield from _rates(f"{what}, kernels", device.kernels)
        yield from _sizes(what, device)
        if device.free_bytes is not None and device.free_bytes > device.memory_bytes:
            yield f"{what}: {format_bytes(device.free_bytes)} are free of {format_bytes(device.memory_bytes)}"
        if not 0 < device.reached <= 1:
            yield f"{what}: reached = {device.reached:g}; it is a share above 0 and up to 1"
        if device.price is not None and device.price.usd_per_hour < 0:
            yield f"{what}: a price of {device.price.usd_per_hour:g} dollars an hour"
        if not 0 <= device.host < len(machine.hosts):
            yield f"{what} is on host {device.host}, and there are {len(machine.hosts)} (0 is the first)"
            continue
        host = machine.hosts[device.host]
        if device.kind == "cpu":
            yield from _cpu(what, device, host)
            if device.host in cpus:
                yield f"{what} and device {cpus[device.host]} are both the CPU of host {device.host}"
            cpus[device.host] = index


def _cpu(what: str, device: DeviceFacts, host: Host) -> Iterator[str]:
    if device.memory_bytes > host.limit_bytes:
        yield (
            f"{what}: {format_bytes(device.memory_bytes)} of memory, and its host may use {format_bytes(host.limit_bytes)}"
        )
    if device.threads is not None and not 1 <= device.threads <= host.cores:
        yield f"{what}: {device.threads} threads on {host.cores} cores"


def _links(machine: Machine) -> Iterator[str]:
    count = len(machine.devices)
    seen: set[object] = set()
    links: list[HostLink | PeerLink] = [*machine.host_links, *machine.peer_links]
    for link in links:
        what, ends, key = _ends(link)
        yield from _rates(what, link)
        if link.latency_s < 0:
            yield f"{what}: a latency of {link.latency_s:g} s"
        for end in ends:
            if not 0 <= end < count:
                yield f"{what}: there is no device {end}; devices are 0 to {count - 1}"
        if len(ends) == 2 and ends[0] == ends[1]:
            yield f"{what}: a link from a device to itself"
        if key in seen:
            yield f"{what} is given twice"
        seen.add(key)
    for measured in machine.collectives:
        if measured.seconds <= 0 or measured.nbytes <= 0:
            yield f"collective of devices {measured.devices}: {measured.nbytes} bytes in {measured.seconds:g} s"
        cpus = {d for d, device in enumerate(machine.devices) if device.kind == "cpu"}
        gpus = [d for d in measured.devices if d not in cpus]
        if len(set(gpus)) != len(gpus) or any(not 0 <= d < count for d in measured.devices):
            yield f"collective of devices {measured.devices}: devices are 0 to {count - 1}, each GPU once"


def _ends(link: HostLink | PeerLink) -> tuple[str, tuple[int, ...], object]:
    if isinstance(link, HostLink):
        return f"link of device {link.device} to its host", (link.device,), link.device
    return f"link between devices {link.a} and {link.b}", (link.a, link.b), frozenset((link.a, link.b))


def _rates(what: str, part: BaseModel) -> Iterator[str]:
    for name, value in part:
        if name.endswith("per_s") and value is not None and value <= 0:
            yield f"{what}: {name} = {value:g}; a rate is above zero"


def _sizes(what: str, part: Host | DeviceFacts) -> Iterator[str]:
    for name, value in part:
        if name.endswith("_bytes") and value is not None and (value < 0 or (value == 0 and name != "free_bytes")):
            yield f"{what}: {name} = {value}; a size is above zero"
