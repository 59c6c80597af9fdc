"""Rows of a plan: as training encodes them, sampled, taken from characters, or given."""

import json
import random

import pytest

from lamella.config import DataConfig, TrainConfig
from lamella.data.dataset import encode_dataset
from lamella.data.encode import load_tokenizer
from lamella.errors import UserError
from lamella.forecast import rows as rows_room
from lamella.forecast.rows import Rows, check_context, given_rows, micro_batches_of, rows_of
from tests.fixtures import WORDS, chat12, make_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(path)
    return path


def many(path, count, seed=0, most=300):
    rnd = random.Random(seed)
    rows = []
    for _ in range(count):
        question, answer = ([rnd.choice(WORDS) for _ in range(rnd.randint(2, most))] for _ in range(2))
        turns = [{"role": "user", "content": " ".join(question)}, {"role": "assistant", "content": " ".join(answer)}]
        rows.append({"messages": turns})
    return write_jsonl(path, rows)


def test_few_rows_are_counted_as_training_counts_them(folder, tmp_path):
    config = DataConfig(train=(write_jsonl(tmp_path / "rows.jsonl", chat12()),))
    rows, data = rows_of(config, folder), encode_dataset(config, load_tokenizer(folder))
    assert rows.how == "counted" and rows.encoded == 12 and not rows.notes
    assert rows.lengths == tuple(row.tokens for row in data.rows)
    assert rows.labels == tuple(row.label_tokens for row in data.rows)


def test_steps_are_the_ones_training_takes(folder, tmp_path):
    config, train = (
        DataConfig(train=(write_jsonl(tmp_path / "rows.jsonl", chat12()),)),
        TrainConfig(tokens_per_step=200),
    )
    rows, data = rows_of(config, folder), encode_dataset(config, load_tokenizer(folder))
    planner = data.planner(seed=0, rows_per_step=None, tokens_per_step=200)
    assert rows.steps(train) == planner.total_steps(1.0) == rows.steps_per_epoch(train)
    taken = [[data.rows[i].tokens for i in step.rows] for step in planner.epoch(0)]
    assert [row.tokens for row in rows.sample_step(train)] in taken
    assert sum(row.tokens for row in rows.largest_step(train)) == max(map(sum, taken))
    assert rows.steps(TrainConfig(steps=7)) == 7
    for epochs in (0.3, 1.0, 2.0, 2.5):
        assert rows.steps(TrainConfig(tokens_per_step=200, epochs=epochs)) == planner.total_steps(epochs)
    largest = max(planner.epoch(0), key=lambda step: sum(data.rows[i].tokens for i in step.rows))
    packed = data.batches(120, largest.rows)
    mine = micro_batches_of(rows.largest_step(train), TrainConfig(micro_batch_tokens=120))
    assert [batch.tokens for batch in packed] == [sum(row.tokens for row in batch) for batch in mine]


def test_many_rows_are_sampled_and_close_to_the_truth(folder, tmp_path):
    config = DataConfig(train=(many(tmp_path / "rows.jsonl", 1500, most=60),))
    rows, data = rows_of(config, folder), encode_dataset(config, load_tokenizer(folder))
    assert rows.how == "sampled" and len(rows.lengths) == 1500
    assert 8 <= rows.encoded <= rows_room.SAMPLE_ROWS and f"{rows.encoded} of 1500 rows" in rows.notes[0]
    assert rows.tokens == pytest.approx(data.report.tokens, rel=0.01)
    assert rows.label_tokens == pytest.approx(data.report.label_tokens, rel=0.03)
    assert rows_of(config, folder) == rows


def test_without_a_tokenizer_the_assumption_is_stated(tmp_path):
    row = {"prompt": "p" * 80, "completion": "c" * 40}
    rows = rows_of(DataConfig(train=(write_jsonl(tmp_path / "rows.jsonl", [row] * 3),)), None)
    assert rows.lengths == (30,) * 3 and rows.labels == (10,) * 3 and rows.how == "characters" and rows.encoded == 0
    assert "4 characters" in rows.notes[0]
    assert "no tokenizer.json in" in rows_of(DataConfig(train=(tmp_path / "rows.jsonl",)), tmp_path).notes[0]


