"""safetensors shards written in pieces: all headers are known before the first value, so memory holds a piece and no more.

Format: https://huggingface.co/docs/safetensors, "Format"; the index is transformers' `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, uint8

from lamella.checkpoint.header import DTYPE_BYTES
from lamella.checkpoint.source import INDEX_NAME
from lamella.errors import UserError
from lamella.files import is_disk_full, write_json

SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class Item:
    """A tensor of the files; `dtype` in safetensors' spelling ("BF16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class _Shard:
    def __init__(self, path: Path, items: Sequence[Item]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for item in items:
            end = position + item.nbytes
            header[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [position, end]}
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.path, self.items = path, items
        self.start = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.start) + position
        self.left = position
        self.fd: int | None = None
        self.closed = False

    def write(self, offset: int, view: memoryview) -> None:
        if self.fd is None:
            self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            _pwrite(self.fd, memoryview(self.start), 0)
        _pwrite(self.fd, view, len(self.start) + offset)
        self.left -= view.nbytes

    def close(self, keep: bool = True) -> None:
        if self.fd is not None:
            if keep:
                os.fsync(self.fd)
            os.close(self.fd)
            self.fd = None
        self.closed = keep


class Shards:
    """The weight files of a model.

    Args:
        folder: exists, without such files.
        items: every tensor, in the order in which they are to lie; tensors that are written one after the other should be.
        shard_bytes: a file is begun anew before it would exceed this; a larger tensor has one of its own.
        finished: told each file's path when its last byte is on disk.

    Attributes:
        nbytes: bytes of all files, index included.
    """

    def __init__(
        self,
        folder: Path,
        items: Sequence[Item],
        shard_bytes: int = SHARD_BYTES,
        finished: Callable[[Path], None] | None = None,
    ) -> None:
        groups: list[list[Item]] = []
        size = 0
        for item in items:
            if not groups or size + item.nbytes > shard_bytes:
                groups.append([])
                size = 0
            groups[-1].append(item)
            size += item.nbytes
        count = len(groups)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        self.folder = folder
        self.shards = [_Shard(folder / name, group) for name, group in zip(names, groups, strict=True)]
        self._place: dict[str, tuple[_Shard, int, int]] = {}
        self._left: dict[str, int] = {}
        for shard in self.shards:
            position = 0
            for item in shard.items:
                assert item.name not in self._place, item.name
                self._place[item.name] = shard, position, item.nbytes
                self._left[item.name] = item.nbytes
                position += item.nbytes
        self._finished = finished
        self._total = sum(item.nbytes for item in items)
        self.nbytes = sum(shard.nbytes for shard in self.shards) + sum(len(n) + 48 for n in self._place)

    def write(self, name: str, start: int, data: Tensor | bytes) -> None:
        """Bytes `start` .. of a tensor; a torch tensor is taken as it lies in memory (contiguous).

        Raises:
            UserError: the disk is full.
        """
        view = memoryview(data) if isinstance(data, bytes) else _view(data)
        shard, position, nbytes = self._place[name]
        assert start + view.nbytes <= nbytes, name
        try:
            shard.write(position + start, view)
            self._left[name] -= view.nbytes
            assert self._left[name] >= 0, f"{name} was written twice"
            if shard.left == 0:
                shard.close()
                if self._finished is not None:
                    self._finished(shard.path)
        except OSError as error:
            if is_disk_full(error):
                raise UserError("the disk is full", fix="make room, or give another OUT", path=shard.path) from error
            raise UserError(f"cannot be written: {error.strerror}", fix="check the disk", path=shard.path) from error

    def finish(self) -> list[Path]:
        """Write the index where there is more than one file; gives all files.

        Raises:
            UserError: bytes of a tensor were never written.
        """
        missing = [name for name, left in self._left.items() if left]
        if missing:
            raise UserError(f"{len(missing)} of {len(self._left)} tensors were not written, first {missing[0]!r}",
                            fix="export again; if it happens again, report it")  # fmt: skip
        for shard in self.shards:
            if not shard.closed:  # of no bytes at all
                shard.write(0, memoryview(b""))
                shard.close()
        files = [shard.path for shard in self.shards]
        if len(files) > 1:
            weight_map = {name: shard.path.name for name, (shard, _, _) in self._place.items()}
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            files.append(write_json(self.folder / INDEX_NAME, index, indent=2))
        return files

    def abandon(self) -> None:
        """Close what is open."""
        for shard in self.shards:
            if shard.fd is not None:
                shard.close(keep=False)


def _view(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous()
    return memoryview(tensor.view(-1).view(uint8).numpy().data)


def _pwrite(fd: int, view: memoryview, offset: int) -> None:
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done
