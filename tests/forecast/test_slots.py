"""Which layers a step reads, copies and dequantises, and in which order: the same as the engine's own weights do."""

import pytest
import torch

from lamella.engine.device import HostCopier
from lamella.engine.weights import LayerWeights
from lamella.forecast.items import Route, step_items
from lamella.models.skeleton import Skeleton, load_config
from lamella.plan.costs import RowCost
from lamella.plan.split import Split, Stage
from lamella.plan.work import Action, StepPlan
from lamella.trace.recorder import RECORDER
from tests.fixtures import dense_config
from tests.forecast.cases import rank_plan, shape, sites

LAYERS = 6
ORDERS = ("FB", "FFBB", "FFBFBB", "FBFB")


@pytest.fixture
def store(made):
    return made(dense_config(layers=LAYERS))[0]


def open_weights(store, **over):
    skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), torch.float32)
    return LayerWeights(store, skeleton, torch.device("cpu"), **over)


def bound(weights, order, first_trained, stage):
    """What the third of three like steps loads, copies and dequantises."""
    for step in range(3):
        RECORDER.keep(1)
        RECORDER.begin_step(step)
        for kind in order:
            for i in stage if kind == "F" else reversed(range(max(stage.start, first_trained), stage.stop)):
                weights.bind(i)
        for read in weights._loading.values():  # one that nobody asks for belongs to the step that began it
            read.result()
    weights.close()
    spans = list(RECORDER.steps[-1].spans)
    RECORDER.keep(0)
    return {cause: [s.name for s in spans if (s.cause, s.lane) == (cause, lane)]
            for cause, lane in (("load", "read"), ("wait_host", "copy"), ("dequantise", "main"))}  # fmt: skip


def listed(own, order, first_trained, stage):
    """The same from the list of pieces."""
    groups = order.count("F")
    counts = {"F": iter(range(groups)), "B": iter(range(groups))}
    actions = tuple(Action(kind, next(counts[kind])) for kind in order)
    plan_items = tuple((g,) for g in range(groups))
    parts = [range(0, stage.start)] * (stage.start > 0) + [stage]
    stages = tuple(Stage(p.start, p.stop, (r,), (1.0,)) for r, p in enumerate(parts))
    plan = StepPlan(plan_items, plan_items, tuple(((r,),) * groups for r in range(len(parts))), (actions,) * len(parts))
    items = step_items(Split(stages, groups), plan, shape(stage.stop), [RowCost(8, 1)] * groups, [own] * len(parts), {},
                       sites(stage.stop, first_trained))  # fmt: skip
    mine = [item for item in items if item.rank == len(parts) - 1]
    return {cause: [item.name for item in mine if item.kind == kind]
            for cause, kind in (("load", "load"), ("wait_host", "copy"), ("dequantise", "dequantise"))}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("held", "first_trained"), [(0, 0), (2, 0), (0, 3), (3, 1), (6, 2)])
def test_in_memory(store, order, held, first_trained):
    weights = open_weights(store)
    sizes = [store.group_bytes(i) for i in range(LAYERS)]
    room = sum(sizes[:held]) + (2 * max(sizes) if held < LAYERS else 0)
    weights.limit(weights.residency.fixed_bytes + room)
    assert weights.residency.resident == tuple(range(held))
    own = rank_plan(resident=range(held), read=Route(("disk",)))
    stage = range(LAYERS)
    assert listed(own, order, first_trained, stage) == bound(weights, order, first_trained, stage)


@pytest.mark.parametrize("order", ORDERS)
def test_a_stage_of_some_layers(store, order):
    weights = open_weights(store)
    size = max(store.group_bytes(i) for i in range(LAYERS))
    stage = range(2, LAYERS)
    weights.assign(stage, weights.residency.fixed_bytes + 2 * size)
    assert listed(rank_plan(), order, 0, stage) == bound(weights, order, 0, stage)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("on_device", "in_host", "first_trained"), [(0, 0, 0), (0, 6, 0), (1, 2, 0), (3, 3, 2), (1, 1, 4)]
)
def test_on_a_device(store, order, on_device, in_host, first_trained):
    size = max(store.group_bytes(i) for i in range(LAYERS))
    weights = open_weights(store)
    fixed = weights.residency.fixed_bytes
    weights.close()
    room = (in_host + 2) * size if in_host + on_device < LAYERS else LAYERS * size
    weights = open_weights(store, budget_bytes=fixed + (2 + on_device) * size, copier=HostCopier(), host_bytes=room)
    placed = weights.residency
    assert (len(placed.resident), len(placed.pinned)) == (on_device, in_host)
    own = rank_plan(resident=placed.resident, pinned=frozenset(placed.pinned), accelerator=True)
    stage = range(LAYERS)
    planned, seen = listed(own, order, first_trained, stage), bound(weights, order, first_trained, stage)
    for found in (planned, seen):  # what is in host memory already may overtake what is being read
        found["wait_host"].sort()
    assert planned == seen
