"""Memory of a process that has imported what training imports, before it opens anything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from lamella.hardware.allocator import TUNABLES, wants_restart

_CODE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from lamella.hardware.memory import rss_bytes
print(rss_bytes())
"""
_VARIABLE = "GLIBC_TUNABLES"


def import_bytes(modules: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """(resident set of a process that imported `modules`, started as the command starts itself; or None, and why)."""
    environment = dict(os.environ)
    if wants_restart(environment):
        environment[_VARIABLE] = TUNABLES
    command = [sys.executable, "-c", _CODE, *modules]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return None, f"memory of imports: no end within {limit_s:g} s"
    if done.returncode != 0:
        return None, f"memory of imports: exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    return int(done.stdout), ""
