"""Memory of this process and this machine, as the kernel counts it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far, in bytes.

    On Linux from `VmHWM`: `ru_maxrss` of a child starts at what its parent held when it forked.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    """Resident set of this process now, in bytes."""
    return int(psutil.Process().memory_info().rss)


def memory_limit_bytes() -> int:
    """RAM this process may use: the smaller of the host's total and its cgroup limit, in bytes."""
    limits = [int(psutil.virtual_memory().total)]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        file = Path(name)
        if file.is_file():
            text = file.read_text().strip()
            if text.isdigit():
                limits.append(int(text))
    return min(limits)
