"""A checkpoint folder, opened and checked: every tensor's place is known before anything is read."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lamella.checkpoint.facts import Layout, ModelFacts, layout_of, model_facts
from lamella.checkpoint.header import TensorInfo, read_header
from lamella.checkpoint.shapes import check_experts, check_shapes
from lamella.console import notice
from lamella.errors import UserError

INDEX_NAME = "model.safetensors.index.json"
_AGAIN = "download the checkpoint again (an interrupted download resumes with `hf download`)"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*"]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UserError: missing, unreadable, not JSON (with line and column), not an object.
    """
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError("no such file", fix="give a Hugging Face checkpoint folder", path=file) from error
    except json.JSONDecodeError as error:
        what = f"not valid JSON: {error.msg}"
        raise UserError(what, fix=_AGAIN, path=file, line=error.lineno, column=error.colno) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", fix=_AGAIN, path=file) from error
    if not isinstance(tree, dict):
        raise UserError("is not a JSON object", fix=_AGAIN, path=file)
    return tree


@dataclass
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        path: its folder.
        config: config.json.
        tensors: every tensor by name.
        facts: sizes from config.json.
        layout: tensors by decoder layer.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    facts: ModelFacts
    layout: Layout
    _files: dict[Path, int] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """Open a local folder, or a hub id (downloaded through `huggingface_hub`). Reads headers only.

        Raises:
            UserError: no such folder, missing or cut shard, index that disagrees with the shards,
                git-lfs pointer, already quantised weights, a layer store in place of a checkpoint.
        """
        path = locate(source)
        if (path / "manifest.json").is_file() and (path / "layers").is_dir():
            raise UserError("is a layer store already; quantising it again would lose precision twice",
                            fix="use it as it is, or give the original checkpoint", path=path)  # fmt: skip
        config = read_json(path / "config.json")
        _refuse_quantised(config, path)
        found, disagreement = read_tensors(path)
        facts = model_facts(config, path / "config.json")
        check_shapes(found, facts, config, path)  # a shard of another model is better named by its shapes
        if disagreement:
            raise disagreement
        tensors = {tensor.name: tensor for tensor in found}
        for tensor in found:
            if tensor.dtype in ("U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0") and len(tensor.shape) >= 2:
                raise UserError(f"tensor {tensor.name!r} is {tensor.dtype}: its weights are already quantised",
                                fix="give the bf16, fp16 or fp32 original", path=tensor.file)  # fmt: skip
        layout = layout_of(tensors, facts, path)
        check_experts(layout, facts, path)
        return cls(path, config, tensors, facts, layout)

    def read_into(self, tensor: TensorInfo, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from byte `start` on.

        Raises:
            UserError: the file ends early or cannot be read.
        """
        fd = self._files.get(tensor.file)
        try:
            if fd is None:
                fd = self._files[tensor.file] = os.open(tensor.file, os.O_RDONLY)
            done = 0
            while done < len(buffer):
                got = os.preadv(fd, [buffer[done:]], tensor.offset + start + done)
                if got == 0:
                    raise UserError(f"file ends inside tensor {tensor.name!r}", fix=_AGAIN, path=tensor.file)
                done += got
        except OSError as error:
            what = f"tensor {tensor.name!r} cannot be read: {error.strerror}"
            raise UserError(what, fix="check the disk, then run again", path=tensor.file) from error

    def chunks(self, tensor: TensorInfo, chunk_bytes: int) -> Iterator[bytearray]:
        """The tensor's bytes in pieces of `chunk_bytes`."""
        for start in range(0, tensor.nbytes, chunk_bytes):
            piece = bytearray(min(chunk_bytes, tensor.nbytes - start))
            self.read_into(tensor, start, memoryview(piece))
            yield piece

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

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
        fix = "give the folder that holds config.json"
        if path.suffix == ".gguf":
            fix = "GGUF is not read yet; give a Hugging Face checkpoint folder"
        raise UserError("is a file, not a checkpoint folder", fix=fix, path=path)
    if not HUB_ID.fullmatch(str(source)):
        raise UserError("no such folder", fix="give a checkpoint folder, or a hub id such as owner/name", path=path)
    return _download(str(source))


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


def _refuse_quantised(config: dict[str, Any], path: Path) -> None:
    for tree in (config, config.get("text_config")):
        settings = tree.get("quantization_config") if isinstance(tree, dict) else None
        if settings:
            method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else settings
            raise UserError(f"the checkpoint is already quantised (quant_method {method!r}), which is not read yet",
                            fix="give the bf16, fp16 or fp32 original", path=path / "config.json")  # fmt: skip


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
        raise UserError(f"{len(shards)} weight files but no {INDEX_NAME}", fix=_AGAIN, path=path)
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        raise UserError("only pickled weights (.bin, .pth), which can run code when read; not supported",
                        fix="convert: load with transformers, then call save_pretrained", path=path)  # fmt: skip
    raise UserError("no safetensors weights in this folder", fix=_AGAIN, path=path)


def _read_sharded(path: Path, index: Path) -> tuple[list[TensorInfo], UserError | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("has no weight_map", fix=_AGAIN, path=index)
    names = weight_map.values()
    strange = [n for n in names if not isinstance(n, str)] or [n for n in set(names) if Path(n).name != n]
    if strange:
        raise UserError(f"names a file outside the folder: {strange[0]!r}", fix=_AGAIN, path=index)
    shards = sorted(set(names))
    missing = [name for name in shards if not (path / name).is_file()]
    if missing:
        raise UserError(f"weight files named by the index are missing: {', '.join(missing)}", fix=_AGAIN, path=path)
    stray = [f.name for f in sorted(path.glob("*-of-*.safetensors")) if f.name not in shards]
    if stray:
        what = f"the index names none of the tensors of {', '.join(stray)}"
        raise UserError(what, fix=f"{_AGAIN}, or remove files that are not this model's", path=index)
    found = [tensor for name in shards for tensor in read_header(path / name).values()]
    what = _disagreement(found, weight_map)
    return found, UserError(f"index disagrees with the files: {what}", fix=_AGAIN, path=index) if what else None


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
