"""Known GPUs (`catalogue.toml`): figures with their sources, and what is assumed of hardware that nobody has measured."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from lamella.config import Section
from lamella.errors import UserError
from lamella.hardware.machine import DeviceFacts, Price

FILE = Path(__file__).with_suffix(".toml")
_FIGURES = ("memory_mib", "tflops", "memory_gb_s", "pcie", "nvlink_gb_s", "c2c_gb_s", "usd_per_hour", "host_ram_gb")


class Assumed(Section):
    """What is taken where nothing was measured."""

    reached: float
    memory_reached: float
    nvlink_reached: float
    through_host: float
    packed_bytes: float
    dequantised_bytes: float
    disk_read_gb_s: float
    host_ram_share: float
    cores_per_device: int
    pcie: dict[str, float]
    """Generation -> bytes/s of one direction over 16 lanes."""


class CatalogueDevice(Section):
    """One entry; units as in the file's head."""

    name: str
    aliases: tuple[str, ...] = ()
    dtype: Literal["bf16", "fp16"] = "bf16"
    memory_mib: int
    tflops: float
    memory_gb_s: float
    pcie: str
    nvlink_gb_s: float | None = None
    c2c_gb_s: float | None = None
    peers: bool = True
    usd_per_hour: float | None = None
    price_date: str | None = None
    host_ram_gb: float | None = None
    note: str = ""
    sources: dict[str, str]

    def figures(self) -> dict[str, float | int | str]:
        """The figures that are given, by name."""
        return {name: value for name in _FIGURES if (value := getattr(self, name)) is not None}


class Catalogue(Section):
    date: str
    assumed: Assumed
    sources: dict[str, str]
    devices: tuple[CatalogueDevice, ...] = Field(min_length=1)

    def source_of(self, device: CatalogueDevice, figure: str) -> str:
        """Where a figure is from, in words."""
        key, colon, how = device.sources[figure].partition(":")
        return self.sources[key] + (f" ({how.strip()})" if colon else "")

    def find(self, text: str) -> CatalogueDevice:
        """The device that a name means: `H100`, `h100-80gb`, `"RTX 3090"`, `nvidia tesla t4`.

        Raises:
            UserError: it fits several (they are named), or none (the nearest is named).
        """
        wanted = _key(text)
        if re.match(r"cpu|xeon|epyc|ryzen|threadripper|core(i|ultra)|graviton", wanted):
            raise UserError(
                f"{text!r}: how fast a CPU trains is measured, not looked up",
                fix="run `lamella probe` on that machine and give --machine machine.json",
            )
        keys = {_key(name): device for device in self.devices for name in (device.name, *device.aliases)}
        if wanted in keys:
            return keys[wanted]
        if sized := re.fullmatch(r"(.+?)[\s_-]*(\d+)\s*gi?b", text.strip(), re.IGNORECASE):
            device = keys.get(_key(sized[1]))  # a name and its memory, where there is one size only
            if device is not None and abs(device.memory_mib / 1024 / int(sized[2]) - 1) < 0.1:
                return device
        near = {device.name: device for key, device in keys.items() if wanted and wanted in key}
        if len(near) == 1:
            return next(iter(near.values()))
        if near:
            raise UserError(f"{text!r} fits several devices: {', '.join(near)}", fix="give one of these names")
        nearest = difflib.get_close_matches(wanted, keys, n=1, cutoff=0.0)
        raise UserError(
            f"no device {text!r} in the catalogue; nearest name: {keys[nearest[0]].name!r}",
            fix=f"known: {', '.join(device.name for device in self.devices)}; or write the machine as TOML with the "
            "figures of its data sheet, or run `lamella probe` there",
        )  # fmt: skip

    def facts(self, device: CatalogueDevice, host: int = 0) -> DeviceFacts:
        """The device as plans see it. NF4 is dequantised as fast as memory takes it: (read 0.52 bytes and write 2) per weight."""
        assumed = self.assumed
        rate = device.memory_gb_s * 1e9 * assumed.memory_reached
        price = None
        if device.usd_per_hour is not None and device.price_date is not None:
            price = Price(
                usd_per_hour=device.usd_per_hour, source=self.source_of(device, "usd_per_hour"), date=device.price_date
            )
        return DeviceFacts(
            name=device.name, kind="cuda", host=host, memory_bytes=device.memory_mib << 20,
            matmul_flops_per_s=device.tflops * 1e12, dtype=device.dtype, reached=assumed.reached,
            dequantise_bytes_per_s=self.dequantise_rate(rate), memory_bytes_per_s=rate, price=price,
            details={"pcie": device.pcie, **({"nvlink_gb_s": device.nvlink_gb_s} if device.nvlink_gb_s else {})},
        )  # fmt: skip

    def dequantise_rate(self, memory_bytes_per_s: float) -> float:
        """16-bit bytes written per second when memory is what limits: its rate x 2 / (0.52 + 2)."""
        a = self.assumed
        return memory_bytes_per_s * a.dequantised_bytes / (a.packed_bytes + a.dequantised_bytes)

    def link_rate(self, device: CatalogueDevice) -> tuple[float, str]:
        """Bytes/s of one direction between the device and its host's memory, and the kind of link."""
        if device.c2c_gb_s is not None:
            return device.c2c_gb_s / 2 * 1e9 * self.assumed.nvlink_reached, "c2c"
        generation, lanes = device.pcie.split("x")
        return self.assumed.pcie[generation] * int(lanes) / 16, "pcie"

    def peer_rate(self, a: CatalogueDevice, b: CatalogueDevice) -> tuple[float, str]:
        """Bytes/s of one direction between two devices of one host, and the kind of link: NVLink joins modules of one kind,
        PCIe those that may write into each other, the host's memory all others."""
        if a.name == b.name and a.nvlink_gb_s is not None:
            return a.nvlink_gb_s / 2 * 1e9 * self.assumed.nvlink_reached, "nvlink"
        slower = min(self.link_rate(a)[0], self.link_rate(b)[0])
        return (slower, "pcie") if a.peers and b.peers else (slower * self.assumed.through_host, "host")


def _key(name: str) -> str:
    """Names in one spelling: no maker, no series, no units, no punctuation."""
    text = re.sub(r"nvidia|geforce|tesla|quadro|generation|edition", " ", name.casefold())
    text = re.sub(r"(\d+)\s*gi?b\b", r"\1", text)
    return re.sub(r"[^a-z0-9]", "", text)


@cache
def catalogue() -> Catalogue:
    """The file that comes with the package."""
    return Catalogue.model_validate_json(json.dumps(tomllib.loads(FILE.read_text(encoding="utf-8"))))
