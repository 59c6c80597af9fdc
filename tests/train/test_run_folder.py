"""What a run may touch in its folder, and what is refused before anything is touched."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from lamella.cli import app
from lamella.data.encode import load_tokenizer
from lamella.errors import RunFailed, UserError
from lamella.store.quantize import quantize_checkpoint
from lamella.train.assemble import assemble_parts, open_rows
from lamella.train.loop import train_run
from tests import fixtures
from tests.train import fake

ADAPTER = "adapter_model.safetensors"


def files(folder):
    """Every file below `folder` with its bytes; not the lock."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def receipt(folder):
    return json.loads((folder / "receipt.json").read_text())


def refused(config, mode="auto", match="", assemble=None):
    """Run, expect a `UserError` with exit code 2 and that the run's folder is as before."""
    folder = config.runs_dir / config.name
    before = files(folder)
    with pytest.raises(UserError, match=match) as error:
        train_run(config, mode, assemble)
    assert error.value.exit_code == 2
    assert files(folder) == before
    return error.value


# ---- files that are not a run's


@pytest.mark.parametrize("mode", ["auto", "resume", "fresh"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        (ADAPTER, "weights"),
        ("adapter_config.json", "{}"),
        ("config.json", '{"model_type": "llama"}'),
        ("receipt.json", '["not", "ours"]'),
        ("receipt.json", "no JSON"),
        ("checkpoints/best.pt", "mine"),
    ],
)
def test_files_of_others_are_not_taken(tmp_path, mode, name, content):
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text(content)
    opened = []
    refused(fake.make_config(tmp_path), mode, f"holds {name.split('/')[0]}", lambda *_: opened.append(1))
    assert not opened
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_foreign_receipt_beside_our_config_is_not_taken(tmp_path):
    fake.run(tmp_path, train={"steps": 2})
    (tmp_path / "run" / "receipt.json").write_text("{}")
    refused(
        fake.make_config(tmp_path, train={"steps": 2}), "fresh", "holds receipt.json", fake.assembler(fake.Options())
    )


def test_other_names_stay_and_do_not_disturb(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    fake.run(tmp_path, train={"steps": 2})
    (tmp_path / "run" / "checkpoints" / "notes.txt").write_text("mine too")
    fake.run(tmp_path, None, "fresh", train={"steps": 3})
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "run" / "checkpoints" / "notes.txt").read_text() == "mine too"
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000003"]


# ---- a mistake costs nothing


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"data": {"train": ["/nope"]}}, "/nope"),
        ({"lora": {"targets": ["no_such_proj"]}}, "no_such_proj"),
        ({"store": "/nope"}, "/nope"),
        ({"validation": {"data": ["/nope"]}}, "/nope"),
        ({"validation": {"metric": "f1"}}, "no validation.data"),
        ({"compute": {"dtype": "fp16"}}, "fp16"),
    ],
)
def test_fresh_with_a_mistake_keeps_the_finished_run(real_config, sections, match):
    train_run(real_config("dense", train={"steps": 1}))
    store = sections.get("store", "dense")
    config = real_config(store, train={"steps": 1}, **{k: v for k, v in sections.items() if k != "store"})
    refused(config, "fresh", match)
    assert receipt(config.runs_dir / "run")["status"] == "ok"


def test_b57_init_adapter_in_the_runs_own_folder_is_refused(real_config):
    run_dir = train_run(real_config("dense", train={"steps": 1})).run_dir
    for inside in (run_dir, run_dir / "checkpoints" / "step-00000001"):
        error = refused(real_config("dense", init_adapter=str(inside)), "fresh", "init_adapter = .* own folder")
        assert "another name" in error.fix
    (run_dir / "chat_template.jinja").write_text(fixtures.CHATML)
    config = real_config("dense", data={"chat_template": str(run_dir / "chat_template.jinja")})
    refused(config, "fresh", r"data\.chat_template")


def test_b57_init_adapter_of_another_base_is_refused(real_config, tmp_path):
    first = train_run(real_config("dense", name="first", train={"steps": 1}))
    fixtures.write_checkpoint(
        tmp_path / "hf", fixtures.dense_config(layers=4), seed=1, tokenizer=fixtures.make_tokenizer()
    )
    quantize_checkpoint(tmp_path / "hf", tmp_path / "other", threads=1)
    config = real_config("dense", name="second", init_adapter=str(first.run_dir), train={"steps": 1})
    refused(config.model_copy(update={"store": tmp_path / "other"}), match="trained on a base with fingerprint")
    assert train_run(config).final_loss > 0


