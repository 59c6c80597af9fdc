"""Checkpoints that are quantised already: real weights are counted, and what they take on disk."""

import json
from dataclasses import replace
from math import ceil, prod

import pytest
import torch

from lamella.checkpoint.architecture import tensor_shapes
from lamella.checkpoint.packed import disk_rule, unpacked
from lamella.checkpoint.source import read_tensors
from lamella.errors import UserError
from lamella.forecast.describe import shape_of
from tests.checkpoint.families import tiny
from tests.checkpoint.packed_writers import write_packed
from tests.checkpoint.published import CONFIGS
from tests.fixtures import dense_config, write_checkpoint
from tests.forecast.headers import write_headers


def as_json(config):
    return {**json.loads(config.to_json_string(use_diff=False)), "num_nextn_predict_layers": 0, "dtype": "bfloat16"}


def plain(shape):
    """Without bytes on disk and what tells where the shape comes from."""
    layers = tuple(replace(layer, checkpoint_bytes=0) for layer in shape.layers)
    return replace(shape, name="", source="", notes=(), layers=layers, checkpoint_bytes=0)


def is_linear(name, shape):
    return len(shape) == 2 and ("_proj" in name) and name.endswith(".weight")


def fp8(tensors):
    out = {}
    for name, shape in tensors.items():
        if is_linear(name, shape):
            out[name] = ("F8_E4M3", shape)
            out[f"{name}_scale_inv"] = ("F32", tuple(ceil(n / 128) for n in shape))
        else:
            out[name] = ("BF16", shape)
    return out


