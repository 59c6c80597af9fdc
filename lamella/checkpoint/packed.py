"""Checkpoints whose weights are quantised already: the weights behind packed bytes and scales, and what they take on disk.

fp8                 F8 weight [O, I] with `_scale_inv` or `_scale` beside it (DeepSeek-V3: one fp32 per 128 x 128)
mxfp4               `_blocks` uint8 [E, O, I / 32, 16], `_scales` uint8 [E, O, I / 32] (GPT-OSS); its weight is [E, I, O]
compressed-tensors  `weight_packed` int32 [O, I * bits / 32] or uint8 [O, I / 2], `weight_scale`, `weight_shape`
gptq, awq           `qweight` int32 [I * bits / 32, O] or [I, O * bits / 32], `qzeros`, `scales`, `g_idx`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from lamella.checkpoint.facts import text_config
from lamella.checkpoint.header import TensorInfo
from lamella.errors import UserError

METHODS = ("fp8", "mxfp4", "compressed-tensors", "gptq", "awq")
_SIDE = re.compile(
    r"(_scale_inv|_scale|_scale_2|_scales|_zero_point|_global_scale|_shape|_g_idx|\.input_scale|\.activation_scale|\.output_scale)$"
)
_BESIDE_QWEIGHT = (".qzeros", ".scales", ".g_idx")
_PACKED = ("F8_E4M3", "F8_E5M2")


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """config.json's `quantization_config`, or None."""
    for tree in (config, text_config(config)):
        settings = tree.get("quantization_config") or tree.get("compression_config")
        if isinstance(settings, Mapping) and settings:
            return settings
    return None


def method_of(settings: Mapping[str, Any]) -> str:
    return str(settings.get("quant_method") or "unknown")


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


def unpacked(tensors: Iterable[TensorInfo], config: Mapping[str, Any]) -> list[TensorInfo]:
    """The weights that a checkpoint's tensors stand for, as bf16 tensors of their real shape; `nbytes` stays what they and
    their scales take on disk.

    Raises:
        UserError: a way of packing that is not known.
    """
    found = list(tensors)
    settings = quantization_of(config)
    if settings is None:
        return found
    method = method_of(settings)
    if method not in METHODS:
        raise UserError(f"weights are packed by quant_method {method!r}, which is not read",
                        fix="give the original 16-bit model, or one in " + ", ".join(METHODS))  # fmt: skip
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
    if method == "mxfp4" and name.endswith("_blocks") and len(shape) == 4:
        experts, rows, blocks, half = shape
        return replace(
            tensor, name=name.removesuffix("_blocks"), shape=(experts, blocks * half * 2, rows), dtype="BF16"
        )
    if method == "compressed-tensors" and name.endswith("weight_packed"):
        each = 2 if tensor.dtype == "U8" else 32 // bits_of(settings)
        return replace(tensor, name=name.removesuffix("_packed"), shape=(*shape[:-1], shape[-1] * each), dtype="BF16")
    if method in ("gptq", "awq") and name.endswith(".qweight"):
        each = 32 // bits_of(settings)
        inputs, outputs = (shape[0] * each, shape[1]) if method == "gptq" else (shape[0], shape[1] * each)
        return replace(tensor, name=name.removesuffix(".qweight") + ".weight", shape=(outputs, inputs), dtype="BF16")
    if tensor.dtype in _PACKED:
        return replace(tensor, dtype="BF16")
    return tensor


@dataclass(frozen=True)
class DiskRule:
    """What tensors take in a checkpoint of a config.json.

    Attributes:
        weight: bytes of a packed weight of this shape; None: nothing is packed.
        left_out: names of modules that stay in 16 bit, or parts of names; patterns: the same as patterns.
        only_experts: linear weights of two dimensions stay as they are.
        note: what is not known, or "".
    """

    weight: Callable[[tuple[int, ...]], int] | None = None
    left_out: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    only_experts: bool = False
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
    if method not in METHODS:
        return DiskRule(
            note=f"quant_method {method!r}: bytes of the checkpoint are counted as if it were not quantised"
        )
    listed = [str(n) for n in settings.get("modules_to_not_convert") or settings.get("ignore") or ()]
    plain = frozenset(n for n in listed if "*" not in n and not n.startswith("re:"))
    patterns = tuple(_pattern(n) for n in listed if n not in plain)
    return DiskRule(_weight_bytes(method, settings), plain, patterns, method == "mxfp4")


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
    bits = bits_of(settings)
    group = settings.get("group_size") or _group_size(settings) or 128
    zeros = bits / 8 / group if method in ("gptq", "awq") else 0.0
    return lambda shape: round(prod(shape) * (bits / 8 + 2 / group + zeros))


def _group_size(settings: Mapping[str, Any]) -> int | None:
    groups = settings.get("config_groups")
    for part in groups.values() if isinstance(groups, Mapping) else ():
        weights = part.get("weights") if isinstance(part, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("group_size"):
            return int(weights["group_size"])
    return None
