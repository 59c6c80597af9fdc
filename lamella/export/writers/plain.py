"""safetensors folders in bf16, fp16 or fp32, as transformers, vLLM and SGLang load them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lamella.errors import UserError
from lamella.export.writers import PIECE_VALUES, Source, Target
from lamella.export.writers.shards import SHARD_BYTES, Item, Shards
from lamella.files import fsync_path, write_json

DTYPES = {"bf16": (torch.bfloat16, "BF16"), "fp16": (torch.float16, "F16"), "fp32": (torch.float32, "F32")}
CONFIG_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class PlainWriter:
    """Weights in one dtype; `Target.wide` ones stay in fp32.

    Args:
        folder: exists and is empty but for marks.
        targets: every tensor of the model, in the order in which they come.
        dtype: "bf16", "fp16" or "fp32".
        head: full name of the model's output layer.
        shard_bytes, finished: see `Shards`.
    """

    form: ClassVar[str] = "plain"

    def __init__(
        self,
        folder: Path,
        targets: Sequence[Target],
        dtype: str,
        *,
        head: str = "lm_head",
        shard_bytes: int = SHARD_BYTES,
        finished: Callable[[Path], None] | None = None,
    ) -> None:
        self.folder, self.targets, self.dtype, self.head = folder, targets, dtype, head
        self.notices: list[str] = []
        self.files = Shards(folder, [item for t in targets for item in self.items(t)], shard_bytes, finished)
        self.nbytes = self.files.nbytes
        self._buffer = torch.empty(0)

    # ---- what a form decides ----------------------------------------------------------------------

    def items(self, target: Target) -> list[Item]:
        """The tensors of the files that stand for a target."""
        return [self.plain_item(target)]

    def tensor(self, target: Target, source: Source) -> None:
        self.write_plain(target, source)

    def quantization_config(self) -> dict[str, Any] | None:
        return None

    # ---- what all share ---------------------------------------------------------------------------

    def plain_item(self, target: Target) -> Item:
        return Item(target.name, "F32" if target.wide else DTYPES[self.dtype][1], target.shape)

    def write_plain(self, target: Target, source: Source) -> None:
        dtype = torch.float32 if target.wide else DTYPES[self.dtype][0]
        for first in range(0, target.numel, PIECE_VALUES):
            values = self.buffer(min(PIECE_VALUES, target.numel - first))
            source.values(first, values)
            rounded = values.to(dtype)
            if dtype == torch.float16 and not bool(torch.isfinite(rounded).all()):
                raise UserError(f"{target.name} holds values of up to {float(values.abs().max()):.3g}; fp16 ends at 65504",
                                fix="write bf16 or fp32")  # fmt: skip
            self.files.write(target.name, first * dtype.itemsize, rounded)
            source.stored(first, rounded.float())

    def buffer(self, count: int) -> Tensor:
        """fp32 [count], of one memory for all tensors."""
        if self._buffer.numel() < count:
            self._buffer = torch.empty(count)
        return self._buffer[:count]

    def finish(self, config: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        self.files.finish()
        plain = {key: value for key, value in config.items() if key not in ("torch_dtype", "quantization_config")}
        plain["dtype"] = CONFIG_DTYPE[self.dtype]
        settings = self.quantization_config()
        if settings is not None:
            plain["quantization_config"] = settings
        write_json(self.folder / "config.json", plain, indent=2)
        for name, file in files.items():
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            fsync_path(target)

    def abandon(self) -> None:
        self.files.abandon()

    def modules_left(self, taken: Callable[[Target], bool]) -> list[str]:
        """Linear layers and expert modules of which no weight is `taken`, and the head."""
        packed = {t.module for t in self.targets if taken(t)}
        left = {t.module for t in self.targets if t.module is not None} - packed
        return sorted(m for m in left | {self.head} if m is not None)
