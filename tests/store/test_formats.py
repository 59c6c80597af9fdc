"""Formats by class and name, and forms taken over from quantised sources; B39, B41, B43 and B44 for them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lamella import kernels
from lamella.checkpoint.source import Checkpoint
from lamella.cli import app
from lamella.errors import UserError
from lamella.store.formats import ClassFormats, Formats, NameRule, read_formats
from lamella.store.manifest import MANIFEST_NAME
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from lamella.store.reader import Store
from tests.checkpoint.helpers import embedding, layer_config, write_tensors
from tests.checkpoint.packed_writers import write_packed
from tests.engine.test_families import FAMILIES
from tests.fixtures import dense_config, moe_config, write_checkpoint
from tests.store.packed_sources import write_mxfp4


def formats(names=(), **classes) -> Formats:
    return Formats(classes=ClassFormats(**classes), names=tuple(NameRule(match=m, format=f) for m, f in names))


def settings(names=(), **classes) -> QuantizeSettings:
    return QuantizeSettings(formats=formats(names, **classes))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A MoE in bf16, three layers, in one file."""
    return write_checkpoint(tmp_path_factory.mktemp("moe") / "hf", moe_config(layers=3), dtype=torch.bfloat16, shards=1)


def source(path, name):
    with safe_open(path / "model.safetensors", "pt") as file:
        return file.get_tensor(name)


# ---- quantize.toml --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[classes]\nexperts = "nf5"', ["`classes.experts`", "'nf5'"]),
        ('[classes]\nrouter = "nf4"', ["`classes.router`", "never quantised"]),
        ('[classes]\nhead = "int8"', ["`classes.head`", "'int8'"]),
        ('[classes]\nexpert = "int8"', ["`classes.expert`"]),
        ('[[names]]\nmatch = "a"', ["`names.0.format`", "required"]),
        ("[classes\n", ["is not TOML"]),
    ],
)
def test_a_wrong_file_is_refused_with_its_key(tmp_path, text, told):
    file = tmp_path / "quantize.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_formats(file)
    assert caught.value.path == str(file)
    assert all(part in str(caught.value) for part in told), str(caught.value)


def test_rules_that_do_nothing_are_refused(moe, tmp_path):
    for asked, told in (
        (settings([("model.layers.9.*", "int8")]), "`names.0`: 'model.layers.9.*' matches no tensor"),
        (settings([("*norm*", "int8")]), "norm alone"),
        (settings([("model.embed_tokens.weight", "nf4")]), "embedding alone"),
        (settings(mlp="int8"), "`classes.mlp`: the model has no such tensors"),
    ):
        with pytest.raises(UserError) as caught:
            quantize_checkpoint(moe, tmp_path / "store", asked)
        assert told in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_b41_a_rule_that_names_the_router_is_refused(moe, tmp_path):
    for pattern in ("model.layers.*.mlp.gate.weight", "*.gate.*", "model.layers.0.mlp.gate.weight"):
        with pytest.raises(UserError, match="names routers, which are never quantised"):
            quantize_checkpoint(moe, tmp_path / "store", settings([(pattern, "int8")]))


def test_b41_a_rule_that_sweeps_the_router_along_leaves_it(moe, tmp_path):
    quantize_checkpoint(moe, tmp_path / "store", settings([("model.layers.0.*", "int8"), ("*gate*", "mxfp4")]))
    store = Store.open(tmp_path / "store")
    records = {r.name: r for i in range(3) for r in store.records(i)}
    for i in range(3):
        router = f"model.layers.{i}.mlp.gate.weight"
        assert records[router].tensor_class == "router"
        assert torch.equal(store.load(i).raw(router), source(moe, router))
        assert records[f"model.layers.{i}.mlp.experts.0.gate_proj.weight"].format == "mxfp4"
    assert records["model.layers.0.mlp.experts.0.up_proj.weight"].format == "int8"
    assert records["model.layers.1.mlp.experts.0.up_proj.weight"].format == "nf4"


# ---- what is stored -------------------------------------------------------------------------------


