"""Files that are either the old one or the whole new one, and what every room asks of a disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from lamella.errors import UserError

_CHUNK_BYTES = 4 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; it takes that name, flushed to disk, when the block ends without an error.

    Readers, and whoever comes after a crash, see the old file or the whole new one.
    """
    temp = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temp.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)
    fsync_path(path.absolute().parent)


def make_folder(path: Path) -> Path:
    """A folder for results, made where it is not there. Raises `UserError` where it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"no folder can be made there: {error.strerror}", fix="give another --output", path=path
        ) from error
    return path


def write_bytes(path: Path, data: bytes) -> Path:
    """Write a file atomically (`atomic_writer`)."""
    with atomic_writer(path) as stream:
        stream.write(data)
    return path


def write_text(path: Path, text: str | Iterable[str]) -> Path:
    """Write UTF-8 text atomically, whole or piece by piece."""
    with atomic_writer(path) as stream:
        for piece in (text,) if isinstance(text, str) else text:
            stream.write(piece.encode())
    return path


def write_json(path: Path, value: Any, indent: int = 1) -> Path:
    """Write JSON and a newline atomically. NaN is refused (not JSON).

    Raises:
        ValueError: `value` holds NaN or infinity.
    """
    return write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


def fsync_path(path: Path) -> None:
    """Flush a file, or a folder's names, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def file_checksum(path: Path) -> str:
    """xxh3_128 of a whole file, 32 hex digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while piece := stream.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def free_bytes(folder: Path) -> int:
    """Space left for this user on the folder's file system."""
    return shutil.disk_usage(folder).free


def is_disk_full(error: Exception) -> bool:
    """Whether an error means that nothing more fits: no space, quota or file size limit.

    Libraries written in Rust (safetensors) raise their own errors, with the number in the text.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return any(f"os error {code}" in str(error) for code in _FULL)
