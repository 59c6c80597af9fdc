"""A store in the making: `STORE.partial/` and the journal that lets an interrupted run go on.

The journal is one JSON object per line: first what is being made (source fingerprint, settings), then one line
for each finished, synced file with its tensors' checksums. A line cut short by a crash is dropped.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from lamella.errors import UserError
from lamella.store.layout import PlannedGroup

JOURNAL_NAME = "quantize.journal"


def partial_path(store: Path) -> Path:
    return store.with_name(store.name + ".partial")


def check_writable(out: Path, what: str = "the store", option: str = "-o STORE") -> None:
    """Raises:
    UserError: the folder that is to hold `out`, or its nearest existing parent, takes no new files.
    """
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "is not writable" if parent.is_dir() else "is not a folder"
        raise UserError(f"{why}, so {what} cannot be made there", fix=f"choose another {option}", path=parent)


class Journal:
    """Open journal of a partial store; holds a lock so that no second run writes there.

    Attributes:
        folder: the partial folder.
        done: finished groups: key -> tensor name -> checksum.
    """

    def __init__(self, folder: Path, fd: int, done: dict[str, dict[str, str]]) -> None:
        self.folder = folder
        self.done = done
        self._fd = fd

    @classmethod
    def open(cls, store: Path, head: dict[str, Any], groups: list[PlannedGroup]) -> Journal:
        """Start or go on with `STORE.partial`.

        Args:
            head: what is being made; an existing journal must say the same.

        Raises:
            UserError: the folder cannot be written, another run is at work there, or the partial store
                was begun from another source or with other settings.
        """
        folder = partial_path(store)
        try:
            (folder / "layers").mkdir(parents=True, exist_ok=True)
            fd = os.open(folder / JOURNAL_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}",
                            fix="choose another -o STORE", path=folder) from error  # fmt: skip
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise UserError("another `lamella quantize` is writing there", fix="wait for it", path=folder) from error
        try:
            return cls(folder, fd, _resume(fd, folder, head, groups))
        except OSError as error:
            os.close(fd)
            raise UserError(f"cannot be written: {error.strerror}", fix="check the disk", path=folder) from error
        except UserError:
            os.close(fd)
            raise

    def finish_group(self, key: str, checksums: dict[str, str]) -> None:
        """Record a group whose file is complete and synced."""
        write_all(self._fd, json.dumps({"group": key, "checksums": checksums}).encode() + b"\n")
        os.fsync(self._fd)
        self.done[key] = checksums

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def write_all(fd: int, data: bytes) -> None:
    """os.write until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _resume(fd: int, folder: Path, head: dict[str, Any], groups: list[PlannedGroup]) -> dict[str, dict[str, str]]:
    """Finished groups of an existing journal; leaves the file cut after its last whole line."""
    with os.fdopen(os.dup(fd), "rb") as stream:
        lines = stream.read().split(b"\n")[:-1]  # what follows the last newline is not a whole line
    whole = sum(len(line) + 1 for line in lines)
    os.ftruncate(fd, whole)
    os.lseek(fd, whole, os.SEEK_SET)
    if not lines:
        write_all(fd, json.dumps(head).encode() + b"\n")
        os.fsync(fd)
        return {}
    entries = [_entry(line, folder, number) for number, line in enumerate(lines, 1)]
    if entries[0] != head:
        differs = [key for key in head if entries[0].get(key) != head[key]]
        was = ", ".join(f"{key} {entries[0].get(key)!r} there, {head[key]!r} now" for key in differs)
        raise UserError(f"was begun otherwise: {was}",
                        fix="delete that folder, or run with the same checkpoint and options", path=folder)  # fmt: skip
    files = {group.key: group for group in groups}
    done = {}
    for entry in entries[1:]:
        file = folder / files[entry["group"]].file
        if file.is_file() and file.stat().st_size == files[entry["group"]].nbytes:
            done[entry["group"]] = entry["checksums"]
    return done


def _entry(line: bytes, folder: Path, number: int) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except ValueError as error:
        raise UserError("is not a journal line", fix="delete that folder and run again",
                        path=folder / JOURNAL_NAME, line=number) from error  # fmt: skip
