"""Stores against bitsandbytes and against their sources; what is kept, and what is said about it."""

from __future__ import annotations

import json

import bitsandbytes.functional as bnb
import pytest
import torch
from safetensors import safe_open

from lamella.checkpoint.source import Checkpoint
from lamella.errors import UserError
from lamella.store.pipeline import CHUNK_BYTES
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from lamella.store.reader import Store
from tests.checkpoint.helpers import embedding, layer_config, write_fused, write_tensors
from tests.fixtures import dense_config, make_tokenizer, moe_config, write_checkpoint


def source_tensor(path, name):
    with Checkpoint.open(path) as checkpoint, safe_open(checkpoint.tensors[name].file, "pt") as file:
        return file.get_tensor(name)


def assert_equals_bitsandbytes(packed, name, x, *, block_size=64, double_quant=True):
    codes, state = bnb.quantize_4bit(
        x.reshape(-1, 1), blocksize=block_size, compress_statistics=double_quant, quant_type="nf4"
    )
    assert torch.equal(packed.part(name, "codes", torch.uint8), codes.view(-1)), name
    if double_quant:
        assert torch.equal(packed.part(name, "absmax_q", torch.uint8), state.absmax), name
        assert torch.equal(packed.part(name, "absmax_code", torch.float32), state.state2.code), name
        assert torch.equal(packed.part(name, "absmax2", torch.float32), state.state2.absmax), name
        assert torch.equal(packed.part(name, "offset", torch.float32)[0], state.offset), name
    else:
        assert torch.equal(packed.part(name, "absmax", torch.float32), state.absmax), name
    out = packed.dequantize(name, torch.empty(x.shape, dtype=x.dtype))
    assert torch.equal(out.view(-1), bnb.dequantize_4bit(codes, state).view(-1)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("double_quant", [True, False])
def test_every_tensor_equals_bitsandbytes_or_its_source(tmp_path, dtype, block_size, double_quant):
    source = write_checkpoint(tmp_path / "moe", moe_config(), dtype=dtype)
    settings = QuantizeSettings(block_size=block_size, double_quant=double_quant)
    manifest = quantize_checkpoint(source, tmp_path / "store", settings)
    store = Store.open(tmp_path / "store")
    assert store.manifest == manifest
    seen = set()
    for i in ("outer", *range(manifest.num_layers)):
        packed = store.load(i)
        assert store.group_bytes(i) == packed.buffer.numel()
        for record in store.records(i):
            x = source_tensor(source, record.name)
            seen.add(record.name)
            assert record.shape == tuple(x.shape)
            if record.format == "raw":
                assert torch.equal(packed.raw(record.name), x)
                assert torch.equal(packed.dequantize(record.name, torch.empty(x.shape)), x.float())
            else:
                assert_equals_bitsandbytes(packed, record.name, x, block_size=block_size, double_quant=double_quant)
    with Checkpoint.open(source) as checkpoint:
        assert seen == set(checkpoint.tensors)
    assert store.verify() == []


def test_fused_tensor_in_chunks_equals_bitsandbytes_on_the_whole(tmp_path):
    """A tensor of several chunks and an odd end: one flat tensor, one offset over all its scales."""
    x = torch.randn(3, 2802, 2001, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert x.numel() * 2 > 2 * CHUNK_BYTES
    assert x.numel() % 64
    name = "model.layers.0.mlp.experts.gate_up_proj"
    source = write_tensors(tmp_path / "c", layer_config(num_experts=3, hidden_size=2001), {**embedding(2001), name: x})
    quantize_checkpoint(source, tmp_path / "store")
    assert_equals_bitsandbytes(Store.open(tmp_path / "store").load(0), name, x)


def test_b43_odd_shapes(tmp_path):
    shapes = {"a": (3, 37), "b": (1, 1), "c": (7, 64), "d": (5, 130), "zero": (2, 64)}
    tensors = {f"model.layers.0.mlp.{n}_proj.weight": torch.randn(s) for n, s in shapes.items()}
    tensors["model.layers.0.mlp.zero_proj.weight"].zero_()
    source = write_tensors(tmp_path / "c", layer_config(), {**embedding(), **tensors})
    quantize_checkpoint(source, tmp_path / "store", QuantizeSettings(double_quant=False))
    store = Store.open(tmp_path / "store")
    packed = store.load(0)
    record = packed.records["model.layers.0.mlp.a_proj.weight"]
    assert record.parts["codes"][1] == 56
    assert record.parts["absmax"][1] == 2 * 4
    for name, x in tensors.items():
        out = packed.dequantize(name, torch.empty(x.shape))
        bound = 0.152 * torch.nn.functional.pad(x.flatten().abs(), (0, -x.numel() % 64)).view(-1, 64).amax(1)
        error = torch.nn.functional.pad((out - x).flatten().abs(), (0, -x.numel() % 64)).view(-1, 64).amax(1)
        assert (error <= bound).all(), name
    assert not packed.dequantize("model.layers.0.mlp.zero_proj.weight", torch.ones(2, 64)).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"])
def test_b43_nan_and_infinity_are_refused_by_name(tmp_path, value, name):
    x = torch.ones(64) if "norm" in name else torch.ones(128, 64)
    x.view(-1)[63] = value
    source = write_tensors(tmp_path / "c", layer_config(), {**embedding(), name: x.bfloat16()})
    with pytest.raises(UserError, match=name):
        quantize_checkpoint(source, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def by_class(manifest):
    return {row.tensor_class: row for row in manifest.report}


def test_b39_report_has_bytes_per_class_fused_and_unfused(tmp_path):
    config = moe_config(experts=8, inner=64, hidden_size=128)
    unfused = quantize_checkpoint(write_checkpoint(tmp_path / "a", config, dtype=torch.bfloat16), tmp_path / "unfused")
    fused = quantize_checkpoint(write_fused(tmp_path / "b", config), tmp_path / "fused")
    for manifest in (unfused, fused):
        rows = by_class(manifest)
        assert rows["experts"].format == rows["attention"].format == "nf4"
        assert rows["experts"].bytes_per_weight < 0.6
        assert rows["experts"].parameters == 2 * 8 * 3 * 64 * 128
        assert rows["experts"].bytes_source == 2 * rows["experts"].parameters
        for name in ("embedding", "head", "norm", "router"):
            assert rows[name].format == "raw"
            assert rows[name].bytes_store == rows[name].bytes_source
        assert rows["router"].names == ("model.layers.*.mlp.gate.weight",)
        assert not manifest.notices
    a, b = by_class(unfused)["experts"].bytes_store, by_class(fused)["experts"].bytes_store
    assert abs(a - b) <= 0.05 * b
    total = sum(group.nbytes for _, group in fused.groups())
    assert sum(row.bytes_store for row in fused.report) == pytest.approx(total, rel=0.01)  # the rest is alignment


def test_b39_weights_of_no_known_kind_are_told_with_their_share(tmp_path, capsys):
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.ones(192, 64),
        "model.layers.0.strange.weight": torch.ones(64, 64),
    }
    source = write_tensors(tmp_path / "c", layer_config(), {**embedding(), **tensors})
    manifest = quantize_checkpoint(source, tmp_path / "store")
    line = next(line for line in manifest.notices if "NOT QUANTISED" in line)
    assert "25 %" in line
    assert "model.layers.*.strange.weight" in line
    assert line in capsys.readouterr().err


def test_b41_router_keeps_its_bits_and_its_choices(tmp_path):
    config = moe_config(experts=32, top_k=4)
    source = write_checkpoint(tmp_path / "moe", config, dtype=torch.bfloat16, shards=1)
    generator = torch.Generator().manual_seed(0)
    name = "model.layers.0.mlp.gate.weight"
    with safe_open(source / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  safe_open is no mapping
    base = torch.randn(1, 64, generator=generator)
    tensors[name] = (base + 0.01 * torch.randn(32, 64, generator=generator)).bfloat16()
    write_tensors(source, json.loads((source / "config.json").read_text()), tensors)
    quantize_checkpoint(source, tmp_path / "store")
    packed = Store.open(tmp_path / "store").load(0)
    assert packed.records[name].tensor_class == "router"
    kept = packed.dequantize(name, torch.empty(32, 64))

    hidden = torch.randn(500, 64, generator=generator)

    def chosen(router):
        return (hidden @ router.T).topk(4).indices.sort().values

    assert torch.equal(chosen(kept), chosen(tensors[name].float()))
    codes, state = bnb.quantize_4bit(tensors[name], quant_type="nf4")
    assert not torch.equal(chosen(bnb.dequantize_4bit(codes, state).float()), chosen(kept))  # what it guards against


def test_kept_dtype(tmp_path):
    source = write_checkpoint(tmp_path / "dense", dense_config())
    asis = quantize_checkpoint(source, tmp_path / "asis")
    assert {row.dtype for row in asis.report} == {"float32"}
    assert any("fp32 as in the source" in line for line in asis.notices)
    halved = quantize_checkpoint(source, tmp_path / "bf16", QuantizeSettings(kept_dtype="bf16"))
    assert {row.dtype for row in halved.report if row.format == "raw"} == {"bfloat16"}
    assert not halved.notices
    name = "model.embed_tokens.weight"
    packed = Store.open(tmp_path / "bf16").load("outer")
    assert torch.equal(packed.raw(name), source_tensor(source, name).bfloat16())


def tied_variant(tmp_path, *, head: bool, key: str, value: bool):
    """DENSE whose files and config.json say what the case wants; B26."""
    source = write_checkpoint(tmp_path / "c", dense_config(tie_word_embeddings=not head), shards=1)
    config = json.loads((source / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    if key == "top":
        config["tie_word_embeddings"] = value
    if key == "nested":
        config["text_config"] = {"tie_word_embeddings": value}
    (source / "config.json").write_text(json.dumps(config))
    return source


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize(("key", "value"), [("none", False), ("top", True), ("top", False), ("nested", True)])
def test_b26_files_decide_whether_the_head_is_tied(tmp_path, capsys, head, key, value):
    source = tied_variant(tmp_path, head=head, key=key, value=value)
    manifest = quantize_checkpoint(source, tmp_path / "store")
    assert manifest.tie_word_embeddings is not head
    agrees = key != "none" and value is not head
    assert bool(manifest.notices and "tie_word_embeddings" in manifest.notices[0]) is not agrees
    assert ("tie_word_embeddings" in capsys.readouterr().err) is not agrees
    copied = json.loads((tmp_path / "store" / "config.json").read_text())
    assert copied.get("text_config", copied)["tie_word_embeddings"] is not head
    if key != "nested":
        assert copied["tie_word_embeddings"] is not head
    assert ("lm_head.weight" in {r.name for r in manifest.outer.tensors}) is head


def test_b26_head_equal_to_embeddings_is_stored_once(tmp_path):
    source = tied_variant(tmp_path, head=True, key="none", value=False)
    with safe_open(source / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens_per_layer.weight"] = torch.zeros(512, 128)  # a larger table that is not the input's
    write_tensors(source, json.loads((source / "config.json").read_text()), tensors)
    manifest = quantize_checkpoint(source, tmp_path / "store")
    assert manifest.tie_word_embeddings
    assert "lm_head.weight" not in {r.name for r in manifest.outer.tensors}
    assert "stored once" in manifest.notices[0]


def test_config_and_tokenizer_files_travel(tmp_path):
    source = write_checkpoint(tmp_path / "dense", dense_config(), tokenizer=make_tokenizer())
    manifest = quantize_checkpoint(source, tmp_path / "store")
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(manifest.files)
    for name in manifest.files:
        assert (tmp_path / "store" / name).read_bytes() == (source / name).read_bytes()
    assert not list((tmp_path / "store").glob("*.index.json"))


def test_multi_token_prediction_layers_are_left_out_and_told(tmp_path):
    weight = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(128, 64) for i in range(3)}
    weight["mtp.layers.0.mlp.up_proj.weight"] = torch.ones(128, 64)
    config = {**layer_config(2), "num_nextn_predict_layers": 1}
    manifest = quantize_checkpoint(write_tensors(tmp_path / "c", config, {**embedding(), **weight}), tmp_path / "store")
    assert manifest.num_layers == 2
    assert any("left out: 2 tensors" in line and "model.layers.2.mlp" in line for line in manifest.notices)


def test_a_store_is_not_quantised_again(tmp_path):
    source = write_checkpoint(tmp_path / "dense", dense_config())
    quantize_checkpoint(source, tmp_path / "store")
    with pytest.raises(UserError, match="layer store already"):
        quantize_checkpoint(tmp_path / "store", tmp_path / "again")


def test_existing_output_and_unwritable_output(tmp_path):
    source = write_checkpoint(tmp_path / "dense", dense_config())
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "precious").touch()
    with pytest.raises(UserError, match="exists already"):
        quantize_checkpoint(source, tmp_path / "store")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not a folder"):
        quantize_checkpoint(source, tmp_path / "file" / "store")
    with pytest.raises(UserError, match="power of two"):
        quantize_checkpoint(source, tmp_path / "other", QuantizeSettings(block_size=60))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense", "file", "store"]
