"""Machines from outside: `machine.json` of `lamella probe`, a machine written by hand (TOML), or a few words such as
`4xH100-80` for one nobody has measured. Imports no torch.

    4xH100-80                                  one host, four devices of the catalogue
    1xRTX3090,2xT4,1xA6000                     one host, unlike devices
    1xH100-80+ram=128GB+disk=7GB/s             what is known of the host
    8xH100-80;8xH100-80+network=50GB/s         two hosts

After `+`: ram, cores, disk (reading), link (host to device, one direction), network (between hosts), reached (share of the
data sheet's rate that training reaches), price (US dollars an hour for the host). A TOML says the same and more:

    name = "the box under the desk"
    network = "3GB/s"                # only with several hosts

    [[hosts]]
    name = "box"
    ram = "128GB"
    cores = 16
    disk_read = "3GB/s"

    [[devices]]
    device = "RTX3090"               # of the catalogue; figures given here take the place of its own
    count = 2
    host = "box"                     # the only host may be left out
    link = "12GB/s"
    memory = "24GiB"

    [[peer_links]]
    a = 0
    b = 1
    rate = "50GB/s"
    kind = "nvlink"
"""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from lamella.config import Section, Size, explain_validation
from lamella.errors import UserError
from lamella.hardware.catalogue import CatalogueDevice, catalogue
from lamella.hardware.contradictions import check_machine
from lamella.hardware.machine import FORMAT_VERSION, DeviceFacts, Disk, Host, HostLink, Machine, PeerLink, Price
from lamella.units import format_bytes, parse_bytes, parse_rate

MACHINE_FILE = "machine.json"
_EXTRAS = ("ram", "cores", "disk", "link", "network", "reached", "price")
_EXAMPLE = "give devices such as `4xH100-80` or `1xRTX3090,2xT4`, or the path of a machine.json or a .toml"


class WrittenHost(Section):
    """A host in a TOML."""

    name: str = "host"
    ram: Size | None = None
    cores: int | None = Field(None, ge=1)
    disk_read: str | None = None
    disk_write: str | None = None
    disk_free: Size | None = None
    disk_path: str = ""
    usd_per_hour: float | None = None


class WrittenDevice(Section):
    """`count` equal devices in a TOML."""

    device: str
    count: int = Field(1, ge=1)
    host: str | None = None
    memory: Size | None = None
    tflops: float | None = None
    reached: float | None = None
    memory_rate: str | None = None
    dequantise_rate: str | None = None
    link: str | None = None
    usd_per_hour: float | None = None


class WrittenPeerLink(Section):
    """A link between two devices in a TOML, by their places in the list of devices."""

    a: int
    b: int
    rate: str
    kind: str = "pcie"


class WrittenMachine(Section):
    """A machine in a TOML."""

    name: str = "machine"
    taken: str | None = None
    hosts: tuple[WrittenHost, ...] = ()
    devices: tuple[WrittenDevice, ...] = Field(min_length=1)
    peer_links: tuple[WrittenPeerLink, ...] = ()
    network: str | None = None
    notes: tuple[str, ...] = ()


def open_machine(text: str | None, *, folder: Path = Path()) -> Machine:
    """The machine that `--machine` means; None: `machine.json` in `folder`.

    Raises:
        UserError: no such file or device, a name that fits several, or a machine that contradicts itself.
    """
    if text is None:
        path = folder / MACHINE_FILE
        if not path.is_file():
            raise UserError(
                f"no machine given, and no {path}",
                fix="run `lamella probe` to measure this one, or give --machine, e.g. --machine 4xH100-80",
            )
        return read_machine(path)
    path = Path(text)
    if path.suffix.lower() in (".json", ".toml") or path.is_file():
        return read_machine(path)
    if not text.strip():
        raise UserError("--machine is empty", fix=_EXAMPLE)
    machine = _expression(text)
    check_machine(machine)
    return machine


