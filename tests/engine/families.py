"""What is measured of a family, for its test and for the table: one model, one reference, all comparisons."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lamella.adapter import Adapter
from lamella.adapter.peft_format import _tensor_names, flatten_experts
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.models.check import check_checkpoint
from lamella.models.layout import pack_rows
from lamella.store.quantize import quantize_checkpoint
from lamella.store.reader import Store
from tests.conftest import random_rows
from tests.fixtures import write_checkpoint
from tests.oracle import label_loss, load_reference, peft_model, relative_error, write_dequantised

ROWS = random_rows((5, 23, 9, 14), vocab=120)
LABELS = sum(sum(mask) for _, mask in ROWS)
CUTS = ([ROWS], [ROWS[:2], ROWS[2:]], [[r] for r in ROWS])


@dataclass(frozen=True)
class Found:
    """Relative errors against transformers + PEFT in fp32: of logits, of the loss, the worst of any adapter gradient."""

    logits: float
    loss: float
    gradient: float
    worst: str
    pairs: int
    fused: dict[str, Any]


def measure(config: Any, folder: Path) -> Found:
    write_checkpoint(folder / "checkpoint", config, shards=1)
    quantize_checkpoint(folder / "checkpoint", folder / "store", check=check_checkpoint)
    store = Store.open(folder / "store")
    base = write_dequantised(store, folder / "base")
    engine = Engine.open(store, dtype="fp32")
    reference = load_reference(base)
    with torch.no_grad():
        wanted = torch.cat([reference(input_ids=torch.tensor([ids])).logits[0] for ids, _ in ROWS])
    logits = relative_error(engine.logits(pack_rows(ROWS)), wanted)
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=4, alpha=8, targets="all-linear"), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in adapter.parameters().items():
            if name.endswith("lora_B"):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    engine.attach(adapter)
    loss, truth = reference_gradients(adapter, reference, folder / "adapter")
    loss_error, worst = 0.0, (0.0, "")
    for cuts in CUTS:
        for p in adapter.parameters().values():
            p.grad = None
        out = engine.step([pack_rows(c) for c in cuts], step_index=0, label_tokens=LABELS)
        loss_error = max(loss_error, abs(out.loss_sum / LABELS - loss) / loss)
        found = as_file(adapter, {name: p.grad for name, p in adapter.parameters().items()})
        worst = max(worst, *((relative_error(g, truth[name]), name) for name, g in found.items()))
    return Found(logits, loss_error, *worst, len(adapter.sites), engine.facts()["fused"])


def reference_gradients(adapter: Adapter, reference: Any, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and gradient of every pair by our name, of transformers + PEFT."""
    adapter.save(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft_model(reference, folder)
    loss = label_loss(model, ROWS)
    loss.backward()
    parameters = dict(model.named_parameters())
    names = _tensor_names(adapter.sites)
    trainable = {n for n, p in parameters.items() if p.requires_grad}
    assert trainable == {f"{names[k]}.lora_{x}.default.weight" for k in adapter.sites for x in "AB"}
    pairs = ((f"{key}.lora_{x}", f"{names[key]}.lora_{x}.default.weight") for key in adapter.sites for x in "AB")
    return loss.item(), {name: parameters[there].grad for name, there in pairs}


def as_file(adapter: Adapter, gradients: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients in the file's layout."""
    flat = dict(gradients)
    for key, site in adapter.sites.items():
        if site.experts is not None:
            flat[f"{key}.lora_A"], flat[f"{key}.lora_B"] = flatten_experts(flat[f"{key}.lora_A"], flat[f"{key}.lora_B"])
    return flat
