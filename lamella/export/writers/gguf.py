"""A merged model as one GGUF file that llama.cpp reads.

The whole file is laid out first; then every tensor's bytes go to their place as they come, in any order, an expert of a stacked
tensor at a time. Norms, biases and routers are fp32; the other weights have the form asked for, through the `gguf` package's
numpy quantisers. Rows of queries and keys lie in llama.cpp's order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamella.checkpoint.architecture import architecture_of
from lamella.checkpoint.gguf_archs import GgufArch, Place, place_of
from lamella.checkpoint.gguf_decode import paired, unpaired
from lamella.errors import UserError
from lamella.export.writers import PIECE_VALUES, Source, Target
from lamella.export.writers.gguf_file import GgufFile
from lamella.export.writers.gguf_metadata import full_config, metadata_of
from lamella.export.writers.gguf_tokenizer import tokenizer_metadata

if TYPE_CHECKING:
    from lamella.export.merge import Order

FORMS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "bf16": 32}
"""`general.file_type` (gguf.LlamaFileType)."""
_F16_MAX = 65504.0


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
        self.form = form
        metadata = metadata_of(config)
        tokenizer, told = tokenizer_metadata(files, full_config(config))
        self.notices: list[str] = [*metadata.notices, *told]
        self._targets = {target.name: target for target in targets}
        self._places = _places(metadata.arch, self._targets, config)
        tensors = {
            name: (shape, self._type(name, shape)) for name, shape in _stacked(self._targets, self._places).items()
        }
        tensors |= {name: ((len(values),), "F32") for name, values in metadata.tensors.items()}
        keys: dict[str, Any] = {
            "general.type": "model", "general.file_type": _FILE_TYPES[form], "general.quantization_version": 2,
            **{f"{metadata.arch.name}.{key}": value for key, value in (metadata.values | metadata.text).items()},
            **tokenizer,
        }  # fmt: skip
        self._file = GgufFile(file, metadata.arch.name, keys, tensors)
        self.nbytes = self._file.nbytes
        self._done: set[str] = set()
        for name, values in metadata.tensors.items():
            self._file.write(np.array(values, "<f4").view(np.uint8), self._file.tensors[name].offset)

    def tensor(self, target: Target, source: Source) -> None:
        """Write one tensor, in pieces of whole rows (whole heads where rows change their order)."""
        place = self._places[target.name]
        stored = self._file.tensors[place.name]
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
            self._file.write(raw, base + row * nbytes // rows)
            source.stored(row * width, torch.from_numpy(got.reshape(-1)))
        self._done.add(target.name)

    def finish(self, config: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        """Give the file its name; `config` and `files` are in its header since the start.

        Raises:
            UserError: a tensor was never written, or the disk is full.
        """
        missing = sorted(set(self._targets) - self._done)
        if missing:
            raise UserError(f"{len(missing)} tensors were never written, first {missing[0]!r}", fix="export again")
        self._file.finish()

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


def gguf_writer(form: str, name: str = "model.gguf") -> Callable[[Order], GgufWriter]:
    """For `export.merge`'s `writer`: one file `name` of this form in its folder."""
    return lambda order: GgufWriter(order.folder / name, order.targets, form, order.config, order.files)


def _places(arch: GgufArch, targets: Mapping[str, Target], config: Mapping[str, Any]) -> dict[str, Place]:
    architecture = architecture_of(config)
    wanted = set(architecture.tensors())
    if wanted != set(targets):
        missing, stray = sorted(wanted - set(targets)), sorted(set(targets) - wanted)
        what = f"{len(missing)} missing {missing[:2]}, {len(stray)} not known {stray[:2]}"
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
    got = dequantize(raw.reshape(rows.shape[0], -1), of_kind).reshape(rows.shape)
    if place.add:
        got = got - np.float32(place.add)
    return raw, np.ascontiguousarray(unpaired(got, heads) if heads else got)
