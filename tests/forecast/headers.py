"""Checkpoints of headers alone: files as long as they should be, with nothing in them (sparse)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

from lamella.checkpoint.header import DTYPE_BYTES


def write_headers(
    folder: Path, config: dict, tensors: Mapping[str, tuple[str, tuple[int, ...]]], shards: int = 2
) -> Path:
    """A folder with config.json and `shards` safetensors files of these tensors (name -> dtype, shape)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        part, position, header = names[i::shards], 0, {}
        file = folder / ("model.safetensors" if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors")
        for name in part:
            dtype, shape = tensors[name]
            end = position + prod(shape) * DTYPE_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
            position, weight_map[name] = end, file.name
        text = json.dumps(header).encode()
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + position)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
