"""Exchanges among ranks: real ones over gloo, and what is made of what rank 0 wrote."""

import json

import pytest

from lamella.probe.collective import measure_collectives, parse


def test_findings_get_the_machines_numbers():
    lines = [
        {"op": "all_reduce", "nbytes": 4096, "seconds": 1e-4, "backend": "nccl"},
        {"op": "send", "nbytes": 4096, "seconds": 5e-5, "backend": "nccl"},
    ]
    summed, sent = parse(json.dumps(lines), [2, 3, 5])
    assert (summed.devices, summed.op, summed.seconds) == ((2, 3, 5), "all_reduce", 1e-4)
    assert (sent.devices, sent.op, sent.nbytes) == ((2, 3), "send", 4096)


@pytest.mark.distributed
def test_two_ranks_on_this_cpu(tmp_path):
    found, why = measure_collectives([0, 0], "cpu", (4096, 1 << 20), tmp_path, 100)
    assert why == ""
    assert [(c.op, c.nbytes) for c in found] == [
        ("all_reduce", 4096), ("send", 4096), ("all_reduce", 1 << 20), ("send", 1 << 20),
    ]  # fmt: skip
    assert all(c.devices == (0, 0) and c.backend == "gloo" and 0 < c.seconds < 1 for c in found)


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_end_badly_are_a_reason(tmp_path):
    found, why = measure_collectives([0, 0], "cpu", (1,), tmp_path, 100)  # less than one number
    assert found == [] and why.startswith("collectives: a rank ended with exit code 1")


@pytest.mark.distributed
def test_ranks_that_do_not_end_are_a_reason(tmp_path):
    found, why = measure_collectives([0, 0], "cpu", (4096,), tmp_path, 0.2)
    assert found == [] and why == "collectives: no end within 0.2 s"
