"""Lamella's side of `bench.train`: the same job, checkpoint, batches and starting adapter as `bench.peer_train`.

Reads a JSON job from stdin, prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.peer_train import Clock, figures, memory_bytes


class Side:
    """Engine, adapter, optimizer and batches of a job; imports come with it."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        from safetensors.torch import load_file

        from lamella.adapter import Adapter
        from lamella.config import TrainConfig
        from lamella.engine import Engine
        from lamella.models.layout import pack_rows
        from lamella.store.reader import Store
        from lamella.train.optimizer import Optimizer

        torch.set_num_threads(job["threads"])
        self.imported_bytes = memory_bytes("VmRSS")
        folder = Path(job["folder"])
        self.engine = Engine.open(Store.open(folder / "store"), threads=job["threads"], recompute=job["recompute"])
        self.adapter = Adapter.load(folder / "adapters" / job["adapter"], self.engine.skeleton)
        self.engine.attach(self.adapter)
        settings = TrainConfig(learning_rate=job["learning_rate"], schedule="constant", warmup_steps=0, clip_norm=1.0)
        self.optimizer = Optimizer(self.adapter.parameters(), settings, job["steps"])
        self.batches = load_file(folder / "batches.safetensors")
        self.tokens = self.batches["input_ids"][0].numel()
        self._pack = pack_rows

    def step(self, k: int) -> tuple[float, float]:
        """One optimizer step on batch k: (loss, gradient norm)."""
        ids_BT, labels_BT = self.batches["input_ids"][k], self.batches["labels"][k]
        batch = self._pack(list(zip(ids_BT.tolist(), (labels_BT != -100).tolist(), strict=True)))
        label_tokens = batch.score_tokens.numel()
        output = self.engine.step([batch], step_index=k, label_tokens=label_tokens)
        norm = self.optimizer.grad_norm()
        self.optimizer.step(k, norm)
        self.optimizer.zero_grad()
        self.flops = output.flops
        return output.loss_sum / label_tokens, norm


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Run the steps; the first `warmup` of them are not timed."""
    side = Side(job)
    losses, norms = [], []
    clock = Clock()
    for k in range(job["steps"]):
        loss, norm = side.step(k)
        clock.tick()
        losses.append(loss)
        norms.append(norm)
    moments = side.optimizer.state_tensors()
    return {
        **figures(job, side.tokens, clock, side.imported_bytes),
        "losses": losses,
        "grad_norms": norms,
        "dead_tensors": sum(1 for name in side.adapter.parameters() if not moments[f"{name}/exp_avg"].any()),
        "trainable": side.adapter.num_parameters(),
        "gflops": side.flops / clock.step_s(0, job["warmup"]) / 1e9,
        "utilisation": side.flops / clock.step_s(0, job["warmup"]) / side.engine.matmul_rate().best,
        "engine": side.engine.facts(),
    }


if __name__ == "__main__":
    print(json.dumps(train(json.load(sys.stdin))))
