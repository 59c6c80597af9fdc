"""Values of a model's tensors by their names in the checkpoint: read from a checkpoint, from a store, or from both.

One group (a decoder layer, or everything outside) is at hand at a time. A checkpoint is read in pieces with pread, a store's
file is mapped while its group is at hand, so nothing of either stays in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from lamella.checkpoint.fingerprint import fingerprint
from lamella.checkpoint.source import Checkpoint
from lamella.checkpoint.tied import find_tying
from lamella.models.skeleton import config_of, load_config
from lamella.store.manifest import TensorRecord
from lamella.store.reader import GroupKey, PackedGroup, Store, in_order


class Values(Protocol):
    """A model's tensors."""

    path: Path
    """For messages."""
    tied: bool
    """Whether the head is the embeddings."""
    shapes: Mapping[str, tuple[int, ...]]
    """Tensor -> shape."""
    fingerprint: str
    """Of the checkpoint that these are, or were made from."""

    def config(self) -> PretrainedConfig:
        """The model's, with the tying in effect. Raises `UserError` as `load_config` does."""

    def enter(self, group: GroupKey | None) -> None:
        """Tensors of this group are asked for next; what the group before held is let go. None: of no group."""

    def fill(self, name: str, first: int, out: Tensor) -> None:
        """Write values `first`, `first` + 1, ... of a tensor, row-major, into `out` (a float dtype, contiguous)."""

    def close(self) -> None:
        """Let go of files."""


class CheckpointValues:
    """Of a checkpoint folder, as it is."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        tying = find_tying(checkpoint)
        self.checkpoint = checkpoint
        self.path = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        self.tied = tying.tied
        self.fingerprint = fingerprint(checkpoint, tying.tied)
        kept = (*checkpoint.layout.outer, *(t for layer in checkpoint.layout.layers for t in layer))
        self._tensors = {t.name: t for t in kept if t is not tying.drop}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: t.shape for name, t in self._tensors.items()}

    @classmethod
    def open(cls, source: str | Path) -> CheckpointValues:
        """Raises `UserError` as `Checkpoint.open` does."""
        return cls(Checkpoint.open(source))

    def config(self) -> PretrainedConfig:
        return config_of(self.checkpoint.config, self.path / "config.json", self.tied)

    def enter(self, group: GroupKey | None) -> None:
        """Nothing is held from one tensor to the next."""

    def fill(self, name: str, first: int, out: Tensor) -> None:
        tensor, flat = self._tensors[name], out.view(-1)
        step = self.checkpoint.piece(tensor)
        buffer = torch.empty(min(step, flat.numel()))
        for start in range(0, flat.numel(), step):
            target = flat[start : start + step]
            piece = target if target.dtype == torch.float32 else buffer[: target.numel()]
            self.checkpoint.values(tensor, first + start, piece.numpy())
            if piece is not target:
                target.copy_(piece)

    def close(self) -> None:
        self.checkpoint.close()


class StoreValues:
    """Of a layer store, dequantised."""

    def __init__(self, store: Store) -> None:
        manifest = store.manifest
        self.store = store
        self.path, self.tied, self.fingerprint = store.path, manifest.tie_word_embeddings, manifest.source_fingerprint
        self.shapes: Mapping[str, tuple[int, ...]] = {
            record.name: record.shape for key, _ in manifest.groups() for record in store.records(key)
        }
        self._key: GroupKey | None = None
        self._group: PackedGroup | None = None

    @classmethod
    def open(cls, path: str | Path) -> StoreValues:
        """Raises `UserError` as `Store.open` does."""
        return cls(Store.open(path))

    def config(self) -> PretrainedConfig:
        return load_config(self.path, self.tied)

    def enter(self, group: GroupKey | None) -> None:
        if group != self._key:
            self._key, self._group = group, None if group is None else self.store.map(group)[0]

    def fill(self, name: str, first: int, out: Tensor) -> None:
        assert self._group is not None, "no group is at hand"
        record, block, n = self._group.records[name], self._group.block_of(name), out.numel()
        if n == record.numel:
            self._group.dequantize(name, out)
        elif first % block == 0 and n % block == 0 and not record.order:
            self._group.dequantize_slice(name, first, out.view(-1))
        elif first % block == 0 and n % block == 0 and _by_first_axis(record, first, n):
            shape = (n // prod(record.shape[1:]), *record.shape[1:])
            stored = self._group.dequantize_slice(name, first, torch.empty(n, dtype=out.dtype))
            out.view(shape).copy_(in_order(record, stored, shape))
        else:
            whole = self._group.dequantize(name, out.new_empty(record.numel))
            out.copy_(whole[first : first + n].view(out.shape))

    def close(self) -> None:
        self._key = self._group = None


def _by_first_axis(record: TensorRecord, first: int, n: int) -> bool:
    """Whether these values are whole entries of the first axis, which is the outermost as the tensor lies, too."""
    each = prod(record.shape[1:])
    return record.order[0] == 0 and first % each == 0 and n % each == 0


class MixedValues:
    """Some tensors of a store, the others of the checkpoint that it was made from.

    Args:
        stored: the store.
        plain: its checkpoint.
        names: tensors that are the store's.
    """

    def __init__(self, stored: StoreValues, plain: CheckpointValues, names: Collection[str]) -> None:
        assert set(names) <= set(stored.shapes)
        assert stored.fingerprint == plain.fingerprint
        self.stored, self.plain, self.names = stored, plain, frozenset(names)
        self.path, self.tied, self.shapes = plain.path, plain.tied, plain.shapes
        self.fingerprint = plain.fingerprint

    def config(self) -> PretrainedConfig:
        return self.plain.config()

    def enter(self, group: GroupKey | None) -> None:
        self.stored.enter(group)
        self.plain.enter(group)

    def fill(self, name: str, first: int, out: Tensor) -> None:
        (self.stored if name in self.names else self.plain).fill(name, first, out)

    def close(self) -> None:
        self.stored.close()
        self.plain.close()
