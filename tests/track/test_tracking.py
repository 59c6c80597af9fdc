"""What trackers are sent, over a double that keeps it; `test_trackers.py` has the real ones."""

import json

import pytest

from lamella.config import build_run_config
from lamella.errors import RunFailed, UserError
from lamella.track import tracking
from lamella.track.tracking import FILE, Tracking, check_installed
from tests.train import fake


class Kept:
    """Keeps what it gets; fails where it is told to."""

    def __init__(self, fails_at=None):
        self.runs, self.sent, self.status, self.fails_at = [], [], None, fails_at

    def start(self, run):
        if self.fails_at == "start":
            raise ConnectionError("no server\nat all")
        self.runs.append(run)
        return run.known_as or f"id-{len(self.runs)}"

    def log(self, step, values):
        if self.fails_at == step:
            raise ConnectionError("gone")
        self.sent.append((step, dict(values)))

    def finish(self, status):
        self.status = status


@pytest.fixture
def kept(monkeypatch):
    made = Kept()
    monkeypatch.setattr("lamella.track.trackers.open_tracker", lambda name: made)
    monkeypatch.setattr(tracking, "find_spec", lambda name: name)
    return made


def test_a_run_is_sent_step_by_step(kept, tmp_path):
    result = fake.run(tmp_path, log=["mlflow"], track={"project": "p"}, train={"steps": 5},
                      validation={"data": ["v.jsonl"], "every_steps": 2})  # fmt: skip
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [(step, values) for step, values in kept.sent if "train/loss" in values]
    assert [step for step, _ in trained] == [1, 2, 3, 4, 5]
    for line, (_, values) in zip(lines, trained, strict=True):
        assert values["train/loss"] == line["loss"] and values["memory/rss_bytes"] == line["rss_bytes"]
        assert values["train/learning_rate"] == line["learning_rate"]
    assert [step for step, values in kept.sent if "validation/loss" in values] == [2, 4, 5]
    (run,) = kept.runs
    assert run.project == "p" and run.settings["train.steps"] == 5 and run.known_as is None
    assert kept.status == "ok"


def test_a_resumed_run_goes_on_and_sends_no_step_twice(kept, tmp_path):
    fake.run(tmp_path, log=["mlflow"], train={"steps": 4}, checkpoint={"every_steps": 3})
    fake.run(tmp_path, log=["mlflow"], train={"steps": 7}, mode="resume")
    assert [run.known_as for run in kept.runs] == [None, "id-1"]
    assert [step for step, _ in kept.sent] == [1, 2, 3, 4, 5, 6, 7]


def test_steps_lost_in_a_kill_are_not_sent_again(kept, tmp_path):
    config = build_run_config({"store": "s", "runs_dir": str(tmp_path), "name": "run", "log": ["wandb"]})
    folder = tmp_path / "run"
    folder.mkdir()
    first = Tracking.begin(config, folder, print)
    for step in (1, 2, 3):
        first.log({"step": step, "loss": 1.0})
    again = Tracking.begin(config, folder, print)  # the process died after step 3, the checkpoint is of step 1
    for step in (2, 3, 4):
        again.log({"step": step, "loss": 2.0})
    assert [step for step, _ in kept.sent] == [1, 2, 3, 4]
    assert json.loads((folder / FILE).read_text())["wandb"] == {"known_as": "id-1", "last": {"train": 4}}


def test_a_fresh_run_is_a_new_one(kept, tmp_path):
    fake.run(tmp_path, log=["mlflow"], train={"steps": 2})
    fake.run(tmp_path, log=["mlflow"], train={"steps": 2}, mode="fresh")
    assert [run.known_as for run in kept.runs] == [None, None]
    assert [step for step, _ in kept.sent] == [1, 2, 1, 2]


@pytest.mark.parametrize("at", ["start", 2])
def test_a_tracker_that_fails_ends_its_use_and_not_the_run(kept, tmp_path, capsys, at):
    kept.fails_at = at
    result = fake.run(tmp_path, log=["mlflow"], train={"steps": 4})
    receipt = json.loads(result.receipt_path.read_text())
    assert receipt["status"] == "ok" and receipt["figures"]["steps"] == 4
    told = [text for text in receipt["warnings"] if "mlflow" in text]
    assert len(told) == 1 and "ConnectionError" in told[0] and "\n" not in told[0]
    assert capsys.readouterr().err.count("gets no more") == 1
    assert len(kept.sent) == (0 if at == "start" else 1)


def test_a_failed_run_says_so(kept, tmp_path):
    with pytest.raises(RunFailed):
        fake.run(tmp_path, fake.Options(nan_rows=list(range(100))), log=["mlflow"], train={"steps": 20})
    assert kept.status == "failed"
    assert all("train/loss" not in values for _, values in kept.sent)  # a skipped step has none


def test_one_that_is_not_installed_is_told_before_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="trackio, wandb, which are not installed") as caught:
        fake.run(tmp_path, log=["trackio", "wandb"])
    assert caught.value.fix.startswith("pip install trackio wandb") and not (tmp_path / "run").exists()
    check_installed(())


def test_an_unknown_tracker_is_refused():
    with pytest.raises(UserError, match="log"):
        build_run_config({"store": "s", "log": ["neptune"]})
