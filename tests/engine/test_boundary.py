"""Boundaries spilled to host memory and fetched back, gradients sent to the host: copies arrive late, as on a device."""

import pytest
import torch

from lamella.engine import Engine
from lamella.engine.boundary import Boundaries, GradientSums
from lamella.engine.walk import Walk
from lamella.engine.weights import LayerWeights
from lamella.models.skeleton import Skeleton, load_config
from tests.engine.test_families import ROWS, step_gradients, trained_adapter
from tests.engine.test_weights import Recording
from tests.fixtures import moe_config

CPU = torch.device("cpu")


def boundary(layer, item):
    return torch.full((1, 4, 8), float(10 * layer + item))


def test_without_a_copier_everything_stays():
    kept = Boundaries(None, room_bytes=1)
    tensor = boundary(0, 0)
    kept.put(0, 0, tensor)
    assert kept.get(0, 0, CPU) is tensor
    assert kept.host_bytes == kept.spilled_bytes == kept.here_bytes == 0


@pytest.mark.parametrize("room", [0, 3 * 128, 10**9])
def test_what_comes_back_is_what_went(room):
    layers, items = 5, 3
    kept = Boundaries(Recording, room)
    for _ in range(2):
        for layer in range(layers):
            for item in range(items):
                kept.put(layer, item, boundary(layer, item))
                assert kept.here_bytes <= room
        for layer in reversed(range(layers)):
            for item in range(items):
                assert torch.equal(kept.get(layer, item, CPU), boundary(layer, item))
        assert kept.here_bytes == 0
    spilled = layers * items - min(layers * items, room // 128)
    assert kept.spilled_bytes == 2 * 128 * spilled
    assert kept.host_bytes == 128 * spilled  # the second step takes the buffers of the first


def test_the_next_ones_are_on_their_way_before_they_are_asked_for():
    kept = Boundaries(Recording, 0)
    for layer in range(4):
        kept.put(layer, 0, boundary(layer, 0))
    kept.get(3, 0, CPU)
    assert sorted(kept._fetched) == [(1, 0), (2, 0)]
    kept.prefetch(0, 0, CPU)
    assert torch.equal(kept.get(0, 0, CPU), boundary(0, 0))


def test_an_interrupted_step_leaves_nothing():
    kept = Boundaries(Recording, 128)
    for layer in range(4):
        kept.put(layer, 0, boundary(layer, 0))
    kept.get(3, 0, CPU)
    kept.clear()
    assert not kept._here and not kept._spilled and not kept._fetched
    kept.put(0, 0, boundary(7, 7))
    assert torch.equal(kept.get(0, 0, CPU), boundary(7, 7))


def test_gradients_are_summed_and_sent(made):
    store, _ = made(moe_config(layers=2))
    adapter = trained_adapter(Engine.open(store, dtype="fp32"))
    name, master = next(iter(adapter.parameters().items()))
    shape = tuple(master.shape)
    for copier in (None, Recording()):
        sums, master.grad = GradientSums(copier), None
        for step in range(2):
            for value in (1.0, 2.0):
                sums.add(adapter, name, torch.full(shape[::-1], value, dtype=torch.bfloat16).T)
            sums.layer_done(0)
            sums.step_done(adapter)
            assert torch.equal(master.grad, torch.full(shape, 3.0 * (step + 1)))
        if copier is not None:
            sums.add(adapter, name, torch.ones(shape))
            sums.layer_done(0)
            sums.clear()
            sums.step_done(adapter)
            assert torch.equal(master.grad, torch.full(shape, 6.0))


@pytest.mark.parametrize("room", [0, 30_000])
def test_a_step_with_spilled_boundaries_gives_the_same_bits(room, made):
    store, _ = made(moe_config(layers=4))
    plain = Engine.open(store, fused=False, dtype="fp32", recompute="always")
    trained_adapter(plain)
    _, wanted = step_gradients(plain, [ROWS[:2], ROWS[2:]])
    skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), torch.float32)
    walk = Walk(skeleton, LayerWeights(store, skeleton, CPU, None))
    walk.boundaries = Boundaries(Recording, room)
    walk.gradients = GradientSums(Recording())
    engine = Engine(store, skeleton, walk, keep_bytes=0, recompute="always")
    trained_adapter(engine)
    for _ in range(2):
        _, found = step_gradients(engine, [ROWS[:2], ROWS[2:]])
        assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert walk.boundaries.spilled_bytes > 0
