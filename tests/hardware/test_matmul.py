import pytest
import torch

from lamella.hardware import matmul
from lamella.hardware.matmul import matmul_rate


def test_the_rate_is_measured_once_per_device_dtype_and_threads(monkeypatch):
    monkeypatch.setattr(matmul, "SIZE_CPU", 64)
    monkeypatch.setattr(matmul, "_measured", {})
    found = matmul_rate(torch.device("cpu"), torch.float32)
    assert matmul_rate(torch.device("cpu"), torch.float32) is found
    assert matmul_rate(torch.device("cpu"), torch.bfloat16) is not found
    assert (found.size, found.dtype, found.device, found.threads) == (64, "float32", "cpu", torch.get_num_threads())
    assert found.best >= found.median > 0


def test_the_rate_is_work_over_time(monkeypatch):
    monkeypatch.setattr(matmul, "SIZE_CPU", 16)
    monkeypatch.setattr(matmul, "_measured", {})
    monkeypatch.setattr(matmul, "_timed", lambda once: [4.0, 2.0, 8.0])
    found = matmul_rate(torch.device("cpu"), torch.float32)
    assert found.best == pytest.approx(2 * 16**3 / 2)
    assert found.median == pytest.approx(2 * 16**3 / 4)


def test_enough_runs_are_timed_after_one_that_is_not():
    runs = []
    times = matmul._timed(lambda: runs.append(1))
    assert len(runs) == len(times) + 1
    assert len(times) >= 3