# ---- resume


def finished(tmp_path, **train):
    config = {"checkpoint": {"every_steps": 5}, "train": {"schedule": "constant", "steps": 10, **train}}
    fake.run(tmp_path, **config)
    return config


def test_b35_a_refused_resume_touches_nothing(tmp_path):
    config = finished(tmp_path)
    more = {**config, "train": {**config["train"], "steps": 20}}
    other_data = fake.assembler(fake.Options(rows=40))
    refused(fake.make_config(tmp_path, **more), "resume", "training data is not the checkpoint's", other_data)
    more["train"]["learning_rate"] = 0.5
    refused(fake.make_config(tmp_path, **more), "resume", "learning_rate", fake.assembler(fake.Options()))
    assert receipt(tmp_path / "run")["status"] == "ok"


def test_b35_resume_with_fewer_steps_than_done_is_refused(tmp_path):
    config = finished(tmp_path)
    config["train"]["steps"] = 4
    refused(
        fake.make_config(tmp_path, **config), "resume", "10 steps done, but the configuration asks for 4",
        fake.assembler(fake.Options()),
    )  # fmt: skip


def test_the_engine_is_closed_when_a_run_is_refused(tmp_path):
    config = finished(tmp_path)
    config["train"]["steps"] = 4
    opened = []

    def assemble(*args):
        opened.append(fake.assembler(fake.Options())(*args))
        return opened[-1]

    refused(fake.make_config(tmp_path, **config), "resume", "steps done", assemble)
    assert opened[0].engine.closed


# ---- what a failed run leaves


@pytest.mark.parametrize(
    "options", [{"verify": ["model.norm.weight"]}, {"spoil_saved": "other"}, {"spoil_saved": "nan"}]
)
def test_b62_a_failed_run_leaves_its_adapter_in_checkpoints_alone(tmp_path, options, capsys):
    with pytest.raises(RunFailed):
        fake.run(tmp_path, fake.Options(**options), train={"steps": 4})
    folder = tmp_path / "run"
    assert sorted(p.name for p in folder.iterdir()) == [
        ".lock", "checkpoints", "config.json", "metrics.jsonl", "receipt.json", "trace.json",
    ]  # fmt: skip
    tree = receipt(folder)
    assert tree["status"] == "failed"
    assert tree["kept"] == str(folder / "checkpoints" / "step-00000004")
    assert (folder / "checkpoints" / "step-00000004" / ADAPTER).is_file()
    assert "after step 4 is kept" in capsys.readouterr().err


def test_b62_a_failure_after_resuming_takes_the_old_result_away(tmp_path):
    config = finished(tmp_path)
    assert (tmp_path / "run" / ADAPTER).is_file()
    config["train"]["steps"] = 20
    with pytest.raises(RunFailed):
        fake.run(tmp_path, fake.Options(nan_rows=list(range(60))), "resume", **config)
    assert not (tmp_path / "run" / ADAPTER).exists()
    assert receipt(tmp_path / "run")["kept"] == str(tmp_path / "run" / "checkpoints" / "step-00000010")


def test_a_failure_before_the_first_checkpoint_keeps_none(tmp_path):
    with pytest.raises(RunFailed):
        fake.run(tmp_path, fake.Options(leak=True), train={"steps": 4})
    assert receipt(tmp_path / "run")["kept"] is None


def test_a_store_that_vanishes_in_mid_run(real_config, stores, tmp_path):
    shutil.copytree(stores / "dense", tmp_path / "store")
    config = real_config("dense", train={"steps": 2}).model_copy(update={"store": tmp_path / "store"})

    def assemble(*args):
        parts = assemble_parts(*args)
        step = parts.engine.step

        def vanish(*args, step_index, **more):
            if step_index == 1:  # layers are in memory since the first step
                (tmp_path / "store").rename(tmp_path / "away")
            return step(*args, step_index=step_index, **more)

        parts.engine.step = vanish
        return parts

    with pytest.raises(UserError, match="the store cannot be read any more: No such file") as error:
        train_run(config, assemble=assemble)
    assert error.value.exit_code == 2
    folder = tmp_path / "run"
    assert not (folder / ADAPTER).exists()
    assert receipt(folder)["kept"] == str(folder / "checkpoints" / "step-00000002")
    (tmp_path / "away").rename(tmp_path / "store")
    train_run(config, "resume")
    assert receipt(folder)["status"] == "ok"


