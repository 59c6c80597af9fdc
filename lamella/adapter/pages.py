"""An adapter's masters, gradients and moments in a memory-mapped file instead of RAM.

For adapters whose state (16 bytes per parameter) outgrows memory. The file is laid out by layer; a pass over the
parameters holds the pages of the layer it is at, and lets go of them when it goes on to another: they stay in the
kernel's page cache as long as there is room, and go to the file when there is not. The file has no name: it is gone
with the process. Values are the same as in RAM, bit for bit; a layer's initial ones are written when it is first
entered, so a run begins without a pass over the file.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, ItemsView, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from lamella.errors import UserError
from lamella.files import free_bytes
from lamella.units import format_bytes

Slot = Literal["master", "grad", "exp_avg", "exp_avg_sq"]
SLOTS: tuple[Slot, ...] = ("master", "grad", "exp_avg", "exp_avg_sq")
STATE_BYTES = 4 * len(SLOTS)
"""Bytes of state per trained parameter."""
Fill = Callable[[int, bool], None]
"""Writes a layer's masters; told whether that layer was never entered before, so all is zero."""
_ALIGN_BYTES = 64


class StatePages:
    """The mapped file.

    Args:
        folder: on the disk that is to hold the file; a file system in RAM gains nothing.
        shapes: layer -> parameter name -> shape.

    Raises:
        UserError: no room on that disk, or a folder that cannot be written.
    """

    def __init__(self, folder: Path, shapes: Mapping[int, Mapping[str, tuple[int, ...]]]) -> None:
        self.layer_of: dict[str, int] = {}
        self._places: dict[tuple[str, Slot], tuple[int, tuple[int, ...]]] = {}
        self._ranges: dict[int, tuple[int, int]] = {}
        self._at: int | None = None
        self._fill: Fill | None = None
        self._unfilled: set[int] = set()
        self._entered: set[int] = set()
        self._filling = threading.Lock()
        position = 0
        for layer, named in shapes.items():
            start = position
            for slot in SLOTS:
                for name, shape in named.items():
                    self.layer_of[name] = layer
                    self._places[name, slot] = position, tuple(shape)
                    position += -(-4 * math.prod(shape) // _ALIGN_BYTES) * _ALIGN_BYTES
            position = -(-position // mmap.PAGESIZE) * mmap.PAGESIZE
            self._ranges[layer] = start, position - start
        self.nbytes = position
        self._map = _mapped(folder, self.nbytes)
        self._all = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self, name: str, slot: Slot) -> Tensor:
        """fp32, the parameter's shape, in the file; zero at the start."""
        offset, shape = self._places[name, slot]
        return self._all[offset : offset + 4 * math.prod(shape)].view(torch.float32).view(shape)

    def groups(self) -> list[list[str]]:
        """Parameter names by layer."""
        found: dict[int, list[str]] = {}
        for name, layer in self.layer_of.items():
            found.setdefault(layer, []).append(name)
        return list(found.values())

    def fill_later(self, fill: Fill) -> None:
        """Have each layer's masters written by `fill` when it is next entered."""
        with self._filling:
            self._fill, self._unfilled = fill, set(self._ranges)

    def enter(self, name: str) -> None:
        """Work goes to this parameter: let go of another layer's pages."""
        layer = self.layer_of[name]
        if layer in self._unfilled:
            with self._filling:  # a thread that saves may come here too
                if layer in self._unfilled:
                    assert self._fill is not None
                    self._fill(layer, layer not in self._entered)
                    self._unfilled.discard(layer)
        self._entered.add(layer)
        if self._at is not None and self._at != layer:
            self._map.madvise(mmap.MADV_DONTNEED, *self._ranges[self._at])
        self._at = layer


def _mapped(folder: Path, nbytes: int) -> mmap.mmap:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            free = free_bytes(folder)
            if free < nbytes:
                raise UserError(f"the adapter's state on disk takes {format_bytes(nbytes)}, {format_bytes(free)} free",
                                fix="free some space, move runs_dir, or lower lora.rank or lora.expert_rank",
                                path=folder)  # fmt: skip
            os.posix_fallocate(file.fileno(), 0, nbytes)  # or a full disk would end the process when a page is written
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        raise UserError(f"the adapter's state cannot be put there: {error.strerror}",
                        fix='choose another runs_dir, or set memory.state = "ram"', path=folder) from error  # fmt: skip


class PagedParameters(dict[str, nn.Parameter]):
    """Parameters in `StatePages`: who takes or passes one lets go of the layer he was at before.

    `values()` gives them without entering: for who looks at no values.
    """

    def __init__(self, pages: StatePages) -> None:
        super().__init__((name, nn.Parameter(pages.view(name, "master"))) for name in pages.layer_of)
        self.pages = pages

    def __getitem__(self, name: str) -> nn.Parameter:
        self.pages.enter(name)
        return super().__getitem__(name)

    def items(self) -> ItemsView[str, nn.Parameter]:  # type: ignore[override]
        return ItemsView(self)  # one by one, through `__getitem__`
