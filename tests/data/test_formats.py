import json

import pytest

from lamella.config import DataConfig
from lamella.data import formats
from lamella.data.dataset import encode_dataset
from lamella.data.formats import detect_format, read_conversation
from lamella.data.read import RowError
from lamella.errors import UserError
from tests.data.helpers import encode_row, encode_rows, labels, text
from tests.data.templates import GROUPED_TOOLS, STRICT, TOOLS, TOOLS_TEXT
from tests.fixtures import CHATML, chat12, make_tokenizer, write_jsonl

WEATHER = {
    "type": "function",
    "function": {"name": "get_answer", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def test_b04_row_order_does_not_matter(tmp_path):
    """12 MB: beyond the first block of any reader that fixes column types by what it has seen."""
    row = {"messages": chat12()[3]["messages"], "system": None, "pad": "x" * 12_000}
    rows = [dict(row) for _ in range(999)] + [{**row, "system": "be brief"}]
    assert write_jsonl(tmp_path / "rows.jsonl", rows).stat().st_size > 12_000_000
    tokenizer = make_tokenizer()
    there = encode_rows(tmp_path, rows, tokenizer).rows
    back = encode_rows(tmp_path, rows[::-1], tokenizer).rows
    assert len(there) == len(back) == 1000
    assert [r.input_ids for r in there] == [r.input_ids for r in back[::-1]]
    assert "be brief" in text(tokenizer, there[-1].input_ids)
    assert sum("be brief" in text(tokenizer, r.input_ids) for r in there) == 1


def test_b04_mixed_folder_loads_in_one_form_with_counts(tmp_path):
    rows = chat12()
    talk = [{"from": "human", "value": "the street"}, {"from": "gpt", "value": "avenue"}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.jsonl", [{"conversations": talk}] * 3)
    write_jsonl(tmp_path / "c.jsonl", [{"instruction": "the", "input": "street", "output": "avenue"}] * 2)
    data = encode_dataset(DataConfig(train=(tmp_path,)), make_tokenizer())
    assert len(data.rows) == 17
    assert list(data.report.files.values()) == [{"messages": 12}, {"sharegpt": 3}, {"alpaca": 2}]
    assert data.rows[12].input_ids != data.rows[15].input_ids
    assert "3 sharegpt" in "\n".join(data.report.lines())


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": []}, "messages"),
        ({"conversations": [{"from": "human", "value": ""}]}, "sharegpt"),
        ({"conversations": [{"role": "user", "content": ""}]}, "messages"),
        ({"instruction": "a", "output": "b"}, "alpaca"),
        ({"prompt": "a", "completion": "b", "messages": None}, "prompt_completion"),
        ({"prompt": "a", "messages": [{}]}, "messages"),
    ],
)
def test_detection(row, name):
    assert detect_format(row) == name


def test_ambiguous_and_unknown_rows_are_rejected():
    with pytest.raises(RowError, match="ambiguous"):
        detect_format({"messages": [], "prompt": "a", "completion": "b"})
    with pytest.raises(RowError, match="wrong format"):
        detect_format({"text": "a"})
    with pytest.raises(RowError, match="not alpaca"):
        read_conversation({"messages": []}, "alpaca")


def spellings():
    arguments = {"city": 'Brno "old town"', "days": [1, 2], "zone": {"tz": "č"}}
    for form in (arguments, json.dumps(arguments)):
        for extra in ({"content": None}, {"content": ""}, {}):
            call = {"type": "function", "function": {"name": "get_answer", "arguments": form}}
            yield {"role": "assistant", "tool_calls": [call], **extra}


@pytest.mark.parametrize("template", [TOOLS, TOOLS_TEXT, GROUPED_TOOLS], ids=["object", "text", "grouped"])
def test_b05_six_spellings_of_a_tool_call_are_one(template):
    tokenizer = make_tokenizer(template)
    made = []
    for turn in spellings():
        result = {"role": "tool", "content": "42"}
        turns = [{"role": "user", "content": "go"}, turn, result, {"role": "assistant", "content": "It is 42"}]
        made.append(encode_row({"messages": turns, "tools": [WEATHER]}, tokenizer))
    assert len({tuple(e.ids) for e in made}) == len({bytes(e.mask) for e in made}) == 1
    whole = text(tokenizer, made[0].ids)
    call, answer = labels(tokenizer, made[0])
    assert "None" not in whole
    assert "null" not in whole
    start, _, rest = call.partition('"arguments": ')
    assert start.removeprefix("<think>\n\n</think>\n\n") == '<tool_call>\n{"name": "get_answer", '
    decoded = json.loads(rest.removesuffix("}\n</tool_call><|im_end|>"))
    assert decoded == {"city": 'Brno "old town"', "days": [1, 2], "zone": {"tz": "č"}}
    assert "\\\\" not in whole
    assert answer.removeprefix("<think>\n\n</think>\n\n") == "It is 42<|im_end|>"


@pytest.mark.parametrize("template", [TOOLS, TOOLS_TEXT, GROUPED_TOOLS], ids=["object", "text", "grouped"])
def test_b05_calls_without_arguments_in_every_spelling_are_one(template):
    """`arguments` as {}, "{}", "" or missing; the call bare or in `function`; with and without a type; sharegpt."""
    tokenizer = make_tokenizer(template)
    calls = [{"function": {"name": "get_answer", **given}} for given in
             ({"arguments": {}}, {"arguments": "{}"}, {"arguments": ""}, {})]  # fmt: skip
    calls += [{"type": "function", **calls[0]}, {"name": "get_answer"}, {"name": "get_answer", "arguments": "{}"}]
    user, answer = {"role": "user", "content": "go"}, {"role": "assistant", "content": "done"}
    rows = [
        {"messages": [user, {"role": "assistant", "content": content, "tool_calls": [call]},
                      {"role": "tool", "content": "42"}, answer]}
        for call in calls for content in (None, "")
    ]  # fmt: skip
    rows += [
        {"conversations": [{"from": "human", "value": "go"}, {"from": "function_call", "value": value},
                           {"from": "observation", "value": "42"}, {"from": "gpt", "value": "done"}]}
        for value in ({"name": "get_answer", "arguments": {}}, '{"name": "get_answer", "arguments": "{}"}')
    ]  # fmt: skip
    made = [encode_row({**row, "tools": [WEATHER]}, tokenizer) for row in rows]
    assert len({(tuple(e.ids), bytes(e.mask)) for e in made}) == 1
    call, *_ = labels(tokenizer, made[0])
    assert '{"name": "get_answer", "arguments": {}}' in call
    whole = text(tokenizer, made[0].ids)
    assert not any(word in whole for word in ("None", "null", '\\"'))


@pytest.mark.parametrize("template", [TOOLS, TOOLS_TEXT, GROUPED_TOOLS], ids=["object", "text", "grouped"])
def test_b05_null_of_the_data_stays_json(template):
    """An argument that *is* null is printed as JSON null in both spellings, never as None."""
    tokenizer = make_tokenizer(template)
    made = []
    for arguments in ({"city": None}, '{"city": null}'):
        call = {"function": {"name": "get_answer", "arguments": arguments}}
        row = {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}]}
        made.append(encode_row(row, tokenizer))
    assert made[0].ids == made[1].ids
    assert '"arguments": {"city": null}' in text(tokenizer, made[0].ids)
    assert "None" not in text(tokenizer, made[0].ids)


