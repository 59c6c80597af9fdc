"""Loading: views, alignment, expert runs; B44: a manifest that does not belong to the bytes is refused."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest
import torch

from lamella.errors import UserError
from lamella.store.manifest import MANIFEST_NAME
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from lamella.store.reader import Store
from tests.fixtures import dense_config, moe_config, write_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("store")
    # 64 x 256 experts: whole groups of 256 blocks, so that runs of experts can be dequantised at once
    source = write_checkpoint(root / "moe", moe_config(experts=12, inner=64, hidden_size=256), dtype=torch.bfloat16)
    quantize_checkpoint(source, root / "store")
    quantize_checkpoint(source, root / "single", QuantizeSettings(double_quant=False))
    return root


@pytest.fixture
def store(made, tmp_path):
    """A copy that a test may damage."""
    shutil.copytree(made / "store", tmp_path / "store")
    return tmp_path / "store"


def edit(store, change) -> str:
    """Change manifest.json and return what opening says."""
    tree = json.loads((store / MANIFEST_NAME).read_text())
    change(tree)
    (store / MANIFEST_NAME).write_text(json.dumps(tree))
    with pytest.raises(UserError) as caught:
        Store.open(store)
    return str(caught.value)


def test_load_into_a_given_buffer(made):
    store = Store.open(made / "store")
    buffer = torch.full((store.group_bytes(1) + 640,), 7, dtype=torch.uint8)
    packed = store.load(1, into=buffer)
    assert packed.buffer.data_ptr() == buffer.data_ptr()
    assert torch.equal(packed.buffer, store.load(1).buffer)
    assert (buffer[store.group_bytes(1) :] == 7).all()


def test_raw_is_a_view(made):
    packed = Store.open(made / "store").load(0)
    name = "model.layers.0.input_layernorm.weight"
    view = packed.raw(name)
    assert view.dtype == torch.bfloat16
    assert view.untyped_storage().data_ptr() == packed.buffer.untyped_storage().data_ptr()
    with pytest.raises(AssertionError, match="not raw"):
        packed.raw("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("kind", ["store", "single"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_dequantize_many_equals_one_by_one(made, kind, dtype):
    packed = Store.open(made / kind).load(1)
    experts = [name for name in packed.records if ".experts." in name]
    inputs = [name for name in experts if "down_proj" not in name]
    outputs = [name for name in experts if "down_proj" in name]
    assert len(inputs) == 24
    mixed = ["model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.gate.weight", *outputs]
    for names in (inputs, outputs, inputs[5:9], inputs[:1], inputs[::2], inputs[::-1], mixed):
        out = torch.empty(sum(packed.records[name].numel for name in names), dtype=dtype)
        packed.dequantize_many(names, out)
        parts = [packed.dequantize(n, torch.empty(packed.records[n].numel, dtype=dtype)) for n in names]
        assert torch.equal(out, torch.cat(parts))


def test_runs_of_experts_lie_side_by_side_in_fused_order(made):
    """Gate then up for each expert: the layout of a fused gate_up parameter, codes without a gap."""
    packed = Store.open(made / "store").load(0)
    names = [n for n in packed.records if ".experts." in n and "down" not in n]
    prefix = "model.layers.0.mlp.experts"
    assert names == [f"{prefix}.{e}.{p}_proj.weight" for e in range(12) for p in ("gate", "up")]
    spans = [packed.records[name].parts["codes"] for name in names]
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(spans))


def test_b44_reloaded_store_equals_the_one_written(made):
    """Opening and loading read what was written, twice over, and never quantise."""
    for i in ("outer", 0, 1):
        a, b = Store.open(made / "store").load(i), Store.open(made / "store").load(i)
        assert torch.equal(a.buffer, b.buffer)


@pytest.mark.parametrize("double_quant", [True, False])
def test_b44_a_loaded_into_a_buffer_that_held_b(tmp_path, double_quant):
    """Codes and scales of both levels come from A alone, whatever the buffer held."""
    stores = {}
    for seed, name in enumerate("AB"):
        source = write_checkpoint(tmp_path / name, dense_config(), seed=seed, dtype=torch.bfloat16)
        quantize_checkpoint(source, tmp_path / f"store-{name}", QuantizeSettings(double_quant=double_quant))
        stores[name] = Store.open(tmp_path / f"store-{name}")
    a, b = stores["A"], stores["B"]
    for key in ("outer", 0, 1):
        want, other = a.load(key), b.load(key)
        buffer = torch.empty(max(a.group_bytes(key), b.group_bytes(key)), dtype=torch.uint8)
        assert b.load(key, into=buffer).buffer.equal(other.buffer)
        mine = a.load(key, into=buffer)
        differs = 0
        for record in a.records(key):
            shape = record.shape
            truth, again, foreign = (
                p.dequantize(record.name, torch.empty(shape)) for p in (want, mine, other)
            )  # fmt: skip
            assert torch.equal(again, truth), record.name
            differs += not torch.equal(foreign, truth)
        assert differs > 0  # B is not A


def test_b44_missing_nested_part(store):
    def change(tree):
        record = next(r for r in tree["layers"][1]["tensors"] if "q_proj" in r["name"])
        del record["parts"]["absmax2"]

    message = edit(store, change)
    assert "layer 1" in message
    assert "model.layers.1.self_attn.q_proj.weight" in message
    assert "`absmax2`" in message


def test_b44_other_block_size(store):
    message = edit(store, lambda tree: tree.update(block_size=128))
    assert "layer 0" in message
    assert "model.layers.0." in message
    assert "block size 128" in message


def test_b44_double_quant_changed(store):
    assert "no part `absmax`" in edit(store, lambda tree: tree.update(double_quant=False))


def test_other_damage_to_the_manifest(store):
    text = (store / MANIFEST_NAME).read_text()

    def again(change) -> str:
        (store / MANIFEST_NAME).write_text(text)
        return edit(store, change)

    assert "store format 3" in again(lambda tree: tree.update(format_version=3))
    assert "num_layers is 3" in again(lambda tree: tree.update(num_layers=3))
    assert "`surprise`" in again(lambda tree: tree.update(surprise=1))
    assert "lies wrong" in again(lambda tree: tree["outer"]["tensors"][0]["parts"]["data"].__setitem__(0, 1 << 40))
    (store / MANIFEST_NAME).write_text("{")
    with pytest.raises(UserError, match="not a store's manifest"):
        Store.open(store)


def test_missing_and_cut_files(store):
    file = store / "layers" / "00001.bin"
    with file.open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(UserError, match=r"00001\.bin: manifest says \d+ bytes, file has 100"):
        Store.open(store)
    file.unlink()
    with pytest.raises(UserError, match=r"00001\.bin: file of the store is missing"):
        Store.open(store)


def test_file_cut_after_opening(store):
    opened = Store.open(store)
    with (store / "layers" / "00000.bin").open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(UserError, match="ends at byte 100"):
        opened.load(0)


def test_what_is_no_store(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "dense", dense_config())
    for path, told in (
        (tmp_path / "nothing", "no such store"),
        (checkpoint, "is a checkpoint"),
        (tmp_path, "no manifest"),
    ):
        with pytest.raises(UserError, match=told):
            Store.open(path)
    (tmp_path / "half.partial").mkdir()
    with pytest.raises(UserError, match="not finished"):
        Store.open(tmp_path / "half")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_of_experts_in_one_kernel_call_gives_the_same_bits(dtype, tmp_path):
    """What a CUDA device reads: scales as strided views with an offset each."""
    from lamella import kernels

    write_checkpoint(tmp_path / "hf", moe_config(experts=3, inner=256))
    quantize_checkpoint(tmp_path / "hf", tmp_path / "store")
    store = Store.open(tmp_path / "store")
    packed = store.load(0)
    names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(3)]
    records = [packed.records[name] for name in names]
    wanted = packed.dequantize_many(names, torch.empty(sum(r.numel for r in records), dtype=dtype))
    start, nbytes = records[0].parts["codes"]
    codes = packed.buffer[start : start + 3 * nbytes]
    found = kernels.dequantize_nf4_run(codes, packed.run(names), torch.empty_like(wanted), packed.block_size)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("folder", ["store", "single"])
def test_columns_of_a_matrix(folder, made):
    packed = Store.open(made / folder).load(0)
    name = "model.layers.0.self_attn.o_proj.weight"  # [256, 64]
    q = "model.layers.0.self_attn.q_proj.weight"  # [64, 256]
    for matrix, first, last in ((q, 64, 192), (q, 192, 256), (q, 0, 256), (name, 0, 64)):
        whole = packed.dequantize(matrix, torch.empty(packed.records[matrix].shape, dtype=torch.bfloat16))
        out = torch.empty(whole.shape[0], last - first, dtype=torch.bfloat16)
        assert torch.equal(packed.dequantize_columns(matrix, first, last, out), whole[:, first:last])


def test_ranges_of_a_file(made):
    store = Store.open(made / "store")
    whole = store.load(0).buffer
    buffer = torch.full((store.group_bytes(0),), 7, dtype=torch.uint8)
    ranges = [(128, 1000), (4096, 64)]
    packed = store.load_ranges(0, buffer, ranges)
    wanted = torch.full_like(buffer, 7)
    for offset, nbytes in ranges:
        wanted[offset : offset + nbytes] = whole[offset : offset + nbytes]
    assert torch.equal(packed.buffer, wanted)
