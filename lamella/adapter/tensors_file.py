"""safetensors files written and read one tensor at a time, so that memory holds one tensor and not the file.

Same format as the safetensors package's (https://huggingface.co/docs/safetensors, "Format"), tensors in order of name.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from lamella.checkpoint.header import TensorInfo, read_header
from lamella.errors import UserError

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_BATCH_BYTES, _BATCH_VIEWS = 1 << 20, 512
"""Small tensors are written together."""
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}


def write_tensors(path: Path, items: Mapping[str, tuple[tuple[int, ...], Callable[[], Tensor]]]) -> str:
    """Write fp32 tensors.

    Args:
        items: name -> (shape, what gives the values when their turn comes).

    Returns:
        xxh3_128 of the file's bytes.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in sorted(items):
        nbytes = 4 * math.prod(items[name][0])
        header[name] = {
            "dtype": "F32", "shape": list(items[name][0]), "data_offsets": [position, position + nbytes],
        }  # fmt: skip
        position += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    batch: list[memoryview] = []
    held = 0
    with path.open("wb", buffering=0) as stream:

        def put(view: memoryview, last: bool) -> None:
            nonlocal batch, held
            digest.update(view)
            batch.append(view)
            held += view.nbytes
            if last or held >= _BATCH_BYTES or len(batch) == _BATCH_VIEWS:
                _write_all(stream.fileno(), batch)
                batch, held = [], 0

        put(memoryview(len(text).to_bytes(8, "little") + text), not items)
        names = sorted(items)
        for name in names:
            shape, give = items[name]
            tensor = give().detach().to("cpu", torch.float32).contiguous()
            assert tuple(tensor.shape) == tuple(shape), name
            put(memoryview(tensor.numpy().reshape(-1).view(np.uint8).data), name == names[-1])
    return digest.hexdigest()


def _write_all(fd: int, views: list[memoryview]) -> None:
    while views:
        done = os.writev(fd, views)
        while views and done >= views[0].nbytes:
            done -= views.pop(0).nbytes
        if views:
            views[0] = views[0][done:]


class TensorsFile(Mapping[str, Tensor]):
    """A safetensors file as name -> tensor; a tensor is read, into memory of its own, when it is asked for.

    Raises:
        UserError: not a whole safetensors file, or tensors that are not floating point.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.infos: dict[str, TensorInfo] = read_header(path)
        for info in self.infos.values():
            if info.dtype not in _TORCH:
                raise UserError(f"tensor {info.name!r} is {info.dtype}", fix="save the adapter again", path=path)

    def __getitem__(self, name: str) -> Tensor:
        info = self.infos[name]
        out = torch.empty(info.shape, dtype=_TORCH[info.dtype])
        view = memoryview(out.view(-1).view(torch.uint8).numpy().data)
        with self.path.open("rb", buffering=0) as stream:
            done = 0
            while done < info.nbytes:
                got = os.preadv(stream.fileno(), [view[done:]], info.offset + done)
                if got == 0:
                    raise UserError(f"file ends inside tensor {name!r}", fix="save the adapter again", path=self.path)
                done += got
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)
