"""Checkpoints that must be refused, each in one error that names the fault (B23), and what is read from sound ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from lamella.checkpoint.fingerprint import fingerprint
from lamella.checkpoint.source import INDEX_NAME, Checkpoint
from lamella.errors import UserError
from tests.checkpoint.helpers import embedding, layer_config, write_tensors
from tests.fixtures import dense_config, moe_config, write_checkpoint


@pytest.fixture
def dense(tmp_path):
    return write_checkpoint(tmp_path / "dense", dense_config(), shards=3)


def refusal(path) -> str:
    with pytest.raises(UserError) as caught:
        Checkpoint.open(path)
    return str(caught.value)


def shard(path, number: int):
    return sorted(path.glob("model-*.safetensors"))[number - 1]


def test_opens_sharded_and_single(dense, tmp_path):
    single = write_checkpoint(tmp_path / "single", dense_config(), shards=1)
    with Checkpoint.open(dense) as a, Checkpoint.open(single) as b:
        assert set(a.tensors) == set(b.tensors)
        assert len(a.layout.layers) == 2
        assert [t.name for t in a.layout.outer] == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
        name = "model.layers.1.mlp.down_proj.weight"
        assert b"".join(a.chunks(a.tensors[name], 1000)) == b"".join(b.chunks(b.tensors[name], 1 << 20))


def test_b23_missing_shard_is_named(dense):
    shard(dense, 2).unlink()
    assert "model-00002-of-" in refusal(dense)


def test_b23_cut_shard_tells_promised_and_real_bytes(dense):
    file = shard(dense, 2)
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size // 2)
    message = refusal(dense)
    assert f"header promises {size} bytes, file has {size // 2}" in message
    assert file.name in message


def test_b23_shard_cut_inside_its_header(dense):
    with shard(dense, 2).open("r+b") as stream:
        stream.truncate(40)
    assert "header promises" in refusal(dense)


@pytest.mark.parametrize("change", [{"hidden_size": 96}, {"intermediate_size": 160}, {"num_key_value_heads": 4}])
def test_b23_shard_of_another_model_names_first_wrong_tensor(dense, tmp_path, change):
    other = write_checkpoint(tmp_path / "other", dense_config(**change), shards=3)
    shutil.copyfile(shard(other, 2), shard(dense, 2))
    message = refusal(dense)
    assert "has shape" in message
    assert shard(dense, 2).name in message
    assert "config.json says" in message


def test_b23_is_found_without_loading_torch(dense, tmp_path):
    """The refusal is instant because nothing heavy is imported before it, and nothing is written."""
    shard(dense, 2).unlink()
    code = (
        "import sys; from pathlib import Path; from lamella.store.quantize import quantize_checkpoint\n"
        "from lamella.errors import UserError\n"
        f"try: quantize_checkpoint({str(dense)!r}, Path({str(tmp_path / 'out')!r}))\n"
        "except UserError: print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_git_lfs_pointer(dense):
    shard(dense, 1).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n")
    assert "git-lfs pointer" in refusal(dense)


def test_index_names_tensor_that_no_file_has(dense):
    index = json.loads((dense / INDEX_NAME).read_text())
    index["weight_map"]["model.layers.0.extra.weight"] = shard(dense, 1).name
    (dense / INDEX_NAME).write_text(json.dumps(index))
    assert "model.layers.0.extra.weight" in refusal(dense)


def test_file_has_tensor_that_index_does_not_name(dense):
    index = json.loads((dense / INDEX_NAME).read_text())
    gone = sorted(index["weight_map"])[-1]
    del index["weight_map"][gone]
    (dense / INDEX_NAME).write_text(json.dumps(index))
    message = refusal(dense)
    assert gone in message
    assert "does not list it" in message


def test_tensor_in_two_files(dense):
    shutil.copyfile(shard(dense, 1), shard(dense, 2))
    assert "is in two files" in refusal(dense)


def test_shards_without_index(dense):
    (dense / INDEX_NAME).unlink()
    assert INDEX_NAME in refusal(dense)


def test_missing_layer_and_missing_expert(tmp_path):
    weight = torch.zeros(64, 64)
    gap = {**embedding(), "model.layers.0.mlp.fc1.weight": weight, "model.layers.2.mlp.fc1.weight": weight}
    assert "model.layers.1 has no tensors" in refusal(write_tensors(tmp_path / "gap", layer_config(3), gap))
    experts = {f"model.layers.0.mlp.experts.{e}.w1.weight": weight for e in (0, 1, 3)}
    path = write_tensors(tmp_path / "experts", layer_config(num_experts=4), {**embedding(), **experts})
    assert "model.layers.0.mlp.experts.2.w1.weight" in refusal(path)


def test_no_decoder_layers(tmp_path):
    path = write_tensors(tmp_path / "c", layer_config(), {"conv.weight": torch.zeros(4, 4)})
    assert "no decoder layers found" in refusal(path)


@pytest.mark.parametrize(
    ("content", "told"), [(b"{", "not valid JSON"), (b"[1]", "not a JSON object"), (b"\xff\xfe{", "cannot be read")]
)
def test_broken_config(dense, content, told):
    (dense / "config.json").write_bytes(content)
    assert told in refusal(dense)


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 64, b"\x08" + b"\x00" * 7 + b"not json"])
def test_not_safetensors(tmp_path, content):
    path = write_tensors(tmp_path / "c", layer_config(), embedding())
    (path / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(path)


def test_no_such_folder_and_files_in_its_place(tmp_path):
    assert "no such folder" in refusal(tmp_path / "nothing" / "here" / "at all")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "is cut: the header" in refusal(tmp_path / "model.gguf")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_text(json.dumps(layer_config()))
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"x")
    assert "pickled" in refusal(tmp_path / "bin")


def test_fingerprint_is_of_the_weights(tmp_path):
    def of(path) -> str:
        with Checkpoint.open(path) as checkpoint:
            return fingerprint(checkpoint, False)

    first = of(write_checkpoint(tmp_path / "a", moe_config(), shards=3))
    assert first == of(write_checkpoint(tmp_path / "b", moe_config(), shards=1))
    assert first != of(write_checkpoint(tmp_path / "c", moe_config(), seed=1))
    assert first != of(write_checkpoint(tmp_path / "d", moe_config(), dtype=torch.bfloat16))


def write_header(path, entries: dict, data: bytes):
    """A safetensors file with any header, right or wrong."""
    text = json.dumps(entries).encode() if isinstance(entries, dict) else entries
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "needs 8 bytes, header gives it 4"),
        ({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}, "dtype 'F4'"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "is broken"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "is broken"),
        ({"a": 3}, "is broken"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "leaves a hole"),
        (
            {n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in ("a", "b")},
            "overlaps",
        ),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', "'a' appears twice"),
        (b"[]", "not a JSON object"),
    ],
)
def test_headers_that_lie(tmp_path, entries, told):
    path = write_tensors(tmp_path / "c", layer_config(), embedding())
    message = refusal(write_header(path, entries, bytes(8)))
    assert told in message
    assert "model.safetensors" in message


def test_hub_id_without_network(tmp_path):
    code = (
        "from lamella.checkpoint.source import Checkpoint; from lamella.errors import UserError\n"
        "try: Checkpoint.open('some-owner/some-model')\n"
        "except UserError as error: print(error)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert "'some-owner/some-model' is no local folder and the hub cannot be reached" in done.stdout
    assert "fix:" in done.stdout
