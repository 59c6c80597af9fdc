"""NF4 as bitsandbytes writes it, loaded by transformers without a second quantisation.

A weight `x.weight` [O, I] of n values becomes

    x.weight                                  uint8 [n / 2, 1]: codes, high nibble first, blocks of 64
    x.weight.absmax                           uint8 [n / 64]: scales in 8 bits
    x.weight.quant_map                        fp32 [16]: NF4's table
    x.weight.nested_absmax                    fp32 [n / 64 / 256]
    x.weight.nested_quant_map                 fp32 [256]
    x.weight.quant_state.bitsandbytes__nf4    uint8: JSON with shape, dtype, block sizes, the scales' mean

Weights of a store that nothing was added to keep their own codes and scales. Merged ones are rounded again, which eats what
an adapter did wherever it is smaller than NF4's steps.

transformers 5 fuses experts into one parameter, which bitsandbytes has no layer for: they stay in 16 bit unless asked for
(`experts=True`: one weight an expert, as vLLM reads them and transformers 4 wrote them).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lamella.errors import UserError
from lamella.export.writers import PIECE_VALUES, Source, Target
from lamella.export.writers.plain import CONFIG_DTYPE, PlainWriter
from lamella.export.writers.shards import SHARD_BYTES, Item
from lamella.kernels import AbsmaxState, dequantize_absmax, dequantize_nf4, quantize_absmax, quantize_nf4
from lamella.kernels.layout import ABSMAX_BLOCK, NF4_TABLE

BLOCK = 64
_STATE = "quant_state.bitsandbytes__nf4"
_OFFSET_CHARS = 32
"""Room for the number that is not known before the values are; JSON may end in spaces."""


class Nf4Writer(PlainWriter):
    """See the module. Further args: experts: weights of single experts in NF4 too."""

    form: ClassVar[str] = "nf4"

    def __init__(
        self,
        folder: Path,
        targets: Sequence[Target],
        dtype: str,
        *,
        head: str = "lm_head",
        shard_bytes: int = SHARD_BYTES,
        finished: Callable[[Path], None] | None = None,
        experts: bool = False,
    ) -> None:
        self.experts = experts
        super().__init__(folder, targets, dtype, head=head, shard_bytes=shard_bytes, finished=finished)
        left = [t for t in targets if t.tensor_class == "experts" and not self.takes(t)]
        if left:
            self.notices.append(
                f"{len(left)} weights of experts stay in {dtype}: transformers and bitsandbytes have no 4-bit layer for fused "
                "experts"
            )

    def takes(self, target: Target) -> bool:
        """Whether a tensor is written in NF4."""
        named = target.tensor_class in ("attention", "mlp") or (self.experts and target.tensor_class == "experts")
        return named and target.linear and len(target.shape) == 2 and target.numel % 2 == 0

    def items(self, target: Target) -> list[Item]:
        if not self.takes(target):
            return [self.plain_item(target)]
        name, blocks = target.name, -(-target.numel // BLOCK)
        return [
            Item(name, "U8", (target.numel // 2, 1)),
            Item(f"{name}.absmax", "U8", (blocks,)),
            Item(f"{name}.quant_map", "F32", (16,)),
            Item(f"{name}.nested_absmax", "F32", (-(-blocks // ABSMAX_BLOCK),)),
            Item(f"{name}.nested_quant_map", "F32", (256,)),
            Item(f"{name}.{_STATE}", "U8", (len(self._state(target, 0.0)),)),
        ]

    def tensor(self, target: Target, source: Source) -> None:
        if not self.takes(target):
            self.write_plain(target, source)
            return
        own = source.nf4_parts(BLOCK)
        if own is not None:
            state = AbsmaxState(own["absmax_q"], own["absmax_code"], own["absmax2"], own["offset"].view(()))
            self._write(target, own["codes"], state)
            return
        n = target.numel
        codes = torch.empty(n // 2, dtype=torch.uint8)
        absmax = torch.empty(-(-n // BLOCK))
        for first, count in _pieces(n):
            values = self.buffer(count)
            source.values(first, values)
            try:
                quantize_nf4(values, BLOCK, codes=codes[first // 2 : (first + count) // 2],
                             absmax=absmax[first // BLOCK : -(-(first + count) // BLOCK)])  # fmt: skip
            except UserError as error:
                raise UserError(f"{target.name}: {error.what}", fix=error.fix) from error
        state = quantize_absmax(absmax)
        self._write(target, codes, state)
        scales = dequantize_absmax(state)
        for first, count in _pieces(n):
            got = torch.empty(count)
            dequantize_nf4(
                codes[first // 2 : (first + count) // 2],
                scales[first // BLOCK : -(-(first + count) // BLOCK)],
                got,
                BLOCK,
            )
            source.stored(first, got)

    def _write(self, target: Target, codes: Tensor, state: AbsmaxState) -> None:
        parts: dict[str, Tensor | bytes] = {
            "": codes, ".absmax": state.q, ".quant_map": torch.tensor(NF4_TABLE), ".nested_absmax": state.absmax2,
            ".nested_quant_map": state.code, f".{_STATE}": self._state(target, float(state.offset)),
        }  # fmt: skip
        for part, data in parts.items():
            self.files.write(target.name + part, 0, data)

    def _state(self, target: Target, offset: float) -> bytes:
        told = {
            "quant_type": "nf4", "blocksize": BLOCK, "dtype": CONFIG_DTYPE[self.dtype], "shape": list(target.shape),
            "nested_blocksize": ABSMAX_BLOCK, "nested_dtype": "float32",
        }  # fmt: skip
        text = json.dumps(told)[:-1] + ', "nested_offset": '
        number = repr(offset)
        return (text + number + "}").ljust(len(text) + _OFFSET_CHARS).encode()

    def quantization_config(self) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": CONFIG_DTYPE[self.dtype],
            "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": self.modules_left(self.takes),
            "llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False, "llm_int8_enable_fp32_cpu_offload": False,
        }  # fmt: skip


def _pieces(n: int) -> list[tuple[int, int]]:
    return [(first, min(PIECE_VALUES, n - first)) for first in range(0, n, PIECE_VALUES)]
