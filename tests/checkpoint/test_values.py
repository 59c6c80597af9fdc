"""Values of tensors, plain and packed: equal to those of the libraries that wrote them, from any place on, in any amount."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lamella.checkpoint.bnb import FourBit
from lamella.checkpoint.fingerprint import fingerprint
from lamella.checkpoint.marks import plain_config
from lamella.checkpoint.numbers import E4M3, E5M2, E8M0
from lamella.checkpoint.source import Checkpoint
from lamella.errors import UserError
from tests.checkpoint.helpers import embedding, layer_config, write_fused, write_tensors
from tests.checkpoint.packed_writers import WAYS, bnb_4bit, bnb_8bit, fp8, mxfp4, read_folder, write_packed
from tests.fixtures import dense_config, moe_config, write_checkpoint


def values_of(checkpoint, name, step=None) -> torch.Tensor:
    """All values, asked for `step` at a time."""
    tensor = checkpoint.tensors[name]
    out = np.full(tensor.numel, np.nan, np.float32)
    step = step or checkpoint.piece(tensor)
    for first in range(0, out.size, step):
        checkpoint.values(tensor, first, out[first : first + step])
    return torch.from_numpy(out).view(tensor.shape)


def part_of(checkpoint, name, part) -> bytes:
    """A native part, read in two pieces."""
    tensor = checkpoint.tensors[name]
    size = checkpoint.native(tensor).parts[part]
    found = bytearray(size)
    cut = size // 3
    checkpoint.native_part(tensor, part, 0, memoryview(found)[:cut])
    checkpoint.native_part(tensor, part, cut, memoryview(found)[cut:])
    return bytes(found)


def one(tmp_path, tensors, settings=None, **config):
    """An opened checkpoint of one layer with these tensors."""
    config = layer_config(**config) | ({"quantization_config": settings} if settings else {})
    return Checkpoint.open(write_tensors(tmp_path / "c", config, {**embedding(config["hidden_size"]), **tensors}))


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """Plain checkpoints: dense, and MoE with fused experts of inner size 32."""
    folder = tmp_path_factory.mktemp("sources")
    write_checkpoint(folder / "dense", dense_config(), dtype=torch.bfloat16, shards=1)
    write_fused(folder / "moe", moe_config(inner=32))
    return folder


@pytest.mark.parametrize(
    ("table", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2), (E8M0, torch.float8_e8m0fnu)]
)
def test_tables_are_torchs(table, dtype):
    np.testing.assert_array_equal(table, torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_values(tmp_path, dtype):
    weight = torch.randn(24, 40).to(dtype)
    name = "model.layers.0.mlp.fc.weight"
    with one(tmp_path, {name: weight}) as checkpoint:
        for step in (None, 1, 7, 64):
            assert torch.equal(values_of(checkpoint, name, step), weight.float())
        assert checkpoint.native(checkpoint.tensors[name]) is None


@pytest.mark.parametrize("way", WAYS)
def test_whole_checkpoints(sources, tmp_path, way):
    """Names, shapes and classes are those of the plain checkpoint, values bit for bit those of the libraries."""
    source = sources / ("moe" if way == "mxfp4" else "dense")
    written = write_packed(way, source, tmp_path / "packed")
    assert written.packed
    with Checkpoint.open(source) as plain, Checkpoint.open(written.path) as packed:
        assert {n: t.shape for n, t in packed.tensors.items()} == {n: t.shape for n, t in plain.tensors.items()}
        assert {n for n, t in packed.tensors.items() if t.packing} == written.packed
        stored = sum(t.nbytes for t in read_folder(written.path).values())
        formats = sum(
            n.endswith(".weight_format") for n in read_folder(written.path)
        )  # one byte each, no part of a weight
        assert sum(t.nbytes for t in packed.tensors.values()) == stored - formats
        for name, wanted in written.values.items():
            assert torch.equal(values_of(packed, name), wanted), name
            assert torch.equal(values_of(packed, name, 777), wanted), name
        assert fingerprint(packed, False) != fingerprint(plain, False)
        assert plain_config(packed.config) == plain.config


def test_fingerprint_of_packed_bytes(sources, tmp_path):
    """One scale changed is another model."""
    written = write_packed("bnb-nf4", sources / "dense", tmp_path / "a")
    tensors = read_folder(written.path)
    with Checkpoint.open(written.path) as first:
        before = fingerprint(first, False)
    tensors["model.layers.1.mlp.up_proj.weight.nested_absmax"] += 1
    save_file(tensors, written.path / "model.safetensors")
    with Checkpoint.open(written.path) as second:
        assert fingerprint(second, False) != before


# ---- FP8 -------------------------------------------------------------------------------------------

GATE = "model.layers.0.mlp.gate_proj.weight"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale", ".scale", ".weight.scale", ".qscale_weight"])
def test_b28_every_suffix_and_a_partial_block(tmp_path, suffix):
    """128 x 192 in blocks of 128 x 128: within e4m3's rounding of the original, whatever the scales are called."""
    original = torch.randn(128, 192)
    tensors, values = fp8(GATE, original, suffix=suffix)
    with one(tmp_path, tensors, BLOCKS, hidden_size=192) as checkpoint:
        assert list(checkpoint.tensors) == [n for n in checkpoint.tensors if "scale" not in n]
        found = values_of(checkpoint, GATE)
        assert torch.equal(found, values)
        normal = original.abs() > original.abs().max() / 448 * 2**-6
        assert ((found - original).abs() / original.abs())[normal].max() <= 0.0625
        assert not checkpoint.notices


