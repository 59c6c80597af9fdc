import json

import pytest

from lamella.demo.files import appear, write_jsonl


def test_folder_appears_whole(tmp_path):
    target = tmp_path / "deep" / "folder"
    with appear(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert [p.name for p in target.iterdir()] == ["a"]
    assert [p.name for p in target.parent.iterdir()] == ["folder"]


def fill_and_fail(target):
    with appear(target) as folder:
        (folder / "a").write_text("1")
        raise RuntimeError("torn")


def test_failed_folder_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="torn"):
        fill_and_fail(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_jsonl_keeps_non_ascii(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"a": "café"}, {"a": "\n"}])
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == [{"a": "café"}, {"a": "\n"}]
    assert "café" in path.read_text(encoding="utf-8")