def test_rows_beyond_what_was_read_are_taken_to_be_alike(folder, tmp_path, monkeypatch):
    path = many(tmp_path / "rows.jsonl", 900, most=10)
    monkeypatch.setattr(rows_room, "SCAN_BYTES", path.stat().st_size // 3)
    rows = rows_of(DataConfig(train=(path,)), folder)
    assert len(rows.lengths) == pytest.approx(900, rel=0.05) and "taken to be alike" in rows.notes[-1]


@pytest.mark.parametrize("tokenizer", [True, False], ids=["tokenizer", "characters"])
def test_bad_rows_are_named_with_file_and_line(tokenizer, folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(chat12()[0]), "", '{"messages": [']) + "\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        rows_of(DataConfig(train=(path,)), folder if tokenizer else None)
    assert (caught.value.path, caught.value.line) == (str(path), 3) and "broken JSON" in caught.value.what
    kept = rows_of(DataConfig(train=(path,), bad_rows="drop", max_drop_share=0.6), folder if tokenizer else None)
    assert len(kept.lengths) == 1 and kept.dropped == 1


def test_no_rows_and_no_file(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n\n", encoding="utf-8")
    with pytest.raises(UserError, match="0 rows"):
        rows_of(DataConfig(train=(tmp_path / "rows.jsonl",)), folder)
    with pytest.raises(UserError, match="no such file"):
        rows_of(DataConfig(train=(tmp_path / "none.jsonl",)), folder)


def test_rows_over_max_tokens(folder, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", chat12())
    whole = rows_of(DataConfig(train=(path,)), folder)
    limit = sorted(whole.lengths)[5]
    with pytest.raises(UserError, match=r"over data\.max_tokens"):
        rows_of(DataConfig(train=(path,), max_tokens=limit), folder)
    dropped = rows_of(DataConfig(train=(path,), max_tokens=limit, too_long="drop", max_drop_share=1.0), folder)
    assert max(dropped.lengths) <= limit and len(dropped.lengths) == sum(n <= limit for n in whole.lengths)


def test_sampled_rows_over_max_tokens_are_counted_and_not_refused(tmp_path):
    path = many(tmp_path / "rows.jsonl", 1500, most=60)
    whole = rows_of(DataConfig(train=(path,)), None)
    limit = sorted(whole.lengths)[-5]
    rows = rows_of(DataConfig(train=(path,), max_tokens=limit), None)
    assert max(rows.lengths) == limit and "training will stop at them" in rows.notes[-1]
    dropped = rows_of(DataConfig(train=(path,), max_tokens=limit, too_long="drop"), None)
    assert max(dropped.lengths) <= limit and 0 < dropped.dropped < 10


def test_given_rows():
    rows = given_rows(3600, 4096, 4096)
    assert rows.tokens == 3600 * 4096 and rows.label_tokens == 3600 * 4095 and rows.how == "given"
    assert rows.steps(TrainConfig(rows_per_step=8)) == 450
    assert rows.run_tokens(TrainConfig(rows_per_step=8, epochs=2.0)) == 2 * rows.tokens
    for count, tokens, what in (
        (0, 10, "nothing"),
        (3, 1, "prompt and an answer"),
        (3, 5000, "data.max_tokens = 4096"),
    ):
        with pytest.raises(UserError, match=what):
            given_rows(count, tokens, 4096)
    with pytest.raises(UserError, match=r"3600 of 3600 rows .* context of tiny, 2048 tokens"):
        check_context(rows, 2048, "tiny")
    check_context(rows, None, "tiny")


def test_different_sizes_of_micro_batches_are_counted_over_the_run():
    rows = Rows((40, 70, 100, 130) * 6, (10,) * 24, "x", "given")
    train = TrainConfig(rows_per_step=3, micro_batch_tokens=4096, steps=8)
    counted = rows.micro_batch_sizes(train, 32)
    assert 2 <= counted <= 8
    assert rows.micro_batch_sizes(train, 1) >= counted
    assert rows.micro_batch_sizes(train.model_copy(update={"steps": 1}), 32) == 1
    assert Rows((64,) * 24, (10,) * 24, "x", "given").micro_batch_sizes(train, 32) == 1
