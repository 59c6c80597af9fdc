"""A checkpoint folder, opened and checked: every tensor's place is known before anything is read."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.checkpoint.decode import decoder_of
from lamella.checkpoint.facts import Layout, ModelFacts, layout_of, model_facts
from lamella.checkpoint.gguf import is_gguf, read_gguf
from lamella.checkpoint.header import TensorInfo, read_header
from lamella.checkpoint.logical import logical_tensors, refuse_packed, refuse_unread
from lamella.checkpoint.marks import quantization_of
from lamella.checkpoint.orientation import check_orientation
from lamella.checkpoint.packing import Decoder, Native
from lamella.checkpoint.reader import AGAIN, Reader
from lamella.checkpoint.shapes import check_experts, check_shapes
from lamella.console import notice
from lamella.errors import UserError

INDEX_NAME = "model.safetensors.index.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*"]


def read_json(file: Path, fix: str = AGAIN) -> dict[str, Any]:
    """A JSON object from a file; `fix` is what a broken one's error says.

    Raises:
        UserError: missing, unreadable, not JSON (with line and column), not an object.
    """
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError("no such file", fix="give a Hugging Face checkpoint folder", path=file) from error
    except json.JSONDecodeError as error:
        what = f"not valid JSON: {error.msg}"
        raise UserError(what, fix=fix, path=file, line=error.lineno, column=error.colno) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", fix=fix, path=file) from error
    if not isinstance(tree, dict):
        raise UserError("is not a JSON object", fix=fix, path=file)
    return tree


@dataclass
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        path: its folder, or the GGUF file.
        config: config.json.
        tensors: every tensor by name, as the 16-bit checkpoint would have it.
        facts: sizes from config.json.
        layout: tensors by decoder layer.
        notices: what was left out, or found from the files alone.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    facts: ModelFacts
    layout: Layout
    notices: tuple[str, ...] = ()
    _reader: Reader = field(default_factory=Reader, repr=False)
    _last: Decoder | None = field(default=None, repr=False)

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """Open a local folder, a `.gguf` file, or a hub id (downloaded through `huggingface_hub`). Reads headers only.

        Raises:
            UserError: no such folder, missing or cut shard, index that disagrees with the shards,
                git-lfs pointer, weights quantised in a way that is not read, scales that do not go with their weights,
                a layer store in place of a checkpoint.
        """
        if is_gguf(source):
            return cls._open_gguf(Path(source))
        path = locate(source)
        if (path / "manifest.json").is_file() and (path / "layers").is_dir():
            raise UserError("is a layer store already; quantising it again would lose precision twice",
                            fix="use it as it is, or give the original checkpoint", path=path)  # fmt: skip
        refuse_dangling(path)
        config = read_json(path / "config.json")
        refuse_unread(config, path / "config.json")
        stored, disagreement = read_tensors(path)
        facts = model_facts(config, path / "config.json")
        if disagreement and quantization_of(config):
            raise disagreement
        with ExitStack() as on_error:
            reader = Reader()
            on_error.callback(reader.close)
            logical = logical_tensors(stored, config, reader.read_into)
            found = logical.tensors
            check_shapes(found, facts, config, path)  # a shard of another model is better named by its shapes
            if disagreement:
                raise disagreement
            refuse_packed(found)
            check_orientation(found, facts, config)
            tensors = {tensor.name: tensor for tensor in found}
            layout = layout_of(tensors, facts, path)
            check_experts(layout, facts, path)
            on_error.pop_all()
        return cls(path, config, tensors, facts, layout, logical.notices, reader)

    @classmethod
    def _open_gguf(cls, path: Path) -> Checkpoint:
        model = read_gguf(path)
        facts = model_facts(model.config, path)
        check_shapes(model.tensors, facts, model.config, path)
        tensors = {tensor.name: tensor for tensor in model.tensors}
        layout = layout_of(tensors, facts, path)
        return cls(path, model.config, tensors, facts, layout, model.notices)

    def values(self, tensor: TensorInfo, first: int, out: NDArray[np.float32]) -> None:
        """Fill `out` with the tensor's values from `first` on, in row-major order of its shape.

        Raises:
            UserError: the file ends early or cannot be read.
        """
        self._decoder(tensor).values(first, out)

    def piece(self, tensor: TensorInfo) -> int:
        """Values to ask for at a time: a bounded amount of memory, whole rows or blocks where that can be."""
        return self._decoder(tensor).piece()

    def native(self, tensor: TensorInfo) -> Native | None:
        """The form in which a store takes the tensor over without a second rounding, if there is one."""
        return self._decoder(tensor).native()

    def native_part(self, tensor: TensorInfo, part: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of a part of the native form, from byte `start` on."""
        self._decoder(tensor).native_part(part, start, buffer)

    def _decoder(self, tensor: TensorInfo) -> Decoder:
        """The tensor's decoder; the last one is kept, with the scales that it has read."""
        last = self._last
        if last is None or last.tensor is not tensor:
            last = self._last = decoder_of(tensor, self._reader.read_into)
        return last

    def read_into(self, tensor: TensorInfo, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of a plain tensor (also of a part of a packed one) from byte `start` on.

        Raises:
            UserError: the file ends early or cannot be read.
        """
        self._reader.read_into(tensor, start, buffer)

    def chunks(self, tensor: TensorInfo, chunk_bytes: int) -> Iterator[bytearray]:
        """The tensor's bytes in pieces of `chunk_bytes`."""
        for start in range(0, tensor.nbytes, chunk_bytes):
            piece = bytearray(min(chunk_bytes, tensor.nbytes - start))
            self.read_into(tensor, start, memoryview(piece))
            yield piece

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def locate(source: str | Path) -> Path:
    """Folder of a checkpoint: local, or downloaded when `source` is a hub id and no such path exists.

    Raises:
        UserError: neither a folder nor a hub id that can be fetched.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists():
        fix = "give the folder that holds config.json, or a .gguf file"
        raise UserError("is a file, not a checkpoint folder", fix=fix, path=path)
    if not HUB_ID.fullmatch(str(source)):
        raise UserError("no such folder", fix="give a checkpoint folder, or a hub id such as owner/name", path=path)
    return _download(str(source))


def refuse_dangling(path: Path) -> None:
    """Raises `UserError` for a link to a file that is not there: a cache moved or cleaned in part."""
    for entry in sorted(path.iterdir()):
        if entry.is_symlink() and not entry.exists() and any(entry.match(kind) for kind in _HUB_FILES):
            target = os.readlink(entry)
            raise UserError(f"is a link to {target}, which is not there ({(path / target).absolute()})",
                            fix="download the checkpoint again, or copy what the link leads to", path=entry)  # fmt: skip


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    # huggingface_hub 1.x speaks through httpx, 2.x through httpx2
    transport = [importlib.import_module(name).HTTPError for name in ("httpx", "httpx2") if find_spec(name)]
    notice(f"{hub_id} is no local folder; asking the Hugging Face hub")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=["original/*"]))
    except (RepositoryNotFoundError, HFValidationError) as error:
        fix = "check the name; for a gated one log in with `hf auth login`"
        raise UserError(f"no local folder and no hub repository: {hub_id!r}", fix=fix) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError, *transport) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{hub_id!r} is no local folder and the hub cannot be reached: {reason}",
                        fix="check the network, or give a local checkpoint folder") from error  # fmt: skip


def read_tensors(path: Path) -> tuple[list[TensorInfo], UserError | None]:
    """Every tensor of the folder's weight files, and how the index disagrees with them, if it does."""
    single, index = path / "model.safetensors", path / INDEX_NAME
    shards = sorted(path.glob("*.safetensors"))
    if single.is_file():
        if index.is_file():
            notice(f"{path}: both model.safetensors and an index are there; reading model.safetensors")
        return list(read_header(single).values()), None
    if index.is_file():
        return _read_sharded(path, index)
    if len(shards) == 1 and not re.search(r"-of-\d+\.safetensors$", shards[0].name):
        return list(read_header(shards[0]).values()), None
    if shards:
        raise UserError(f"{len(shards)} weight files but no {INDEX_NAME}", fix=AGAIN, path=path)
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        raise UserError("only pickled weights (.bin, .pth), which can run code when read; not supported",
                        fix="convert: load with transformers, then call save_pretrained", path=path)  # fmt: skip
    raise UserError("no safetensors weights in this folder", fix=AGAIN, path=path)


def _read_sharded(path: Path, index: Path) -> tuple[list[TensorInfo], UserError | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("has no weight_map", fix=AGAIN, path=index)
    names = weight_map.values()
    strange = [n for n in names if not isinstance(n, str)] or [n for n in set(names) if Path(n).name != n]
    if strange:
        raise UserError(f"names a file outside the folder: {strange[0]!r}", fix=AGAIN, path=index)
    shards = sorted(set(names))
    missing = [name for name in shards if not (path / name).is_file()]
    if missing:
        raise UserError(f"weight files named by the index are missing: {', '.join(missing)}", fix=AGAIN, path=path)
    stray = [f.name for f in sorted(path.glob("*-of-*.safetensors")) if f.name not in shards]
    if stray:
        what = f"the index names none of the tensors of {', '.join(stray)}"
        raise UserError(what, fix=f"{AGAIN}, or remove files that are not this model's", path=index)
    found = [tensor for name in shards for tensor in read_header(path / name).values()]
    what = _disagreement(found, weight_map)
    return found, UserError(f"index disagrees with the files: {what}", fix=AGAIN, path=index) if what else None


def _disagreement(found: list[TensorInfo], weight_map: dict[str, str]) -> str:
    """How index and files disagree, or ""."""
    files: dict[str, str] = {}
    for tensor in found:
        if tensor.name in files:
            return f"tensor {tensor.name!r} is in two files: {files[tensor.name]} and {tensor.file.name}"
        files[tensor.name] = tensor.file.name
    for name, file in files.items():
        if weight_map.get(name) != file:
            says = f"says {weight_map[name]}" if name in weight_map else "does not list it"
            return f"tensor {name!r} is in {file}, the index {says}"
    absent = [name for name in weight_map if name not in files]
    if absent:
        return f"{len(absent)} tensors are in no file, first {absent[0]!r} (should be in {weight_map[absent[0]]})"
    return ""
