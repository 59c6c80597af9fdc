from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from lamella.checkpoint.gguf import read_gguf
from lamella.checkpoint.gguf_decode import QUANTISED, Gguf, paired, unpaired
from lamella.checkpoint.gguf_header import read_gguf_header
from lamella.checkpoint.gguf_rope import llama3_divisors
from lamella.checkpoint.header import TensorInfo
from lamella.checkpoint.packing import Packing
from lamella.checkpoint.source import Checkpoint
from lamella.errors import UserError
from tests.checkpoint.gguf_files import llama_tensors, write_gguf
from tests.fixtures import dense_config, random_model


def numpy_state(model):
    return {name: t.detach().numpy() for name, t in model.state_dict().items()}


@pytest.fixture(scope="module")
def dense():
    config = dense_config()
    return config, numpy_state(random_model(config))


@pytest.fixture(scope="module")
def dense_file(dense, tmp_path_factory):
    config, state = dense
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama", config, llama_tensors(config, state, True))


def values_of(checkpoint, tensor):
    out = np.empty(tensor.numel, np.float32)
    step = checkpoint.piece(tensor)
    for first in range(0, tensor.numel, step):
        checkpoint.values(tensor, first, out[first : first + step])
    return out.reshape(tensor.shape)


@pytest.mark.parametrize("variant", ["llama", "qwen2", "llama-4-kv-heads"])
def test_b31_rows_of_queries_and_keys(variant, tmp_path):
    """Tensors out of GGUF are the original's to the bit, and so are logits, whatever the head counts and the row order."""
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = dense_config(num_key_value_heads=4 if variant.endswith("heads") else 2)
    if variant == "qwen2":
        kept = {
            k: v
            for k, v in config.to_dict().items()
            if k not in ("model_type", "architectures", "attention_bias", "mlp_bias")
        }
        config = Qwen2Config(**kept)
        config.head_dim = 16
    model = random_model(config)
    state = numpy_state(model)
    arch = variant.partition("-")[0]
    write_gguf(tmp_path / "m.gguf", arch, config, llama_tensors(config, state, arch == "llama"))
    with Checkpoint.open(tmp_path / "m.gguf") as checkpoint:
        found = {name: values_of(checkpoint, t) for name, t in checkpoint.tensors.items()}
    assert set(found) == set(state)
    for name, values in found.items():
        assert values.tobytes() == state[name].tobytes(), name
    again = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config.model_type].from_dict(checkpoint.config)).eval()
    again.load_state_dict({name: torch.from_numpy(values) for name, values in found.items()})
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert (again(ids).logits - model(ids).logits).abs().max() < 1e-5
    if arch == "llama":  # the wrong count does not restore them
        key = state["model.layers.0.self_attn.k_proj.weight"]
        assert not np.array_equal(unpaired(paired(key, config.num_key_value_heads), 1), key)


