"""B33: a model in a cache of links, read-only, opened from anywhere; nothing is written there."""

import os
import shutil
from pathlib import Path

import pytest

from lamella.checkpoint.source import Checkpoint
from lamella.errors import UserError
from lamella.store.manifest import read_manifest
from lamella.store.quantize import quantize_checkpoint
from tests.fixtures import dense_config, write_checkpoint


@pytest.fixture
def snapshot(tmp_path) -> Path:
    """DENSE as the hub's cache keeps it: `blobs/`, and a snapshot of relative links."""
    plain = write_checkpoint(tmp_path / "plain", dense_config(), shards=2)
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(plain.iterdir())):
        shutil.copyfile(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    return snapshot


def listing(folder: Path) -> list[tuple[str, int, int]]:
    """Every entry below a folder with its size and the time of its last change."""
    found = [(entry, os.lstat(entry)) for entry in sorted(folder.rglob("*"))] + [(folder, os.lstat(folder))]
    return [(str(entry), stat.st_size, stat.st_mtime_ns) for entry, stat in found]


def test_b33_read_only_links_from_a_relative_path(snapshot, tmp_path, monkeypatch):
    cache, elsewhere = snapshot.parents[1], tmp_path / "elsewhere"
    for entry in (*cache.rglob("*"), cache):
        if not entry.is_symlink():
            entry.chmod(0o555 if entry.is_dir() else 0o444)
    before = listing(cache)
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    manifest = quantize_checkpoint(Path("../models--x/snapshots/abc"), Path("store"))
    assert listing(cache) == before
    assert manifest == read_manifest(elsewhere / "store")
    plain = quantize_checkpoint(tmp_path / "plain", tmp_path / "other")
    assert [group.tensors for _, group in manifest.groups()] == [group.tensors for _, group in plain.groups()]
    copied = elsewhere / "store" / "config.json"
    assert not copied.is_symlink()
    assert os.access(copied, os.W_OK)
    for entry in (*cache.rglob("*"), cache):  # so that pytest can remove it
        if not entry.is_symlink():
            entry.chmod(0o755)


@pytest.mark.parametrize("kind", ["*.safetensors", "config.json"])
def test_b33_dangling_link(snapshot, kind):
    link = min(snapshot.glob(kind))
    target = link.resolve()
    target.unlink()
    with pytest.raises(UserError) as caught:
        Checkpoint.open(snapshot)
    assert str(link) in str(caught.value)
    assert f"is a link to ../../blobs/{target.name}, which is not there" in str(caught.value)


def test_b33_unwritable_output_is_found_before_the_model_is_read(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the store cannot be made there"):
        quantize_checkpoint(tmp_path / "no such model", tmp_path / "file" / "store")
