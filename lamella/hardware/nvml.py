"""What NVIDIA's driver says of its devices, through NVML (`nvidia-ml-py`). Imports no torch.

Functions take the library as an argument (`nvml`, the `pynvml` module), so that what is made of its answers can be tested
without a driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Wire:
    """The PCIe link of a device: what it has now, and the most that device and slot can do."""

    generation: int
    width: int
    most_generation: int
    most_width: int

    def __str__(self) -> str:
        now, most = f"{self.generation}x{self.width}", f"{self.most_generation}x{self.most_width}"
        return now if now == most else f"{now} of {most}"


@dataclass(frozen=True)
class NvmlDevice:
    """One device.

    Attributes:
        nvlinks: active NVLinks by the PCI bus id at their other end ("switch" for an NVSwitch).
        numa_node: of the host; None where the kernel does not say.
    """

    name: str
    uuid: str
    bus: str
    total_bytes: int
    free_bytes: int
    capability: str
    wire: Wire | None
    nvlinks: dict[str, int] = field(default_factory=dict)
    numa_node: int | None = None


def load() -> tuple[Any | None, str]:
    """(the library, initialised) or (None, why not): no driver is no error. Call `nvmlShutdown` at the end."""
    try:
        import pynvml
    except ImportError:
        return None, "no NVIDIA devices looked for: nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"no NVIDIA driver: {error}"
    return pynvml, ""


def driver(nvml: Any) -> str:
    """Version of the driver."""
    return _text(nvml.nvmlSystemGetDriverVersion())


def device_by_uuid(nvml: Any, uuid: str, pci: Path = _PCI) -> NvmlDevice:
    """The device with this UUID (torch numbers devices as CUDA_VISIBLE_DEVICES says, NVML by PCI bus)."""
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    bus = _bus(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return NvmlDevice(
        name=_text(nvml.nvmlDeviceGetName(handle)), uuid=uuid, bus=bus, total_bytes=int(memory.total),
        free_bytes=int(memory.free), capability=f"{major}.{minor}", wire=wire(nvml, uuid), nvlinks=_nvlinks(nvml, handle),
        numa_node=_numa_node(pci, bus),
    )  # fmt: skip


def wire(nvml: Any, uuid: str) -> Wire | None:
    """Generation and width now; idle devices fall back to generation 1, so ask while they copy."""
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    found: list[Any] = [
        _asked(nvml, query, handle)
        for query in (
            nvml.nvmlDeviceGetCurrPcieLinkGeneration, nvml.nvmlDeviceGetCurrPcieLinkWidth,
            nvml.nvmlDeviceGetMaxPcieLinkGeneration, nvml.nvmlDeviceGetMaxPcieLinkWidth,
        )
    ]  # fmt: skip
    return None if None in found else Wire(*found)


def joined(a: NvmlDevice, b: NvmlDevice) -> int:
    """NVLinks between two devices: direct ones, or the fewer of both where they meet at a switch."""
    return a.nvlinks.get(b.bus, 0) or min(a.nvlinks.get("switch", 0), b.nvlinks.get("switch", 0))


def _nvlinks(nvml: Any, handle: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = _asked(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:  # no NVLink, or no more of them
            break
        if state != nvml.NVML_FEATURE_ENABLED:
            continue
        kind = _asked(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        remote = _asked(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        switch = kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        end = "switch" if switch else "unknown" if remote is None else _bus(_text(remote.busId))
        found[end] = found.get(end, 0) + 1
    return found


def _asked(nvml: Any, query: Any, *arguments: Any) -> Any | None:
    """The answer; None where this device or driver has none to give."""
    try:
        return query(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument, nvml.NVMLError_FunctionNotFound):
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _bus(text: str) -> str:
    """`00000000:1B:00.0` -> `0000:1b:00.0`, as the kernel writes it."""
    domain, _, rest = text.lower().rpartition(":")[0].partition(":")
    return f"{int(domain, 16):04x}:{rest}:{text.lower().rpartition(':')[2]}"


def _numa_node(pci: Path, bus: str) -> int | None:
    file = pci / bus / "numa_node"
    text = file.read_text().strip() if file.is_file() else "-1"
    return int(text) if int(text) >= 0 else None
