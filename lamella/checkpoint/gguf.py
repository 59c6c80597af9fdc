"""A GGUF model as a checkpoint: config.json's content from the metadata, logical tensors by transformers' names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lamella.checkpoint.gguf_archs import ARCHS, COMMON, HEAD_DIM_TYPES, GgufArch, Place, places
from lamella.checkpoint.gguf_decode import PLAIN, QUANTISED
from lamella.checkpoint.gguf_header import GgufHeader, RawTensor, read_gguf_header
from lamella.checkpoint.gguf_rope import ROPE_TENSORS, rope_parameters
from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.packing import Packing
from lamella.errors import UserError

_TOKEN_KEYS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
_UNUSED = {
    "vocab_size", "attention.key_length", "attention.value_length", "attention.causal", "rope.dimension_count",
    "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "attention.sliding_window", "rope.scale_linear",
    "attention.sliding_window_pattern", "expert_count", "expert_used_count",
}  # fmt: skip
"""Keys after the architecture's name that are looked at by themselves, or that say what tensors say."""
_DTYPES = {"F32": "float32", "F16": "float16"}


@dataclass(frozen=True)
class GgufModel:
    """What a file says of its model.

    Attributes:
        arch: how it maps to transformers.
        config: what config.json would say.
        tensors: logical, by transformers' names.
        notices: what the reader left out or took for granted.
        header: of the file or files.
    """

    arch: GgufArch
    config: dict[str, Any]
    tensors: list[TensorInfo]
    notices: tuple[str, ...]
    header: GgufHeader


def is_gguf(path: str | Path) -> bool:
    return Path(path).suffix == ".gguf"


def read_gguf(path: Path) -> GgufModel:
    """Read a GGUF model's headers; of a split model give any part.

    Raises:
        UserError: no GGUF, a damaged file, an architecture or tensor type that is not read, tensors that are missing or
            not known, values that contradict each other.
    """
    header = read_gguf_header(path)
    if header.metadata.get("general.type", "model") != "model":
        raise UserError(f"is a GGUF of type {header.metadata['general.type']!r}, not a model", fix="give the model's file",
                        path=path)  # fmt: skip
    arch = _arch(header, path)
    config, unused = _config(arch, header, path)
    tensors = _tensors(header, places(arch, config), config, path)
    notices = []
    if unused:
        notices.append(f"{path.name}: keys that are not used: {', '.join(unused)}")
    beside = [name for name in header.tensors if name in ROPE_TENSORS]
    if beside:
        notices.append(f"{path.name}: {', '.join(beside)} became rope_parameters of config.json, and no tensor")
    return GgufModel(arch, config, tensors, tuple(notices), header)


def _arch(header: GgufHeader, path: Path) -> GgufArch:
    experts = bool(header.get("expert_count"))
    fits = [arch for arch in ARCHS if arch.name == header.arch]
    if header.arch == "llama":
        fits = [arch for arch in fits if arch.model_type == ("mixtral" if experts else "llama")]
    if not fits:
        known = ", ".join(sorted({arch.name for arch in ARCHS}))
        raise UserError(f"architecture {header.arch!r} is not read from GGUF", path=path,
                        fix=f"give the Hugging Face checkpoint (read from GGUF: {known})")  # fmt: skip
    return fits[0]


def _config(arch: GgufArch, header: GgufHeader, path: Path) -> tuple[dict[str, Any], list[str]]:
    """config.json's content, and the architecture's keys that had no part in it."""
    config: dict[str, Any] = {"architectures": [arch.model_class], "model_type": arch.model_type}
    for key, name in COMMON:
        config[name] = _whole(header, key, path)
    config["num_key_value_heads"] = config["num_key_value_heads"] or config["num_attention_heads"]
    for key, name in arch.keys:
        value = header.get(key)
        config[name] = shortest(value) if isinstance(value, float) else value
    _from_tensors(arch, header, config)
    missing = [name for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                                 *(name for _, name in arch.keys)) if config.get(name) is None]  # fmt: skip
    if missing:
        raise UserError(
            f"the metadata does not say {missing[0]}", fix="convert the model with a current llama.cpp", path=path
        )
    config |= arch.fixed
    for tensor, name in arch.flags.items():
        config[name] = f"blk.0.{tensor}" in header.tensors
    size = _head_dim(arch, header, config, path)
    config["rope_parameters"] = rope_parameters(arch, header, config, size, path)
    if "original_max_position_embeddings" in config["rope_parameters"] and arch.model_type == "phi3":
        config["original_max_position_embeddings"] = config["rope_parameters"]["original_max_position_embeddings"]
    if arch.window:
        config[arch.window] = header.get("attention.sliding_window")
    elif arch.model_type in ("mistral", "mixtral", "starcoder2"):
        config["sliding_window"] = None  # llama.cpp's graph has none, transformers' defaults do
    if arch.model_type in ("gemma2", "gemma3_text"):
        config["query_pre_attn_scalar"] = query_scalar(arch.model_type, config)
    config["vocab_size"] = header.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in header.tensors else 0
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    for key, name in _TOKEN_KEYS.items():
        config[name] = header.metadata.get(f"tokenizer.ggml.{key}")
    types = {t.type for t in header.tensors.values() if len(t.shape) > 1}
    config["dtype"] = _DTYPES.get(next(iter(types)), "bfloat16") if len(types) == 1 else "bfloat16"
    used = {key for key, _ in (*COMMON, *arch.keys)} | _UNUSED
    own = [key.partition(".")[2] for key in header.metadata if key.startswith(f"{header.arch}.")]
    return config, [key for key in own if key not in used]


