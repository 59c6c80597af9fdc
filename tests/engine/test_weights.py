"""Where base weights are: budgets, streaming, slots on a device."""

import pytest
import torch

from lamella.engine import Engine
from lamella.engine.device import DeviceSlots, HostArena, HostCopier
from lamella.engine.engine import resolve_dtype
from lamella.engine.walk import Walk
from lamella.engine.weights import LayerWeights
from lamella.errors import UserError
from lamella.forecast.residency import plan_placement, plan_residency, spread
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


@pytest.mark.parametrize(("resident", "pinned"), [(6, 0), (0, 6), (0, 0), (3, 3), (2, 1), (1, 0)])
def test_layers_on_the_device_in_host_memory_and_on_disk_give_the_same_bits(resident, pinned, made):
    layers = 6
    store, _ = made(moe_config(layers=layers))
    plain = Engine.open(store, dtype="fp32", fused=False)
    trained_adapter(plain)
    _, wanted = step_gradients(plain, [ROWS])

    def on_slots(copier, budget=None, host=None):
        skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), torch.float32)
        return skeleton, LayerWeights(store, skeleton, torch.device("cpu"), budget, copier, host)

    size = max(store.group_bytes(i) for i in range(layers))
    assert size == min(store.group_bytes(i) for i in range(layers))
    fixed = on_slots(HostCopier())[1].residency.fixed_bytes
    budget = None if resident == layers else fixed + (2 + resident) * size
    host = (pinned if resident + pinned == layers else pinned + 2) * size
    copier = Recording()
    skeleton, weights = on_slots(copier, budget, host)
    engine = Engine(store, skeleton, Walk(skeleton, weights), keep_bytes=0, recompute="always")
    trained_adapter(engine)
    for _ in range(2):
        _, found = step_gradients(engine, [ROWS])
        assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    residency = weights.residency
    assert (len(residency.resident), len(residency.pinned)) == (resident, pinned)
    assert bool(copier.log) == (resident < layers)
    streamed = (
        layers - resident
    )  # two walks there and back; the two layers in the slots at a turn are not brought again
    assert (streamed > 0) == (weights.copied_bytes > 0)
    assert weights.copied_bytes <= 4 * streamed * size
    if resident == 0:
        assert weights.copied_bytes == (6 + 4 + 4 + 4) * size
    assert budget is None or residency.total_bytes <= budget
    assert len(weights.resident_checksum()) == 32
    weights.close()


def test_slots_are_filled_ahead_of_the_walk(made):
    """While a layer is at work the next streamed one is on its way: its copy was started before its turn."""
    store, _ = made(moe_config(layers=6))
    skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), torch.float32)
    whole = LayerWeights(store, skeleton, torch.device("cpu"), copier=HostCopier())
    budget = whole.residency.fixed_bytes + 4 * store.group_bytes(0)
    skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), torch.float32)
    weights = LayerWeights(store, skeleton, torch.device("cpu"), budget, Recording())
    assert weights.residency.resident == (1, 4)
    slots = weights._on_device
    coming = {0: {0, 2}, 1: {2, 3}, 2: {2, 3}, 3: {3, 5}, 4: {3, 5}, 5: {3, 5}}
    for i in range(6):
        weights.bind(i)
        assert coming[i] <= set(slots.holds)
    for i, wanted in ((4, {3, 2}), (3, {3, 2}), (2, {2, 0}), (1, {0}), (0, {0})):
        weights.bind(i)
        assert wanted <= set(slots.holds)


def test_placement_fills_the_device_then_host_memory():
    sizes = [10] * 8
    assert plan_placement(sizes, 5, None, 0).device == tuple(range(8))
    assert plan_placement(sizes, 5, 85, 0).device == tuple(range(8))
    placed = plan_placement(sizes, 5, 5 + 20 + 25, 1000)
    assert (placed.device, placed.disk) == ((2, 6), ())
    placed = plan_placement(sizes, 5, 5 + 20 + 25, 20 + 35)
    assert (len(placed.device), len(placed.pinned), len(placed.disk)) == (2, 3, 3)
    assert sorted(placed.device + placed.pinned + placed.disk) == list(range(8))
    with pytest.raises(UserError, match=r"memory\.budget is 24 B"):
        plan_placement(sizes, 5, 24, 1000)


def test_spread_is_even_and_fits():
    assert spread([1] * 6, 2) == (1, 4)
    assert spread([1] * 5, 5) == (0, 1, 2, 3, 4)
    assert spread([4, 4], 3) == ()
    for count in range(1, 30):
        for budget in range(count + 1):
            assert len(set(spread([1] * count, budget))) == budget


def test_an_arena_is_aligned_to_a_page_and_holds_its_bytes():
    arena = HostArena(100_001, pin=False)
    assert arena.bytes.data_ptr() % 4096 == 0
    assert arena.bytes.numel() == 100_001
    arena.bytes.fill_(7)
    assert int(arena.bytes.sum()) == 700_007


def test_slots_keep_the_layer_at_work():
    slots = DeviceSlots(torch.device("cpu"), 8, HostCopier())
    groups = [PackedGroup(torch.full((8,), i, dtype=torch.uint8), {}, 64) for i in range(3)]
    slots.fetch(0, groups[0], ())
    slots.fetch(1, groups[1], keep=[0])
    slots.fetch(2, groups[2], keep=[1])
    assert slots.holds_layer(1)
    assert slots.holds_layer(2)
    assert not slots.holds_layer(0)
    assert slots.take(2).buffer.tolist() == [2] * 8


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
