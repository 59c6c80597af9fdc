"""Which class each tensor gets, by the names and shapes that families use."""

from __future__ import annotations

import pytest

from lamella.checkpoint.facts import (
    classify_in_layer,
    classify_outer,
    layout_of,
    model_facts,
    natural_key,
    num_active_experts,
    num_routed_experts,
)
from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.shapes import check_shapes

IN_LAYER = [
    # attention
    ("self_attn.q_proj.weight", (64, 64), "attention"),
    ("attn.c_attn.weight", (64, 192), "attention"),
    ("attention.query_key_value.weight", (192, 64), "attention"),
    ("linear_attn.in_proj_qkvz.weight", (256, 64), "attention"),
    ("self_attn.output_gate.weight", (64, 64), "attention"),
    # mlp: B41, gate_proj is no router
    ("mlp.gate_proj.weight", (128, 64), "mlp"),
    ("mlp.gate_proj.weight", (8, 64), "mlp"),
    ("mlp.c_fc.weight", (64, 256), "mlp"),
    ("mlp.dense_h_to_4h.weight", (256, 64), "mlp"),
    ("mlp.shared_experts.gate_proj.weight", (8, 64), "mlp"),
    ("mlp.shared_expert.down_proj.weight", (64, 128), "mlp"),
    ("feed_forward.w1.weight", (128, 64), "mlp"),
    ("fc1.weight", (128, 64), "mlp"),
    # experts
    ("mlp.experts.7.gate_proj.weight", (24, 64), "experts"),
    ("block_sparse_moe.experts.3.w1.weight", (24, 64), "experts"),
    ("mlp.experts.gate_up_proj", (8, 48, 64), "experts"),
    ("block_sparse_moe.input_linear.weight", (8, 48, 64), "experts"),
    ("ffn.experts.mlp.w1", (192, 64), "experts"),
    # B41: routers by every name, and by shape
    ("mlp.gate.weight", (8, 64), "router"),
    ("block_sparse_moe.gate.weight", (8, 64), "router"),
    ("mlp.router.weight", (8, 64), "router"),
    ("mlp.router.bias", (8,), "bias"),
    ("block_sparse_moe.router.layer.weight", (8, 64), "router"),
    ("feed_forward.router.weight", (8, 64), "router"),
    ("mlp.shared_expert_gate.weight", (1, 64), "router"),
    ("moe.chooser.weight", (8, 64), "router"),
    # kept
    ("mlp.gate.e_score_correction_bias", (8,), "bias"),
    ("mlp.experts.gate_up_proj_bias", (8, 48), "bias"),
    ("mlp.experts.down_proj_bias", (8, 64), "bias"),
    ("self_attn.q_proj.bias", (64,), "bias"),
    ("input_layernorm.weight", (64,), "norm"),
    ("self_attn.q_norm.weight", (16,), "norm"),
    ("ln_1.weight", (64,), "norm"),
    ("input_layernorm.0.weight", (64,), "norm"),
    ("self_attn.sinks", (4,), "other"),
    ("linear_attn.conv1d.weight", (256, 1, 4), "other"),
    ("linear_attn.A_log", (4,), "other"),
    ("attn.bias", (1, 1, 128, 128), "other"),
    ("altup.mystery.weight", (4, 64), "other"),
]


@pytest.mark.parametrize(("rest", "shape", "expected"), IN_LAYER)
def test_b41_classes_in_layers(rest, shape, expected):
    assert classify_in_layer(rest, shape, num_experts=8) == expected


