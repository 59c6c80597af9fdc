"""Whether the output head is the embedding table: the files decide, config.json may be wrong or silent."""

from __future__ import annotations

from dataclasses import dataclass

from lamella.checkpoint.facts import classify_outer
from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.packing import parts_of
from lamella.checkpoint.source import Checkpoint
from lamella.errors import UserError

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Tying:
    """Attributes:
    tied: the value in effect.
    drop: the head's tensor when it is a byte-for-byte copy of the embeddings and need not be stored.
    conflict: what to tell the user, or "".
    """

    tied: bool
    drop: TensorInfo | None
    conflict: str


def find_tying(checkpoint: Checkpoint) -> Tying:
    """Compare head and embeddings with config.json.

    Raises:
        UserError: the checkpoint has no input embeddings.
    """
    outer = checkpoint.layout.outer
    head = next((t for t in outer if classify_outer(t.name) == "head" and t.name.endswith("weight")), None)
    tables = [t for t in outer if classify_outer(t.name) == "embedding"]  # some families have per-layer ones too
    alike = [t for t in tables if head is not None and t.shape == head.shape]
    embedding = max(alike or tables, key=lambda t: t.numel, default=None)
    if embedding is None:
        raise UserError("no input embeddings among the tensors", fix="give a complete checkpoint", path=checkpoint.path)
    said = checkpoint.facts.tie_word_embeddings
    says = "config.json does not say tie_word_embeddings" if said is None else f"config.json says {said}".lower()
    says = says.replace("config.json says", "config.json says tie_word_embeddings =")
    if head is None:
        text = f"no output head in the files, {says}: the head is tied to {embedding.name}"
        return Tying(True, None, "" if said is True else text)
    if same_bytes(checkpoint, embedding, head):
        text = f"{head.name} is a copy of {embedding.name}, {says}: stored once, tied"
        return Tying(said is not False, head if said is not False else None, text if said is None else "")
    text = f"{head.name} differs from {embedding.name}, {says}: the head is untied"
    return Tying(False, None, "" if said is False else text)


def same_bytes(checkpoint: Checkpoint, a: TensorInfo, b: TensorInfo) -> bool:
    """Whether two tensors hold the same bytes, compared in pieces."""
    if (a.dtype, a.shape, _way(a)) != (b.dtype, b.shape, _way(b)):
        return False
    return all(_same(checkpoint, left, right) for left, right in zip(parts_of(a), parts_of(b), strict=True))


def _way(tensor: TensorInfo) -> tuple[object, ...]:
    packing = tensor.packing
    return () if packing is None else (packing.method, dict(packing.settings), sorted(packing.parts))


def _same(checkpoint: Checkpoint, a: TensorInfo, b: TensorInfo) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pairs = zip(checkpoint.chunks(a, _CHUNK_BYTES), checkpoint.chunks(b, _CHUNK_BYTES), strict=True)
    return all(left == right for left, right in pairs)