def random_blocks(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Bytes of whole rows of a ggml type, [rows, bytes]; scales of fp16 stay finite."""
    rng = np.random.default_rng(seed)
    of_kind = GGMLQuantizationType[kind]
    if kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        values = rng.normal(0, 0.02, (rows, width)).astype(np.float32)
        return np.ascontiguousarray(quantize(values, of_kind)).view(np.uint8).reshape(rows, -1)
    block, size = GGML_QUANT_SIZES[of_kind]
    raw = rng.integers(0, 256, (rows * width // block, size), dtype=np.uint8)
    scales = {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82], "MXFP4": []}.get(
        kind, [0, 2] if kind.endswith("_K") else [0]
    )
    for at in scales:
        raw[:, at : at + 2] = np.float16(0.003).reshape(1).view(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = 120
    return raw.reshape(rows, -1)


def decoder(raw: np.ndarray, shape, **settings) -> Gguf:
    part = TensorInfo("t", None, "U8", (raw.size,), 0, raw.size)
    data = raw.reshape(-1)

    def read(tensor, start, buffer):
        assert tensor is part
        buffer[:] = data[start : start + len(buffer)].data

    return Gguf(TensorInfo("t", None, "F32", shape, 0, raw.size, Packing("gguf", {"weight": part}, settings)), read)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *QUANTISED])
def test_values_in_pieces(kind):
    """Any piece of any type is what the gguf package makes of the whole tensor, with rows put back where they were paired."""
    raw = random_blocks(kind, 24, 512)
    whole = dequantize(raw, GGMLQuantizationType[kind]).reshape(24, 512)
    assert np.isfinite(whole).all() and np.abs(whole).max() > 0
    for heads, wanted in ((None, whole), (3, unpaired(whole, 3))):
        found = decoder(raw, (24, 512), type=kind, heads=heads)
        for first, count in ((0, 24 * 512), (5 * 512, 512), (700, 3000), (24 * 512 - 1, 1), (4096, 4096)):
            out = np.full(count, np.nan, np.float32)
            found.values(first, out)
            assert out.tobytes() == wanted.reshape(-1)[first : first + count].tobytes(), (heads, first)
        assert found.piece() % 4096 == 0 and found.piece() % (512 * (8 if heads else 1)) == 0


def test_paired_biases_and_shifted_norms():
    bias = np.arange(24, dtype=np.float32)
    out = np.empty(24, np.float32)
    decoder(paired(bias.reshape(-1, 1), 3).view(np.uint8), (24,), type="F32", heads=3).values(0, out)
    assert out.tolist() == bias.tolist()
    decoder((bias + 1).view(np.uint8), (24,), type="F32", heads=None, add=-1.0).values(0, out)
    assert out.tolist() == bias.tolist()


def test_q8_0_is_taken_over():
    """Codes and scales of Q8_0 as a store's int8 holds them: their product is the value, to the bit."""
    raw = random_blocks("Q8_0", 6, 96)
    found = decoder(raw, (6, 96), type="Q8_0", heads=None)
    native = found.native()
    assert (native.format, native.block_size, native.order) == ("int8", 32, ())
    assert native.parts == {"codes": 6 * 96, "scales": 6 * 3 * 4}
    parts = {}
    for part, nbytes in native.parts.items():
        parts[part] = bytearray(nbytes)
        for start in range(0, nbytes, 37):
            found.native_part(part, start, memoryview(parts[part])[start : start + 37])
    codes, scales = np.frombuffer(parts["codes"], np.int8), np.frombuffer(parts["scales"], np.float32)
    values = codes.reshape(-1, 32).astype(np.float32) * scales[:, None]
    assert values.tobytes() == dequantize(raw, GGMLQuantizationType.Q8_0).tobytes()
    assert decoder(raw, (6, 96), type="Q8_0", heads=3).native() is None
    assert decoder(random_blocks("Q4_0", 6, 96), (6, 96), type="Q4_0", heads=None).native() is None


def test_config(dense, dense_file):
    model = read_gguf(dense_file)
    from transformers import LlamaConfig

    ours, said = LlamaConfig.from_dict(model.config).to_dict(), dense[0].to_dict()
    assert {k: v for k, v in ours.items() if said[k] != v and k not in ("dtype", "architectures")} == {
        "bos_token_id": None, "pad_token_id": None}  # fmt: skip
    assert model.notices == ()


def refused(path, what):
    with pytest.raises(UserError, match=what) as caught:
        Checkpoint.open(path)
    return str(caught.value)


def test_damaged_files(dense_file, tmp_path):
    data = dense_file.read_bytes()
    for name, content, what in (
        ("cut", data[:-4000], "is cut: tensor"), ("header", data[:300], "is cut: the header"),
        ("lfs", b"version https://git-lfs.github.com/spec/v1\n", "git-lfs"), ("other", b"PK\x03\x04" * 20, "not a GGUF"),
        ("v1", data[:4] + b"\x01\0\0\0" + data[8:], "version 1"),
        ("count", data[:8] + b"\xff" * 8 + data[16:], "counts"),
    ):  # fmt: skip
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        refused(file, what)
    refused(tmp_path / "none.gguf", "No such file")


def test_what_is_refused(dense, tmp_path):
    config, state = dense
    tensors = llama_tensors(config, state, True)
    path = tmp_path / "m.gguf"

    def written(arch="llama", more=None, types=None, **changed):
        write_gguf(
            path, arch, config, {k: v for k, v in (tensors | changed).items() if v is not None}, more=more, types=types
        )
        return path

    refused(written("bloom"), "architecture 'bloom'")
    refused(written(**{"blk.0.ssm_a": np.zeros(4, np.float32)}), "does not have: blk.0.ssm_a")
    refused(written(**{"blk.1.ffn_up.weight": None}), "missing: blk.1.ffn_up.weight")
    refused(written(**{"blk.1.ffn_up.weight": np.zeros((128, 64), np.int8)}), "ffn_up.weight' has type I8")
    refused(written(more={"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}), "scaling of type 'dynamic'")
    refused(written(more={"attention.value_length": 8}), "8 dimensions")
    refused(written(**{"blk.0.attn_v.weight": np.zeros((16, 64), np.float32)}), r"shape \[16, 64\]")


def test_llama_3_scaling_is_found(dense, tmp_path):
    config, state = dense
    rope = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    divisors = np.array(llama3_divisors(config.rope_parameters["rope_theta"], 16, rope), np.float32)
    tensors = llama_tensors(config, state, True)
    path = write_gguf(tmp_path / "m.gguf", "llama", config, tensors | {"rope_freqs.weight": divisors})
    model = read_gguf(path)
    assert model.config["rope_parameters"] == {"rope_type": "llama3", "rope_theta": 10000.0, **rope}
    assert "rope_freqs.weight" in model.notices[0]
    assert not any("rope" in t.name for t in model.tensors)
    divisors[3] *= 1.01
    refused(write_gguf(path, "llama", config, tensors | {"rope_freqs.weight": divisors}), "config.json cannot say it")


def test_split_model(dense, dense_file, tmp_path):
    config, state = dense
    tensors = llama_tensors(config, state, True)
    names = list(tensors)
    for i, part in enumerate((names[:9], names[9:]), start=1):
        write_gguf(tmp_path / f"m-{i:05d}-of-00002.gguf", "llama", config, {n: tensors[n] for n in part})
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    assert {t.name for t in read_gguf(second).tensors} == {t.name for t in read_gguf(dense_file).tensors}
    assert len(read_gguf_header(first).files) == 2
    second.unlink()
    refused(first, "missing: m-00002-of-00002.gguf")
