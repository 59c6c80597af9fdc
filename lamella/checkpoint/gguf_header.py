"""Headers of GGUF files: metadata and tensors' places.

A file is: magic "GGUF", version, tensor and metadata counts, metadata (key, type, value), tensor entries (name, axes with the
innermost first, type, offset), padding to `general.alignment`, the tensors' bytes (ggml's docs/gguf.md). A model may be split
over files `NAME-00001-of-00003.gguf`, of which the first holds the metadata.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from lamella.errors import UserError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_COUNT = 1 << 28
"""More entries, or bytes of a string, than any real header has: a damaged length is told before memory is asked for."""
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf$")
_AGAIN = "download the file again"


@dataclass(frozen=True)
class RawTensor:
    """A tensor as the file has it: `shape` outermost first, `type` ggml's ("Q4_K"), `offset` in the file."""

    name: str
    file: Path
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass
class GgufHeader:
    """What a file, or all files of a split model, say."""

    files: list[Path]
    metadata: dict[str, Any]
    tensors: dict[str, RawTensor] = field(default_factory=dict)

    @property
    def arch(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The architecture's own value: `llama.block_count` for `block_count`."""
        return self.metadata.get(f"{self.arch}.{key}", default)


def read_gguf_header(path: Path) -> GgufHeader:
    """Header of a file, or of all files of a split model of which `path` is one.

    Raises:
        UserError: not GGUF, cut, damaged, an unknown tensor type, parts of a split model missing.
    """
    match = _SPLIT.match(path.name)
    if match is None:
        return _read_one(path)
    stem, _, count = match.groups()
    files = [path.with_name(f"{stem}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"parts of the model are missing: {', '.join(missing)}", fix="download all parts", path=path)
    header = _read_one(files[0])
    for file in files[1:]:
        part = _read_one(file)
        twice = sorted(set(part.tensors) & set(header.tensors))
        if twice:
            raise UserError(f"tensor {twice[0]!r} is in two parts of the model", fix=_AGAIN, path=file)
        header.tensors |= part.tensors
        header.files.append(file)
    promised = header.metadata.get("split.tensors.count", len(header.tensors))
    if promised != len(header.tensors):
        what = f"the first part promises {promised} tensors, the {len(files)} parts have {len(header.tensors)}"
        raise UserError(what, fix=_AGAIN, path=files[0])
    return header


def _read_one(path: Path) -> GgufHeader:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            return _Reader(stream, path, size).header()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", fix="check the file", path=path) from error


class _Reader:
    """Reads one header from a stream."""

    def __init__(self, stream: BinaryIO, path: Path, size: int) -> None:
        self.stream, self.path, self.size = stream, path, size

    def header(self) -> GgufHeader:
        magic = self.stream.read(4)
        if magic == b"vers":
            raise UserError(
                "is a git-lfs pointer, not weights", fix="run `git lfs pull` in that folder", path=self.path
            )
        if magic != MAGIC:
            raise UserError("is not a GGUF file", fix="give a GGUF model or a checkpoint folder", path=self.path)
        version = self._number("I")
        if version not in _VERSIONS:
            what = f"GGUF version {version} is not read (big-endian files are not either)"
            raise UserError(what, fix="convert the model with a current llama.cpp", path=self.path)
        tensor_count, key_count = self._count("Q"), self._count("Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        entries = [self._entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}")
        start = -(-self.stream.tell() // alignment) * alignment
        return GgufHeader([self.path], metadata, self._placed(entries, start))

    def _damaged(self, what: str) -> UserError:
        return UserError(f"header is damaged: {what}", fix=_AGAIN, path=self.path)

    def _take(self, count: int) -> bytes:
        found = self.stream.read(count)
        if len(found) != count:
            raise UserError(
                f"is cut: the header goes on after the file's {self.size} bytes", fix=_AGAIN, path=self.path
            )
        return found

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _count(self, code: str) -> int:
        found = int(self._number(code))
        if found > _MAX_COUNT:
            raise self._damaged(f"it counts {found} entries")
        return found

    def _string(self) -> str:
        raw = self._take(self._count("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"{raw[:40]!r} is not UTF-8") from error

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._damaged(f"a value of type {kind}")
        inner, count = self._number("I"), self._count("Q")
        if inner in _SCALARS:
            code = f"<{count}{_SCALARS[inner]}"
            return list(struct.unpack(code, self._take(struct.calcsize(code))))
        return [self._value(inner) for _ in range(count)]

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, axes = self._string(), self._number("I")
        if axes > 4:
            raise self._damaged(f"tensor {name!r} has {axes} axes")
        shape = tuple(reversed([self._number("Q") for _ in range(axes)]))
        return name, shape, self._number("I"), self._number("Q")

    def _placed(self, entries: list[tuple[str, tuple[int, ...], int, int]], start: int) -> dict[str, RawTensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        found: dict[str, RawTensor] = {}
        for name, shape, kind, offset in entries:
            if name in found:
                raise self._damaged(f"tensor {name!r} appears twice")
            if kind not in set(GGMLQuantizationType):
                what = f"tensor {name!r} has ggml type {kind}, which the gguf package does not know"
                raise UserError(what, fix="give a model of a common type (Q8_0, Q4_K_M)", path=self.path)
            of_kind = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[of_kind]
            if shape and shape[-1] % block:
                raise self._damaged(f"rows of {name!r} [{shape[-1]}] are no multiple of {of_kind.name}'s {block}")
            nbytes = prod(shape) // block * block_bytes
            if start + offset + nbytes > self.size:
                what = f"tensor {name!r} ends at byte {start + offset + nbytes}, the file has {self.size}"
                raise UserError(f"is cut: {what}", fix=_AGAIN, path=self.path)
            found[name] = RawTensor(name, self.path, of_kind.name, shape, start + offset, nbytes)
        return found
