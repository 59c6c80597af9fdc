"""The loop on the real engine: tiny DENSE and MOE stores."""

import json
import math
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file

from lamella.errors import RunFailed, UserError
from lamella.ranks.group import Ranks
from lamella.store.reader import Store
from lamella.train.assemble import assemble_parts
from lamella.train.loop import train_run
from tests import fixtures
from tests.train.conftest import start_losses

ADAPTER = "adapter_model.safetensors"


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def receipt(run_dir):
    return json.loads((run_dir / "receipt.json").read_text())


@pytest.mark.parametrize("store", ["dense", "moe"])
def test_a_real_run_and_its_receipt(store, real_config):
    config = real_config(
        store, train={"steps": 9}, validation={"data": real_config(store).data.train, "every_steps": 3}
    )
    result = train_run(config)
    tree, steps = receipt(result.run_dir), lines(result.run_dir)
    assert tree["status"] == "ok"
    assert tree["start"]["base"] == tree["start"]["adapter"]
    assert abs(tree["start"]["base"] - math.log(512)) < 1
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert tree["best"]["step"] == 9
    assert [row["setting"] for row in tree["comparison"] if not row["ok"]] == []
    assert {row["setting"] for row in tree["comparison"]} >= {"dtype", "threads", "recompute", "lora.rank", "betas"}
    for row in tree["trainable"]:
        assert row["parameters"] == row["expected"]
    assert tree["frozen"]["verified"]
    first = tree["data"]["first_rows"][0]
    assert first["labels"][0].endswith("<|im_end|>")
    quantised = {row["class"] for row in tree["base"]["tensors"] if row["format"] == "nf4"}
    assert quantised == ({"attention", "mlp"} if store == "dense" else {"attention", "experts"})


def test_b53_counts_follow_the_formula_and_everything_moves(real_config):
    config = real_config("moe", train={"steps": 3, "rows_per_step": 12})
    tree = receipt(train_run(config).run_dir)
    by_class = {row["class"]: row for row in tree["trainable"]}
    attention = 2 * (2 * 4 * (64 + 64) + 2 * 4 * (64 + 32))
    experts = 2 * 4 * (2 * (64 + 48) + 2 * (24 + 64))  # rank 4 over 2 active experts: 2 each
    assert by_class["attention"]["parameters"] == attention
    assert by_class["experts"]["parameters"] == experts
    moved = {row["class"]: (row["moved"], row["total"]) for row in tree["moved"]}
    assert moved == {"attention": (16, 16), "experts": (32, 32)}


def test_b52_every_b_then_every_a_moves(real_config):
    targets = ["q_proj", "v_proj", "down_proj"]
    seen = {}
    for recompute in ("always", "never"):
        config = real_config(
            "dense", name=recompute, lora={"targets": targets}, memory={"recompute": recompute},
            train={"steps": 2}, checkpoint={"every_steps": 1},
        )  # fmt: skip
        run_dir = train_run(config).run_dir
        seen[recompute] = [load_file(run_dir / "checkpoints" / f"step-0000000{k}" / ADAPTER) for k in (1, 2)]
    first, second = seen["always"]
    b = [name for name in first if "lora_B" in name]
    a = [name for name in first if "lora_A" in name]
    assert len(b) == len(a) == 12
    assert all(first[name].norm() > 0 for name in b)
    assert all(not torch.equal(first[name], second[name]) for name in a)
    assert all(torch.equal(x[n], y[n]) for x, y in zip(seen["always"], seen["never"], strict=True) for n in x)


