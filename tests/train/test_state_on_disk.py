"""`memory.state = "disk"`: a run of the real engine ends with the bits of a run in RAM, also when resumed."""

import json
import math

import pytest
import torch

from lamella.adapter.pages import STATE_BYTES
from lamella.config import TrainConfig
from lamella.errors import UserError
from lamella.ranks.group import Ranks
from lamella.train.assemble import assemble_parts, pages_folder
from lamella.train.loop import train_run
from lamella.train.optimizer import Optimizer

FILES = ("adapter_model.safetensors", "adapter_config.json")
CHECKPOINT = ("adapter_model.safetensors", "optimizer.safetensors")


def run(real_config, tmp_path, name, state, **train):
    config = real_config(
        "moe", name=name, runs_dir=str(tmp_path), memory={"state": state, "recompute": "always"},
        lora={"rank": 4, "dropout": 0.1}, train={"steps": 6, "weight_decay": 0.01, "micro_batch_tokens": 100, **train},
        checkpoint={"every_steps": 2},
    )  # fmt: skip
    return train_run(config, "auto").run_dir


def steps(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def test_same_bits_as_in_ram(real_config, tmp_path):
    ram, disk = (run(real_config, tmp_path, state, state) for state in ("ram", "disk"))
    assert steps(ram) == steps(disk)
    for name in FILES:
        assert (ram / name).read_bytes() == (disk / name).read_bytes()
    for name in CHECKPOINT:
        parts = [(folder / "checkpoints" / "step-00000006" / name).read_bytes() for folder in (ram, disk)]
        assert parts[0] == parts[1]
    receipts = [json.loads((folder / "receipt.json").read_text()) for folder in (ram, disk)]
    for receipt, state in zip(receipts, ("ram", "disk"), strict=True):
        assert receipt["engine"]["state"] == state
        row = next(row for row in receipt["comparison"] if row["setting"] == "state")
        assert (row["asked"], row["in_effect"], row["ok"]) == (state, state, True)


@pytest.mark.parametrize(("first", "then"), [("disk", "disk"), ("ram", "disk"), ("disk", "ram")])
def test_resumed_with_the_state_elsewhere(first, then, real_config, tmp_path):
    whole = run(real_config, tmp_path, "whole", "ram", schedule="constant")
    run(real_config, tmp_path, "cut", first, steps=4, schedule="constant")
    config = real_config(
        "moe", name="cut", runs_dir=str(tmp_path), memory={"state": then, "recompute": "always"},
        lora={"rank": 4, "dropout": 0.1}, checkpoint={"every_steps": 2},
        train={"steps": 6, "weight_decay": 0.01, "micro_batch_tokens": 100, "schedule": "constant"},
    )  # fmt: skip
    cut = train_run(config, "resume").run_dir
    assert steps(whole) == steps(cut)
    assert (whole / FILES[0]).read_bytes() == (cut / FILES[0]).read_bytes()


def test_auto_goes_by_the_budget(real_config):
    one = Ranks(0, 1)

    def folder(state, budget, parameters=1000, ranks=one):
        memory = {"state": state} | ({} if budget is None else {"budget": str(budget)})
        return pages_folder(real_config("moe", memory=memory), parameters, ranks)

    need = STATE_BYTES * 1000
    assert folder("auto", None) is None
    assert folder("auto", 2 * need) is None
    assert folder("auto", 2 * need - 2) is not None
    assert folder("ram", 10) is None
    assert folder("disk", None) is not None
    assert folder("auto", 10, ranks=Ranks(0, 2)) is None
    with pytest.raises(UserError, match="several ranks"):
        folder("disk", 10, ranks=Ranks(0, 2))


def test_moments_appear_with_the_first_update_and_bad_states_are_refused(real_config, tmp_path):
    (tmp_path / "run").mkdir()
    config = real_config("moe", memory={"state": "disk"})
    parts = assemble_parts(config, Ranks(0, 1), True)
    parameters = parts.adapter.parameters()
    optimizer = Optimizer(parameters, TrainConfig(warmup_steps=0), 3, parts.pages)
    assert optimizer.state_tensors() == {}
    assert optimizer.grad_norm() == 0
    name = next(iter(parameters))
    parts.adapter.adapter.add_gradient(name, torch.ones(parameters[name].shape))
    assert optimizer.grad_norm() == pytest.approx(math.sqrt(parameters[name].numel()))
    optimizer.step(0, optimizer.grad_norm())
    assert set(optimizer.state_tensors()) == {f"{name}/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    saved = {key: t.clone() for key, t in optimizer.state_tensors().items()}
    optimizer.load_state_tensors(saved)
    assert all(torch.equal(t, saved[key]) for key, t in optimizer.state_tensors().items())
    with pytest.raises(UserError, match="unknown tensors"):
        optimizer.load_state_tensors({**saved, "other/step": torch.zeros(())})
    with pytest.raises(UserError, match="is missing"):
        optimizer.load_state_tensors({key: t for key, t in saved.items() if not key.endswith("exp_avg")})
    parts.engine.close()
