"""A tensor's values as fp32, however it lies in the files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lamella.checkpoint.bnb import EightBit, FourBit
from lamella.checkpoint.fp8 import Fp8
from lamella.checkpoint.gguf_decode import Gguf
from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.mxfp4 import Mxfp4
from lamella.checkpoint.numbers import Floats, decode
from lamella.checkpoint.packing import PIECE_VALUES, Decoder, Native, Read


@dataclass
class Plain:
    """A tensor of numbers that need no scales."""

    tensor: TensorInfo
    read: Read

    def values(self, first: int, out: Floats) -> None:
        item = self.tensor.itemsize
        raw = np.empty(out.size * item, np.uint8)
        self.read(self.tensor, first * item, raw.data)
        decode(raw, self.tensor.dtype, out)

    def piece(self) -> int:
        return PIECE_VALUES

    def native(self) -> Native | None:
        return None

    def native_part(self, part: str, start: int, buffer: memoryview) -> None:
        raise AssertionError(f"{self.tensor.name} has no native form")


def decoder_of(tensor: TensorInfo, read: Read) -> Decoder:
    """What reads this tensor."""
    if tensor.packing is None:
        return Plain(tensor, read)
    method = tensor.packing.method
    if method == "fp8":
        return Fp8(tensor, read)
    if method == "mxfp4":
        return Mxfp4(tensor, read)
    if method == "gguf":
        return Gguf(tensor, read)
    if method == "bnb-nf4":
        return FourBit(tensor, read)
    if method == "bnb-int8":
        return EightBit(tensor, read)
    raise AssertionError(f"{tensor.name} is packed as {method}")
