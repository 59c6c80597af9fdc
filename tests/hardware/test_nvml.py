"""What is made of NVML's answers, with a double that answers as a machine of four devices would."""

from types import SimpleNamespace

import pytest

from lamella.hardware import nvml as driver
from lamella.hardware.nvml import Wire, device_by_uuid, joined, wire


class Double:
    """Two modules on an NVSwitch, a pair of cards with a bridge, and nothing else that NVML offers."""

    NVML_NVLINK_MAX_LINKS = 18
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801 - NVML's name
        pass

    class NVMLError_InvalidArgument(NVMLError):  # noqa: N801
        pass

    class NVMLError_FunctionNotFound(NVMLError):  # noqa: N801
        pass

    def __init__(self):
        self.names = {"GPU-s0": b"NVIDIA H100 80GB HBM3", "GPU-s1": "NVIDIA H100 80GB HBM3", "GPU-c2": "NVIDIA RTX A6000",
                      "GPU-c3": "NVIDIA RTX A6000", "GPU-t4": "Tesla T4"}  # fmt: skip
        self.buses = {uuid: f"00000000:{0x1B + k:02X}:00.0" for k, uuid in enumerate(self.names)}
        self.asked = []

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in self.names:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return b"570.172.08"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(total=80 << 30, free=79 << 30, used=1 << 30)

    def nvmlDeviceGetPciInfo(self, handle):  # noqa: N802
        return SimpleNamespace(busId=self.buses[handle])

    def nvmlDeviceGetCudaComputeCapability(self, handle):  # noqa: N802
        return (9, 0) if handle.startswith("GPU-s") else (8, 6)

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return self.names[handle]

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle):  # noqa: N802
        if handle == "GPU-t4":
            raise self.NVMLError_NotSupported
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):  # noqa: N802
        return 8

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle):  # noqa: N802
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):  # noqa: N802
        return 16

    def nvmlDeviceGetNvLinkState(self, handle, link):  # noqa: N802
        self.asked.append((handle, link))
        most = {"GPU-s0": 18, "GPU-s1": 18, "GPU-c2": 4, "GPU-c3": 4}.get(handle, 0)
        if link >= most:
            raise self.NVMLError_InvalidArgument if most else self.NVMLError_NotSupported
        return 0 if (handle, link) == ("GPU-s1", 3) else 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):  # noqa: N802
        if handle.startswith("GPU-c"):
            raise self.NVMLError_NotSupported
        return 2

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):  # noqa: N802
        other = {"GPU-c2": "GPU-c3", "GPU-c3": "GPU-c2"}[handle] if handle.startswith("GPU-c") else handle
        return SimpleNamespace(busId=self.buses[other].encode())


@pytest.fixture
def nvml():
    return Double()


def test_a_device_with_its_links(nvml, tmp_path):
    node = tmp_path / "0000:1b:00.0"
    node.mkdir()
    (node / "numa_node").write_text("1\n")
    device = device_by_uuid(nvml, "GPU-s0", tmp_path)
    assert (device.name, device.bus, device.capability) == ("NVIDIA H100 80GB HBM3", "0000:1b:00.0", "9.0")
    assert (device.total_bytes, device.free_bytes, device.numa_node) == (80 << 30, 79 << 30, 1)
    assert device.nvlinks == {"switch": 18}
    assert device.wire == Wire(4, 8, 5, 16) and str(device.wire) == "4x8 of 5x16"
    assert driver.driver(nvml) == "570.172.08"


def test_nvlinks_between_pairs(nvml, tmp_path):
    s0, s1, c2, c3, t4 = (device_by_uuid(nvml, uuid, tmp_path) for uuid in nvml.names)
    assert c2.nvlinks == {"0000:1e:00.0": 4}
    assert joined(c2, c3) == joined(c3, c2) == 4
    assert joined(s0, s1) == 17  # one link of s1 is off
    assert joined(s0, c2) == joined(c2, t4) == 0
    assert t4.nvlinks == {} and t4.wire is None and t4.numa_node is None
    assert [link for handle, link in nvml.asked if handle == "GPU-t4"] == [0]  # not eighteen times


def test_a_link_as_it_is_now_and_full_ones_are_short(nvml):
    assert wire(nvml, "GPU-c2") == Wire(4, 8, 5, 16)
    assert str(Wire(5, 16, 5, 16)) == "5x16"


def test_an_unknown_device_is_the_librarys_error(nvml):
    with pytest.raises(Double.NVMLError):
        device_by_uuid(nvml, "GPU-none")


def test_no_driver_is_a_reason_and_no_error():
    library, why = driver.load()
    if library is not None:
        library.nvmlShutdown()
        pytest.skip("there is a driver here")
    assert why.startswith("no NVIDIA driver: ")
