"""Checkpoints quantised already, made from plain ones, with the values that the libraries' own code finds in them.

    plain = write_checkpoint(tmp / "plain", dense_config(), dtype=torch.bfloat16)
    packed = write_packed("fp8", plain, tmp / "fp8")
    packed.path, packed.values[name]

FP8 values are torch's float8 times its scales; MXFP4 transformers' `convert_moe_packed_tensors`; 4-bit
`bitsandbytes.functional.dequantize_4bit` in fp32; 8-bit the codes times SCB / 127.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint.helpers import write_tensors

Packed = tuple[dict[str, Tensor], Tensor]
"""What a weight becomes in the files, by name, and its values in fp32."""
INPUTS_FIRST = ("gpt_oss", "llama4_text", "llama4")
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class Written:
    """Attributes:
    path: the folder.
    values: logical name -> fp32 values, of packed and plain tensors.
    packed: names of those that are packed.
    """

    path: Path
    values: dict[str, Tensor]
    packed: frozenset[str]


def write_packed(way: str, source: Path, target: Path) -> Written:
    """Pack the weights of a plain checkpoint's attention, MLPs and experts.

    Args:
        way: a key of `WAYS`. MXFP4 packs fused experts alone (see `helpers.write_fused`).
    """
    config = json.loads((source / "config.json").read_text())
    settings, pack = WAYS[way]
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    packed = set()
    for name, tensor in read_folder(source).items():
        if is_packed(way, name, tensor):
            swapped = way == "mxfp4" and config["model_type"] in INPUTS_FIRST
            made, values[name] = pack(name, tensor.mT.contiguous() if swapped else tensor)
            if swapped:
                values[name] = values[name].mT.contiguous()
            tensors |= made
            packed.add(name)
        else:
            tensors[name], values[name] = tensor, tensor.float()
    write_tensors(target, {**config, "quantization_config": settings}, tensors)
    copy_beside(source, target)
    return Written(target, values, frozenset(packed))


def write_values(written: Written, target: Path) -> Path:
    """The plain fp32 checkpoint of the same values."""
    config = json.loads((written.path / "config.json").read_text())
    del config["quantization_config"]
    write_tensors(target, {**config, "dtype": "float32"}, written.values)
    copy_beside(written.path, target)
    return target


def read_folder(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def copy_beside(source: Path, target: Path) -> None:
    for file in source.iterdir():
        if not file.name.startswith(("config.json", "model")):
            shutil.copyfile(file, target / file.name)


def is_packed(way: str, name: str, tensor: Tensor) -> bool:
    if way == "mxfp4":
        return tensor.dim() == 3
    linear = tensor.dim() == 2 and (name.endswith("_proj.weight") or ".experts." in name)
    return linear or (way == "fp8" and tensor.dim() == 3)


def fp8(
    name: str, weight: Tensor, block: tuple[int, int] | None = (128, 128), suffix: str = "_scale_inv",
    dtype: torch.dtype = torch.float8_e4m3fn, scale_dtype: torch.dtype = torch.float32,
) -> Packed:  # fmt: skip
    """A weight [..., O, I]. `block`: values per scale, (1, 0): a row each, None: one scale in all; `suffix`: as in
    `lamella/checkpoint/logical.py`; those that begin with a dot take the place of `.weight`."""
    *_, rows, columns = weight.shape
    r, c = (rows, columns) if block is None else (block[0], block[1] or columns)
    grid = -(-rows // r), -(-columns // c)
    padded = torch.nn.functional.pad(weight.float(), (0, grid[1] * c - columns, 0, grid[0] * r - rows))
    blocks = padded.unflatten(-1, (grid[1], c)).unflatten(-3, (grid[0], r))
    scale = blocks.abs().amax((-1, -3)) / torch.finfo(dtype).max
    if scale_dtype == torch.float8_e8m0fnu:
        scale = scale.log2().ceil().exp2()
    scale = scale.clamp(min=2**-100).to(scale_dtype)
    spread = scale.float().repeat_interleave(r, -2)[..., :rows, :].repeat_interleave(c, -1)[..., :columns]
    codes = (weight.float() / spread).to(dtype)
    beside = name.removesuffix(".weight") + suffix if suffix.startswith(".") else name + suffix
    return {name: codes, beside: scale.reshape(()) if block is None else scale}, codes.float() * spread


def mxfp4(name: str, weight: Tensor) -> Packed:
    """A weight [E, O, I]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = weight.float().unflatten(-1, (-1, 32))
    exponent = blocks.abs().amax(-1, keepdim=True).clamp(min=2**-60).log2().floor() - 2
    scaled = blocks / exponent.exp2()
    codes = (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    low, high = codes[..., ::2], codes[..., 1::2]
    packed = (low | high << 4).to(torch.uint8)
    scales = (exponent.squeeze(-1) + 127).to(torch.uint8)
    values = convert_moe_packed_tensors(packed, scales, dtype=torch.float32)
    return {f"{name}_blocks": packed, f"{name}_scales": scales}, values.mT.contiguous()


def bnb_4bit(name: str, weight: Tensor, kind: str = "nf4", nested: bool = True, block: int = 64) -> Packed:
    """A weight of any shape."""
    from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(weight, blocksize=block, quant_type=kind, compress_statistics=nested)
    beside = {f"{name}.{key}": t for key, t in state.as_dict(packed=True).items()}
    # flattened: on a CPU bitsandbytes 0.50 takes wrong scales for rows shorter than a block
    flat = QuantState(
        state.absmax, torch.Size([weight.numel()]), state.code, block, kind, torch.float32, state.offset, state.state2
    )
    return {name: codes, **beside}, dequantize_4bit(codes, flat).view(weight.shape)


def bnb_8bit(name: str, weight: Tensor) -> Packed:
    """A weight [O, I]."""
    from bitsandbytes.functional import int8_vectorwise_quant

    codes, scale, _ = int8_vectorwise_quant(weight.half())
    module = name.removesuffix(".weight")
    beside = {f"{module}.SCB": scale, f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {name: codes, **beside}, codes.float() * (scale / 127)[:, None]


_BNB = {"quant_method": "bitsandbytes", "_load_in_4bit": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True}  # fmt: skip
WAYS: dict[str, tuple[dict, Callable[[str, Tensor], Packed]]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8),
    "fp8-row": ({"quant_method": "fbgemm_fp8"}, lambda n, w: fp8(n, w, (1, 0), "_scale")),
    "fp8-tensor": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, lambda n, w: fp8(n, w, None, "_scale")),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4),
    "bnb-nf4": (_BNB, bnb_4bit),
    "bnb-nf4-plain": ({**_BNB, "bnb_4bit_use_double_quant": False}, lambda n, w: bnb_4bit(n, w, nested=False)),
    "bnb-fp4": ({**_BNB, "bnb_4bit_quant_type": "fp4"}, lambda n, w: bnb_4bit(n, w, "fp4")),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_8bit),
}  # fmt: skip
"""Way -> its quantization_config, and how a weight is packed."""
