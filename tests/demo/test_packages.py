import hashlib
import io
import tarfile
import zipfile
from dataclasses import replace

import pytest

from lamella.demo import packages
from lamella.errors import UserError


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing/data.txt", "hello")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return packages.Package(name="thing", version="1.0", file=path.name, sha256=sha256, licence="MIT")


def test_archive_with_the_right_hash_needs_no_network(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    packages.fetch((wheel,), tmp_path)
    assert packages.read_member(tmp_path, wheel, "thing/data.txt") == b"hello"


def test_changed_archive_is_never_used(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / wheel.file).write_bytes(b"other")
    with pytest.raises(UserError, match=r"could not fetch thing==1\.0"):
        packages.fetch((wheel,), tmp_path)
    assert not (tmp_path / wheel.file).exists()


def test_wrong_hash_from_the_index_is_refused(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match="could not fetch"):
        packages.fetch((replace(wheel, sha256="0" * 64),), tmp_path / "other")
    assert not (tmp_path / "other" / wheel.file).exists()


def test_members_of_sdists_and_missing_members(wheel, tmp_path):
    with tarfile.open(tmp_path / "old-2.0.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("old-2.0/x.txt")
        info.size = 2
        archive.addfile(info, io.BytesIO(b"hi"))
    sdist = replace(wheel, name="old", file="old-2.0.tar.gz")
    assert packages.read_member(tmp_path, sdist, "old-2.0/x.txt") == b"hi"
    for package, member in ((sdist, "old-2.0/y.txt"), (wheel, "thing/none.txt")):
        with pytest.raises(UserError, match="holds no file"):
            packages.read_member(tmp_path, package, member)
