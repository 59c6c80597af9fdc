"""`manifest.json`: what a store holds and where each byte lies. Imports no torch.

A tensor in format `nf4` has the parts

    codes       ceil(n / 2) bytes, two 4-bit codes each, high nibble first, over the flattened tensor
    absmax_q    ceil(n / block) bytes: index into absmax_code, with double quantisation
    absmax_code 256 fp32: bitsandbytes' dynamic 8-bit map; one copy per file, shared by its tensors
    absmax2     ceil(blocks / 256) fp32: scale of each 256 first-level scales
    offset      1 fp32: mean of the first-level scales
    absmax      ceil(n / block) fp32, without double quantisation (then there are no other scale parts)

one in format `mxfp4`

    codes       ceil(n / 2) bytes, two e2m1 codes each, low nibble first
    scales      ceil(n / 32) bytes, e8m0: powers of two, biased by 127

one in format `int8`

    codes       n signed bytes
    scales      ceil(n / block) fp32: value = code * scale

and one in format `raw` the part `data`. Parts are `[offset in the file, bytes]`. Values lie in row-major order of the shape,
or of its axes in the record's `order`. Version 1 had `nf4` and `raw` alone, with one block size for all.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lamella.checkpoint.facts import QUANTISED_CLASSES, TensorClass
from lamella.errors import UserError

TensorFormat = Literal["nf4", "mxfp4", "int8", "raw"]
FORMAT_VERSION = 2
READ_VERSIONS = (1, 2)
MANIFEST_NAME = "manifest.json"
ABSMAX2_BLOCK = 256
MXFP4_BLOCK = 32
ALIGN_BYTES = 64
ITEM_BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1,
}  # fmt: skip
"""Bytes per element; dtypes go by torch's names."""

