"""What a run must notice by itself, on a small fake engine."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from lamella.errors import RunFailed, UserError
from tests.train import fake

ADAPTER = "adapter_model.safetensors"


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def receipt(run_dir):
    return json.loads((run_dir / "receipt.json").read_text())


def rows_of(step, **sections):
    data = fake.FakeData(fake.make_config("runs", **sections), fake.Options())
    return list(data.rows_of(step).rows)


def test_a_normal_run(tmp_path):
    result = fake.run(tmp_path, train={"epochs": 3})
    tree, steps = receipt(result.run_dir), lines(result.run_dir)
    assert tree["status"] == "ok"
    assert [s["step"] for s in steps] == list(range(1, 46))
    assert all(math.isfinite(s["loss"]) and s["grad_norm"] > 0 and s["skipped"] is None for s in steps)
    assert result.final_loss < steps[0]["loss"]
    assert result.final_loss == pytest.approx(sum(s["loss"] for s in steps[-10:]) / 10)
    assert tree["figures"]["rows"] == 180
    assert tree["figures"]["label_tokens"] == sum(s["label_tokens"] for s in steps)
    assert tree["start"]["base"] == tree["start"]["adapter"] == pytest.approx(steps[0]["loss"], rel=0.5)
    assert [(row["class"], row["moved"], row["total"]) for row in tree["moved"]] == [
        ("attention", 2, 2),
        ("experts", 8, 8),
    ]
    assert tree["data"]["first_rows"][0] == {"row": 0, "label_tokens": 1, "labels": ["[4]"]}
    assert tree["frozen"]["verified"]
    assert tree["adapter"]["read_back_equal"]
    assert load_file(result.run_dir / ADAPTER)["attn.lora_B"].any()


def test_b46_micro_batches_do_not_change_the_result(tmp_path):
    found = {}
    for tokens in (1, 20, 40, 1000):
        result = fake.run(tmp_path / str(tokens), train={"rows_per_step": 8, "steps": 3, "micro_batch_tokens": tokens})
        found[tokens] = lines(result.run_dir)
    for tokens in (1, 20, 40):
        for a, b in zip(found[tokens], found[1000], strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("micro_batch_tokens", [1, 100])
def test_b46_loss_is_the_mean_over_all_label_tokens(tmp_path, micro_batch_tokens):
    options = fake.Options(label_counts=[2, 18], row_losses=[4.0, 1.0])
    result = fake.run(tmp_path, options, train={"steps": 2, "micro_batch_tokens": micro_batch_tokens})
    assert [s["loss"] for s in lines(result.run_dir)] == pytest.approx([1.3, 1.3])


def test_b11_steps_without_labels_update_nothing(tmp_path):
    empty = rows_of(4)
    options = fake.Options(no_label_rows=empty)
    result = fake.run(tmp_path, options, train={"steps": 8}, checkpoint={"every_steps": 1, "keep": 9})
    step = lines(result.run_dir)[4]
    assert step["loss"] is None
    assert step["skipped"] == "no label tokens"
    assert step["label_tokens"] == 0
    assert all(s["loss"] > 0 for s in lines(result.run_dir) if s["step"] != 5)
    points = result.run_dir / "checkpoints"
    before, after = (load_file(points / f"step-0000000{k}" / ADAPTER) for k in (4, 5))
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert receipt(result.run_dir)["figures"]["skipped_empty"] == 1


def test_b11_a_run_without_any_label_fails(tmp_path):
    with pytest.raises(RunFailed, match="none of 5 steps updated"):
        fake.run(tmp_path, fake.Options(no_label_rows=list(range(60))), train={"steps": 5})
    assert receipt(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize("fault", ["nan_rows", "inf_grad_rows"])
def test_b62_one_bad_step_is_skipped_and_counted(tmp_path, fault):
    options = fake.Options(**{fault: rows_of(4)[:1]})
    result = fake.run(tmp_path, options, train={"steps": 8}, checkpoint={"every_steps": 1, "keep": 9})
    step = lines(result.run_dir)[4]
    assert "non-finite" in step["skipped"]
    assert step["grad_norm"] is None
    assert step["loss"] is None
    points = result.run_dir / "checkpoints"
    before, after = (load_file(points / f"step-0000000{k}" / ADAPTER) for k in (4, 5))
    assert all(torch.equal(before[n], after[n]) for n in before)
    tree = receipt(result.run_dir)
    assert (tree["status"], tree["figures"]["skipped_bad"], tree["figures"]["updates"]) == ("ok", 1, 7)
    assert tree["warnings"] == ["1 of 8 steps had a non-finite loss or gradient and were skipped"]


def test_b62_bad_steps_that_are_not_in_a_row_fail_the_run_too(tmp_path, capsys):
    bad = [rows_of(k)[0] for k in (2, 4, 6, 8, 10)]
    with pytest.raises(RunFailed, match=r"4 of 9 steps had a non-finite .*; at most 3 of 15 may") as error:
        fake.run(tmp_path, fake.Options(nan_rows=bad), train={"steps": 15}, checkpoint={"every_steps": 4})
    assert error.value.exit_code == 1
    assert receipt(tmp_path / "run")["status"] == "failed"
    assert "warning: step 3 skipped: non-finite loss" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoints" / "step-00000008").is_dir()
    assert not (tmp_path / "run" / ADAPTER).exists()


def test_b62_one_bad_step_in_twenty_may_pass(tmp_path):
    config = {"steps": 60, "max_bad_steps": 2, "rows_per_step": 1}
    order = [rows_of(k, train=config)[0] for k in range(60)]
    bad = [order[k] for k in (9, 19, 29, 49, 59)]
    tree = receipt(fake.run(tmp_path / "a", fake.Options(nan_rows=bad[:3]), train=config).run_dir)
    assert (tree["status"], tree["figures"]["skipped_bad"]) == ("ok", 3)
    with pytest.raises(RunFailed, match=r"4 of 50 steps .* at most 3 of 60 may"):
        fake.run(tmp_path / "b", fake.Options(nan_rows=bad), train=config)


def test_b62_bad_steps_at_the_end_are_in_the_receipt(tmp_path):
    bad = [rows_of(k)[0] for k in (2, 6, 7)]
    tree = receipt(fake.run(tmp_path, fake.Options(nan_rows=bad), train={"steps": 8}).run_dir)
    assert tree["warnings"] == ["3 of 8 steps had a non-finite loss or gradient and were skipped, the last 2 in a row"]


def test_b62_b42_bad_steps_in_a_row_fail_the_run_and_keep_the_last_good_checkpoint(tmp_path):
    bad = [row for k in range(6, 9) for row in rows_of(k)]
    with pytest.raises(RunFailed, match=r"3 steps in a row \(to step 9\)") as error:
        fake.run(tmp_path, fake.Options(nan_rows=bad), train={"steps": 15}, checkpoint={"every_steps": 3})
    assert error.value.exit_code == 1
    run_dir = tmp_path / "run"
    tree = receipt(run_dir)
    assert tree["status"] == "failed"
    assert "non-finite" in tree["reason"]
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step-00000003", "step-00000006"]
    assert not (run_dir / ADAPTER).exists()
    assert [s["loss"] for s in lines(run_dir)[6:]] == [None, None, None]
    assert "0.0" not in [str(s["loss"]) for s in lines(run_dir)]


def test_b62_max_bad_steps_zero_stops_at_the_first(tmp_path):
    with pytest.raises(RunFailed, match=r"1 steps in a row \(to step 5\)"):
        fake.run(tmp_path, fake.Options(nan_rows=rows_of(4)), train={"steps": 8, "max_bad_steps": 0})


def test_b62_saved_tensors_are_scanned(tmp_path):
    with pytest.raises(RunFailed, match=r"saved tensor attn\.lora_A is not finite"):
        fake.run(tmp_path, fake.Options(spoil_saved="nan"), train={"steps": 4})
    assert receipt(tmp_path / "run")["status"] == "failed"


def test_b57_saved_adapter_must_read_back_as_it_was(tmp_path):
    with pytest.raises(RunFailed, match=r"differ when read back .* e\.g\. attn\.lora_A"):
        fake.run(tmp_path, fake.Options(spoil_saved="other"), train={"steps": 4})


def test_b62_start_loss_far_above_uniform_warns(tmp_path, capsys):
    result = fake.run(tmp_path, fake.Options(scale_head=20.0), train={"steps": 3})
    assert "far above ln(vocabulary) = 3.47" in capsys.readouterr().err
    assert "far above" in receipt(result.run_dir)["warnings"][0]


def test_a_base_without_finite_loss_fails_before_training(tmp_path):
    options = fake.Options(scale_head=float("nan"))
    with pytest.raises(RunFailed, match="base model's loss on the first rows is nan, before any training"):
        fake.run(tmp_path, options, train={"steps": 3})
    assert options.seen == []


def test_b57_fresh_adapter_that_changes_the_loss_fails(tmp_path):
    with pytest.raises(RunFailed, match="fresh adapter must change nothing"):
        fake.run(tmp_path, fake.Options(leak=True), train={"steps": 3})


def test_b52_tensors_without_gradient_stop_the_first_step(tmp_path):
    options = fake.Options(cut=["attn.lora_A", "attn.lora_B"])
    with pytest.raises(
        RunFailed, match=r"2 of 4 trainable tensors have no gradient in step 1: attn\.lora_A, attn\.lora_B"
    ):
        fake.run(tmp_path, options, train={"steps": 5})
    assert len(options.seen) == 1


def test_b53_tensors_that_do_not_move_stop_the_run(tmp_path):
    options = fake.Options(dead=["attn.lora_A"])
    with pytest.raises(RunFailed, match=r"1 trainable tensors did not move in two updates: attn\.lora_A"):
        fake.run(tmp_path, options, train={"steps": 5, "weight_decay": 0.1})  # decay alone is not movement
    assert len(options.seen) == 2
    assert receipt(tmp_path / "run")["moved"][0]["dead"] == ["attn.lora_A"]


@pytest.mark.parametrize(("name", "step"), [("experts.lora_B", 2), ("experts.lora_A", 2)])
def test_b53_expert_tensors_that_are_cut_off_stop_the_run(tmp_path, name, step):
    options = fake.Options(dead=[name])
    with pytest.raises(RunFailed, match=rf"did not move in two updates: {name}\[0\]"):
        fake.run(tmp_path, options, train={"steps": 5})
    assert len(options.seen) == step


def test_one_update_is_enough_for_b_alone(tmp_path):
    row = receipt(fake.run(tmp_path, train={"steps": 1}).run_dir)["moved"][0]
    assert (row["moved"], row["total"], row["no_gradient"], row["dead"]) == (1, 2, ["attn.lora_A"], [])


def test_b53_experts_without_tokens_are_reported_apart(tmp_path):
    result = fake.run(tmp_path, fake.Options(skip_expert=2), train={"steps": 15})
    row = receipt(result.run_dir)["moved"][1]
    assert (row["moved"], row["total"], row["dead"]) == (6, 8, [])
    assert row["no_gradient"] == ["experts.lora_A[2]", "experts.lora_B[2]"]


def test_b53_adapter_of_another_size_than_the_formula_is_refused(tmp_path):
    def assemble(config, ranks, fresh):
        parts = fake.assembler(fake.Options())(config, ranks, fresh)
        base = fake.Base(**{**parts.base.__dict__, "expected": {"attention": (48, "1 x 3 x (8 + 8)")}})
        return fake.Parts(**{**parts.__dict__, "base": base})

    with pytest.raises(RunFailed, match=r"attention: 32 trainable parameters, but 1 x 3 x \(8 \+ 8\) = 48"):
        fake.train_run(fake.make_config(tmp_path, train={"steps": 3}), "auto", assemble)


def test_what_is_in_effect_must_be_what_was_asked(tmp_path):
    with pytest.raises(RunFailed, match="dtype asked 'bf16', in effect 'fp32'"):
        fake.run(tmp_path, compute={"dtype": "bf16"}, train={"steps": 3})
    rows = {row["setting"]: row for row in receipt(tmp_path / "run")["comparison"]}
    assert rows["dtype"] == {"setting": "dtype", "asked": "bf16", "in_effect": "fp32", "ok": False}


def test_settings_in_the_saved_files_must_be_those_asked(tmp_path):
    with pytest.raises(RunFailed, match=r"lora\.rank asked 3, in effect 2"):
        fake.run(tmp_path, lora={"rank": 3}, train={"steps": 3})


def test_a_changed_byte_of_the_base_in_memory_fails_the_run(tmp_path):
    with pytest.raises(RunFailed, match="the frozen base in memory changed during training"):
        fake.run(tmp_path, fake.Options(spoil_base_at=4), train={"steps": 6})
    assert receipt(tmp_path / "run")["status"] == "failed"
    assert not (tmp_path / "run" / ADAPTER).exists()


def test_changed_base_fails_the_run(tmp_path):
    with pytest.raises(RunFailed, match=r"1 frozen tensors changed on disk, e\.g\. layer\.w"):
        fake.run(tmp_path, fake.Options(verify=["layer.w"]), train={"steps": 3})


# --- validation and the best checkpoint


def scripted(tmp_path, metric, values, resume_after=0, **validation):
    """Four steps with a measurement after each of three, with the values given."""
    config = {
        "train": {"steps": len(values), "schedule": "constant"}, "checkpoint": {"every_steps": 1, "keep": 1},
        "validation": {"data": ["v"], "every_steps": 1, "metric": metric, **validation},
    }  # fmt: skip
    if resume_after:
        first = {**config, "train": {**config["train"], "steps": resume_after}}
        fake.run(tmp_path, fake.Options(values={metric: values[:resume_after]}), **first)
        return fake.run(tmp_path, fake.Options(values={metric: values[resume_after:]}), "resume", **config)
    return fake.run(tmp_path, fake.Options(values={metric: values}), **config)


@pytest.mark.parametrize("resume_after", [0, 2])
@pytest.mark.parametrize(
    ("metric", "values", "step"),
    [("val_a_loss", [1.0, 0.5, 0.8], 2), ("macro_f1", [0.2, 0.6, 0.4], 2), ("loss", [math.nan, 0.9, 0.7], 3),
     ("loss", [0.9, math.nan, 1.0], 1), ("loss", [0.9, -math.inf, 1.0], 1)],
)  # fmt: skip
def test_b37_best_by_known_direction(tmp_path, metric, values, step, resume_after):
    result = scripted(tmp_path, metric, values, resume_after)
    tree = receipt(result.run_dir)
    assert tree["best"]["step"] == step
    assert tree["best"]["value"] == values[step - 1]
    assert tree["best"]["present"]
    kept = sorted(p.name for p in (result.run_dir / "checkpoints").iterdir())
    newest = max({1, 2, 3} - {step})
    assert kept == sorted([f"step-0000000{step}", f"step-0000000{newest}"])
    if not all(map(math.isfinite, values)):
        assert any(f"validation {metric} is" in text for text in tree["warnings"])


def test_b37_missing_best_folder_is_a_warning(tmp_path, capsys):
    config = {
        "train": {"steps": 2, "schedule": "constant"}, "checkpoint": {"every_steps": 1, "keep": 1},
        "validation": {"data": ["v"], "every_steps": 1},
    }  # fmt: skip
    first = fake.run(tmp_path, fake.Options(values={"loss": [0.1, 0.5]}), **config)
    best = first.run_dir / "checkpoints" / "step-00000001"
    best.rename(tmp_path / "elsewhere")
    config["train"]["steps"] = 4
    fake.run(tmp_path, fake.Options(values={"loss": [0.5, 0.4]}), "resume", **config)
    assert "best checkpoint (step 1) is gone" in capsys.readouterr().err
    tree = receipt(first.run_dir)
    assert tree["status"] == "ok"
    assert (tree["best"]["step"], tree["best"]["present"]) == (1, False)


def test_b37_direction_must_be_known(tmp_path):
    with pytest.raises(UserError, match="'quality': is more better, or less"):
        scripted(tmp_path, "quality", [1.0])
    result = scripted(tmp_path, "quality", [1.0, 3.0, 2.0], mode="max")
    assert receipt(result.run_dir)["best"]["step"] == 2


def test_b37_a_metric_that_is_not_measured_is_refused(tmp_path):
    with pytest.raises(UserError, match="'macro_f1' is not measured"):
        fake.run(tmp_path, validation={"data": ["v"], "metric": "macro_f1"}, train={"steps": 2})


def test_validation_between_checkpoints_saves_the_best(tmp_path):
    config = {"validation": {"data": ["v"], "every_steps": 2}, "checkpoint": {"every_steps": 0, "keep": 1}}
    options = fake.Options(values={"loss": [0.9, 0.3, 0.5, 0.6]})
    result = fake.run(tmp_path, options, train={"steps": 8}, **config)
    assert sorted(p.name for p in (result.run_dir / "checkpoints").iterdir()) == ["step-00000004", "step-00000008"]
    measured = [json.loads(line) for line in (result.run_dir / "validation.jsonl").read_text().splitlines()]
    assert measured[1] == {"step": 4, "loss": 0.3, "best": True}
