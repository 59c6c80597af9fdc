"""Matrices of families that have no rules, from their headers: named and ordered as the engine has them."""

import json

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.forecast.describe import shape_of
from lamella.forecast.trainable import sites_of
from lamella.models.skeleton import Skeleton
from tests.checkpoint.families import SMALL
from tests.checkpoint.test_architecture import shapes_by_transformers
from tests.engine.families import tiny
from tests.engine.test_mixers import MIXERS
from tests.forecast.headers import write_headers

OTHERS = {
    "phi": {}, "gpt_neox": {}, "granitemoe": {"num_local_experts": 4}, "gemma4_text": {},
    "exaone_moe": {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "mlp_layer_types": ["dense", *["sparse"] * 3]},
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_sites_and_counts_from_headers(family, tmp_path):
    fields = CONFIG_MAPPING[family].__dataclass_fields__
    settings = {k: v for k, v in SMALL.items() if k in fields}
    config = CONFIG_MAPPING[family](**{**settings, **OTHERS[family]})
    tensors = shapes_by_transformers(config)
    folder = write_headers(
        tmp_path, json.loads(config.to_json_string(use_diff=False)), {n: ("F32", s) for n, s in tensors.items()}
    )
    shape = shape_of(folder)
    assert shape.total_parameters == sum(torch.Size(s).numel() for s in tensors.values())
    skeleton = Skeleton(config, torch.float32)
    lora = LoraConfig(rank=4)
    wanted = [(s.layer, s.key.removeprefix(f"{skeleton.prefix}.{s.layer}."), s.inputs, s.outputs, s.experts or 1)
              for s in Adapter.create(skeleton, lora, 0).sites.values()]  # fmt: skip
    found = [
        (s.layer, s.matrix.name, s.matrix.inputs, s.matrix.outputs, s.matrix.experts) for s in sites_of(shape, lora)
    ]
    assert sorted(found) == sorted(wanted)
    assert found == wanted or family == "gpt_neox"  # its MLP stands before its attention


def made_of(name):
    """A config of a family that leaves some of its linear layers without pairs, or keeps them transposed."""
    if name == "gpt2":
        return CONFIG_MAPPING["gpt2"](n_embd=64, n_layer=2, n_head=4, vocab_size=512)
    return MIXERS[name]() if name in MIXERS else tiny(name)


@pytest.mark.parametrize("name", ["gpt2", "laguna", "falcon_h1", "jamba"])
def test_what_gets_pairs_is_what_the_engine_gives_them(name, tmp_path):
    config = made_of(name)
    tensors = shapes_by_transformers(config)
    shape = shape_of(write_headers(tmp_path, config.to_dict(), {n: ("F32", s) for n, s in tensors.items()}))
    skeleton = Skeleton(config, torch.float32)
    wanted = {(s.layer, s.key.removeprefix(f"{skeleton.prefix}.{s.layer}."), s.inputs, s.outputs)
              for s in Adapter.create(skeleton, LoraConfig(), 0).sites.values()}  # fmt: skip
    assert {
        (s.layer, s.matrix.name, s.matrix.inputs, s.matrix.outputs) for s in sites_of(shape, LoraConfig())
    } == wanted
