"""Measuring real CUDA devices: run where there is one (`pytest -m gpu`)."""

import pytest
import torch

from lamella.hardware.machines import read_machine
from lamella.probe.cuda import measure_gpus
from lamella.probe.run import Plan, measure_machine
from lamella.probe.timing import Effort

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_devices_and_links():
    count = torch.cuda.device_count()
    told = []
    found = measure_gpus(list(range(count)), True, told.append)
    assert len(found.devices) == len(found.host_links) == count
    assert len(found.peer_links) == count * (count - 1) // 2
    for device, link in zip(found.devices, found.host_links, strict=True):
        assert 0 < device.free_bytes <= device.memory_bytes
        assert device.matmul_flops_per_s > 1e12 and device.memory_bytes_per_s > 5e10
        assert 0.05 < device.dequantise_bytes_per_s / device.memory_bytes_per_s < 1.2
        assert 5e8 < link.to_device_bytes_per_s < 1e12 and 5e8 < link.from_device_bytes_per_s < 1e12
        assert link.pageable_bytes_per_s < 2 * link.to_device_bytes_per_s and 0 < link.latency_s < 1e-2
        assert {"capability", "uuid"} <= set(device.details)


def test_a_machine_with_both(tmp_path):
    plan = Plan(Effort(1, 0.001), 16 << 20, 0.5, children=False, quick=True, parts=1)
    machine = measure_machine(plan, tmp_path, which="all")
    assert [d.kind for d in machine.devices] == ["cuda"] * torch.cuda.device_count() + ["cpu"]
    (tmp_path / "machine.json").write_text(machine.model_dump_json())
    assert read_machine(tmp_path / "machine.json") == machine
