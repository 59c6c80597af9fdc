"""The CUDA path as a whole, on the CPU: Triton's interpreter, and copies that arrive late as on a device."""

import pytest
import torch

from lamella import kernels
from lamella.engine import Engine
from lamella.engine.boundary import Boundaries, GradientSums
from lamella.engine.walk import Walk
from lamella.engine.weights import LayerWeights
from lamella.models.skeleton import Skeleton, load_config
from tests.conftest import random_rows
from tests.engine.test_families import FAMILIES, step_gradients, trained_adapter
from tests.engine.test_weights import Recording
from tests.fixtures import moe_config
from tests.kernels.triton import need_interpreter
from tests.oracle import relative_error

need_interpreter()
CPU = torch.device("cpu")
ROWS = random_rows((5, 9, 3))


def open_as_on_cuda(store, host_layers):
    """An engine with one layer staying on the device, and room for one boundary there."""
    size = store.group_bytes(0)
    fixed = 0
    for _ in range(2):
        skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), torch.float32)
        weights = LayerWeights(
            store, skeleton, CPU, fixed + 3 * size if fixed else None, Recording(), (2 + host_layers) * size
        )
        fixed = weights.residency.fixed_bytes
    walk = Walk(skeleton, weights)
    walk.boundaries, walk.gradients = Boundaries(Recording, 4000), GradientSums(Recording())
    assert len(weights.residency.resident) == 1
    assert len(weights.residency.pinned) == host_layers
    return Engine(store, skeleton, walk, keep_bytes=0, recompute="always")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_step_equals_that_of_the_cpu_path(family, dropout, made, monkeypatch):
    # 256 x 64 experts have whole groups of scales, so a layer's experts are dequantised in one kernel call
    config = moe_config(layers=5, inner=256) if family == "qwen3_moe" else FAMILIES[family]()
    config.num_hidden_layers = 5
    store, _ = made(config)
    found = []
    for interpreted in (False, True):
        monkeypatch.setattr(kernels, "by_triton", lambda device, on=interpreted: on)
        engine = open_as_on_cuda(store, 1) if interpreted else Engine.open(store, fused=False, dtype="fp32")
        trained_adapter(engine, dropout=dropout)
        out, gradients = step_gradients(engine, [ROWS[:2], ROWS[2:]])
        found.append((out.loss_sum, torch.cat([g.flatten() for g in gradients.values()])))
        assert engine.facts()["loss"] == ("vocabulary" if interpreted else "positions")
    assert engine.walk.boundaries.spilled_bytes > 0
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert relative_error(found[1][1], found[0][1]) < 2e-5
    _, again = step_gradients(engine, [ROWS[:2], ROWS[2:]])
    assert torch.equal(torch.cat([g.flatten() for g in again.values()]), found[1][1])
