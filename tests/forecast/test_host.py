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
    quantise_parts,
)
from lamella.forecast.process import Rank, choose_residency
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
    choice = choose_residency(shape, sites, LENGTHS, POSITIONS, dtype="bf16", device=device, host=host, **more)
    return RankMemory(choice, range(len(shape.layers)), sum(s.parameters for s in sites), device.kind == "cuda")


def host(gb, **more):
    return Host(name="h", cores=8, ram_bytes=int(gb * 1e9), limit_bytes=int(gb * 1e9), import_bytes=500_000_000, **more)


def test_b68_a_235b_model_on_one_gpu_pins_layers_and_has_no_state_for_the_base(large):
    with_room = host(256)
    rank = rank_on(gpu(80), with_room, large)
    ram, pinned = host_needs(large[0], [rank], with_room)
    layers = sum(layer.store_bytes for layer in large[0].layers)
    assert pinned["layers"] == layers - rank.choice.residency.packed_bytes
    assert "slots of layers from disk" not in pinned
    trained = sum(s.parameters for s in large[1])
    assert ram["adapter state"] == 16 * trained
    assert pinned["gradients on their way"] == 4 * trained
    assert sum(ram.values()) < layers + 40e9, "the base has neither gradients nor optimizer state, nor a 16-bit copy"
    assert pinned.items() <= ram.items()


def test_b68_where_memory_cannot_be_page_locked_layers_come_from_disk_through_two_slots(large):
    no_pinned = host(256, pinned_bytes=0)
    _, found = host_needs(large[0], [rank_on(gpu(80), no_pinned, large)], no_pinned)
    assert "layers" not in found
    assert found["slots of layers from disk"] == 2 * max(layer.store_bytes for layer in large[0].layers)
    assert over(found, no_pinned.pinned_bytes) == sum(found.values()), "two slots still have to be page-locked"


def test_boundaries_without_room_are_in_page_locked_ram(large):
    with_room = host(256)
    small, large_card = (rank_on(gpu(gb), with_room, large, recompute="always") for gb in (24, 400))
    boundaries = sum(map(sum, LENGTHS)) * large[0].hidden * 2 * (len(large[0].layers) + 1)
    spilled = host_needs(large[0], [small], with_room)[1]["spilled boundaries"]
    assert 0 < boundaries - spilled < 0.5 * 24e9
    assert "spilled boundaries" not in host_needs(large[0], [large_card], with_room)[1]


def test_b68_a_host_of_2_gb_is_refused_with_the_parts(large):
    small = host(2)
    ram, _ = host_needs(large[0], [rank_on(cpu(), small, large)], small)
    assert over(ram, small.limit_bytes) > 100e9, "everything resident"
    tight = rank_on(cpu(), small, large, budget=2_000_000_000, recompute="always")
    assert not tight.choice.fits
    assert 2_000_000_000 < tight.choice.least < 70e9, (
        "boundaries of 32,768 tokens in 94 layers, and holes like them, are most"
    )
    assert {"base", "boundaries"} <= set(tight.choice.plan.groups)


def test_b68_disk_by_part_against_what_is_free(large):
    shape, sites = large
    parts = disk_parts(shape, sites, keep=2, state_on_disk=True, with_checkpoint=True)
    trained = sum(s.parameters for s in sites)
    assert parts["store"] == shape.store_bytes
    assert parts["checkpoint"] == shape.checkpoint_bytes
    assert parts["checkpoints"] == 4 * 12 * trained
    assert parts["adapter state"] == 16 * trained
    assert over(parts, 100_000_000) == sum(parts.values()) - 100_000_000
    assert over(parts, None) == 0
    there = disk_parts(shape, sites, keep=1, state_on_disk=False, with_store=False)
    assert set(there) == {"checkpoints", "adapter"}
    assert over(there, 100_000_000) > 0, "a folder with 100 MB free does not even hold the adapter"


def test_a_shared_copy_is_counted_once(large):
    with_room = host(256)
    one = rank_on(gpu(80), with_room, large, rank=Rank(sharers=2, ranks_here=2))
    ram, pinned = host_needs(large[0], [one, one], with_room)
    alone_ram, alone = host_needs(large[0], [one], with_room)
    assert pinned["layers"] == alone["layers"]
    assert ram["adapter state"] == 2 * alone_ram["adapter state"]


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
    assert host_needs(large[0], [rank], HOST)[0]["program"] > HOST.import_bytes
