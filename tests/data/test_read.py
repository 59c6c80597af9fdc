import json

import pytest

from lamella.config import DataConfig
from lamella.data.dataset import encode_dataset
from lamella.data.read import find_files, read_rows
from lamella.errors import UserError
from tests.fixtures import chat12, make_tokenizer, write_jsonl


def read(path):
    return [row.value for row in read_rows(path)]


def problems(path):
    return [(row.line, row.problem) for row in read_rows(path) if row.problem]


def test_b01_bom_changes_nothing_and_utf16_is_refused(tmp_path):
    rows = chat12()
    rows[1]["messages"][0]["name"] = "ann"
    a = write_jsonl(tmp_path / "a.jsonl", rows)
    b = tmp_path / "b.jsonl"
    b.write_bytes(b"\xef\xbb\xbf" + a.read_bytes())
    c = tmp_path / "c.jsonl"
    c.write_bytes(b"\xff\xfe" + a.read_text().encode("utf-16-le"))
    bare = tmp_path / "d.jsonl"
    bare.write_bytes(a.read_text().encode("utf-16-be"))

    assert read(a) == read(b) == rows
    assert "name" not in read(b)[0]["messages"][0]
    tokenizer = make_tokenizer()
    ids = [[r.input_ids for r in encode_dataset(DataConfig(train=(p,)), tokenizer).rows] for p in (a, b)]
    assert ids[0] == ids[1]
    with pytest.raises(UserError, match=r"c\.jsonl: encoding is UTF-16-LE"):
        read(c)
    with pytest.raises(UserError, match=r"d\.jsonl: encoding is UTF-16-BE"):
        read(bare)


def crlf_file(path, rows):
    lines = [json.dumps(r) for r in rows]
    lines[3:3] = [""]
    lines[7:7] = ["  "]
    path.write_bytes(("\r\n".join(lines) + "\r\n\r\n\r\n").encode())
    return path


def test_b03_blank_lines_and_crlf(tmp_path):
    rows = chat12()
    path = crlf_file(tmp_path / "a.jsonl", rows)
    assert read(path) == rows
    assert "\r" not in str(read(path))


def test_b03_broken_row_is_named_by_physical_line_and_column(tmp_path):
    path = crlf_file(tmp_path / "a.jsonl", chat12())
    lines = path.read_bytes().split(b"\r\n")
    lines[10] = lines[10][:-1]
    path.write_bytes(b"\r\n".join(lines))
    with pytest.raises(UserError) as caught:
        encode_dataset(DataConfig(train=(path,)), make_tokenizer())
    assert (caught.value.path, caught.value.line) == (str(path), 11)
    assert caught.value.column == len(lines[10]) + 1
    assert f"{path}:11:{len(lines[10]) + 1}: broken JSON" in str(caught.value)
    assert len(encode_dataset(DataConfig(train=(path,), bad_rows="drop"), make_tokenizer()).rows) == 11


def test_b03_an_array_is_called_an_array(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(chat12(), indent=1))
    with pytest.raises(UserError, match="one JSON array"):
        read(path)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": NaN}', "broken JSON"),
        (b'{"a": 1, "a": 2}', "broken JSON"),
        (b'{"a": "x\x00"}', "broken JSON"),
        (b"\x00\x00{}", "broken JSON"),
        (b"3", "not an object"),
        (b'"text"', "not an object"),
        (b'{"a": [{"b": "\\ud83d"}]}', "lone surrogate"),
        (b"[" * 100_000, "broken JSON"),
    ],
)
def test_strict_rows(tmp_path, body, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"first": 1}\n' + body + b"\n")
    assert [(line, problem.reason) for line, problem in problems(path)] == [(2, reason)]


def test_surrogate_pairs_nul_escapes_and_line_separators_are_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "\\ud83d\\ude00 \\u0000"}\n' + '{"a": "x\u2028y\x85"}\n'.encode())
    assert read(path) == [{"a": "\U0001f600 \0"}, {"a": "x\u2028y\x85"}]


def test_folders_missing_files_and_compressed_files(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.jsonl", "sub/c.ndjson", "notes.txt", ".hidden.jsonl"):
        (tmp_path / name).write_text("{}\n")
    assert [p.name for p in find_files([tmp_path])] == ["a.jsonl", "b.jsonl", "c.ndjson"]
    with pytest.raises(UserError, match="no such file"):
        find_files([tmp_path / "none.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no \.jsonl"):
        find_files([tmp_path / "empty"])
    with pytest.raises(UserError, match="no data file"):
        find_files([])
    packed = tmp_path / "x.jsonl"
    packed.write_bytes(b"\x1f\x8b\x08\x00rest")
    with pytest.raises(UserError, match="gzip"):
        read(packed)
