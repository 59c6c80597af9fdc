import json

import pytest
from typer.testing import CliRunner

from lamella.cli import app
from lamella.config import DataConfig
from lamella.data.dataset import encode_dataset
from lamella.data.encode import TRIMMED
from lamella.errors import UserError
from tests.data.helpers import encode_rows, label_spans
from tests.data.templates import STRICT
from tests.fixtures import chat12, make_tokenizer, write_jsonl


@pytest.mark.parametrize("body", ["", "\n  \r\n\n"])
def test_b08_files_without_rows(tmp_path, body):
    path = tmp_path / "a.jsonl"
    path.write_text(body)
    with pytest.raises(UserError, match=r"(?s)0 usable rows of 0 in .*a\.jsonl.*only blank lines"):
        encode_dataset(DataConfig(train=(path,)), make_tokenizer())


@pytest.mark.parametrize("bad_rows", ["refuse", "drop"])
def test_b08_another_stages_format(tmp_path, bad_rows):
    rows = [{"text": f"row {i}"} for i in range(12)]
    with pytest.raises(UserError, match=r"(?s)0 usable rows of 12 .* 12  wrong format .*rows\.jsonl:1.*fix: rows need"):
        encode_rows(tmp_path, rows, make_tokenizer(), bad_rows=bad_rows)


def test_b08_all_too_long_and_all_short(tmp_path):
    with pytest.raises(UserError, match=r"(?s)0 usable rows of 12 .* 12  too long .*fix: raise data\.max_tokens"):
        encode_rows(tmp_path, chat12(), make_tokenizer(), max_tokens=8, too_long="drop")
    assert len(encode_rows(tmp_path, chat12(), make_tokenizer(), max_tokens=500, too_long="drop").rows) == 12


def test_too_long_refuse_names_the_longest_row(tmp_path):
    lengths = [r.tokens for r in encode_rows(tmp_path, chat12(), make_tokenizer()).rows]
    longest = lengths.index(max(lengths)) + 1
    with pytest.raises(UserError, match=rf"rows\.jsonl:{longest}: \d+ of 12 rows .* has {max(lengths)} tokens"):
        encode_rows(tmp_path, chat12(), make_tokenizer(), max_tokens=40)
    assert len(encode_rows(tmp_path, chat12(), make_tokenizer(), max_tokens=max(lengths)).rows) == 12


def test_too_long_drop_counts_against_the_share(tmp_path):
    lengths = [r.tokens for r in encode_rows(tmp_path, chat12(), make_tokenizer()).rows]
    over = sum(n > 40 for n in lengths)
    assert 1 < over < 12
    with pytest.raises(UserError, match=f"{over} of 12 rows"):
        encode_rows(tmp_path, chat12(), make_tokenizer(), max_tokens=40, too_long="drop")
    data = encode_rows(tmp_path, chat12(), make_tokenizer(), max_tokens=40, too_long="drop", max_drop_share=1)
    assert data.report.dropped == {"too long": over}
    assert [r.row_id for r in data.rows] == [i for i, n in enumerate(lengths) if n <= 40]


