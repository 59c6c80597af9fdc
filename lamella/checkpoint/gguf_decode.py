"""Values of GGUF tensors, through the `gguf` package's numpy decoders, a bounded number of rows at a time."""

from __future__ import annotations

from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.packing import PIECE_VALUES, Native, Read

PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
"""Types that are safetensors' too."""
QUANTISED = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
"""Types in blocks that are read."""
_Q8_BLOCK, _Q8_BYTES = 32, 34
"""Q8_0: an fp16 scale, then 32 signed bytes."""


class Gguf:
    """Decoder of one tensor (see `packing.Decoder`).

    `packing.settings`: `type`, ggml's; `heads`, number of heads whose rows lie in rotary pairs (see `unpaired`), or None;
    `add`, a number to add to every value.
    """

    def __init__(self, tensor: TensorInfo, read: Read) -> None:
        assert tensor.packing is not None
        self.tensor, self.read, self.part = tensor, read, tensor.packing.parts["weight"]
        settings = tensor.packing.settings
        self.type, self.heads, self.add = settings["type"], settings.get("heads"), settings.get("add", 0.0)
        vector = len(tensor.shape) == 1 and self.heads
        self.width = 1 if vector else tensor.shape[-1]
        self.rows = prod(tensor.shape) // self.width
        self.row_bytes = self.part.nbytes // self.rows
        self.step = self.rows // self.heads if self.heads else 1

    def values(self, first: int, out: NDArray[np.float32]) -> None:
        done, most = 0, max(1, PIECE_VALUES // (self.width * self.step)) * self.step
        while done < out.size:
            row, column = divmod(first + done, self.width)
            last = min(row + most, -(-(first + out.size) // self.width))
            values = self._rows(row, last).reshape(-1)[column:]
            count = min(values.size, out.size - done)
            out[done : done + count] = values[:count]
            done += count

    def piece(self) -> int:
        rows = max(1, PIECE_VALUES // self.width)
        for step in (self.step * 4096 // gcd(self.step * self.width, 4096), self.step):
            if step <= rows:
                return rows // step * step * self.width
        return rows * self.width

    def native(self) -> Native | None:
        if self.type != "Q8_0" or self.heads or self.add:
            return None
        count = self.tensor.numel
        return Native("int8", _Q8_BLOCK, (), {"codes": count, "scales": count // _Q8_BLOCK * 4})

    def native_part(self, part: str, start: int, buffer: memoryview) -> None:
        each = {"codes": _Q8_BLOCK, "scales": 4}[part]
        first, last = start // each, -(-(start + len(buffer)) // each)
        blocks = self._bytes(first * _Q8_BYTES, (last - first) * _Q8_BYTES).reshape(-1, _Q8_BYTES)
        if part == "codes":
            found = np.ascontiguousarray(blocks[:, 2:])
        else:
            found = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype("<f4").view(np.uint8)
        begin = start - first * each
        buffer[:] = found.reshape(-1)[begin : begin + len(buffer)].data

    def _bytes(self, start: int, count: int) -> NDArray[np.uint8]:
        raw = np.empty(count, np.uint8)
        self.read(self.part, start, raw.data)
        return raw

    def _rows(self, first: int, last: int) -> NDArray[np.float32]:
        """Rows [first, last) of the tensor with all axes but the last flattened, [rows, width]."""
        if not self.heads:
            return self._stored(first, last)
        begin, end = first // self.step * self.step, -(-last // self.step) * self.step
        rows = unpaired(self._stored(begin, end), (end - begin) // self.step)
        return rows[first - begin : last - begin]

    def _stored(self, first: int, last: int) -> NDArray[np.float32]:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        raw = self._bytes(first * self.row_bytes, (last - first) * self.row_bytes)
        values = dequantize(raw.reshape(last - first, self.row_bytes), GGMLQuantizationType[self.type])
        values = values.reshape(last - first, self.width)
        return values + np.float32(self.add) if self.add else values


def unpaired(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows [heads * d, ...] of a query or key projection in the order of llama.cpp's "normal" rotary embedding, which turns
    neighbours (2 j, 2 j + 1), put into transformers' order, which turns (j, j + d / 2)."""
    size = rows.shape[0] // heads
    return rows.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def paired(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Inverse of `unpaired`."""
    size = rows.shape[0] // heads
    return rows.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(rows.shape)
