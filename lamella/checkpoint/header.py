"""Headers of safetensors files.

A file is: header length (little-endian u64), JSON header, then the tensors' bytes
(https://huggingface.co/docs/safetensors, "Format"). Reading the header alone tells every name, dtype, shape
and place, so a file can be judged and read in slices without ever being mapped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

from lamella.checkpoint.packing import Packing
from lamella.errors import UserError

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
"""Bytes per element of the dtypes that a checkpoint can hold (those of sub-byte size are left to later readers)."""

_LFS_MARK = b"version https://git-lfs.github.com/spec/"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_AGAIN = "download the checkpoint again (an interrupted download resumes with `hf download`)"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: where its bytes lie. `dtype` is safetensors' spelling ("BF16").

    With `packing` it is a tensor of a quantised checkpoint: `shape` and `dtype` are those of its values, `nbytes` what it and
    its scales take in the files, and its bytes are reached through `Checkpoint.values` alone.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    packing: Packing | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"tensor {twice!r} appears twice in the header", fix=_AGAIN)
    return found


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Every tensor of one safetensors file, checked against the file's size.

    Raises:
        UserError: git-lfs pointer, not safetensors, cut file (promised and real size), overlapping or
            inconsistent tensors.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == _LFS_MARK[:8]:
                raise UserError("is a git-lfs pointer, not weights", fix="run `git lfs pull` in that folder", path=file)
            header_bytes = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= header_bytes <= _MAX_HEADER_BYTES:
                raise UserError("is not a safetensors file (no header)", fix=_AGAIN, path=file)
            if 8 + header_bytes > size:
                promised = f"header promises {8 + header_bytes} bytes of header alone, file has {size}"
                raise UserError(f"is cut: {promised}", fix=_AGAIN, path=file)
            text = stream.read(header_bytes)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", fix="check the file", path=file) from error
    try:
        entries = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise UserError(f"header is not JSON: {error}", fix=_AGAIN, path=file) from error
    except UserError as error:
        raise UserError(error.what, fix=error.fix, path=file) from error
    if not isinstance(entries, dict):
        raise UserError("header is not a JSON object", fix=_AGAIN, path=file)
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, file, 8 + header_bytes) for name, entry in entries.items()}
    _check_extent(tensors, file, 8 + header_bytes, size)
    return tensors


def _tensor(name: str, entry: object, file: Path, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]  # type: ignore[index]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"header entry of {name!r} is broken: {entry!r:.200}", fix=_AGAIN, path=file) from error
    if not whole or end < begin:
        raise UserError(f"header entry of {name!r} is broken: {entry!r:.200}", fix=_AGAIN, path=file)
    if dtype not in DTYPE_BYTES:
        raise UserError(f"tensor {name!r} has dtype {dtype!r}, which is not supported",
                        fix="use a bf16, fp16 or fp32 checkpoint", path=file)  # fmt: skip
    if prod(shape) * DTYPE_BYTES[dtype] != end - begin:
        what = f"tensor {name!r}: shape {list(shape)} of {dtype} needs {prod(shape) * DTYPE_BYTES[dtype]} bytes"
        raise UserError(f"{what}, header gives it {end - begin}", fix=_AGAIN, path=file)
    return TensorInfo(name, file, dtype, shape, data_start + begin, end - begin)


def _check_extent(tensors: dict[str, TensorInfo], file: Path, data_start: int, size: int) -> None:
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != position:
            kind = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            raise UserError(f"tensor {tensor.name!r} {kind}", fix=_AGAIN, path=file)
        position = tensor.offset + tensor.nbytes
    if position != size:
        raise UserError(f"header promises {position} bytes, file has {size}", fix=_AGAIN, path=file)
