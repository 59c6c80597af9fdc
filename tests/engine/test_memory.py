"""The closed form of memory: the ledger against tensors by hand, and predictions against a ledger around whole steps."""

import pytest
import torch

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.engine.memory import Ledger, Linear, predict, probe_layer, shape_of
from lamella.errors import UserError
from lamella.forecast.peak import MemoryPlan
from lamella.forecast.use import Use
from lamella.models.layout import pack_rows
from lamella.store.reader import Store
from tests.conftest import random_rows
from tests.fixtures import dense_config, moe_config


def test_the_ledger_counts_new_storage_once_and_forgets_what_is_freed():
    before = torch.zeros(1000)
    with Ledger() as ledger:
        view = before.view(10, 100)
        assert ledger.live == 0, "a view of an older tensor is nothing new"
        a = view + 1
        b = a[2:]
        assert ledger.live == 4000
        c = torch.cat([b, b])
        assert ledger.live == 4000 + 2 * 8 * 100 * 4
        del a
        assert ledger.live == 4000 + 6400, "b still holds a's storage"
        del b, c
        assert ledger.live == 0
        assert ledger.peak == 4000 + 6400
        before += 1
        assert ledger.live == 0
        ledger.mark()
        assert ledger.peak == 0


def test_the_ledger_sees_backward():
    x = torch.ones(1 << 10, requires_grad=True)
    with Ledger() as ledger:
        y = (x * 2).exp().sum()
        held = ledger.live
        assert held == 4 * (1 << 10) + 4, "exp keeps its result; its input is free again"
        (grad,) = torch.autograd.grad(y, x)
        assert ledger.peak >= 2 * 4 * (1 << 10)
        assert ledger.live >= grad.nbytes


def test_products_are_told_apart_by_shape():
    a, b = torch.ones(32, 16, dtype=torch.bfloat16), torch.ones(16, 8, dtype=torch.bfloat16)
    with Ledger() as ledger:
        a @ b
        a @ b
        assert len(ledger.shapes) == 1
        a[:16] @ b
        assert len(ledger.shapes) == 2
        a.float() @ b.float()
        assert len(ledger.shapes) == 2, "fp32 products are not compiled"


def test_two_points_make_a_line():
    line = Linear((100, Use(10, 100, 110, 200, 3)), (200, Use(20, 150, 170, 400, 4)))
    found = line.at(400)
    assert (found.forward, found.graph, found.graph_peak, found.backward, found.shapes) == (40, 250, 290, 800, 4)


def opened(store, recompute, targets="all-linear", dtype="fp32"):
    engine = Engine.open(store, dtype=dtype, recompute=recompute)
    engine.attach(Adapter.create(engine.skeleton, LoraConfig(rank=4, targets=targets), 0))
    return engine


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("lengths", [((200, 200),), ((64,) * 4, (64,) * 6), ((700,),)], ids=str)
def test_moments_are_what_a_ledger_sees_of_a_whole_step(kind, recompute, lengths, made):
    store, _ = made(dense_config(layers=6) if kind == "dense" else moe_config(layers=6))
    engine = opened(store, recompute)
    batches = [pack_rows(random_rows(x, seed=i, labels=0.5)) for i, x in enumerate(lengths)]
    labels = sum(b.score_tokens.numel() for b in batches)
    engine.step(batches, step_index=0, label_tokens=labels)
    for p in engine.adapter.parameters().values():
        p.grad = None
    plan = predict(engine.walk, *shape_of(batches), kept=recompute == "never", imports_bytes=0)
    with Ledger() as ledger:
        engine.step(batches, step_index=1, label_tokens=labels)
    copies = plan.fixed["adapter in the compute dtype"]
    if engine.skeleton.dtype == torch.float32:
        copies = 0.0  # the leaves are the masters themselves
    predicted = max(sum(parts.values()) for parts in plan.moments.values()) + copies
    assert predicted == pytest.approx(ledger.peak, rel=0.08)


def test_more_tokens_take_more_and_layers_count(made):
    few = opened(made(dense_config(layers=2))[0], "never")
    many = opened(made(dense_config(layers=6))[0], "never")
    small = predict(few.walk, [[100]], [50], kept=True, imports_bytes=0)
    large = predict(few.walk, [[100] * 4], [50], kept=True, imports_bytes=0)
    deep = predict(many.walk, [[100]], [50], kept=True, imports_bytes=0)
    name = "kept activations"
    assert large.parts[name] == pytest.approx(4 * small.parts[name], rel=0.05)
    assert deep.parts[name] == pytest.approx(3 * small.parts[name], rel=0.05)
    again = predict(many.walk, [[100]], [50], kept=False, imports_bytes=0)
    assert again.peak_bytes < deep.peak_bytes
    assert again.moments["head"]["boundary inputs"] == 7 * 100 * 64 * 4


def test_base_and_adapter_parts_by_hand(made):
    store, _ = made(dense_config(layers=2))
    engine = opened(store, "always", targets=("q_proj",))
    plan = predict(engine.walk, [[64]], [32], kept=False, imports_bytes=1000)
    parameters = 2 * 4 * (64 + 64)
    assert plan.fixed["imports"] == 1000
    assert plan.fixed["adapter values"] == 4 * parameters
    assert plan.fixed["moments"] == 8 * parameters
    assert plan.fixed["packed layers held"] == store.group_bytes(0) + store.group_bytes(1)
    assert plan.fixed["dequantised layer"] == 4 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 128)
    assert plan.peak_bytes == sum(plan.parts.values())
    assert plan.beyond_program_bytes == plan.peak_bytes - 1000 - plan.parts["libraries"]
    assert "compiled products" not in plan.parts, "fp32 compiles none"
    on_disk = predict(engine.walk, [[64]], [32], kept=False, imports_bytes=1000, state_on_disk=True)
    assert on_disk.fixed["moments"] == 8 * parameters / 2


