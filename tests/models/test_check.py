"""`lamella quantize` refuses what could never run, before it writes anything."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella.errors import UserError
from lamella.models.check import check_checkpoint
from lamella.store.quantize import quantize_checkpoint
from tests.fixtures import dense_config, write_checkpoint


def checkpoint(tmp_path, change_config=None, change_tensors=None):
    folder = write_checkpoint(tmp_path / "hf", dense_config(), shards=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **(change_config or {})}))
    if change_tensors:
        tensors = change_tensors(load_file(folder / "model.safetensors"))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != Q}, r"q_proj\.weight: 0 of 4096 values have a source"),
        (lambda t: {**t, "model.layers.0.extra.lora_A.weight": torch.zeros(4, 64)}, "has no place in LlamaForCausalLM"),
        (lambda t: {**t, Q.replace("weight", "bias"): torch.zeros(64)}, "has no place in LlamaForCausalLM"),
    ],
)
def test_incomplete_or_foreign_tensors(change, message, tmp_path):
    folder = checkpoint(tmp_path, change_tensors=change)
    with pytest.raises(UserError, match=message):
        quantize_checkpoint(folder, tmp_path / "store", check=check_checkpoint)
    assert not list(tmp_path.glob("store*"))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}}, {"hidden_act": "nonsense"},
        {"max_position_embeddings": "many"}, {"pad_token_id": 100_000}, {"num_attention_heads": 0},
    ],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_config_values_that_no_model_can_be_built_from(change, tmp_path):
    folder = checkpoint(tmp_path, change)
    with pytest.raises(UserError) as caught:
        quantize_checkpoint(folder, tmp_path / "store", check=check_checkpoint)
    assert "config.json" in caught.value.render()
    assert not list(tmp_path.glob("store*"))


def test_more_layers_than_the_config_tells_of(tmp_path):
    folder = checkpoint(tmp_path, {"num_hidden_layers": 1})
    with pytest.raises(UserError, match=r"says 1 layers, the files hold model\.layers\.1"):
        quantize_checkpoint(folder, tmp_path / "store")


def test_b23_a_shard_that_the_index_leaves_out(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", dense_config())
    index = folder / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    last = max(tree["weight_map"].values())
    tree["weight_map"] = {k: v for k, v in tree["weight_map"].items() if v != last}
    index.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=f"names none of the tensors of {last}"):
        quantize_checkpoint(folder, tmp_path / "store")


def test_a_good_checkpoint_passes(tmp_path):
    quantize_checkpoint(checkpoint(tmp_path), tmp_path / "store", check=check_checkpoint)
    assert (tmp_path / "store" / "manifest.json").is_file()
