"""Checkpoints whose weights are quantised already, for forecasts: how many weights there are, and what they take on disk.

What can be read is told by `logical.py`. These are counted alone:

compressed-tensors  `weight_packed` int32 [O, I * bits / 32] or uint8 [O, I / 2], `weight_scale`, `weight_shape`
gptq, awq           `qweight` int32 [I * bits / 32, O] or [I, O * bits / 32], `qzeros`, `scales`, `g_idx`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from lamella.checkpoint.fp8 import DTYPES
from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.logical import ORIGINAL, logical_tensors, unread
from lamella.checkpoint.marks import method_of, quantization_of
from lamella.checkpoint.packing import Read
from lamella.errors import UserError

COUNTED = ("compressed-tensors", "gptq", "awq")
"""Ways that are not read, whose weights can be counted."""
_SIZED = ("fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes", *COUNTED)
_LEFT_OUT = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules")
_SIDE = re.compile(
    r"(_scale|_scale_2|_zero_point|_global_scale|_shape|_g_idx|\.input_scale|\.activation_scale|\.output_scale)$"
)
_BESIDE_QWEIGHT = (".qzeros", ".scales", ".g_idx")


def bits_of(settings: Mapping[str, Any]) -> int:
    """Bits of a packed weight: `bits`, or of the first group of weights."""
    groups = settings.get("config_groups")
    found = settings.get("bits")
    if isinstance(groups, Mapping):
        weights = [g.get("weights") for g in groups.values() if isinstance(g, Mapping)]
        found = next((w.get("num_bits") for w in weights if isinstance(w, Mapping)), found)
    if type(found) is not int or found < 1 or 32 % found:
        raise UserError(f"quantization_config says {found!r} bits a weight", fix="give the original 16-bit model")
    return found


def unpacked(tensors: Iterable[TensorInfo], config: Mapping[str, Any], read: Read | None = None) -> list[TensorInfo]:
    """The weights that a checkpoint's tensors stand for, as tensors of their real shape and dtype; `nbytes` is what they and
    their scales take on disk. Also of ways that are only counted here, never read.

    Raises:
        UserError: a way of packing that is not known; see `logical_tensors`.
    """
    found = list(tensors)
    settings = quantization_of(config)
    why = "" if settings is None else unread(settings)
    if settings is None or not why:
        return logical_tensors(found, config, read).tensors
    method = method_of(settings)
    if method not in COUNTED:
        raise UserError(f"weights are packed: {why}", fix=ORIGINAL)
    weights: dict[str, TensorInfo] = {}
    beside: list[tuple[str, TensorInfo]] = []
    for tensor in found:
        owner = _owner(tensor.name, method)
        if owner is None:
            real = _unpack(tensor, method, settings)
            weights[real.name] = real
        else:
            beside.append((owner, tensor))
    for owner, tensor in beside:
        weight = weights.get(owner)
        if weight is None:
            weights[tensor.name] = tensor
        else:
            weights[owner] = replace(weight, nbytes=weight.nbytes + tensor.nbytes)
    return list(weights.values())


def _owner(name: str, method: str) -> str | None:
    """The weight that a scale belongs to, or None for what is a tensor of its own."""
    if method in ("gptq", "awq"):
        end = next((s for s in _BESIDE_QWEIGHT if name.endswith(s)), None)
        return None if end is None else name.removesuffix(end) + ".weight"
    match = _SIDE.search(name)
    if match is None:
        return None
    before = name[: match.start()]
    return f"{before}.weight" if match[0].startswith(".") else before


def _unpack(tensor: TensorInfo, method: str, settings: Mapping[str, Any]) -> TensorInfo:
    name, shape = tensor.name, tensor.shape
    if method == "compressed-tensors" and name.endswith("weight_packed"):
        each = 2 if tensor.dtype == "U8" else 32 // bits_of(settings)
        return replace(tensor, name=name.removesuffix("_packed"), shape=(*shape[:-1], shape[-1] * each), dtype="BF16")
    if method in ("gptq", "awq") and name.endswith(".qweight"):
        each = 32 // bits_of(settings)
        inputs, outputs = (shape[0] * each, shape[1]) if method == "gptq" else (shape[0], shape[1] * each)
        return replace(tensor, name=name.removesuffix(".qweight") + ".weight", shape=(outputs, inputs), dtype="BF16")
    return tensor if tensor.dtype not in DTYPES else replace(tensor, dtype="BF16")


@dataclass(frozen=True)
class DiskRule:
    """What tensors take in a checkpoint of a config.json.

    Attributes:
        weight: bytes of a packed weight of this shape; None: nothing is packed.
        left_out: names of modules that stay in 16 bit, or parts of names; patterns: the same as patterns.
        method: of packing, or "".
        only_experts: linear weights of two dimensions stay as they are.
        note: what is not known, or "".
    """

    weight: Callable[[tuple[int, ...]], int] | None = None
    left_out: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    only_experts: bool = False
    method: str = ""
    note: str = ""

    @property
    def by_layer(self) -> bool:
        """Whether layers that are alike may differ on disk."""
        return any(part.isdigit() for name in self.left_out for part in name.split(".")) or bool(self.patterns)

    def nbytes(self, name: str, shape: tuple[int, ...], is_linear: bool, item: int) -> int:
        """Of one tensor.

        Args:
            name: in full; is_linear: a weight that a packed layer would pack; item: bytes of an element otherwise.
        """
        if self.weight is None or not is_linear or (self.only_experts and len(shape) != 3) or self._stays(name):
            return prod(shape) * item
        return self.weight(shape)

    def _stays(self, name: str) -> bool:
        parts = name.split(".")
        if not self.left_out.isdisjoint(parts):
            return True
        if any(".".join(parts[:n]) in self.left_out for n in range(2, len(parts) + 1)):
            return True
        return any(pattern.match(name) for pattern in self.patterns)


def disk_rule(config: Mapping[str, Any]) -> DiskRule:
    """How a checkpoint with this config.json holds its weights."""
    settings = quantization_of(config)
    if settings is None:
        return DiskRule()
    method = method_of(settings)
    if method not in _SIZED:
        return DiskRule(
            note=f"quant_method {method!r}: bytes of the checkpoint are counted as if it were not quantised"
        )
    named = next((settings[key] for key in _LEFT_OUT if settings.get(key)), ())
    listed = [str(n) for n in named]
    plain = frozenset(n for n in listed if "*" not in n and not n.startswith("re:"))
    patterns = tuple(_pattern(n) for n in listed if n not in plain)
    return DiskRule(_weight_bytes(method, settings), plain, patterns, method == "mxfp4", method)


def _pattern(listed: str) -> re.Pattern[str]:
    """`re:` and an expression, or a name in which `*` stands for a part."""
    if not listed.startswith("re:"):
        return re.compile(re.escape(listed).replace(r"\*", "[^.]*"))
    try:
        return re.compile(listed[3:])
    except re.error as error:
        raise UserError(
            f"quantization_config: {listed!r} is no expression: {error}", fix="correct config.json"
        ) from error


def _weight_bytes(method: str, settings: Mapping[str, Any]) -> Callable[[tuple[int, ...]], int]:
    if method == "mxfp4":
        return lambda shape: prod(shape) // 2 + prod(shape) // 32
    if method == "fp8":
        block = settings.get("weight_block_size")
        if isinstance(block, list) and len(block) == 2:
            rows, columns = block
            return lambda shape: prod(shape) + 4 * prod(shape[:-2]) * ceil(shape[-2] / rows) * ceil(shape[-1] / columns)
        return lambda shape: prod(shape) + 4
    if method == "fbgemm_fp8":
        return lambda shape: prod(shape) + 4 * prod(shape[:-1])
    if method == "bitsandbytes":
        return _bnb_bytes(settings)
    bits = bits_of(settings)
    group = settings.get("group_size") or _group_size(settings) or 128
    zeros = bits / 8 / group if method in ("gptq", "awq") else 0.0
    return lambda shape: round(prod(shape) * (bits / 8 + 2 / group + zeros))


def _bnb_bytes(settings: Mapping[str, Any]) -> Callable[[tuple[int, ...]], int]:
    """8-bit: a scale per row. 4-bit: blocks of 64, maps of 16 and 256 numbers, a `quant_state` of about 80 or 170 bytes."""
    if not settings.get("load_in_4bit"):
        return lambda shape: prod(shape) + 4 * prod(shape[:-1])
    nested = bool(settings.get("bnb_4bit_use_double_quant"))

    def nbytes(shape: tuple[int, ...]) -> int:
        blocks = ceil(prod(shape) / 64)
        scales = blocks + 4 * ceil(blocks / 256) + 1024 + 170 if nested else 4 * blocks + 80
        return ceil(prod(shape) / 2) + scales + 64

    return nbytes


def _group_size(settings: Mapping[str, Any]) -> int | None:
    groups = settings.get("config_groups")
    for part in groups.values() if isinstance(groups, Mapping) else ():
        weights = part.get("weights") if isinstance(part, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("group_size"):
            return int(weights["group_size"])
    return None
