"""How the values of a tensor lie in a checkpoint that is quantised already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lamella.checkpoint.header import TensorInfo

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
