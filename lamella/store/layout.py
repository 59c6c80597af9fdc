"""Where each part of each tensor goes in a group's file, before any byte is written.

Expert matrices stored one by one are laid in runs: for each expert its input projections (gate, up), and the
output projections apart; in a run all codes come first, then each kind of scale. So the codes of a run lie
in one piece, in the order in which the model fuses experts, and one kernel call dequantises them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lamella.checkpoint.facts import TensorClass
from lamella.checkpoint.header import TensorInfo
from lamella.store.formats import Form
from lamella.store.manifest import ALIGN_BYTES, TensorFormat, part_sizes


@dataclass(frozen=True)
class Planned:
    """A tensor to be stored: source, class, form, and the place of its parts."""

    tensor: TensorInfo
    tensor_class: TensorClass
    form: Form
    parts: dict[str, tuple[int, int]]

    @property
    def format(self) -> TensorFormat:
        return self.form.format

    @property
    def dtype(self) -> str:
        return self.form.dtype


@dataclass(frozen=True)
class PlannedGroup:
    """A file to be written: tensors in the order they are read and written."""

    key: str
    file: str
    nbytes: int
    tensors: tuple[Planned, ...]


@dataclass(frozen=True)
class Wanted:
    """A tensor, what it is, and what it becomes."""

    tensor: TensorInfo
    tensor_class: TensorClass
    form: Form


def plan_group(key: str, file: str, wanted: Sequence[Wanted]) -> PlannedGroup:
    """Place tensors in a file, every part aligned to 64 bytes.

    Args:
        key: "outer" or the layer's number.
        wanted: tensors in the order of the checkpoint's names.
    """
    position = 0

    def place(nbytes: int) -> tuple[int, int]:
        nonlocal position
        start = position
        position = -(-(start + nbytes) // ALIGN_BYTES) * ALIGN_BYTES
        return start, nbytes

    code_part = None
    if any(w.form.double_quant for w in wanted):
        code_part = place(1024)
    planned: list[Planned] = []
    for run in _runs(wanted):
        sizes = [_sizes(w) for w in run]
        places: list[dict[str, tuple[int, int]]] = [{} for _ in run]
        for part in sizes[0]:
            shared = code_part if part == "absmax_code" else None
            for spot, size in zip(places, sizes, strict=True):
                spot[part] = shared or place(size[part])
        for w, spot in zip(run, places, strict=True):
            planned.append(Planned(w.tensor, w.tensor_class, w.form, spot))
    return PlannedGroup(key, file, position, tuple(planned))


def _sizes(wanted: Wanted) -> dict[str, int]:
    form = wanted.form
    return part_sizes(
        form.format, wanted.tensor.numel, block_size=form.block_size, double_quant=form.double_quant, dtype=form.dtype
    )


def _runs(wanted: Iterable[Wanted]) -> list[list[Wanted]]:
    """Experts' matrices of one shape, form and direction together, everything else alone, in order of first sight."""
    runs: dict[tuple[object, ...], list[Wanted]] = {}
    for item in wanted:
        before, found, after = item.tensor.name.partition(".experts.")
        number, _, leaf = after.partition(".")
        key: tuple[object, ...] = (item.tensor.name,)
        if found and item.tensor_class == "experts" and number.isdigit():
            writes = leaf.startswith(("down", "w2", "output", "fc2"))
            key = (before, item.tensor.shape, item.form, writes)
        runs.setdefault(key, []).append(item)
    return list(runs.values())
