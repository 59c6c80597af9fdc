"""The real trackers, each read back through its own library: `make test-log`."""

import json
import sqlite3
import struct
from importlib.util import find_spec

import pytest

from tests.train import fake

pytestmark = pytest.mark.trackers


def trained(tmp_path, name, monkeypatch):
    """Four steps, then a resume up to seven."""
    if find_spec(name) is None:  # importing it here would fix its settings before the run sets them
        pytest.skip(f"{name} is not installed")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    asked = {"log": [name], "track": {"project": "shown"}, "validation": {"data": ["v.jsonl"], "every_steps": 2}}
    fake.run(tmp_path, train={"steps": 4}, **asked)
    return fake.run(tmp_path, train={"steps": 7}, mode="resume", **asked)


def losses_of(result):
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def test_tensorboard(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = trained(tmp_path, "tensorboard", monkeypatch)
    read = EventAccumulator(str(result.run_dir / "tensorboard"))
    read.Reload()
    shown = {event.step: event.value for event in read.Scalars("train/loss")}
    assert shown == pytest.approx(losses_of(result)) and len(read.Scalars("train/loss")) == 7
    assert [event.step for event in read.Scalars("validation/loss")] == [2, 4, 6, 7]


def test_mlflow(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    result = trained(tmp_path, "mlflow", monkeypatch)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("shown")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert {m.step: m.value for m in history} == losses_of(result) and len(history) == 7
    assert run.info.status == "FINISHED" and run.data.tags["lamella.status"] == "ok"
    assert run.data.params["train.learning_rate"] == "0.01"


def test_trackio(tmp_path, monkeypatch):
    result = trained(tmp_path, "trackio", monkeypatch)
    (file,) = (tmp_path / "trackio").glob("shown*.db")
    with sqlite3.connect(file) as database:
        rows = [json.loads(text) for (text,) in database.execute("select metrics from metrics order by step")]
        steps = [step for (step,) in database.execute("select step from metrics order by step")]
    shown = [row["train/loss"] for row in rows if "train/loss" in row]
    assert shown == pytest.approx(list(losses_of(result).values())) and max(steps) == 7


def records(data: bytes):
    """Records of a log of 32 KiB blocks (LevelDB's form) behind a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield parts
            parts = b""


def test_wandb_offline(tmp_path, monkeypatch):
    result = trained(tmp_path, "wandb", monkeypatch)
    from wandb.proto.wandb_internal_pb2 import Record

    found, settings = {}, {}
    for file in sorted((result.run_dir / "wandb").glob("offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = Record.FromString(data)
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            if "train/loss" in values:
                found[values.get("_step", record.history.step.num)] = values["train/loss"]
            settings |= {u.key: json.loads(u.value_json) for u in record.run.config.update if u.value_json}
    assert found == pytest.approx(losses_of(result))
    assert settings["train.learning_rate"] == 0.01
