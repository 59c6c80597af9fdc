"""How the values of a tensor lie in a checkpoint that is quantised already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from lamella.checkpoint.header import TensorInfo

Read = Callable[["TensorInfo", int, memoryview], None]
"""Fills a buffer with bytes of a plain tensor, from a byte on: `Checkpoint.read_into`."""
PIECE_VALUES = 4 << 20
"""Values to ask for at a time where nothing calls for another number: 16 MiB of fp32."""

Method = Literal["fp8", "mxfp4", "bnb-nf4", "bnb-int8", "gguf"]
NativeFormat = Literal["nf4", "mxfp4", "int8"]


@dataclass(frozen=True)
class Packing:
    """What stands behind a logical tensor (`TensorInfo.packing`).

    Attributes:
        method: how it was quantised.
        parts: role ("weight", "scale", "blocks", ...) -> the plain tensor in the files.
        settings: what decoding needs beside them: block sizes, the second level's offset, GGUF's type.
    """

    method: Method
    parts: Mapping[str, TensorInfo]
    settings: Mapping[str, Any] = field(default_factory=dict)


def whole_rows(width: int, step: int) -> int:
    """Values of at most `PIECE_VALUES`, as many rows of `width` as are a multiple of `step` rows and of 4096 values; without
    regard for rows where these are too many."""
    step = lcm(step, 4096 // gcd(4096, width)) * width if width else 0
    return PIECE_VALUES // step * step if 0 < step <= PIECE_VALUES else PIECE_VALUES


def parts_of(tensor: TensorInfo) -> list[TensorInfo]:
    """The plain tensors in the files that a tensor is made of: itself, or its parts in the order of their roles."""
    if tensor.packing is None:
        return [tensor]
    return [part for _, part in sorted(tensor.packing.parts.items())]


@dataclass(frozen=True)
class Native:
    """A tensor whose bytes a store can take over as they are, without a second rounding.

    Attributes:
        format: of the store.
        block_size: values per scale.
        order: axes of the tensor's shape in the order in which values lie, outermost first; (): as `shape`.
        parts: part, as `store/manifest.py` names it -> bytes.
    """

    format: NativeFormat
    block_size: int
    order: tuple[int, ...]
    parts: Mapping[str, int]


class Decoder(Protocol):
    """Reads one tensor. It may keep what it read for the next call, within `PIECE_VALUES` and the tensor's scales."""

    tensor: TensorInfo

    def values(self, first: int, out: NDArray[np.float32]) -> None:
        """Fill `out` with the tensor's values from `first` on, in row-major order of its shape."""

    def piece(self) -> int:
        """Values to ask for at a time."""

    def native(self) -> Native | None:
        """The form in which a store takes the tensor over, if there is one."""

    def native_part(self, part: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of a part of that form, from byte `start` on."""
