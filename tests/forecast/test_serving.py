"""Serving previews beside hand arithmetic and published sizes."""

import pytest

from lamella.forecast.serving import (
    Devices,
    catalogue_devices,
    devices_of,
    kv_bytes,
    kv_bytes_per_token,
    lengths_of,
    preview,
    read_bytes,
    serve,
    serving_numbers,
    touched_experts,
    weight_bytes,
)
from lamella.forecast.shape import Core, Matrix, Site
from tests.forecast import numbers, shapes
from tests.forecast.machines import gpu, machine


def only(core, layers=1):
    one = shapes.layer([Matrix("self_attn.q_proj", "attention", 64, 64)], core)
    return shapes.model("one", 64, 128, [one] * layers, max_tokens=4096)


@pytest.mark.parametrize(
    ("core", "layers", "nbytes"),
    [
        # KV bytes per token in BF16, of Table 1 in DeepSeek-AI, "Insights into DeepSeek-V3" (arXiv 2505.09343): 70.272 KB,
        # 327.680 KB and 516.096 KB.
        (Core("full", 128, 128, 192, 128, 512 + 64), 61, 70_272),  # DeepSeek-V3: latent 512, rotary key 64
        (shapes.full(64, 8, 128), 80, 327_680),  # Qwen2.5-72B
        (shapes.full(128, 8, 128), 126, 516_096),  # Llama-3.1-405B
        (shapes.full(32, 8, 128), 32, 128 * 1024),  # Llama-3.1-8B
    ],
    ids=["DeepSeek-V3", "Qwen2.5-72B", "Llama-3.1-405B", "Llama-3.1-8B"],
)
def test_kv_sizes_as_published(core, layers, nbytes):
    assert kv_bytes_per_token(only(core, layers)) == nbytes
    assert kv_bytes(only(core, layers), 1000) == 1000 * nbytes


def test_windows_end_the_growth_and_linear_state_has_none():
    sliding = only(shapes.full(4, 2, 16, window=100))
    assert kv_bytes(sliding, 50) == 50 * 64 * 2 and kv_bytes(sliding, 5000) == 100 * 64 * 2
    assert kv_bytes_per_token(sliding) == 0
    linear = only(Core("linear", 4, 4, 16, 32, 0))
    assert kv_bytes(linear, 10) == kv_bytes(linear, 4096) == 4 * 16 * 32 * 4
    assert kv_bytes(shapes.model("none", 64, 128, [shapes.layer([], None)]), 10) == 0


def test_devices_share_heads_as_far_as_there_are_and_copy_a_latent():
    grouped, latent = only(shapes.full(64, 4, 128)), only(Core("full", 16, 16, 24, 16, 40))
    assert kv_bytes(grouped, 100, 4) == kv_bytes(grouped, 100) and kv_bytes(grouped, 100, 8) == 2 * kv_bytes(
        grouped, 100
    )
    assert kv_bytes(latent, 100, 8) == 8 * kv_bytes(latent, 100)


def test_weights_of_llama_8b():
    shape = shapes.llama_8b()
    assert shape.total_parameters == 8_030_261_248  # of the model's safetensors index
    matrices = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    assert weight_bytes(shape, "bf16") == 2 * 8_030_261_248
    rest = 8_030_261_248 - matrices
    assert weight_bytes(shape, "fp8") == round(matrices * (1 + 4 / 16384) + 2 * rest)
    assert weight_bytes(shape, "nf4") == pytest.approx(0.516 * matrices + 2 * rest, rel=1e-6)


def test_experts_touched():
    assert touched_experts(128, 8, 1) == pytest.approx(8)
    assert touched_experts(128, 8, 2) == pytest.approx(8 + 8 * (1 - 8 / 128))
    assert touched_experts(128, 8, 10_000) == pytest.approx(128)
    shape = shapes.qwen_235b()
    alone, many = read_bytes(shape, "bf16", 1), read_bytes(shape, "bf16", 100_000)
    assert alone == pytest.approx(
        2 * (22.2e9 - 151936 * 4096), rel=0.01
    )  # active parameters, the embedding's lookup apart
    assert many == pytest.approx(weight_bytes(shape, "bf16") - 2 * 151936 * 4096, rel=1e-3)


