"""Block-scaled FP8 as DeepSeek-V3 and Qwen3-FP8 checkpoints have it (transformers' `quant_method` fp8).

A weight [O, I] is F8_E4M3, and `<name>_scale_inv` fp32 [O / 128, I / 128] beside it: value = code * scale, scale = the
block's largest magnitude / 448. Norms, routers, embeddings, head and biases stay in 16 bit.

Readers divide a weight's sides by its scales' sides (transformers) or want whole blocks (vLLM), so a weight whose sides are
neither whole blocks nor a single one stays in 16 bit, as do experts stored as one 3-D tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lamella.errors import UserError
from lamella.export.writers import PIECE_VALUES, Source, Target
from lamella.export.writers.plain import PlainWriter
from lamella.export.writers.shards import SHARD_BYTES, Item

BLOCK = 128
LARGEST = 448.0
"""Largest magnitude of e4m3fn."""


def _whole(side: int) -> bool:
    return side <= BLOCK or side % BLOCK == 0


def takes_fp8(target: Target) -> bool:
    """Whether a tensor is written in FP8."""
    named = target.tensor_class in ("attention", "mlp", "experts")
    return named and target.linear and len(target.shape) == 2 and all(_whole(side) for side in target.shape)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [R, C], R and C as `takes_fp8` wants them, to (e4m3fn [R, C], scales fp32 [R / 128, C / 128])."""
    rows, columns = x.shape
    high, wide = min(BLOCK, rows), min(BLOCK, columns)
    blocks = x.view(rows // high, high, columns // wide, wide)
    scale = blocks.abs().amax((1, 3)) / LARGEST
    scale = torch.where(scale == 0, torch.ones(()), scale)  # NaN stays and is found
    return (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn), scale


def dequantize_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 [R, C]; codes are finite.

    e4m3's bits, sign kept and the rest moved into fp16's fields, are its value / 256, subnormals too: much faster than torch's
    conversion on a CPU.
    """
    (rows, columns), (down, across) = codes.shape, scale.shape
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    blocks = bits.view(torch.float16).float().view(down, rows // down, across, columns // across)
    return blocks.mul_(256 * scale[:, None, :, None]).view(rows, columns)


class Fp8Writer(PlainWriter):
    """See the module, and `PlainWriter`; `dtype` is of what stays in 16 or 32 bit."""

    form: ClassVar[str] = "fp8"

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
        super().__init__(folder, targets, dtype, head=head, shard_bytes=shard_bytes, finished=finished)
        left = [t for t in targets if t.tensor_class in ("attention", "mlp", "experts") and not takes_fp8(t)]
        if left:
            self.notices.append(
                f"{len(left)} weights stay in {dtype}, first {left[0].name} {list(left[0].shape)}: FP8 takes matrices of whole "
                f"blocks of {BLOCK}"
            )

    def items(self, target: Target) -> list[Item]:
        if not takes_fp8(target):
            return [self.plain_item(target)]
        scales = tuple(-(-side // BLOCK) for side in target.shape)
        return [Item(target.name, "F8_E4M3", target.shape), Item(f"{target.name}_scale_inv", "F32", scales)]

    def tensor(self, target: Target, source: Source) -> None:
        if not takes_fp8(target):
            self.write_plain(target, source)
            return
        rows, columns = target.shape
        step = max(BLOCK, PIECE_VALUES // columns // BLOCK * BLOCK)
        across = -(-columns // BLOCK)
        for row in range(0, rows, step):
            values = self.buffer(min(step, rows - row) * columns)
            source.values(row * columns, values)
            codes, scale = quantize_fp8(values.view(-1, columns))
            if not bool(torch.isfinite(scale).all()):
                raise UserError(f"{target.name} holds NaN or infinite values", fix="repair the store or the adapter")
            self.files.write(target.name, row * columns, codes)
            self.files.write(f"{target.name}_scale_inv", 4 * (row // BLOCK) * across, scale)
            source.stored(row * columns, dequantize_fp8(codes, scale).view(-1))

    def quantization_config(self) -> dict[str, Any]:
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": self.modules_left(takes_fp8),
        }  # fmt: skip
