"""Disks: what is written goes away, a store's own files are read, and what cannot be measured is said."""

import os

import pytest

from lamella.errors import UserError
from lamella.hardware.disk import PIECE_BYTES, THREADS, _read_pieces, disk_kind, measure_disk

SIZE = 4 * PIECE_BYTES


def test_a_file_is_written_read_and_removed(tmp_path):
    found = measure_disk(tmp_path, SIZE, 5.0)
    assert found.read_bytes_per_s > 1e6 and found.write_bytes_per_s > 1e6
    assert found.what == "a file of 33.6 MB, written for this"
    assert found.free_bytes > 0 and found.kind == disk_kind(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_stores_own_files_are_read(tmp_path):
    files = [tmp_path / "00000.bin", tmp_path / "00001.bin", tmp_path / "small.bin"]
    for file, nbytes in zip(files, (SIZE, PIECE_BYTES + 100, 10), strict=True):
        file.write_bytes(os.urandom(nbytes))
    found = measure_disk(tmp_path, SIZE, 5.0, files)
    assert found.what == "2 files of the store" and found.read_bytes_per_s > 1e6
    assert sorted(tmp_path.iterdir()) == files
    assert [file.stat().st_size for file in files] == [SIZE, PIECE_BYTES + 100, 10]


def test_pieces_are_dealt_to_threads_and_all_are_read():
    asked = []

    def read(fd, buffers, at):
        asked.append((fd, at, len(buffers[0])))
        return len(buffers[0])

    pieces = [(3, k * PIECE_BYTES) for k in range(10)]
    done = [_read_pieces(pieces[k::THREADS], float("inf"), read) for k in range(THREADS)]
    assert sum(done) == 10 * PIECE_BYTES
    assert sorted(asked) == [(3, k * PIECE_BYTES, PIECE_BYTES) for k in range(10)]
    assert _read_pieces(pieces, float("-inf"), read) == 0


def test_an_end_in_the_middle_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        measure_disk(tmp_path, SIZE, "soon")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_not_written_to(tmp_path):
    found = measure_disk(tmp_path, 1 << 60, 1.0)
    assert (found.read_bytes_per_s, found.write_bytes_per_s) == (None, None)
    assert "too few to write 1.15e+06 TB as a test" in found.notes[0]
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        measure_disk(tmp_path / "none", SIZE, 1.0)
