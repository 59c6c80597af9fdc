"""Where base weights are: budgets, streaming, slots on a device."""

import pytest
import torch

from lamella.engine import Engine
from lamella.engine.device import DeviceSlots, HostCopier
from lamella.engine.engine import resolve_dtype
from lamella.engine.walk import Walk
from lamella.engine.weights import LayerWeights, plan_residency
from lamella.errors import UserError
from lamella.models.layout import pack_rows
from lamella.models.skeleton import Skeleton, load_config
from lamella.store.reader import PackedGroup
from tests.engine.test_families import ROWS, step_gradients, trained_adapter
from tests.fixtures import dense_config, moe_config


def test_everything_stays_when_it_fits():
    plan = plan_residency([10, 10, 10], 5, 35)
    assert plan.resident == (0, 1, 2)
    assert plan.total_bytes == 35
    assert plan_residency([10, 10, 10], 5, None).streamed == ()


def test_a_budget_is_never_exceeded():
    for budget in range(30, 60):
        try:
            plan = plan_residency([10, 12, 10, 11], 5, budget)
        except UserError:
            assert budget < 5 + 24
            continue
        assert plan.total_bytes <= budget
        assert sorted(plan.resident + plan.streamed) == [0, 1, 2, 3]


def test_too_small_a_budget_names_both_sizes(made):
    store, _ = made(dense_config(layers=4))
    with pytest.raises(UserError, match=r"memory.budget is 1 kB.*take"):
        Engine.open(store, dtype="fp32", budget_bytes=1000)


class Recording(HostCopier):
    """A copier whose copies arrive only when they are waited for, as on a device."""

    def __init__(self):
        self.pending = {}
        self.log = []

    def copy(self, target, source, after):
        assert after is None or after in self.log, "a slot is overwritten while arithmetic may read it"
        token = len(self.pending)
        self.pending[token] = (target, source)
        target.fill_(255)
        return token

    def wait(self, mark):
        if mark in self.pending and self.pending[mark] is not None:
            target, source = self.pending[mark]
            target.copy_(source)
            self.pending[mark] = None

    finish = wait

    def mark(self):
        self.log.append(f"mark {len(self.log)}")
        return self.log[-1]


@pytest.mark.parametrize("streamed", [False, True])
def test_device_slots_give_the_same_bits(streamed, made):
    store, _ = made(moe_config(layers=4))
    plain = Engine.open(store, dtype="fp32", fused=False)
    trained_adapter(plain)
    _, wanted = step_gradients(plain, [ROWS])

    def on_slots(copier, budget=None):
        skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), torch.float32)
        return skeleton, LayerWeights(store, skeleton, torch.device("cpu"), budget, copier)

    budget = None
    if streamed:
        budget = on_slots(HostCopier())[1].residency.fixed_bytes + 2 * max(store.group_bytes(i) for i in range(4)) + 1
    copier = Recording()
    skeleton, weights = on_slots(copier, budget)
    engine = Engine(store, skeleton, Walk(skeleton, weights), keep_bytes=0, recompute="always")
    trained_adapter(engine)
    for _ in range(2):
        _, found = step_gradients(engine, [ROWS])
        assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert copier.log
    assert bool(weights.residency.streamed) == streamed


def test_slots_keep_the_layer_at_work():
    slots = DeviceSlots(torch.device("cpu"), 8, HostCopier())
    groups = [PackedGroup(torch.full((8,), i, dtype=torch.uint8), {}, 64) for i in range(3)]
    slots.fetch(0, groups[0], None)
    slots.fetch(1, groups[1], keep=0)
    slots.fetch(2, groups[2], keep=1)
    assert slots.holds_layer(1)
    assert slots.holds_layer(2)
    assert not slots.holds_layer(0)
    assert slots.take(2, groups[2]).buffer.tolist() == [2] * 8


def test_dtype_auto_is_bf16_only_where_it_is_native():
    assert resolve_dtype("auto", torch.device("cpu")) in (torch.bfloat16, torch.float32)
    assert resolve_dtype("fp32", torch.device("cpu")) == torch.float32


