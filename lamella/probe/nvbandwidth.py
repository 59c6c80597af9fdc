"""NVIDIA's `nvbandwidth`, where it is installed: its figures stand beside ours, never in their place."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

TOOL = "nvbandwidth"
TESTS = ("host_to_device_memcpy_ce", "device_to_host_memcpy_ce")


def measure(limit_s: float) -> tuple[dict[str, float], str]:
    """(GB/s by test and device, "") or ({}, why nothing)."""
    path = shutil.which(TOOL)
    if path is None:
        return {}, ""
    try:
        done = subprocess.run([path, "-j", "-t", *TESTS], capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {}, f"{TOOL}: no end within {limit_s:g} s"
    if done.returncode != 0:
        return {}, f"{TOOL}: exit code {done.returncode}"
    try:
        return parse(done.stdout), ""
    except (ValueError, KeyError, TypeError) as error:
        return {}, f"{TOOL}: its answer is not understood: {type(error).__name__} {error}"


def parse(text: str) -> dict[str, float]:
    """`{"host_to_device_memcpy_ce 0": 55.6, ...}` from its JSON (one row and a column a device)."""
    cases: list[dict[str, Any]] = json.loads(text[text.index("{") :])[TOOL]["testcases"]
    found: dict[str, float] = {}
    for case in cases:
        if case["name"] in TESTS and "bandwidth_matrix" in case:
            for device, value in enumerate(case["bandwidth_matrix"][0]):
                if value != "N/A":
                    found[f"{case['name']} {device}"] = float(value)
    return found
