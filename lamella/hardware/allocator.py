"""How the C library's heap serves tensors.

torch takes each tensor on a CPU from the C library. glibc's defaults do badly there:

- Blocks beyond a threshold come from the kernel anew each time and go back when freed, so a step touches tens of
  thousands of fresh pages. Taking all blocks from the heap, and never giving its top back, leaves a few per step.
- Small blocks set free stay in caches (per-thread bins, fast bins) where they cannot grow together with a larger free
  neighbour. An aligned block needs a little more room than its own size, so the hole it left serves it again only when
  it has grown together with its neighbours; else the heap grows. Without those caches it stays near what is in use.
- Small pages: asking for huge ones (where the kernel gives them on request) leaves a fifth of the first touches, and
  fewer misses when addresses are looked up.

The caches' setting is read once, when a process starts (`GLIBC_TUNABLES`), so the command starts itself again with it.
Nothing is done where the C library is another one, or where the user has set how it is to work.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping

TUNABLES = (
    "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0:glibc.malloc.mmap_max=0:"
    f"glibc.malloc.trim_threshold={1 << 62}:glibc.malloc.hugetlb=1"
)
_NAME = "GLIBC_TUNABLES"
_OTHERS = ("MALLOC_", "LD_PRELOAD")


def wants_restart(env: Mapping[str, str]) -> bool:
    """Whether a process with this environment runs on glibc's defaults, and nobody has chosen otherwise."""
    chosen = _NAME in env or any(name.startswith(_OTHERS) for name in env)
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc" and not chosen


def is_tuned(env: Mapping[str, str] | None = None) -> bool:
    """Whether this process was started with our settings."""
    return (os.environ if env is None else env).get(_NAME) == TUNABLES


def restart_tuned() -> None:
    """Start this Python command again with `TUNABLES` set, in the same process; returns when there is no need."""
    if wants_restart(os.environ) and sys.orig_argv and sys.executable:
        os.environ[_NAME] = TUNABLES
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
