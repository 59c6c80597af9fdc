"""Shapes of models from config.json, headers and stores: the same from each; damaged and odd input."""

import json
import subprocess
import sys
from dataclasses import replace
from math import prod

import pytest

from lamella.checkpoint.architecture import tensor_shapes
from lamella.errors import UserError
from lamella.forecast.describe import check_length, shape_of
from tests.checkpoint.families import VARIANTS, tiny
from tests.checkpoint.published import CONFIGS
from tests.engine.test_families import FAMILIES
from tests.forecast.headers import write_headers
from tests.forecast.models import QWEN3_235B, config_file


def bare(shape):
    """Without what tells where it comes from."""
    return replace(shape, name="", source="", notes=())


def as_json(config):
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("name", VARIANTS)
def test_headers_and_config_give_one_shape(name, tmp_path):
    config = tiny(name)
    config.dtype = "bfloat16"
    tensors = {n: ("BF16", s) for n, s in tensor_shapes({**as_json(config), "num_nextn_predict_layers": 0}).items()}
    folder = write_headers(tmp_path / "checkpoint", {**as_json(config), "num_nextn_predict_layers": 0}, tensors)
    by_headers, by_rules = shape_of(folder), shape_of(folder / "config.json")
    assert (by_headers.source, by_rules.source) == ("headers", "config.json")
    assert bare(by_headers) == bare(by_rules)
    assert by_headers.checkpoint_bytes == 2 * sum(prod(s) for _, s in tensors.values())


@pytest.mark.parametrize("family", ["llama-tied", "qwen3_moe-dense-first", "gpt_oss"])
def test_a_store_gives_the_shape_that_was_planned(family, made, tmp_path):
    store, _ = made(FAMILIES[family]())
    config = json.loads((store.path / "config.json").read_text())
    planned, found = shape_of(config_file(tmp_path, config)), shape_of(store.path)
    assert found.source == "store"
    assert bare(found) == bare(planned)
    assert [layer.store_bytes for layer in found.layers] == [store.group_bytes(i) for i in range(len(found.layers))]


def test_settings_of_the_store_count(tmp_path):
    file = config_file(tmp_path, CONFIGS["Qwen3-0.6B"])
    small, plain = shape_of(file), shape_of(file, block_size=128, double_quant=False)
    parameters = sum(layer.quantised_parameters for layer in small.layers)
    per_weight = [sum(x.store_bytes - x.raw_bytes for x in shape.layers) / parameters for shape in (small, plain)]
    assert per_weight == pytest.approx([0.5 + 1 / 64 + 4 / 64 / 256, 0.5 + 4 / 128], rel=1e-3)
    with pytest.raises(UserError, match="block size 63"):
        shape_of(file, block_size=63)


def test_a_head_in_the_files_that_config_ties_is_not_stored_twice(tmp_path):
    config = as_json(tiny("llama", tie_word_embeddings=True))
    tensors = {n: ("BF16", s) for n, s in tensor_shapes(config).items()}
    tied = shape_of(write_headers(tmp_path / "tied", config, tensors))
    copied = shape_of(write_headers(tmp_path / "copied", config, {**tensors, "lm_head.weight": ("BF16", (512, 64))}))
    assert bare(copied) == replace(bare(tied), checkpoint_bytes=tied.checkpoint_bytes + 2 * 512 * 64)
    assert any("lm_head.weight" in note for note in copied.notes)
    untied = {**config, "tie_word_embeddings": False}
    assert shape_of(
        write_headers(tmp_path / "untied", untied, {**tensors, "lm_head.weight": ("BF16", (512, 64))})
    ).head_parameters


def test_what_is_not_trained_is_told_apart(tmp_path):
    config = as_json(tiny("llama"))
    tensors = {n: ("BF16", s) for n, s in tensor_shapes(config).items()}
    more = {"vision_tower.blocks.0.attn.weight": ("BF16", (8, 8)), "mtp.fc.weight": ("BF16", (4, 8))}
    plain, found = (
        shape_of(write_headers(tmp_path / str(i), config, t)) for i, t in enumerate((tensors, {**tensors, **more}))
    )
    assert found.beyond_parameters == 64 + 32
    assert bare(found) == replace(bare(plain), beyond_parameters=96, checkpoint_bytes=plain.checkpoint_bytes + 192)
    assert any("left out: 2 tensors" in note for note in found.notes)


