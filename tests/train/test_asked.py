"""Every setting that was asked for is set against a fact, and a difference or a missing fact stops the run."""

import json

import pytest
import torch

from lamella.adapter import Adapter
from lamella.config import LoraConfig, TrainConfig
from lamella.errors import RunFailed
from lamella.models.skeleton import Skeleton, load_config
from lamella.ranks.group import Ranks
from lamella.store.reader import Store
from lamella.train.asked import asked_of_adapter, asked_of_engine, asked_of_optimizer, compare, optimizer_in_effect
from lamella.train.assemble import assemble_parts, settings_of, targets_of
from lamella.train.loop import train_run
from lamella.train.optimizer import Optimizer
from tests.train import fake


def receipt(run_dir):
    return json.loads((run_dir / "receipt.json").read_text())


def test_compare_has_a_row_for_every_asked_key():
    asked = {"same": 1, "other": 1, "missing": 1, "auto": "auto", "none": None, "auto_missing": "auto"}
    rows = compare(asked, {"same": 1, "other": 2, "auto": 7, "none": 8, "unasked": 9})
    assert [row["setting"] for row in rows] == list(asked)
    assert [row["ok"] for row in rows] == [True, False, False, True, True, False]
    assert rows[2]["in_effect"] == "not reported"


@pytest.mark.parametrize("name", ["dtype", "device", "recompute", "budget_bytes", "steps_kept"])
def test_a_fact_the_engine_does_not_tell_stops_the_run(tmp_path, name):
    shown = "recompute" if name == "steps_kept" else name
    options = fake.Options(left_out=[name])
    with pytest.raises(RunFailed, match=f"{shown} asked .* in effect 'not reported'"):
        fake.run(tmp_path, options, train={"steps": 3})
    assert options.seen == []


@pytest.mark.parametrize(
    ("config", "facts", "message"),
    [
        ({"memory": {"budget": "1GB"}}, {"budget_bytes": None}, "budget_bytes asked 1000000000, in effect None"),
        ({"compute": {"device": "cuda"}}, {}, "device asked 'cuda', in effect 'cpu'"),
        ({"memory": {"recompute": "always"}}, {}, "recompute asked 'always', in effect 'never'"),
        (
            {"memory": {"recompute": "never"}},
            {"steps_kept": 2, "steps_recomputed": 3},
            "'never', .* '3 steps recomputed, 2 kept'",
        ),
    ],
)
def test_what_the_engine_does_must_be_what_was_asked(tmp_path, config, facts, message):
    with pytest.raises(RunFailed, match=message):
        fake.run(tmp_path, fake.Options(facts=facts), train={"steps": 3}, **config)
    assert receipt(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize("store", ["dense", "moe"])
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_a_real_receipt_has_every_row(store, recompute, real_config):
    config = real_config(store, train={"steps": 3}, memory={"recompute": recompute, "budget": "1GB"})
    rows = {row["setting"]: row for row in receipt(train_run(config).run_dir)["comparison"]}
    parts = assemble_parts(config, Ranks(0, 1), False)
    optimizer = Optimizer(parts.adapter.parameters(), config.train, 3)
    parts.engine.close()
    asked = [asked_of_engine(config), asked_of_optimizer(config, optimizer, 3), asked_of_adapter(config, parts)]
    assert set(rows) == {name for part in asked for name in part}
    assert all(row["ok"] for row in rows.values())
    assert rows["recompute"]["in_effect"] == recompute
    assert rows["budget_bytes"]["in_effect"] == 10**9
    assert rows["lora.targets"]["in_effect"] == "all-linear"
    assert ("lora.expert_rank" in rows) == (store == "moe")


@pytest.mark.parametrize(
    ("change", "named"),
    [({"schedule": "linear"}, "schedule"), ({"warmup_steps": 3}, "warmup_steps"), ({"clip_norm": 0.0}, "clip_norm"),
     ({"learning_rate": 0.5}, "learning_rate"), ({"weight_decay": 0.1}, "weight_decay")],
)  # fmt: skip
def test_an_optimizer_with_other_settings_is_seen(tmp_path, change, named):
    config = fake.make_config(tmp_path, train={"steps": 9})
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = Optimizer({"p": p}, TrainConfig(**{**config.train.model_dump(), **change}), 9)
    rows = compare(asked_of_optimizer(config, optimizer, 9), optimizer_in_effect(optimizer))
    assert [row["setting"] for row in rows if not row["ok"]] == [named]


def test_the_learning_rate_of_the_last_step_is_checked(tmp_path):
    config = fake.make_config(tmp_path, train={"steps": 9})
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = Optimizer({"p": p}, config.train, 9)
    p.grad = torch.ones(2)
    optimizer.step(5, 1.4)
    rows = {r["setting"]: r for r in compare(asked_of_optimizer(config, optimizer, 9), optimizer_in_effect(optimizer))}
    assert rows["last_learning_rate"]["ok"]
    optimizer.adamw.param_groups[0]["lr"] *= 2
    rows = {r["setting"]: r for r in compare(asked_of_optimizer(config, optimizer, 9), optimizer_in_effect(optimizer))}
    assert not rows["last_learning_rate"]["ok"]


@pytest.mark.parametrize(
    "targets", [("q_proj", "v_proj"), ("self_attn.o_proj",), ("experts.gate_up_proj", "k_proj"),
                ("gate_proj", "up_proj", "down_proj"), ("model.layers.1.self_attn.q_proj",), ("mlp.experts",)],
)  # fmt: skip
def test_targets_are_read_from_the_pairs(targets, stores):
    store = Store.open(stores / "moe")
    skeleton = Skeleton(load_config(store.path, False), torch.float32)
    sites = list(Adapter.create(skeleton, LoraConfig(rank=4, targets=targets), 0).sites.values())
    assert targets_of(sites, targets, frozenset()) == sorted(targets)
    assert targets_of(sites, (*targets, "x_proj"), frozenset()) == sorted(targets)
    assert targets_of(sites, ("x_proj",), frozenset()) == sorted(site.key for site in sites)
    assert "weights without a pair" in targets_of(sites, "all-linear", frozenset(["model.layers.0.other"]))


def test_all_linear_misses_no_quantised_weight(real_config):
    parts = assemble_parts(real_config("moe"), Ranks(0, 1), False)
    parts.engine.close()
    assert len(parts.adapter.quantised) == 2 * 6  # q, k, v, o, gate_up, down of two layers
    assert parts.adapter.quantised == set(parts.adapter.adapter.sites)


@pytest.mark.parametrize("rslora", [False, True])
def test_alpha_survives_its_way_through_the_scale(stores, rslora):
    store = Store.open(stores / "moe")
    skeleton = Skeleton(load_config(store.path, False), torch.float32)
    for alpha, rank in ((5.0, 5), (0.1, 6), (10.0, 5), (32.0, 16)):
        adapter = Adapter.create(skeleton, LoraConfig(rank=rank, alpha=alpha, rslora=rslora), 0)
        assert settings_of(adapter)["lora.alpha"] == alpha
