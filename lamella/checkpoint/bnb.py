"""bitsandbytes' weights (0.50).

4-bit, `W`, U8: two codes a byte, the upper half first, over the flattened tensor; beside it, with W's name before them

    .absmax            fp32, one per block, or U8 when nested
    .quant_map         fp32 [16]: value of each code
    .nested_absmax     fp32, one per 256 blocks; .nested_quant_map fp32 [256]
    .quant_state.bitsandbytes__nf4 | __fp4    JSON as bytes: blocksize, dtype, shape; nested_blocksize, nested_offset

    value = quant_map[code] * absmax; nested: absmax = nested_quant_map[q] * nested_absmax + nested_offset, in fp32

8-bit, `M.weight` int8 [O, I] with `M.SCB` fp32 [O]: value = code * (SCB / 127).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.numbers import Bytes, Floats, decoded, halves, pairs
from lamella.checkpoint.packing import PIECE_VALUES, Method, Native, Packing, Read, whole_rows
from lamella.errors import UserError

STATE = ".quant_state.bitsandbytes__"
NESTED = (".nested_absmax", ".nested_quant_map")
BESIDE = (".absmax", ".quant_map", *NESTED)
TYPES = ("nf4", "fp4")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_DAMAGED = "the checkpoint is damaged or not complete: save or download it again"
_STORE_NESTED_BLOCK = 256


class FourBit:
    """Decoder of a 4-bit weight; keeps its scales."""

    def __init__(self, tensor: TensorInfo, read: Read) -> None:
        assert tensor.packing is not None
        self.tensor, self.read = tensor, read
        self.parts, self.settings = tensor.packing.parts, tensor.packing.settings
        self.block: int = self.settings["block_size"]
        self._table = self._numbers("quant_map")
        self._pairs = pairs(self._table, high_first=True)
        self._absmax: Floats | None = None

    def values(self, first: int, out: Floats) -> None:
        if self._absmax is None:
            self._absmax = self._scales()
        start = first // self.block * self.block
        end = min(-(-(first + out.size) // self.block) * self.block, self.tensor.numel)
        raw = np.empty(-(-(end - start) // 2), np.uint8)
        self.read(self.parts["weight"], start // 2, raw.data)
        found = halves(raw, self._pairs)[: end - start]
        whole = found.size // self.block * self.block
        blocks = slice(start // self.block, (start + whole) // self.block)
        found[:whole].reshape(-1, self.block)[...] *= self._absmax[blocks, None]
        if whole < found.size:
            found[whole:] *= self._absmax[-1]
        out[...] = found[first - start :][: out.size]

    def piece(self) -> int:
        return PIECE_VALUES

    def native(self) -> Native | None:
        """As it is, where its maps are those of every store."""
        from lamella.kernels.layout import NF4_TABLE, dynamic_code

        nested = "nested_absmax" in self.parts
        standard = np.array_equal(self._table, np.array(NF4_TABLE, np.float32)) and self.block >= 32
        if nested and standard:
            same = np.array_equal(self._numbers("nested_quant_map"), dynamic_code().numpy())
            standard = same and self.settings["nested_block_size"] == _STORE_NESTED_BLOCK
        if not standard:
            return None
        codes, blocks = self.parts["weight"].nbytes, -(-self.tensor.numel // self.block)
        if not nested:
            return Native("nf4", self.block, (), {"codes": codes, "absmax": 4 * blocks})
        second = 4 * -(-blocks // _STORE_NESTED_BLOCK)
        sizes = {"codes": codes, "absmax_q": blocks, "absmax_code": 1024, "absmax2": second, "offset": 4}
        return Native("nf4", self.block, (), sizes)

    def native_part(self, part: str, start: int, buffer: memoryview) -> None:
        if part == "offset":
            buffer[:] = self._offset().tobytes()[start : start + len(buffer)]
            return
        roles = {"codes": "weight", "absmax": "absmax", "absmax_q": "absmax", "absmax_code": "nested_quant_map",
                 "absmax2": "nested_absmax"}  # fmt: skip
        self.read(self.parts[roles[part]], start, buffer)

    def _offset(self) -> Floats:
        return np.array(self.settings["offset"], np.float32)

    def _scales(self) -> Floats:
        """fp32, one per block."""
        if "nested_absmax" not in self.parts:
            return self._numbers("absmax")
        stored = self.parts["absmax"]
        raw: Bytes = np.empty(stored.nbytes, np.uint8)
        self.read(stored, 0, raw.data)
        scales = np.repeat(self._numbers("nested_absmax"), self.settings["nested_block_size"])[: raw.size]
        scales *= self._numbers("nested_quant_map")[raw]
        scales += self._offset()
        return scales

    def _numbers(self, role: str) -> Floats:
        return read_numbers(self.parts[role], self.read)


class EightBit:
    """Decoder of an 8-bit weight [O, I]; keeps its scales [O]."""

    def __init__(self, tensor: TensorInfo, read: Read) -> None:
        assert tensor.packing is not None
        self.tensor, self.read = tensor, read
        self.weight = tensor.packing.parts["weight"]
        self.scales: Floats = read_numbers(tensor.packing.parts["scale"], read) / np.float32(127)

    def values(self, first: int, out: Floats) -> None:
        raw = np.empty(out.size, np.int8)
        self.read(self.weight, first, raw.data.cast("B"))
        rows = np.arange(first // self._width, -(-(first + out.size) // self._width))
        scales = np.repeat(self.scales[rows], self._width)[first - int(rows[0]) * self._width :][: out.size]
        np.multiply(raw, scales, out=out)

    def piece(self) -> int:
        return whole_rows(self._width, 1)

    def native(self) -> Native:
        return Native("int8", self._width, (), {"codes": self.weight.nbytes, "scales": self.scales.nbytes})

    def native_part(self, part: str, start: int, buffer: memoryview) -> None:
        if part == "codes":
            self.read(self.weight, start, buffer)
        else:
            buffer[:] = self.scales.tobytes()[start : start + len(buffer)]

    @property
    def _width(self) -> int:
        return self.tensor.shape[-1]


def read_numbers(tensor: TensorInfo, read: Read) -> Floats:
    """All values of a plain tensor as fp32 [n]."""
    raw = np.empty(tensor.nbytes, np.uint8)
    read(tensor, 0, raw.data)
    return decoded(raw, tensor.dtype, (prod(tensor.shape),))


def pack_4bit(weight: TensorInfo, beside: Mapping[str, TensorInfo], where: str, read: Read) -> TensorInfo:
    """The logical tensor of a 4-bit weight.

    Args:
        beside: what follows the weight's name -> tensor.
        where: the layer, for errors.

    Raises:
        UserError: a key is missing (named with its layer), or does not go with shape and block size.
    """
    name = weight.name
    kinds = [t for t in TYPES if STATE + t in beside]
    if len(kinds) != 1:
        raise _error(f"{where}: tensor {name!r} lacks {name}{STATE}nf4, which tells shape and block size", weight)
    state = _state(beside[STATE + kinds[0]], read)
    nested = "nested_blocksize" in state or any(key in beside for key in NESTED)
    for key in BESIDE if nested else BESIDE[:2]:
        if key not in beside:
            raise _error(f"{where}: tensor {name!r} lacks {name}{key}", weight)
    shape, block, dtype = state.get("shape"), state.get("blocksize"), _DTYPES.get(str(state.get("dtype")))
    whole = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    if not whole or type(block) is not int or block < 2 or block % 2 or dtype is None:
        raise _error(f"{where}: tensor {name!r}: its quant_state is {json.dumps(state)}", weight)
    assert isinstance(shape, list)
    numel, settings = prod(shape), dict[str, Any](block_size=block, type=kinds[0])
    blocks = -(-numel // block)
    wanted = {"": -(-numel // 2), ".absmax": blocks, ".quant_map": 16}
    if nested:
        second, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if type(second) is not int or second < 1 or not isinstance(offset, int | float):
            raise _error(f"{where}: tensor {name!r}: its quant_state is {json.dumps(state)}", weight)
        settings |= {"nested_block_size": second, "offset": float(offset)}
        wanted |= {".nested_absmax": -(-blocks // second), ".nested_quant_map": 256}
    dtypes = {"": "U8", ".absmax": "U8" if nested else "F32"}
    for key, count in wanted.items():
        part = beside[key] if key else weight
        if prod(part.shape) != count or part.dtype != dtypes.get(key, "F32"):
            what = f"block size {block} and shape {shape} call for {dtypes.get(key, 'F32')} [{count}]"
            raise _error(f"{where}: {part.name!r} is {part.dtype} {list(part.shape)}, {what}", part)
    parts = {"weight": weight} | {key[1:]: beside[key] for key in wanted if key}
    method: Method = "bnb-nf4"
    nbytes = weight.nbytes + sum(t.nbytes for t in beside.values())
    packing = Packing(method, parts, settings)
    return replace(weight, dtype=dtype, shape=tuple(shape), nbytes=nbytes, packing=packing)


def _state(tensor: TensorInfo, read: Read) -> dict[str, Any]:
    raw = bytearray(tensor.nbytes)
    read(tensor, 0, memoryview(raw))
    try:
        state = json.loads(raw)
    except ValueError as error:
        raise _error(f"tensor {tensor.name!r} is no JSON: {error}", tensor) from error
    if not isinstance(state, dict):
        raise _error(f"tensor {tensor.name!r} is no JSON object", tensor)
    return state


def pack_8bit(weight: TensorInfo, scale: TensorInfo, where: str) -> TensorInfo:
    """The logical tensor of an int8 weight [O, I] and its SCB.

    Raises:
        UserError: a scale of another dtype or shape than one fp32 per row.
    """
    if len(weight.shape) != 2 or scale.dtype != "F32" or prod(scale.shape) != weight.shape[0]:
        raise _error(f"{where}: {scale.name!r} is {scale.dtype} {list(scale.shape)}, int8 tensor {weight.name!r} of shape "
                     f"{list(weight.shape)} calls for one F32 per row", scale)  # fmt: skip
    packing = Packing("bnb-int8", {"weight": weight, "scale": scale})
    return replace(weight, dtype="F16", nbytes=weight.nbytes + scale.nbytes, packing=packing)


def _error(what: str, tensor: TensorInfo) -> UserError:
    return UserError(what, fix=_DAMAGED, path=tensor.file)
