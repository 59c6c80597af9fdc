"""Bytes of tensors, read where they lie."""

from __future__ import annotations

import os
from pathlib import Path

from lamella.checkpoint.header import TensorInfo
from lamella.errors import UserError

AGAIN = "download the checkpoint again (an interrupted download resumes with `hf download`)"


class Reader:
    """Files of a checkpoint, opened when first read."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def read_into(self, tensor: TensorInfo, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of a plain tensor from byte `start` on.

        Raises:
            UserError: the file ends early or cannot be read.
        """
        assert tensor.packing is None, f"{tensor.name} is packed: read its values"
        fd = self._files.get(tensor.file)
        try:
            if fd is None:
                fd = self._files[tensor.file] = os.open(tensor.file, os.O_RDONLY)
            done = 0
            while done < len(buffer):
                got = os.preadv(fd, [buffer[done:]], tensor.offset + start + done)
                if got == 0:
                    raise UserError(f"file ends inside tensor {tensor.name!r}", fix=AGAIN, path=tensor.file)
                done += got
        except OSError as error:
            what = f"tensor {tensor.name!r} cannot be read: {error.strerror}"
            raise UserError(what, fix="check the disk, then run again", path=tensor.file) from error

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