def mxfp4(tensors):
    out = {}
    for name, shape in tensors.items():
        if len(shape) == 3:
            experts, inputs, outputs = shape
            out[f"{name}_blocks"] = ("U8", (experts, outputs, inputs // 32, 16))
            out[f"{name}_scales"] = ("U8", (experts, outputs, inputs // 32))
        else:
            out[name] = ("BF16", shape)
    return out


def compressed(tensors):
    out = {}
    for name, shape in tensors.items():
        if is_linear(name, shape):
            out[f"{name}_packed"] = ("I32", (shape[0], shape[1] // 8))
            out[f"{name}_scale"] = ("BF16", (shape[0], shape[1] // 32))
            out[f"{name}_shape"] = ("I64", (2,))
        else:
            out[name] = ("BF16", shape)
    return out


def gptq(tensors):
    out = {}
    for name, (*shape,) in tensors.items():
        base = name.removesuffix(".weight")
        if is_linear(name, shape):
            outputs, inputs = shape
            out |= {f"{base}.qweight": ("I32", (inputs // 8, outputs)), f"{base}.g_idx": ("I32", (inputs,)),
                    f"{base}.qzeros": ("I32", (1, outputs // 8)), f"{base}.scales": ("F16", (1, outputs))}  # fmt: skip
        else:
            out[name] = ("BF16", tuple(shape))
    return out


def awq(tensors):
    out = {}
    for name, (*shape,) in tensors.items():
        base = name.removesuffix(".weight")
        if is_linear(name, shape):
            outputs, inputs = shape
            out |= {f"{base}.qweight": ("I32", (inputs, outputs // 8)), f"{base}.qzeros": ("I32", (1, outputs // 8)),
                    f"{base}.scales": ("F16", (1, outputs))}  # fmt: skip
        else:
            out[name] = ("BF16", tuple(shape))
    return out


GROUPS = {"group_0": {"weights": {"num_bits": 4, "group_size": 32}, "targets": ["Linear"]}}
WAYS = {
    "fp8": ("deepseek_v3", {"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8, 0),
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4"}, mxfp4, 0),
    "compressed-tensors": ("deepseek_v3", {"quant_method": "compressed-tensors", "config_groups": GROUPS}, compressed, 0.02),
    "gptq": ("llama", {"quant_method": "gptq", "bits": 4, "group_size": 128}, gptq, 0.15),
    "awq": ("qwen3_moe", {"quant_method": "awq", "bits": 4, "group_size": 128}, awq, 0.15),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_real_weights_are_counted(way, tmp_path):
    family, settings, pack, tolerance = WAYS[way]
    config = as_json(tiny(family, intermediate_size=128, hidden_size=128))
    packed = pack(tensor_shapes(config))
    folder = write_headers(tmp_path / "packed", {**config, "quantization_config": settings}, packed)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, by_rules, original = shape_of(folder), shape_of(folder / "config.json"), shape_of(tmp_path / "config.json")
    assert plain(found) == plain(by_rules)
    if way == "mxfp4":  # a store keeps it: 4.25 bits a weight, where NF4 takes about 4.13
        experts = {m.name: m.parameters for m in found.layers[0].matrices if m.kind == "experts"}
        more = sum(n // 2 + n // 32 for n in experts.values()) - sum(n // 2 + n // 64 for n in experts.values())
        kept, made = (shape.layers[0].store_bytes for shape in (found, original))
        assert 0 < kept - made < more
    else:
        assert plain(found) == plain(original)
    on_disk = sum(
        p.stat().st_size - 8 - int.from_bytes(p.read_bytes()[:8], "little") for p in folder.glob("*.safetensors")
    )
    assert found.checkpoint_bytes == on_disk < original.checkpoint_bytes
    assert by_rules.checkpoint_bytes == pytest.approx(on_disk, rel=tolerance, abs=0)


def test_a_way_that_is_not_known(tmp_path):
    config = as_json(tiny("llama"))
    packed = {"quantization_config": {"quant_method": "hqq"}}
    tensors = {n: ("U8", s) for n, s in tensor_shapes(config).items()}
    with pytest.raises(UserError, match="hqq"):
        shape_of(write_headers(tmp_path, {**config, **packed}, tensors))
    assert any("hqq" in note for note in shape_of(tmp_path / "config.json").notes)


@pytest.mark.parametrize("way", ["bnb-nf4", "bnb-nf4-plain", "bnb-int8", "fp8-row"])
def test_shapes_behind_packed_bytes(tmp_path, way):
    """A forecast counts the weights of checkpoints that other libraries have written, and the bytes of those that a store
    keeps in their own form."""
    source = write_checkpoint(tmp_path / "plain", dense_config(), dtype=torch.bfloat16, shards=1)
    written = write_packed(way, source, tmp_path / "packed")
    found, original = shape_of(written.path), shape_of(source)
    as_original = [replace(x, store_bytes=y.store_bytes) for x, y in zip(found.layers, original.layers, strict=True)]
    assert plain(replace(found, layers=tuple(as_original))) == plain(original)
    weights = found.layers[0].quantised_parameters
    more = {"bnb-nf4-plain": (4 - 1) / 64, "bnb-int8": 1 + 4 / 64 - 0.5 - 1 / 64}.get(way, 0)  # bytes a weight
    grown = found.layers[0].store_bytes - original.layers[0].store_bytes
    assert (grown != 0) is (more != 0)
    assert grown == pytest.approx(more * weights, rel=0, abs=2600)  # a table, alignment, rows of 64 and 128
    assert found.checkpoint_bytes < original.checkpoint_bytes
    by_rules = shape_of(written.path / "config.json")
    assert by_rules.checkpoint_bytes == pytest.approx(found.checkpoint_bytes, rel=0.01)


def test_shapes_that_headers_do_not_tell(tmp_path):
    source = write_checkpoint(tmp_path / "plain", dense_config(), dtype=torch.bfloat16, shards=1)
    written = write_packed("bnb-nf4", source, tmp_path / "packed")
    config = json.loads((written.path / "config.json").read_text())
    with pytest.raises(UserError, match="not in the headers"):
        unpacked(read_tensors(written.path)[0], config)


def test_modules_left_in_16_bit():
    rule = disk_rule({"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": [
        "lm_head", "model.layers.0.mlp", "re:.*layers\\.1\\..*q_proj", "model.layers.*.self_attn.o_proj"]}})  # fmt: skip
    sizes = {name: rule.nbytes(f"model.layers.{name}.weight", (10, 10), True, 2) for name in (
        "0.mlp.up_proj", "1.mlp.up_proj", "0.self_attn.q_proj", "1.self_attn.q_proj", "3.self_attn.o_proj")}  # fmt: skip
    assert sizes == {"0.mlp.up_proj": 200, "1.mlp.up_proj": 104, "0.self_attn.q_proj": 104, "1.self_attn.q_proj": 200,
                     "3.self_attn.o_proj": 200}  # fmt: skip
    assert rule.by_layer
    assert not disk_rule(CONFIGS["DeepSeek-V3"]).by_layer
    with pytest.raises(UserError, match="no expression"):
        disk_rule({"quantization_config": {"quant_method": "fp8", "ignore": ["re:("]}})
    with pytest.raises(UserError, match="3 bits"):
        disk_rule({"quantization_config": {"quant_method": "gptq", "bits": 3}})


def test_packed_layers_are_as_large_as_their_files(tmp_path):
    """Layers alike differ on disk where one is left out."""
    settings = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp"]}
    (tmp_path / "config.json").write_text(json.dumps({**as_json(tiny("llama")), "quantization_config": settings}))
    first, second, *_ = shape_of(tmp_path / "config.json").layers
    mlp = sum(prod((m.outputs, m.inputs)) for m in first.matrices if m.kind == "mlp")
    assert first.checkpoint_bytes - second.checkpoint_bytes == mlp - 3 * 4
    assert first.matrices == second.matrices