def test_a_probe_leaves_no_trace(made):
    store, _ = made(moe_config(layers=2))
    engine = opened(store, "always")
    batch = pack_rows(random_rows((30,)))
    first = engine.step([batch], step_index=0, label_tokens=5)
    grads = {n: p.grad.clone() for n, p in engine.adapter.parameters().items()}
    hits = engine.walk.expert_hits()
    for p in engine.adapter.parameters().values():
        p.grad = None
    probe_layer(engine.walk, 1, 30, 60)
    assert engine.walk.expert_hits() == hits
    assert all(p.grad is None for p in engine.adapter.parameters().values())
    second = engine.step([batch], step_index=0, label_tokens=5)
    assert second.loss_sum == first.loss_sum
    assert all(torch.equal(p.grad, grads[n]) for n, p in engine.adapter.parameters().items())


def test_the_plan_names_its_peak():
    plan = MemoryPlan({"imports": 5.0}, {"a": {"x": 1.0}, "b": {"x": 10.0, "y": 10.0}}, kept=True)
    assert plan.moment == "b"
    assert plan.parts == {"imports": 5, "x": 10, "y": 10}
    assert plan.lines()[0].split()[0] == "10"


def test_a_budget_below_the_least_is_refused_with_its_parts(made):
    store, _ = made(dense_config(layers=6))
    engine = Engine.open(store, dtype="fp32", budget_bytes=1 << 20)
    engine.attach(Adapter.create(engine.skeleton, LoraConfig(rank=4), 0))
    with pytest.raises(
        UserError, match=r"(?s)memory.budget is 1.05 MB, but a step of 700 tokens .*adapter values: 4 B x"
    ):
        engine.fit([[300, 400]], [300])


@pytest.mark.parametrize("held", [0, 2, 6])
def test_what_steps_take_is_set_aside_before_layers_are_held(held, made):
    store, _ = made(dense_config(layers=6))
    rows = random_rows((30, 40, 50))
    whole = opened(store, "always")
    plan = predict(whole.walk, [[30, 40], [50]], [35, 25], kept=False, imports_bytes=0)
    base = whole.walk.weights.residency
    aside = plan.beyond_program_bytes - base.total_bytes
    size = store.group_bytes(0)
    budget = aside + base.fixed_bytes + (held if held == 6 else 2 + held) * size
    engine = Engine.open(store, dtype="fp32", budget_bytes=budget + 4096)
    engine.attach(Adapter.create(engine.skeleton, LoraConfig(rank=4), 0))
    assert engine.fit([[30, 40], [50]], [35, 25]).parts["adapter values"] == plan.parts["adapter values"]
    assert engine.walk.weights.residency.resident == tuple(range(held))
    found = []
    for e in (whole, engine):
        out = e.step([pack_rows(rows[:2]), pack_rows(rows[2:])], step_index=0, label_tokens=9)
        found.append((out.loss_sum, [p.grad for p in e.adapter.parameters().values()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert engine.walk.steps_recomputed == 1, "what is left is too little to keep activations"


def test_room_that_is_left_keeps_activations(made):
    store, _ = made(dense_config(layers=6))
    engine = Engine.open(store, dtype="fp32", budget_bytes=1 << 30)
    engine.attach(Adapter.create(engine.skeleton, LoraConfig(rank=4), 0))
    engine.fit([[30, 40, 50]], [60])
    assert len(engine.walk.weights.residency.resident) == 6
    engine.step([pack_rows(random_rows((30, 40, 50)))], step_index=0, label_tokens=9)
    assert engine.walk.steps_kept == 1
    assert opened(store, "auto").fit([[30]], [15]) is None, "no budget, nothing to fit"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_probing_reads_no_layer_and_finds_the_same(kind, dtype, made, monkeypatch):
    store, _ = made(dense_config(layers=3) if kind == "dense" else moe_config(layers=3))
    reads, read = [], Store.read
    monkeypatch.setattr(Store, "read", lambda self, i, *rest: reads.append(i) or read(self, i, *rest))
    found = []
    for blank in (True, False):
        engine = Engine.open(store, dtype=dtype)
        engine.attach(Adapter.create(engine.skeleton, LoraConfig(rank=4), 0))
        if not blank:
            engine.walk.weights.blank = engine.walk.weights.bind
        found.append(probe_layer(engine.walk, 1, 48, 96))
        assert bool(reads) is not blank
        out = engine.step([pack_rows(random_rows((40,)))], step_index=0, label_tokens=9)
        found.append((out.loss_sum, [p.grad for p in engine.adapter.parameters().values()]))
    for a, b in ((found[0].low, found[2].low), (found[0].high, found[2].high)):
        assert a[0] == b[0]
        assert vars(a[1]) == pytest.approx(vars(b[1]), rel=0.03), "but for where the router sends other hidden states"
    assert found[1][0] == found[3][0]
    assert all(torch.equal(a, b) for a, b in zip(found[1][1], found[3][1], strict=True))
