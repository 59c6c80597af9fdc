"""Divergences against plain transformers models; one layer in memory at a time."""

import copy
import math

import pytest
import torch

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine.passes import LayerSource, SideBySide
from lamella.engine.values import CheckpointValues, StoreValues
from lamella.errors import UserError
from lamella.models.layout import pack_rows
from lamella.quality.divergence import Base, Stored, divergence, divergences, stored_names
from tests.conftest import random_rows
from tests.fixtures import dense_config, moe_config, write_checkpoint
from tests.oracle import load_reference, peft_model

TEXTS = [ids for ids, _ in random_rows([9, 23, 2, 14])]
CONFIGS = {"dense": dense_config, "moe": moe_config, "tied": lambda: dense_config(tie_word_embeddings=True)}


def plain_divergence(model_a, model_b, texts):
    """The definition, text by text, in fp64."""
    kl, same, nll_a, nll_b, largest = [], [], [], [], 0.0
    for ids in texts:
        target = torch.tensor(ids[1:])[:, None]
        with torch.no_grad():
            a, b = (m(input_ids=torch.tensor([ids])).logits[0, :-1].double() for m in (model_a, model_b))
        largest = max(largest, float((a - b).abs().max()))
        same.append(a.argmax(-1) == b.argmax(-1))
        log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
        kl.append((log_a.exp() * (log_a - log_b)).sum(-1))
        nll_a.append(-log_a.gather(1, target))
        nll_b.append(-log_b.gather(1, target))
    kl = torch.cat(kl)
    return {
        "texts": len(texts), "tokens": len(kl), "kl_mean": float(kl.mean()), "kl_p99": float(kl.quantile(0.99)),
        "kl_error": float(kl.std() / math.sqrt(len(kl))), "top1_agreement": float(torch.cat(same).double().mean()),
        "perplexity_a": float(torch.cat(nll_a).mean().exp()), "perplexity_b": float(torch.cat(nll_b).mean().exp()),
        "largest_logit_difference": largest,
    }  # fmt: skip


@pytest.fixture(scope="module")
def references(made):
    """references(name) -> (checkpoint folder, store, plain model of either)."""
    cache = {}

    def make(name):
        if name not in cache:
            store, base = made(CONFIGS[name]())
            checkpoint = store.path.parent / "checkpoint"
            cache[name] = checkpoint, store.path, load_reference(checkpoint), load_reference(base)
        return cache[name]

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_base_and_store_as_transformers_has_them(name, references):
    checkpoint, store, plain, dequantised = references(name)
    wanted = plain_divergence(plain, dequantised, TEXTS)
    found = divergences(Base(checkpoint), {"b": Stored(store)}, TEXTS, micro_batch_tokens=30)["b"]
    assert wanted["kl_mean"] > 1e-4
    for key, value in wanted.items():
        assert getattr(found, key) == pytest.approx(value, abs=1e-6, rel=1e-5), key
    by_expert = divergences(Base(checkpoint), {"b": Stored(store)}, TEXTS, hold_bytes=0)["b"]
    assert by_expert.kl_mean == pytest.approx(found.kl_mean, rel=1e-4)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_an_adapter_on_its_store_as_peft_has_it(name, references, tmp_path):
    checkpoint, store, plain, dequantised = references(name)
    side = SideBySide(torch.float32)
    adapter = Adapter.create(side.add("store", StoreValues.open(store)).skeleton, LoraConfig(rank=4), seed=1)
    for key, p in adapter.parameters().items():
        if key.endswith("lora_B"):
            p.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(len(key)))
    adapter.save(tmp_path / "adapter")
    wanted = plain_divergence(
        dequantised, peft_model(load_reference(store.parent / "base"), tmp_path / "adapter").eval(), TEXTS
    )
    for hold_bytes in (1 << 30, 0):
        found = divergences(Stored(store), {"b": Stored(store, tmp_path / "adapter")}, TEXTS, hold_bytes=hold_bytes)[
            "b"
        ]
        assert wanted["kl_mean"] > 1e-4
        for key, value in wanted.items():
            assert getattr(found, key) == pytest.approx(value, abs=1e-6, rel=1e-5), key


def test_a_model_does_not_diverge_from_itself(references):
    for name in ("dense", "moe"):
        checkpoint, store, _, _ = references(name)
        for model in (Base(checkpoint), Stored(store)):
            for dtype in ("fp32", "bf16"):
                found = divergence(model, model, TEXTS, dtype=dtype)
                assert (found.kl_mean, found.kl_p99, found.top1_agreement) == (0.0, 0.0, 1.0)
                assert found.largest_logit_difference == 0
                assert found.perplexity_a == found.perplexity_b
                assert found.tokens == sum(len(ids) - 1 for ids in TEXTS)


