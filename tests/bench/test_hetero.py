"""`bench.hetero`: its sums on made-up runs, and the whole way with a tiny model."""

import json
import subprocess
import sys

import pytest

from bench import hetero


def run_of(tokens, compute_s, step_s, steps=20):
    """Lines of a run in which every step is the same."""
    devices = [
        {"tokens": t, "compute_s": c, "busy_s": c, "step_s": step_s} for t, c in zip(tokens, compute_s, strict=True)
    ]
    return [{"step_s": step_s, "tokens": sum(tokens), "loss": 1.0, "devices": devices}] * steps


def runs(even, found):
    return lambda side: even if side.name.startswith("even") else found


def test_a_perfect_deal_is_at_the_limit():
    even = run_of([50, 50], [0.5, 1.25], 1.25)
    found = run_of([1000, 400], [10.0, 10.0], 10.0)
    line = hetero.beside_even("2", (1.0, 0.4), {"over_ideal": 1.1, "idle": 0.06}, runs(even, found))
    assert line["limit"] == pytest.approx(1 / 1.4 / 1.25, abs=1e-4)
    assert line["over_ideal"] == pytest.approx(1.0)
    assert line["speeds_in_even"] == [1.0, 0.4]
    assert line["idle"] == [0.0, 0.0]
    assert line["ok"]


def test_an_idle_device_misses_the_bar():
    even = run_of([50, 50], [0.5, 1.25], 1.25)
    found = run_of([60, 40], [0.6, 1.0], 1.0)
    line = hetero.beside_even("2", (1.0, 0.4), {"share_of_even": 0.9, "idle": 0.06}, runs(even, found))
    assert line["idle"] == [0.4, 0.0]
    assert not line["ok"]


def test_steps_until_balance_are_counted_from_the_slowing():
    quick, slow = run_of([50, 50], [1.0, 1.0], 1.0, 1), run_of([50, 50], [1.0, 2.0], 2.0, 1)
    line = hetero.slowed(lambda side: [*quick * 8, *slow * 3, *quick * 9], at=8)
    assert (line["steps"], line["ok"]) == (3, True)
    line = hetero.slowed(lambda side: [*quick * 8, *slow * 12], at=8)
    assert (line["steps"], line["ok"]) == (None, False)


@pytest.mark.slow
@pytest.mark.distributed
def test_tiny_runs_go_the_whole_way():
    command = [sys.executable, "-m", "bench.hetero", "--tiny", "--steps", "12"]
    done = subprocess.run(command, cwd=hetero.ROOT, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(hetero.CASES)
    for line in lines:
        if "loss" in line:
            assert line["loss"][0] == pytest.approx(line["loss"][1], rel=1e-2)
