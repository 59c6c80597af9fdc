"""What the kernel says of this computer, and of one under a control group."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from lamella.hardware.host import cpu_name, cpu_quota, host_facts, numa_nodes
from lamella.hardware.limit import memory_limit

LIMIT = 512 << 20
FACTS = """
import json, psutil
from dataclasses import asdict
from lamella.hardware.host import host_facts
held = bytearray(200 << 20)
held[::4096] = b"x" * len(held[::4096])
print(json.dumps(asdict(host_facts())))
"""


def test_this_host():
    facts = host_facts()
    assert facts.cores == len(os.sched_getaffinity(0)) <= facts.cores_of_machine
    assert facts.ram_bytes == psutil.virtual_memory().total
    assert 0 < facts.free_bytes <= facts.ram_bytes and 0 < facts.limit_bytes <= facts.ram_bytes
    assert facts.numa_nodes >= 1 and facts.cpu and facts.name


def test_b67_a_control_groups_limit_is_read_and_not_the_hosts_ram():
    with memory_limit(LIMIT) as limit:
        if limit.folder is None:
            pytest.skip("no cgroup can be made here")
        done = subprocess.run(
            [sys.executable, "-c", FACTS], preexec_fn=limit.enter, capture_output=True, text=True, check=True
        )
    facts = json.loads(done.stdout)
    assert facts["limit_bytes"] == LIMIT < facts["ram_bytes"]
    assert 0 < facts["free_bytes"] <= LIMIT - (200 << 20)


def test_names_of_processors(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: AMD EPYC  9654   96-Core Processor\nprocessor : 1\n")
    assert cpu_name(info) == "AMD EPYC 9654 96-Core Processor"
    info.write_text("processor : 0\nBogoMIPS : 50\n")
    assert cpu_name(info) and cpu_name(tmp_path / "none")


def test_numa_nodes(tmp_path):
    for node, cores in ((0, "0-31"), (1, "32-63"), (2, "")):  # the last has memory alone
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    assert numa_nodes(tmp_path) == {0: "0-31", 1: "32-63"}
    assert list(numa_nodes(tmp_path / "none")) == [0]


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        (
            "0::/box/run\n",
            {"box/cpu.max": "150000 100000", "box/run/cpu.max": "max 100000", "cpu.max": "max 100000"},
            1.5,
        ),
        ("0::/box/run\n", {"box/cpu.max": "400000 100000", "box/run/cpu.max": "50000 100000"}, 0.5),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        (
            "4:cpu,cpuacct:/docker/a\n3:memory:/docker/a\n",
            {"cpu,cpuacct/docker/a/cpu.cfs_quota_us": "250000", "cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        ("4:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cpu_time_that_control_groups_grant(groups, files, cores, tmp_path):
    (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        (tmp_path / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / name).write_text(f"{text}\n")
    assert cpu_quota(tmp_path / "sys", tmp_path / "own") == cores
