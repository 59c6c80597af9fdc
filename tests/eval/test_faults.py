"""Faulty tasks, stores and adapters: refused before the model works, or told beside the figures."""

import json

import pytest
import torch
from typer.testing import CliRunner

from lamella.adapter import Adapter
from lamella.cli import app
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.eval import systems
from lamella.eval.baseline import tfidf_baseline
from lamella.eval.labels import LabelParser
from lamella.eval.run import evaluate
from lamella.eval.systems import measure_systems
from lamella.eval.task import TaskConfig, TaskRow, build_task, load_task
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from lamella.store.reader import Store
from tests.eval.oracle import OracleEngine, TokenizerEncoder
from tests.fixtures import dense_config, make_tokenizer, random_model, write_checkpoint, write_jsonl


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    write_checkpoint(folder / "hf", dense_config(), tokenizer=make_tokenizer())
    quantize_checkpoint(str(folder / "hf"), folder / "store", QuantizeSettings())
    return folder / "store"


def rows(labels=("street", "city"), count=6, **changed):
    base = [
        {"tenant": "left", "text": f"the street number {i}", "entity": "street", "label": labels[i % len(labels)]}
        for i in range(count)
    ]
    return [{**row, **changed} for row in base]


def write_task(folder, test, train=None):
    write_jsonl(folder / "test.jsonl", test)
    lines = ['name = "t"', 'test = "test.jsonl"', 'prompt = "{text}: {entity}?"']
    if train is not None:
        write_jsonl(folder / "train.jsonl", train)
        lines.append('train = "train.jsonl"')
    (folder / "task.toml").write_text("\n".join(lines) + "\n")
    return folder / "task.toml"


class IdleEngine(OracleEngine):
    def score(self, batches):
        raise AssertionError("the model must not work")

    generate = score


# --- labels


def test_blank_label_is_named_with_its_row(tmp_path):
    path = write_task(tmp_path, [*rows(), *rows(label="  ", count=1)])
    with pytest.raises(UserError, match="label '  ' is blank") as caught:
        load_task(path)
    assert (caught.value.path, caught.value.line) == (str(tmp_path / "test.jsonl"), 7)


def test_blank_label_of_the_task_is_named():
    config = TaskConfig(name="t", prompt="{text}", labels={"left": ("street", "city", " ")})
    with pytest.raises(UserError, match="label ' ' is blank"):
        build_task(config, [], [TaskRow(**r) for r in rows()])


def test_labels_that_differ_in_outer_white_space_are_refused(tmp_path):
    for strict in (False, True):
        with pytest.raises(UserError, match="'a' and 'a ' differ in white space"):
            LabelParser(["a", "b", "a "], strict=strict)
    with pytest.raises(UserError, match="differ in white space") as caught:
        load_task(write_task(tmp_path, rows(labels=("a", "a ", "a b"))))
    assert caught.value.path == str(tmp_path / "task.toml")
    assert LabelParser(["a ", "b"])("a") == "a "


