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
from lamella.store.manifest import ALIGN_BYTES, ITEM_BYTES, TensorFormat, part_sizes

TORCH_DTYPE = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool",
}  # fmt: skip
"""safetensors dtype -> torch's name."""


@dataclass(frozen=True)
class Planned:
    """A tensor to be stored: source, class, target format and dtype, and the place of its parts."""

    tensor: TensorInfo
    tensor_class: TensorClass
    format: TensorFormat
    dtype: str
    parts: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class PlannedGroup:
    """A file to be written: tensors in the order they are read and written."""

    key: str
    file: str
    nbytes: int
    tensors: tuple[Planned, ...]


@dataclass(frozen=True)
class Wanted:
    """A tensor, what it is, and whether it becomes nf4; `dtype` is torch's name of the stored (or source) dtype."""

    tensor: TensorInfo
    tensor_class: TensorClass
    quantised: bool
    dtype: str


def plan_group(key: str, file: str, wanted: Sequence[Wanted], block_size: int, double_quant: bool) -> PlannedGroup:
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
    if double_quant and any(w.quantised for w in wanted):
        code_part = place(1024)
    planned: list[Planned] = []
    for run in _runs(wanted):
        if not run[0].quantised:
            parts = {"data": place(run[0].tensor.numel * ITEM_BYTES[run[0].dtype])}
            planned.append(Planned(run[0].tensor, run[0].tensor_class, "raw", run[0].dtype, parts))
            continue
        sizes = [part_sizes(w.tensor.numel, block_size, double_quant) for w in run]
        places: list[dict[str, tuple[int, int]]] = [{} for _ in run]
        for part in sizes[0]:
            for spot, size in zip(places, sizes, strict=True):
                spot[part] = code_part if part == "absmax_code" and code_part else place(size[part])
        for w, spot in zip(run, places, strict=True):
            planned.append(Planned(w.tensor, w.tensor_class, "nf4", w.dtype, spot))
    return PlannedGroup(key, file, position, tuple(planned))


def _runs(wanted: Iterable[Wanted]) -> list[list[Wanted]]:
    """Experts' matrices of one shape and direction together, everything else alone, in order of first sight."""
    runs: dict[tuple[object, ...], list[Wanted]] = {}
    for item in wanted:
        before, found, after = item.tensor.name.partition(".experts.")
        number, _, leaf = after.partition(".")
        key: tuple[object, ...] = (item.tensor.name,)
        if found and item.quantised and number.isdigit():
            writes = leaf.startswith(("down", "w2", "output", "fc2"))
            key = (before, item.tensor.shape, item.dtype, writes)
        runs.setdefault(key, []).append(item)
    return list(runs.values())