def test_an_unknown_family_is_described_from_its_headers(tmp_path):
    config = {**as_json(tiny("qwen3_moe")), "model_type": "unheard_of", "num_experts": 4}
    known = shape_of(config_file(tmp_path, as_json(tiny("qwen3_moe"))))
    tensors = {n: ("F32", s) for n, s in tensor_shapes(as_json(tiny("qwen3_moe"))).items()}
    found = shape_of(write_headers(tmp_path / "folder", config, tensors))
    assert [layer.matrices for layer in found.layers] == [layer.matrices for layer in known.layers]
    assert any("unheard_of" in note for note in found.notes)
    with pytest.raises(UserError, match=r"unheard_of.*\n?.*headers"):
        shape_of(tmp_path / "folder" / "config.json")


@pytest.mark.parametrize(("files", "words"), [
    ({}, ["config.json", "no such file"]),
    ({"config.json": "{'model_type': 1}"}, ["not valid JSON", "config.json:1"]),
    ({"config.json": "[1]"}, ["not a JSON object"]),
    ({"config.json": json.dumps({"hidden_size": 3})}, ["model_type"]),
    ({"config.json": json.dumps({**QWEN3_235B, "num_hidden_layers": 0})}, ["num_hidden_layers", "0"]),
    ({"config.json": json.dumps({**QWEN3_235B, "num_experts_per_tok": 200})}, ["200", "num_experts"]),
    ({"config.json": json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]})}, ["BertForMaskedLM"]),
    ({"config.json": json.dumps(QWEN3_235B), "model.safetensors": "version https://git-lfs.github.com/spec/v1\n"},
     ["git-lfs"]),
    ({"config.json": json.dumps(QWEN3_235B), "model.safetensors": "{}"}, ["not a safetensors file"]),
])  # fmt: skip
def test_what_cannot_be_described_is_told(files, words, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        shape_of(tmp_path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_headers_of_another_model_are_refused(tmp_path):
    config = as_json(tiny("llama"))
    tensors = {n: ("BF16", s) for n, s in tensor_shapes(as_json(tiny("llama", hidden_size=32))).items()}
    with pytest.raises(UserError, match="hidden size 64"):
        shape_of(write_headers(tmp_path, config, tensors))


def test_neither_a_file_nor_a_hub_id():
    with pytest.raises(UserError, match="no such file or folder"):
        shape_of("not/there/at/all")


def test_a_folder_without_weights_is_described_from_its_config(tmp_path):
    config_file(tmp_path, QWEN3_235B)
    found = shape_of(tmp_path)
    assert found.source == "config.json"
    assert any("no weights" in note for note in found.notes)


def test_sequences_longer_than_the_model_was_made_for(tmp_path):
    shape = shape_of(config_file(tmp_path, QWEN3_235B))
    check_length(shape, 40960)
    with pytest.raises(UserError, match="40961 tokens"):
        check_length(shape, 40961)
    check_length(replace(shape, max_tokens=None), 10**9)


def test_assumed_keys_are_told(tmp_path):
    config = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 2}
    notes = " ".join(shape_of(config_file(tmp_path, config)).notes)
    assert "num_attention_heads = 32" in notes
    assert "hidden_size" not in notes
    assert not shape_of(config_file(tmp_path, QWEN3_235B)).notes


def test_describing_imports_no_torch(tmp_path):
    file = config_file(tmp_path, QWEN3_235B)
    code = (
        "import sys; from lamella.forecast.describe import shape_of; from lamella.forecast.trainable import alternatives;"
        "from lamella.forecast.costs import cost_of; from lamella.config import LoraConfig;"
        f"shape = shape_of({str(file)!r}); alternatives(shape, LoraConfig()); cost_of(shape, [], 2, True);"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