# --- before the model works


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_outside_its_range_is_a_usage_error(store, tmp_path, seed):
    arguments = ["eval", str(write_task(tmp_path, rows())), "--store", str(store), "--seed", str(seed)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 2
    assert "--seed" in shown.output


@pytest.mark.parametrize(
    ("changed", "column"), [({"text": "", "entity": ""}, "entity"), ({"text": " ", "entity": "x"}, "text")]
)
def test_blank_training_texts_are_told_before_the_store_is_opened(tmp_path, changed, column):
    task = load_task(write_task(tmp_path, rows(), rows(**changed)))
    with pytest.raises(UserError, match=f"TF-IDF is not possible: `{column}`") as caught:
        measure_systems(task, tmp_path / "absent")
    assert caught.value.path == str(tmp_path / "train.jsonl")
    assert "--no-baseline" in str(caught.value)


def test_punctuation_is_enough_for_the_baseline(tmp_path):
    result = tfidf_baseline(load_task(write_task(tmp_path, rows(), rows(text="!", entity="?"))), resamples=100)
    assert len(result.predictions) == 6


@pytest.mark.parametrize("mode", ["likelihood", "generate"])
def test_token_beyond_the_vocabulary_is_refused_before_the_model_works(mode, tmp_path):
    tokenizer = make_tokenizer()
    encoder = TokenizerEncoder(tokenizer)
    task = load_task(write_task(tmp_path, rows()))
    needed = max(max(encoder.prompt_ids(task.messages(r))) for r in task.test)
    engine = IdleEngine(random_model(dense_config(vocab_size=needed)))
    with pytest.raises(UserError, match=rf"id {needed}, but the model's vocab_size is {needed}") as caught:
        evaluate(task, engine, encoder, mode=mode, resamples=100)
    assert repr(tokenizer.decode([needed])) in str(caught.value)
    assert (caught.value.path, caught.value.line is not None) == (str(tmp_path / "test.jsonl"), True)


def test_label_token_beyond_the_vocabulary_is_refused(tmp_path):
    encoder = TokenizerEncoder(make_tokenizer())
    task = load_task(write_task(tmp_path, rows()))
    inside = max(max(encoder.prompt_ids(task.messages(r))) for r in task.test) + 1

    class WideLabels(TokenizerEncoder):
        def answer_ids(self, text):
            return [inside, *super().answer_ids(text)]

        def decode(self, ids):
            return "wide" if ids == [inside] else super().decode(ids)

    engine = IdleEngine(random_model(dense_config(vocab_size=inside)))
    with pytest.raises(UserError, match=f"label 'city' of tenant 'left': it needs the token 'wide' with id {inside}"):
        evaluate(task, engine, WideLabels(make_tokenizer()), resamples=100)


def save_adapter(store, folder):
    engine = Engine.open(Store.open(store), dtype="fp32", threads=1)
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=2), seed=0)
    generator = torch.Generator().manual_seed(1)
    for p in adapter.parameters().values():
        p.data.copy_(0.3 * torch.randn(p.shape, generator=generator))
    adapter.save(folder)
    return folder


def test_broken_second_adapter_costs_no_measurement(store, tmp_path):
    """The last system's adapter is broken: seen before the first system is asked."""
    task = load_task(write_task(tmp_path, rows()))
    good, bad = save_adapter(store, tmp_path / "good"), save_adapter(store, tmp_path / "bad")
    (bad / "adapter_model.safetensors").write_bytes(b"x")
    asked = []
    real = systems.evaluate

    def watched(*args, **named):
        asked.append(named["name"])
        return real(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(systems, "evaluate", watched)
        with pytest.raises(UserError, match="adapter_model"):
            measure_systems(task, store, [good, bad], shots=0, baseline=False, dtype="fp32", threads=1)
        assert asked == []
        measure_systems(task, store, [good], shots=0, baseline=False, dtype="fp32", threads=1, resamples=100)
        assert asked == ["zero-shot", "tuned"]


# --- the receipt beside an adapter


@pytest.mark.parametrize(
    ("receipt", "told"),
    [
        (None, None),
        ({"status": "ok", "reason": ""}, None),
        ({"status": "failed", "reason": "loss is NaN at step 3"}, "status 'failed', reason: loss is NaN at step 3"),
        ({"status": "interrupted"}, "status 'interrupted', reason: none given"),
        ([], "status None"),
        ("{", "cannot be read"),
    ],
)
def test_adapter_of_a_failed_run_is_told_loudly(store, tmp_path, receipt, told):
    folder = save_adapter(store, tmp_path / "lora")
    if receipt is not None:
        (folder / "receipt.json").write_text(receipt if isinstance(receipt, str) else json.dumps(receipt))
    task = write_task(tmp_path, rows())
    arguments = ["eval", str(task), "--store", str(store), "--adapter", str(folder), "--dtype", "fp32", "--threads", "1",
                 "--resamples", "100", "-o", str(tmp_path / "out")]  # fmt: skip
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert shown.exit_code == 0
    zero, tuned = json.loads((tmp_path / "out/metrics.json").read_text())["systems"]
    notes = [w for w in tuned["warnings"] if "receipt.json" in w]
    assert not any("receipt.json" in w for w in zero["warnings"])
    if told is None:
        assert notes == []
        assert "receipt.json" not in shown.stderr
    else:
        assert len(notes) == 1 and told in notes[0]
        assert f"warning: tuned: {notes[0]}" in shown.stderr
