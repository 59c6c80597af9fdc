"""Peak memory from shapes alone, against an engine that has model and adapter open."""

import pytest
import torch
from transformers import Qwen3Config

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.engine.engine import DTYPES
from lamella.engine.memory import predict
from lamella.engine.weights import LayerWeights
from lamella.errors import UserError
from lamella.forecast.describe import shape_of
from lamella.forecast.peak import GROUPS, MemoryPlan, unserved
from lamella.forecast.process import (
    IMPORT_BYTES,
    Rank,
    base_of,
    choose_residency,
    part_of,
    peak_of,
    state_is_on_disk,
)
from lamella.forecast.residency import Residency
from lamella.forecast.trainable import sites_of
from lamella.hardware.allocator import is_tuned
from lamella.hardware.machine import DeviceFacts, Host
from lamella.kernels import rows
from lamella.models.skeleton import Skeleton, load_config
from tests.fixtures import dense_config, moe_config

WIDE = dict(hidden_size=128, num_attention_heads=8, num_key_value_heads=2, head_dim=32, intermediate_size=320)
MODELS = {
    "dense": lambda: dense_config(layers=6, **WIDE),
    "tied": lambda: dense_config(layers=3, tie_word_embeddings=True, **WIDE),
    "head norms": lambda: Qwen3Config(vocab_size=512, num_hidden_layers=3, max_position_embeddings=512, **WIDE),
    "moe": lambda: moe_config(layers=6, experts=8, inner=64, **WIDE),
    "dense first": lambda: moe_config(layers=4, experts=8, inner=64, mlp_only_layers=[0, 1], **WIDE),
}
LENGTHS, POSITIONS = [[128, 128], [128]], [96, 64]
LORA = LoraConfig(rank=8)
HOST = Host(name="h", cores=2, ram_bytes=1 << 34, limit_bytes=1 << 34, import_bytes=1000)
fast = pytest.mark.skipif(not rows.supported(), reason="needs AVX-512 with bf16")


def cpu(threads=None):
    return DeviceFacts(name="cpu", kind="cpu", memory_bytes=1 << 34, matmul_flops_per_s=1e12, dequantise_bytes_per_s=1e10,
                       memory_bytes_per_s=1e10, threads=threads or torch.get_num_threads())  # fmt: skip


def gpu(gb):
    return DeviceFacts(name="gpu", kind="cuda", memory_bytes=int(gb * 1e9), matmul_flops_per_s=1e14,
                       dequantise_bytes_per_s=1e12, memory_bytes_per_s=1e12)  # fmt: skip


def shape_and_sites(store):
    shape = shape_of(store.path)
    return shape, sites_of(shape, LORA)


@pytest.mark.parametrize("sharers", [1, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_the_base_is_what_the_engine_holds(name, dtype, sharers, made):
    store, checkpoint = made(MODELS[name]())
    skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), DTYPES[dtype])
    weights = LayerWeights(store, skeleton, torch.device("cpu"), ranks_here=sharers, sharers=sharers)
    for source in (store.path, checkpoint, checkpoint / "config.json"):
        found = base_of(shape_of(source), dtype, "cpu", Rank(sharers=sharers))
        assert list(found.group_bytes) == weights.layer_bytes(), source
        assert found.buffer == weights.buffer_bytes
        assert found.table == weights.mapped_table_bytes
        assert found.fixed == weights.residency.fixed_bytes
    weights.close()


@fast
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_peaks_are_what_probes_of_an_engine_give(name, dtype, kept, made):
    store, _ = made(MODELS[name]())
    engine = Engine.open(store, dtype=dtype)
    engine.attach(Adapter.create(engine.skeleton, LORA, 0))
    shape, sites = shape_and_sites(store)
    real = predict(engine.walk, LENGTHS, POSITIONS, kept=kept, imports_bytes=1000, tuned_heap=True)
    found = peak_of(shape, sites, LENGTHS, POSITIONS, kept=kept, dtype=dtype, device=cpu(), host=HOST)
    assert found.fixed == pytest.approx(real.fixed)
    assert found.beyond_program_bytes == pytest.approx(real.beyond_program_bytes, rel=0.03)
    for moment, parts in real.moments.items():
        assert sum(found.moments[moment].values()) == pytest.approx(sum(parts.values()), rel=0.08), moment


