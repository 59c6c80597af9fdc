"""Adapter files: PEFT's layout, exact round trips, and the faults users report."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella.adapter import Adapter
from lamella.adapter.peft_format import flatten_experts, unflatten_experts
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.models.layout import pack_rows
from tests.engine.test_families import FAMILIES, ROWS, trained_adapter
from tests.fixtures import dense_config, moe_config
from tests.oracle import load_reference, peft_model, relative_error


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "mixtral", "qwen3_moe-dense-first"])
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_gives_the_same_logits_and_differs_from_base(family, rslora, made, tmp_path):
    store, base = made(FAMILIES[family]())
    engine = Engine.open(store, dtype="fp32")
    bare = engine.logits(pack_rows(ROWS))
    adapter = trained_adapter(engine, rslora=rslora)
    tuned = engine.logits(pack_rows(ROWS))
    adapter.save(tmp_path)
    model = peft_model(load_reference(base), tmp_path)
    theirs = torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids, _ in ROWS])
    assert relative_error(tuned, theirs) < 1e-5
    assert (tuned - bare).abs().max() > 1e-2
    again = Adapter.load(tmp_path, engine.skeleton)
    assert list(again.parameters()) == list(adapter.parameters())
    assert all(torch.equal(p, again.parameters()[n]) for n, p in adapter.parameters().items())
    assert [s.scale for s in again.sites.values()] == pytest.approx([s.scale for s in adapter.sites.values()])


def test_b55_axes_of_the_flat_expert_layout():
    experts, rank, inputs, outputs = 4, 2, 6, 5
    a, b = torch.randn(experts, rank, inputs), torch.randn(experts, outputs, rank)
    flat_a, flat_b = flatten_experts(a, b)
    for e in range(experts):
        delta = sum(torch.outer(flat_b[:, k * experts + e], flat_a[e * rank + k]) for k in range(rank))
        assert torch.allclose(delta, b[e] @ a[e], atol=1e-6)
        wrong = sum(torch.outer(flat_b[:, e * rank + k], flat_a[e * rank + k]) for k in range(rank))
        assert not torch.allclose(wrong, b[e] @ a[e], atol=1e-3)
    back_a, back_b = unflatten_experts(flat_a, flat_b, experts)
    assert torch.equal(back_a, a)
    assert torch.equal(back_b, b)


@pytest.mark.parametrize(("experts", "rank"), [(1, 3), (4, 1)])
def test_b55_twins_where_both_orders_agree(experts, rank):
    a, b = torch.randn(experts, rank, 6), torch.randn(experts, 5, rank)
    assert all(
        torch.equal(x, y) for x, y in zip(unflatten_experts(*flatten_experts(a, b), experts), (a, b), strict=True)
    )


def test_b53_trainable_count_is_the_formula(made):
    engine = Engine.open(made(moe_config())[0], dtype="fp32")
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=8, targets=targets, expert_rank=4), 0)
    attention = 2 * 8 * ((64 + 64) + (64 + 32) + (64 + 32) + (64 + 64))
    experts = 2 * 4 * 4 * ((64 + 48) + (24 + 64))
    assert adapter.num_parameters() == attention + experts
    assert {s.weight_class for s in adapter.sites.values()} == {"attention", "experts"}


def test_expert_rank_is_rank_over_active_experts_at_the_same_scale(made):
    engine = Engine.open(made(moe_config())[0], dtype="fp32")
    for rslora in (False, True):
        adapter = Adapter.create(engine.skeleton, LoraConfig(rank=8, alpha=16, rslora=rslora), 0)
        ranks = {s.weight_class: s.rank for s in adapter.sites.values()}
        assert ranks == {"attention": 8, "experts": 4}
        assert {s.scale for s in adapter.sites.values()} == {16 / 8**0.5 if rslora else 2.0}


def test_routers_are_never_targeted(made):
    for family in ("qwen3_moe", "mixtral", "olmoe", "gpt_oss"):
        engine = Engine.open(made(FAMILIES[family]())[0], dtype="fp32")
        adapter = Adapter.create(engine.skeleton, LoraConfig(rank=2), 0)
        assert not [k for k in adapter.sites if k.rpartition(".")[2] in ("gate", "router")]


@pytest.mark.parametrize("target", ["qproj", "mlp.q_proj", "gate", "lm_head", "experts.q_proj"])
def test_b53_a_target_that_matches_nothing_is_an_error(target, made):
    engine = Engine.open(made(moe_config())[0], dtype="fp32")
    with pytest.raises(UserError, match="matches no linear layer"):
        Adapter.create(engine.skeleton, LoraConfig(rank=2, targets=("v_proj", target)), 0)


def test_half_of_a_fused_weight_is_an_error(made):
    engine = Engine.open(made(moe_config())[0], dtype="fp32")
    with pytest.raises(UserError, match="gate and up in one weight"):
        Adapter.create(engine.skeleton, LoraConfig(rank=2, targets=("gate_proj", "down_proj")), 0)


def test_init_does_not_depend_on_what_else_is_targeted(made):
    engine = Engine.open(made(dense_config())[0], dtype="fp32")
    every = Adapter.create(engine.skeleton, LoraConfig(rank=2), 7)
    few = Adapter.create(engine.skeleton, LoraConfig(rank=2, targets=("v_proj",)), 7)
    assert all(torch.equal(p, every.parameters()[n]) for n, p in few.parameters().items())
    other = Adapter.create(engine.skeleton, LoraConfig(rank=2, targets=("v_proj",)), 8)
    assert not torch.equal(next(iter(few.parameters().values())), next(iter(other.parameters().values())))


def saved(engine, folder, **over):
    adapter = trained_adapter(engine, **over)
    adapter.save(folder)
    return adapter


def test_an_adapter_of_another_base_of_the_same_shapes_is_refused(made, tmp_path):
    store, _ = made(dense_config())
    engine = Engine.open(store, dtype="fp32")
    adapter = trained_adapter(engine)
    adapter.save(tmp_path, facts={"base_fingerprint": store.manifest.source_fingerprint})
    engine.attach(Adapter.load(tmp_path, engine.skeleton))
    other = Engine.open(made(dense_config(), seed=1)[0], dtype="fp32")
    with pytest.raises(UserError, match="trained on a base with fingerprint"):
        other.attach(Adapter.load(tmp_path, other.skeleton))


def test_b57_missing_or_extra_keys_are_errors(made, tmp_path):
    engine = Engine.open(made(dense_config())[0], dtype="fp32")
    saved(engine, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    save_file({k: v for k, v in tensors.items() if k != first}, file)
    with pytest.raises(UserError, match="has only lora_"):
        Adapter.load(tmp_path, engine.skeleton)
    save_file({**tensors, "base_model.model.lm_head.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(UserError, match="not a LoRA weight"):
        Adapter.load(tmp_path, engine.skeleton)
    renamed = {k.replace("model.layers", "model.language_model.layers"): v for k, v in tensors.items()}
    save_file(renamed, file)
    with pytest.raises(UserError, match=r"0 of 14 modules exist.*language_model"):
        Adapter.load(tmp_path, engine.skeleton)
    save_file({k: v.repeat(1, 2) if k == first else v for k, v in tensors.items()}, file)
    with pytest.raises(UserError, match="the model needs"):
        Adapter.load(tmp_path, engine.skeleton)


@pytest.mark.parametrize(("key", "value"), [("lora_alpha", None), ("r", 0), ("peft_type", "IA3"), ("use_dora", True)])
def test_bad_adapter_config_is_an_error(key, value, made, tmp_path):
    engine = Engine.open(made(dense_config())[0], dtype="fp32")
    saved(engine, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(UserError, match=key):
        Adapter.load(tmp_path, engine.skeleton)


def test_values_and_names_of_broken_training_are_errors(made, tmp_path):
    engine = Engine.open(made(dense_config())[0], dtype="fp32")
    saved(engine, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    last = max(tensors)
    save_file({**tensors, last: torch.full_like(tensors[last], torch.nan)}, file)
    with pytest.raises(UserError, match="holds NaN or infinite values"):
        Adapter.load(tmp_path, engine.skeleton)
    save_file({k.removeprefix("base_model.model."): v for k, v in tensors.items()}, file)
    with pytest.raises(UserError, match=r"28 names of pairs do not begin with base_model\.model\."):
        Adapter.load(tmp_path, engine.skeleton)


def test_what_is_no_adapter_folder_is_said(made, tmp_path):
    engine = Engine.open(made(dense_config())[0], dtype="fp32")
    (tmp_path / "file").touch()
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "adapter.gguf").touch()
    for name, says in (("none", "no such folder"), ("file", "is a file"), (".", "holds no adapter_config.json"),
                       ("gguf", "GGUF adapters are not read")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            Adapter.load(tmp_path / name, engine.skeleton)


def test_a_cut_file_is_an_error(made, tmp_path):
    engine = Engine.open(made(dense_config())[0], dtype="fp32")
    saved(engine, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        Adapter.load(tmp_path, engine.skeleton)


def test_plain_adapter_holds_two_tensors_per_module_and_nothing_else(made, tmp_path):
    engine = Engine.open(made(dense_config())[0], dtype="fp32")
    saved(engine, tmp_path, targets=("q_proj", "v_proj"))
    names = set(load_file(tmp_path / "adapter_model.safetensors"))
    assert names == {
        f"base_model.model.model.layers.{i}.self_attn.{m}.lora_{x}.weight"
        for i in range(2)
        for m in ("q_proj", "v_proj")
        for x in "AB"
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]