def read_machine(path: Path) -> Machine:
    """A machine from `machine.json`, or from a TOML written by hand.

    Raises:
        UserError: not there, not JSON or TOML (with the line), unknown keys, or contradictions.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError("no such file", fix=f"run `lamella probe --out {path}`, or {_EXAMPLE}", path=path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot be read: {error}", fix="give a text file in UTF-8 that you may read", path=path
        ) from error
    if path.suffix.lower() == ".toml":
        machine = _written(_parse_toml(text, path), path)
    else:
        machine = _measured(text, path)
    check_machine(machine, path)
    return machine


def _measured(text: str, path: Path) -> Machine:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"not valid JSON: {error.msg}", fix="run `lamella probe` again", path=path, line=error.lineno,
            column=error.colno,
        ) from error  # fmt: skip
    version = tree.get("format_version") if isinstance(tree, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"not a machine.json of this version: format_version is {version!r}, not {FORMAT_VERSION}",
            fix="run `lamella probe` again", path=path,
        )  # fmt: skip
    try:
        return Machine.model_validate_json(text)
    except ValidationError as error:
        raise explain_validation(error, path, Machine) from error


def _parse_toml(text: str, path: Path) -> WrittenMachine:
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line, column = (int(place[1]), int(place[2])) if place else (len(text.splitlines()), None)
        what = re.sub(r"\s*\(at .*\)$", "", str(error))
        raise UserError(
            f"not valid TOML: {what}", fix="see https://toml.io", path=path, line=line, column=column
        ) from error
    try:
        return WrittenMachine.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        raise explain_validation(error, path, WrittenMachine) from error


def _written(written: WrittenMachine, path: Path) -> Machine:
    hosts = written.hosts or (WrittenHost(),)
    taken = written.taken or datetime.date.fromtimestamp(path.stat().st_mtime).isoformat()
    names = [host.name for host in hosts]
    build = _Build(written.name)
    where: list[list[tuple[CatalogueDevice, DeviceFacts, float | None]]] = [[] for _ in hosts]
    for item in written.devices:
        if item.host is None and len(hosts) > 1:
            raise UserError(f"[[devices]] {item.device}: no host given, and there are {', '.join(names)}",
                            fix="add host = ...", path=path)  # fmt: skip
        if item.host is not None and item.host not in names:
            raise UserError(f"[[devices]] {item.device}: host {item.host!r} is not there; hosts are {', '.join(names)}",
                            fix="add it to [[hosts]], or name one of them", path=path)  # fmt: skip
        index = names.index(item.host) if item.host is not None else 0
        known = catalogue().find(item.device)
        link = None if item.link is None else parse_rate(item.link)
        where[index] += [(known, _override(known, item, index, path, taken), link)] * item.count
    for index, (host, devices) in enumerate(zip(hosts, where, strict=True)):
        disk = Disk(
            path=host.disk_path, read_bytes_per_s=_rate(host.disk_read) or build.disk_rate(index, len(hosts)),
            write_bytes_per_s=_rate(host.disk_write), free_bytes=_size(host.disk_free),
        )  # fmt: skip
        price = (
            None if host.usd_per_hour is None else Price(usd_per_hour=host.usd_per_hour, source=str(path), date=taken)
        )
        build.add(devices, name=host.name, ram=_size(host.ram), cores=host.cores, disk=disk, price=price)
    given = tuple(
        PeerLink(a=link.a, b=link.b, bytes_per_s=parse_rate(link.rate), kind=link.kind) for link in written.peer_links
    )
    return build.machine("file", taken, network=_rate(written.network), peers=given, notes=written.notes)


def _size(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def _rate(text: str | None) -> float | None:
    return None if text is None else parse_rate(text)


def _override(known: CatalogueDevice, item: WrittenDevice, host: int, path: Path, taken: str) -> DeviceFacts:
    facts = catalogue().facts(known, host)
    new: dict[str, Any] = {}
    if item.memory is not None:
        new["memory_bytes"] = parse_bytes(item.memory)
    if item.tflops is not None:
        new["matmul_flops_per_s"] = item.tflops * 1e12
    if item.reached is not None:
        new["reached"] = item.reached
    if item.memory_rate is not None:
        new["memory_bytes_per_s"] = parse_rate(item.memory_rate)
        new["dequantise_bytes_per_s"] = catalogue().dequantise_rate(new["memory_bytes_per_s"])
    if item.dequantise_rate is not None:
        new["dequantise_bytes_per_s"] = parse_rate(item.dequantise_rate)
    if item.usd_per_hour is not None:
        new["price"] = Price(usd_per_hour=item.usd_per_hour, source=str(path), date=taken)
    return facts.model_copy(update=new)


def _expression(text: str) -> Machine:
    build = _Build(text)
    network = None
    parts = text.split(";")
    for index, part in enumerate(parts):
        listed, extras = _extras(part)
        network = extras.pop("network", network)
        reached = extras.pop("reached", None)
        devices = []
        for item in listed.split(","):
            count, name = _counted(item)
            known = catalogue().find(name)
            facts = catalogue().facts(known, index)
            if reached is not None:
                facts = facts.model_copy(update={"reached": reached})
            if "price" in extras:
                facts = facts.model_copy(update={"price": None})
            devices += [(known, facts, extras.get("link"))] * count
        price = None
        if "price" in extras:
            price = Price(usd_per_hour=extras["price"], source="given", date=datetime.date.today().isoformat())
        disk = Disk(path="", read_bytes_per_s=extras.get("disk") or build.disk_rate(index, len(parts)))
        build.add(
            devices, name=f"host{index}" if len(parts) > 1 else "host", ram=extras.get("ram"), cores=extras.get("cores"),
            disk=disk, price=price,
        )  # fmt: skip
    return build.machine("catalogue", catalogue().date, network=network)


def _extras(part: str) -> tuple[str, dict[str, Any]]:
    """`"2xT4+ram=64GB"` -> `("2xT4", {"ram": 64e9})`; extras may follow any device."""
    devices: list[str] = []
    found: dict[str, Any] = {}
    for item in part.split(","):
        device, *extras = item.split("+")
        devices.append(device)
        for extra in extras:
            key, equals, value = (piece.strip() for piece in extra.partition("="))
            if key not in _EXTRAS or not equals:
                raise UserError(
                    f"--machine: +{extra.strip()!r} is not known",
                    fix=f"known are {', '.join(f'+{e}=...' for e in _EXTRAS)}",
                )
            if key in found:
                raise UserError(f"--machine: +{key} is given twice for one host", fix="give it once")
            found[key] = _value(key, value)
    return ",".join(devices), found


def _value(key: str, text: str) -> Any:
    if key == "ram":
        return parse_bytes(text)
    if key in ("disk", "link", "network"):
        return parse_rate(text)
    try:
        return int(text) if key == "cores" else float(text)
    except ValueError as error:
        raise UserError(f"--machine: +{key}={text} is not a number", fix=f"write +{key}=1") from error


def _counted(item: str) -> tuple[int, str]:
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?(.*\S)\s*", item, re.IGNORECASE)
    if match is None:
        raise UserError("--machine: a device is missing between commas", fix=_EXAMPLE)
    count = int(match[1] or 1)
    if not 1 <= count <= 4096:
        raise UserError(f"--machine: {count} devices in {item.strip()!r}", fix="give 1 or more")
    return count, match[2]


class _Build:
    """Collects hosts and devices, and notes what is assumed of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hosts: list[Host] = []
        self.devices: list[DeviceFacts] = []
        self.known: list[CatalogueDevice] = []
        self.links: list[HostLink] = []
        self.notes: list[str] = []

    def disk_rate(self, index: int, count: int) -> float:
        rate = catalogue().assumed.disk_read_gb_s
        which = f" of host {index}" if count > 1 else ""
        self._note(f"assumed: the disk{which} reads {rate:g} GB/s (one NVMe disk on PCIe 4); +disk=... sets it")
        return rate * 1e9

    def add(
        self, devices: list[tuple[CatalogueDevice, DeviceFacts, float | None]], *, name: str, ram: int | None,
        cores: int | None, disk: Disk, price: Price | None,
    ) -> None:  # fmt: skip
        if ram is None:
            ram = self._ram([known for known, _, _ in devices], name)
        if cores is None:
            cores = catalogue().assumed.cores_per_device * max(len(devices), 1)
            self._note(f"assumed: {name} has {cores} cores")
        self.hosts.append(Host(name=name, cores=cores, ram_bytes=ram, limit_bytes=ram, disk=disk, price=price))
        for known, facts, link in devices:
            rate, kind = catalogue().link_rate(known)
            if link is None:
                self._note(f"assumed: {known.name} copies {format_bytes(rate)}/s from and to its host ({_wire(known)})")
            self.links.append(
                HostLink(device=len(self.devices), to_device_bytes_per_s=link or rate,
                         from_device_bytes_per_s=link or rate, kind=kind)
            )  # fmt: skip
            self.devices.append(facts)
            self.known.append(known)
            if known.note:
                self._note(known.note)

    def _ram(self, devices: list[CatalogueDevice], name: str) -> int:
        share = catalogue().assumed.host_ram_share
        total = 0.0
        for known in devices:
            if known.host_ram_gb is not None:
                total += known.host_ram_gb * 1e9
                how = f"{known.host_ram_gb:g} GB with each {known.name} ({catalogue().source_of(known, 'host_ram_gb')})"
            else:
                total += share * (known.memory_mib << 20)
                how = f"{share:g} times its memory with each {known.name}, as nothing is known"
            self._note(f"assumed: {name} has RAM of {how}; +ram=... sets it")
        return int(total)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def machine(
        self, source: Any, taken: str, *, network: float | None, peers: tuple[PeerLink, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> Machine:  # fmt: skip
        given = {frozenset((link.a, link.b)) for link in peers}
        links = list(peers)
        for a, b in combinations(range(len(self.devices)), 2):
            if self.devices[a].host == self.devices[b].host and frozenset((a, b)) not in given:
                rate, kind = catalogue().peer_rate(self.known[a], self.known[b])
                links.append(PeerLink(a=a, b=b, bytes_per_s=rate, kind=kind))
        shares = sorted({device.reached for device in self.devices})
        self._note(f"assumed: training reaches {', '.join(f'{s:.0%}' for s in shares)} of the data sheets' matmul rates; "
                   "+reached=... sets it")  # fmt: skip
        return Machine(
            name=self.name, source=source, taken=taken, hosts=tuple(self.hosts), devices=tuple(self.devices),
            host_links=tuple(self.links), peer_links=tuple(links), network_bytes_per_s=network,
            notes=(*notes, *self.notes),
        )  # fmt: skip


def _wire(known: CatalogueDevice) -> str:
    if known.c2c_gb_s is not None:
        return f"NVLink-C2C, {known.c2c_gb_s:g} GB/s both directions"
    generation, lanes = known.pcie.split("x")
    return f"PCIe {generation} x{lanes}"