def test_b05_no_backslash_quote_for_plain_arguments():
    tokenizer = make_tokenizer(TOOLS)
    for arguments in ({"city": "Brno"}, '{"city": "Brno"}'):
        call = {"function": {"name": "get_answer", "arguments": arguments}}
        row = {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}]}
        assert '\\"' not in text(tokenizer, encode_row(row, tokenizer).ids)


def test_b05_faulty_rows_are_named_by_row_and_message(tmp_path):
    cut = {"function": {"name": "f", "arguments": '{"city": "Br'}}
    rows = [
        *chat12(),
        {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [cut]}]},
        {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "yes"}]},
    ]
    tokenizer = make_tokenizer(TOOLS)
    with pytest.raises(UserError, match=r"rows\.jsonl:13: bad tool call: message 1, call 0: .*not JSON"):
        encode_rows(tmp_path, rows, tokenizer)
    data = encode_rows(tmp_path, rows, tokenizer, bad_rows="drop", max_drop_share=0.2)
    assert data.report.dropped == {"bad tool call": 1, "null content": 1}
    assert str(data.report.problems[1]).endswith("rows.jsonl:14: null content: message 0 (user) has no content")


def tool_row():
    call = {"function": {"name": "get_answer", "arguments": {"city": "Brno"}}}
    return {
        "messages": [
            {"role": "user", "content": "what is it"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "42"},
            {"role": "assistant", "content": "forty two"},
            {"role": "user", "content": "sure"},
            {"role": "assistant", "content": "yes"},
        ],
        "tools": [WEATHER],
    }