def sixty_five(tokenizer, n_prompt=60, n_answer=5):
    """A prompt and a completion of that many tokens: single characters that do not merge."""
    row = {"prompt": "QZ" * (n_prompt // 2), "completion": "QZQZQ"}
    for key, n in (("prompt", n_prompt), ("completion", n_answer)):
        assert len(tokenizer(row[key], add_special_tokens=False)["input_ids"]) == n
    return row


@pytest.mark.parametrize("max_tokens", [128, 62, 60, 32, 7])
def test_b11_answers_are_never_cut(tmp_path, max_tokens):
    """Our choice for rows over the limit: answers are never cut, so no row trains on a part of one.

    60 tokens of prompt, 5 of answer, 1 terminator: at 62, cut_prompt takes 4 tokens from the left of the prompt and
    keeps all 6 labels (a cut from the right would keep 2); so it goes down to one token of prompt.
    """
    tokenizer = make_tokenizer(None, eos="<|eos|>")
    rows = [sixty_five(tokenizer)] * 8
    data = encode_rows(tmp_path, rows, tokenizer, max_tokens=max_tokens, too_long="cut_prompt")
    cut = max(66 - max_tokens, 0)
    assert all(r.label_tokens == 6 and r.tokens == min(66, max_tokens) and r.label_mask[0] == 0 for r in data.rows)
    assert (data.report.cut_rows, data.report.cut_tokens) == (8 * (cut > 0), 8 * cut)
    assert label_spans(tokenizer, data.rows[0].input_ids, data.rows[0].label_mask) == [
        rows[0]["completion"] + "<|eos|>"
    ]


@pytest.mark.parametrize("max_tokens", [6, 5, 2])
def test_b11_rows_without_room_for_a_label_are_an_error(tmp_path, max_tokens):
    tokenizer = make_tokenizer(None, eos="<|eos|>")
    with pytest.raises(UserError, match=r"(?s)0 usable rows of 8 .* 8  no label token"):
        encode_rows(tmp_path, [sixty_five(tokenizer)] * 8, tokenizer, max_tokens=max_tokens, too_long="cut_prompt")


@pytest.mark.parametrize("max_tokens", [128, 62, 60, 32])
def test_b11_refuse_and_drop_do_what_they_say(tmp_path, max_tokens):
    """`refuse` stops before training with the number of such rows; `drop` counts them, and 8 of 8 is an error."""
    tokenizer = make_tokenizer(None, eos="<|eos|>")
    rows = [sixty_five(tokenizer)] * 8
    if max_tokens == 128:
        for too_long in ("refuse", "drop"):
            data = encode_rows(tmp_path, rows, tokenizer, max_tokens=128, too_long=too_long)
            assert [(r.tokens, r.label_tokens) for r in data.rows] == [(66, 6)] * 8
        return
    with pytest.raises(UserError, match=r"(?s)0 usable rows of 8 .* 8  too long .* 66 tokens"):
        encode_rows(tmp_path, rows, tokenizer, max_tokens=max_tokens, too_long="drop")
    mixed = [*rows, *[{"prompt": "Q", "completion": "Z"}] * 8]
    with pytest.raises(UserError, match=rf"8 of 16 rows are over data\.max_tokens = {max_tokens}; .* has 66 tokens"):
        encode_rows(tmp_path, mixed, tokenizer, max_tokens=max_tokens)
    data = encode_rows(tmp_path, mixed, tokenizer, max_tokens=max_tokens, too_long="drop", max_drop_share=0.5)
    assert data.report.dropped == {"too long": 8}
    assert [r.label_tokens for r in data.rows] == [2] * 8


def test_b11_one_such_row_among_others_is_dropped_and_counted(tmp_path):
    tokenizer = make_tokenizer(None, eos="<|eos|>")
    rows = [sixty_five(tokenizer)] * 7 + [{"prompt": "Q", "completion": "QZ" * 30}]
    settings = {"max_tokens": 60, "too_long": "cut_prompt"}
    with pytest.raises(UserError, match=r"rows\.jsonl:8: no label token"):
        encode_rows(tmp_path, rows, tokenizer, **settings)
    data = encode_rows(tmp_path, rows, tokenizer, bad_rows="drop", max_drop_share=0.2, **settings)
    assert data.report.dropped == {"no label token": 1}
    assert len(data.rows) == 7
    assert all(batch.score_tokens.numel() for batch in data.batches(66))


def test_cut_prompt_keeps_bos(tmp_path):
    from tests.data.templates import BOS

    tokenizer = make_tokenizer(BOS)
    data = encode_rows(tmp_path, chat12(), tokenizer, max_tokens=50, too_long="cut_prompt")
    assert data.report.cut_rows > 0
    assert all(r.input_ids[0] == tokenizer.bos_token_id and r.tokens <= 50 for r in data.rows)


def test_trimmed_answers_are_noted(tmp_path):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b \n"}]}
    tokenizer = make_tokenizer(STRICT)
    data = encode_rows(tmp_path, [row], tokenizer)
    assert data.report.notes == {TRIMMED: 1}
    assert label_spans(tokenizer, data.rows[0].input_ids, data.rows[0].label_mask) == ["b<|im_end|>"]


def test_report_counts_agree_with_the_rows(tmp_path):
    data = encode_rows(tmp_path, chat12(), make_tokenizer())
    report = data.report.to_dict()
    assert report["tokens"] == sum(r.tokens for r in data.rows) == sum(b.tokens for b in data.batches(64))
    assert report["label_tokens"] == sum(r.label_tokens for r in data.rows)
    assert report["length_tokens"]["max"] == max(r.tokens for r in data.rows)
    assert report["files"] == {str(tmp_path / "rows.jsonl"): {"messages": 12}}
    json.dumps(report)


@pytest.fixture
def run_toml(tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "store")
    rows = chat12()
    rows[2]["messages"][1]["content"] = "[bold]not markup[/bold]"
    write_jsonl(tmp_path / "rows.jsonl", [*rows, {"text": "x"}])
    path = tmp_path / "run.toml"
    path.write_text('store = "store"\n[data]\ntrain = "rows.jsonl"\nbad_rows = "drop"\n')
    return path


def test_show_marks_trained_tokens(run_toml):
    result = CliRunner().invoke(app, ["data", "show", str(run_toml), "--rows", "3"])
    assert result.exit_code == 0, result.output
    assert "<|im_start|>assistant\n[[and keeps its<|im_end|>]]" in result.stdout
    assert "[[[bold]not markup[/bold]<|im_end|>]]" in result.stdout
    assert "rows: 13 read, 12 kept, 1 dropped" in result.stdout
    assert "1  wrong format" in result.stdout
    assert f"{run_toml.parent / 'rows.jsonl'}:3  " in result.stdout


def test_show_json_and_overrides(run_toml):
    result = CliRunner().invoke(app, ["data", "show", str(run_toml), "data.train_on=last", "--rows", "1", "--json"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["rows_kept"] == 12
    assert [piece["trained"] for piece in shown["rows"][0]["text"]] == [False, True, False]
    assert shown["train_on"].startswith("the last")
    refused = CliRunner().invoke(app, ["data", "show", str(run_toml), "data.bad_rows=refuse"])
    assert isinstance(refused.exception, UserError)
    assert refused.exception.line == 13
