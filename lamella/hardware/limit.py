"""A memory limit that the kernel enforces on a process: a cgroup where one can be made, else RLIMIT_DATA.

A process over its cgroup's limit is killed (its page cache is given back first); one over RLIMIT_DATA gets no more
memory from the kernel, which ends it with an error.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


class MemoryLimit:
    """A limit to put a child process under.

    Attributes:
        kind: "cgroup v1", "cgroup v2" or "RLIMIT_DATA".
    """

    def __init__(self, kind: str, limit_bytes: int, folder: Path | None = None) -> None:
        self.kind, self.limit_bytes, self.folder = kind, limit_bytes, folder

    def enter(self) -> None:
        """Put this process under the limit: to be called in the child, before it runs the job."""
        if self.folder is None:
            resource.setrlimit(resource.RLIMIT_DATA, (self.limit_bytes, self.limit_bytes))
        else:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int | None:
        """Most memory charged to the group so far, page cache included; None where the kernel does not say."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if self.folder is not None and (self.folder / name).is_file():
                return int((self.folder / name).read_text())
        return None


def own_cgroups() -> Iterator[tuple[str, Path]]:
    """(kind, folder) of this process's memory cgroup in each hierarchy that limits memory here."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield "cgroup v1", CGROUPS / "memory" / path.lstrip("/")
        elif not controllers:
            for root in (CGROUPS, CGROUPS / "unified"):
                if (root / "cgroup.controllers").is_file():
                    yield "cgroup v2", root / path.lstrip("/")


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[MemoryLimit]:
    """A limit of `limit_bytes`, undone at the end (the child must have ended)."""
    for kind, parent in own_cgroups():
        folder = parent / f"lamella-{os.getpid()}-{time.monotonic_ns()}"
        try:
            folder.mkdir()
        except OSError:
            continue  # not ours to make groups in
        file = folder / ("memory.limit_in_bytes" if kind == "cgroup v1" else "memory.max")
        if not file.is_file():  # v2 without the memory controller
            folder.rmdir()
            continue
        try:
            file.write_text(str(limit_bytes))
            yield MemoryLimit(kind, limit_bytes, folder)
        finally:
            _remove(folder)
        return
    yield MemoryLimit("RLIMIT_DATA", limit_bytes)


def _remove(folder: Path) -> None:
    for _ in range(50):  # the group is busy until the kernel has reaped its last process
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return
