"""Costs from shapes against those of an engine that has model and adapter open, and the numbers that the design rests on."""

import pytest

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.engine.costs import model_cost
from lamella.forecast.costs import cost_of
from lamella.forecast.describe import shape_of
from lamella.forecast.trainable import sites_of
from lamella.plan.costs import RowCost, row_flops
from tests.checkpoint.families import tiny
from tests.engine.test_families import FAMILIES
from tests.forecast.models import QWEN3_235B, config_file

MODELS = {
    "dense": FAMILIES["llama"], "tied": FAMILIES["llama-tied"], "moe": FAMILIES["qwen3_moe"],
    "dense first": FAMILIES["qwen3_moe-dense-first"], "mixtral": FAMILIES["mixtral"], "windows": FAMILIES["gemma3"],
    "window everywhere": FAMILIES["mistral-window"], "sinks": FAMILIES["gpt_oss"],
    "latent attention": lambda: tiny("deepseek_v3"), "ernie": lambda: tiny("ernie4_5_moe"), "fused": lambda: tiny("phi3"),
}  # fmt: skip
TARGETS = ["all-linear", ("o_proj",)]


@pytest.mark.parametrize("kind", MODELS)
def test_costs_are_the_engines_own(kind, made):
    store, checkpoint = made(MODELS[kind]())
    engine = Engine.open(store, dtype="fp32")
    shapes = {
        "store": shape_of(store.path),
        "headers": shape_of(checkpoint),
        "config.json": shape_of(checkpoint / "config.json"),
    }
    assert [shape.source for shape in shapes.values()] == list(shapes)
    for targets in TARGETS:
        lora = LoraConfig(rank=4, targets=targets)
        engine.attach(Adapter.create(engine.skeleton, lora, 0))
        for recompute in (False, True):
            wanted = model_cost(engine, recompute)
            for source, shape in shapes.items():
                assert cost_of(shape, sites_of(shape, lora), 4, recompute) == wanted, source


def test_layers_before_the_first_adapted_one(made):
    store, _ = made(FAMILIES["llama"]())
    engine = Engine.open(store, dtype="fp32")
    lora = LoraConfig(rank=4, targets=("layers.1.mlp.down_proj",))
    engine.attach(Adapter.create(engine.skeleton, lora, 0))
    shape = shape_of(store.path)
    assert cost_of(shape, sites_of(shape, lora), 4, True) == model_cost(engine, True)


def test_latent_attention_counts_its_own_head_sizes(made):
    config = tiny("deepseek_v3")
    store, _ = made(config)
    found = cost_of(shape_of(store.path), [], 4, False)
    assert found.layers[0].flops_per_pair == 2 * 4 * (16 + 8 + 12)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return shape_of(config_file(tmp_path_factory.mktemp("qwen"), QWEN3_235B))


def test_numbers_of_qwen3_235b_memory(qwen):
    layer = qwen.layers[0]
    assert sum(m.parameters for m in layer.matrices) + layer.other_parameters == pytest.approx(2.488e9, rel=0.005)
    assert layer.store_bytes == pytest.approx(1.284e9, rel=0.005)
    assert sum(layer.store_bytes for layer in qwen.layers) == pytest.approx(120.7e9, rel=0.005)
    assert qwen.outer_store_bytes == pytest.approx(2.5e9, rel=0.005)
    cost = cost_of(qwen, [], 2, True)
    assert cost.layers[0].dequantised_bytes == pytest.approx(4.98e9, rel=0.005)
    assert cost.layers[0].boundary_bytes_per_token == 8192


def test_numbers_of_qwen3_235b_flops(qwen):
    """Per token at 4,096: forward 0.513 GFLOP a layer, recompute the same, input gradient 0.613 where attention's backward
    counts 2.5 times its forward (as a kernel that computes scores again does); we count twice. The whole: 156.5."""
    row = RowCost(4096, 4096)
    forward_layer = cost_of(qwen, [], 2, False).layers[0]
    pairs = 4097 / 2  # per token
    forward = forward_layer.flops_per_token + forward_layer.flops_per_pair * pairs
    assert forward == pytest.approx(0.513e9, rel=0.005)
    half_a_pass = 0.5 * forward_layer.flops_per_pair * pairs
    sites = sites_of(qwen, LoraConfig(rank=1, targets=("q_proj",)))[:1]  # next to nothing, in the first layer
    trained = cost_of(qwen, sites, 2, True)
    layer = trained.layers[1]
    step = layer.flops_per_token + layer.flops_per_pair * pairs
    assert step - 2 * forward + half_a_pass == pytest.approx(0.613e9, rel=0.005)
    whole = row_flops(trained, row) / row.tokens
    assert whole + 94 * half_a_pass == pytest.approx(156.5e9, rel=0.005)
