"""Checkpoints quantised already, made from tiny random models."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from lamella.kernels import quantize_mxfp4
from tests.checkpoint.helpers import write_tensors
from tests.fixtures import random_model


def write_mxfp4(path: Path, config, *, seed: int = 0) -> Path:
    """GPT-OSS as its makers publish it: experts [E, I, O] as `_blocks` [E, O, I / 32, 16] and `_scales` [E, O, I / 32]."""
    tensors = {}
    for name, x in random_model(config, seed).to(torch.bfloat16).state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = x.shape
            codes, scales = quantize_mxfp4(x.transpose(1, 2).contiguous())
            tensors[f"{name}_blocks"] = codes.view(experts, outputs, inputs // 32, 16)
            tensors[f"{name}_scales"] = scales.view(experts, outputs, inputs // 32)
        else:
            tensors[name] = x
    tree = json.loads(config.to_json_string(use_diff=False))
    tree["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    return write_tensors(path, tree, tensors)
