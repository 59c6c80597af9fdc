"""A merged model as one GGUF file that llama.cpp reads.

The whole file is laid out first: header and metadata through the `gguf` package, then every tensor's bytes at their place as
they come, in any order, an expert of a stacked tensor at a time. Norms, biases and routers are fp32; the other weights have the
form asked for, through that package's numpy quantisers. Rows of queries and keys lie in llama.cpp's order.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamella.checkpoint.architecture import architecture_of
from lamella.checkpoint.gguf_archs import GgufArch, Place, place_of
from lamella.checkpoint.gguf_decode import paired, unpaired
from lamella.errors import UserError
from lamella.export.writers import PIECE_VALUES, Source, Target
from lamella.export.writers.gguf_metadata import full_config, metadata_of
from lamella.export.writers.gguf_tokenizer import tokenizer_metadata

FORMS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "bf16": 32}
"""`general.file_type` (gguf.LlamaFileType)."""
_ALIGN = 32
_F16_MAX = 65504.0


@dataclass(frozen=True)
class _Stored:
    """One tensor of the file: ggml type, shape, place of its bytes."""

    type: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


class GgufWriter:
    """Writes one `.gguf` (see `ModelWriter`).

    Args:
        file: to write; appears under this name when `finish` ends.
        targets: every tensor of the model, under the checkpoint's names.
        form: one of `FORMS`.
        config: config.json of the plain model.
        files: tokenizer and chat template (see `gguf_tokenizer`).

    Raises:
        UserError: a model that GGUF or llama.cpp does not have, an unknown form, tensors missing or without a place.
    """

    def __init__(
        self, file: Path, targets: Sequence[Target], form: str, config: Mapping[str, Any], files: Mapping[str, Path]
    ) -> None:
        if form not in FORMS:
            raise UserError(f"GGUF form {form!r} is not written", fix=f"choose one of {', '.join(FORMS)}")
        self.file, self.form = file, form
        self.metadata = metadata_of(config)
        tokenizer, told = tokenizer_metadata(files, full_config(config))
        self.notices: list[str] = [*self.metadata.notices, *told]
        self._targets = {target.name: target for target in targets}
        self._places = _places(self.metadata.arch, self._targets, config)
        stacked = _stacked(self._targets, self._places)
        small = {name: (len(values),) for name, values in self.metadata.tensors.items()}
        types = {name: self._type(name, shape) for name, shape in stacked.items()} | dict.fromkeys(small, "F32")
        self._partial = file.with_name(f".{file.name}.partial")
        start = _write_header(self._partial, self.metadata, tokenizer, stacked | small, types, _FILE_TYPES[form])
        self._stored, self.nbytes = _laid_out(stacked | small, types, start)
        self._done: set[str] = set()
        self._fd = os.open(self._partial, os.O_RDWR)
        os.truncate(self._fd, self.nbytes)
        for name, values in self.metadata.tensors.items():
            self._write(np.array(values, "<f4").view(np.uint8), self._stored[name].offset)

    def tensor(self, target: Target, source: Source) -> None:
        """Write one tensor, in pieces of whole rows (whole heads where rows change their order)."""
        place = self._places[target.name]
        stored = self._stored[place.name]
        width = 1 if place.heads and len(target.shape) == 1 else target.shape[-1]
        rows = target.numel // width
        nbytes = stored.nbytes // (stored.shape[0] if place.expert is not None else 1)
        base = stored.offset + (place.expert or 0) * nbytes
        together = rows // place.heads if place.heads else 1
        most = max(1, PIECE_VALUES // (width * together)) * together
        for row in range(0, rows, most):
            count = min(most, rows - row)
            values = torch.empty(count * width, dtype=torch.float32)
            source.values(row * width, values)
            heads = count // together if place.heads else None
            raw, got = _encoded(values.numpy().reshape(count, width), stored.type, place, heads, target.name)
            self._write(raw, base + row * nbytes // rows)
            source.stored(row * width, torch.from_numpy(got.reshape(-1)))
        self._done.add(target.name)

    def finish(self, config: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        """Give the file its name. `config` and `files` are in the header since the start.

        Raises:
            UserError: a tensor was never written, or the disk is full.
        """
        missing = sorted(set(self._targets) - self._done)
        if missing:
            raise UserError(f"{len(missing)} tensors were never written, first {missing[0]!r}", fix="report this")
        try:
            os.fsync(self._fd)
            os.close(self._fd)
            os.replace(self._partial, self.file)
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}", fix="make room on the disk", path=self.file) from error

    def _type(self, name: str, shape: tuple[int, ...]) -> str:
        if len(shape) < 2 or name.endswith(("_norm.weight", "ffn_gate_inp.weight", ".bias")):
            return "F32"
        wanted = self.form.upper()
        if wanted in ("Q4_0", "Q4_1") and name in ("token_embd.weight", "output.weight"):
            wanted = "Q8_0"
        if wanted.startswith("Q") and shape[-1] % 32:
            self.notices.append(f"{name}: rows of {shape[-1]} values are not whole blocks of 32: written as F16")
            return "F16"
        return wanted

    def _write(self, raw: NDArray[np.uint8], offset: int) -> None:
        view = memoryview(raw)
        try:
            while view:
                done = os.pwrite(self._fd, view, offset)
                view, offset = view[done:], offset + done
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}", fix="make room on the disk", path=self.file) from error


def _places(arch: GgufArch, targets: Mapping[str, Target], config: Mapping[str, Any]) -> dict[str, Place]:
    architecture = architecture_of(config)
    wanted = set(architecture.tensors())
    if wanted != set(targets):
        missing, stray = sorted(wanted - set(targets)), sorted(set(targets) - wanted)
        what = f"{len(missing)} tensors missing {missing[:2]}, {len(stray)} not known {stray[:2]}"
        raise UserError(f"the model's tensors are not those of {arch.model_type}: {what}", fix="export in another form")
    return {name: place_of(arch, name, config, architecture) for name in targets}


def _stacked(targets: Mapping[str, Target], places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """Name in the file -> shape; experts along a first axis."""
    experts: dict[str, int] = defaultdict(int)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, target in targets.items():
        place = places[name]
        if place.expert is not None:
            experts[place.name] += 1
        shape = target.shape
        if place.name.endswith("ffn_gate_inp_shexp.weight"):  # [1, hidden] here, a vector there
            shape = shape[-1:]
        shapes[place.name] = shape
    return {name: (experts[name], *shape) if name in experts else shape for name, shape in shapes.items()}


def _laid_out(shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, str], start: int) -> tuple[dict[str, _Stored], int]:
    """Every tensor's place, and the file's bytes."""
    found, offset = {}, start
    for name, shape in shapes.items():
        nbytes = _nbytes(shape, types[name])
        found[name] = _Stored(types[name], shape, nbytes, offset)
        offset += -(-nbytes // _ALIGN) * _ALIGN
    return found, offset


def _nbytes(shape: tuple[int, ...], kind: str) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return prod(shape) // block * block_bytes


def _write_header(
    path: Path, metadata: Any, tokenizer: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]],
    types: Mapping[str, str], file_type: int,
) -> int:  # fmt: skip
    """Write all but the tensors' bytes; gives the byte at which those begin."""
    from gguf.constants import GGMLQuantizationType
    from gguf.gguf_writer import GGUFWriter

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, metadata.arch.name)
    arch = metadata.arch.name
    writer.add_type("model")
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    for key, number in metadata.values.items():
        (writer.add_float32 if isinstance(number, float) else writer.add_uint32)(f"{arch}.{key}", number)
    for key, text in metadata.text.items():
        writer.add_string(f"{arch}.{key}", text)
    for key, value in tokenizer.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, shape in shapes.items():
        kind = GGMLQuantizationType[types[name]]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), _nbytes(shape, types[name]), raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", fix="check the folder and the disk", path=path) from error
    return -(-path.stat().st_size // _ALIGN) * _ALIGN


def _encoded(
    rows: NDArray[np.float32], kind: str, place: Place, heads: int | None, name: str
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Bytes of rows [n, width] in the file, and the values that a reader gets from them."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    there = paired(rows, heads) if heads else rows
    if place.add:
        there = there + np.float32(place.add)
    if kind == "F16" and there.size and np.abs(there).max() > _F16_MAX:
        raise UserError(f"tensor {name!r} has values beyond fp16's {_F16_MAX:g}", fix="export as bf16, f32 or q8_0")
    of_kind = GGMLQuantizationType[kind]
    raw = np.ascontiguousarray(quantize(np.ascontiguousarray(there), of_kind)).reshape(-1).view(np.uint8)
    row_bytes = raw.size // max(1, rows.shape[0])
    got = dequantize(raw.reshape(rows.shape[0], row_bytes), of_kind).reshape(rows.shape)
    if place.add:
        got = got - np.float32(place.add)
    return raw, np.ascontiguousarray(unpaired(got, heads) if heads else got)