def test_one_class_of_a_store_and_the_rest_of_its_checkpoint(references):
    checkpoint, store, plain, dequantised = references("moe")
    values = StoreValues.open(store)
    classes = {"attention": "self_attn.", "experts": ".experts."}
    some = {name: Stored(store, only=stored_names(values, (name,)), base=checkpoint) for name in classes}
    some |= {
        "none": Stored(store, only=frozenset(), base=checkpoint),
        "all": Stored(store, only=stored_names(values, classes), base=checkpoint),
        "whole": Stored(store),
    }
    found = divergences(Base(checkpoint), some, TEXTS)
    assert found["none"].kl_mean == 0
    assert found["all"] == found["whole"]
    for name, part in classes.items():
        mixed = copy.deepcopy(plain)
        mixed.load_state_dict({k: v for k, v in dequantised.state_dict().items() if part in k}, strict=False)
        wanted = plain_divergence(plain, mixed, TEXTS)
        assert found[name].kl_mean == pytest.approx(wanted["kl_mean"], abs=1e-6)
        assert found[name].perplexity_b == pytest.approx(wanted["perplexity_b"], rel=1e-6)
    assert found["attention"].kl_mean != found["experts"].kl_mean > 0


@pytest.mark.parametrize("hold_bytes", [1 << 30, 0])
def test_never_more_than_one_layer_is_in_memory(references, monkeypatch, hold_bytes):
    checkpoint, store, _, _ = references("moe")
    side = SideBySide(torch.float32, hold_bytes)
    for name, values in (("a", CheckpointValues.open(checkpoint)), ("b", StoreValues.open(store))):
        side.add(name, values)
    skeleton = side.sources[0].skeleton
    assert all(source.skeleton is skeleton for source in side.sources)
    seen, sizes = [], set()

    def look(layer):
        def hook(*_):
            real = {i for i, one in enumerate(skeleton.layers) if any(not p.is_meta for p in one.parameters())}
            storages = {p.untyped_storage().data_ptr() for p in skeleton.layers[layer].parameters() if not p.is_meta}
            outer = [p for p in skeleton.model.parameters() if not p.is_meta]
            seen.append((layer, real, storages, outer))
            sizes.add(side.room.buffer.numel())

        return hook  # fmt: skip

    for i, layer in enumerate(skeleton.layers):
        layer.register_forward_hook(look(i))
    side.hidden([pack_rows([(ids, ())]) for ids in TEXTS])
    assert len(seen) == 2 * len(TEXTS) * len(skeleton.layers)
    held = side.sources[0].plans
    experts = sum(math.prod(p.shape) for p in held[0] if len(p.shape) == 3)
    numel = sum(math.prod(p.shape) for p in held[0]) - (0 if hold_bytes else experts)
    assert experts > 0
    assert sizes == {numel}
    for layer, real, storages, outer in seen:
        assert real == {layer}
        assert storages == {side.room.buffer.untyped_storage().data_ptr()}
        assert outer == []
    side.close()
    assert all(p.is_meta for layer in skeleton.layers for p in layer.parameters())


def test_equal_heads_are_held_once(references):
    checkpoint, store, _, _ = references("dense")
    side = SideBySide(torch.float32)
    a, b = side.add("a", CheckpointValues.open(checkpoint)), side.add("b", StoreValues.open(store))
    hidden = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(a.logits(hidden), b.logits(hidden))
    pointers = [{t.data_ptr() for t in source._outer.values()} for source in (a, b)]
    assert pointers[0] == pointers[1]


def test_models_that_do_not_belong_together_are_refused(references, tmp_path):
    checkpoint, store, _, _ = references("dense")
    other = write_checkpoint(tmp_path / "other", dense_config(), seed=9)
    with pytest.raises(UserError, match="was made from a checkpoint with fingerprint"):
        divergence(Base(checkpoint), Stored(store, only=frozenset(), base=other), TEXTS)
    wide = write_checkpoint(tmp_path / "wide", dense_config(vocab_size=600))
    with pytest.raises(UserError, match="vocab_size 600, .* has 512"):
        divergence(Base(checkpoint), Base(wide), TEXTS)
    with pytest.raises(UserError, match="no text of two tokens"):
        divergence(Base(checkpoint), Stored(store), [[3], []])
    with pytest.raises(UserError, match="token id 700 is beyond the vocabulary of 512"):
        divergence(Base(checkpoint), Stored(store), [[3, 700]])


def test_an_adapter_of_another_base_is_refused(references, tmp_path):
    _, store, _, _ = references("dense")
    skeleton = SideBySide(torch.float32).add("store", StoreValues.open(store)).skeleton
    adapter = Adapter.create(skeleton, LoraConfig(rank=2), seed=1)
    adapter.save(tmp_path / "adapter", facts={"base_fingerprint": "f" * 32})
    with pytest.raises(UserError, match="was trained on a base with fingerprint ffff"):
        divergence(Stored(store), Stored(store, tmp_path / "adapter"), TEXTS)


def test_b42_a_layer_without_finite_values_is_named(references, monkeypatch):
    checkpoint, store, _, _ = references("dense")
    own = LayerSource.layer

    def broken(self, i):
        own(self, i)
        if i == 1 and isinstance(self.values, StoreValues):
            self.skeleton.layers[1].mlp.down_proj.weight.data[0, 0] = math.inf

    monkeypatch.setattr(LayerSource, "layer", broken)
    with pytest.raises(
        UserError, match=r"layer 1 \(model.layers.1\) gives values that are not finite in float32; its input"
    ):
        divergence(Base(checkpoint), Stored(store), TEXTS)
