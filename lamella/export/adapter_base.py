"""The base that an adapter belongs to: a store or a checkpoint folder, looked at without reading weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lamella.checkpoint.fingerprint import fingerprint
from lamella.checkpoint.source import Checkpoint
from lamella.checkpoint.tied import find_tying
from lamella.errors import UserError
from lamella.models.skeleton import Skeleton, load_config
from lamella.store.manifest import MANIFEST_NAME
from lamella.store.reader import Store


@dataclass(frozen=True)
class Base:
    """What is known of a base.

    Attributes:
        path: the store's or checkpoint's folder.
        name: as it was given when it was quantised: hub id or folder.
        fingerprint: of its weights (`lamella.checkpoint.fingerprint`).
        revision: commit of a hub id, where the path tells it.
        shapes: name -> shape of every tensor, the checkpoint's own names.
        skeleton: the weightless model.
        store: None for a checkpoint.
    """

    path: Path
    name: str
    fingerprint: str
    revision: str | None
    shapes: Mapping[str, tuple[int, ...]]
    skeleton: Skeleton
    store: Store | None


def open_base(path: Path) -> Base:
    """Raises `UserError` when there is no store or checkpoint, or transformers cannot build its model."""
    if (path / MANIFEST_NAME).is_file():
        store = Store.open(path)
        manifest = store.manifest
        shapes = {record.name: record.shape for key, _ in manifest.groups() for record in store.records(key)}
        skeleton = Skeleton(load_config(path, manifest.tie_word_embeddings), torch.float32)
        return Base(
            path,
            manifest.source,
            manifest.source_fingerprint,
            _revision(Path(manifest.source)),
            shapes,
            skeleton,
            store,
        )
    checkpoint = Checkpoint.open(str(path))
    shapes = {name: tuple(info.shape) for name, info in checkpoint.tensors.items()}
    tied = find_tying(checkpoint).tied
    skeleton = Skeleton(load_config(checkpoint.path, tied), torch.float32)
    return Base(
        checkpoint.path, str(path), fingerprint(checkpoint, tied), _revision(checkpoint.path), shapes, skeleton, None
    )


def base_of(folder: Path) -> Path:
    """The store that a run's folder names in its receipt.

    Raises:
        UserError: the folder is no run's, or the store is not there any more.
    """
    if not folder.is_dir():
        raise UserError(
            "is a file, not a folder" if folder.exists() else "no such folder",
            fix="give a run folder, or an adapter's", path=folder,
        )  # fmt: skip
    receipt = folder / "receipt.json"
    fix = "give --store: the store or checkpoint it was trained on"
    if not receipt.is_file():
        raise UserError("the folder does not say which base its adapter belongs to", fix=fix, path=folder)
    try:
        path = Path(json.loads(receipt.read_text(encoding="utf-8"))["base"]["path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("the receipt does not name a base", fix=fix, path=receipt) from error
    if not path.is_dir():
        raise UserError(f"the base of this run is not at {path} any more", fix=fix, path=receipt)
    return path


def _revision(path: Path) -> str | None:
    """Commit of a folder in the hub's cache (`models--x--y/snapshots/<commit>`)."""
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else None
