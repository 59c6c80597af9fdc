"""Merged models, loaded by transformers: logits of adapter-on-base, and every value where it belongs."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lamella.checkpoint.source import Checkpoint
from lamella.errors import UserError
from lamella.export.adapters import export_adapter
from lamella.export.base import StoreBase
from lamella.export.job import with_older_names
from lamella.export.loss import by_class
from lamella.export.merge import merge
from lamella.export.writers.fp8 import dequantize_fp8
from lamella.store.quantize import quantize_checkpoint
from lamella.store.reader import Store
from tests.engine.test_families import FAMILIES
from tests.export.tuned import ROWS, divergence, logits_of, tune
from tests.fixtures import dense_config, moe_config, write_checkpoint
from tests.oracle import load_reference, write_dequantised

EXACT = ("llama-tied", "qwen3_moe-dense-first", "mixtral", "gpt_oss", "gemma3")


def weights_of(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def load(folder, dtype=torch.float32):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


@pytest.mark.parametrize("family", EXACT)
def test_fp32_is_adapter_on_base(family, tuned, tmp_path):
    case = tuned(FAMILIES[family]())
    merged = merge(case.store.path, case.adapter, tmp_path / "out", "fp32")
    got = logits_of(load_reference(merged.path))
    assert (got - case.tuned).abs().max() < 1e-4
    assert (got - case.bare).abs().max() > 0.1
    assert merged.tensors == sum(len(case.store.records(key)) for key, _ in case.store.manifest.groups())
    assert merged.adapter_tensors == len(load_file(case.adapter / "adapter_model.safetensors"))
    assert not merged.unchanged
    for loss in by_class(merged.losses).values():
        assert loss.error < 1e-5
        assert loss.kept == pytest.approx(1, abs=1e-5)
    told = json.loads((merged.path / "export.json").read_text())
    assert told["adapter_tensors_used"] == merged.adapter_tensors
    assert told["base"]["fingerprint"] == case.store.manifest.source_fingerprint


FORMS = {  # form -> (most KL to adapter-on-base, as a share of the base's own, dtype to load in)
    "bf16": (1e-3, torch.float32), "fp16": (1e-5, torch.float32), "fp8": (2e-2, torch.float32), "nf4": (0.25, torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_every_form_is_loaded_by_transformers(form, family, tuned, tmp_path):
    case = tuned(FAMILIES[family]())
    merged = merge(case.store.path, case.adapter, tmp_path / "out", form)
    most, dtype = FORMS[form]
    got = logits_of(load(merged.path, dtype))
    apart = divergence(case.tuned, case.bare)
    assert divergence(case.tuned, got) < most * apart
    assert ("quantization_config" in config_of(merged.path)) == (form in ("fp8", "nf4"))
    assert config_of(merged.path)["dtype"] == ("float16" if form == "fp16" else "bfloat16")


def test_nf4_is_what_bitsandbytes_makes_of_the_merged_weights(tuned, tmp_path):
    import bitsandbytes.functional as bnb

    case = tuned(FAMILIES["qwen3_moe"]())
    truth = weights_of(merge(case.store.path, case.adapter, tmp_path / "truth", "fp32").path)
    model = load(merge(case.store.path, case.adapter, tmp_path / "out", "nf4").path, torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "_proj" in name and "experts" not in name:
            codes, state = bnb.quantize_4bit(truth[name], blocksize=64, quant_type="nf4", compress_statistics=True)
            assert torch.equal(parameter.data, codes), name
            assert torch.equal(parameter.quant_state.absmax, state.absmax), name
            assert torch.equal(parameter.quant_state.state2.absmax, state.state2.absmax), name
            assert torch.equal(parameter.quant_state.state2.code, state.state2.code), name
            assert torch.equal(parameter.quant_state.code, state.code), name
            assert float(parameter.quant_state.offset) == float(state.offset), name
            assert parameter.quant_state.shape == truth[name].shape


def test_nf4_keeps_the_store_s_own_codes_where_nothing_is_added(tuned, tmp_path):
    case = tuned(FAMILIES["llama"](), targets=("q_proj",))
    merged = merge(case.store.path, case.adapter, tmp_path / "out", "nf4")
    files = weights_of(merged.path)
    own = StoreBase(case.store).nf4_parts("model.layers.1.mlp.up_proj.weight", 64)
    assert torch.equal(files["model.layers.1.mlp.up_proj.weight"].view(-1), own["codes"])
    assert torch.equal(files["model.layers.1.mlp.up_proj.weight.absmax"], own["absmax_q"])
    assert torch.equal(files["model.layers.1.mlp.up_proj.weight.nested_absmax"], own["absmax2"])
    assert merged.adapted == 2
    wanted = weights_of(case.base)["model.layers.1.mlp.up_proj.weight"]
    parameter = dict(load(merged.path, torch.bfloat16).named_parameters())["model.layers.1.mlp.up_proj.weight"]
    import bitsandbytes.functional as bnb

    parameter.quant_state.dtype = torch.float32
    assert torch.equal(bnb.dequantize_4bit(parameter.data, parameter.quant_state), wanted)


def test_nf4_with_experts_has_a_weight_an_expert(tuned, tmp_path):
    case = tuned(FAMILIES["qwen3_moe"]())
    files = weights_of(
        merge(case.store.path, case.adapter, tmp_path / "out", "nf4", experts_4bit=True, max_loss=1.0).path
    )
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    assert files[name].shape == (64 * 24 // 2, 1)
    assert name + ".quant_state.bitsandbytes__nf4" in files
    assert (
        "model.layers.0.mlp.experts" not in config_of(tmp_path / "out")["quantization_config"]["llm_int8_skip_modules"]
    )


def test_fp8_blocks_have_their_own_scales(tuned, tmp_path):
    case = tuned(dense_config(hidden_size=256, intermediate_size=384, layers=1))
    truth = weights_of(merge(case.store.path, case.adapter, tmp_path / "truth", "fp32").path)
    files = weights_of(merge(case.store.path, case.adapter, tmp_path / "out", "fp8").path)
    name = "model.layers.0.mlp.gate_proj.weight"
    codes, scale = files[name], files[f"{name}_scale_inv"]
    assert codes.dtype == torch.float8_e4m3fn
    assert (codes.shape, scale.shape, scale.dtype) == ((384, 256), (3, 2), torch.float32)
    largest = truth[name].view(3, 128, 2, 128).abs().amax((1, 3))
    assert torch.allclose(scale, largest / 448)
    assert torch.equal(codes.float().view(3, 128, 2, 128).abs().amax((1, 3)), torch.full((3, 2), 448.0))
    got = dequantize_fp8(codes, scale)
    assert (got - truth[name]).abs().max() <= float(largest.max()) / 28  # half a step of 3 mantissa bits at the top
    left = config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]
    assert left == ["lm_head"]
    assert files["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert torch.equal(dict(load(tmp_path / "out").named_parameters())[name], got)


def test_fp8_leaves_sides_that_are_not_whole_blocks(tuned, tmp_path):
    case = tuned(dense_config(intermediate_size=192, layers=1))
    merged = merge(case.store.path, case.adapter, tmp_path / "out", "fp8", max_loss=1.0)
    files = weights_of(merged.path)
    assert files["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert files["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert "model.layers.0.mlp.up_proj" in config_of(merged.path)["quantization_config"]["modules_to_not_convert"]
    assert any("192" in line or "whole blocks" in line for line in merged.notices)
    assert divergence(case.tuned, logits_of(load(merged.path))) < 2e-2


def test_shards_index_and_the_file_that_is_taken_away(tuned, tmp_path):
    case = tuned(FAMILIES["qwen3_moe"]())
    seen = []
    merged = merge(case.store.path, case.adapter, tmp_path / "out", "bf16", shard_bytes=60_000, finished=seen.append)
    index = json.loads((merged.path / "model.safetensors.index.json").read_text())
    assert len(seen) == len(set(index["weight_map"].values())) > 3
    whole = weights_of(merge(case.store.path, case.adapter, tmp_path / "one", "bf16").path)
    parts = weights_of(merged.path)
    assert parts.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    assert Checkpoint.open(merged.path).facts.num_layers == 2
    taken = merge(
        case.store.path, case.adapter, tmp_path / "none", "bf16", shard_bytes=60_000, finished=lambda f: f.unlink()
    )
    assert not list(taken.path.glob("*.safetensors"))


def test_auto_takes_the_narrowest_dtype_that_keeps_the_delta(tuned, tmp_path):
    for scale, dtype in ((1.0, "bfloat16"), (0.02, "float16"), (0.0001, "float32")):
        case = tuned(FAMILIES["llama"](), scale=scale)
        merged = merge(case.store.path, case.adapter, tmp_path / str(scale))
        assert config_of(merged.path)["dtype"] == dtype
        assert {t.dtype for t in weights_of(merged.path).values()} == {getattr(torch, dtype)}
        assert max(loss.error for loss in by_class(merged.losses).values()) < 0.1


def test_b74_a_form_that_loses_the_delta_is_refused(tuned, tmp_path):
    case = tuned(FAMILIES["llama"](), scale=0.02)
    for form, fix in (("bf16", "export fp16"), ("nf4", "export fp8, or bf16")):
        with pytest.raises(UserError, match=r"of the adapter's change of (mlp|attention) \(mean \|delta\|") as refused:
            merge(case.store.path, case.adapter, tmp_path / "out", form)
        assert fix in str(refused.value)
        assert not list(tmp_path.iterdir())
    merged = merge(case.store.path, case.adapter, tmp_path / "out", "bf16", max_loss=0.5)
    assert 0.1 < by_class(merged.losses)["mlp"].error < 0.5


def test_onto_the_checkpoint_says_how_far_that_is(tmp_path):
    source = write_checkpoint(tmp_path / "checkpoint", dense_config(layers=1))
    quantize_checkpoint(source, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    case = tune(store, write_dequantised(store, tmp_path / "base"), tmp_path / "adapter")
    on_store = weights_of(merge(store.path, case.adapter, tmp_path / "a", "fp32").path)
    merged = merge(store.path, case.adapter, tmp_path / "b", "fp32", onto=source)
    originals, base, got = weights_of(source), weights_of(case.base), weights_of(merged.path)
    names = [one.name for one in merged.losses]
    for name in names:
        assert torch.allclose(got[name] - originals[name], on_store[name] - base[name], atol=1e-7)
    apart = torch.cat([(originals[n] - base[n]).flatten() for n in names]).norm()
    delta = torch.cat([(on_store[n] - base[n]).flatten() for n in names]).norm()
    assert merged.base_difference == pytest.approx(float(apart / delta), rel=1e-4)
    assert any("not onto the 4-bit base" in line for line in merged.notices)
    other = write_checkpoint(tmp_path / "other", dense_config(layers=1, intermediate_size=96))
    with pytest.raises(UserError, match=r"has shape \[64, 96\], the store's \[64, 128\]"):
        merge(store.path, case.adapter, tmp_path / "c", "fp32", onto=other)


def test_nothing_stands_under_the_name_until_it_is_whole(tuned, tmp_path):
    case = tuned(FAMILIES["llama"]())

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(case.store.path, case.adapter, tmp_path / "out", "bf16", shard_bytes=50_000, finished=stop)
    assert not list(tmp_path.iterdir())
    stale = tmp_path / "out.partial"
    stale.mkdir()
    with pytest.raises(UserError, match="is in the way"):
        merge(case.store.path, case.adapter, tmp_path / "out", "bf16")
    (stale / ".lamella-merge").touch()  # as a killed merge leaves it
    (stale / "model.safetensors").write_bytes(b"half")
    merge(case.store.path, case.adapter, tmp_path / "out", "bf16")
    assert not stale.exists()
    with pytest.raises(UserError, match="exists already"):
        merge(case.store.path, case.adapter, tmp_path / "out", "bf16")


def test_no_room_on_the_disk(tuned, tmp_path, monkeypatch):
    case = tuned(FAMILIES["llama"]())
    monkeypatch.setattr("lamella.export.merge.free_bytes", lambda _: 1000)
    with pytest.raises(UserError, match=r"needs .*, 1 kB free"):
        merge(case.store.path, case.adapter, tmp_path / "out", "bf16")
    assert not list(tmp_path.iterdir())


def test_what_does_not_belong_together_is_refused(tuned, tmp_path, made):
    case = tuned(FAMILIES["llama"]())
    other, _ = made(FAMILIES["llama"](), seed=1)  # same shapes, other weights
    with pytest.raises(UserError, match="was trained on a base with fingerprint"):
        merge(other.path, case.adapter, tmp_path / "out", "bf16")
    with pytest.raises(UserError, match="form 'int3' is not known"):
        merge(case.store.path, case.adapter, tmp_path / "out", "int3")
    with pytest.raises(UserError, match="dtype 'fp32' with form 'bf16'"):
        merge(case.store.path, case.adapter, tmp_path / "out", "bf16", dtype="fp32")
    assert not list(tmp_path.iterdir())


def test_fp16_does_not_hold_large_values(tmp_path):
    source = write_checkpoint(tmp_path / "checkpoint", dense_config(layers=1), std=0.05)
    file = next(source.glob("*embed*"), None) or sorted(source.glob("*.safetensors"))[0]
    tensors = load_file(file)
    from safetensors.torch import save_file

    name = next(n for n in tensors if n.endswith(("embed_tokens.weight", "lm_head.weight")))
    tensors[name][0, 0] = 1e5
    save_file(tensors, file, metadata={"format": "pt"})
    quantize_checkpoint(source, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    case = tune(store, source, tmp_path / "adapter")
    with pytest.raises(UserError, match=r"holds values of up to 1e\+05; fp16 ends at 65504"):
        merge(store.path, case.adapter, tmp_path / "out", "fp16")


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.mark.parametrize("layout", ["vllm", "mlx"])
def test_adapters_of_other_layouts_merge_alike(layout, tuned, tmp_path):
    case = tuned(FAMILIES["qwen3_moe"]())
    export_adapter(case.adapter, tmp_path / "adapter", layout, case.store.path)
    merged = merge(case.store.path, tmp_path / "adapter", tmp_path / "out", "fp32")
    wanted = weights_of(merge(case.store.path, case.adapter, tmp_path / "truth", "fp32").path)
    got = weights_of(merged.path)
    assert all(torch.allclose(got[name], value, atol=1e-6) for name, value in wanted.items())
    assert merged.adapter_tensors > 0
    assert json.loads((merged.path / "export.json").read_text())["adapter"]["layout"] == layout


def test_progress_and_losses_are_told(tuned, tmp_path, capsys):
    case = tuned(moe_config())
    merge(case.store.path, case.adapter, tmp_path / "out", "bf16")
    said = capsys.readouterr().err
    assert "bf16, experts: mean |delta|" in said
    assert "bf16, attention: mean |delta|" in said
    assert "worst layer" in said


@pytest.mark.parametrize("form", ["bf16", "fp8", "gguf-q8_0"])
def test_divergence_is_measured_on_what_was_written(form, tuned, tmp_path):
    case = tuned(FAMILIES["llama"]())
    merged = merge(case.store.path, case.adapter, tmp_path / "out", form, texts=[ids for ids, _ in ROWS])
    told = json.loads((merged.path / "export.json").read_text())
    most = {"bf16": 1e-3, "fp8": 2e-2, "gguf-q8_0": 1e-2}[form]
    assert 0 < told["divergence"]["kl_mean"] < most * told["base_divergence"]["kl_mean"]
    assert told["divergence"]["tokens"] == sum(len(ids) - 1 for ids, _ in ROWS)
    assert any("KL from adapter-on-base" in line for line in merged.notices)
    if form != "gguf-q8_0":
        apart = divergence(case.tuned, logits_of(load(merged.path)))
        assert told["divergence"]["kl_mean"] == pytest.approx(apart, rel=0.2)


def test_engines_that_know_older_names_find_them():
    """mlx-lm reads `rope_theta` alone and takes 10,000 where it is not there."""
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
    found = with_older_names({"rope_parameters": yarn, "hidden_size": 8})
    assert found == {"rope_parameters": yarn, "hidden_size": 8, "rope_theta": 5e5,
                     "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}  # fmt: skip
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
    assert with_older_names(plain) == {**plain, "rope_theta": 1e5}
    by_layer = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    assert with_older_names(by_layer) == by_layer