def test_b06_tools_are_in_the_prompt_and_results_carry_no_label():
    tokenizer = make_tokenizer(TOOLS)
    encoding = encode_row(tool_row(), tokenizer)
    first = encoding.mask.find(1)
    assert "get_answer" in text(tokenizer, encoding.ids[:first])
    assert labels(tokenizer, encoding) == [
        '<tool_call>\n{"name": "get_answer", "arguments": {"city": "Brno"}}\n</tool_call><|im_end|>',
        "forty two<|im_end|>",
        "yes<|im_end|>",
    ]
    unlabelled = text(tokenizer, [i for i, m in zip(encoding.ids, encoding.mask, strict=True) if not m])
    assert "tool\n42<|im_end|>" in unlabelled
    assert labels(tokenizer, encode_row(tool_row(), tokenizer, train_on="last")) == ["yes<|im_end|>"]


def test_b06_a_template_that_prints_no_tools_is_not_trained_on(tmp_path):
    row = tool_row()
    del row["messages"][1:3]
    with pytest.raises(
        UserError, match=r"tools unsupported: the chat template does not print tools\[0\] \(get_answer\)"
    ):
        encode_rows(tmp_path, [row], make_tokenizer(CHATML))
    with pytest.raises(UserError, match="does not print tool calls"):
        encode_rows(tmp_path, [{"messages": tool_row()["messages"]}], make_tokenizer(CHATML))


def talk(*turns):
    return {"conversations": [{"from": who, "value": f"{who} says {i}"} for i, who in enumerate(turns)]}


def test_b07_repairs_and_rejections_are_counted(tmp_path):
    rows = [talk("human", "gpt")] * 12 + [
        talk("human", "human", "gpt"), talk("gpt", "human", "gpt"), talk("human", "gpt", "human"), talk("human", "bot"),
        {"conversations": []}, talk("system", "human", "gpt"),
    ]  # fmt: skip
    tokenizer = make_tokenizer(STRICT)
    with pytest.raises(
        UserError, match=r"rows\.jsonl:14: no question: the chat begins with a turn of role 'assistant'"
    ):
        encode_rows(tmp_path, rows, tokenizer)
    with pytest.raises(UserError, match=r"3 of 18 rows \(16\.7 %\) would be dropped"):
        encode_rows(tmp_path, rows, tokenizer, bad_rows="drop")
    data = encode_rows(tmp_path, rows, tokenizer, bad_rows="drop", max_drop_share=0.2)
    assert data.report.dropped == {"no question": 1, "unknown role": 1, "no messages": 1}
    assert data.report.notes == {formats.JOINED: 1, formats.TRAILING: 1}
    assert (data.report.rows_read, data.report.rows_kept) == (18, 15)
    kept = [text(tokenizer, r.input_ids) for r in data.rows]
    assert "human says 0\n\nhuman says 1<|im_end|>" in kept[12]
    assert kept[13].endswith("gpt says 1<|im_end|>\n")
    assert "user\nsystem says 0\n\nhuman says 1<|im_end|>" in kept[14]
    assert "put before the first user turn" in data.report.system