def test_decode_of_one_sequence_is_bound_by_the_weights():
    shape, devices = shapes.llama_8b(), devices_of(machine(gpu()))
    found = serve(shape, "bf16", devices, 1024)
    rate = found.decode[0]
    read = 2 * (8_030_261_248 - 128256 * 4096 - 4096) + 1024 * 131072  # the final norm is too small to matter
    assert rate.sequences == 1 and rate.bound == "bandwidth"
    assert rate.tokens_per_s == pytest.approx(3.35e12 / read, rel=1e-5)
    assert rate.usd_per_million_tokens == pytest.approx(2.5 / 3600 / rate.tokens_per_s * 1e6)
    assert found.sequences[1024] == (int(0.9 * 80e9) - 2 * 8_030_261_248) // (1024 * 131072)


def test_many_sequences_on_a_slow_device_are_bound_by_arithmetic():
    shape, slow = shapes.llama_8b(), devices_of(machine(gpu(flops=20e12)))
    rate = serve(shape, "bf16", slow, 1024).decode[-1]
    per_token = 2 * (8_030_261_248 - 128256 * 4096 - 4096 - 64 * 4096) + 32 * 2 * 32 * 256 * 1024
    assert rate.bound == "compute" and rate.sequences == 256
    assert rate.tokens_per_s == pytest.approx(10e12 / per_token, rel=1e-5)


def test_an_adapter_beside_takes_memory_and_time_and_merged_neither():
    shape, devices = shapes.llama_8b(), devices_of(machine(gpu()))
    sites = [Site(i, matrix, 64) for i, one in enumerate(shape.layers) for matrix in one.matrices]
    bare, beside = serve(shape, "bf16", devices, 1024), serve(shape, "bf16", devices, 1024, sites)
    merged = serve(shape, "bf16", devices, 1024, sites, merged=True)
    assert beside.adapter_bytes == 2 * sum(site.parameters for site in sites) > 0 and merged == bare
    assert beside.sequences[1024] < bare.sequences[1024]
    assert beside.decode[0].tokens_per_s < bare.decode[0].tokens_per_s


def test_prefill_counts_pairs_and_the_head_once():
    shape, devices = shapes.llama_8b(), devices_of(machine(gpu()))
    flops = 4096 * 2 * 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336) + 2 * 4096 * 128256
    flops += 32 * 2 * 32 * 256 * 4096 * 4097 // 2
    assert serve(shape, "bf16", devices, 4096).prefill_tokens_per_s == pytest.approx(4096 / (flops / 450e12))


def test_the_big_model_on_the_machine_and_on_the_smallest():
    shape, here = shapes.qwen_235b(), machine(*[gpu()] * 4)
    kinds = (gpu(), gpu("G24", 24e9, price=0.5))
    candidates = [Devices(kind, n) for kind in kinds for n in (1, 2, 4, 8)]
    found = preview(shape, here, candidates, 4096)
    assert [entry.format for entry in found.here] == ["fp8", "nf4"]  # 470 GB do not fit into 288
    assert {entry.format: entry.machine for entry in found.smallest} == {
        "bf16": "8 x G80", "fp8": "4 x G80", "nf4": "8 x G24",
    }  # fmt: skip
    assert found.kv_bytes[4096] == 4096 * 94 * 2 * 4 * 128 * 2
    assert not found.nowhere and preview(shape, here, candidates[:2], 4096).nowhere == ("bf16", "fp8")
    assert numbers.check(serving_numbers(shape, found)) > 15
    assert serve(shape, "bf16", devices_of(here), 4096) is None


def test_unlike_devices_serve_with_the_larger_group():
    mixed = machine(gpu("small", 24e9), gpu("small", 24e9), gpu("big", 80e9))
    found = preview(shapes.llama_8b(), mixed, [], 4096)
    assert {entry.machine for entry in found.here} == {"1 x big"} and any(
        "1 x big alone" in note for note in found.notes
    )


def test_lengths():
    assert lengths_of(shapes.qwen_235b()) == (1024, 4096, 16384, 65536, 262144)
    assert lengths_of(only(shapes.full(4, 2, 16))) == (1024, 4096)
    assert lengths_of(shapes.model("open", 64, 128, []))[-1] == 131072


def test_the_catalogue_has_a_machine_for_the_big_model():
    found = preview(shapes.qwen_235b(), machine(gpu()), catalogue_devices(), 4096)
    assert not found.here and not found.nowhere
    for entry in found.smallest:
        assert entry.sequences[4096] >= 1 and entry.memory_bytes > entry.weight_bytes
    assert [entry.weight_bytes for entry in found.smallest] == sorted(
        (e.weight_bytes for e in found.smallest), reverse=True
    )
