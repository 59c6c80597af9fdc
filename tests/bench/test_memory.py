"""`bench.memory` end to end on a tiny model, and its fit of the heap's shares."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from bench.memory import CASES, MODELS, ROOT, SHARES, Case, best_shares
from lamella.store.quantize import quantize_checkpoint
from tests.fixtures import moe_config, write_checkpoint


def test_configurations_differ_and_fit_their_models():
    assert len({case.name for case in CASES}) == len(CASES) >= 8
    assert {case.model for case in CASES} == set(MODELS)
    assert {case.recompute for case in CASES} == {"never", "always"}
    assert any(case.budget_share for case in CASES)


def test_shares_are_those_that_made_the_leftovers():
    wanted = dict(zip(SHARES, (0.5, 0.2, 0.3, 0.1), strict=True))
    sizes = [
        [100.0, 20.0, 0.0, 7.0],
        [10.0, 300.0, 50.0, 0.0],
        [0.0, 0.0, 80.0, 90.0],
        [40.0, 5.0, 9.0, 300.0],
        [1.0, 2.0, 3.0, 40.0],
    ]
    seen = [(x, sum(s * v for s, v in zip(wanted.values(), x, strict=True)), 1000.0) for x in sizes]
    assert best_shares(seen) == pytest.approx(wanted)


@pytest.mark.parametrize("recompute", [pytest.param("never", marks=pytest.mark.slow), "always"])
def test_both_sides_run_in_processes_of_their_own(recompute, tmp_path):
    write_checkpoint(tmp_path / "hf", moe_config(layers=2, vocab_size=32000))
    quantize_checkpoint(tmp_path / "hf", tmp_path / "store", threads=1)
    case = Case("tiny", "moe", ((40, 30), (25,)), rank=4, recompute=recompute, dtype="fp32")
    found = {}
    for verb in ("predict", "measure"):
        job = {"verb": verb, "case": asdict(case), "store": str(tmp_path / "store"), "threads": 1, "steps": 2,
               "base_bytes": 0}  # fmt: skip
        done = subprocess.run([sys.executable, "-m", "bench.memory", "--side"], input=json.dumps(job), text=True,
                              capture_output=True, cwd=ROOT, check=True)  # fmt: skip
        found[verb] = json.loads(done.stdout.splitlines()[-1])
    assert found["predict"]["bytes"] == sum(found["predict"]["parts"].values())
    assert found["measure"]["bytes"] > found["measure"]["imports"]
    assert found["predict"]["bytes"] == pytest.approx(found["measure"]["bytes"], rel=0.25)
