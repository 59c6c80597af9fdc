"""Numbers of checkpoints as fp32, bit by bit, with numpy alone.

bf16   upper half of an fp32
e4m3   sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, S.1111.111 is NaN (OCP OFP8, "e4m3fn")
e5m2   the upper byte of an fp16
e2m1   0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives (OCP Microscaling Formats 1.0)
e8m0   2^(byte - 127), 255 is NaN (same)
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_VIEWS = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4", "F32": "<f4",
    "F64": "<f8", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
"""safetensors' dtypes that numpy has itself."""


def _e4m3() -> Floats:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    size[code & 127 == 127] = np.nan
    return np.where(code >= 128, -size, size).astype(np.float32)


E4M3: Floats = _e4m3()
"""Value of each byte."""
E5M2: Floats = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
"""Value of each byte."""
E8M0: Floats = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)
"""Value of each byte."""
E2M1: Floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Value of each code of four bits."""

_LOOK_UP = 1 << 15
_TABLES = {"F8_E4M3": E4M3, "F8_E5M2": E5M2, "F8_E8M0": E8M0}


def pairs(table: Floats, high_first: bool) -> NDArray[np.uint64]:
    """[256]: both values of a byte with two codes, as they lie side by side."""
    high, low = table[np.arange(256) >> 4], table[np.arange(256) & 15]
    return np.stack([high, low] if high_first else [low, high], axis=1).view(np.uint64)[:, 0]


def halves(raw: Bytes, values: NDArray[np.uint64]) -> Floats:
    """[2 n] values of n bytes; `values`: from `pairs`."""
    out = np.empty(raw.size, np.uint64)
    _look_up(values, raw, out)
    return out.view(np.float32)


def _look_up(table: NDArray[Any], raw: Bytes, out: NDArray[Any]) -> None:
    for first in range(0, raw.size, _LOOK_UP):  # numpy makes 8-byte indices: in the cache, not in memory
        piece = slice(first, first + _LOOK_UP)
        np.take(table, raw[piece], out=out[piece], mode="clip")  # with "raise" it fills a copy first


def decode(raw: Bytes, dtype: str, out: Floats) -> None:
    """Fill `out` [n] with the values of `raw` [n * itemsize], little-endian numbers of a safetensors dtype."""
    if dtype == "BF16":
        np.left_shift(raw.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    elif dtype in _TABLES:
        _look_up(_TABLES[dtype], raw, out)
    else:
        out[...] = raw.view(_VIEWS[dtype])


def decoded(raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Floats:
    """The same as a new array of this shape."""
    out = np.empty(prod(shape), np.float32)
    decode(raw, dtype, out)
    return out.reshape(shape)
