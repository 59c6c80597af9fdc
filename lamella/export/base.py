"""Values of a frozen base, a piece at a time: of a store's files, or of the checkpoint it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lamella.checkpoint.source import Checkpoint
from lamella.errors import UserError
from lamella.kernels import AbsmaxState, dequantize_absmax, dequantize_nf4
from lamella.kernels.layout import ABSMAX_BLOCK
from lamella.store.manifest import TensorRecord
from lamella.store.reader import GroupKey, Store

_PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Base(Protocol):
    """Names and shapes are the checkpoint's."""

    def values(self, name: str, first: int, out: Tensor) -> None:
        """Fill `out` (fp32, flat) with a tensor's values from `first` on, row-major."""

    def nf4_parts(self, name: str, block_size: int) -> Mapping[str, Tensor] | None:
        """A tensor's double-quantised NF4 parts, where it is stored so in such blocks."""


class StoreBase:
    """A store's tensors, dequantised in fp32; only the bytes that are asked for are read."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.block_size = store.manifest.block_size
        self._records: dict[str, tuple[GroupKey, TensorRecord]] = {
            record.name: (key, record) for key, group in store.manifest.groups() for record in group.tensors
        }

    def values(self, name: str, first: int, out: Tensor) -> None:
        key, record = self._records[name]
        if record.format == "raw":
            dtype = getattr(torch, record.dtype)
            out.copy_(self._read(key, record, "data", first * dtype.itemsize, out.numel() * dtype.itemsize).view(dtype))
            return
        block = self.block_size
        start = first // block * block
        stop = min(-(-(first + out.numel()) // block) * block, record.numel)
        codes = self._read(key, record, "codes", start // 2, -(-stop // 2) - start // 2)
        scales = self._scales(key, record, start // block, -(-stop // block))
        if (start, stop) == (first, first + out.numel()):
            dequantize_nf4(codes, scales, out, block)
            return
        around = torch.empty(stop - start)
        dequantize_nf4(codes, scales, around, block)
        out.copy_(around[first - start : first - start + out.numel()])

    def nf4_parts(self, name: str, block_size: int) -> Mapping[str, Tensor] | None:
        key, record = self._records[name]
        if record.format != "nf4" or self.block_size != block_size or "absmax2" not in record.parts:
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
        info = self.checkpoint.tensors[name]
        dtype = _PLAIN[info.dtype]
        buffer = torch.empty(out.numel(), dtype=dtype)
        self.checkpoint.read_into(info, first * dtype.itemsize, memoryview(buffer.view(torch.uint8).numpy().data))
        out.copy_(buffer)

    def nf4_parts(self, name: str, block_size: int) -> Mapping[str, Tensor] | None:
        return None
