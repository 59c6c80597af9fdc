"""Sites from shapes against those that the adapter makes; the size of what is trained."""

import json

import pytest
import torch

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.errors import UserError
from lamella.forecast.describe import shape_of
from lamella.forecast.trainable import alternatives, sites_of, trainable_set
from lamella.models.skeleton import Skeleton
from tests.checkpoint.families import VARIANTS, tiny
from tests.forecast.models import QWEN3_235B, config_file

SETTINGS = [
    LoraConfig(rank=6),
    LoraConfig(rank=4, expert_rank=3, targets=("down_proj", "v_proj", "o_proj")),
    LoraConfig(rank=4, targets=("gate_proj", "up_proj")),
    LoraConfig(rank=4, targets=("experts", "layers.1.self_attn.q_proj")),
    LoraConfig(rank=4, targets=("kv_b_proj", "in_proj_qkvz")),
    LoraConfig(rank=4, targets=("qkv_proj", "gate_up_proj")),
]


def outcome(make):
    """What came out, or the error's text."""
    try:
        return make()
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("name", VARIANTS)
def test_sites_are_the_adapters_own(name, tmp_path):
    config = tiny(name)
    shape = shape_of(config_file(tmp_path, json.loads(config.to_json_string(use_diff=False))))
    try:
        skeleton = Skeleton(config, torch.bfloat16)
    except UserError as error:
        pytest.skip(f"the engine does not take it: {error}")
    for lora in SETTINGS:
        wanted = outcome(lambda lora=lora: [
            (s.layer, s.key.split(".", 3)[3], s.inputs, s.outputs, s.experts or 1, s.rank)
            for s in Adapter.create(skeleton, lora, 0).sites.values()
        ])  # fmt: skip
        found = outcome(lambda lora=lora: [
            (s.layer, s.matrix.name, s.matrix.inputs, s.matrix.outputs, s.matrix.experts, s.rank) for s in sites_of(shape, lora)
        ])  # fmt: skip
        assert found == wanted, lora


def test_parameters_are_those_of_the_adapter(tmp_path):
    config = tiny("qwen3_moe")
    shape = shape_of(config_file(tmp_path, json.loads(config.to_json_string(use_diff=False))))
    lora = LoraConfig(rank=8)
    adapter = Adapter.create(Skeleton(config, torch.bfloat16), lora, 0)
    found = trainable_set(sites_of(shape, lora))
    assert found.total == adapter.num_parameters()
    assert found.state_bytes == 16 * found.total
    adapter.save(tmp_path / "adapter")
    header = 8 + int.from_bytes((tmp_path / "adapter/adapter_model.safetensors").read_bytes()[:8], "little")
    assert found.adapter_bytes == (tmp_path / "adapter/adapter_model.safetensors").stat().st_size - header


def test_the_cliff_of_qwen3_235b(tmp_path):
    """50.8M parameters on attention at rank 16, 2.46B on its experts at the same rank (3.25B if gate and up had a pair each,
    as experts in single modules do), an eighth of it at rank r / active."""
    shape = shape_of(config_file(tmp_path, QWEN3_235B))
    found = {s.name: s for s in alternatives(shape, LoraConfig(rank=16))}
    assert found["attention"].total == pytest.approx(50.8e6, rel=0.005)
    assert found["attention"].state_bytes == pytest.approx(0.81e9, rel=0.01)
    whole = found["experts at rank r"]
    assert whole.parameters["experts"] == 94 * 128 * 16 * (4096 + 3072 + 1536 + 4096)
    apart = whole.parameters["experts"] + 94 * 128 * 16 * 4096  # one more A
    assert apart == pytest.approx(3.25e9, rel=0.005)
    assert 16 * apart == pytest.approx(52e9, rel=0.005)
    few = found["experts at rank r / active"]
    assert (few.expert_rank, few.parameters["experts"] * 8) == (2, whole.parameters["experts"])
    assert apart / 8 == pytest.approx(0.41e9, rel=0.015)
    shared = found["experts at rank r, outer factors shared"]
    assert shared.parameters["experts"] == 94 * 16 * (4096 + 128 * 3072 + 128 * 1536 + 4096)
    assert all(s.parameters["attention"] == found["attention"].total for s in found.values())


def test_a_dense_model_has_no_alternatives_on_experts(tmp_path):
    shape = shape_of(config_file(tmp_path, {"model_type": "llama", "num_hidden_layers": 2}))
    assert [s.name for s in alternatives(shape, LoraConfig())] == ["attention", "all-linear"]
