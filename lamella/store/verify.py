"""Every byte of a store against its checksums. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from lamella.errors import UserError
from lamella.files import file_checksum
from lamella.store.manifest import MANIFEST_NAME, Group, Manifest, manifest_is_intact

_CHUNK_BYTES = 4 << 20


def read_exactly(fd: int, view: memoryview, start: int, file: Path) -> None:
    """Fill `view` from byte `start` of an open file.

    Raises:
        UserError: the file ends early.
    """
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], start + done)
        if got == 0:
            raise UserError(f"file ends at byte {start + done}", fix="run `lamella store verify`", path=file)
        done += got


def verify_store(store: Path, manifest: Manifest, progress: Callable[[int], None]) -> list[str]:
    """Names of everything whose bytes differ from what was written; see `Store.verify`."""
    wrong: list[str] = []
    if not manifest_is_intact((store / MANIFEST_NAME).read_bytes(), manifest):
        wrong.append(MANIFEST_NAME)
    for name, copied in manifest.files.items():
        if file_checksum(store / name) != copied.checksum:
            wrong.append(name)
    seen: dict[Any, list[int | str]] = {}
    for _, group in manifest.groups():
        wrong += _verify_once(store / group.file, group, progress, seen)
    return wrong


def _verify_once(
    file: Path, group: Group, progress: Callable[[int], None], seen: dict[Any, list[int | str]]
) -> list[str]:
    """`_verify_group`, but a file that stands under several names (hard links) is read once."""
    status = os.stat(file)
    key = (status.st_dev, status.st_ino, tuple((tuple(r.parts.items()), r.checksum) for r in group.tensors))
    if status.st_nlink == 1 or key not in seen:
        found = _verify_group(file, group, progress)
        seen[key] = found
    else:
        found = seen[key]
        progress(sum(record.nbytes for record in group.tensors))
    return [group.tensors[item].name if isinstance(item, int) else f"{group.file}: {item}" for item in found]


def _verify_group(file: Path, group: Group, progress: Callable[[int], None]) -> list[int | str]:
    """What differs: positions of tensors in the group, and text about stray bytes."""
    wrong: list[int | str] = []
    buffer = bytearray(_CHUNK_BYTES)
    fd = os.open(file, os.O_RDONLY)

    def pieces(offset: int, nbytes: int) -> Iterator[memoryview]:
        for start in range(offset, offset + nbytes, _CHUNK_BYTES):
            view = memoryview(buffer)[: min(_CHUNK_BYTES, offset + nbytes - start)]
            read_exactly(fd, view, start, file)
            yield view

    try:
        for number, record in enumerate(group.tensors):
            digest = xxhash.xxh3_128()
            for offset, nbytes in record.parts.values():
                for view in pieces(offset, nbytes):
                    digest.update(view)
            progress(record.nbytes)
            if digest.hexdigest() != record.checksum:
                wrong.append(number)
        for start, end in _gaps(group):
            padding = b"".join(bytes(view) for view in pieces(start, end - start))
            stray = len(padding) - len(padding.lstrip(b"\0"))
            if stray < len(padding):
                wrong.append(f"padding at byte {start + stray}")
    finally:
        os.close(fd)
    return wrong


def _gaps(group: Group) -> Iterator[tuple[int, int]]:
    """Stretches of a file that no part covers (alignment; they hold zeros)."""
    position = 0
    for offset, nbytes in sorted({part for record in group.tensors for part in record.parts.values()}):
        if offset > position:
            yield position, offset
        position = max(position, offset + nbytes)
    if position < group.nbytes:
        yield position, group.nbytes
