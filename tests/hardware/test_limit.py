"""The kernel's memory limit really ends a process that exceeds it, and lets one within it live."""

import subprocess
import sys

import pytest

from lamella.hardware.limit import MemoryLimit, memory_limit
from lamella.hardware.memory import memory_limit_bytes

TAKE = "import sys; x = bytearray(int(sys.argv[1])); x[::4096] = b'x' * len(x[::4096]); print(len(x))"
LIMIT = 256 << 20


def take(limit, nbytes):
    command = [sys.executable, "-c", TAKE, str(nbytes)]
    return subprocess.run(command, preexec_fn=limit.enter, capture_output=True, text=True, check=False)


def test_the_limit_here():
    with memory_limit(LIMIT) as limit:
        within = take(limit, LIMIT // 4)
        assert (within.returncode, within.stdout.strip()) == (0, str(LIMIT // 4)), within.stderr
        beyond = take(limit, 2 * LIMIT)
        assert beyond.returncode != 0
        assert beyond.stdout == ""
        folder = limit.folder
        if folder is not None:
            assert LIMIT // 4 < limit.peak_bytes() <= LIMIT
    assert folder is None or not folder.exists()


def test_rlimit_data():
    limit = MemoryLimit("RLIMIT_DATA", LIMIT)
    assert take(limit, LIMIT // 4).returncode == 0
    beyond = take(limit, 2 * LIMIT)
    assert beyond.returncode != 0
    assert "MemoryError" in beyond.stderr


def test_a_process_under_a_group_knows_its_limit():
    with memory_limit(LIMIT) as limit:
        if limit.folder is None:
            pytest.skip("no cgroup can be made here")
        code = "from lamella.hardware.memory import memory_limit_bytes; print(memory_limit_bytes())"
        done = subprocess.run([sys.executable, "-c", code], preexec_fn=limit.enter, capture_output=True, text=True,
                              check=True)  # fmt: skip
        assert int(done.stdout) == LIMIT
    assert memory_limit_bytes() > LIMIT
