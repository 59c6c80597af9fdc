"""Lamella's side of `bench.train`: the same job, checkpoint, batches and starting adapter as `bench.peer_train`.

Reads a JSON job from stdin, prints one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.peer_train import memory_bytes


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Run the steps; the first `warmup` of them are not timed."""
    import torch
    from safetensors.torch import load_file

    from lamella.adapter import Adapter
    from lamella.config import TrainConfig
    from lamella.engine import Engine
    from lamella.models.layout import pack_rows
    from lamella.store.reader import Store
    from lamella.train.optimizer import Optimizer

    torch.set_num_threads(job["threads"])
    imported = memory_bytes("VmRSS")
    folder = Path(job["folder"])
    engine = Engine.open(Store.open(folder / "store"), threads=job["threads"], recompute=job["recompute"])
    adapter = Adapter.load(folder / "adapters" / job["adapter"], engine.skeleton)
    engine.attach(adapter)
    parameters = adapter.parameters()
    settings = TrainConfig(learning_rate=job["learning_rate"], schedule="constant", warmup_steps=0, clip_norm=1.0)
    optimizer = Optimizer(parameters, settings, job["steps"])
    batches = load_file(folder / "batches.safetensors")
    losses, norms, times = [], [], []
    for step in range(job["steps"]):
        start_s = time.perf_counter()
        ids_BT, labels_BT = batches["input_ids"][step], batches["labels"][step]
        batch = pack_rows(list(zip(ids_BT.tolist(), (labels_BT != -100).tolist(), strict=True)))
        label_tokens = batch.score_tokens.numel()
        output = engine.step([batch], step_index=step, label_tokens=label_tokens)
        norms.append(optimizer.grad_norm())
        optimizer.step(step, norms[-1])
        optimizer.zero_grad()
        losses.append(output.loss_sum / label_tokens)
        times.append(time.perf_counter() - start_s)
    moments = optimizer.state_tensors()
    return {
        "tokens_per_s": batches["input_ids"][0].numel() / statistics.median(times[job["warmup"] :]),
        "peak_rss_bytes": memory_bytes("VmHWM"),
        "import_rss_bytes": imported,
        "losses": losses,
        "grad_norms": norms,
        "dead_tensors": sum(1 for name in parameters if not moments[f"{name}/exp_avg"].any()),
        "trainable": adapter.num_parameters(),
        "engine": engine.facts(),
    }


if __name__ == "__main__":
    print(json.dumps(train(json.load(sys.stdin))))