@fast
@pytest.mark.parametrize("recompute", ["auto", "always", "never"])
@pytest.mark.parametrize("room", [0.7, 0.9, 1.5, 4.0, None])
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_layers_stay_as_the_engine_decides(name, room, recompute, made):
    store, _ = made(MODELS[name]())
    shape, sites = shape_and_sites(store)
    whole = peak_of(shape, sites, LENGTHS, POSITIONS, kept=recompute == "never", dtype="bf16", device=cpu(), host=HOST)
    budget = None if room is None else round(room * whole.beyond_program_bytes)
    found = choose_residency(shape, sites, LENGTHS, POSITIONS, dtype="bf16", device=cpu(), host=HOST, budget=budget,
                             recompute=recompute, state="ram", tuned_heap=is_tuned())  # fmt: skip
    engine = Engine.open(store, dtype="bf16", recompute=recompute)
    engine.attach(Adapter.create(engine.skeleton, LORA, 0))
    engine.budget_bytes = budget
    if not found.fits:
        with pytest.raises(UserError, match="beyond the program itself"):
            engine.fit(LENGTHS, POSITIONS)
        return
    engine.fit(LENGTHS, POSITIONS)
    residency = engine.walk.weights.residency
    assert abs(len(found.residency.resident) - len(residency.resident)) <= 1, (
        "probes and shapes differ by less than a layer"
    )
    assert found.residency.slot_bytes == residency.slot_bytes
    if recompute != "auto":
        assert found.kept == (recompute == "never")
    elif room in (0.7, None):
        assert found.kept == (room is None)
    if budget is not None:
        assert found.plan.beyond_program_bytes <= budget * 1.02 or found.kept


def test_parts_add_up_and_have_names_for_people(made):
    shape, sites = shape_and_sites(made(MODELS["moe"]())[0])
    for device in (cpu(), gpu(8)):
        plan = peak_of(shape, sites, LENGTHS, POSITIONS, kept=False, dtype="bf16", device=device, host=HOST)
        assert sum(plan.groups.values()) == plan.peak_bytes == sum(plan.parts.values())
        assert set(plan.parts) <= set(GROUPS)
        assert {"base", "adapter", "activations", "boundaries", "program"} <= set(plan.groups)
    assert plan.groups["margin"] > 0
    assert plan.groups["dequantised buffer"] > peak_of(
        shape, sites, LENGTHS, POSITIONS, kept=False, dtype="bf16", device=cpu(), host=HOST
    ).groups.get("dequantised buffer", 0), "on a GPU experts are dequantised"
    assert "moments" not in plan.parts, "those are in host memory"


def test_the_import_baseline_is_measured_or_stated(made):
    shape, sites = shape_and_sites(made(MODELS["tied"]())[0])
    unknown = Host(name="h", cores=2, ram_bytes=1 << 34, limit_bytes=1 << 34)
    a, b = (
        peak_of(shape, sites, LENGTHS, POSITIONS, kept=True, dtype="fp32", device=cpu(), host=h)
        for h in (HOST, unknown)
    )
    assert b.peak_bytes - a.peak_bytes == IMPORT_BYTES - 1000
    assert a.beyond_program_bytes == b.beyond_program_bytes


def test_a_stage_holds_its_layers_and_what_is_in_flight(made):
    shape, sites = shape_and_sites(made(MODELS["dense"]())[0])

    def peak(**rank) -> MemoryPlan:
        return peak_of(
            shape, sites, [[100]] * 4, [50] * 4, kept=False, dtype="fp32", device=cpu(), host=HOST, rank=Rank(**rank)
        )

    first, last, whole = peak(layers=range(2)), peak(layers=range(2, 6)), peak()
    assert "one chunk of the head" not in first.moments["head"] or first.moments["head"]["one chunk of the head"] == 0
    assert first.fixed["packed layers held"] + last.fixed["packed layers held"] == whole.fixed["packed layers held"]
    assert first.fixed["moments"] * 2 == last.fixed["moments"]
    assert first.fixed["between ranks"] == 4 * 100 * 128 * 4
    assert whole.fixed["between ranks"] == 0
    few = peak(layers=range(2, 6), in_flight=1)
    assert few.moments["head"]["boundary inputs"] * 4 == last.moments["head"]["boundary inputs"]


