"""`lamella eval` on a store: the engine's numbers against plain transformers on the dequantised base."""

import json

import pytest
import torch
from typer.testing import CliRunner

from lamella.adapter import Adapter
from lamella.cli import app
from lamella.config import LoraConfig
from lamella.data.encode import Encoder
from lamella.data.formats import Conversation, Message
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.eval.encoder import StoreEncoder
from lamella.eval.run import evaluate
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from lamella.store.reader import Store
from tests.eval.conftest import LABELS, fcls
from tests.eval.oracle import OracleEngine
from tests.fixtures import chat12, dense_config, make_tokenizer, random_model, write_checkpoint, write_jsonl

RESAMPLES = dict(resamples=100)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    write_checkpoint(folder / "hf", dense_config(max_position_embeddings=2048), tokenizer=make_tokenizer())
    quantize_checkpoint(str(folder / "hf"), folder / "store", QuantizeSettings())
    return folder / "store"


@pytest.fixture(scope="module")
def task_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    rows = [{"tenant": r.tenant, "text": r.text, "entity": r.entity, "label": r.label} for r in fcls()]
    write_jsonl(folder / "test.jsonl", rows)
    write_jsonl(folder / "train.jsonl", [{**r, "text": r["text"] + " again"} for r in rows[:30]])
    (folder / "task.toml").write_text(
        'name = "fcls"\ntest = "test.jsonl"\ntrain = "train.jsonl"\nprompt = "{text}\\nWhat is {entity}?"\n'
    )
    return folder / "task.toml"


def adapter_folder(store, folder):
    engine = Engine.open(Store.open(store), dtype="fp32", threads=1)
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    for p in adapter.parameters().values():
        p.data.copy_(0.3 * torch.randn(p.shape, generator=generator))
    adapter.save(folder)
    return folder


def dequantized_model(store):
    """Plain transformers model with the store's weights."""
    opened = Store.open(store)
    model = random_model(dense_config(max_position_embeddings=2048))
    state = model.state_dict()
    for group in [*range(opened.manifest.num_layers), "outer"]:
        packed = opened.load(group)
        for record in opened.records(group):
            packed.dequantize(record.name, state[record.name])
    return model.eval()


@pytest.mark.parametrize("mode", ["likelihood", "constrained", "generate"])
def test_b83_engine_equals_transformers_at_any_batch_size(store, task, mode):
    encoder = StoreEncoder.open(store)
    engine = Engine.open(Store.open(store), dtype="fp32", threads=1)
    oracle = evaluate(task, OracleEngine(dequantized_model(store)), encoder, mode=mode, max_new_tokens=4, **RESAMPLES)
    for batch_tokens, walk_tokens in ((1, 1), (800, 2000), (50_000, 50_000)):
        result = evaluate(task, engine, encoder, mode=mode, max_new_tokens=4, batch_tokens=batch_tokens,
                          walk_tokens=walk_tokens, **RESAMPLES)  # fmt: skip
        assert result.metrics == oracle.metrics
        for p, q in zip(result.predictions, oracle.predictions, strict=True):
            assert (p.label, p.status, p.output) == (q.label, q.status, q.output)
            if p.scores is not None:
                assert list(p.scores.values()) == pytest.approx(list(q.scores.values()), abs=1e-4)


@pytest.mark.parametrize("mode", ["likelihood", "constrained"])
def test_batch_size_and_dtype(store, task, mode):
    """fp32: the same labels and figures at any budget. bf16: scores move by rounding, so only near ties may change."""
    encoder = StoreEncoder.open(store)
    for dtype, moves in (("fp32", 1e-4), ("bf16", 0.05)):
        engine = Engine.open(Store.open(store), dtype=dtype, threads=1)
        first, *others = (
            evaluate(task, engine, encoder, mode=mode, batch_tokens=n, walk_tokens=4 * n, **RESAMPLES)
            for n in (256, 1024, 4096)
        )
        for other in others:
            for p, q in zip(first.predictions, other.predictions, strict=True):
                assert list(p.scores.values()) == pytest.approx(list(q.scores.values()), abs=moves)
                if mode == "likelihood":
                    assert p.label == q.label or p.margin < 2 * moves
            if dtype == "fp32":
                assert [p.label for p in first.predictions] == [p.label for p in other.predictions]
                assert other.metrics == first.metrics


def test_answers_are_encoded_as_training_encodes_them(store):
    encoder = StoreEncoder.open(store)
    training = Encoder(make_tokenizer())
    for row in chat12():
        question, answer = row["messages"]
        encoding = training.encode(Conversation((Message("user", question["content"]),
                                                 Message("assistant", answer["content"]))))  # fmt: skip
        joined = [*encoder.prompt_ids([question]), *encoder.answer_ids(answer["content"])]
        assert encoding.ids[: len(joined)] == joined
        assert sum(encoding.mask) == len(encoder.answer_ids(answer["content"]))
        assert encoder.answer_ids(answer["content"])[-1] in encoder.stop_ids
        assert encoder.decode(encoder.answer_ids(answer["content"])) == answer["content"] + "<|im_end|>"


def test_command_measures_all_systems_in_one_table(store, task_file, tmp_path):
    folder = adapter_folder(store, tmp_path / "lora")
    arguments = ["eval", str(task_file), "--store", str(store), "--adapter", str(folder), "--few-shot", "3",
                 "--dtype", "fp32", "--threads", "1", "--resamples", "100", "-o", str(tmp_path / "out")]  # fmt: skip
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    measured = json.loads((tmp_path / "out/metrics.json").read_text())
    names = [s["name"] for s in measured["systems"]]
    assert names == ["zero-shot", "3-shot", "tuned", "majority", "TF-IDF"]
    for name in names:
        assert name in shown.stdout
    assert measured["labels"]["left"] == sorted(LABELS)
    assert measured["in_effect"]["dtype"] == "fp32"
    predictions = [json.loads(line) for line in (tmp_path / "out/predictions.jsonl").read_text().splitlines()]
    assert len(predictions) == 5 * 60
    scores = {s: [p["scores"] for p in predictions if p["system"] == s] for s in ("zero-shot", "tuned")}
    assert scores["zero-shot"] != scores["tuned"]

    again = CliRunner().invoke(app, [*arguments, "--json", "--batch-tokens", "300"], catch_exceptions=False)
    printed = json.loads(again.stdout)
    for a, b in zip(printed["systems"], measured["systems"], strict=True):
        assert (a["average"], a["tenants"]) == (b["average"], b["tenants"])


def test_command_refuses_one_adapter_named_twice(store, task_file, tmp_path):
    folder = str(adapter_folder(store, tmp_path / "lora"))
    arguments = ["eval", str(task_file), "--store", str(store), "--adapter", folder, "--adapter", folder]
    with pytest.raises(UserError, match="named twice"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
