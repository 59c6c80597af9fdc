"""A machine as tables for people."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lamella.hardware.machine import DeviceFacts, Machine
from lamella.units import format_bytes, format_seconds


def show(machine: Machine, console: Console) -> None:
    """Print devices, links, hosts and notes."""
    console.print(render(machine))


def render(machine: Machine) -> RenderableType:
    """The same, to be printed anywhere."""
    parts: list[RenderableType] = [_devices(machine)]
    for table in (_links(machine), _collectives(machine)):
        if table is not None:
            parts += [Text(""), table]
    parts += [Text(""), _hosts(machine)]
    if machine.notes:
        parts += [Text("")] + [Text(f"- {note}") for note in machine.notes]
    return Group(*parts)


def _table(*titles: str) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for place, title in enumerate(titles):
        table.add_column(title, justify="left" if place < 2 else "right")
    return table


def _devices(machine: Machine) -> Table:
    table = _table("#", "device", "memory", "free", "products", "NF4 undone", "copies within", "reached")
    for index, device in enumerate(machine.devices):
        free = "" if device.free_bytes is None else format_bytes(device.free_bytes)
        table.add_row(
            str(index), _name(device), format_bytes(device.memory_bytes), free,
            f"{_flops(device.matmul_flops_per_s)} {device.dtype}", _rate(device.dequantise_bytes_per_s),
            _rate(device.memory_bytes_per_s), "measured" if device.kernels is not None else f"{device.reached:.0%}",
        )  # fmt: skip
    return table


def _name(device: DeviceFacts) -> str:
    threads = "" if device.threads is None else f", {device.threads} threads"
    wire = f", PCIe {device.details['pcie']}" if "pcie" in device.details else ""
    return f"{device.name}{threads}{wire}"


def _links(machine: Machine) -> Table | None:
    if not machine.host_links and not machine.peer_links:
        return None
    table = _table("link", "kind", "there", "back", "all at once", "pageable", "latency")
    for link in machine.host_links:
        together = [link.to_device_together_bytes_per_s, link.from_device_together_bytes_per_s]
        table.add_row(
            f"host to {link.device}", link.kind, _rate(link.to_device_bytes_per_s), _rate(link.from_device_bytes_per_s),
            " / ".join(_rate(rate) for rate in together if rate is not None),
            "" if link.pageable_bytes_per_s is None else _rate(link.pageable_bytes_per_s), _seconds(link.latency_s),
        )  # fmt: skip
    for peer in machine.peer_links:
        rate = _rate(peer.bytes_per_s)
        table.add_row(f"{peer.a} to {peer.b}", peer.kind, rate, rate, "", "", _seconds(peer.latency_s))
    return table


def _collectives(machine: Machine) -> Table | None:
    if not machine.collectives:
        return None
    table = _table("ranks on", "exchange", "bytes", "time", "rate")
    for found in machine.collectives:
        table.add_row(
            ", ".join(map(str, found.devices)), f"{found.op} ({found.backend})", format_bytes(found.nbytes),
            _seconds(found.seconds), _rate(found.nbytes / found.seconds),
        )  # fmt: skip
    return table


def _hosts(machine: Machine) -> Table:
    table = _table(
        "host", "disk", "cores", "RAM", "limit", "free", "copies in RAM", "imports", "disk read", "written", "free"
    )
    for host in machine.hosts:
        disk = host.disk
        table.add_row(
            host.name, "" if disk is None else f"{disk.path} ({disk.kind})", str(host.cores), format_bytes(host.ram_bytes),
            format_bytes(host.limit_bytes), _maybe(host.free_bytes), _maybe(host.memory_bytes_per_s, "/s"),
            _maybe(host.import_bytes), _maybe(disk and disk.read_bytes_per_s, "/s"),
            _maybe(disk and disk.write_bytes_per_s, "/s"), _maybe(disk and disk.free_bytes),
        )  # fmt: skip
    return table


def _maybe(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{format_bytes(value)}{unit}"


def _rate(value: float) -> str:
    return f"{format_bytes(value)}/s"


def _flops(value: float) -> str:
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"


def _seconds(value: float) -> str:
    return f"{value * 1e6:.3g} us" if value < 1e-3 else f"{value * 1e3:.3g} ms" if value < 1 else format_seconds(value)