def _whole(header: GgufHeader, key: str, path: Path) -> int | None:
    """A whole number, which may stand as a list with one for each layer."""
    value = header.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UserError(f"{header.arch}.{key} differs by layer: {value}", path=path,
                            fix="give the Hugging Face checkpoint")  # fmt: skip
        value = value[0]
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise UserError(
            f"{header.arch}.{key} is {value!r}, not a whole number", fix="download the file again", path=path
        )
    return value


def shortest(value: float) -> float:
    """The shortest decimal that is this fp32 number: 1e-06 for 9.99999997e-07."""
    import numpy as np

    return float(str(np.float32(value)))


def query_scalar(model_type: str, config: Mapping[str, Any]) -> int:
    """`query_pre_attn_scalar` as llama.cpp's graphs have it: the head's width, but in the 27B models hidden size by heads."""
    largest = {"gemma2": 46, "gemma3_text": 62}[model_type]
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _from_tensors(arch: GgufArch, header: GgufHeader, config: dict[str, Any]) -> None:
    """Sizes that older files leave to the tensors."""
    for name, tensor in (("moe_intermediate_size", "blk.0.ffn_gate_exps.weight"),
                         ("shared_expert_intermediate_size", "blk.0.ffn_gate_shexp.weight")):  # fmt: skip
        if name in {key for _, key in arch.keys} and config.get(name) is None and tensor in header.tensors:
            config[name] = header.tensors[tensor].shape[-2]
    if config.get("moe_intermediate_size") and config.get("intermediate_size") is None:
        config["intermediate_size"] = config["moe_intermediate_size"]


def _head_dim(arch: GgufArch, header: GgufHeader, config: dict[str, Any], path: Path) -> int:
    derived = config["hidden_size"] // config["num_attention_heads"]
    rotary = header.get("rope.dimension_count")
    said = header.get("attention.key_length")
    size = int(said or (rotary if rotary and arch.model_type != "phi3" else derived))
    value = header.get("attention.value_length")
    if value is not None and value != size:
        raise UserError(
            f"values have {value} dimensions, keys {size}", fix="give the Hugging Face checkpoint", path=path
        )
    if arch.model_type not in HEAD_DIM_TYPES:
        config["head_dim"] = size
    elif size != derived:
        what = f"heads of {size} dimensions, {arch.model_type} has hidden size / heads = {derived}"
        raise UserError(what, fix="give the Hugging Face checkpoint", path=path)
    if rotary is not None and rotary != size:
        if arch.model_type != "phi3":
            raise UserError(f"{rotary} of a head's {size} dimensions are rotated", path=path,
                            fix="give the Hugging Face checkpoint")  # fmt: skip
        config["partial_rotary_factor"] = rotary / size
    return size


def _tensors(header: GgufHeader, found: Mapping[str, Place], config: Mapping[str, Any], path: Path) -> list[TensorInfo]:
    from lamella.checkpoint.architecture import tensor_shapes

    wanted = {place.name for place in found.values()} | set(ROPE_TENSORS)
    stray = sorted(set(header.tensors) - wanted)
    if stray:
        raise UserError(f"tensors that {config['model_type']} does not have: {_some(stray)}", path=path,
                        fix="give the Hugging Face checkpoint")  # fmt: skip
    absent = sorted({place.name for place in found.values()} - set(header.tensors))
    if absent:
        raise UserError(f"tensors are missing: {_some(absent)}", fix="download the file again", path=path)
    return [_logical(name, shape, found[name], header.tensors[found[name].name])
            for name, shape in tensor_shapes(config).items()]  # fmt: skip


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _logical(name: str, shape: tuple[int, ...], place: Place, raw: RawTensor) -> TensorInfo:
    if raw.type not in PLAIN and raw.type not in QUANTISED:
        raise UserError(f"tensor {raw.name!r} has type {raw.type}, which is not read", path=raw.file,
                        fix=f"give a model of other types: {', '.join((*PLAIN, *QUANTISED))}")  # fmt: skip
    own, offset, nbytes = raw.shape, raw.offset, raw.nbytes
    if place.expert is not None:
        if len(own) != 3 or place.expert >= own[0]:
            raise UserError(f"tensor {raw.name!r} has shape {list(own)}, {name} is expert {place.expert} of it", path=raw.file,
                            fix="download the file again")  # fmt: skip
        nbytes //= own[0]
        offset, own = offset + place.expert * nbytes, own[1:]
    if own != shape and not (prod(own) == prod(shape) and own[-1:] == shape[-1:]):
        raise UserError(f"tensor {raw.name!r} has shape {list(own)}, {name} needs {list(shape)}", path=raw.file,
                        fix="the metadata and the tensors do not belong together; download the file again")  # fmt: skip
    changed = place.heads is not None or place.add != 0
    if raw.type in PLAIN and not changed:
        return TensorInfo(name, raw.file, PLAIN[raw.type], shape, offset, nbytes)
    dtype = PLAIN[raw.type] if raw.type in PLAIN and not place.add else "F32"
    part = TensorInfo(raw.name, raw.file, "U8", (nbytes,), offset, nbytes)
    settings = {"type": raw.type, "heads": place.heads, "add": -place.add}
    return TensorInfo(name, raw.file, dtype, shape, offset, nbytes, Packing("gguf", {"weight": part}, settings))
