"""Reported faults of merges: layouts of experts, small deltas, scales, tied heads, adapters that fit nothing."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.export.loss import Loss
from lamella.export.merge import merge
from lamella.export.writers.fp8 import dequantize_fp8, quantize_fp8
from lamella.kernels import dequantize_nf4, quantize_mxfp4, quantize_nf4
from lamella.models.layout import pack_rows
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from lamella.store.reader import Store
from tests.checkpoint.helpers import write_fused
from tests.engine.test_families import FAMILIES, SMALL
from tests.export.test_merge import config_of, load, weights_of
from tests.export.tuned import ROWS, divergence, logits_of, tune
from tests.fixtures import dense_config, moe_config, write_checkpoint
from tests.oracle import load_reference, write_dequantised


def test_b29_every_expert_changes_and_every_tensor_is_used(tuned, tmp_path):
    case = tuned(moe_config(inner=32), targets=("gate_proj", "up_proj", "down_proj"))
    merged = merge(case.store.path, case.adapter, tmp_path / "out", "fp32")
    got, base = weights_of(merged.path), weights_of(case.base)
    experts = [name for name in base if ".experts." in name]
    assert len(experts) == merged.adapted == 2 * 4 * 3
    for name in base:
        assert ((got[name] - base[name]).abs().max() > 0) == (name in experts), name
    assert (logits_of(load_reference(merged.path)) - case.tuned).abs().max() < 1e-4
    assert merged.adapter_tensors == 8


@pytest.mark.parametrize("wrong", ["another layer", "another module", "half a pair"])
def test_b29_an_adapter_that_does_not_fit_gives_no_copy_of_the_base(wrong, tuned, tmp_path):
    case = tuned(moe_config(inner=32), targets=("gate_proj", "up_proj", "down_proj"))
    shutil.copytree(case.adapter, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    change = {
        "another layer": lambda name: name.replace("layers.1.", "layers.7."),
        "another module": lambda name: name.replace("mlp.experts", "feed_forward.experts"),
        "half a pair": lambda name: name,
    }[wrong]
    tensors = {change(name): t for name, t in tensors.items()}
    if wrong == "half a pair":
        tensors.pop(next(iter(tensors)))
    save_file(tensors, file)
    with pytest.raises(UserError):
        merge(case.store.path, tmp_path / "adapter", tmp_path / "out", "fp32")
    assert not (tmp_path / "out").exists()


def mxfp4_store(folder):
    """A tiny GPT-OSS whose experts lie in MXFP4, as its checkpoints have them."""
    import transformers as tf

    config = tf.GptOssConfig(
        **{**SMALL, "intermediate_size": 32, "num_hidden_layers": 1}, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=8, layer_types=["full_attention"],
    )  # fmt: skip
    source = write_fused(folder / "checkpoint", config, dtype=torch.bfloat16)
    pack_mxfp4(source)
    quantize_checkpoint(source, folder / "store")
    return Store.open(folder / "store")


def pack_mxfp4(source):
    """Experts [E, in, out] into `_blocks` uint8 [E, out, in / 32, 16] and `_scales` uint8 [E, out, in / 32]."""
    file = source / "model.safetensors"
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        weight = tensors.pop(name).float().transpose(1, 2).contiguous()
        experts, out, inputs = weight.shape
        codes, scales = quantize_mxfp4(weight)
        tensors[f"{name}_blocks"] = codes.view(experts, out, inputs // 32, 16)
        tensors[f"{name}_scales"] = scales.view(experts, out, inputs // 32)
    save_file(tensors, file, metadata={"format": "pt"})
    config = config_of(source)
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
    }
    (source / "config.json").write_text(json.dumps(config))


def test_b29_experts_of_an_mxfp4_checkpoint(tmp_path):
    """Kept in MXFP4, [E, out, in] behind a weight of [E, in, out]."""
    store = mxfp4_store(tmp_path)
    experts = [r for r in store.records(0) if r.tensor_class == "experts"]
    assert {(r.format, r.order) for r in experts} == {("mxfp4", (0, 2, 1))}
    base = write_dequantised(store, tmp_path / "base")
    case = tune(store, base, tmp_path / "adapter", targets=("gate_up_proj", "down_proj"))
    merged = merge(store.path, case.adapter, tmp_path / "out", "fp32")
    got, was = weights_of(merged.path), weights_of(base)
    for record in experts:
        for e in range(4):
            assert (got[record.name][e] - was[record.name][e]).abs().max() > 0
    assert all(torch.equal(got[n], was[n]) for n in was if n not in {r.name for r in experts})
    assert merged.adapter_tensors == len(load_file(case.adapter / "adapter_model.safetensors")) == 4
    assert "quantization_config" not in config_of(merged.path)
    assert (logits_of(load_reference(merged.path)) - case.tuned).abs().max() < 1e-3
    assert (case.tuned - case.bare).abs().max() > 0.05


def write_fp8(folder):
    """A dense checkpoint whose linear layers are block-scaled FP8."""
    source = write_checkpoint(
        folder / "checkpoint", dense_config(hidden_size=256, layers=1), shards=1, dtype=torch.bfloat16, std=0.03
    )
    file = source / "model.safetensors"
    tensors = load_file(file)
    for name in [n for n in tensors if "_proj" in n]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantize_fp8(tensors[name].float())
    save_file(tensors, file, metadata={"format": "pt"})
    config = config_of(source)
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    return source


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_b75_an_fp8_base(form, tmp_path):
    source = write_fp8(tmp_path)
    quantize_checkpoint(source, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    case = tune(store, write_dequantised(store, tmp_path / "base"), tmp_path / "adapter")
    merged = merge(store.path, case.adapter, tmp_path / form, form, max_loss=1.0)
    files, config = weights_of(merged.path), config_of(merged.path)
    assert ("quantization_config" in config) == (form == "fp8")
    if form == "bf16":
        assert {t.dtype for t in files.values()} == {torch.bfloat16}
        assert not any("scale" in name for name in files)
        assert (logits_of(load(merged.path)) - case.tuned).abs().max() < 1e-2
        assert (case.bare - case.tuned).abs().max() > 0.1
    else:
        assert files["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
        assert divergence(case.tuned, logits_of(load(merged.path))) < 0.05 * divergence(case.tuned, case.bare)
    onto = weights_of(merge(store.path, case.adapter, tmp_path / "onto", "fp32", onto=source, max_loss=1.0).path)
    truth = weights_of(merge(store.path, case.adapter, tmp_path / "truth", "fp32").path)
    name = "model.layers.0.mlp.up_proj.weight"
    own = load_file(source / "model.safetensors")
    original, base = dequantize_fp8(own[name], own[f"{name}_scale_inv"]), weights_of(case.base)[name]
    assert torch.allclose(onto[name] - original, truth[name] - base, atol=1e-6)


LAYOUTS = {
    "one matrix an expert": lambda path, inner: write_checkpoint(path, moe_config(inner=inner)),
    "[E, 2I, H], halves": lambda path, inner: write_fused(path, moe_config(inner=inner), dtype=torch.float32),
}


@pytest.mark.parametrize("inner", [24, 32, 48])
def test_b30_fused_or_not_the_merged_model_is_the_same(inner, tmp_path):
    """2 x inner below, at and above the hidden size of 64: sizes cannot say which way a weight lies."""
    logits = []
    for number, (layout, write) in enumerate(LAYOUTS.items()):
        folder = tmp_path / str(number)
        write(folder / "checkpoint", inner)
        quantize_checkpoint(folder / "checkpoint", folder / "store", QuantizeSettings(double_quant=False))
        case = tune(Store.open(folder / "store"), folder, folder / "adapter")
        got = logits_of(load_reference(merge(case.store.path, case.adapter, folder / "out", "fp32").path))
        assert (got - case.tuned).abs().max() < 1e-5, layout
        assert (got - case.bare).abs().max() > 0.1
        logits.append(got)
    assert torch.allclose(logits[0], logits[1], atol=1e-5)


@pytest.mark.parametrize("inner", [24, 32, 48])
def test_b30_transposed_and_interleaved(inner, tuned, tmp_path):
    """GPT-OSS: [E, H, 2I], gate and up in turns."""
    import transformers as tf

    config = tf.GptOssConfig(
        **{**SMALL, "intermediate_size": inner, "num_hidden_layers": 1}, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=8, layer_types=["full_attention"],
    )  # fmt: skip
    case = tuned(config)
    got = logits_of(load_reference(merge(case.store.path, case.adapter, tmp_path / "out", "fp32").path))
    assert (got - case.tuned).abs().max() < 1e-5
    assert (got - case.bare).abs().max() > 0.1


TABLE = {  # mean |delta| -> error of re-quantised, bf16, fp16, and of the original weights in their place
    1e-5: (1.07, 2.57, 0.32, 143), 1e-4: (1.07, 0.26, 0.032, 14), 1e-3: (0.96, 0.026, 0.003, 1.4), 5e-3: (0.30, 0.005, 0.0007, 0.28),
}  # fmt: skip


@pytest.mark.parametrize("size", TABLE)
def test_b74_error_of_the_recovered_delta(size):
    generator = torch.Generator().manual_seed(0)
    original = torch.randn(256, 256, generator=generator) * 0.02
    base = dequantize_nf4(*quantize_nf4(original), torch.empty(256, 256))
    delta = torch.randn(256, 8, generator=generator) @ torch.randn(8, 256, generator=generator)
    delta *= size / delta.abs().mean()
    merged = base + delta
    again = dequantize_nf4(*quantize_nf4(merged), torch.empty(256, 256))
    stored = [
        again,
        merged.bfloat16().float(),
        merged.half().float(),
        original + delta,
        dequantize_fp8(*quantize_fp8(merged)),
    ]
    losses = []
    for one in stored:
        losses.append(Loss())
        losses[-1].add(one.flatten(), base.flatten().clone(), delta.flatten())
    for loss, wanted in zip(losses, TABLE[size], strict=False):
        assert loss.error == pytest.approx(wanted, rel=0.05, abs=5e-4)
    requantised, bf16, _, _, fp8 = losses
    assert bf16.kept == pytest.approx(1, abs=0.02)
    assert fp8.kept == pytest.approx(1, abs=0.15)
    assert requantised.kept < (0.05 if size < 1e-3 else 0.7 if size < 5e-3 else 1.1)
    assert bf16.mean_delta == pytest.approx(size, rel=1e-5)


def test_fp8_codes_are_read_as_torch_reads_them():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[torch.isfinite(codes.float())].view(1, -1)
    assert finite.numel() == 254
    assert torch.equal(dequantize_fp8(finite, torch.ones(1, 1)), finite.float())


def hand_made(folder, skeleton_of, settings, sites):
    """A PEFT folder with B = 0.01 everywhere; `sites`: module -> rank."""
    folder.mkdir()
    modules = dict(skeleton_of.layers[0].named_modules())
    tensors = {}
    generator = torch.Generator().manual_seed(0)
    for (layer, module), rank in sites.items():
        linear, name = modules[module], f"base_model.model.model.layers.{layer}.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, linear.in_features, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.full((linear.out_features, rank), 0.01)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], **settings}
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return tensors


SITES = {(0, "self_attn.q_proj"): 16, (1, "self_attn.q_proj"): 16, (0, "mlp.up_proj"): 4}
PATTERNS = {"rank_pattern": {"mlp.up_proj": 4}, "alpha_pattern": {"layers.1.self_attn.q_proj": 32}}


@pytest.mark.parametrize("rslora", [False, True])
def test_b76_the_scale_is_alpha_over_r_or_its_root(rslora, made, tmp_path):
    store, base = made(FAMILIES["llama"]())
    engine = Engine.open(store, dtype="fp32")
    tensors = hand_made(tmp_path / "adapter", engine.skeleton, {"use_rslora": rslora, **PATTERNS}, SITES)
    scales = {(0, "self_attn.q_proj"): 2.0 if rslora else 0.5, (1, "self_attn.q_proj"): 8.0 if rslora else 2.0,
              (0, "mlp.up_proj"): 4.0 if rslora else 2.0}  # fmt: skip
    merged = merge(store.path, tmp_path / "adapter", tmp_path / "out", "fp32")
    got, was = weights_of(merged.path), weights_of(base)
    for (layer, module), scale in scales.items():
        name = f"model.layers.{layer}.{module}"
        a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        delta = got[f"{name}.weight"] - was[f"{name}.weight"]
        ratio = float((delta * (b @ a)).sum() / (b @ a).square().sum())
        assert ratio == pytest.approx(scale, rel=1e-4), name
    engine.attach(Adapter.load(tmp_path / "adapter", engine.skeleton))
    assert (logits_of(load_reference(merged.path)) - engine.logits(pack_rows(ROWS))).abs().max() < 1e-4


@pytest.mark.parametrize("wrong", [{"lora_alpha": None}, {"r": 0}])
def test_b76_no_alpha_and_no_rank_are_refused(wrong, made, tmp_path):
    store, _ = made(FAMILIES["llama"]())
    skeleton = Engine.open(store, dtype="fp32").skeleton
    hand_made(tmp_path / "adapter", skeleton, wrong, SITES)
    with pytest.raises(UserError, match="must be a positive number"):
        merge(store.path, tmp_path / "adapter", tmp_path / "out", "fp32")


def test_b77_merged_models_reload_as_they_were(tuned, tmp_path):
    """Files decide whether the head is the embeddings; config.json of the export says so."""
    source = write_checkpoint(tmp_path / "checkpoint", dense_config(layers=1))  # head and embeddings were trained apart
    (source / "config.json").write_text(json.dumps({**config_of(source), "tie_word_embeddings": True}))
    quantize_checkpoint(source, tmp_path / "store")
    cases = {
        "tied": tuned(FAMILIES["llama-tied"]()),
        "apart": tune(Store.open(tmp_path / "store"), tmp_path, tmp_path / "adapter"),
    }
    for name, case in cases.items():
        merged = merge(case.store.path, case.adapter, tmp_path / name, "fp32")
        assert config_of(merged.path)["tie_word_embeddings"] is (name == "tied")
        assert ("lm_head.weight" in weights_of(merged.path)) is (name == "apart")
        assert (logits_of(load(merged.path)) - case.tuned).abs().max() < 1e-5
        assert (case.tuned - case.bare).abs().max() > 0.1


@pytest.mark.parametrize("what", ["lm_head", "embed_tokens", "modules_to_save"])
def test_b77_adapters_of_head_or_embeddings_are_refused(what, made, tmp_path):
    store, _ = made(FAMILIES["llama-tied"]())
    skeleton = Engine.open(store, dtype="fp32").skeleton
    settings = {"modules_to_save": ["lm_head"]} if what == "modules_to_save" else {}
    tensors = hand_made(tmp_path / "adapter", skeleton, settings, SITES)
    if what != "modules_to_save":
        name = "base_model.model.lm_head" if what == "lm_head" else "base_model.model.model.embed_tokens"
        tensors |= {f"{name}.lora_A.weight": torch.ones(4, 64), f"{name}.lora_B.weight": torch.ones(512, 4)}
        save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=what):
        merge(store.path, tmp_path / "adapter", tmp_path / "out", "fp32")
    assert not (tmp_path / "out").exists()


def test_a_zero_adapter_gives_the_base_and_says_so(made, tmp_path):
    store, base = made(FAMILIES["llama"]())
    engine = Engine.open(store, dtype="fp32")
    Adapter.create(engine.skeleton, LoraConfig(rank=4, targets=("q_proj",)), 0).save(tmp_path / "adapter")
    merged = merge(store.path, tmp_path / "adapter", tmp_path / "out", "fp32")
    got = weights_of(merged.path)
    assert all(torch.equal(got[name], value) for name, value in weights_of(base).items())
    assert "the adapter is zero: the merged model is its base" in merged.notices
