"""Names in a quantised checkpoint: which tensors belong together, and which weight they stand for.

bnb       see `bnb.py`
mxfp4     `W_blocks` with `W_scales`; or bytes `W` with e8m0 `M.scale` (DeepSeek-V4)
fp8       weight F8 with a scale: `W_scale_inv`, `W_scale`, `M.scale`, `W.scale`, `M.qscale_weight` (M: W without `.weight`)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella.checkpoint import bnb, fp8, mxfp4
from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.marks import method_of, quantization_of
from lamella.checkpoint.orientation import takes_inputs_first
from lamella.checkpoint.packing import Read
from lamella.errors import UserError

ORIGINAL = "give the bf16, fp16 or fp32 original"
_DAMAGED = "the checkpoint is damaged or not complete: download it again"
_READ_METHODS = ("fp8", "fbgemm_fp8", "mxfp4", "bitsandbytes")
_READ_FORMATS = {"compressed-tensors": ("float-quantized",), "modelopt": ("FP8",)}
_PACKED_DTYPES = ("U8", "I8", "F8_E8M0", *fp8.DTYPES)
_ACTIVATIONS = re.compile(
    r"(^|[._])(input_scale(_ub|_inv)?|activation_scale|output_scale|[qkv]_scale|kv_cache_scale|prob_output_scale|qscale_act)$"
)
"""Scales of what a layer takes and gives, and of caches: no part of a weight."""
_BESIDE = re.compile(r"(_scale_inv|_scale|_scale_2|_global_scale|_zero_point|\.qscale_weight|\.scale)$")


@dataclass(frozen=True)
class Logical:
    """Attributes:
    tensors: as the 16-bit checkpoint would have them.
    notices: what was left out, or found from the files alone.
    """

    tensors: list[TensorInfo]
    notices: tuple[str, ...] = ()


def scale_names(weight: str) -> list[str]:
    """Names that the scale of an FP8 weight may have."""
    module = weight.removesuffix(".weight")
    return list(dict.fromkeys([f"{weight}_scale_inv", f"{weight}_scale", f"{module}.scale", f"{weight}.scale",
                               f"{module}.qscale_weight"]))  # fmt: skip


def refuse_unread(config: Mapping[str, Any], file: Path) -> None:
    """Raises `UserError` where config.json tells of packed weights that are not read."""
    settings = quantization_of(config)
    why = "" if settings is None else unread(settings)
    if why:
        raise UserError(f"the checkpoint is quantised already: {why}", fix=ORIGINAL, path=file)


def unread(settings: Mapping[str, Any]) -> str:
    """Why a way of packing is not read, or ""."""
    method = method_of(settings)
    if method in ("compressed-tensors", "modelopt"):
        said = settings.get("format") if method == "compressed-tensors" else settings.get("quant_algo")
        read = _READ_FORMATS[method]
        return "" if str(said) in read else f"{method} {said!r} is not read, {' and '.join(read)} are"
    if method in ("gptq", "awq"):
        return (
            f"{method} rounds to whole numbers with zero points, which no store's format holds without another rounding"
        )
    return "" if method in _READ_METHODS else f"quant_method {method!r} is not read"


def refuse_packed(tensors: Iterable[TensorInfo]) -> None:
    """Raises `UserError` where something packed is left for which there are no scales."""
    for tensor in tensors:
        if tensor.packing is None and tensor.dtype in _PACKED_DTYPES and len(tensor.shape) >= 2:
            raise UserError(f"tensor {tensor.name!r} is {tensor.dtype}: its weights are quantised in a way that is not read",
                            fix=ORIGINAL, path=tensor.file)  # fmt: skip


def logical_tensors(tensors: Iterable[TensorInfo], config: Mapping[str, Any], read: Read | None) -> Logical:
    """The weights that a checkpoint's tensors stand for.

    Args:
        config: config.json.
        read: reads a tensor's bytes; None where there are headers alone.

    Raises:
        UserError: a packed tensor without its scales, scales without their tensor, shapes that do not go together; each
            with the tensor's name.
    """
    found = {t.name: t for t in tensors}
    settings = quantization_of(config) or {}
    notices: list[str] = []
    if method_of(settings) == "bitsandbytes" or any(bnb.STATE in name for name in found):
        _join_bnb(found, read)
    _join_mxfp4(found, takes_inputs_first(config))
    if any(t.dtype in fp8.DTYPES for t in found.values()):
        _join_fp8(found, settings, notices)
    return Logical(list(found.values()), tuple(notices))


def _join_bnb(found: dict[str, TensorInfo], read: Read | None) -> None:
    beside: dict[str, dict[str, TensorInfo]] = {}
    for name in list(found):
        key = next((k for k in bnb.BESIDE if name.endswith(k)), None)
        owner, state, kind = name.rpartition(bnb.STATE)
        key = state + kind if state else key
        if key is not None:
            beside.setdefault(name.removesuffix(key), {})[key] = found.pop(name)
    for owner, keys in beside.items():
        weight = found.get(owner)
        if weight is None:
            first = next(iter(keys.values()))
            raise UserError(f"{_where(owner)}: {first.name!r} has no tensor {owner!r}", fix=_DAMAGED, path=first.file)
        if read is None:
            raise UserError(f"shapes of 4-bit weights ({owner}) lie in their quant_state, not in the headers",
                            fix="download the checkpoint and give its folder", path=weight.file)  # fmt: skip
        found[owner] = bnb.pack_4bit(weight, keys, _where(owner), read)
    for name in [n for n in found if n.endswith(".weight_format")]:
        _check_row_format(found.pop(name), read)
    for weight in [t for t in found.values() if t.dtype in ("I8", "U8") and t.packing is None and len(t.shape) >= 2]:
        scale = found.pop(f"{weight.name.removesuffix('.weight')}.SCB", None)
        if scale is None:
            lacks = (
                f"{weight.name}{bnb.STATE}nf4" if weight.dtype == "U8" else weight.name.removesuffix(".weight") + ".SCB"
            )
            what = f"{_where(weight.name)}: {weight.dtype} tensor {weight.name!r} lacks {lacks}"
            raise UserError(what, fix=_DAMAGED, path=weight.file)
        found[weight.name] = bnb.pack_8bit(weight, scale, _where(weight.name))
    for name, scale in found.items():
        if name.endswith(".SCB"):
            what = f"{_where(name)}: {name!r} has no int8 tensor {name.removesuffix('.SCB')}.weight"
            raise UserError(what, fix=_DAMAGED, path=scale.file)


def _check_row_format(tensor: TensorInfo, read: Read | None) -> None:
    """bitsandbytes before 0.43 also wrote columns in tiles."""
    raw = bytearray(tensor.nbytes)
    if read is not None:
        read(tensor, 0, memoryview(raw))
    if any(raw):
        raise UserError(f"{tensor.name!r} is {raw[0]}: int8 weights in another order than rows (0) are not read",
                        fix="save the checkpoint again with a newer bitsandbytes", path=tensor.file)  # fmt: skip


def _where(name: str) -> str:
    """`layer 3`, or what stands for it."""
    number = next((part for part in name.split(".") if part.isdigit()), None)
    return "outside the layers" if number is None else f"layer {number}"


def _join_mxfp4(found: dict[str, TensorInfo], swapped: bool) -> None:
    for blocks in [t for t in found.values() if t.name.endswith("_blocks") and t.dtype == "U8"]:
        name = blocks.name.removesuffix("_blocks")
        scales = found.pop(f"{name}_scales", None)
        if scales is None:
            raise UserError(f"MXFP4 tensor {blocks.name!r} has no {name}_scales", fix=_DAMAGED, path=blocks.file)
        if name in found:
            raise UserError(f"tensor {name!r} is stored twice: also as {blocks.name}", fix=_DAMAGED, path=blocks.file)
        del found[blocks.name]
        found[name] = mxfp4.pack(name, blocks, scales, swapped)
    for tensor in [t for t in found.values() if t.dtype == "I8" and len(t.shape) >= 2]:
        scale = next((found[n] for n in scale_names(tensor.name) if n in found), None)
        if scale is not None and scale.dtype == "F8_E8M0":
            found[tensor.name] = mxfp4.pack_flat(tensor, found.pop(scale.name))
    for scales in found.values():
        if scales.name.endswith("_scales") and scales.dtype == "U8":
            what = f"scales {scales.name!r} have no {scales.name.removesuffix('_scales')}_blocks"
            raise UserError(what, fix=_DAMAGED, path=scales.file)


def _join_fp8(found: dict[str, TensorInfo], settings: Mapping[str, Any], notices: list[str]) -> None:
    declared = fp8.declared_block(settings)
    activations = [n for n in found if _ACTIVATIONS.search(n)]
    for name in activations:
        del found[name]
    if activations:
        notices.append(f"left out: {len(activations)} scales of activations and caches, first {activations[0]}")
    derived = set[str]()
    for weight in [t for t in found.values() if t.dtype in fp8.DTYPES]:
        if weight.name.endswith("_scale"):
            raise UserError(f"scales {weight.name!r} are FP8: values of 4 bits with such scales (NVFP4) are not read",
                            fix=ORIGINAL, path=weight.file)  # fmt: skip
        names = [n for n in scale_names(weight.name) if n in found]
        if len(names) != 1:
            tried = f"no scale (looked for {', '.join(scale_names(weight.name))})"
            what = f"two scales: {', '.join(names)}" if names else tried
            raise UserError(f"FP8 tensor {weight.name!r} has {what}", fix=_DAMAGED, path=weight.file)
        made = fp8.pack(weight, found.pop(names[0]), declared)
        found[weight.name] = made
        assert made.packing is not None
        blocks = made.packing.settings["blocks"]
        if declared is None and any(1 < block < size for block, size in zip(blocks, made.shape, strict=True)):
            derived.add(" x ".join(map(str, blocks[-2:])))
    if derived:
        notices.append(
            f"config.json has no weight_block_size: FP8 blocks of {', '.join(sorted(derived))} follow from the scales"
        )
    _refuse_left_over(found)


def _refuse_left_over(found: Mapping[str, TensorInfo]) -> None:
    """No scale may be without its weight; one that has neither a weight beside it nor a scale's full name is a parameter."""
    for name, tensor in found.items():
        match = _BESIDE.search(name)
        if match is None:
            continue
        before = name[: match.start()]
        owner = found.get(f"{before}.weight") or found.get(before)
        if owner is None and match[0] in (".scale", "_scale") and not before.endswith("weight"):
            continue
        told = f"stands beside {owner.name!r}, which is {owner.dtype}" if owner else "has no weight"
        raise UserError(f"scale {name!r} {told}", fix=_DAMAGED, path=tensor.file)