def test_every_format_holds_what_its_kernel_makes(moe, tmp_path):
    rules = [("model.layers.1.*", "source"), ("model.layers.2.*.down_proj.weight", "int8")]
    manifest = quantize_checkpoint(moe, tmp_path / "store", settings(rules, experts="mxfp4", attention="nf4"))
    store = Store.open(tmp_path / "store")
    assert store.manifest == manifest
    assert manifest.format_version == 2
    seen = set()
    for i in range(3):
        packed = store.load(i)
        for record in store.records(i):
            x = source(moe, record.name)
            seen.add((i, record.tensor_class, record.format))
            found = packed.dequantize(record.name, torch.empty(x.shape))
            if record.format == "mxfp4":
                wanted = kernels.dequantize_mxfp4(*kernels.quantize_mxfp4(x), torch.empty(x.shape))
            elif record.format == "int8":
                wanted = kernels.dequantize_int8(*kernels.quantize_int8(x), torch.empty(x.shape))
            elif record.format == "nf4":
                codes, absmax = kernels.quantize_nf4(x)
                wanted = kernels.dequantize_nf4(codes, kernels.quantize_absmax(absmax), torch.empty(x.shape))
            else:
                wanted = x.float()
            assert torch.equal(found, wanted), record.name
    experts = {(0, "experts", "mxfp4"), (1, "experts", "raw"), (2, "experts", "mxfp4"), (2, "experts", "int8")}
    assert experts < seen
    assert store.verify() == []


@pytest.mark.parametrize("kind", ["nf4", "mxfp4", "int8", "source"])
def test_slices_and_columns_of_every_format(tmp_path, kind):
    name = "model.layers.0.mlp.a_proj.weight"
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    hf = write_tensors(tmp_path / "hf", layer_config(), {**embedding(), name: x})
    quantize_checkpoint(hf, tmp_path / "store", settings(mlp=kind))
    packed = Store.open(tmp_path / "store").load(0)
    whole = packed.dequantize(name, torch.empty(6, 256))
    assert torch.equal(packed.dequantize_slice(name, 256, torch.empty(2, 256)), whole[1:3])
    assert torch.equal(packed.dequantize_columns(name, 64, 192, torch.empty(6, 128)), whole[:, 64:192])


def test_b39_a_class_left_in_16_bit_is_told_with_its_share_of_all_weights(moe, tmp_path, capsys):
    manifest = quantize_checkpoint(moe, tmp_path / "store", settings(experts="source", attention="int8"))
    experts = sum(row.parameters for row in manifest.report if row.tensor_class == "experts")
    share = 100 * experts / sum(row.parameters for row in manifest.report)
    line = next(line for line in manifest.notices if line.startswith("NOT QUANTISED"))
    assert f"{share:.2g} % of all weights" in line
    assert "experts stay bfloat16" in line
    assert line in capsys.readouterr().err
    rows = {(row.tensor_class, row.format): row for row in manifest.report}
    assert rows["experts", "raw"].bytes_per_weight == 2
    assert rows["attention", "int8"].bytes_per_weight == pytest.approx(1 + 4 / 64)


@pytest.mark.parametrize("kind", ["mxfp4", "int8"])
def test_b43_odd_shapes_and_nan(tmp_path, kind):
    shapes = {"a": (3, 37), "b": (1, 1), "c": (7, 64), "d": (5, 130)}
    tensors = {f"model.layers.0.mlp.{n}_proj.weight": torch.randn(s) for n, s in shapes.items()}
    hf = write_tensors(tmp_path / "hf", layer_config(), {**embedding(), **tensors})
    quantize_checkpoint(hf, tmp_path / "store", settings(mlp=kind))
    packed = Store.open(tmp_path / "store").load(0)
    for name, x in tensors.items():
        made = getattr(kernels, f"quantize_{kind}")(x)
        wanted = getattr(kernels, f"dequantize_{kind}")(*made, torch.empty(x.shape))
        assert torch.equal(packed.dequantize(name, torch.empty(x.shape)), wanted), name
    bad = "model.layers.0.mlp.c_proj.weight"
    tensors[bad].view(-1)[-1] = float("nan")
    write_tensors(hf, layer_config(), {**embedding(), **tensors})
    with pytest.raises(UserError, match=bad):
        quantize_checkpoint(hf, tmp_path / "again", settings(mlp=kind))


# ---- sources that are quantised already -----------------------------------------------------------


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    root = tmp_path_factory.mktemp("gpt_oss")
    write_mxfp4(root / "hf", FAMILIES["gpt_oss"]())
    quantize_checkpoint(root / "hf", root / "store")
    return root


