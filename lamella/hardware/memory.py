"""Memory of this process and this machine, as the kernel counts it."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Held:
    """Memory of a process with pages that others map too counted by parts (proportional set size), in bytes.

    Attributes:
        pss: of everything.
        private: pages that no other process maps.
        mapped: PSS of maps of files in one folder.
    """

    pss: int
    private: int
    mapped: int


def held_by(pid: int, folder: Path) -> Held:
    """What the kernel says of a process now (`/proc/PID/smaps`, Linux); `folder` says which maps to count in `mapped`."""
    pss = private = mapped = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="surrogateescape").splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # a map's first line: addresses, permissions, offset, device, inode, path
            inside = len(values) > 4 and Path(line.split(maxsplit=5)[5]).is_relative_to(folder)
        elif name == "Pss:":
            nbytes = int(values[0]) * 1024
            pss += nbytes
            mapped += nbytes if inside else 0
        elif name in ("Private_Clean:", "Private_Dirty:"):
            private += int(values[0]) * 1024
    return Held(pss, private, mapped)


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
