"""RAM, page-locked RAM and disk by part (B68)."""

import pytest

from lamella.config import LoraConfig
from lamella.forecast.describe import shape_of
from lamella.forecast.host import (
    CHUNK_BYTES,
    CHUNKS_IN_FLIGHT,
    WRITES_IN_FLIGHT,
    RankMemory,
    disk_parts,
    host_needs,
    over,
    pinned_parts,
    quantise_parts,
)
from lamella.forecast.process import Rank, base_of, choose_residency
from lamella.forecast.trainable import sites_of
from lamella.hardware.machine import Host
from lamella.store import pipeline
from tests.forecast.models import QWEN3_235B, config_file
from tests.forecast.test_process import HOST, cpu, gpu

LORA = LoraConfig(rank=16, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
LENGTHS, POSITIONS = [[4096]] * 8, [512] * 8


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    shape = shape_of(config_file(tmp_path_factory.mktemp("large"), QWEN3_235B))
    return shape, sites_of(shape, LORA)


def rank_on(device, host, large, **more):
    shape, sites = large
    rank = more.pop("rank", Rank())
    choice = choose_residency(shape, sites, LENGTHS, POSITIONS, dtype="bf16", device=device, host=host, rank=rank, **more)
    base = base_of(shape, "bf16", device.kind, rank)
    boundary = sum(map(sum, LENGTHS)) * shape.hidden * 2 * (len(shape.layers) + 1)
    return RankMemory(choice, base, sum(s.parameters for s in sites), device.kind == "cuda", boundary_bytes=boundary)


def host(gb, **more):
    return Host(name="h", cores=8, ram_bytes=int(gb * 1e9), limit_bytes=int(gb * 1e9), import_bytes=500_000_000, **more)


def test_b68_a_235b_model_on_one_gpu_pins_layers_and_has_no_state_for_the_base(large):
    with_room = host(256)
    rank = rank_on(gpu(80), with_room, large)
    needs = host_needs([rank], with_room)
    layers = sum(layer.store_bytes for layer in large[0].layers)
    on_device = sum(rank.base.group_bytes[i] for i in rank.choice.residency.resident)
    assert needs.pinned["packed layers"] == layers - on_device
    assert "slots for layers on disk" not in needs.pinned
    assert needs.ram["page-locked"] == sum(needs.pinned.values())
    trained = sum(s.parameters for s in large[1])
    assert (needs.ram["adapter"], needs.ram["optimizer"], needs.ram["gradients"]) == (4 * trained, 8 * trained, 4 * trained)
    assert sum(needs.ram.values()) < layers + 20e9, "the base has neither gradients nor optimizer state, nor a 16-bit copy"


def test_b68_where_memory_cannot_be_page_locked_layers_come_from_disk_through_two_slots(large):
    no_pinned = host(256, pinned_bytes=0)
    rank = rank_on(gpu(80), no_pinned, large)
    found = pinned_parts(rank)
    assert "packed layers" not in found
    assert found["slots for layers on disk"] == 2 * max(rank.base.group_bytes)
    assert over(found, no_pinned.pinned_bytes) == sum(found.values()), "two slots still have to be page-locked"


def test_b68_a_host_of_2_gb_is_refused_with_the_parts(large):
    small = host(2)
    needs = host_needs([rank_on(cpu(), small, large)], small)
    assert over(needs.ram, small.limit_bytes) > 100e9, "everything resident"
    tight = rank_on(cpu(), small, large, budget=2_000_000_000, recompute="always")
    assert not tight.choice.fits
    assert tight.choice.least > 2_000_000_000
    assert tight.choice.least < 40e9, "boundaries of 32,768 tokens in 94 layers are most of it"
    assert {"base", "boundaries"} <= set(tight.choice.plan.groups)


def test_b68_disk_by_part_against_what_is_free(large):
    shape, sites = large
    parts = disk_parts(shape, sites, keep=2, state_on_disk=True, with_checkpoint=True)
    trained = sum(s.parameters for s in sites)
    assert parts["store"] == shape.store_bytes
    assert parts["checkpoint"] == shape.checkpoint_bytes
    assert parts["adapter checkpoints"] == 4 * 12 * trained
    assert parts["state file"] == 16 * trained
    assert over(parts, 100_000_000) == sum(parts.values()) - 100_000_000
    assert over(parts, None) == 0
    there = disk_parts(shape, sites, keep=1, state_on_disk=False, with_store=False)
    assert set(there) == {"adapter checkpoints", "adapter", "run folder"}
    assert over(there, 100_000_000) > 0, "a folder with 100 MB free does not even hold the adapter"


def test_a_shared_copy_is_counted_once(large):
    with_room = host(256)
    one = rank_on(gpu(80), with_room, large, rank=Rank(sharers=2, ranks_here=2))
    other = RankMemory(one.choice, one.base, one.parameters, True, first_of_copy=False, boundary_bytes=one.boundary_bytes)
    together = host_needs([one, other], with_room)
    assert together.pinned["packed layers"] == pinned_parts(one)["packed layers"]
    assert together.ram["optimizer"] == 2 * 8 * one.parameters


def test_quantising_takes_the_same_whatever_the_model(large, made):
    from tests.fixtures import dense_config

    small = shape_of(made(dense_config())[0].path)
    a, b = sum(quantise_parts(small).values()), sum(quantise_parts(large[0]).values())
    assert 450e6 < a < b < 1.5e9
    assert quantise_parts(large[0])["chunks"] == CHUNKS_IN_FLIGHT * CHUNK_BYTES
    assert (CHUNK_BYTES, CHUNKS_IN_FLIGHT, WRITES_IN_FLIGHT) == (
        pipeline.CHUNK_BYTES, pipeline._CHUNKS_IN_FLIGHT, pipeline._WRITES_IN_FLIGHT,
    )  # fmt: skip


def test_the_hosts_import_baseline_counts_for_processes_beside_a_gpu(large):
    rank = rank_on(gpu(80), HOST, large)
    assert host_needs([rank], HOST).ram["program"] > HOST.import_bytes
