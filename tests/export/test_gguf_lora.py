from __future__ import annotations

import json

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file, save_file

from lamella.adapter.lora import Adapter, sites_from_shapes
from lamella.config import LoraConfig
from lamella.errors import UserError
from lamella.export.writers.gguf_lora import export_lora, read_lora, write_lora
from lamella.models.skeleton import Skeleton
from tests.checkpoint.gguf_files import in_pairs
from tests.export.gguf_models import config_of


def skeleton_of(name, **over):
    return Skeleton(config_of(name, **over), torch.float32)


def filled(skeleton, **settings):
    adapter = Adapter.create(skeleton, LoraConfig(**settings), seed=1)
    generator = torch.Generator().manual_seed(2)
    for p in adapter.parameters().values():
        p.data = torch.randn(p.shape, generator=generator)
    return adapter


def deltas(adapter):
    return {
        key: (site.scale * adapter.pair(key)[1] @ adapter.pair(key)[0]).detach() for key, site in adapter.sites.items()
    }


def raw(file):
    reader = GGUFReader(file)
    return {k: f.contents() for k, f in reader.fields.items()}, {t.name: torch.tensor(t.data) for t in reader.tensors}


@pytest.mark.parametrize(
    "name", ["llama", "mixtral", "qwen3_moe", "qwen2_moe", "gemma3_text", "phi3", "starcoder2", "cohere"]
)
def test_round_trip(name, tmp_path):
    """Read back, an adapter has the same deltas to the bit; every pair is two tensors, gate and up of experts four."""
    skeleton = skeleton_of(name)
    adapter = filled(skeleton, rank=4, alpha=8)
    written = write_lora(adapter, skeleton.config.to_dict(), tmp_path / "a.gguf", {"base": "m"})
    fused = sum(site.parameter == "gate_up_proj" for site in adapter.sites.values())
    assert written.tensors == 2 * (len(adapter.sites) + fused)
    keys, tensors = raw(tmp_path / "a.gguf")
    assert len(tensors) == written.tensors
    assert (keys["general.type"], keys["adapter.type"], keys["lamella.base"]) == ("adapter", "lora", "m")
    again = read_lora(tmp_path / "a.gguf", skeleton)
    assert list(again.sites) == list(adapter.sites)
    for key, delta in deltas(again).items():
        assert torch.equal(delta, deltas(adapter)[key]), key
    if fused:  # experts have half the rank, so B takes a factor of a half
        assert written.folded == sum(site.experts is not None for site in adapter.sites.values())
        site = next(s for s in adapter.sites.values() if s.parameter == "gate_up_proj")
        assert tensors["blk.0.ffn_up_exps.weight.lora_a"].shape == (4, site.rank, 64)
        assert tensors["blk.0.ffn_up_exps.weight.lora_b"].shape == (4, site.outputs // 2, site.rank)
    else:
        assert written.folded == 0 and all(torch.equal(p, again.state()[n]) for n, p in adapter.state().items())


def given(skeleton, ranks, alphas, rslora):
    """B = ones * 0.01 and A random, of these ranks and alphas per layer, on q_proj."""
    shapes = {f"model.layers.{i}.self_attn.q_proj": ((r, 64), (64, r)) for i, r in enumerate(ranks)}
    sites = sites_from_shapes(skeleton, shapes, dict(zip(shapes, alphas, strict=True)), rslora)
    adapter = Adapter(sites, 0.0, rslora)
    for name, p in adapter.parameters().items():
        p.data = (
            torch.full(p.shape, 0.01)
            if name.endswith("B")
            else torch.randn(p.shape, generator=torch.Generator().manual_seed(3))
        )
    return adapter


@pytest.mark.parametrize(
    ("ranks", "alphas", "rslora", "scales", "alpha", "folded"),
    [
        ((16, 16), (8, 8), False, (0.5, 0.5), 8, 0),
        ((16, 16), (8, 8), True, (2.0, 2.0), 32, 0),
        ((16, 4), (8, 8), False, (0.5, 2.0), 8, 0),
        ((16, 4), (8, 8), True, (2.0, 4.0), 32, 1),
        ((16, 16), (8, 2), False, (0.5, 0.125), 8, 1),
    ],
)
def test_b76_scale_in_gguf(ranks, alphas, rslora, scales, alpha, folded, tmp_path):
    """alpha / r of the file, with its own B, is the adapter's scale once, plain and rank-stabilised, patterns included."""
    skeleton = skeleton_of("llama")
    adapter = given(skeleton, ranks, alphas, rslora)
    written = write_lora(adapter, skeleton.config.to_dict(), tmp_path / "a.gguf")
    keys, tensors = raw(tmp_path / "a.gguf")
    assert (written.alpha, written.folded, keys["adapter.lora.alpha"]) == (alpha, folded, alpha)
    for i, (rank, scale) in enumerate(zip(ranks, scales, strict=True)):
        a, b = (tensors[f"blk.{i}.attn_q.weight.lora_{x}"] for x in "ab")
        theirs = keys["adapter.lora.alpha"] / b.shape[1] * b @ a  # what llama.cpp adds
        ours = scale * torch.full((64, rank), 0.01) @ adapter.pair(f"model.layers.{i}.self_attn.q_proj")[0]
        ratio = theirs / torch.tensor(in_pairs(ours.detach().numpy(), 4))
        assert (ratio - 1).abs().max() < 1e-5


@pytest.fixture(scope="module")
def peft_folder(tmp_path_factory):
    """q and v of a tied model with Llama 3's scaling, whose base has a rope_freqs tensor in GGUF."""
    skeleton = skeleton_of("llama 3", tie_word_embeddings=True)
    folder = tmp_path_factory.mktemp("adapter")
    filled(skeleton, rank=4, alpha=8, targets=("q_proj", "v_proj")).save(folder, base="base")
    return skeleton, folder


def test_b73_pairs_and_alpha(peft_folder, tmp_path):
    skeleton, folder = peft_folder
    written = export_lora(folder, skeleton, tmp_path / "a.gguf")
    keys, tensors = raw(tmp_path / "a.gguf")
    stored = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == written.tensors == len(stored) == 2 * 2 * 2
    assert {name.split(".", 2)[2] for name in tensors} == {
        f"{m}.weight.lora_{x}" for m in ("attn_q", "attn_v") for x in "ab"
    }
    assert keys["adapter.lora.alpha"] == 8
    value = stored["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    assert torch.equal(tensors["blk.1.attn_v.weight.lora_b"], value)
    query = stored["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    assert torch.equal(tensors["blk.1.attn_q.weight.lora_b"], torch.tensor(in_pairs(query.numpy(), 4)))


@pytest.mark.parametrize("variant", ["head", "embedding", "modules_to_save"])
def test_b73_what_cannot_be_held(variant, peft_folder, tmp_path):
    """A LoRA on the tied head, full embeddings: an error with the tensor's name before anything is written."""
    skeleton, folder = peft_folder
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    extra = {
        "head": {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64),
                 "base_model.model.lm_head.lora_B.weight": torch.zeros(512, 4)},
        "embedding": {"base_model.model.model.embed_tokens.weight": torch.zeros(512, 64)}, "modules_to_save": {},
    }[variant]  # fmt: skip
    if variant == "modules_to_save":
        config["modules_to_save"] = ["embed_tokens"]
    changed = tmp_path / "adapter"
    changed.mkdir()
    save_file(tensors | extra, changed / "adapter_model.safetensors")
    (changed / "adapter_config.json").write_text(json.dumps(config))
    what = next(iter(extra), "embed_tokens \\(modules_to_save\\)")
    with pytest.raises(UserError, match=f"cannot hold {what}"):
        export_lora(changed, skeleton, tmp_path / "out" / "a.gguf")
    assert not (tmp_path / "out").exists()


def test_an_unknown_model_type_is_refused(tmp_path):
    from transformers import HeliumConfig

    config = HeliumConfig(vocab_size=512, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
                          head_dim=16, intermediate_size=96, pad_token_id=0)  # fmt: skip
    skeleton = Skeleton(config, torch.float32)
    with pytest.raises(UserError, match="'helium' is not written as GGUF"):
        write_lora(filled(skeleton, rank=2, alpha=2), skeleton.config.to_dict(), tmp_path / "a.gguf")


def by_hand(path, tensors, **keys):
    writer = GGUFWriter(path, keys.pop("arch", "qwen3moe"))
    writer.add_type(keys.pop("type", "adapter"))
    writer.add_string("adapter.type", "lora")
    for key, value in ({"alpha": 6.0} | keys).items():
        writer.add_float32(f"adapter.lora.{key}", value)
    for name, values in tensors.items():
        writer.add_tensor(name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gate_and_up_of_another_tool(tmp_path):
    """A file whose gate and up have each an A: one pair of twice the rank with the same deltas."""
    skeleton = skeleton_of("qwen3_moe")
    draw = torch.Generator().manual_seed(0)
    pairs = {n: (torch.randn(4, 3, 64, generator=draw), torch.randn(4, 32, 3, generator=draw)) for n in ("gate", "up")}
    tensors = {
        f"blk.1.ffn_{n}_exps.weight.lora_{x}": t for n, pair in pairs.items() for x, t in zip("ab", pair, strict=True)
    }
    adapter = read_lora(by_hand(tmp_path / "a.gguf", tensors), skeleton)
    (site,) = adapter.sites.values()
    assert (site.key, site.rank, site.scale) == ("model.layers.1.mlp.experts.gate_up_proj", 6, 2.0)
    wanted = torch.cat([2.0 * b @ a for a, b in pairs.values()], 1)
    assert torch.allclose(deltas(adapter)[site.key], wanted, atol=1e-5)

    for changed, keys, what in (
        ({"blk.1.ffn_up_exps.weight.lora_b": None}, {}, "one half"),
        ({f"blk.1.ffn_up_exps.weight.lora_{x}": None for x in "ab"}, {}, "only one of gate and up"),
        ({"token_embd.weight.lora_a": torch.zeros(4, 3), "token_embd.weight.lora_b": torch.zeros(64, 4)}, {}, "token_embd"),
        ({"blk.0.attn_norm.weight": torch.zeros(64)}, {}, "no half of a LoRA pair"),
        ({}, {"alpha": 0.0}, "alpha is 0.0"), ({}, {"arch": "llama"}, "an adapter of 'llama'"), ({}, {"type": "model"}, "no GGUF"),
    ):  # fmt: skip
        kept = {name: t for name, t in (tensors | changed).items() if t is not None}
        with pytest.raises(UserError, match=what):
            read_lora(by_hand(tmp_path / "b.gguf", kept, **keys), skeleton)