def test_b46_cuts_of_a_step_give_the_same_run(real_config):
    runs = {}
    for tokens in (1, 120, 4000):
        config = real_config("dense", name=f"t{tokens}", train={"steps": 2, "micro_batch_tokens": tokens})
        runs[tokens] = lines(train_run(config).run_dir)
    for tokens in (1, 120):
        for a, b in zip(runs[tokens], runs[4000], strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def test_b51_balancing_loss_is_in_the_loss_and_logged_apart(real_config):
    found = {}
    for coefficient in (0, 0.01, 10):
        for tokens in (4000, 60):
            config = real_config(
                "moe", name=f"c{coefficient}-{tokens}",
                train={"steps": 1, "router_aux_coef": coefficient, "micro_batch_tokens": tokens},
            )  # fmt: skip
            found[coefficient, tokens] = lines(train_run(config).run_dir)[0]
    for (coefficient, tokens), line in found.items():
        plain = found[0, tokens]["total_loss"]
        assert line["total_loss"] - plain == pytest.approx(coefficient * line["aux"], abs=1e-6)
        assert line["aux"] == pytest.approx(found[0, 4000]["aux"], abs=1e-6)
        assert line["aux"] > 0.9
    norms = {c: found[c, 4000]["grad_norm"] for c in (0, 0.01, 10)}
    assert norms[10] != pytest.approx(norms[0], rel=1e-3)


def test_b51_no_router_no_balancing_loss(real_config):
    with pytest.raises(UserError, match="llama has no router"):
        train_run(real_config("dense", train={"router_aux_coef": 0.01}))


def test_resumed_real_run_has_the_bits_of_an_unbroken_one(real_config):
    train = {"epochs": 3, "schedule": "constant"}
    whole = train_run(real_config("moe", name="whole", lora={"dropout": 0.1}, train=train))
    train_run(real_config("moe", name="part", lora={"dropout": 0.1}, train={**train, "epochs": 4 / 3}))
    part = train_run(real_config("moe", name="part", lora={"dropout": 0.1}, train=train), "resume")
    assert (whole.run_dir / ADAPTER).read_bytes() == (part.run_dir / ADAPTER).read_bytes()
    assert [s["loss"] for s in lines(whole.run_dir)] == [s["loss"] for s in lines(part.run_dir)]


@pytest.mark.parametrize("rate", [1e3, 1e25])
def test_b62_far_too_high_a_learning_rate_fails_the_run(real_config, rate):
    config = real_config("dense", train={"steps": 20, "learning_rate": rate, "clip_norm": 0, "schedule": "constant"})
    with pytest.raises(RunFailed):
        train_run(config)
    tree = receipt(config.runs_dir / "run")
    assert tree["status"] == "failed"
    assert not (config.runs_dir / "run" / ADAPTER).exists()
    for line in lines(config.runs_dir / "run"):
        assert line["loss"] is None or math.isfinite(line["loss"])


def test_b42_half_precision_on_a_cpu_is_refused_before_training(real_config):
    config = real_config("dense", compute={"dtype": "fp16"})
    with pytest.raises(UserError, match="fp16 on a CPU"):
        train_run(config)
    assert not (config.runs_dir / "run" / "metrics.jsonl").exists()


def test_b62_nan_in_the_base_is_found_before_training(real_config, stores, tmp_path):
    shutil.copytree(stores / "dense", tmp_path / "store")
    record = next(r for r in Store.open(tmp_path / "store").records("outer") if r.name == "model.norm.weight")
    with (tmp_path / "store" / "outer.bin").open("r+b") as file:
        file.seek(record.parts["data"][0])
        file.write(struct.pack("<f", math.nan))
    config = real_config("dense").model_copy(update={"store": tmp_path / "store"})
    with pytest.raises(RunFailed, match="loss on the first rows is nan, before any training"):
        train_run(config)
    assert receipt(config.runs_dir / "run")["status"] == "failed"
    assert not (config.runs_dir / "run" / "metrics.jsonl").exists()


def test_b57_reloaded_adapter_gives_the_same_losses(real_config):
    config = real_config("moe", train={"steps": 4})
    run_dir = train_run(config).run_dir
    losses = []
    for _ in range(2):
        parts = assemble_parts(config.model_copy(update={"init_adapter": run_dir}), Ranks(0, 1), True)
        start = start_losses(parts)
        losses.append(start["adapter"])
        assert start["adapter"] != start["base"]
        parts.engine.close()
    assert losses[0] == losses[1]


def test_b57_a_has_its_stated_spread(real_config):
    parts = assemble_parts(real_config("dense", lora={"rank": 16}), Ranks(0, 1), False)
    a = parts.adapter.parameters()["model.layers.0.self_attn.q_proj.lora_A"]
    assert float(a.detach().std()) == pytest.approx(1 / math.sqrt(3 * 64), rel=0.05)  # uniform in +-1/sqrt(in)
    parts.engine.close()


def test_init_adapter_goes_on_from_its_values(real_config):
    first = train_run(real_config("dense", name="first", train={"steps": 4}))
    config = real_config(
        "dense", name="second", init_adapter=str(first.run_dir), train={"steps": 2, "learning_rate": 1e-4}
    )
    second = train_run(config)
    assert lines(second.run_dir)[0]["loss"] < lines(first.run_dir)[0]["loss"] - 0.2
    with pytest.raises(UserError, match="init_adapter has rank 4"):
        train_run(real_config("dense", name="third", init_adapter=str(first.run_dir), lora={"rank": 8}))


def test_changed_store_byte_fails_the_run(real_config, stores, tmp_path):
    shutil.copytree(stores / "dense", tmp_path / "copy")
    config = real_config("dense", train={"steps": 2}).model_copy(update={"store": tmp_path / "copy"})
    file = next((tmp_path / "copy" / "layers").iterdir())
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunFailed, match="frozen tensors changed"):
        train_run(config)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_every_step_and_the_receipt_tell_flops_and_utilisation(recompute, real_config):
    config = real_config("dense", name=recompute, train={"steps": 3}, memory={"recompute": recompute})
    run_dir = train_run(config).run_dir
    figures, steps = receipt(run_dir)["figures"], lines(run_dir)
    assert figures["matmul_flops_per_s"] > 0
    for line in steps:
        assert line["flops"] > 2 * line["tokens"] * 4 * 40960  # forward alone: four layers of 40,960 weights
        assert line["utilisation"] == pytest.approx(line["flops"] / line["step_s"] / figures["matmul_flops_per_s"])
    assert figures["utilisation"] == sorted(line["utilisation"] for line in steps)[1]
    assert figures["flops_per_step"] == sorted(line["flops"] for line in steps)[1]


def test_recompute_counts_as_work(real_config):
    found = {}
    for recompute in ("never", "always"):
        config = real_config("dense", name=recompute, train={"steps": 1}, memory={"recompute": recompute})
        found[recompute] = lines(train_run(config).run_dir)[0]["flops"]
    assert 1.2 * found["never"] < found["always"] < 1.5 * found["never"]


def test_the_receipt_tells_how_the_experts_were_loaded(real_config):
    """Every token goes to as many experts as are active, in every layer, with an adapter on them or not."""
    for targets in (["q_proj"], "all-linear"):
        config = real_config(
            "moe",
            name=f"load-{len(targets)}",
            train={"steps": 2},
            lora={"targets": targets},
            memory={"recompute": "never"},
        )
        receipt = json.loads(train_run(config).receipt_path.read_text())
        tokens = receipt["figures"]["tokens"]
        load = receipt["expert_load"]
        assert len(load) == len({name.split(".")[2] for name in load}) >= 2
        active = fixtures.moe_config().num_experts_per_tok
        for counts in load.values():
            # the first step measures the bare base too, and what is recomputed is seen again
            assert (
                tokens * active <= sum(counts) <= 3 * tokens * active
                and len(counts) == fixtures.moe_config().num_experts
            )
