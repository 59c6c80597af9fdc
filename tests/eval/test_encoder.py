"""Prompts of evaluation are the training prefixes: same system text, same template, BOS once, on every path."""

import json
import re

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from lamella.config import DataConfig
from lamella.data.dataset import encode_dataset
from lamella.data.encode import load_tokenizer
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.eval.encoder import StoreEncoder
from lamella.eval.run import evaluate
from lamella.eval.table import to_json
from lamella.eval.task import TaskConfig, TaskRow, build_task, load_task
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from lamella.store.reader import Store
from tests.data.templates import BOS, STRICT
from tests.eval.oracle import SaysEngine
from tests.fixtures import chat12, dense_config, make_tokenizer, write_checkpoint, write_jsonl

SYSTEM = "Answer in one word, café."


def bos_tokenizer(template=BOS, *, eos=False):
    """The template writes BOS, and the post-processor adds BOS (and eos) once more to every text."""
    tokenizer = make_tokenizer(template)
    ids = {t: tokenizer.convert_tokens_to_ids(t) for t in ("<|bos|>", "<|eos|>")}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A <|eos|>" if eos else "<|bos|> $A", special_tokens=list(ids.items())
    )
    return tokenizer


def write_adapter(folder, system=None, template=None):
    folder.mkdir()
    (folder / "lamella_adapter.json").write_text(json.dumps({"system": system}), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def train_rows(tmp_path, folder, **settings):
    path = write_jsonl(tmp_path / "rows.jsonl", chat12())
    return encode_dataset(DataConfig(train=(path,), **settings), load_tokenizer(folder)).rows


def prefix(row):
    return list(row.input_ids[: row.label_mask.find(1)])


def answer(row):
    return [t for t, label in zip(row.input_ids, row.label_mask, strict=True) if label]


@pytest.mark.parametrize("eos", [False, True], ids=["bos", "bos+eos"])
@pytest.mark.parametrize("own_template", [False, True], ids=["template of the store", "of the adapter"])
def test_b12_b21_prompts_are_the_training_prefix_with_its_system_text(tmp_path, eos, own_template):
    bos_tokenizer(STRICT if own_template else BOS, eos=eos).save_pretrained(tmp_path / "store")
    (tmp_path / "t.jinja").write_text(BOS)
    template = tmp_path / "t.jinja" if own_template else None
    rows = train_rows(tmp_path, tmp_path / "store", system=SYSTEM, chat_template=template)
    adapter = write_adapter(tmp_path / "adapter", SYSTEM, BOS if own_template else None)
    encoder = StoreEncoder.open(tmp_path / "store", adapter)
    assert encoder.system == SYSTEM
    for row, source in zip(rows, chat12(), strict=True):
        question, said = source["messages"]
        prompt = encoder.prompt_ids([question])
        assert prompt == prefix(row)
        assert SYSTEM in encoder.decode(prompt)
        assert prompt[:2].count(0) == prompt.count(0) == 1  # <|bos|>
        assert encoder.answer_ids(said["content"]) == answer(row)
        own = [{"role": "system", "content": "S1"}, question]
        assert SYSTEM not in encoder.decode(encoder.prompt_ids(own))


def test_b21_a_system_text_is_folded_as_in_training(tmp_path):
    make_tokenizer(STRICT).save_pretrained(tmp_path / "store")
    rows = train_rows(tmp_path, tmp_path / "store", system=SYSTEM)
    encoder = StoreEncoder.open(tmp_path / "store", write_adapter(tmp_path / "adapter", SYSTEM))
    for row, source in zip(rows, chat12(), strict=True):
        assert encoder.prompt_ids(source["messages"][:1]) == prefix(row)
        assert encoder.answer_ids(source["messages"][1]["content"]) == answer(row)


@pytest.mark.parametrize("system", [None, "missing key", "missing file"])
def test_adapters_without_a_system_text_add_none(tmp_path, system):
    make_tokenizer().save_pretrained(tmp_path / "store")
    adapter = write_adapter(tmp_path / "adapter")
    if system == "missing key":
        (adapter / "lamella_adapter.json").write_text("{}")
    elif system == "missing file":
        (adapter / "lamella_adapter.json").unlink()
    question = chat12()[0]["messages"][:1]
    assert StoreEncoder.open(tmp_path / "store", adapter).prompt_ids(question) == (
        StoreEncoder.open(tmp_path / "store").prompt_ids(question)
    )


@pytest.mark.parametrize("body", [b'{"system": 3}', b"[1]", b'{"system": "x"', b"\xff"])
def test_broken_adapter_facts_are_refused(tmp_path, body):
    make_tokenizer().save_pretrained(tmp_path / "store")
    adapter = write_adapter(tmp_path / "adapter")
    (adapter / "lamella_adapter.json").write_bytes(body)
    with pytest.raises(UserError, match=r"lamella_adapter\.json: "):
        StoreEncoder.open(tmp_path / "store", adapter)


class Recorder:
    """Passes everything to an engine and keeps the prompts of its generations."""

    def __init__(self, engine):
        self.engine, self.config, self.prompts = engine, engine.config, []

    def score(self, batches):
        return self.engine.score(batches)

    def generate(self, prompts, max_new_tokens, stop_ids):
        self.prompts += prompts
        return self.engine.generate(prompts, max_new_tokens=max_new_tokens, stop_ids=stop_ids)


@pytest.mark.parametrize("eos", [False, True], ids=["bos", "bos+eos"])
def test_b12_training_evaluation_generation_and_the_exported_tokenizer_agree(tmp_path, eos):
    write_checkpoint(tmp_path / "hf", dense_config(), tokenizer=bos_tokenizer(eos=eos))
    quantize_checkpoint(str(tmp_path / "hf"), tmp_path / "store", QuantizeSettings())
    rows = train_rows(tmp_path, tmp_path / "store", system=SYSTEM)
    prefixes = [prefix(row) for row in rows]

    encoder = StoreEncoder.open(tmp_path / "store", write_adapter(tmp_path / "adapter", SYSTEM))
    questions = [source["messages"][0]["content"] for source in chat12()]
    task = build_task(
        TaskConfig(name="t", prompt="{text}"), [],
        [TaskRow(tenant="a", text=q, label="xy"[n % 2]) for n, q in enumerate(questions)],
    )  # fmt: skip
    assert [encoder.prompt_ids(task.messages(r)) for r in task.test] == prefixes

    recorder = Recorder(Engine.open(Store.open(tmp_path / "store"), dtype="fp32", threads=1))
    evaluate(task, recorder, encoder, mode="generate", max_new_tokens=1, batch_tokens=100, resamples=100)
    assert [list(p) for p in recorder.prompts] == prefixes

    AutoTokenizer.from_pretrained(tmp_path / "store").save_pretrained(tmp_path / "exported")
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")
    for row, source in zip(rows, chat12(), strict=True):
        turns = [{"role": "system", "content": SYSTEM}, *source["messages"]]
        served = exported.apply_chat_template(turns[:2], add_generation_prompt=True, tokenize=True, return_dict=False)
        assert served == prefix(row)
        assert exported.apply_chat_template(turns, tokenize=True, return_dict=False) == list(row.input_ids)

    bos, end = exported.convert_tokens_to_ids(["<|bos|>", "<|eos|>"])
    for ids in prefixes:
        assert ids[:2].count(bos) == ids.count(bos) == 1
        assert end not in ids


def tiny_task(system=None):
    rows = [TaskRow(tenant=t, text=f"{t}{n}", label="xy"[n % 2]) for t in ("a", "b") for n in range(4)]
    return build_task(TaskConfig(name="t", prompt="{text}", system=system), [], rows)


@pytest.mark.parametrize(
    ("trained", "own", "said"),
    [
        (None, "Be brief.", None),
        (SYSTEM, SYSTEM, None),
        (SYSTEM, None, "its prompts begin with the system text of the adapter's training, 'Answer in one word"),
        (
            SYSTEM,
            "Be brief.",
            "the task's `system` is not the text the adapter was trained with .* for a, b; the task's",
        ),
        ("Be a.", "Be {tenant}.", "is not the text the adapter was trained with .* for b; the task's is used"),
    ],
)
def test_b21_another_system_text_than_in_training_is_never_silent(tmp_path, trained, own, said):
    make_tokenizer().save_pretrained(tmp_path / "store")
    encoder = StoreEncoder.open(tmp_path / "store", write_adapter(tmp_path / "adapter", trained))
    task = tiny_task(own)
    result = evaluate(task, SaysEngine(encoder, ["x", "y"] * 4), encoder, mode="generate", resamples=20)
    (system,) = to_json(task, [result])["systems"]
    assert system["warnings"] == result.warnings
    found = [w for w in result.warnings if "system" in w]
    assert len(found) == (said is not None)
    assert said is None or re.search(said, found[0])


def test_a_row_that_the_template_refuses_is_named(tmp_path):
    """By file and line where it was read from a file, else by its id."""
    refusing = "{% if 'forbidden' in messages[0].content %}{{ raise_exception('no such word') }}{% endif %}"
    make_tokenizer(refusing + STRICT).save_pretrained(tmp_path / "store")
    encoder = StoreEncoder.open(tmp_path / "store")
    rows = [{"tenant": "a", "text": "fine", "label": "x"}, {"tenant": "a", "text": "forbidden", "label": "y", "id": 7}]
    write_jsonl(tmp_path / "test.jsonl", rows)
    (tmp_path / "task.toml").write_text('name = "t"\ntest = "test.jsonl"\nprompt = "{text}"\n')
    task = load_task(tmp_path / "task.toml")
    with pytest.raises(UserError, match=r"test\.jsonl:2: row 7 of tenant 'a': .*no such word") as caught:
        evaluate(task, SaysEngine(encoder, []), encoder, mode="generate", resamples=20)
    assert (caught.value.path, caught.value.line) == (str(tmp_path / "test.jsonl"), 2)
    built = build_task(task.config, [], [TaskRow(**row) for row in rows])
    with pytest.raises(UserError, match=r"^row 7 of tenant 'a': .*no such word"):
        evaluate(built, SaysEngine(encoder, []), encoder, mode="generate", resamples=20)
