"""How fast the disk under a folder is read and written in long runs, past the page cache. Imports no torch."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lamella.errors import UserError
from lamella.files import free_bytes
from lamella.units import format_bytes

PIECE_BYTES = 8 << 20
THREADS = 4
_SYS = Path("/sys/dev/block")
_MOUNTS = Path("/proc/self/mountinfo")
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class DiskRates:
    """What was measured.

    Attributes:
        read_bytes_per_s, write_bytes_per_s: of long sequential runs; None: could not be measured (see `notes`).
        kind: "nvme", "ssd", "hdd", "virtual", or the file system's name where no block device is seen.
        direct: whether reads went past the page cache.
        what: what was read.
    """

    path: str
    read_bytes_per_s: float | None
    write_bytes_per_s: float | None
    free_bytes: int
    kind: str
    direct: bool
    what: str
    notes: tuple[str, ...] = ()


def measure_disk(folder: Path, nbytes: int, limit_s: float, files: Sequence[Path] = ()) -> DiskRates:
    """Write a file of `nbytes` under `folder`, flush it, read it past the cache, and remove it.

    Args:
        limit_s: writing and reading end after so many seconds each, whatever was done by then.
        files: large files that are there already (a store's layers): those are read in place of the new one.

    Raises:
        UserError: no such folder, or nothing can be written there and there are no files to read.
    """
    if not folder.is_dir():
        raise UserError("no such folder", fix="give a folder on the disk where the store is to lie", path=folder)
    notes: list[str] = []
    free = free_bytes(folder)
    large = [file for file in files if file.is_file() and file.stat().st_size >= PIECE_BYTES]
    write = read = None
    direct, what = False, ""
    if free < 4 * nbytes:
        notes.append(
            f"disk: {format_bytes(free)} are free on {folder}, too few to write {format_bytes(nbytes)} as a test"
        )
    else:
        with _scratch(folder, notes) as scratch:
            if scratch is not None:
                write, written = _write(scratch, nbytes, limit_s)
                if not large and written:
                    what = f"a file of {format_bytes(written)}, written for this"
                    read, direct = _read([scratch], written, limit_s)
    if large:
        what = f"{len(large)} files of the store"
        read, direct = _read(large, nbytes, limit_s)
    if read is not None and not direct:
        notes.append(f"disk: {folder} cannot be read past the page cache; what was in it was given up first")
    kind = disk_kind(folder)
    if kind in ("tmpfs", "ramfs"):
        notes.append(f"disk: {folder} is memory ({kind}), not a disk")
    if read is None and not large and not notes:
        notes.append(f"disk: nothing could be measured on {folder}")
    return DiskRates(str(folder), read, write, free, kind, direct, what, tuple(notes))


@contextmanager
def _scratch(folder: Path, notes: list[str]) -> Iterator[Path | None]:
    """A name for a file of ours, gone at the end; None where nothing may be written."""
    path = folder / f".lamella-probe-{os.getpid()}.partial"
    try:
        path.touch(exist_ok=False)
    except OSError as error:
        notes.append(f"disk: nothing can be written to {folder}: {error.strerror}")
        yield None
        return
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, nbytes: int, limit_s: float) -> tuple[float | None, int]:
    """(bytes/s with the flush at the end, bytes written)."""
    with mmap.mmap(-1, PIECE_BYTES) as piece:
        for at in range(0, PIECE_BYTES, 1 << 16):  # not zeros, which some file systems do not write
            piece[at : at + 32] = os.urandom(32)
        fd, _ = _open(path, os.O_WRONLY)
        try:
            done, start_s = 0, time.perf_counter()
            while done < nbytes and time.perf_counter() - start_s < limit_s:
                done += os.pwrite(fd, piece, done)
            os.fsync(fd)
            seconds = time.perf_counter() - start_s
        finally:
            os.close(fd)
    return (done / seconds if done else None), done


def _read(files: Sequence[Path], nbytes: int, limit_s: float) -> tuple[float | None, bool]:
    """(bytes/s over all threads, whether the cache was passed by). Whole pieces, spread over the threads."""
    pieces: list[tuple[int, int]] = []
    opened = [_open(file, os.O_RDONLY) for file in files]
    try:
        for (fd, direct), file in zip(opened, files, strict=True):
            if not direct:
                os.fsync(fd) if os.access(file, os.W_OK) else None
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            pieces += [(fd, at) for at in range(0, file.stat().st_size - PIECE_BYTES + 1, PIECE_BYTES)]
        pieces = pieces[: max(1, nbytes // PIECE_BYTES)]
        if not pieces:
            return None, False
        start_s = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            done = sum(pool.map(lambda k: _read_pieces(pieces[k::THREADS], start_s + limit_s), range(THREADS)))
        seconds = time.perf_counter() - start_s
    finally:
        for fd, _ in opened:
            os.close(fd)
    return (done / seconds if done else None), all(direct for _, direct in opened)


def _read_pieces(pieces: Sequence[tuple[int, int]], until_s: float, read: Callable[..., int] = os.preadv) -> int:
    done = 0
    with mmap.mmap(-1, PIECE_BYTES) as buffer:  # whole pages, as direct reads ask for
        for fd, at in pieces:
            if time.perf_counter() > until_s:
                break
            done += read(fd, [buffer], at)
    return done


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """A descriptor that passes the page cache by where the file system can, and whether it does."""
    try:
        return os.open(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return os.open(path, flags), False


def disk_kind(folder: Path) -> str:
    """`nvme`, `ssd`, `hdd` or `virtual` by what the kernel says of the block device, else the file system's name."""
    device = folder.stat().st_dev
    block = _SYS / f"{os.major(device)}:{os.minor(device)}"
    if block.exists():
        disk = block.resolve()
        for place in (disk, disk.parent):  # a partition's queue is its disk's
            rotational = place / "queue" / "rotational"
            if rotational.is_file():
                if place.name.startswith("nvme"):
                    return "nvme"
                if place.name.startswith(("vd", "xvd")):  # what is behind it the guest is not told
                    return "virtual"
                return "hdd" if rotational.read_text().strip() == "1" else "ssd"
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in _MOUNTS.read_text().splitlines() if _MOUNTS.is_file() else ():
        fields = line.split()
        if fields[2] == wanted and "-" in fields:
            return fields[fields.index("-") + 1]
    return "unknown"
