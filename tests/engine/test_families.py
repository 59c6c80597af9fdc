"""Every proven family: logits, loss and every LoRA gradient against transformers + PEFT in fp32, for any micro-batch size."""

import re

import pytest
import torch
import transformers as tf

from lamella.adapter import Adapter
from lamella.adapter.peft_format import _tensor_names, flatten_experts
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.models.check import check_checkpoint
from lamella.models.layout import pack_rows
from lamella.store.quantize import quantize_checkpoint
from tests.conftest import random_rows
from tests.engine import families as every
from tests.engine import table_of_models
from tests.fixtures import dense_config, moe_config, write_checkpoint
from tests.oracle import label_loss, load_reference, peft_model, relative_error

SMALL = dict(
    vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=96, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=0, eos_token_id=4, pad_token_id=2,
)  # fmt: skip

FAMILIES = {
    "llama": lambda: dense_config(),
    "llama-tied": lambda: dense_config(tie_word_embeddings=True),
    "qwen2": lambda: tf.Qwen2Config(**SMALL),
    "qwen3": lambda: tf.Qwen3Config(**SMALL),
    "qwen3_moe": lambda: moe_config(),
    "qwen3_moe-dense-first": lambda: moe_config(mlp_only_layers=[0]),
    "mixtral": lambda: tf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: tf.OlmoeConfig(**{**SMALL, "intermediate_size": 32}, num_experts=4, num_experts_per_tok=2),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 3}, sliding_window=8, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
    ),
    "gemma2-softcap": lambda: tf.Gemma2Config(**SMALL, sliding_window=8, query_pre_attn_scalar=16),
    "gpt_oss": lambda: tf.GptOssConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
    ),
    "mistral-window": lambda: tf.MistralConfig(**SMALL, sliding_window=8),
}  # fmt: skip

ROWS = random_rows((5, 23, 9, 30, 12))
LABELS = sum(sum(mask) for _, mask in ROWS)


def trained_adapter(engine, targets="all-linear", **over):
    """An adapter whose B is not zero, so that every gradient is exercised."""
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=4, alpha=8, targets=targets, **over), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in adapter.parameters().items():
            if name.endswith("lora_B"):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    engine.attach(adapter)
    return adapter


def step_gradients(engine, cuts, **over):
    adapter = engine.adapter
    for p in adapter.parameters().values():
        p.grad = None
    out = engine.step([pack_rows(c) for c in cuts], step_index=0, label_tokens=LABELS, **over)
    return out, {name: p.grad.clone() for name, p in adapter.parameters().items()}


def reference_gradients(adapter, base, folder, rows=ROWS):
    adapter.save(folder)
    model = peft_model(load_reference(base), folder)
    loss = label_loss(model, rows)
    loss.backward()
    parameters = dict(model.named_parameters())
    names = _tensor_names(adapter.sites)
    trainable = {n for n, p in parameters.items() if p.requires_grad}
    assert trainable == {f"{names[k]}.lora_{x}.default.weight" for k in adapter.sites for x in "AB"}
    found = {}
    for key, site in adapter.sites.items():
        for x in "AB":
            found[f"{key}.lora_{x}"] = parameters[f"{names[key]}.lora_{x}.default.weight"].grad
        if site.experts is not None:
            assert site.rank == parameters[f"{names[key]}.lora_A.default.weight"].shape[0] // site.experts
    return loss.item(), found


def as_file(adapter, gradients):
    """Gradients in the file's layout."""
    flat = dict(gradients)
    for key, site in adapter.sites.items():
        if site.experts is not None:
            flat[f"{key}.lora_A"], flat[f"{key}.lora_B"] = flatten_experts(flat[f"{key}.lora_A"], flat[f"{key}.lora_B"])
    return flat


CORE = {
    "afmoe", "apertus", "cohere2", "deepseek_v3", "ernie4_5_moe", "falcon", "gemma2", "glm4_moe", "gpt2", "gpt_oss", "granitemoeshared",
    "llama-tied", "llama4_text", "jetmoe", "mixtral", "olmo2", "opt", "phi3", "qwen2_moe", "qwen3_moe-dense-first",
}  # fmt: skip
"""One family of each kind; the others are as these, and run with the slow tests."""
EVERY = [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in every.FAMILIES]


@pytest.mark.parametrize("family", EVERY)
def test_loss_and_every_gradient(family, tmp_path):
    found = every.measure(every.tiny(family), tmp_path)
    assert found.pairs >= every.tiny(family).num_hidden_layers // 2
    assert found.logits < 1e-5
    assert found.loss < 1e-5
    assert found.gradient < 1e-5, found.worst


@pytest.mark.parametrize("family", every.REFUSED)
def test_what_cannot_be_exact_is_refused_before_anything_is_written(family, tmp_path):
    write_checkpoint(tmp_path / "checkpoint", every.tiny(family), shards=1)
    with pytest.raises(UserError, match=re.escape(every.REFUSED[family][1])):
        quantize_checkpoint(tmp_path / "checkpoint", tmp_path / "store", check=check_checkpoint)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_the_table_names_exactly_these_families():
    from tests.engine.test_mixers import MIXERS  # which imports this

    lines = table_of_models.FILE.read_text(encoding="utf-8").splitlines()
    named = [
        line.split("|")[1].strip() for line in lines if line.startswith("| ") and not line.startswith("| model_type")
    ]
    assert named == [*every.FAMILIES, *MIXERS, *every.REFUSED]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_recompute_and_residency_do_not_change_a_bit(family, made):
    config = FAMILIES[family]()
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2] * 2
    store, _ = made(config)
    whole = Engine.open(store, dtype="fp32", recompute="never")
    trained_adapter(whole)
    _, kept = step_gradients(whole, [ROWS[:2], ROWS[2:]])
    fixed = whole.walk.weights.residency.fixed_bytes
    budget = fixed + 2 * max(store.group_bytes(i) for i in range(4)) + 1
    for settings in ({"recompute": "always"}, {"recompute": "auto", "budget_bytes": budget}):
        engine = Engine.open(store, dtype="fp32", **settings)
        trained_adapter(engine)
        _, again = step_gradients(engine, [ROWS[:2], ROWS[2:]])
        assert all(torch.equal(kept[n], again[n]) for n in kept)
    assert len(engine.walk.weights.residency.streamed) == 4


BF16 = {  # head sizes that the C attention kernels do not take, and do
    "heads of 16": FAMILIES["qwen3_moe"],
    "heads of 32": lambda: tf.MistralConfig(**{**SMALL, "head_dim": 32}, sliding_window=8),
}


@pytest.mark.parametrize("family", BF16)
def test_bf16_is_close_to_fp32(family, made):
    store, _ = made(BF16[family]())
    truth = None
    for dtype in ("fp32", "bf16"):
        engine = Engine.open(store, dtype=dtype)
        trained_adapter(engine)
        out, gradients = step_gradients(engine, [ROWS])
        flat = torch.cat([g.flatten() for g in gradients.values()])
        if truth is None:
            truth, loss = flat, out.loss_sum
    assert relative_error(flat, truth) < 0.05
    assert out.loss_sum == pytest.approx(loss, rel=0.01)