@pytest.mark.parametrize("by_key", [False, True], ids=["turn", "key"])
def test_b07_the_same_kinds_with_a_system_turn_and_a_template_without(tmp_path, by_key):
    """The five kinds of rows, each with a system text: as its first turn, or under the row's key `system`."""
    kinds = [("human", "human", "gpt"), ("gpt", "human", "gpt"), ("human", "gpt", "human"), ("human", "bot"), ()]
    rows = []
    for kind in kinds:
        row = talk(*kind)
        if by_key:
            row["system"] = "be brief"
        else:
            row["conversations"].insert(0, {"from": "system", "value": "be brief"})
        rows.append(row)
    tokenizer = make_tokenizer(STRICT)
    with pytest.raises(UserError, match=r"rows\.jsonl:2: no question: the chat begins with a turn of role 'assistant'"):
        encode_rows(tmp_path, rows, tokenizer)
    with pytest.raises(UserError, match=r"3 of 5 rows \(60\.0 %\) would be dropped"):
        encode_rows(tmp_path, rows, tokenizer, bad_rows="drop")
    data = encode_rows(tmp_path, rows, tokenizer, bad_rows="drop", max_drop_share=0.6)
    assert data.report.dropped == {"no question": 1, "unknown role": 1, "no answer": 1}
    assert [p.line for p in data.report.problems] == [2, 4, 5]
    assert data.report.notes == {formats.JOINED: 1, formats.TRAILING: 1}
    assert (data.report.rows_read, data.report.rows_kept) == (5, 2)
    joined, cut = (text(tokenizer, r.input_ids) for r in data.rows)
    assert joined.startswith("<|im_start|>user\nbe brief\n\nhuman says 0\n\nhuman says 1<|im_end|>")
    assert cut.startswith("<|im_start|>user\nbe brief\n\nhuman says 0<|im_end|>")
    assert cut.endswith("gpt says 1<|im_end|>\n")
    assert "system" not in joined + cut
    assert "put before the first user turn" in data.report.system


def test_b07_a_template_that_refuses_costs_one_row(tmp_path):
    odd = [{"role": r, "content": r} for r in ("user", "assistant", "system", "user", "assistant")]
    rows = [*chat12(), {"messages": odd}]
    data = encode_rows(tmp_path, rows, make_tokenizer(STRICT), bad_rows="drop")
    assert data.report.dropped == {"template refuses": 1}
    assert "Roles must alternate" in str(data.report.problems[0])


def test_other_message_forms():
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "street"}]
    turns = [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "x"},
    ]
    assert [m.content for m in read_conversation({"messages": turns})[1].messages] == ["S", "the street", "x"]
    turns[1]["content"] = [{"type": "image_url", "image_url": {}}]
    with pytest.raises(RowError, match="parts that are not text"):
        read_conversation({"messages": turns})
    row = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    assert read_conversation(row)[1].plain is None
    call = {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f"}'}]}
    assert read_conversation(call)[1].messages[1].tool_calls[0].name == "f"
    with pytest.raises(RowError, match="empty answer"):
        read_conversation({"instruction": "a", "output": "  "})
    history = {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "S"}
    assert [m.content for m in read_conversation(history)[1].messages] == ["S", "a", "b", "c", "d"]


def test_weight_zero_turns_are_context():
    turns = chat12()[2]["messages"] + [{"role": "user", "content": "q"}, {"role": "assistant", "content": "last"}]
    turns[1]["weight"] = 0
    tokenizer = make_tokenizer()
    assert labels(tokenizer, encode_row({"messages": turns}, tokenizer)) == ["last<|im_end|>"]