# ---- rows the model cannot take


def long_row(words):
    text = " ".join(fixtures.WORDS[i % len(fixtures.WORDS)] for i in range(words))
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]}


@pytest.mark.parametrize("section", ["data.train", "validation.data"])
def test_rows_over_the_models_context_are_refused(real_config, tmp_path, section):
    rows = fixtures.write_jsonl(tmp_path / "long.jsonl", [*fixtures.chat12()[:8], long_row(600), long_row(900)])
    if section == "data.train":
        sections = {"data": {"train": [str(rows)], "max_tokens": 4096}}
    else:
        sections = {"data": {"max_tokens": 4096}, "validation": {"data": [str(rows)]}}
    error = refused(
        real_config("dense", **sections), match=r"context of 512 tokens; this one, the longest, has \d+ tokens"
    )
    assert "2 of 10 rows" in error.what
    assert (error.path, error.line) == (str(rows), 10)
    assert "data.max_tokens = 512" in error.fix
    sections["data"] |= {"max_tokens": 512, "too_long": "cut_prompt"}
    train_run(real_config("dense", train={"steps": 1}, **sections))


def test_a_row_of_exactly_the_context_is_taken(real_config, tmp_path):
    tokenizer = load_tokenizer(real_config("dense").store)
    lengths = {}
    for words in range(300, 600):
        row = fixtures.write_jsonl(tmp_path / "row.jsonl", [long_row(words)])
        rows = open_rows(
            real_config("dense", data={"train": [str(row)], "max_tokens": 512, "too_long": "cut_prompt"}), tokenizer
        )
        lengths[words] = rows.tokens(0)
        if lengths[words] == 512:
            break
    assert 512 in lengths.values()


def test_ids_outside_the_vocabulary_are_refused_before_weights_are_read(real_config, stores, tmp_path):
    shutil.copytree(stores / "dense", tmp_path / "store")
    tokenizer = load_tokenizer(tmp_path / "store")
    tokenizer.add_tokens([f"<extra{i}>" for i in range(600 - len(tokenizer))])
    last = tokenizer.convert_ids_to_tokens(599)
    tokenizer.save_pretrained(tmp_path / "store")
    rows = fixtures.chat12()
    rows[4]["messages"][1]["content"] += f" {last}"
    file = fixtures.write_jsonl(tmp_path / "extra.jsonl", rows)
    for path in (tmp_path / "store").glob("layers/*"):
        path.write_bytes(b"")  # whoever read weights would fail on them
    config = real_config("dense", data={"train": [str(file)]}).model_copy(update={"store": tmp_path / "store"})
    with pytest.raises(UserError, match=rf"token '{last}' has id 599, but the model's vocab_size is 512") as error:
        open_rows(config, load_tokenizer(config.store))
    assert (error.value.path, error.value.line) == (str(file), 5)


# ---- validation metrics


@pytest.mark.parametrize("metric", ["f1", "perplexity", "no_such_thing"])
def test_a_metric_without_validation_data_is_refused(real_config, metric):
    refused(real_config("dense", validation={"metric": metric}), match="no validation.data")


def test_a_metric_that_training_cannot_measure_is_refused(real_config, tmp_path):
    validation = {"data": real_config("dense").data.train, "metric": "f1"}
    error = refused(real_config("dense", validation=validation), match="'f1' is not measured during training")
    assert "loss, perplexity" in error.fix
    assert train_run(real_config("dense", validation={**validation, "metric": "perplexity"}, train={"steps": 1}))


def test_the_dry_run_says_the_same(stores, tmp_path):
    long = fixtures.write_jsonl(tmp_path / "long.jsonl", [long_row(900)])
    (tmp_path / "run.toml").write_text(f'store = "{stores / "dense"}"\n[data]\ntrain = ["{long}"]\nmax_tokens = 4096\n')
    for more, match in (
        ([], "context of 512"),
        (["validation.metric=f1"], "no validation.data"),
        (["validation.metric=f1", f"validation.data={long}"], "not measured"),
    ):
        result = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), "--dry-run", *more])
        assert isinstance(result.exception, UserError)
        assert match in str(result.exception)