def test_b28_without_a_scale(tmp_path):
    tensors, _ = fp8(GATE, torch.randn(128, 192))
    del tensors[f"{GATE}_scale_inv"]
    with pytest.raises(UserError, match=r"FP8 tensor 'model\.layers\.0\.mlp\.gate_proj\.weight' has no scale"):
        one(tmp_path, tensors, BLOCKS, hidden_size=192)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 2)}, "up_proj.weight_scale_inv' has no weight"),
        ({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 2), "model.layers.0.mlp.up_proj.weight": torch.ones(128, 192)},
         "up_proj.weight_scale_inv' stands beside .*which is F32"),
        ({f"{GATE}_scale": torch.ones(1, 2)}, "has two scales"),
        ({"model.layers.0.mlp.up_proj.weight_zero_point": torch.ones(1)}, "zero_point' has no weight"),
    ],
)  # fmt: skip
def test_b28_no_scale_is_left_over(tmp_path, extra, told):
    tensors, _ = fp8(GATE, torch.randn(128, 192))
    with pytest.raises(UserError, match=told):
        one(tmp_path, {**tensors, **extra}, BLOCKS, hidden_size=192)


def test_b28_scales_of_activations_are_told(tmp_path):
    tensors, values = fp8(GATE, torch.randn(128, 192), None, "_scale")
    beside = {
        "model.layers.0.mlp.gate_proj.input_scale": torch.ones(()),
        "model.layers.0.self_attn.k_scale": torch.ones(()),
    }
    own = {"model.layers.0.mlp.hc.scale": torch.ones(3)}  # a parameter: no weight beside it
    with one(
        tmp_path, {**tensors, **beside, **own}, {"quant_method": "modelopt", "quant_algo": "FP8"}, hidden_size=192
    ) as c:
        assert [t for t in c.tensors if "scale" in t] == ["model.layers.0.mlp.hc.scale"]
        assert c.notices == (
            "left out: 2 scales of activations and caches, first model.layers.0.mlp.gate_proj.input_scale",
        )
        assert torch.equal(values_of(c, GATE), values)


@pytest.mark.parametrize(
    ("shape", "block", "dtype", "scale_dtype"),
    [
        ((96, 64), (1, 0), torch.float8_e4m3fn, torch.bfloat16),
        ((96, 64), (1, 32), torch.float8_e4m3fn, torch.float8_e8m0fnu),
        ((300, 130), (128, 128), torch.float8_e5m2, torch.float32),
        ((3, 200, 192), (128, 128), torch.float8_e4m3fn, torch.float8_e8m0fnu),
        ((3, 200, 192), (1, 0), torch.float8_e4m3fn, torch.float32),
        ((3, 200, 192), (200, 192), torch.float8_e4m3fn, torch.float32),
    ],
)  # fmt: skip
def test_fp8_grids(tmp_path, shape, block, dtype, scale_dtype):
    """Rows, blocks, experts: what config.json leaves out follows from the scales."""
    name = "model.layers.0.mlp.experts.w13" if len(shape) == 3 else "model.layers.0.mlp.fc.weight"
    tensors, values = fp8(name, torch.randn(shape), block, dtype=dtype, scale_dtype=scale_dtype)
    scale = tensors[f"{name}_scale_inv"]
    alike = [scale, *([scale.squeeze(-1)] if scale.shape[-1] == 1 and scale_dtype != torch.float8_e8m0fnu else [])]
    for form in alike:
        with one(tmp_path, {**tensors, f"{name}_scale_inv": form}) as checkpoint:
            for step in (None, 5, 4096):
                assert torch.equal(values_of(checkpoint, name, step), values)
            inside = block in ((128, 128), (1, 32))
            assert any(f"blocks of {block[0]} x {block[1]}" in line for line in checkpoint.notices) is inside