def test_a_rank_of_a_divided_group_holds_its_share(made):
    shape, sites = shape_and_sites(made(MODELS["moe"]())[0])
    half = part_of(shape, 0.5)
    assert half.layers[0].core.kv_heads == 1 and half.layers[0].core.heads == 4
    assert [m.experts for m in half.layers[0].matrices if m.fused_experts] == [4, 4]
    assert part_of(shape, 1.0) is shape
    whole, part = (peak_of(shape, sites, LENGTHS, POSITIONS, kept=True, dtype="bf16", device=cpu(), host=HOST, rank=Rank(share=s))
                   for s in (1.0, 0.5))  # fmt: skip
    assert 0.45 < part.fixed["packed layers held"] / whole.fixed["packed layers held"] < 0.6
    assert part.fixed["moments"] < whole.fixed["moments"]


def test_a_gpu_streams_spills_and_pins(made):
    shape, sites = shape_and_sites(made(MODELS["dense"]())[0])
    base = base_of(shape, "bf16", "cuda")
    large = choose_residency(shape, sites, LENGTHS, POSITIONS, dtype="bf16", device=gpu(8), host=HOST)
    assert large.residency.streamed == () and large.fits and large.kept
    budget = base.fixed + 2 * max(base.group_bytes) + 2 * base.group_bytes[0] + 1000
    small = choose_residency(shape, sites, LENGTHS, POSITIONS, dtype="bf16", device=gpu(8), host=HOST, budget=budget)
    assert len(small.residency.resident) == 2
    assert small.residency.pinned == small.residency.streamed
    assert not small.kept
    assert small.boundary_room < 1000
    one = sum(map(sum, LENGTHS)) * 128 * 2
    assert small.plan.moments["head"]["boundary inputs"] == pytest.approx(one, abs=1000), (
        "the others are in host memory"
    )
    none = HOST.model_copy(update={"pinned_bytes": 0})
    on_disk = choose_residency(shape, sites, LENGTHS, POSITIONS, dtype="bf16", device=gpu(8), host=none, budget=budget)
    assert on_disk.residency.pinned == ()
    too_small = choose_residency(
        shape, sites, LENGTHS, POSITIONS, dtype="bf16", device=gpu(8), host=HOST, budget=base.fixed
    )
    assert not too_small.fits
    assert too_small.least > base.fixed


def test_state_goes_to_disk_where_it_would_take_half_of_a_budget():
    assert state_is_on_disk("auto", 1000, 31_999)
    assert not state_is_on_disk("auto", 1000, 32_000)
    assert not state_is_on_disk("auto", 1000, None)
    assert state_is_on_disk("disk", 1, None)
    assert not state_is_on_disk("ram", 1 << 40, 1)


def test_one_layer_of_a_state_on_disk_is_in_memory(made):
    shape, sites = shape_and_sites(made(MODELS["dense"]())[0])
    ram, disk = (peak_of(shape, sites, LENGTHS, POSITIONS, kept=False, dtype="fp32", device=cpu(), host=HOST, state_on_disk=x)
                 for x in (False, True))  # fmt: skip
    assert disk.fixed["moments"] * 6 == ram.fixed["moments"]


def test_residency_given_counts(made):
    shape, sites = shape_and_sites(made(MODELS["dense"]())[0])
    base = base_of(shape, "bf16", "cpu")
    given = Residency((0,), tuple(range(1, 6)), base.fixed, base.group_bytes[0], 2 * max(base.group_bytes))
    plan = peak_of(shape, sites, LENGTHS, POSITIONS, kept=False, dtype="bf16", device=cpu(), host=HOST, residency=given)
    assert plan.parts["packed layers held"] == base.group_bytes[0]
    assert plan.parts["two packed slots"] == 2 * max(base.group_bytes)


def test_a_step_without_tokens_is_refused(made):
    shape, sites = shape_and_sites(made(MODELS["dense"]())[0])
    with pytest.raises(UserError, match="without tokens"):
        peak_of(shape, sites, [], [], kept=False, dtype="bf16", device=cpu(), host=HOST)


def test_holes_serve_smaller_micro_batches_alone():
    assert unserved([512], 8) == 1
    assert unserved([960, 960], 8) == 1, "alike: no hole serves another"
    uneven = unserved([1216, 992], 8)
    assert uneven == pytest.approx((992 + 224) / (1216 + 992), abs=0.05)
    assert unserved([100, 200, 300], 20) < 1
