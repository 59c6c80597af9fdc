"""Writers of merged models: each takes tensors under the checkpoint's names and shapes, in any order, in pieces.

    writer = PlainWriter(folder, targets, "bf16")     # every name and shape is known before the first value
    writer.nbytes                                     # what it will take on disk
    writer.tensor(target, source)                     # once per target
    writer.finish(config, files)                      # config.json, index, small files

A source fills buffers of the writer's choice (`values`), as often as it is asked; the writer tells it what a reader of the
file will get (`stored`), so that what rounding does to a weight is measured and not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from lamella.checkpoint.facts import TensorClass

PIECE_VALUES = 4 << 20
"""Values that a writer asks for at a time: about this many, in whole rows or blocks; 16 MiB as fp32."""


@dataclass(frozen=True)
class Target:
    """One tensor of the merged model.

    Attributes:
        name, shape: the checkpoint's.
        dtype: of its values in the source, by torch's name ("bfloat16").
        tensor_class: see `checkpoint.facts`.
        module: full name of the linear layer or expert module of the model that holds it; None for any other.
        linear: it is the weight of a linear layer, or of one expert stored as such: a matrix [out, in] that block-wise
            formats can take.
        wide: fp32 values of a checkpoint whose others have 16 bits (a router's correction): they stay fp32.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tensor_class: TensorClass
    module: str | None = None
    linear: bool = False
    wide: bool = False

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


class Source(Protocol):
    """The values of one tensor."""

    def values(self, first: int, out: Tensor) -> None:
        """Fill `out` (fp32, flat) with the values from `first` on, row-major over the target's shape.

        `first` is a multiple of 4096 or of the target's last dimension.
        """

    def stored(self, first: int, got: Tensor) -> None:
        """Told what a reader of the file gets for values `first` .. (fp32, flat): each value once, in any order."""

    def nf4_parts(self, block_size: int) -> Mapping[str, Tensor] | None:
        """The tensor's own NF4 bytes (`store.manifest`'s parts, double quantised), where they are still what it is; else None."""


class ModelWriter(Protocol):
    """What `export.merge` writes through.

    Attributes:
        nbytes: bytes that all its files will take.
        notices: what the user must know about this form (weights left in 16 bit and why).
    """

    nbytes: int
    notices: list[str]

    def tensor(self, target: Target, source: Source) -> None:
        """Write one tensor, in pieces."""

    def finish(self, config: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        """Write what belongs to the weights.

        Args:
            config: config.json of the plain model, without `quantization_config`.
            files: name -> file to copy (tokenizer, chat template, generation config, licence).

        Raises:
            UserError: a tensor was never written; the disk is full.
        """
