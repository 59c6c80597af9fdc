"""Values of a frozen base, a piece at a time: of a store's files, or of the checkpoint it was made from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lamella.checkpoint.source import Checkpoint
from lamella.errors import UserError
from lamella.kernels import AbsmaxState, dequantize_absmax, dequantize_int8, dequantize_mxfp4, dequantize_nf4
from lamella.kernels.layout import ABSMAX_BLOCK
from lamella.store.manifest import TensorRecord
from lamella.store.reader import GroupKey, Store, block_of


class Base(Protocol):
    """Names and shapes are the checkpoint's."""

    def values(self, name: str, first: int, out: Tensor) -> None:
        """Fill `out` (fp32, flat) with a tensor's values from `first` on, row-major."""

    def nf4_parts(self, name: str, block_size: int) -> Mapping[str, Tensor] | None:
        """A tensor's double-quantised NF4 parts, where it is stored so in such blocks."""


class StoreBase:
    """A store's tensors, dequantised in fp32; only the bytes that are asked for are read.

    Tensors that lie in another order of axes than their shape's (GPT-OSS: [E, out, in] for [E, in, out]) are turned a matrix
    at a time, and the last one is kept.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._records: dict[str, tuple[GroupKey, TensorRecord]] = {
            record.name: (key, record) for key, group in store.manifest.groups() for record in group.tensors
        }
        self._turned: tuple[str, int, Tensor] | None = None

    def values(self, name: str, first: int, out: Tensor) -> None:
        record = self._records[name][1]
        if not record.order:
            self._stored(name, first, out)
            return
        each = prod(record.shape[-2:])
        done = 0
        while done < out.numel():
            matrix, place = divmod(first + done, each)
            count = min(each - place, out.numel() - done)
            out[done : done + count] = self._matrix(name, matrix).reshape(-1)[place : place + count]
            done += count

    def _matrix(self, name: str, number: int) -> Tensor:
        """The last two axes of a tensor at `number` of those before."""
        if self._turned is None or self._turned[:2] != (name, number):
            record = self._records[name][1]
            last = len(record.shape) - 1
            if record.order != (*range(last - 1), last, last - 1):
                raise UserError(f"{name} lies in axes {list(record.order)}", path=self.store.path,
                                fix="this order cannot be merged yet")  # fmt: skip
            rows, columns = record.shape[-2:]
            values = torch.empty(rows * columns)
            self._stored(name, number * rows * columns, values)
            self._turned = name, number, values.view(columns, rows).T.contiguous()
        return self._turned[2]

    def _stored(self, name: str, first: int, out: Tensor) -> None:
        """As `values`, in the order in which values lie."""
        key, record = self._records[name]
        if record.format == "raw":
            dtype = getattr(torch, record.dtype)
            out.copy_(self._read(key, record, "data", first * dtype.itemsize, out.numel() * dtype.itemsize).view(dtype))
            return
        block = block_of(record, self.store.manifest.block_size)
        whole = math.lcm(block, 2)  # two codes may share a byte
        start = first // whole * whole
        stop = min(-(-(first + out.numel()) // whole) * whole, record.numel)
        exact = (start, stop) == (first, first + out.numel())
        target = out if exact else torch.empty(stop - start)
        scales = start // block, -(-stop // block)
        if record.format == "int8":
            codes = self._read(key, record, "codes", start, stop - start).view(torch.int8)
            factors = self._read(key, record, "scales", 4 * scales[0], 4 * (scales[1] - scales[0])).view(torch.float32)
            dequantize_int8(codes, factors, target, block)
        else:
            codes = self._read(key, record, "codes", start // 2, -(-stop // 2) - start // 2)
            if record.format == "mxfp4":
                dequantize_mxfp4(codes, self._read(key, record, "scales", scales[0], scales[1] - scales[0]), target)
            else:
                dequantize_nf4(codes, self._scales(key, record, *scales), target, block)
        if not exact:
            out.copy_(target[first - start : first - start + out.numel()])

    def nf4_parts(self, name: str, block_size: int) -> Mapping[str, Tensor] | None:
        key, record = self._records[name]
        own = block_of(record, self.store.manifest.block_size)
        if record.format != "nf4" or own != block_size or "absmax2" not in record.parts or record.order:
            return None
        dtypes = {"absmax_code": torch.float32, "absmax2": torch.float32, "offset": torch.float32}
        return {
            part: self._read(key, record, part, 0, nbytes).view(dtypes.get(part, torch.uint8))
            for part, (_, nbytes) in record.parts.items()
        }

    def _read(self, key: GroupKey, record: TensorRecord, part: str, start: int, nbytes: int) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.store.read(key, buffer, record.parts[part][0] + start)
        return buffer

    def _scales(self, key: GroupKey, record: TensorRecord, first: int, last: int) -> Tensor:
        """First-level scales `first` .. `last` - 1 of an nf4 tensor, fp32."""
        if "absmax" in record.parts:
            return self._read(key, record, "absmax", 4 * first, 4 * (last - first)).view(torch.float32)
        start = first // ABSMAX_BLOCK  # second-level blocks are undone from their start
        stop = -(-last // ABSMAX_BLOCK)
        begin, end = start * ABSMAX_BLOCK, min(stop * ABSMAX_BLOCK, record.parts["absmax_q"][1])
        state = AbsmaxState(
            self._read(key, record, "absmax_q", begin, end - begin),
            self._read(key, record, "absmax_code", 0, 1024).view(torch.float32),
            self._read(key, record, "absmax2", 4 * start, 4 * (stop - start)).view(torch.float32),
            self._read(key, record, "offset", 0, 4).view(torch.float32).view(()),
        )
        return dequantize_absmax(state)[first - begin : last - begin]


class CheckpointBase:
    """The original weights. Names and shapes must be those of the store.

    Raises:
        UserError: the checkpoint lacks a tensor of the store, or has it in another shape.
    """

    def __init__(self, source: str | Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.checkpoint = Checkpoint.open(source)
        for name, shape in shapes.items():
            have = self.checkpoint.tensors.get(name)
            if have is None or tuple(have.shape) != tuple(shape):
                what = "is not there" if have is None else f"has shape {list(have.shape)}, the store's {list(shape)}"
                raise UserError(
                    f"{name} {what}", path=self.checkpoint.path, fix="give the checkpoint that the store was made from"
                )

    def values(self, name: str, first: int, out: Tensor) -> None:
        self.checkpoint.values(self.checkpoint.tensors[name], first, out.numpy())

    def nf4_parts(self, name: str, block_size: int) -> Mapping[str, Tensor] | None:
        return None
