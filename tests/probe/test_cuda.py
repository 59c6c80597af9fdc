"""Links of devices, with a double of CUDA that has a clock of its own: what is copied, in which order, and what is made of it."""

import pytest

from lamella.hardware.nvml import NvmlDevice, Wire
from lamella.probe.cuda import Described, copy_s, device_facts, host_links, peer_links

GB = 1e9
NBYTES = 100_000_000


class Double:
    """Copies take time only while they are waited for; those of one root share its rate."""

    def __init__(self, root_gb_s=40.0, slow_first=True):
        self.now, self.log, self.queued, self.seen = 0.0, [], [], set()
        self.root, self.slow_first = root_gb_s * GB, slow_first

    def describe(self, device):
        raise AssertionError("not asked here")

    def host(self, nbytes, pinned):
        return ("host", "pinned" if pinned else "pageable", nbytes)

    def device(self, device, nbytes):
        return ("device", device, nbytes)

    def copy(self, target, source, device):
        self.queued.append((target, source, device))
        self.log.append(("copy", source[:2], target[:2]))

    def wait(self, device):
        self.log.append(("wait", device))
        if not self.queued:
            return
        seconds = 0.0
        for copy in self.queued:
            seconds = max(seconds, self._seconds(copy))
        if sum(c[0][2] for c in self.queued) / self.root > seconds:
            seconds = sum(c[0][2] for c in self.queued) / self.root  # all at once: the root's rate
        self.now += seconds
        self.queued = []

    def _seconds(self, copy):
        target, source, _ = copy
        if source[0] == target[0] == "device":
            rate = 200.0 if {source[1], target[1]} == {0, 1} else 10.0 if source[1] < target[1] else 5.0
        elif "pageable" in (source[1], target[1]):
            rate = 6.0
        else:
            rate = 25.0 if target[0] == "device" else 20.0
        first = (source[:2], target[:2], target[2]) not in self.seen
        self.seen.add((source[:2], target[:2], target[2]))
        return target[2] / (rate * GB) * (10 if first and self.slow_first else 1) + 2e-6

    def can_peer(self, a, b):
        return {a, b} == {0, 1}

    def seconds(self):
        return self.now


def test_the_best_of_several_after_one_that_is_not_counted():
    cuda = Double(root_gb_s=1e6)
    looked = []
    seconds = copy_s(
        cuda, [(cuda.device(0, NBYTES), cuda.host(NBYTES, True), 0)], 3, lambda: looked.append(len(cuda.queued))
    )
    assert seconds == pytest.approx(NBYTES / (25 * GB) + 2e-6)  # the first, ten times slower, does not count
    assert looked == [1]  # asked while the copy is on its way
    assert [kind for kind, *_ in cuda.log] == ["wait", "copy", "wait"] * 4


def test_links_to_the_host_alone_and_all_at_once():
    cuda = Double()
    links, wires = host_links(cuda, [0, 1], NBYTES, 3, lambda d: Wire(4, 16, 4, 16) if d == 1 else None)
    assert [link.device for link in links] == [0, 1]
    for link in links:
        assert link.to_device_bytes_per_s == pytest.approx(25 * GB, rel=1e-3)
        assert link.from_device_bytes_per_s == pytest.approx(20 * GB, rel=1e-3)
        assert link.pageable_bytes_per_s == pytest.approx(6 * GB, rel=1e-3)
        assert link.to_device_together_bytes_per_s == pytest.approx(20 * GB, rel=1e-3)  # half of the root's 40
        assert link.from_device_together_bytes_per_s == pytest.approx(20 * GB, rel=1e-3)
        assert 1e-6 < link.latency_s < 3e-6
    assert wires == {1: Wire(4, 16, 4, 16)}


def test_one_device_has_nothing_to_share_with():
    (link,), _ = host_links(Double(), [0], NBYTES, 2, lambda d: None)
    assert link.to_device_together_bytes_per_s is None and link.from_device_together_bytes_per_s is None


def test_links_between_devices_take_the_slower_way_and_say_what_joins_them():
    known = {
        d: NvmlDevice("x", f"GPU-{d}", f"0000:0{d}:00.0", 1, 1, "9.0", None, {"switch": 18} if d < 2 else {})
        for d in range(3)
    }
    links = peer_links(Double(root_gb_s=1e6), [0, 1, 2], NBYTES, 2, known)
    assert [(link.a, link.b, link.kind) for link in links] == [(0, 1, "nvlink"), (0, 2, "host"), (1, 2, "host")]
    assert links[0].bytes_per_s == pytest.approx(200 * GB, rel=1e-2)
    assert links[1].bytes_per_s == pytest.approx(5 * GB, rel=1e-3)
    (link,) = peer_links(Double(root_gb_s=1e6), [0, 1], NBYTES, 1, {})
    assert link.kind == "pcie"  # nothing known of NVLink; they can write into each other
    assert [(link.a, link.b) for link in peer_links(Double(), [2, 0], NBYTES, 1, known)] == [
        (0, 1)
    ]  # places in the list


def test_a_device_as_runtime_and_driver_say():
    described = Described("NVIDIA A100-SXM4-80GB", "GPU-1", 80 << 30, 70 << 30, (8, 0))
    known = NvmlDevice("NVIDIA A100", "GPU-1", "0000:1b:00.0", 80 << 30, 70 << 30, "8.0", None, {"switch": 12}, 1)
    facts = device_facts(described, known, Wire(3, 16, 4, 16), "570.1")
    assert (facts.memory_bytes, facts.free_bytes, facts.dtype) == (80 << 30, 70 << 30, "bf16")
    assert facts.details == {
        "capability": "8.0", "uuid": "GPU-1", "bus": "0000:1b:00.0", "driver": "570.1", "numa_node": 1,
        "nvlinks": "12 to switch", "pcie": "3x16 of 4x16",
    }  # fmt: skip
    old = device_facts(Described("Tesla T4", "GPU-2", 15 << 30, 14 << 30, (7, 5)), None, None, "")
    assert old.dtype == "fp16" and old.details == {"capability": "7.5", "uuid": "GPU-2"}
