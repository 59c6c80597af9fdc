"""FP8 weights: a byte per value, and scales that they are multiplied with.

    weight [..., O, I] e4m3 or e5m2
    scale  one number; one per row [O] or [O, 1]; one per block [..., ceil(O / b), ceil(I / c)]; one per expert [E]

Every suffix in use names a multiplier. DeepSeek's `weight_scale_inv` is the inverse of what the weight was multiplied with
before it was rounded (DeepSeek-V3 `inference/kernel.py`, `weight_dequant`); vLLM and transformers multiply with it, and with
`weight_scale` (compressed-tensors, FBGEMM, ModelOpt, AutoFP8), `scale` (DeepSeek-V4) and `qscale_weight` (Mistral).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.numbers import E8M0, Bytes, Floats, decode, decoded
from lamella.checkpoint.packing import Native, Packing, Read, whole_rows
from lamella.errors import UserError

DTYPES = ("F8_E4M3", "F8_E5M2")
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
"""U8: e8m0, where a file's writer did not know that dtype."""
_DAMAGED = "the checkpoint is damaged or not complete: download it again"


class Fp8:
    """Decoder of one weight; keeps its scales [grid rows, grid columns]."""

    def __init__(self, tensor: TensorInfo, read: Read) -> None:
        assert tensor.packing is not None
        self.tensor, self.read = tensor, read
        self.weight, scale = tensor.packing.parts["weight"], tensor.packing.parts["scale"]
        blocks = tensor.packing.settings["blocks"]
        grid = tuple(map(ceil_div, tensor.shape, blocks))
        raw = np.empty(scale.nbytes, np.uint8)
        read(scale, 0, raw.data)
        found = E8M0[raw] if scale.dtype == "U8" else decoded(raw, scale.dtype, (prod(scale.shape),))
        self.width: int = tensor.shape[-1] if blocks else 1
        self.column_block: int = blocks[-1] if blocks else 1
        self.scales = found.reshape(-1, grid[-1] if grid else 1)
        self._row_blocks, self._grid_rows = blocks[:-1], grid[:-1]
        self._rows = tensor.shape[:-1]

    def values(self, first: int, out: Floats) -> None:
        raw: Bytes = np.empty(out.size, np.uint8)
        self.read(self.weight, first, raw.data)
        decode(raw, self.weight.dtype, out)
        done, width = 0, self.width
        while done < out.size:
            row, column = divmod(first + done, width)
            whole = (out.size - done) // width if column == 0 else 0
            if whole:
                self._scale_rows(row, out[done : done + whole * width].reshape(whole, width))
                done += whole * width
            else:
                part = min(width - column, out.size - done)
                scales = self._spread(self._grid_rows_of(row, 1))[0]
                out[done : done + part] *= scales[column : column + part]
                done += part

    def piece(self) -> int:
        return whole_rows(self.width, 128)

    def native(self) -> Native | None:
        return None

    def native_part(self, part: str, start: int, buffer: memoryview) -> None:
        raise AssertionError(f"{self.tensor.name} has no native form")

    def _scale_rows(self, first: int, values: Floats) -> None:
        """Scale whole rows [n, width]; rows of one block share a row of scales."""
        index = self._grid_rows_of(first, len(values))
        if self._row_blocks and self._row_blocks[-1] == 1:
            values *= self._spread(index)
            return
        starts = [0, *(np.flatnonzero(np.diff(index)) + 1).tolist(), len(values)]
        for start, end in pairwise(starts):
            values[start:end] *= self._spread(index[start : start + 1])

    def _grid_rows_of(self, first: int, count: int) -> NDArray[np.int64]:
        """Row of `scales` for each of `count` rows of the weight (all axes but the last, flattened)."""
        row, found, stride = np.arange(first, first + count), np.zeros(count, np.int64), 1
        for size, block, grid in zip(
            reversed(self._rows), reversed(self._row_blocks), reversed(self._grid_rows), strict=True
        ):
            row, i = np.divmod(row, size)
            found += i // block * stride
            stride *= grid
        return found

    def _spread(self, grid_rows: NDArray[np.int64]) -> Floats:
        """Scales of these rows: [n, width]."""
        scales = self.scales[grid_rows]
        if scales.shape[1] == 1:
            return np.broadcast_to(scales, (len(scales), self.width))
        return np.repeat(scales, self.column_block, axis=1)[:, : self.width]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def pack(weight: TensorInfo, scale: TensorInfo, declared: Sequence[int] | None) -> TensorInfo:
    """The logical tensor of a weight and its scale.

    Args:
        declared: `weight_block_size` of config.json, rows and columns.

    Raises:
        UserError: a scale of a shape or dtype that does not go with the weight's.
    """
    if scale.dtype not in SCALE_DTYPES:
        raise UserError(f"scale {scale.name!r} of FP8 tensor {weight.name!r} is {scale.dtype}",
                        fix=f"scales are one of {', '.join(SCALE_DTYPES)}", path=scale.file)  # fmt: skip
    blocks = blocks_of(weight, scale, declared)
    parts = {"weight": weight, "scale": scale}
    return TensorInfo(weight.name, weight.file, "BF16", weight.shape, weight.offset, weight.nbytes + scale.nbytes,
                      Packing("fp8", parts, {"blocks": blocks}))  # fmt: skip


