"""MXFP4 weights: values of four bits (e2m1), one power of two (e8m0) for each 32 along the input axis.

    blocks [..., O, I / 32, 16] bytes, the lower half of a byte first
    scales [..., O, I / 32]

A family whose experts take [E, I, O] (GPT-OSS) reads them transposed: values lie in the order (0, 2, 1) of the shape's axes.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.numbers import E2M1, E8M0, Bytes, Floats, halves, pairs
from lamella.checkpoint.packing import Native, Packing, Read, whole_rows
from lamella.errors import UserError

BLOCK = 32
SWAPPED = (0, 2, 1)
_VALUES = pairs(E2M1, high_first=False)
_DAMAGED = "the checkpoint is damaged or not complete: download it again"


class Mxfp4:
    """Decoder of one weight. Transposed, it keeps one expert's bytes."""

    def __init__(self, tensor: TensorInfo, read: Read) -> None:
        assert tensor.packing is not None
        self.tensor, self.read = tensor, read
        self.blocks, self.scales = tensor.packing.parts["blocks"], tensor.packing.parts["scales"]
        self.order: tuple[int, ...] = tensor.packing.settings["order"]
        self._expert: tuple[int, Bytes, Bytes] | None = None

    def values(self, first: int, out: Floats) -> None:
        if self.order:
            self._swapped(first, out)
            return
        start = first // BLOCK
        count = -(-(first + out.size) // BLOCK) - start
        found = _decoded(self._bytes(self.blocks, start * 16, count * 16), self._bytes(self.scales, start, count))
        out[...] = found.reshape(-1)[first - start * BLOCK :][: out.size]

    def piece(self) -> int:
        width = self.tensor.shape[-1]
        return whole_rows(width, BLOCK)

    def native(self) -> Native:
        n = self.tensor.numel
        return Native("mxfp4", BLOCK, self.order, {"codes": n // 2, "scales": n // BLOCK})

    def native_part(self, part: str, start: int, buffer: memoryview) -> None:
        if part == "codes":
            self.read(self.blocks, start, buffer)
            return
        self.read(self.scales, start, buffer)
        if 255 in np.frombuffer(buffer, np.uint8):
            raise UserError(
                f"tensor {self.tensor.name!r} holds NaN (a scale of 255)", fix=_DAMAGED, path=self.scales.file
            )

    def _bytes(self, part: TensorInfo, start: int, count: int) -> Bytes:
        raw = np.empty(count, np.uint8)
        self.read(part, start, raw.data)
        return raw

    def _swapped(self, first: int, out: Floats) -> None:
        """[E, I, O] from what lies as [E, O, I], 32 rows at a time."""
        _, inputs, outputs = self.tensor.shape
        done = 0
        while done < out.size:
            row, column = divmod(first + done, outputs)
            expert, i = divmod(row, inputs)
            blocks, scales = self._of_expert(expert)
            found = _decoded(blocks[i // BLOCK], scales[i // BLOCK]).T[i % BLOCK :]  # [32 - i % 32, O]
            whole = 0 if column else min(len(found), (out.size - done) // outputs)
            if whole:
                part = whole * outputs
                out[done : done + part].reshape(whole, outputs)[...] = found[:whole]
            else:
                part = min(outputs - column, out.size - done)
                out[done : done + part] = found[0, column : column + part]
            done += part

    def _of_expert(self, expert: int) -> tuple[Bytes, Bytes]:
        """[I / 32, O, 16] and [I / 32, O] of one expert."""
        kept = self._expert
        if kept is None or kept[0] != expert:
            _, inputs, outputs = self.tensor.shape
            groups = outputs * inputs // BLOCK
            blocks = self._bytes(self.blocks, expert * groups * 16, groups * 16).reshape(outputs, -1, 16)
            scales = self._bytes(self.scales, expert * groups, groups).reshape(outputs, -1)
            kept = self._expert = expert, np.ascontiguousarray(blocks.swapaxes(0, 1)), np.ascontiguousarray(scales.T)
        return kept[1], kept[2]


def _decoded(blocks: Bytes, scales: Bytes) -> Floats:
    """[n, 32] values of n blocks."""
    found = halves(blocks.reshape(-1), _VALUES).reshape(-1, BLOCK)
    found *= E8M0[scales.reshape(-1, 1)]
    return found


def pack(name: str, blocks: TensorInfo, scales: TensorInfo, swapped: bool) -> TensorInfo:
    """The logical tensor of blocks [..., O, I / 32, 16].

    Args:
        swapped: its family takes experts as [E, I, O].

    Raises:
        UserError: shapes or dtypes that do not go together.
    """
    shape = (*blocks.shape[:-2], prod(blocks.shape[-2:]) * 2)
    if blocks.dtype != "U8" or len(blocks.shape) < 3 or blocks.shape[-1] != BLOCK // 2:
        raise UserError(f"MXFP4 blocks {blocks.name!r} are {blocks.dtype} {list(blocks.shape)}, not U8 [..., {BLOCK // 2}]",
                        fix=_DAMAGED, path=blocks.file)  # fmt: skip
    return _made(name, blocks, scales, shape, swapped)


def pack_flat(blocks: TensorInfo, scales: TensorInfo) -> TensorInfo:
    """The logical tensor of bytes [..., O, I / 2] (DeepSeek-V4's experts)."""
    return _made(blocks.name, blocks, scales, (*blocks.shape[:-1], blocks.shape[-1] * 2), False)


def _made(name: str, blocks: TensorInfo, scales: TensorInfo, shape: tuple[int, ...], swapped: bool) -> TensorInfo:
    wanted = (*shape[:-1], shape[-1] // BLOCK)
    if scales.dtype not in ("U8", "F8_E8M0") or scales.shape != wanted:
        what = f"scales {scales.name!r} are {scales.dtype} {list(scales.shape)}, blocks {blocks.name!r} call for U8 {list(wanted)}"
        raise UserError(what, fix=_DAMAGED, path=scales.file)
    order: tuple[int, ...] = ()
    if swapped and len(shape) == 3:
        order, shape = SWAPPED, (shape[0], shape[2], shape[1])
    packing = Packing("mxfp4", {"blocks": blocks, "scales": scales}, {"order": order})
    return replace(blocks, name=name, dtype="BF16", shape=shape, nbytes=blocks.nbytes + scales.nbytes, packing=packing)
