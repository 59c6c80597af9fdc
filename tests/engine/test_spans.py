"""What the engine spends its time on is recorded: reading, waiting for it, dequantising, copies to a device."""

from concurrent.futures import Future

import pytest
import torch

from lamella.engine.device import HostCopier, arrived_from_disk
from lamella.engine.weights import LayerWeights
from lamella.models.skeleton import Skeleton, load_config
from lamella.trace.recorder import RECORDER
from tests.fixtures import dense_config

LAYERS = 4


@pytest.fixture
def store(made):
    return made(dense_config(layers=LAYERS))[0]


def open_weights(store, **over):
    skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), torch.float32)
    return LayerWeights(store, skeleton, torch.device("cpu"), **over)


def walk_and_back(weights):
    """Spans and totals of one step's binding."""
    RECORDER.keep(1)
    RECORDER.take_totals()
    RECORDER.begin_step(0)
    for i in (*range(LAYERS), *reversed(range(LAYERS))):
        weights.bind(i)
    weights.close()
    totals = RECORDER.take_totals()
    spans = list(RECORDER.steps[-1].spans)
    RECORDER.keep(0)
    return spans, totals


def names(spans, cause, lane="main"):
    return [s.name for s in spans if (s.cause, s.lane) == (cause, lane)]


def test_resident_layers_are_loaded_once(store):
    spans, totals = walk_and_back(open_weights(store))
    each = [f"layer {i}" for i in range(LAYERS)]
    there_and_back = each + each[-2::-1]
    assert names(spans, "load") == each
    assert sorted(names(spans, "load", "read")) == each
    assert names(spans, "dequantise") == there_and_back
    assert names(spans, "wait_disk") == []
    assert totals.nbytes == {"load": sum(store.group_bytes(i) for i in range(LAYERS))}
    assert totals.read_s == pytest.approx(sum(s.end_s - s.start_s for s in spans if s.lane == "read"))
    assert set(totals.seconds) == {"load", "dequantise"}


def test_streamed_layers_are_read_again(store):
    fixed = open_weights(store)
    budget = fixed.residency.fixed_bytes + 2 * max(store.group_bytes(i) for i in range(LAYERS)) + 1
    fixed.close()
    spans, totals = walk_and_back(open_weights(store, budget_bytes=budget))
    assert names(spans, "dequantise") == [f"layer {i}" for i in (0, 1, 2, 3, 2, 1, 0)]
    read = names(spans, "load", "read")
    assert len(read) >= 5  # the last layer is turned around on, and the one before it is still in its slot
    assert totals.nbytes["load"] == sum(store.group_bytes(int(name.split()[1])) for name in read)
    assert "load" not in totals.seconds


def test_copies_to_a_device_count_for_the_host_link(store):
    weights = open_weights(store)
    size = max(store.group_bytes(i) for i in range(LAYERS))
    budget = weights.residency.fixed_bytes + 2 * size
    weights.close()
    weights = open_weights(store, budget_bytes=budget, copier=HostCopier(), host_bytes=LAYERS * size)
    spans, totals = walk_and_back(weights)
    assert names(spans, "wait_host") == [f"layer {i}" for i in (0, 1, 2, 3, 2, 1, 0)]
    assert names(spans, "wait_disk") == []
    copied = names(spans, "wait_host", "copy")
    assert totals.nbytes == {"wait_host": weights.copied_bytes}
    assert len(copied) >= 5
    from_disk = open_weights(store, budget_bytes=budget, copier=HostCopier(), host_bytes=0)
    spans, totals = walk_and_back(from_disk)
    assert totals.nbytes["load"] == totals.nbytes["wait_host"] == from_disk.copied_bytes


class Late(Future):
    """Is done only once it is waited for."""

    def result(self, timeout=None):
        if not self.done():
            self.set_result("bytes")
        return super().result(timeout)


def test_only_what_is_not_there_yet_is_waited_for():
    RECORDER.keep(1)
    RECORDER.begin_step(0)
    late = Late()
    assert [arrived_from_disk(late, 3), arrived_from_disk(late, 4)] == ["bytes", "bytes"]
    assert [(s.cause, s.name) for s in RECORDER.steps[-1].spans] == [("wait_disk", "layer 3")]
    RECORDER.keep(0)
