"""No content of a row gets lost without a reason or a counted note, and no row crashes the reader."""

import json

import pytest

from lamella.data import formats
from lamella.data.encode import load_tokenizer
from lamella.data.formats import read_conversation
from lamella.data.read import RowError, read_rows
from lamella.errors import UserError
from tests.data.helpers import encode_row, encode_rows, labels, text
from tests.data.templates import TOOLS
from tests.fixtures import make_tokenizer

USER, ANSWER = {"role": "user", "content": "the street"}, {"role": "assistant", "content": "avenue"}
GOOD = {"messages": [USER, ANSWER]}
CALL = {"name": "get_answer", "arguments": '{"city": "x"}'}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def dropped(tmp_path, row, tokenizer):
    """The problem of `row` (second line), which `bad_rows = "drop"` leaves out."""
    data = encode_rows(tmp_path, [GOOD, row], tokenizer, bad_rows="drop", max_drop_share=1.0)
    assert len(data.rows) == 1
    (problem,) = data.report.problems
    assert problem.line == 2
    return problem


def test_system_of_prompt_and_completion_is_rendered(tokenizer):
    row = {"prompt": "the street", "completion": "avenue", "system": "SYSTEMTEXT"}
    encoding = encode_row(row, tokenizer)
    chat = {"messages": [{"role": "system", "content": "SYSTEMTEXT"}, USER, ANSWER]}
    assert "SYSTEMTEXT" in text(tokenizer, encoding.ids)
    assert (encoding.ids, encoding.mask) == (encode_row(chat, tokenizer).ids, encode_row(chat, tokenizer).mask)


@pytest.mark.parametrize("extra", [{"system": "SYSTEMTEXT"}, {"tools": [{"name": "get_answer"}]}])
def test_system_and_tools_need_a_template(extra):
    bare = make_tokenizer(chat_template=None)
    row = {"prompt": "the street", "completion": "avenue"}
    assert encode_row(row, bare).ids
    with pytest.raises(RowError, match="no chat template"):
        encode_row(row | extra, bare)


def test_unused_system_setting_is_told(tmp_path):
    row = {"prompt": "the street", "completion": "avenue"}
    report = encode_rows(tmp_path, [row], make_tokenizer(chat_template=None), system="be brief").report
    assert any("data.system is not used" in line for line in report.warnings)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [USER, {**ANSWER, "reasoning_content": {"x": 1}}]}, "not text: `reasoning_content`"),
        ({"messages": [{**USER, "reasoning": "why"}, ANSWER]}, "`reasoning`, which belongs to assistant"),
        ({"messages": [{**USER, "tool_calls": [{"function": CALL}]}, ANSWER]}, "`tool_calls`, which belongs"),
        ({"messages": [{**USER, "function_call": CALL}, ANSWER]}, "`function_call`, which belongs"),
        ({"messages": [USER, {**ANSWER, "function_call": CALL, "tool_calls": [{"function": CALL}]}]}, "has both"),
        ({"system": "top", "messages": [{"role": "system", "content": "in"}, USER, ANSWER]}, "system given twice"),
        ({"messages": [USER, {**ANSWER, "weight": "0"}]}, "bad weight: `weight` of message 1 is '0'"),
        ({"messages": [USER, {**ANSWER, "weight": -1}]}, "bad weight"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "bad weight"),
        ({"instruction": 0, "input": 0, "output": "o"}, "not text: `instruction` is int"),
        ({"instruction": "x", "input": 0, "output": "o"}, "not text: `input` is int"),
        ({"instruction": "", "input": " ", "output": "o"}, "no question: `instruction` and `input` are empty"),
        ({"prompt": " ", "completion": "a"}, "no question: `prompt` is empty"),
        ({"instruction": "i", "output": "o", "history": 5}, "`history` must be a list"),
        ({"instruction": "i", "output": "o", "history": {"a": 1}}, "`history` must be a list"),
    ],
)
def test_lost_content_is_a_problem_of_the_row(tmp_path, tokenizer, row, reason):
    problem = dropped(tmp_path, row, tokenizer)
    assert reason in str(problem)
    with pytest.raises(UserError, match=r"rows\.jsonl:2"):
        encode_rows(tmp_path, [GOOD, row], tokenizer)


@pytest.mark.parametrize(
    ("row", "note"),
    [
        ({"messages": [USER, {**ANSWER, "weight": None}]}, formats.NULL_WEIGHT),
        ({"messages": [{**USER, "content": ""}, ANSWER]}, formats.NO_QUESTION_TEXT),
    ],
)
def test_what_is_read_as_something_else_is_counted(tmp_path, tokenizer, row, note):
    data = encode_rows(tmp_path, [GOOD, row], tokenizer)
    assert data.report.notes == {note: 1}
    assert len(data.rows) == 2 and data.rows[1].label_tokens


def test_nothing_in_columnar_files_is_no_content(tmp_path, tokenizer):
    empty = {"tool_calls": None, "reasoning_content": "", "function_call": {}}
    row = {
        "system": None,
        "tools": [],
        "messages": [{**USER, **empty, "weight": None}, {**ANSWER, **empty, "weight": 1}],
    }
    same = {"system": "one", "messages": [{"role": "system", "content": "one"}, USER, ANSWER]}
    data = encode_rows(tmp_path, [GOOD, row, same], tokenizer)
    assert data.rows[0].input_ids == data.rows[1].input_ids
    assert data.report.notes == {}


def test_old_function_call_is_a_tool_call():
    tokenizer = make_tokenizer(chat_template=TOOLS)
    old = {"messages": [USER, {"role": "assistant", "content": "x", "function_call": CALL}]}
    new = {"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": [{"function": CALL}]}]}
    assert read_conversation(old) == read_conversation(new)
    assert "get_answer" in labels(tokenizer, encode_row(old, tokenizer))[0]


def test_endless_integer_is_a_problem_of_the_row(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD)[:-1] + ', "n": ' + "9" * 5000 + "}\n")
    first, second = read_rows(path)
    assert first.problem is None
    assert second.line == 2 and "5000 digits" in str(second.problem)
    call = {"name": "get_answer", "arguments": '{"n": ' + "9" * 5000 + "}"}
    assert "cannot be decoded" in str(
        dropped(tmp_path, {"messages": [USER, {**ANSWER, "tool_calls": [{"function": call}]}]}, tokenizer)
    )
    assert "cannot be decoded" in str(dropped(tmp_path, {**GOOD, "tools": "[" * 100_000}, tokenizer))


def test_missing_and_broken_tokenizers_are_told_shortly(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert len(str(caught.value)) < 200 + len(str(tmp_path))
    assert "quantise again" in str(caught.value)
    make_tokenizer().save_pretrained(tmp_path)
    good = (tmp_path / "tokenizer.json").read_text()
    for broken in ("{", "", "[1]", "{}", '{"version": "1.0"}', good.replace('"model":', '"modell":')):
        (tmp_path / "tokenizer.json").write_text(broken)
        with pytest.raises(UserError, match="token") as caught:
            load_tokenizer(tmp_path)
        assert len(str(caught.value).splitlines()) == 2
        assert str(tmp_path) in str(caught.value)
    (tmp_path / "tokenizer.json").write_text(good)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config.json:1:2: broken JSON"):
        load_tokenizer(tmp_path)