def test_what_mixers_hold_beside_matrices_stays_as_it_is():
    shapes = {
        "linear_attn.A_log": (8,), "linear_attn.dt_bias": (8,), "linear_attn.conv1d.weight": (64, 1, 4), "mamba.A_log": (128, 8),
        "self_attn.slope_rate": (8, 1, 1), "self_attn.key_decay": (8, 16, 1), "self_attn.diagonal_decay": (1, 8, 16, 16),
        "conv.conv.weight": (64, 1, 3), "temporal_block.rg_lru.recurrent_param": (64,),
    }  # fmt: skip
    for name, shape in shapes.items():
        assert classify_in_layer(name, shape, num_experts=8) in ("other", "bias"), name
    assert classify_in_layer("conv.in_proj.weight", (192, 64), num_experts=8) == "mlp"
    assert classify_in_layer("mixer.gate.weight", (8, 64), num_experts=8) == "router"  # Nemotron-H


def test_gate_of_a_dense_model_is_a_linear_weight():
    assert classify_in_layer("mlp.gate.weight", (128, 64), num_experts=None) == "mlp"
    assert classify_in_layer("mlp.router.weight", (8, 64), num_experts=None) == "router"


@pytest.mark.parametrize(
    ("config", "experts", "active"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2}, 8, 2),
        ({"num_local_experts": 8, "num_experts_per_token": 3}, 8, 3),
        ({"n_routed_experts": 4, "moe_topk": 1}, 4, 1),
        ({"text_config": {"moe_num_experts": 16, "moe_k": 4}}, 16, 4),
        ({"num_experts": 0}, None, 1),
        ({}, None, 1),
    ],
)
def test_expert_counts_under_the_names_families_use(config, experts, active):
    assert (num_routed_experts(config), num_active_experts(config)) == (experts, active)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wte.weight", "embedding"),
        ("transformer.wpe.weight", "embedding"),
        ("gpt_neox.embed_in.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("embed_out.weight", "head"),
        ("model.norm.weight", "norm"),
        ("transformer.ln_f.weight", "norm"),
        ("model.vision_tower.patch_embedding.weight", "other"),
        ("lm_head.bias", "head"),
    ],
)
def test_classes_outside_layers(name, expected):
    assert classify_outer(name) == expected


def info(name, shape, tmp_path):
    return TensorInfo(name, tmp_path / "f", "BF16", shape, 0, 0)


@pytest.mark.parametrize(
    "prefix",
    ["model.layers", "transformer.h", "gpt_neox.layers", "model.language_model.layers", "model.decoder.layers"],
)
def test_layers_are_found_wherever_the_family_puts_them(prefix, tmp_path):
    names = [f"{prefix}.{i}.{rest}" for i in range(12) for rest in ("a.weight", "mlp.experts.10.w1.weight")]
    names += [f"model.vision_tower.encoder.layers.{i}.a.weight" for i in range(24)] + ["lm_head.weight"]
    tensors = {name: info(name, (4, 4), tmp_path) for name in names}
    facts = model_facts({"model_type": "x", "n_layer": 10, "num_nextn_predict_layers": 2}, tmp_path)
    layout = layout_of(tensors, facts, tmp_path)
    assert layout.prefix == prefix
    assert [len(layer) for layer in layout.layers] == [2] * 10
    assert len(layout.beyond) == 4  # layers 10 and 11: multi-token prediction
    assert len(layout.outer) == 25


def test_experts_come_in_number_order():
    names = ["experts.10.w", "experts.9.w", "experts.9.a"]
    assert sorted(names, key=natural_key) == ["experts.9.a", "experts.9.w", "experts.10.w"]


def test_layers_that_differ_on_purpose_are_not_refused(tmp_path):
    """Dense first layers beside experts, and two head sizes, are families' own ways."""
    config = {"model_type": "x", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16,
              "global_head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 24,
              "num_experts": 2}  # fmt: skip
    shapes = {
        "model.layers.0.mlp.gate_proj.weight": (128, 64), "model.layers.1.mlp.gate_proj.weight": (48, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64), "model.layers.1.self_attn.q_proj.weight": (128, 64),
    }  # fmt: skip
    check_shapes([info(n, s, tmp_path) for n, s in shapes.items()], model_facts(config, tmp_path), config, tmp_path)
