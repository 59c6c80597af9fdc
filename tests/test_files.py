"""Atomic writing: the old file or the whole new one, and nothing else left behind."""

import errno
import json
import os

import pytest
import xxhash
from safetensors import SafetensorError

from lamella.files import file_checksum, free_bytes, is_disk_full, write_bytes, write_json, write_text


def test_new_content_replaces_the_old_and_nothing_else_is_left(tmp_path):
    file = tmp_path / "x.json"
    assert write_json(file, {"a": "café"}) == file
    assert json.loads(file.read_text(encoding="utf-8")) == {"a": "café"}
    assert write_bytes(file, b"\x00\xff").read_bytes() == b"\x00\xff"
    assert write_text(file, (piece for piece in ("one\n", "two é\n"))).read_bytes() == "one\ntwo é\n".encode()
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    file = write_text(tmp_path / "x.txt", "old")

    def pieces():
        yield "half of the new"
        assert file.read_text() == "old"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_text(file, pieces())
    with pytest.raises(ValueError, match="JSON"):
        write_json(file, {"loss": float("nan")})
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.txt"]


def test_the_file_is_on_disk_before_it_has_its_name_and_the_folder_after(tmp_path, monkeypatch):
    events = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2]))
        real_fsync(fd)

    def replace(a, b):
        events.append(("rename", b.name))
        real_replace(a, b)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_text(tmp_path / "x", "text")
    assert [kind for kind, _ in events] == ["fsync", "rename", "fsync"]
    assert events[0][1].startswith(".x.")
    assert events[2][1] == tmp_path.name


def test_checksum_and_room(tmp_path):
    data = bytes(range(256)) * 40_000  # several pieces
    assert file_checksum(write_bytes(tmp_path / "x", data)) == xxhash.xxh3_128(data).hexdigest()
    assert free_bytes(tmp_path) > 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_known_from_python_and_from_rust(code):
    assert is_disk_full(OSError(code, os.strerror(code)))
    assert is_disk_full(SafetensorError(f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})"))
    assert not is_disk_full(OSError(errno.EACCES, "Permission denied"))
    assert not is_disk_full(SafetensorError("header too large"))