def test_mxfp4_is_taken_over_bit_for_bit(gpt_oss):
    store = Store.open(gpt_oss / "store")
    packed = store.load(0)
    for leaf in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{leaf}"
        record = packed.records[name]
        assert (record.format, record.block_size, record.order) == ("mxfp4", 32, (0, 2, 1))
        assert torch.equal(packed.part(name, "codes", torch.uint8), source(gpt_oss / "hf", f"{name}_blocks").view(-1))
        assert torch.equal(packed.part(name, "scales", torch.uint8), source(gpt_oss / "hf", f"{name}_scales").view(-1))
        values = packed.dequantize(name, torch.empty(record.shape))
        with Checkpoint.open(gpt_oss / "hf") as checkpoint:
            wanted = torch.empty(record.shape)
            checkpoint.values(checkpoint.tensors[name], 0, wanted.view(-1).numpy())
        assert torch.equal(values, wanted)
    assert any("4 tensors keep their source's mxfp4" in line for line in store.manifest.notices)
    assert "quantization_config" not in json.loads((gpt_oss / "store" / "config.json").read_text())
    assert store.verify() == []


def test_another_format_that_was_asked_for_is_told_as_a_second_rounding(gpt_oss, tmp_path):
    manifest = quantize_checkpoint(gpt_oss / "hf", tmp_path / "store", settings(experts="nf4"))
    assert any("4 tensors are rounded a second time, from the source's mxfp4 to nf4" in x for x in manifest.notices)
    name = "model.layers.1.mlp.experts.down_proj"
    own = Store.open(gpt_oss / "store").load(1)
    x = own.dequantize(name, torch.empty(own.records[name].shape))
    codes, _ = kernels.quantize_nf4(x)
    assert torch.equal(Store.open(tmp_path / "store").load(1).part(name, "codes", torch.uint8), codes)


def test_a_quantised_source_can_be_kept_whole(gpt_oss, tmp_path):
    quantize_checkpoint(gpt_oss / "hf", tmp_path / "store", settings(experts="bf16"))
    name = "model.layers.0.mlp.experts.down_proj"
    own, whole = Store.open(gpt_oss / "store").load(0), Store.open(tmp_path / "store").load(0)
    assert whole.records[name].dtype == "bfloat16"
    x = own.dequantize(name, torch.empty(own.records[name].shape))
    assert torch.equal(whole.raw(name).float(), x)


@pytest.fixture(scope="module")
def bnb(tmp_path_factory):
    """A dense model in bitsandbytes' NF4, nested scales, blocks of 128, and in its int8."""
    root = tmp_path_factory.mktemp("bnb")
    plain = write_checkpoint(root / "plain", dense_config(), dtype=torch.bfloat16)
    return {way: write_packed(way, plain, root / way) for way in ("bnb-nf4", "bnb-int8")}


def test_b44_bitsandbytes_weights_are_taken_over_bit_for_bit(bnb, tmp_path):
    for way, kind in (("bnb-nf4", "nf4"), ("bnb-int8", "int8")):
        written = bnb[way]
        manifest = quantize_checkpoint(
            written.path, tmp_path / way, QuantizeSettings(block_size=128, double_quant=False)
        )
        store = Store.open(tmp_path / way)
        for i in range(2):
            packed = store.load(i)
            for record in store.records(i):
                values = written.values[record.name]
                found = packed.dequantize(record.name, torch.empty(record.shape))
                assert torch.equal(found, values.view(record.shape)), record.name
                assert (record.format == kind) is (record.name in written.packed)
                if record.name in written.packed and kind == "nf4":
                    assert (record.block_size, record.double_quant) == (
                        64,
                        True,
                    )  # the source's own, not those asked for
        assert any(f"14 tensors keep their source's {kind}" in line for line in manifest.notices)
        assert store.verify() == []


def test_b44_a_nested_key_that_is_missing_in_the_source_is_named(bnb, tmp_path):
    broken = shutil.copytree(bnb["bnb-nf4"].path, tmp_path / "broken")
    gone = "model.layers.1.mlp.up_proj.weight.nested_absmax"
    tensors = load_file(broken / "model.safetensors")
    del tensors[gone]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(UserError) as caught:
        quantize_checkpoint(broken, tmp_path / "store")
    assert gone in str(caught.value)
    assert "layer" in str(caught.value)


def edited(store, change) -> str:
    tree = json.loads((store / MANIFEST_NAME).read_text())
    change(tree)
    (store / MANIFEST_NAME).write_text(json.dumps(tree))
    with pytest.raises(UserError) as caught:
        Store.open(store)
    return str(caught.value)


