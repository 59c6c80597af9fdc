"""Memory of imports in a process of its own, and NVIDIA's tool."""

import json
import stat

import pytest

from lamella.probe import nvbandwidth
from lamella.probe.imports import import_bytes


def test_what_more_imports_take():
    little, why = import_bytes(["json"], 60)
    assert why == "" and 5e6 < little < 200e6
    more, why = import_bytes(["json", "numpy"], 60)
    assert why == "" and more > little + 5e6


def test_imports_that_fail_or_do_not_end_are_a_reason():
    nbytes, why = import_bytes(["no_such_module"], 60)
    assert nbytes is None and "No module named 'no_such_module'" in why
    nbytes, why = import_bytes(["json"], 0.001)
    assert nbytes is None and why == "memory of imports: no end within 0.001 s"


ANSWER = {
    "nvbandwidth": {
        "git_version": "v0.8",
        "testcases": [
            {"name": "host_to_device_memcpy_ce", "status": "Passed", "bandwidth_matrix": [["55.63", "54.9"]]},
            {"name": "device_to_host_memcpy_ce", "status": "Passed", "bandwidth_matrix": [["N/A", "50.1"]]},
            {"name": "host_to_device_memcpy_sm", "status": "Passed", "bandwidth_matrix": [["1", "2"]]},
        ],
    }
}


def test_its_answer():
    assert nvbandwidth.parse("nvbandwidth Version: v0.8\n" + json.dumps(ANSWER)) == {
        "host_to_device_memcpy_ce 0": 55.63, "host_to_device_memcpy_ce 1": 54.9, "device_to_host_memcpy_ce 1": 50.1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (f"echo '{json.dumps(ANSWER)}'", ""),
        ("echo nothing", "nvbandwidth: its answer is not understood"),
        ("exit 3", "nvbandwidth: exit code 3"),
    ],
)
def test_the_tool_is_used_where_it_is_there(script, told, tmp_path, monkeypatch):
    tool = tmp_path / "nvbandwidth"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert nvbandwidth.measure(10) == ({}, "")  # not there: nothing to say
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    found, why = nvbandwidth.measure(10)
    assert bool(found) == (told == "") and why.startswith(told)
