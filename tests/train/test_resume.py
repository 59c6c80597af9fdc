"""A run that was killed, stopped or resumed ends with the bits of an unbroken one."""

import json
import random
import signal
import time

import pytest

from lamella.errors import UserError
from tests.train import fake
from tests.train.processes import start

ADAPTER = "adapter_model.safetensors"


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir):
    return [(line["step"], line["loss"], line["grad_norm"], line["learning_rate"]) for line in lines(run_dir)]


def test_killed_at_random_moments_ends_with_the_same_bits(tmp_path):
    sections = {
        "train": {"epochs": 3},
        "checkpoint": {"every_steps": 3},
        "validation": {"data": ["v"], "every_steps": 7},
    }
    options = {"dropout": 0.1, "sleep_s": 0.03}
    code, err = start(tmp_path / "whole", sections, options=options).finish()
    assert code == 0, err
    rng = random.Random(5)
    resumed = []
    for _ in range(5):
        process = start(tmp_path / "broken", sections, options=options)
        metrics = tmp_path / "broken" / "run" / "metrics.jsonl"
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        limit = time.monotonic() + 60
        while process.process.is_alive() and time.monotonic() < limit:  # wait until it steps, then a random moment more
            if metrics.exists() and metrics.stat().st_mtime_ns != before:
                break
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.4))
        process.send(signal.SIGKILL)
        code, err = process.finish()
        resumed.append("resuming" in err)
    code, err = start(tmp_path / "broken", sections, options=options).finish()
    assert code == 0, err
    assert "resuming" in err
    assert any(resumed)
    a, b = tmp_path / "whole" / "run", tmp_path / "broken" / "run"
    assert (a / ADAPTER).read_bytes() == (b / ADAPTER).read_bytes()
    assert losses(a) == losses(b)
    assert (a / "validation.jsonl").read_text() == (b / "validation.jsonl").read_text()
    assert len(lines(b)) == 45
    assert json.loads((b / "receipt.json").read_text())["status"] == "ok"


def test_b34_killed_in_the_middle_of_a_save(tmp_path):
    sections = {"train": {"steps": 12}, "checkpoint": {"every_steps": 3}}
    code, _ = start(tmp_path / "b", sections, options={"kill_in_save": 3}).finish()
    assert code == -signal.SIGKILL
    code, err = start(tmp_path / "b", sections).finish()
    assert code == 0, err
    assert "checkpoint step-00000009 is incomplete and not used: the save did not finish" in err
    assert "after step 6 (step-00000006)" in err
    fake.run(tmp_path / "a", **sections)
    assert (tmp_path / "a" / "run" / ADAPTER).read_bytes() == (tmp_path / "b" / "run" / ADAPTER).read_bytes()


def test_b34_full_disk_fails_the_run_and_leaves_the_earlier_checkpoints(tmp_path):
    sections = {"train": {"steps": 12}, "checkpoint": {"every_steps": 3}}
    with pytest.raises(UserError, match=r"not enough disk space for a checkpoint: .* needed, .* free"):
        fake.run(tmp_path, fake.Options(full_at_save=3), **sections)
    assert json.loads((tmp_path / "run" / "receipt.json").read_text())["status"] == "failed"
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000006"]
    fake.run(tmp_path, **sections)
    fake.run(tmp_path / "whole", **sections)
    assert (tmp_path / "run" / ADAPTER).read_bytes() == (tmp_path / "whole" / "run" / ADAPTER).read_bytes()


def rows_seen(run_dir):
    return [line["rows_hash"] for line in lines(run_dir)]


