"""Runs that follow a plan, and plans that runs make for themselves."""

import json
import os

import pytest
from typer.testing import CliRunner

from lamella.cli import app
from lamella.errors import UserError
from lamella.forecast.document import now, read_plan, write_plan
from lamella.forecast.rough import rough_machine
from lamella.hardware.memory import memory_limit_bytes

runner = CliRunner()


@pytest.fixture
def run_toml(stores, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.toml"
    file.write_text(
        f'store = "{stores / "dense"}"\nruns_dir = "runs"\n[data]\ntrain = ["{stores / "rows.jsonl"}"]\n'
        '[train]\nrows_per_step = 4\nsteps = 2\n[lora]\nrank = 4\n[compute]\ndtype = "fp32"\nthreads = 1\n'
    )
    return file


@pytest.fixture
def machine_json(tmp_path):
    machine = rough_machine(
        ("cpu",), (1e11,), (memory_limit_bytes(),), memory_limit_bytes(), os.cpu_count() or 1, now()
    )
    devices = tuple(device.model_copy(update={"dtype": "fp32"}) for device in machine.devices)
    machine = machine.model_copy(update={"notes": (), "devices": devices})
    (tmp_path / "machine.json").write_text(machine.model_dump_json())
    return tmp_path / "machine.json"


def test_a_run_without_a_plan_makes_one_and_keeps_it(run_toml):
    result = runner.invoke(app, ["train", str(run_toml)])
    assert result.exit_code == 0, result.output
    assert "plan: fits: " in result.stderr and "lamella probe" in result.stderr
    plan = read_plan(run_toml.parent / "runs" / "run" / "plan.json")
    assert plan.fits and plan.rows.how == "counted" and plan.rows.rows == 12
    assert plan.asked["lora"] == {"rank": 4} and plan.serving is None


def test_machine_json_of_the_working_folder_or_beside_the_file_is_used(
    run_toml, machine_json, monkeypatch, tmp_path_factory
):
    result = runner.invoke(app, ["train", str(run_toml)])
    assert "plan: fits: " in result.stderr and "lamella probe" not in result.stderr
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    again = runner.invoke(app, ["train", str(run_toml), "--fresh"])
    assert again.exit_code == 0 and "lamella probe" not in again.stderr


def test_a_plan_that_cannot_be_made_stops_no_run(run_toml, machine_json):
    machine_json.write_text("{}")
    result = runner.invoke(app, ["train", str(run_toml)])
    assert result.exit_code == 0, result.output
    assert result.stderr.count("no plan: ") == 1 and not (run_toml.parent / "runs" / "run" / "plan.json").exists()


def test_a_plan_is_trained_from_and_stays_with_the_run(run_toml, machine_json):
    saved = run_toml.parent / "plan.json"
    made = runner.invoke(app, ["plan", str(run_toml), "--save", str(saved)])
    assert made.exit_code == 0, made.output
    run_toml.unlink()
    result = runner.invoke(app, ["train", str(saved), "name=planned", "train.learning_rate=1e-3"])
    assert result.exit_code == 0, result.output
    folder = run_toml.parent / "runs" / "planned"
    assert read_plan(folder / "plan.json") == read_plan(saved)
    receipt = json.loads((folder / "receipt.json").read_text())
    assert receipt["status"] == "ok"
    assert receipt["config"]["memory"]["recompute"] == read_plan(saved).settled["memory"]["recompute"]
    refused = runner.invoke(app, ["train", str(saved), "lora.rank=8"])
    assert isinstance(refused.exception, UserError) and "lora.rank: 4 in the plan, 8 asked" in refused.exception.what


def test_a_plan_for_gpus_that_are_not_here(run_toml, machine_json):
    saved = run_toml.parent / "plan.json"
    runner.invoke(app, ["plan", str(run_toml), "--save", str(saved)])
    plan = read_plan(saved)
    gpus = [{"device": "cuda"}] * 64
    write_plan(saved, plan.model_copy(update={"settled": {**plan.settled, "devices": gpus}}))
    refused = runner.invoke(app, ["train", str(saved)])
    assert isinstance(refused.exception, UserError)
    assert "the plan is for 64 CUDA devices" in refused.exception.what and refused.exception.exit_code == 2


def test_a_plan_for_more_ranks_or_cores_than_there_are(run_toml, machine_json, monkeypatch):
    saved = run_toml.parent / "plan.json"
    runner.invoke(app, ["plan", str(run_toml), "--save", str(saved)])
    plan = read_plan(saved)
    write_plan(
        saved, plan.model_copy(update={"settled": {**plan.settled, "compute": {"dtype": "fp32", "threads": 4096}}})
    )
    refused = runner.invoke(app, ["train", str(saved)])
    assert "the plan is for 4096 CPU threads" in str(refused.exception)
    hosts = tuple(host.model_copy(update={"cores": 4096}) for host in plan.machine.hosts)
    ranks = {**plan.settled, "devices": [{"device": "cpu", "threads": 1}] * 4096}
    elsewhere = plan.model_copy(update={"settled": ranks, "machine": plan.machine.model_copy(update={"hosts": hosts})})
    write_plan(saved, elsewhere)
    assert "the plan is for 4096 CPU threads" in str(runner.invoke(app, ["train", str(saved)]).exception)
    write_plan(saved, plan)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "and 3 were started" in str(runner.invoke(app, ["train", str(saved)]).exception)


def test_a_run_goes_on_with_its_plan(run_toml):
    runner.invoke(app, ["train", str(run_toml)])
    kept = run_toml.parent / "runs" / "run" / "plan.json"
    result = runner.invoke(app, ["train", str(run_toml), "train.steps=3", "--resume"])
    assert result.exit_code == 0, result.output
    assert read_plan(kept).figures["steps"] == 3


def test_a_run_beside_its_plan_and_a_plan_after_it(run_toml, machine_json):
    """`--compare` reads what the run left; what past runs have shown is taken for the next plan."""
    assert runner.invoke(app, ["train", str(run_toml), "train.steps=5"]).exit_code == 0
    folder = run_toml.parent / "runs" / "run"
    result = runner.invoke(app, ["plan", "--compare", str(folder)])
    assert result.exit_code == 0 and "planned and measured (medians of 3 steps)" in result.stdout
    tree = json.loads(runner.invoke(app, ["plan", "--compare", str(folder), "--json"]).stdout)
    assert tree["steps"] == 3
    plain = json.loads(runner.invoke(app, ["plan", str(run_toml), "--json"]).stdout)
    taken = runner.invoke(app, ["plan", "--compare", str(folder), "--calibrate"])
    assert taken.exit_code == 0 and machine_json.with_name("calibration.json").is_file()
    again = json.loads(runner.invoke(app, ["plan", str(run_toml), "--json"]).stdout)
    assert again["figures"]["step_s"] != plain["figures"]["step_s"]
    assert any("calibrat" in note for note in again["notes"]) and not any("calibrat" in note for note in plain["notes"])
