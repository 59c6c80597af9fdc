"""A store's file mapped read-only: processes that map the same file read one copy of it, the kernel's page cache.

Pages are clean, so under pressure the kernel drops and reads them again; nobody runs out of memory for them. What is
written to the tensors ends the process (SIGSEGV) and never reaches the file or another process.

A file that is cut while it is mapped would end its readers with SIGBUS. Pages are therefore brought in by `populate`, which
gives an error instead, and `check` compares what the name stands for with what was mapped. Left is the moment between a
check and the use of pages that the cut took away.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lamella.errors import UserError

_MADV_POPULATE_READ = 22
"""Linux 5.14; Python 3.11 has no name for it."""


class SharedFile:
    """The first bytes of a file, mapped read-only and shared.

    Attributes:
        bytes: uint8 [n], its data aligned to a page; must not be written to. Keeps the mapping alive.

    Raises:
        UserError: the file cannot be opened or is shorter than `n`.
    """

    def __init__(self, file: Path, n: int) -> None:
        self.file = file
        try:
            with file.open("rb") as stream:
                self._identity = _identity(os.fstat(stream.fileno()))
                self._mapping = mmap.mmap(stream.fileno(), n, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot be mapped: {error}", fix="run `lamella store verify`", path=file) from error
        self.bytes = _tensor_of(self._mapping, n)

    def populate(self) -> None:
        """Bring all pages into memory, and into this process's tables.

        Raises:
            UserError: they cannot be read, or the file has become shorter.
        """
        try:
            self._mapping.madvise(_MADV_POPULATE_READ)
        except OSError as error:
            self.check()
            if _knows_populate():
                raise UserError(f"cannot be read: {error.strerror}", fix="check the disk", path=self.file) from error
            self._mapping.madvise(mmap.MADV_WILLNEED)  # an older kernel: pages come as they are touched

    def check(self) -> None:
        """Raises `UserError` when the file was cut, written to or replaced since it was mapped."""
        try:
            now = _identity(os.stat(self.file))
        except OSError as error:
            raise UserError(f"is gone while it is mapped: {error.strerror}", fix=_FIX, path=self.file) from error
        if now != self._identity:
            raise UserError(
                f"was changed while it is mapped: {_difference(self._identity, now)}", fix=_FIX, path=self.file
            )


_FIX = "leave a store alone while a run uses it; bring it back as it was and start again"
_NAMES = ("device", "inode", "bytes", "time of change (ns)")


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _difference(before: tuple[int, ...], now: tuple[int, ...]) -> str:
    return ", ".join(f"{name} {a} -> {b}" for name, a, b in zip(_NAMES, before, now, strict=True) if a != b)


def _tensor_of(mapping: mmap.mmap, n: int) -> Tensor:
    """A tensor over read-only memory; by its address, as torch takes writable buffers alone without a warning."""
    holder = np.frombuffer(mapping, np.uint8)
    array = (ctypes.c_uint8 * n).from_address(holder.ctypes.data)
    array.holder = holder  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)


def _knows_populate() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_READ)
        except OSError:
            return False
    return True