@pytest.mark.parametrize("stop", [20, 15])
def test_b35_resumed_in_a_new_process(tmp_path, stop):
    config = {"train": {"epochs": 3}, "checkpoint": {"every_steps": stop}}
    code, err = start(tmp_path / "a", config, options={"dropout": 0.1}).finish()
    assert code == 0, err
    code, err = start(tmp_path / "b", config, options={"dropout": 0.1, "stop_at": stop + 1}).finish()
    assert code == -signal.SIGKILL, err
    assert len(lines(tmp_path / "b" / "run")) == stop + 1  # the checkpoint is complete when the step after it ends
    code, err = start(tmp_path / "b", config, "resume", options={"dropout": 0.1}).finish()
    assert code == 0, err
    assert f"after step {stop}" in err
    a, b = tmp_path / "a" / "run", tmp_path / "b" / "run"
    assert len(set(rows_seen(a))) == len(rows_seen(a)) == 45
    assert rows_seen(a) == rows_seen(b)
    assert losses(a) == losses(b)
    assert (a / ADAPTER).read_bytes() == (b / ADAPTER).read_bytes()


@pytest.mark.parametrize("stop", [20, 15])
def test_b35_resumed_run_sees_the_same_rows(tmp_path, stop):
    whole, first, second = (fake.Options(dropout=0.1) for _ in range(3))
    fake.run(tmp_path / "a", whole, train={"epochs": 3})
    assert len(whole.seen) == 45
    for epoch in range(3):
        assert len({row for rows in whole.seen[epoch * 15 : epoch * 15 + 15] for row in rows}) == 60
    config = {"train": {"epochs": 3}, "checkpoint": {"every_steps": stop}}

    class StopError(Exception):
        pass

    def stop_after(self, *args, **kwargs):
        if len(first.seen) == stop:
            raise StopError
        return fake.FakeEngine.step(self, *args, **kwargs)

    def assemble(config, ranks, fresh):
        parts = fake.assembler(first)(config, ranks, fresh)
        engine = type("Stopping", (fake.FakeEngine,), {"step": stop_after})(config, first, ranks)
        engine.adapter = parts.adapter
        return fake.Parts(**{**parts.__dict__, "engine": engine})

    with pytest.raises(StopError):
        fake.train_run(fake.make_config(tmp_path / "b", **config), "auto", assemble)
    fake.run(tmp_path / "b", second, "resume", **config)
    assert first.seen + second.seen == whole.seen
    assert losses(tmp_path / "a" / "run") == losses(tmp_path / "b" / "run")
    assert (tmp_path / "a" / "run" / ADAPTER).read_bytes() == (tmp_path / "b" / "run" / ADAPTER).read_bytes()


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    sections = {"train": {"epochs": 3}, "checkpoint": {"every_steps": 0}}
    process = start(tmp_path / "b", sections, options={"sleep_s": 0.03})
    metrics = tmp_path / "b" / "run" / "metrics.jsonl"
    limit = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 4) and time.monotonic() < limit:
        time.sleep(0.02)
    process.send(signal.SIGINT)
    code, err = process.finish()
    assert code == 130, err
    assert "go on with --resume" in err
    assert json.loads((tmp_path / "b" / "run" / "receipt.json").read_text())["status"] == "interrupted"
    done = len(lines(tmp_path / "b" / "run"))
    assert 4 < done < 45
    code, err = start(tmp_path / "b", sections, "resume").finish()
    assert code == 0, err
    assert f"after step {done}" in err
    fake.run(tmp_path / "a", **sections)
    assert (tmp_path / "a" / "run" / ADAPTER).read_bytes() == (tmp_path / "b" / "run" / ADAPTER).read_bytes()


def interrupted_run(tmp_path, **sections):
    """Train to step 10 of 20 (checkpoint there), by asking for 10 first and then for 20."""
    config = {
        "checkpoint": {"every_steps": 5},
        **sections,
        "train": {"schedule": "constant", **sections.get("train", {})},
    }
    fake.run(tmp_path, **{**config, "train": {**config["train"], "steps": 10}})
    return {**config, "train": {**config["train"], "steps": 20}}


def test_more_steps_go_on_only_when_asked(tmp_path):
    config = interrupted_run(tmp_path)
    with pytest.raises(UserError, match="finished"):
        fake.run(tmp_path, **config)
    fake.run(tmp_path, None, "resume", **config)
    assert len(lines(tmp_path / "run")) == 20
    whole = fake.run(tmp_path / "whole", **config)
    assert (whole.run_dir / ADAPTER).read_bytes() == (tmp_path / "run" / ADAPTER).read_bytes()


