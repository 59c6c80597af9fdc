"""The real engine, streaming a MoE with dropout, in processes of its own: killed or stopped, it ends with the same bits."""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lamella.config import load_run_config
from lamella.forecast.peak import TUNED_HEAP
from lamella.hardware.allocator import wants_restart
from lamella.ranks.group import Ranks
from lamella.store.quantize import quantize_checkpoint
from lamella.train.assemble import assemble_parts
from tests import fixtures

ROOT = Path(__file__).parents[2]
ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """run.toml of 45 steps (60 rows, 4 a step, 3 epochs) under a budget that streams layers; `runs/whole` is done."""
    folder = tmp_path_factory.mktemp("killed")
    fixtures.write_checkpoint(folder / "hf", fixtures.moe_config(layers=4), tokenizer=fixtures.make_tokenizer())
    quantize_checkpoint(folder / "hf", folder / "store", threads=1)
    rows = [{**row, "id": 12 * k + row["id"]} for k in range(5) for row in fixtures.chat12()]
    fixtures.write_jsonl(folder / "rows.jsonl", rows)
    (folder / "run.toml").write_text(
        'store = "store"\nruns_dir = "runs"\n[data]\ntrain = ["rows.jsonl"]\n[lora]\nrank = 4\ndropout = 0.1\n'
        '[train]\nrows_per_step = 4\nepochs = 3\nschedule = "constant"\nwarmup_steps = 0\nlearning_rate = 0.01\n'
        '[memory]\nbudget = "1GB"\nrecompute = "always"\n[compute]\ndtype = "fp32"\nthreads = 1\n'
        "[checkpoint]\nevery_steps = 4\n"
    )
    text, budget = (folder / "run.toml").read_text(), streaming_budget(folder / "run.toml")
    (folder / "run.toml").write_text(text.replace("1GB", str(budget)))
    finish(folder, "name=whole")
    engine = json.loads((folder / "runs" / "whole" / "receipt.json").read_text())["engine"]
    assert (engine["layers_resident"], engine["layers_streamed"]) == (1, 3)
    return folder


def streaming_budget(file):
    """Room for a step, one layer that stays, and three that take turns in two slots."""
    parts = assemble_parts(load_run_config(file), Ranks.join(), False)
    residency, plan = parts.engine.walk.weights.residency, parts.engine.plan
    parts.engine.close()
    if wants_restart(os.environ):  # the command line will tune the heap
        plan = replace(plan, shares=TUNED_HEAP)
    sizes = residency.packed_bytes
    return plan.beyond_program_bytes - sizes + 3 * sizes // 4 + 64


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps(run_dir):
    return [(line["step"], line["rows_hash"], line["loss"], line["grad_norm"]) for line in lines(run_dir)]


def command(folder, *more):
    return [sys.executable, "-m", "lamella", "train", str(folder / "run.toml"), f"runs_dir={folder / 'runs'}", *more]


def finish(folder, *more):
    done = subprocess.run(command(folder, *more), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def same_as_whole(folder, name):
    a, b = folder / "runs" / "whole", folder / "runs" / name
    assert len(steps(b)) == 45
    assert steps(a) == steps(b)
    assert (a / ADAPTER).read_bytes() == (b / ADAPTER).read_bytes()
    assert json.loads((b / "receipt.json").read_text())["status"] == "ok"


def test_killed_at_random_moments_and_rerun(whole):
    rng, resumed = random.Random(11), 0
    metrics = whole / "runs" / "killed" / "metrics.jsonl"
    step_s = statistics.median(line["step_s"] for line in lines(whole / "runs" / "whole"))
    for least in (6, 17, 29):  # steps done, then a random moment of the next ones
        process = subprocess.Popen(command(whole, "name=killed"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   text=True)  # fmt: skip
        limit = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < limit:
            if metrics.exists() and metrics.read_text().count("\n") >= least:
                break
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 6 * step_s))
        alive = process.poll() is None
        process.kill()
        _, err = process.communicate()
        assert alive, f"it ended before it could be killed: {err}"
        resumed += "resuming" in err
    assert resumed == 2
    assert "resuming" in finish(whole, "name=killed")
    same_as_whole(whole, "killed")


@pytest.mark.parametrize("stop", [20, pytest.param(15, marks=pytest.mark.slow)])
def test_b35_stopped_and_resumed_in_a_new_process(whole, stop):
    name = f"stop{stop}"
    finish(whole, f"name={name}", f"train.steps={stop}")
    first = steps(whole / "runs" / name)
    assert len(first) == stop
    assert f"after step {stop}" in finish(whole, f"name={name}", "--resume")
    same_as_whole(whole, name)


def test_b35_every_epoch_has_other_rows_in_every_step(whole):
    hashes = [line["rows_hash"] for line in lines(whole / "runs" / "whole")]
    assert len(hashes) == len(set(hashes)) == 45
