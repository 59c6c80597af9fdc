"""Rotary embeddings between GGUF's metadata and config.json's `rope_parameters`.

llama.cpp keeps Llama 3's and Phi-3's scaling not as numbers but as tensors of divisors, one per pair of dimensions:
`rope_freqs`, and `rope_factors_short`, `rope_factors_long`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamella.checkpoint.gguf_archs import GgufArch
from lamella.checkpoint.gguf_header import GgufHeader
from lamella.errors import UserError

FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FREQS, LONG, SHORT)
_FULL_HEAD = "give the Hugging Face checkpoint"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every published Llama 3 model; the file has the outcome alone."""
GEMMA3_LOCAL = 10000.0
"""Base of gemma3's layers with a window, where a file does not say it."""


def rope_parameters(
    arch: GgufArch, header: GgufHeader, config: Mapping[str, Any], size: int, path: Path
) -> dict[str, Any]:
    """`rope_parameters` of a model whose heads have `size` dimensions.

    Raises:
        UserError: scaling that transformers' configs cannot say.
    """
    found = _scaled(arch, header, config, path)
    if "partial_rotary_factor" in config:
        found["partial_rotary_factor"] = config["partial_rotary_factor"]
    if FREQS in header.tensors:
        if found["rope_type"] != "default":
            raise UserError(f"has {FREQS} and scaling of type {found['rope_type']}", fix=_FULL_HEAD, path=path)
        found |= _llama3(_floats(header, FREQS), found["rope_theta"], size, path)
    if arch.model_type == "gemma3_text":
        local = float(header.get("rope.freq_base_swa", GEMMA3_LOCAL))
        return {"full_attention": found, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    return found


def _scaled(arch: GgufArch, header: GgufHeader, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    kind = header.get("rope.scaling.type", "none")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": float(header.get("rope.freq_base", 10000.0))}
    factor = header.get("rope.scaling.factor") or header.get("rope.scale_linear")
    odd = [
        key
        for key in ("yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier")
        if header.get(f"rope.scaling.{key}")
    ]
    if odd:
        raise UserError(f"rotary scaling has {odd[0]}, which is not read", fix=_FULL_HEAD, path=path)
    if kind == "longrope" or LONG in header.tensors:
        return found | _longrope(header, config, path)
    if kind == "none" and factor in (None, 1.0):
        return found
    original = header.get("rope.scaling.original_context_length")
    if kind in ("none", "linear") and factor:
        return found | {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn" and factor and original:
        found |= {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": int(original)}
        betas = {b: header.get(f"rope.scaling.yarn_{b}") for b in ("beta_fast", "beta_slow")}
        return found | {b: value for b, value in betas.items() if value is not None}
    raise UserError(f"rotary scaling of type {kind!r} (factor {factor!r}) is not read", fix=_FULL_HEAD, path=path)


def _longrope(header: GgufHeader, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    original = header.get("rope.scaling.original_context_length")
    if not original or LONG not in header.tensors or SHORT not in header.tensors:
        raise UserError("rotary scaling is longrope, but factors or original_context_length are missing", path=path,
                        fix=_FULL_HEAD)  # fmt: skip
    found = {"rope_type": "longrope", "original_max_position_embeddings": int(original),
             "long_factor": _floats(header, LONG), "short_factor": _floats(header, SHORT),
             "factor": config["max_position_embeddings"] / original}  # fmt: skip
    said = header.get("rope.scaling.attn_factor")
    return found | ({"attention_factor": said} if said is not None else {})


def llama3_divisors(theta: float, size: int, rope: Mapping[str, Any]) -> list[float]:
    """Divisors of the frequencies of `size` / 2 pairs (Llama 3.1): 1 for short waves, `factor` for long ones, between them
    a mean weighted by how often a wave fits into the original context."""
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    found = []
    for i in range(0, size, 2):
        turns = original / (2 * math.pi * theta ** (i / size))
        if turns > high:
            found.append(1.0)
        elif turns < low:
            found.append(float(factor))
        else:
            smooth = (turns - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def _llama3(divisors: Sequence[float], theta: float, size: int, path: Path) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "factor": float(max(divisors)), **_LLAMA3}
    wanted = llama3_divisors(theta, size, rope)
    alike = len(wanted) == len(divisors) and all(
        math.isclose(a, b, rel_tol=1e-5) for a, b in zip(divisors, wanted, strict=True)
    )
    if not alike:
        raise UserError(f"{FREQS} is not Llama 3's scaling by {rope['factor']:g} from 8192 positions: config.json cannot say it",
                        fix=_FULL_HEAD, path=path)  # fmt: skip
    return rope


def _floats(header: GgufHeader, name: str) -> list[float]:
    raw = header.tensors[name]
    if raw.type != "F32":
        raise UserError(f"tensor {name!r} has type {raw.type}, not F32", fix="download the file again", path=raw.file)
    with raw.file.open("rb") as stream:
        stream.seek(raw.offset)
        return list(struct.unpack(f"<{raw.nbytes // 4}f", stream.read(raw.nbytes)))
