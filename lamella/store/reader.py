"""Reading a store: one layer is one copy into one buffer, tensors are views of it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lamella import kernels
from lamella.errors import UserError
from lamella.kernels import (
    AbsmaxRun,
    AbsmaxState,
    dequantize_absmax,
    dequantize_int8,
    dequantize_mxfp4,
    dequantize_nf4,
    dequantize_nf4_run,
)
from lamella.kernels.layout import ABSMAX_BLOCK
from lamella.store.manifest import Group, Manifest, TensorRecord, read_manifest
from lamella.store.shared import SharedFile
from lamella.store.verify import read_exactly, verify_store

GroupKey = int | Literal["outer"]
_RUN_NUMEL = 64 << 20


@dataclass(frozen=True, eq=False)
class PackedGroup:
    """A group's bytes in memory.

    Attributes:
        buffer: uint8 [group bytes or more], aligned to 64 bytes.
        records: the group's tensors by name (shared by all loads of this group).
        block_size: elements per scale of tensors that say nothing else.
        blank: there are zeros in the place of what the file holds (`Store.blank`).
    """

    buffer: Tensor
    records: dict[str, TensorRecord]
    block_size: int
    blank: bool = False

    def part(self, name: str, part: str, dtype: torch.dtype) -> Tensor:
        """One part of a tensor as a flat view of `dtype`."""
        offset, nbytes = self.records[name].parts[part]
        return self.buffer[offset : offset + nbytes].view(dtype)

    def block_of(self, name: str) -> int:
        """Elements per scale of a tensor; 1 of a raw one."""
        return block_of(self.records[name], self.block_size)

    def raw(self, name: str) -> Tensor:
        """A tensor kept in its own dtype: a view of the buffer in its shape, no copy."""
        record = self.records[name]
        assert record.format == "raw", f"{name} is {record.format}, not raw"
        return self.part(name, "data", getattr(torch, record.dtype)).view(record.shape)

    def dequantize(self, name: str, out: Tensor) -> Tensor:
        """Write a tensor of any format into `out`.

        Args:
            out: bf16, fp16 or fp32, contiguous, as many elements as the tensor; any shape.

        Returns:
            `out`.
        """
        record = self.records[name]
        if not record.order:
            return self.dequantize_stored(name, out)
        assert out.is_contiguous()
        stored = self.dequantize_stored(name, torch.empty(record.stored_shape, dtype=out.dtype, device=out.device))
        out.view(record.shape).copy_(in_order(record, stored))
        return out

    def dequantize_stored(self, name: str, out: Tensor) -> Tensor:
        """As `dequantize`, with the values in the order in which they lie (`TensorRecord.order`)."""
        record = self.records[name]
        assert out.is_contiguous()
        assert out.numel() == record.numel, f"{name} has shape {list(record.shape)}, out {list(out.shape)}"
        if record.format == "raw":
            return out.copy_(self.raw(name).view(out.shape))
        if record.format == "nf4":
            codes = self.part(name, "codes", torch.uint8)
            return dequantize_nf4(codes, self._scales((name,)), out, self.block_of(name))
        return self._plain_scales(name, 0, out)

    def _plain_scales(self, name: str, first: int, out: Tensor) -> Tensor:
        """Elements `first` .. of an mxfp4 or int8 tensor; `first` is a multiple of its block size."""
        block, n = self.block_of(name), out.numel()
        blocks = slice(first // block, first // block + -(-n // block))
        if self.records[name].format == "mxfp4":
            codes = self.part(name, "codes", torch.uint8)[first // 2 : (first + n + 1) // 2]
            return dequantize_mxfp4(codes, self.part(name, "scales", torch.uint8)[blocks], out)
        codes = self.part(name, "codes", torch.int8)[first : first + n]
        return dequantize_int8(codes, self.part(name, "scales", torch.float32)[blocks], out, block)

    def dequantize_slice(self, name: str, first: int, out: Tensor) -> Tensor:
        """Write elements `first` .. of a tensor, taken flat in the order in which they lie, into `out`.

        Args:
            first: a multiple of the block size.
            out: bf16, fp16 or fp32, contiguous; its size says how many, a multiple of the block size too.
        """
        block_size, record = self.block_of(name), self.records[name]
        assert first % block_size == 0
        assert out.numel() % block_size == 0
        if record.format == "raw":
            return out.copy_(self.raw(name).view(-1)[first : first + out.numel()].view(out.shape))
        if record.format != "nf4":
            return self._plain_scales(name, first, out)
        block, blocks = first // block_size, out.numel() // block_size
        codes = self.part(name, "codes", torch.uint8)[first // 2 : (first + out.numel()) // 2]
        if "absmax" in record.parts:
            scales = self.part(name, "absmax", torch.float32)[block : block + blocks]
        else:
            whole = self._scales((name,))
            assert isinstance(whole, AbsmaxState)
            start = block // ABSMAX_BLOCK * ABSMAX_BLOCK  # second-level blocks are undone from their start
            stop = min(-(-(block + blocks) // ABSMAX_BLOCK) * ABSMAX_BLOCK, whole.q.numel())
            absmax2 = whole.absmax2[start // ABSMAX_BLOCK : -(-stop // ABSMAX_BLOCK)]
            around = dequantize_absmax(AbsmaxState(whole.q[start:stop], whole.code, absmax2, whole.offset))
            scales = around[block - start : block - start + blocks]
        return dequantize_nf4(codes, scales, out, block_size)

    def dequantize_columns(self, name: str, first: int, last: int, out: Tensor) -> Tensor:
        """Write columns `first` .. `last` - 1 of a matrix into `out`.

        Args:
            first, last: multiples of the block size, as the matrix's columns are.
            out: bf16, fp16 or fp32, contiguous, [rows, last - first].
        """
        record, block = self.records[name], self.block_of(name)
        rows, columns = record.shape
        assert not record.order
        assert columns % block == first % block == last % block == 0
        assert out.numel() == rows * (last - first)

        def cut(part: Tensor, per_value: int) -> Tensor:
            """The columns' part of `codes` or scales of which one stands for so many values."""
            at = part.view(rows, columns // per_value)[:, first // per_value : last // per_value]
            return at.contiguous().view(-1)

        if record.format == "raw":
            return out.copy_(self.raw(name)[:, first:last].reshape(out.shape))
        if record.format == "int8":
            codes, scales = self.part(name, "codes", torch.int8), self.part(name, "scales", torch.float32)
            return dequantize_int8(cut(codes, 1), cut(scales, block), out, block)
        codes = cut(self.part(name, "codes", torch.uint8), 2)
        if record.format == "mxfp4":
            return dequantize_mxfp4(codes, cut(self.part(name, "scales", torch.uint8), block), out)
        nested = self._scales((name,))
        plain = dequantize_absmax(nested) if isinstance(nested, AbsmaxState) else nested
        return dequantize_nf4(codes, cut(plain, block), out, block)

    def dequantize_many(self, names: Sequence[str], out: Tensor) -> Tensor:
        """Write tensors one after the other into `out`, as if concatenated flat.

        Expert matrices that the store holds side by side (see `lamella.store.layout`) take one kernel call
        in all (a few for very large runs). They do when named in that order: for each expert gate then up,
        or for each expert down.

        Args:
            out: bf16, fp16 or fp32, contiguous, as many elements as all the tensors together.
        """
        records = [self.records[name] for name in names]
        assert out.is_contiguous()
        assert out.numel() == sum(record.numel for record in records)
        flat, position = out.view(-1), 0
        block_size = self.block_of(names[0])
        if len(records) > 1 and _side_by_side(records, block_size):
            if kernels.by_triton(self.buffer.device) and "absmax2" in records[0].parts:
                start, nbytes = records[0].parts["codes"]
                codes = self.buffer[start : start + nbytes * len(records)]
                dequantize_nf4_run(codes, self.run(names), flat, block_size)
                return out
            step = max(1, _RUN_NUMEL // records[0].numel)  # bounds the buffer of first-level scales
            for first in range(0, len(records), step):
                run = records[first : first + step]
                start, nbytes = run[0].parts["codes"]
                codes = self.buffer[start : start + nbytes * len(run)]
                target = flat[first * run[0].numel : (first + len(run)) * run[0].numel]
                dequantize_nf4(codes, self._scales([r.name for r in run]), target, block_size)
            return out
        for record in records:
            self.dequantize(record.name, flat[position : position + record.numel])
            position += record.numel
        return out

    def run(self, names: Sequence[str]) -> AbsmaxRun:
        """Double-quantised scales of tensors that lie at even distances: views, no copy."""
        return AbsmaxRun(
            self._strided(names, "absmax_q", torch.uint8), self.part(names[0], "absmax_code", torch.float32),
            self._strided(names, "absmax2", torch.float32), self._strided(names, "offset", torch.float32)[:, 0],
        )  # fmt: skip

    def _scales(self, names: Sequence[str]) -> Tensor | AbsmaxState:
        """First-level scales, fp32 or still double quantised, of tensors whose scale parts lie at even distances."""
        if "absmax" in self.records[names[0]].parts:
            return self._strided(names, "absmax", torch.float32).reshape(-1)
        offset = self._strided(names, "offset", torch.float32)
        state = AbsmaxState(
            self._strided(names, "absmax_q", torch.uint8).contiguous().view(-1),
            self.part(names[0], "absmax_code", torch.float32),
            self._strided(names, "absmax2", torch.float32).contiguous().view(-1),
            offset[0, 0] if len(names) == 1 else torch.zeros((), device=self.buffer.device),
        )
        if len(names) == 1:
            return state
        scales = dequantize_absmax(state)  # offsets differ by tensor; x + 0 is exact, so adding them after is the same
        return scales.view(len(names), -1).add_(offset).view(-1)

    def _strided(self, names: Sequence[str], part: str, dtype: torch.dtype) -> Tensor:
        """The same part of several tensors as rows of one view [tensors, elements]."""
        first, nbytes = self.records[names[0]].parts[part]
        stride = self.records[names[1]].parts[part][0] - first if len(names) > 1 else nbytes
        item = dtype.itemsize
        flat = self.buffer[first:] if item == 1 else self.buffer[first : self.buffer.numel() // item * item].view(dtype)
        return flat.as_strided((len(names), nbytes // item), (stride // item, 1))


def block_of(record: TensorRecord, default: int) -> int:
    """Elements per scale; 1 of a raw tensor. `default`: the manifest's."""
    if record.format == "raw":
        return 1
    return default if record.block_size is None else record.block_size


def in_order(record: TensorRecord, stored: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """A view in the tensor's own shape of values in the order in which they lie. `shape`: of a part of it."""
    shape = record.shape if shape is None else shape
    if not record.order:
        return stored.view(shape)
    back = sorted(range(len(record.order)), key=record.order.__getitem__)
    return stored.view([shape[axis] for axis in record.order]).permute(back)


def _side_by_side(records: Sequence[TensorRecord], block_size: int) -> bool:
    """Whether these nf4 tensors can be dequantised as one: codes without gaps, other parts at even distances."""
    first = records[0]
    if any(r.format != "nf4" or r.shape != first.shape or r.block_size != first.block_size for r in records):
        return False
    if first.numel % block_size or ("absmax2" in first.parts and first.numel // block_size % 256):
        return False
    if records[1].parts["codes"][0] - first.parts["codes"][0] != first.parts["codes"][1]:
        return False
    for part in first.parts:
        stride = records[1].parts[part][0] - first.parts[part][0]
        if any(r.parts[part][0] != first.parts[part][0] + i * stride for i, r in enumerate(records)):
            return False
    return True


class Store:
    """A layer store on disk. Opening reads the manifest; weights are read by `load`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Open a finished store.

        Raises:
            UserError: no store, unfinished, or inconsistent (names the layer and tensor).
        """
        path = Path(path)
        return cls(path, read_manifest(path))

    def _group(self, i: GroupKey) -> Group:
        return self.manifest.outer if i == "outer" else self.manifest.layers[i]

    def records(self, i: GroupKey) -> tuple[TensorRecord, ...]:
        """Tensors of layer `i`, or of everything outside the layers ("outer")."""
        return self._group(i).tensors

    def group_bytes(self, i: GroupKey) -> int:
        """Size of that group's file, which `load` reads whole."""
        return self._group(i).nbytes

    @cached_property
    def _indexes(self) -> dict[GroupKey, dict[str, TensorRecord]]:
        return {key: {record.name: record for record in group.tensors} for key, group in self.manifest.groups()}

    def load(self, i: GroupKey, into: Tensor | None = None) -> PackedGroup:
        """Read a group's file with pread.

        Args:
            into: uint8, contiguous, at least `group_bytes(i)` long, aligned to 64 bytes; None allocates.

        Raises:
            UserError: the file is shorter than when the store was opened, or cannot be read.
        """
        nbytes = self.group_bytes(i)
        packed = self.view(i, torch.empty(nbytes, dtype=torch.uint8) if into is None else into)
        self.read(i, packed.buffer, 0)
        return packed

    def load_ranges(self, i: GroupKey, into: Tensor, ranges: Sequence[tuple[int, int]]) -> PackedGroup:
        """As `load`, but only these (offset, bytes) are read, each to its place."""
        packed = self.view(i, into)
        for offset, nbytes in ranges:
            self.read(i, packed.buffer[offset : offset + nbytes], offset)
        return packed

    def read(self, i: GroupKey, into: Tensor, start: int) -> None:
        """Fill `into` (uint8, contiguous, in host memory) with a group's bytes from byte `start` on, with pread.

        Raises:
            UserError: the file is shorter than that, or cannot be read.
        """
        file = self.path / self._group(i).file
        try:
            fd = os.open(file, os.O_RDONLY)
            try:
                read_exactly(fd, memoryview(into.numpy().data), start, file)
            finally:
                os.close(fd)
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", fix="check the disk", path=file) from error

    def view(self, i: GroupKey, buffer: Tensor) -> PackedGroup:
        """A group whose bytes are, or will be, the first of `buffer` (uint8, contiguous, aligned to 64 bytes)."""
        bytes_ = buffer[: self.group_bytes(i)]
        assert bytes_.dtype == torch.uint8
        assert bytes_.is_contiguous()
        assert bytes_.numel() == self.group_bytes(i)
        assert bytes_.numel() == 0 or bytes_.data_ptr() % 64 == 0, "buffer is not aligned to 64 bytes"
        return PackedGroup(bytes_, self._indexes[i], self.manifest.block_size)

    def blank(self, i: GroupKey) -> PackedGroup:
        """A group of zeros in the place of a file's bytes, which take no memory until they are written to: for work whose
        values nobody looks at."""
        return replace(
            self.view(i, torch.frombuffer(mmap.mmap(-1, self.group_bytes(i)), dtype=torch.uint8)), blank=True
        )

    def share(self, i: GroupKey) -> tuple[PackedGroup, SharedFile]:
        """A group's file mapped read-only: all processes that do so read one copy of it.

        Returns:
            the group, not to be written to, and the mapping, to bring its pages in and to check that its file is still the
            one that was mapped.

        Raises:
            UserError: the file cannot be opened, or is shorter than when the store was opened.
        """
        shared = SharedFile(self.path / self._group(i).file, self.group_bytes(i))
        return self.view(i, shared.bytes), shared

    def map(self, i: GroupKey) -> tuple[PackedGroup, mmap.mmap]:
        """A group's file mapped into memory: only pages that are read take room, and the kernel may take them back.

        The mapping is private: nothing that is written to the tensors reaches the file.

        Returns:
            the group, and the mapping (for `madvise`).

        Raises:
            UserError: the file cannot be opened.
        """
        group = self._group(i)
        file = self.path / group.file
        try:
            with file.open("rb") as stream:
                mapping = mmap.mmap(stream.fileno(), group.nbytes, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot be read: {error}", fix="check the disk", path=file) from error
        return PackedGroup(
            torch.frombuffer(mapping, dtype=torch.uint8), self._indexes[i], self.manifest.block_size
        ), mapping

    def verify(self, progress: Callable[[int], None] | None = None) -> list[str]:
        """Read every byte and compare checksums.

        Args:
            progress: called with the bytes read since the last call.

        Returns:
            What differs: tensor names, "FILE: padding at byte N", names of copied files, "manifest.json".
        """
        return verify_store(self.path, self.manifest, progress or (lambda _: None))
