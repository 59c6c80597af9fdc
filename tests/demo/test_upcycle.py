import json

import pytest
import torch
from safetensors.torch import load_file

from lamella.demo.upcycle import Upcycling, largest_logit_gap, mixtral_config, upcycle
from lamella.errors import UserError
from tests.fixtures import dense_config, write_checkpoint


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("dense") / "model", dense_config(layers=2), shards=3)


@pytest.mark.parametrize(
    "how",
    [
        Upcycling(kind="slices", experts=8, top_k=4),
        Upcycling(kind="slices", experts=4, top_k=4),
        Upcycling(kind="slices", experts=6, top_k=2, seed=3),
        Upcycling(kind="copies", experts=4, top_k=2),
        Upcycling(kind="copies", experts=3, top_k=1),
    ],
)
def test_upcycled_model_gives_the_dense_logits_in_fp32(dense, tmp_path, how):
    moe = upcycle(dense, tmp_path / "moe", how)
    gap, largest = largest_logit_gap(dense, moe, list(range(5, 45)))
    assert gap <= 1e-5 * largest


def test_every_expert_differs_from_its_neighbours_and_carries_its_share(dense, tmp_path):
    moe = upcycle(dense, tmp_path / "moe", Upcycling(kind="slices", experts=8, top_k=4))
    config = json.loads((moe / "config.json").read_text())
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == ("mixtral", 8, 4)
    layer = load_file(moe / "model-00001-of-00003.safetensors")
    gate = layer["model.layers.0.block_sparse_moe.gate.weight"]
    assert torch.equal(gate[0], gate[3])
    assert torch.equal(gate[:4], -gate[4:])
    down = [layer[f"model.layers.0.block_sparse_moe.experts.{e}.w2.weight"] for e in range(8)]
    assert down[0].shape == (64, 32)
    assert not torch.equal(down[0], down[1])
    assert torch.equal(down[0], down[4])


def test_a_broken_slice_shows_in_the_logits(dense, tmp_path):
    moe = upcycle(dense, tmp_path / "moe", Upcycling())
    path = moe / "model-00002-of-00003.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.block_sparse_moe.experts.0.w2.weight"
    tensors[name] = tensors[name] / 4  # as if the scale had been forgotten
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    gap, largest = largest_logit_gap(dense, moe, list(range(5, 45)))
    assert gap > 1e-3 * largest


def test_what_mixtral_cannot_express_is_refused():
    llama = {"model_type": "llama", "intermediate_size": 128, "num_hidden_layers": 2, "hidden_size": 64}
    with pytest.raises(UserError, match="qwen3"):
        mixtral_config({**llama, "model_type": "qwen3"}, Upcycling())
    with pytest.raises(UserError, match="biases"):
        mixtral_config({**llama, "attention_bias": True}, Upcycling())
    with pytest.raises(UserError, match="slices of 3"):
        mixtral_config(llama, Upcycling(experts=6, top_k=3))
    with pytest.raises(UserError, match="top_k"):
        mixtral_config(llama, Upcycling(experts=2, top_k=4))


def test_finished_target_is_left_alone(dense, tmp_path):
    target = tmp_path / "moe"
    target.mkdir()
    assert upcycle(dense, target, Upcycling()) == target
    assert list(target.iterdir()) == []
