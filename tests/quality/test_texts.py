"""Rows of any format become texts, within the tokens asked for."""

import json
from itertools import pairwise

import pytest

from lamella.data.encode import Encoder, load_tokenizer
from lamella.data.formats import read_conversation
from lamella.errors import UserError
from lamella.quality.texts import read_texts
from tests.fixtures import chat12, make_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tok")
    make_tokenizer().save_pretrained(path)
    return path


def test_chats_go_through_the_template_whole(folder, tmp_path):
    texts = read_texts(write_jsonl(tmp_path / "t.jsonl", chat12()), folder, 100_000)
    encoder = Encoder(load_tokenizer(folder))
    wanted = {tuple(encoder.encode(read_conversation(row, "auto")[1]).ids) for row in chat12()}
    assert set(texts.ids) == wanted
    assert (texts.rows, texts.cut, texts.unusable) == (12, 0, {})


def test_text_and_prompt_rows_and_bad_ones(folder, tmp_path):
    rows = [{"text": "the layer walk"}, {"prompt": "the street", "completion": "avenue"}, {"nothing": 1}, {"text": ""}]
    file = write_jsonl(tmp_path / "t.jsonl", rows)
    with file.open("a") as stream:
        stream.write("{broken\n")
    texts = read_texts(file, folder, 1000)
    tokenizer = load_tokenizer(folder)
    assert tuple(tokenizer("the layer walk")["input_ids"]) in texts.ids
    assert len(texts.ids) == 2
    assert texts.unusable == {"wrong format": 1, "broken JSON": 1}


def test_rows_are_spread_and_cut_at_the_tokens_asked_for(folder, tmp_path):
    file = write_jsonl(tmp_path / "t.jsonl", [{"text": f"number {i} street " * 20} for i in range(300)])
    texts = read_texts(file, folder, 500)
    assert texts.tokens == 500
    assert texts.cut == 1
    assert texts == read_texts(file, folder, 500)
    words = " ".join(load_tokenizer(folder).decode(ids) for ids in texts.ids).split()
    numbers = {int(a) for word, a in pairwise(words) if word == "number" and a.isdigit()}
    assert max(numbers) > 100
    short = read_texts(file, folder, 500, context=16)
    assert max(len(ids) for ids in short.ids) == 16
    assert short.cut == len(short.ids)


def test_a_file_without_a_usable_row_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="no row can be used: 1 wrong format"):
        read_texts(write_jsonl(tmp_path / "t.jsonl", [{"a": 1}]), folder, 100)
    with pytest.raises(UserError, match="no such file"):
        read_texts(tmp_path / "none.jsonl", folder, 100)
    with pytest.raises(UserError, match="no usable tokenizer"):
        read_texts(write_jsonl(tmp_path / "u.jsonl", [{"text": "a b"}]), tmp_path, 100)
    (tmp_path / "array.json").write_text(json.dumps([{"text": "a"}]))
    with pytest.raises(UserError, match="one JSON array"):
        read_texts(tmp_path / "array.json", folder, 100)
