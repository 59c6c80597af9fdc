"""Local ranks through the real command: training, exit codes, a killed rank, Ctrl-C."""

import json
import signal
import time

import pytest
from typer.testing import CliRunner

from lamella.cli import app
from lamella.config import build_run_config
from lamella.errors import UserError
from lamella.launch.local import local_ranks
from tests.launch.conftest import finish, ranks_of

pytestmark = pytest.mark.distributed

MANY = ("train.steps=100000", "checkpoint.keep=1")


def test_how_many_ranks():
    def count(**sections):
        return local_ranks(build_run_config({"store": "s", **sections}))

    assert count() == 1
    assert count(devices=[{"device": "cpu"}]) == 1
    assert count(devices=[{}, {}, {}]) == 3
    assert count(compute={"device": "cuda:1"}) == 1


def test_a_missing_store_is_found_before_ranks_are_started(command):
    result = CliRunner().invoke(app, ["train", str(command.folder / "run.toml"), "store=nowhere"])
    assert isinstance(result.exception, UserError)
    assert "nowhere" in str(result.exception)


def test_ranks_and_devices_must_be_as_many(command, monkeypatch):
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["train", str(command.folder / "run.toml")])
    assert isinstance(result.exception, UserError)
    assert "2 entries in [[devices]], but 3 ranks" in str(result.exception)


def test_dry_run_shows_devices_and_starts_nothing(command):
    result = CliRunner().invoke(app, ["train", str(command.folder / "run.toml"), "--dry-run"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout[: result.stdout.index("\n}") + 2])
    assert [entry["threads"] for entry in shown["devices"]] == [1, 1]
    assert "3 steps" in result.stdout
    rows = [line.replace("│", " ").split() for line in result.stdout.splitlines()]
    assert ["0", "cpu", "1", "none", "1"] in rows
    assert ["1", "cpu", "1", "none", "1"] in rows


def test_two_ranks_train_and_rank_0_speaks(command):
    code, out, err = command.run()
    assert code == 0, err
    assert out.count("receipt of run: ok") == 1
    assert err.count("rows: 12 read, 12 kept, 0 dropped") == 1
    assert command.steps() == [1, 2, 3]
    assert json.loads((command.run_dir / "receipt.json").read_text())["status"] == "ok"


def test_bad_input_found_by_the_ranks_ends_them_once(command):
    """Rows are read by the ranks alone; no restart would make them better."""
    (command.folder / "bad.jsonl").write_text('{"messages": 3}\n')
    code, out, err = command.run(f'data.train=["{command.folder / "bad.jsonl"}"]')
    assert code == 2, err
    assert err.count("error:") == 1
    assert "bad.jsonl" in err
    for noise in ("Traceback", "torch", "starting all ranks again"):
        assert noise not in out + err


@pytest.mark.slow
def test_a_failed_run_ends_with_1_and_is_not_started_again(command):
    more = ("train.steps=8", "train.learning_rate=1e30", "train.clip_norm=0")
    code, _, err = command.run(*more)
    assert code == 1, err
    assert err.count("error:") == 1
    assert "3 steps in a row (to step 4) had a non-finite loss or gradient" in err
    assert "starting all ranks again" not in err
    assert json.loads((command.run_dir / "receipt.json").read_text())["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["tokens", pytest.param("stages", marks=pytest.mark.slow), pytest.param("experts", marks=pytest.mark.slow)]
)
def test_a_killed_rank_starts_all_again_from_the_last_step(kind, command):
    """Also with --fresh, which belongs to the first start alone."""
    process = command.start(*MANY, f"split.kind={kind}", "--fresh")
    command.wait_for_step(3, process)
    ranks_of(process)[1].kill()
    done = command.steps()[-1]
    command.wait_for_step(done + 50, process)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert "rank 1 was ended by SIGKILL" in err
    assert "starting all ranks again (1 of 3 restarts)" in err
    assert "resuming" in err
    steps = command.steps()
    assert steps == list(range(1, len(steps) + 1))
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_rank_lost_too_often_ends_with_1(command):
    process = command.start(*MANY, "launch.restarts=0")
    command.wait_for_step(2, process)
    ranks_of(process)[0].kill()
    code, _, err = finish(process)
    assert code == 1, err
    assert err.count("error:") == 1
    assert "rank 0 was ended by SIGKILL" in err
    assert "gave up after 0 restarts" in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_after_the_step_and_the_run_goes_on_later(command, number):
    process = command.start(*MANY)
    command.wait_for_step(2, process)
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 130, err
    assert "error:" not in err
    assert "Traceback" not in err
    done = command.steps()[-1]
    assert f"stopped after step {done} of" in err
    code, out, err = command.run("--resume", f"train.steps={done + 2}")
    assert code == 0, err
    assert command.steps() == list(range(1, done + 3))
    assert "receipt of run: ok" in out


@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed(command):
    process = command.start(*MANY)
    command.wait_for_step(2, process)
    ranks = ranks_of(process).values()
    process.kill()
    end_s = time.monotonic() + 60
    while any(rank.is_running() for rank in ranks):
        assert time.monotonic() < end_s
        time.sleep(0.1)
    assert json.loads((command.run_dir / "receipt.json").read_text())["status"] == "interrupted"
