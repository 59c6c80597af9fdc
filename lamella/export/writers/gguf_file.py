"""A GGUF file that is laid out whole before its tensors come: header through the `gguf` package, bytes at their places."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.errors import UserError

_ALIGN = 32


@dataclass(frozen=True)
class Stored:
    """One tensor of the file: ggml type, shape (outermost first), place of its bytes."""

    type: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


class GgufFile:
    """A file under a temporary name until `finish`.

    Args:
        file: to write.
        arch: `general.architecture`.
        keys: metadata: bool, int (32 bits), float (fp32), str or a list of one kind.
        tensors: name -> (shape, ggml type), in the order of the file.

    Attributes:
        tensors: name -> place; nbytes: of the whole file.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(
        self, file: Path, arch: str, keys: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], str]]
    ) -> None:
        self.file, self.partial = file, file.with_name(f".{file.name}.partial")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            offset = self._header(arch, keys, tensors)
            self.tensors: dict[str, Stored] = {}
            for name, (shape, kind) in tensors.items():
                self.tensors[name] = Stored(kind, shape, nbytes_of(shape, kind), offset)
                offset += aligned(self.tensors[name].nbytes)
            self.nbytes = offset
            self._fd = os.open(self.partial, os.O_RDWR)
            os.truncate(self._fd, self.nbytes)
        except OSError as error:
            raise self._error(error) from error

    def write(self, raw: NDArray[np.uint8], offset: int) -> None:
        """Put bytes at a place of the file."""
        view = raw.reshape(-1).data
        try:
            while view:
                done = os.pwrite(self._fd, view, offset)
                view, offset = view[done:], offset + done
        except OSError as error:
            raise self._error(error) from error

    def finish(self) -> None:
        """Give the file its name."""
        try:
            os.fsync(self._fd)
            os.close(self._fd)
            os.replace(self.partial, self.file)
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> UserError:
        return UserError(
            f"cannot be written: {error.strerror}", fix="check the folder and the disk's room", path=self.file
        )

    def _header(self, arch: str, keys: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> int:
        """Write all but the tensors' bytes; gives the byte at which those begin."""
        from gguf.constants import GGMLQuantizationType
        from gguf.gguf_writer import GGUFWriter

        writer = GGUFWriter(self.partial, arch)
        for key, value in keys.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name, (shape, kind) in tensors.items():
            of_kind = GGMLQuantizationType[kind]
            writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes_of(shape, kind), raw_dtype=of_kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return aligned(self.partial.stat().st_size)


def aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def nbytes_of(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor of a ggml type."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return prod(shape) // block * block_bytes