_REMAKE = "make the store again with `lamella quantize`"
_NO_CHECKSUM = "0" * 32


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TensorRecord(_Model):
    """One tensor. `dtype` is its own: what a raw tensor's bytes are, what a quantised tensor was made from."""

    name: str
    tensor_class: TensorClass
    shape: tuple[int, ...]
    dtype: str
    format: TensorFormat
    parts: dict[str, tuple[int, int]]
    """Part name -> (offset in the group's file, bytes)."""
    checksum: str
    """xxh3_128 over the parts' bytes, in the order of `parts`."""
    block_size: int | None = Field(None, ge=1)
    """Values per scale; None: the manifest's."""
    double_quant: bool | None = None
    """Of an nf4 tensor; None: the manifest's."""
    order: tuple[int, ...] = ()
    """Axes of `shape` in the order in which values lie, outermost first; (): as `shape`."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """In the order in which values lie."""
        return tuple(self.shape[axis] for axis in self.order) or self.shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.parts.values())


class Group(_Model):
    """A file of tensors: one decoder layer, or everything outside the layers."""

    file: str
    nbytes: int
    tensors: tuple[TensorRecord, ...]


class ReportRow(_Model):
    """All tensors of one class and format, before and after."""

    tensor_class: TensorClass
    format: TensorFormat
    dtype: str
    count: int
    parameters: int
    bytes_source: int
    bytes_store: int
    bytes_per_weight: float
    names: tuple[str, ...]
    """Names with numbers collapsed: `model.layers.*.mlp.gate.weight`."""


class CopiedFile(_Model):
    nbytes: int
    checksum: str


class Manifest(_Model):
    format_version: int
    checksum: str
    """xxh3_128 of this file with these 32 digits read as zeros."""
    lamella_version: str
    source: str
    """The checkpoint as it was given: hub id or folder. Adapters name it as their base."""
    source_fingerprint: str
    """Equal for equal weights: see `lamella.checkpoint.fingerprint`."""
    model_type: str
    num_layers: int
    layer_prefix: str
    """Module path of the layer list, e.g. `model.layers`."""
    tie_word_embeddings: bool
    """The value in effect, found from the files. It goes before config.json's (the store's copy agrees)."""
    block_size: int = Field(ge=32)
    double_quant: bool
    kept_dtype: Literal["source", "bf16"]
    notices: tuple[str, ...]
    """What the user was told: conflicts, tensors left out or left in 16 bit."""
    report: tuple[ReportRow, ...]
    synthetic: bool = False
    """Random weights made from a config.json alone (`lamella store synth`): of no use but to measure."""
    files: dict[str, CopiedFile]
    """Config, tokenizer and other files beside the weights."""
    outer: Group
    layers: tuple[Group, ...]

    def groups(self) -> list[tuple[int | Literal["outer"], Group]]:
        return [("outer", self.outer), *enumerate(self.layers)]


def is_weight(form: TensorFormat, kind: TensorClass) -> bool:
    """Whether a tensor's values come to their place at each turn of their layer, as quantised ones do: weights that are kept in
    16 bit too. All others are small, and stay."""
    return form != "raw" or kind in QUANTISED_CLASSES


def part_sizes(
    form: TensorFormat, numel: int, *, block_size: int = 0, double_quant: bool = False, dtype: str = ""
) -> dict[str, int]:
    """Bytes of each part of a tensor of `numel` elements, in their order. `dtype`: torch's name, of a raw tensor."""
    if form == "raw":
        return {"data": numel * ITEM_BYTES.get(dtype, 0)}
    blocks = -(-numel // block_size)
    if form == "mxfp4":
        return {"codes": -(-numel // 2), "scales": blocks}
    if form == "int8":
        return {"codes": numel, "scales": 4 * blocks}
    codes = {"codes": -(-numel // 2)}
    if not double_quant:
        return {**codes, "absmax": 4 * blocks}
    absmax2 = 4 * -(-blocks // ABSMAX2_BLOCK)
    return {**codes, "absmax_q": blocks, "absmax_code": 1024, "absmax2": absmax2, "offset": 4}


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file's content, with its own checksum in place."""
    blank = manifest.model_copy(update={"checksum": _NO_CHECKSUM}).model_dump_json().encode()
    return blank.replace(_NO_CHECKSUM.encode(), xxhash.xxh3_128(blank).hexdigest().encode(), 1)


def manifest_is_intact(data: bytes, manifest: Manifest) -> bool:
    """Whether a manifest file's bytes are those that were written."""
    blank = data.replace(manifest.checksum.encode(), _NO_CHECKSUM.encode(), 1)
    return xxhash.xxh3_128(blank).hexdigest() == manifest.checksum


def read_manifest(store: Path) -> Manifest:
    """Read and check a store's manifest, down to the size of every part and file.

    Raises:
        UserError: no store there, an unfinished one, another format version, parts that do not agree with
            shape and block size (names layer, tensor and part), missing or cut files.
    """
    path = store / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise _no_store(store) from error
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", fix="give the folder of a store", path=path) from error
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise _explained(error, text, path) from error
    if manifest.format_version not in READ_VERSIONS:
        raise _other_version(manifest.format_version, path)
    if len(manifest.layers) != manifest.num_layers:
        what = f"num_layers is {manifest.num_layers}, {len(manifest.layers)} layers are described"
        raise UserError(what, fix=_REMAKE, path=path)
    for key, group in manifest.groups():
        _check_group(key, group, manifest, path)
        _check_file(store / group.file, group.nbytes)
    for file, copied in manifest.files.items():
        _check_file(store / file, copied.nbytes)
    return manifest


def _explained(error: ValidationError, text: bytes, path: Path) -> UserError:
    """Why a manifest is refused: no JSON, another format version, or its first wrong key."""
    try:
        version = json.loads(text).get("format_version")
    except (ValueError, AttributeError) as broken:
        return UserError(f"is not a store's manifest: {broken}", fix=_REMAKE, path=path)
    if version not in READ_VERSIONS:
        return _other_version(version, path)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return UserError(f"`{where}`: {first['msg']}", fix=_REMAKE, path=path)


def _other_version(version: object, path: Path) -> UserError:
    read = " and ".join(map(str, READ_VERSIONS))
    return UserError(f"store format {version!r}, this version reads {read}", fix=_REMAKE, path=path)


def _no_store(store: Path) -> UserError:
    partial = store.with_name(store.name + ".partial")
    if not store.exists() and partial.is_dir():
        return UserError("store is not finished (its .partial folder is there)",
                         fix="run the same `lamella quantize` again; it goes on", path=store)  # fmt: skip
    if (store / "config.json").is_file():
        return UserError("is a checkpoint, not a layer store",
                         fix=f"run `lamella quantize {store} -o STORE` and give STORE", path=store)  # fmt: skip
    what = "no manifest.json in this folder: not a layer store" if store.is_dir() else "no such store"
    return UserError(what, fix="give the folder made by `lamella quantize`", path=store)


def _check_file(file: Path, nbytes: int) -> None:
    if not file.is_file():
        raise UserError("file of the store is missing", fix=_REMAKE, path=file)
    size = file.stat().st_size
    if size != nbytes:
        raise UserError(f"manifest says {nbytes} bytes, file has {size}", fix=_REMAKE, path=file)


def _check_group(key: int | str, group: Group, manifest: Manifest, path: Path) -> None:
    where = f"layer {key}" if isinstance(key, int) else str(key)
    for record in group.tensors:
        block_size = manifest.block_size if record.block_size is None else record.block_size
        double_quant = manifest.double_quant if record.double_quant is None else record.double_quant
        wanted = part_sizes(record.format, record.numel, block_size=block_size, double_quant=double_quant,
                            dtype=record.dtype)  # fmt: skip
        basis = f"{record.dtype} {list(record.shape)}"
        if record.format != "raw":
            basis = f"{record.format}, block size {block_size} and shape {list(record.shape)}"
        if record.order and sorted(record.order) != list(range(len(record.shape))):
            what = (
                f"{where}: tensor {record.name!r}: `order` {list(record.order)} is none of shape {list(record.shape)}"
            )
            raise UserError(what, fix=_REMAKE, path=path)
        if record.format == "mxfp4" and block_size != MXFP4_BLOCK:
            what = f"{where}: tensor {record.name!r}: `block_size` {block_size}, mxfp4 has {MXFP4_BLOCK}"
            raise UserError(what, fix=_REMAKE, path=path)
        for part, nbytes in wanted.items():
            if part not in record.parts:
                what = f"{where}: tensor {record.name!r} has no part `{part}`"
                raise UserError(what, fix=_REMAKE, path=path)
            offset, size = record.parts[part]
            if size != nbytes:
                what = f"{where}: tensor {record.name!r}: part `{part}` has {size} bytes, {basis} need {nbytes}"
                raise UserError(what, fix=_REMAKE, path=path)
            if offset < 0 or offset % ALIGN_BYTES or offset + size > group.nbytes:
                what = f"{where}: tensor {record.name!r}: part `{part}` at byte {offset} lies wrong in {group.file}"
                raise UserError(what, fix=_REMAKE, path=path)
        if len(record.parts) != len(wanted):
            extra = sorted(set(record.parts) - set(wanted))
            what = f"{where}: tensor {record.name!r} has parts {extra} that {basis} do not call for"
            raise UserError(what, fix=_REMAKE, path=path)
