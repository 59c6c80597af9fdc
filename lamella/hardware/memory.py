"""Memory of this process and this machine, as the kernel counts it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil

from lamella.hardware.limit import CGROUPS, own_cgroups


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
    """RAM this process may use: the smallest of the host's total and the limits of its cgroups, in bytes."""
    limits = [int(psutil.virtual_memory().total)]
    for _, group in own_cgroups():
        for folder in (group, *group.parents):
            if not folder.is_relative_to(CGROUPS):
                break
            for name in ("memory.max", "memory.limit_in_bytes"):
                file = folder / name
                text = file.read_text().strip() if file.is_file() else ""
                if text.isdigit():
                    limits.append(int(text))
    return min(limits)
