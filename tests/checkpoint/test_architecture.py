"""Shapes from config.json alone, against transformers' models on the meta device."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lamella.checkpoint.architecture import ALIASES, architecture_of, tensor_shapes
from lamella.checkpoint.families import FAMILIES
from lamella.checkpoint.family_defaults import DEFAULTS
from lamella.errors import UserError
from tests.checkpoint.families import VARIANTS, tiny


def shapes_by_transformers(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not any(tensor is seen for seen in tensors.values()):  # a tied head comes second
            tensors[name] = tensor
    return {name: tuple(t.shape) for name, t in revert_weight_conversion(model, tensors).items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_is_the_one_transformers_has(name):
    config = tiny(name)
    wanted = shapes_by_transformers(config)
    found = tensor_shapes(json.loads(config.to_json_string(use_diff=False)))
    beyond = {n for n in found if n.startswith(f"model.layers.{config.num_hidden_layers}.")}
    assert {n: s for n, s in found.items() if n not in beyond} == wanted
    assert bool(beyond) == bool(
        FAMILIES[config.model_type].predicts and config.to_dict().get("num_nextn_predict_layers")
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_layers_attend_as_transformers_has_it(name):
    config = tiny(name, num_hidden_layers=7) if not VARIANTS[name].get("layer_types") else tiny(name)
    tree = json.loads(config.to_json_string(use_diff=False))
    said = tree.pop("layer_types", None)
    kinds = list(architecture_of(tree).kinds)
    if said is None:
        window = getattr(config, "sliding_window", None)
        said = ["full_attention" if not window else "sliding_attention"] * config.num_hidden_layers
    assert kinds == said


def test_all_families_are_compared():
    assert {tiny(name).model_type for name in VARIANTS} == set(FAMILIES) == set(DEFAULTS)
    assert set(ALIASES.values()) <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_transformers_own(family):
    fields = {f.name: f.default for f in dataclasses.fields(CONFIG_MAPPING[family])}
    assert {key: fields[key] for key in DEFAULTS[family]} == dict(DEFAULTS[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_left_out_take_the_familys_defaults(family):
    """A config.json of a few keys gives what transformers' config class makes of the same keys."""
    needed = {"head_dim": 64} if family in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "glm4_moe") else {}
    if family == "nemotron":
        needed = {"head_dim": 128, "num_key_value_heads": 8}
    if family == "dots1":
        needed = {"n_routed_experts": 4, "n_shared_experts": 1}
    said = {"num_hidden_layers": 2, "vocab_size": 1024, "pad_token_id": 0, **needed}
    wanted = shapes_by_transformers(CONFIG_MAPPING[family](**said))
    found = tensor_shapes({"model_type": family, **said})
    assert {n: s for n, s in found.items() if not n.startswith("model.layers.2.")} == wanted


BASE = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 100, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}


@pytest.mark.parametrize(("config", "words"), [
    ({**BASE, "num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "num_experts", "8"]),
    ({**BASE, "num_key_value_heads": 3}, ["num_attention_heads", "4", "num_key_value_heads", "3"]),
    ({**BASE, "num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
    ({**BASE, "hidden_size": -64}, ["hidden_size", "-64"]),
    ({**BASE, "moe_intermediate_size": 1.5}, ["moe_intermediate_size", "1.5"]),
    ({**BASE, "attention_bias": "yes"}, ["attention_bias", "yes"]),
    ({**LLAMA, "hidden_size": 66}, ["hidden_size", "66", "num_attention_heads", "4"]),
    ({**BASE, "layer_types": ["full_attention"]}, ["layer_types", "1", "num_hidden_layers", "2"]),
    ({**BASE, "mlp_only_layers": 3}, ["mlp_only_layers", "3"]),
    ({"model_type": "smollm3", "num_hidden_layers": 2, "no_rope_layers": [1]}, ["no_rope_layers", "1", "2"]),
    ({"model_type": "qwen3_next", "linear_num_value_heads": 30}, ["linear_num_value_heads", "30", "16"]),
    ({"model_type": "unheard_of", "hidden_size": 64}, ["unheard_of", "headers", "qwen3_moe"]),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, ["BertForMaskedLM", "decoder"]),
    ({"model_type": "t5", "is_encoder_decoder": True}, ["t5", "decoder"]),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_key_and_value(config, words):
    with pytest.raises(UserError) as caught:
        tensor_shapes(config)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_text_part_of_a_multimodal_config_is_taken():
    inner = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 128}
    alone = tensor_shapes(inner)
    assert tensor_shapes({"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 3}}) == alone
    assert alone["model.layers.0.self_attn.q_proj.weight"] == (8 * 256, 64)  # heads and head size are the family's
    assert alone["model.embed_tokens.weight"] == (262208, 64)
    assert "lm_head.weight" not in alone
