"""One step's gradients in a process of its own, where `LAMELLA_KERNELS` chose the kernels: `python -m
tests.engine.plain_gradients` reads jobs from stdin and writes each one's gradients to its `out` (safetensors)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lamella import kernels
from lamella.adapter import Adapter
from lamella.engine import Engine
from lamella.models.layout import pack_rows
from lamella.store.reader import Store


def gradients(engine: Engine, cuts: list[Any], **over: Any) -> dict[str, torch.Tensor]:
    """Adapter gradients of one step over micro-batches of rows; the label count is theirs."""
    assert engine.adapter is not None
    labels = sum(sum(mask) for rows in cuts for _, mask in rows)
    first, batches = 0, []
    for rows in cuts:
        batches.append(pack_rows(rows, list(range(first, first + len(rows)))))
        first += len(rows)
    for p in engine.adapter.parameters().values():
        p.grad = None
    engine.step(batches, step_index=0, label_tokens=labels, **over)
    return {name: p.grad.clone() for name, p in engine.adapter.parameters().items() if p.grad is not None}


def main() -> None:
    torch.set_num_threads(1)
    assert kernels.backend() == os.environ["LAMELLA_KERNELS"]
    for job in json.load(sys.stdin):
        engine = Engine.open(Store.open(Path(job["store"])), dtype=job["dtype"])
        engine.attach(Adapter.load(Path(job["adapter"]), engine.skeleton))
        save_file(gradients(engine, [[tuple(row) for row in job["rows"]]]), job["out"])


if __name__ == "__main__":
    main()
