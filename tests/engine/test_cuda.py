"""The CUDA path against the CPU path: run where there is a GPU (`pytest -m gpu`)."""

import pytest
import torch

from lamella.engine import Engine
from lamella.models.layout import pack_rows
from tests.engine.test_families import FAMILIES, LABELS, ROWS, trained_adapter
from tests.oracle import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("streamed", [False, True])
def test_same_loss_and_gradients_as_on_the_cpu(family, streamed, made):
    config = FAMILIES[family]()
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2] * 2
    store, _ = made(config)
    found = []
    for device in ("cpu", "cuda"):
        engine = Engine.open(store, dtype="fp32", device=device)
        if device == "cuda" and streamed:
            budget = engine.walk.weights.residency.fixed_bytes + 2 * max(store.group_bytes(i) for i in range(4)) + 1
            engine = Engine.open(store, dtype="fp32", device=device, budget_bytes=budget)
            assert engine.walk.weights.residency.streamed
        adapter = trained_adapter(engine, dropout=0.1)
        out = engine.step([pack_rows(ROWS[:2]), pack_rows(ROWS[2:])], step_index=0, label_tokens=LABELS)
        found.append((out.loss_sum, torch.cat([p.grad.flatten() for p in adapter.parameters().values()])))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    assert relative_error(found[1][1], found[0][1]) < 1e-3