def blocks_of(weight: TensorInfo, scale: TensorInfo, declared: Sequence[int] | None) -> tuple[int, ...]:
    """Values per scale along each axis of the weight.

    Without `declared` a grid of scales gives the block: the one power of two that cuts the axis into that many, as no
    checkpoint has others.
    """
    shape, grid = weight.shape, scale.shape
    if prod(grid) == 1:
        return tuple(max(n, 1) for n in shape)
    while len(grid) < len(shape) and grid[-1] == 1:
        grid = grid[:-1]
    if grid == shape[: len(grid)]:
        grid += (1,) * (len(shape) - len(grid))  # [O] of [O, I]; [E] or [E, 1] of [E, O, I]
    if declared is not None and len(shape) >= 2:
        blocks = (1,) * (len(shape) - 2) + tuple(declared)
        if tuple(map(ceil_div, shape, blocks)) == grid:
            return blocks
        if grid[-1] != 1 or grid[:-1] != shape[:-1]:  # rows with a scale each are told by their number
            wanted = list(map(ceil_div, shape, blocks))
            what = f"blocks of {list(declared)} call for {wanted}"
            raise _misfit(weight, scale, f"config.json's weight_block_size: {what}")
    if len(grid) != len(shape):
        raise _misfit(weight, scale, "one number, one per row or one per block is read")
    found = [_block(n, count) for n, count in zip(shape, grid, strict=True)]
    if None in found:
        raise _misfit(weight, scale, "no block of a power of two gives that many")
    return tuple(b for b in found if b is not None)


def _block(size: int, count: int) -> int | None:
    if count == 1:
        return max(size, 1)
    return next((1 << k for k in range(size.bit_length()) if ceil(size / (1 << k)) == count), None)


def _misfit(weight: TensorInfo, scale: TensorInfo, why: str) -> UserError:
    what = f"scale {scale.name!r} has shape {list(scale.shape)}, FP8 tensor {weight.name!r} has {list(weight.shape)}"
    return UserError(f"{what}; {why}", fix=_DAMAGED, path=scale.file)


def declared_block(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """`weight_block_size` of a quantization_config.

    Raises:
        UserError: not two whole numbers.
    """
    said = settings.get("weight_block_size")
    if said is None:
        return None
    if not isinstance(said, list) or len(said) != 2 or any(type(n) is not int or n < 1 for n in said):
        raise UserError(f"quantization_config says weight_block_size = {said!r}",
                        fix="two whole numbers, rows and columns; correct config.json")  # fmt: skip
    return said[0], said[1]