def test_fp8_scales_of_another_shape(tmp_path):
    tensors, _ = fp8(GATE, torch.randn(128, 192))
    for scale in (torch.ones(2, 2), torch.ones(5), torch.ones(1, 3)):
        with pytest.raises(UserError, match="weight_block_size"):
            one(tmp_path, {**tensors, f"{GATE}_scale_inv": scale}, BLOCKS, hidden_size=192)
    with pytest.raises(UserError, match="power of two"):
        one(tmp_path, {**tensors, f"{GATE}_scale_inv": torch.ones(1, 7)}, hidden_size=192)
    with pytest.raises(UserError, match="weight_block_size = 128"):
        one(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": 128}, hidden_size=192)


# ---- MXFP4 -----------------------------------------------------------------------------------------

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
def test_b29_mxfp4_experts(tmp_path, model_type):
    """[E, I, O] for GPT-OSS, [E, O, I] for the others; taken over as they are."""
    weight = torch.randn(4, 48, 64)
    tensors, values = mxfp4(EXPERTS, weight)
    swapped = model_type == "gpt_oss"
    with one(tmp_path, tensors, {"quant_method": "mxfp4"}, model_type=model_type) as checkpoint:
        tensor = checkpoint.tensors[EXPERTS]
        for step in (None, 100, 4096):
            assert torch.equal(values_of(checkpoint, EXPERTS, step), values.mT if swapped else values)
        native = checkpoint.native(tensor)
        assert (native.format, native.block_size, native.order) == ("mxfp4", 32, (0, 2, 1) if swapped else ())
        assert part_of(checkpoint, EXPERTS, "codes") == tensors[f"{EXPERTS}_blocks"].numpy().tobytes()
        assert part_of(checkpoint, EXPERTS, "scales") == tensors[f"{EXPERTS}_scales"].numpy().tobytes()


def test_mxfp4_bytes_with_a_scale(tmp_path):
    """DeepSeek-V4's experts: int8 [O, I / 2] with e8m0 [O, I / 32]."""
    made, values = mxfp4("x", torch.randn(1, 48, 64))
    name = "model.layers.0.ffn.experts.0.w1.weight"
    tensors = {name: made["x_blocks"].view(48, 32).view(torch.int8),
               name.replace(".weight", ".scale"): made["x_scales"].view(48, 2).view(torch.float8_e8m0fnu)}  # fmt: skip
    with one(tmp_path, tensors, BLOCKS) as checkpoint:
        assert torch.equal(values_of(checkpoint, name), values[0])
        assert checkpoint.native(checkpoint.tensors[name]).order == ()


@pytest.mark.parametrize("kind", ["_blocks", "_scales"])
def test_mxfp4_half_missing(tmp_path, kind):
    tensors, _ = mxfp4(EXPERTS, torch.randn(2, 48, 64))
    del tensors[EXPERTS + kind]
    with pytest.raises(UserError, match=f"no {EXPERTS}{kind}"):
        one(tmp_path, tensors, {"quant_method": "mxfp4"}, model_type="gpt_oss")


def test_mxfp4_nan(tmp_path):
    tensors, _ = mxfp4(EXPERTS, torch.randn(2, 48, 64))
    tensors[f"{EXPERTS}_scales"][1, 5, 0] = 255
    with one(tmp_path, tensors, {"quant_method": "mxfp4"}, model_type="gpt_oss") as checkpoint:
        assert values_of(checkpoint, EXPERTS).isnan().sum() == 32
        with pytest.raises(UserError, match="NaN"):
            part_of(checkpoint, EXPERTS, "scales")


# ---- bitsandbytes ----------------------------------------------------------------------------------

UP = "model.layers.0.mlp.up_proj.weight"
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", [(300, 64), (33, 66), (4, 96, 64)])
def test_b44_taken_over_bit_for_bit(tmp_path, nested, block, shape):
    """A store's parts of the codes and scales give bitsandbytes' values again; also with partial last blocks."""
    from lamella.kernels import dequantize_nf4
    from lamella.kernels.layout import AbsmaxState

    name = UP if len(shape) == 2 else EXPERTS
    weight = torch.randn(shape).to(torch.bfloat16)
    tensors, values = bnb_4bit(name, weight, nested=nested, block=block)
    with one(
        tmp_path, tensors, FOUR, model_type="qwen2_moe" if len(shape) == 3 else "llama", hidden_size=shape[-1]
    ) as c:
        assert c.tensors[name].dtype == "BF16"
        for step in (None, 99):
            assert torch.equal(values_of(c, name, step), values)
        native = c.native(c.tensors[name])
        assert (native.format, native.block_size, native.order) == ("nf4", block, ())
        part = {key: torch.frombuffer(bytearray(part_of(c, name, key)), dtype=torch.uint8) for key in native.parts}
        floats = {key: t.view(torch.float32) for key, t in part.items() if key not in ("codes", "absmax_q")}
        scales = (
            AbsmaxState(part["absmax_q"], floats["absmax_code"], floats["absmax2"], floats["offset"][0])
            if nested
            else floats["absmax"]
        )
        out = torch.empty(shape)
        assert torch.equal(dequantize_nf4(part["codes"], scales, out, block), values)


@pytest.mark.parametrize(
    "key", ["absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4"]
)
def test_b44_missing_key(tmp_path, key):
    tensors, _ = bnb_4bit(UP, torch.randn(64, 64))
    del tensors[f"{UP}.{key}"]
    with pytest.raises(UserError, match=f"layer 0: tensor '{UP}' lacks {UP}.{key}"):
        one(tmp_path, tensors, FOUR)


def test_b44_scales_without_their_weight(tmp_path):
    tensors, _ = bnb_4bit(UP, torch.randn(64, 64))
    del tensors[UP]
    with pytest.raises(UserError, match=f"has no tensor '{UP}'"):
        one(tmp_path, tensors, FOUR)


def test_b44_other_block_size(tmp_path):
    tensors, _ = bnb_4bit(UP, torch.randn(64, 64))
    state = f"{UP}.quant_state.bitsandbytes__nf4"
    said = json.loads(bytes(tensors[state].tolist())) | {"blocksize": 128}
    tensors[state] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    with pytest.raises(UserError, match=rf"layer 0: '{UP}\.absmax' is U8 \[64\], block size 128"):
        one(tmp_path, tensors, FOUR)


@pytest.mark.parametrize("part", ["quant_map", "nested_quant_map"])
def test_other_maps_are_decoded_but_not_taken_over(tmp_path, part):
    tensors, values = bnb_4bit(UP, torch.randn(64, 64))
    tensors[f"{UP}.{part}"] = tensors[f"{UP}.{part}"] * 0.5
    with one(tmp_path, tensors, FOUR) as checkpoint:
        assert checkpoint.native(checkpoint.tensors[UP]) is None
        assert isinstance(checkpoint._decoder(checkpoint.tensors[UP]), FourBit)
        assert not torch.equal(values_of(checkpoint, UP), values)


def test_int8_native(tmp_path):
    tensors, values = bnb_8bit(UP, torch.randn(96, 64))
    with one(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True}) as checkpoint:
        native = checkpoint.native(checkpoint.tensors[UP])
        assert (native.format, native.block_size) == ("int8", 64)
        codes = np.frombuffer(part_of(checkpoint, UP, "codes"), np.int8).reshape(96, 64)
        scales = np.frombuffer(part_of(checkpoint, UP, "scales"), np.float32)
        assert torch.equal(torch.from_numpy(codes * scales[:, None]), values)
        from bitsandbytes.functional import int8_vectorwise_dequant

        theirs = int8_vectorwise_dequant(tensors[UP], tensors[UP.replace("weight", "SCB")])
        torch.testing.assert_close(values, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("drop", "change", "told"),
    [
        (".SCB", None, "lacks model.layers.0.mlp.up_proj.SCB"),
        (".weight", None, "has no int8 tensor"),
        (None, {".SCB": torch.ones(95)}, "one F32 per row"),
        (None, {".weight_format": torch.tensor(1, dtype=torch.uint8)}, "another order than rows"),
    ],
)
def test_int8_that_does_not_fit(tmp_path, drop, change, told):
    module = UP.removesuffix(".weight")
    tensors, _ = bnb_8bit(UP, torch.randn(96, 64))
    tensors |= {module + key: t for key, t in (change or {}).items()}
    tensors = {name: t for name, t in tensors.items() if drop is None or name != module + drop}
    with pytest.raises(UserError, match=told):
        one(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})


# ---- what is not read ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq rounds to whole numbers with zero points"),
        ({"quant_method": "awq", "bits": 4}, "awq rounds"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'pack-quantized' is not read"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'NVFP4' is not read"),
        ({"quant_method": "hqq"}, "'hqq' is not read"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_ways_that_are_not_read(tmp_path, settings, told, nested):
    config = {"quantization_config": settings}
    config = {"text_config": {**layer_config(), **config}} if nested else config
    path = write_tensors(tmp_path / "c", layer_config(**config), {**embedding(), UP: torch.ones(64, 64)})
    with pytest.raises(UserError, match=told):
        Checkpoint.open(path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_bytes_without_a_mark(tmp_path, dtype):
    with pytest.raises(UserError, match="quantised in a way that is not read"):
        one(tmp_path, {UP: torch.zeros(64, 64, dtype=dtype)})


def test_nvfp4_without_a_mark(tmp_path):
    tensors = {UP: torch.zeros(64, 32, dtype=torch.uint8), f"{UP}_scale": torch.ones(64, 4).to(torch.float8_e4m3fn)}
    with pytest.raises(UserError, match="NVFP4"):
        one(tmp_path, tensors)