def test_outer_tensors_are_looked_at_in_the_file_where_dtypes_agree(made, tmp_path):
    for config in (dense_config(), dense_config(tie_word_embeddings=True)):
        store, _ = made(config)  # fp32
        mapped, converted = Engine.open(store, dtype="fp32"), Engine.open(store, dtype="bf16")
        names = {r.name for r in store.records("outer")}
        assert set(mapped.walk.weights._mapped) == names
        assert converted.walk.weights._mapped == {}
        group = store.load("outer")
        for engine, dtype in ((mapped, torch.float32), (converted, torch.bfloat16)):
            table = engine.skeleton.model.get_input_embeddings().weight
            assert torch.equal(table, group.raw("model.embed_tokens.weight").to(dtype))
            head = engine.skeleton.model.get_output_embeddings().weight
            assert (head.data_ptr() == table.data_ptr()) == bool(config.tie_word_embeddings)
        table = 4 * config.vocab_size * config.hidden_size
        spared = 0 if config.tie_word_embeddings else table
        fixed = [e.walk.weights.residency.fixed_bytes for e in (mapped, converted)]
        rest = [e.walk.weights._buffer.nbytes for e in (mapped, converted)]
        assert fixed[0] - rest[0] == 2 * (fixed[1] - rest[1]) - spared
        before = store.load("outer").buffer.clone()
        mapped.skeleton.model.get_input_embeddings().weight.data[3] += 1
        assert torch.equal(store.load("outer").buffer, before)  # a private mapping


def test_opening_reads_no_layer_and_the_first_pass_reads_each_once(made):
    store, _ = made(moe_config(layers=4))
    engine = Engine.open(store, dtype="fp32")
    weights = engine.walk.weights
    assert weights._packed == {}
    loaded = []
    load = store.load
    weights.store = type("Counting", (), {"load": lambda _, i, into: loaded.append(i) or load(i, into),
                                          "group_bytes": store.group_bytes, "records": store.records})()  # fmt: skip
    before = weights.resident_checksum()
    for _ in range(2):
        engine.logits(pack_rows(ROWS))
    assert loaded == [0, 1, 2, 3]
    assert weights.resident_checksum() == before  # what was read is what the manifest says
    for place in (
        lambda: weights._packed[2].buffer,
        lambda: weights._mapped["lm_head.weight"].view(torch.uint8).view(-1),
    ):
        place()[4096] ^= 1
        assert weights.resident_checksum() != before
        place()[4096] ^= 1
    assert weights.resident_checksum() == before


def test_leaves_live_as_long_as_their_layer_is_at_work(made):
    store, _ = made(moe_config(layers=4))
    engine = Engine.open(store, dtype="bf16", recompute="always")
    trained_adapter(engine)
    walk, seen = engine.walk, []
    run = walk._run

    def looked_at(item, layer, hidden):
        seen.append({int(key.split(".")[2]) for key in walk.leaves})
        return run(item, layer, hidden)

    walk._run = looked_at
    step_gradients(engine, [ROWS])
    assert seen == [{0}, {1}, {2}, {3}, {3}, {2}, {1}, {0}]
    assert walk.leaves == {}
    assert all(m.lora is None for layer in engine.skeleton.layers for m in layer.modules() if hasattr(m, "lora"))


def test_a_step_tells_the_start_beside_its_own_work(made):
    store, _ = made(moe_config(layers=3))
    engine = Engine.open(store, dtype="fp32", recompute="always")
    trained_adapter(engine)
    batches = [pack_rows(ROWS), pack_rows(ROWS[:2])]
    labels = sum(b.score_tokens.numel() for b in batches)
    plain = engine.step(batches, step_index=0, label_tokens=labels)
    wanted = {n: p.grad.clone() for n, p in engine.adapter.parameters().items()}
    for p in engine.adapter.parameters().values():
        p.grad = None
    told = engine.step(batches, step_index=0, label_tokens=labels, beside_base=True)
    assert plain.start is None
    assert told.loss_sum == plain.loss_sum
    assert all(torch.equal(p.grad, wanted[n]) for n, p in engine.adapter.parameters().items())
    adapter, first = engine.adapter, batches[0].score_tokens.numel()
    assert told.start["adapter"] == pytest.approx(float(engine.loss_sums(batches[:1])[0].sum()) / first, rel=1e-5)
    engine.attach(None)
    assert told.start["base"] == pytest.approx(float(engine.loss_sums(batches[:1])[0].sum()) / first, rel=1e-5)
    assert told.start["base"] != told.start["adapter"]
    assert adapter is not None


def test_unknown_device_is_a_user_error(made):
    store, _ = made(dense_config())
    with pytest.raises(UserError, match="is not a device"):
        Engine.open(store, device="gpu0")
    for device in ("meta", "mps", "cpu:7"):
        with pytest.raises(UserError, match="is not supported"):
            Engine.open(store, device=device)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            Engine.open(store, device="cuda")


def test_logits_in_bf16_and_streamed_agree(made):
    store, _ = made(dense_config(layers=4))
    whole = Engine.open(store, dtype="bf16")
    fixed = whole.walk.weights.residency.fixed_bytes
    small = Engine.open(store, dtype="bf16", budget_bytes=fixed + 2 * store.group_bytes(0) + 1)
    assert small.walk.weights.residency.streamed
    assert torch.equal(whole.logits(pack_rows(ROWS)), small.logits(pack_rows(ROWS)))
    small.close()
