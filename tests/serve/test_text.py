"""Text of tokens: nothing lost, whatever the pieces; stop strings and reasoning as if the whole text were there."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.data.formats import THINK_CLOSE, THINK_OPEN
from lamella.serve.text import AnswerText, Detokenizer

PIECES = st.lists(
    st.sampled_from(["a", " ", "\n", "é", "🙂", "<", ">", THINK_OPEN, THINK_CLOSE, "</th", "STOP", "ST"]), max_size=12
)


def decode(ids):
    return bytes(ids).decode("utf-8", "replace")


def read(text, stops=(), **how):
    answer = AnswerText(decode, stops, **{"thinking": True, **how})
    pieces = []
    for byte in text.encode():
        pieces.append(answer.add(byte))
        if answer.stopped:
            break
    if not answer.stopped:
        pieces.append(answer.end())
    return "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)


@given(PIECES)
def test_detokenised_text_is_the_text_of_all_ids(pieces):
    text = "".join(pieces)
    tokens = Detokenizer(decode)
    assert "".join([*(tokens.add(b) for b in text.encode()), tokens.end()]) == text


def test_bytes_that_are_no_character_are_told_at_the_end():
    tokens = Detokenizer(decode)
    assert [tokens.add(b) for b in "a🙂".encode()[:3]] == ["a", "", ""]
    assert tokens.end() == "�"


@settings(max_examples=200)
@given(PIECES)
def test_stop_strings_cut_where_the_whole_text_is_cut(pieces):
    text = "".join(pieces)
    assert read(text, ["STOP", "🙂"], thinking=False)[1] == re.split("STOP|🙂", text, maxsplit=1)[0]


def whole(text, inside):
    """Reasoning and content of a complete text."""
    reasoning, content, begins = "", "", inside
    while text:
        part, found, text = text.partition(THINK_CLOSE if inside else THINK_OPEN)
        part = part.strip() if inside else part.lstrip() if begins else part
        reasoning, content = (reasoning + part, content) if inside else (reasoning, content + part)
        if found:
            inside, begins = not inside, True
    return reasoning, content


@settings(max_examples=200)
@given(PIECES, st.booleans())
def test_reasoning_is_split_as_in_the_whole_text(pieces, opened):
    text = "".join(pieces)
    assert read(text, opened=opened) == whole(text, opened)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>\nwhy \n</think>\n\nso", ("why", "so")),
        ("so", ("", "so")),
        ("<think> cut", ("cut", "")),
        ("a < b", ("", "a < b")),
    ],
)
def test_examples(text, wanted):
    assert read(text) == wanted


def test_likeliest_tokens_that_read_alike_are_told_apart():
    """Half a character reads as the replacement mark whatever its byte: a client looks its token up by text."""
    from lamella.serve.answering import plain_logprobs
    from lamella.serve.backend import Token

    texts = {1: "a", 2: "\ufffd", 3: "\ufffd", 4: "\ufffd"}
    token = Token(3, -4.8, ((2, -0.9), (4, -1.5), (1, -2.0)))
    (found,) = plain_logprobs([token], lambda ids: texts[ids[0]])["top_logprobs"]
    assert found == {"\ufffd": -4.8, "token_id:2": -0.9, "token_id:4": -1.5, "a": -2.0}
    assert max(found, key=found.get) != "\ufffd"  # it was not the likeliest
