"""What `bench.plan` makes of plans and runs: it tells a systematic error from noise; and one case run for real."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench.plan import CASES, MODELS, summary

ROOT = Path(__file__).parents[2]


def lines(step, memory):
    return [{"step_ratio": s, "memory_ratio": [m]} for s, m in zip(step, memory, strict=True)]


def test_noise_is_no_systematic_error_and_a_shift_is():
    rng = random.Random(0)
    noisy = [math.exp(rng.gauss(0, 0.15)) for _ in range(16)]
    found = summary(lines(noisy, [1.0] * 16))
    assert not found["step"]["systematic"]
    assert found["step"]["within_bar"] < 16
    shifted = [1.3 * x for x in noisy]
    assert summary(lines(shifted, [1.0] * 16))["step"]["systematic"]
    assert summary(lines(noisy, [1.08] * 16))["memory"]["systematic"]
    assert summary(lines([1.0] * 15 + [3.0], [1.0] * 16))["step"]["worst"] == 3.0


def test_at_least_twelve_configurations_of_every_kind():
    assert len(CASES) >= 12
    assert {case.model.split()[0] for case in CASES} == {"dense", "moe"}
    assert {len(case.devices) for case in CASES} == {0, 2, 3}
    assert any("memory.budget" in case.run for case in CASES)
    assert any(max(case.lengths) > 4000 for case in CASES)
    assert any(max(case.lengths) < 128 for case in CASES)
    assert any("lora.targets" not in case.run for case in CASES)
    assert all(case.model in MODELS for case in CASES)


@pytest.mark.slow
def test_memory_of_real_runs_has_no_systematic_error(tmp_path):
    """Time is the machine's affair here; peak memory is not."""
    ratios = []
    for name in ("dense, attention", "moe, experts too", "moe, long rows", "dense wide, streamed"):
        command = [sys.executable, "-m", "bench.plan", "--case", name, "--folder", str(tmp_path), "--steps", "4"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        ratios += [r for line in done.stdout.splitlines()[:-1] for r in json.loads(line)["memory_ratio"]]
    assert len(ratios) >= 4
    assert abs(sum(map(math.log, ratios)) / len(ratios)) < 0.05