def test_b44_other_block_size_or_order_names_layer_and_key(gpt_oss, tmp_path):
    def record(tree, leaf="down_proj"):
        return next(r for r in tree["layers"][1]["tensors"] if r["name"].endswith(leaf))

    for key, value, told in (
        ("block_size", 64, "`block_size` 64"),
        ("order", [0, 1, 1], "`order` [0, 1, 1]"),
        ("format", "int8", "part `codes`"),
        ("shape", [4, 96, 32], "part `codes`"),
    ):
        shutil.copytree(gpt_oss / "store", tmp_path / key)
        message = edited(tmp_path / key, lambda tree, key=key, value=value: record(tree).update({key: value}))
        assert "layer 1" in message
        assert "model.layers.1.mlp.experts.down_proj" in message
        assert told in message


def test_b44_a_store_is_never_quantised_again(gpt_oss, tmp_path):
    with pytest.raises(UserError, match="is a layer store already"):
        quantize_checkpoint(gpt_oss / "store", tmp_path / "twice")


def test_b44_reloading_gives_equal_bits(gpt_oss):
    a, b = (Store.open(gpt_oss / "store").load(0) for _ in range(2))
    for name, record in a.records.items():
        found = [p.dequantize(name, torch.empty(record.shape)) for p in (a, b)]
        assert torch.equal(*found)


def test_a_store_of_version_1_is_still_read(moe, tmp_path):
    quantize_checkpoint(moe, tmp_path / "store")
    tree = json.loads((tmp_path / "store" / MANIFEST_NAME).read_text())
    tree["format_version"] = 1
    for group in (tree["outer"], *tree["layers"]):
        for record in group["tensors"]:
            for key in ("block_size", "double_quant", "order"):
                del record[key]
    new = Store.open(tmp_path / "store")
    (tmp_path / "store" / MANIFEST_NAME).write_text(json.dumps(tree))
    old = Store.open(tmp_path / "store")
    assert old.manifest.format_version == 1
    name = "model.layers.0.self_attn.q_proj.weight"
    a, b = (store.load(0).dequantize(name, torch.empty(64, 64)) for store in (old, new))
    assert torch.equal(a, b)


# ---- the verbs ------------------------------------------------------------------------------------


def test_synth_and_plan_with_formats(tmp_path):
    config = tmp_path / "config.json"
    moe_config(layers=2, inner=64).to_json_file(config, use_diff=False)
    file = tmp_path / "quantize.toml"
    file.write_text(
        '[classes]\nexperts = "mxfp4"\nattention = "int8"\n[[names]]\nmatch = "model.layers.1.*"\nformat = "bf16"\n'
    )
    run = CliRunner()
    made = run.invoke(app, ["store", "synth", str(config), str(tmp_path / "store"), "--formats", str(file), "--json"])
    assert made.exit_code == 0, made.output
    store = Store.open(tmp_path / "store")
    assert store.verify() == []
    packed = store.load(0)
    for leaf, kind in (("mlp.experts.0.up_proj", "mxfp4"), ("self_attn.q_proj", "int8")):
        name = f"model.layers.0.{leaf}.weight"
        assert packed.records[name].format == kind
        std = packed.dequantize(name, torch.empty(packed.records[name].shape)).std()
        assert 0.01 < std < 0.04  # 0.02, MXFP4's to the nearest power of two

    from lamella.forecast.describe import shape_of

    planned, real = shape_of(config, formats=read_formats(file)), shape_of(tmp_path / "store")
    assert [x.store_bytes for x in planned.layers] == [x.store_bytes for x in real.layers]
    assert [x.store_bytes for x in real.layers] == [store.group_bytes(i) for i in range(2)]
    assert [x.quantised_parameters for x in planned.layers] == [x.quantised_parameters for x in real.layers]
    assert [x.raw_bytes for x in planned.layers] == [x.raw_bytes for x in real.layers]
    plain = shape_of(config)
    assert plain.layers[0].store_bytes < planned.layers[0].store_bytes < planned.layers[1].store_bytes
    with pytest.raises(UserError, match="leave --formats out"):
        shape_of(tmp_path / "store", formats=read_formats(file))


def test_plan_of_a_checkpoint_in_mxfp4_counts_its_bytes(gpt_oss):
    from lamella.forecast.describe import shape_of

    real = [x.store_bytes for x in shape_of(gpt_oss / "store").layers]
    assert [x.store_bytes for x in shape_of(gpt_oss / "hf").layers] == real
    assert [x.store_bytes for x in shape_of(gpt_oss / "hf" / "config.json").layers] == real