def test_finished_run_is_not_overwritten_but_fresh_starts_over(tmp_path):
    fake.run(tmp_path, train={"steps": 4})
    before = (tmp_path / "run" / ADAPTER).read_bytes()
    with pytest.raises(UserError, match="this run is finished") as error:
        fake.run(tmp_path, train={"steps": 4})
    assert "--fresh" in error.value.fix
    assert (tmp_path / "run" / ADAPTER).read_bytes() == before
    (tmp_path / "run" / "notes.txt").write_text("mine")
    fake.run(tmp_path, None, "fresh", train={"steps": 5})
    assert len(lines(tmp_path / "run")) == 5
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train": {"learning_rate": 0.5}}, "train.learning_rate: 0.01 there, 0.5 now"),
        ({"train": {"seed": 1}}, "train.seed: 0 there, 1 now"),
        ({"lora": {"rank": 2, "alpha": 5.0}}, "lora.alpha: 32.0 there, 5.0 now"),
        ({"compute": {"dtype": "fp32"}}, "compute.dtype: 'auto' there, 'fp32' now"),
    ],
)
def test_resume_with_another_configuration_is_refused(tmp_path, change, named):
    config = interrupted_run(tmp_path)
    changed = {**config, **change, "train": {**config["train"], **change.get("train", {})}}
    with pytest.raises(UserError) as error:
        fake.run(tmp_path, None, "resume", **changed)
    assert named in error.value.what


def test_resume_with_other_data_is_refused(tmp_path):
    config = interrupted_run(tmp_path)
    with pytest.raises(
        UserError, match="training data is not the checkpoint's: fingerprint fake-60 there, fake-40 now"
    ):
        fake.run(tmp_path, fake.Options(rows=40), "resume", **config)


def test_harmless_changes_are_said(tmp_path, capsys):
    config = interrupted_run(tmp_path)
    config["train"]["micro_batch_tokens"] = 30
    config["memory"] = {"budget": "1GB"}
    fake.run(tmp_path, None, "resume", **config)
    said = capsys.readouterr().err
    assert "changed since the checkpoint: train.steps 10 -> 20" in said
    assert "memory.budget None -> '1GB'" in said


def test_resume_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="no complete checkpoint to resume from"):
        fake.run(tmp_path, None, "resume", train={"steps": 4})


def test_b34_all_checkpoints_damaged_is_not_a_new_start(tmp_path):
    config = interrupted_run(tmp_path)
    (tmp_path / "run" / "receipt.json").unlink()
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        (path / "state.json").unlink()
    with pytest.raises(UserError, match=r"none is complete.*state\.json is missing"):
        fake.run(tmp_path, **config)


def test_b34_resume_names_the_incomplete_one_and_uses_the_one_before(tmp_path, capsys):
    config = interrupted_run(tmp_path)
    newest = tmp_path / "run" / "checkpoints" / "step-00000010"
    newest.rename(newest.with_name("step-00000010.partial"))
    (tmp_path / "run" / "receipt.json").unlink()
    fake.run(tmp_path, **config)
    said = capsys.readouterr().err
    assert "checkpoint step-00000010 is incomplete and not used" in said
    assert "after step 5 (step-00000005)" in said
    whole = fake.run(tmp_path / "whole", **config)
    assert (whole.run_dir / ADAPTER).read_bytes() == (tmp_path / "run" / ADAPTER).read_bytes()


def test_second_process_in_the_same_folder_is_refused(tmp_path):
    from lamella.train.folder import RunFolder

    config = fake.make_config(tmp_path, train={"steps": 2})
    holder = RunFolder(config)
    holder.open()
    try:
        with pytest.raises(UserError, match="another process is training"):
            fake.run(tmp_path, train={"steps": 2})
    finally:
        holder.close()
    fake.run(tmp_path, train={"steps": 2})


def test_unwritable_folder_is_said_before_anything_is_opened(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    opened = []

    def assemble(config, ranks, fresh):
        opened.append(config)
        raise AssertionError

    with pytest.raises(UserError, match="cannot be written"):
        fake.train_run(fake.make_config(tmp_path / "file"), "auto", assemble)
    assert not opened
