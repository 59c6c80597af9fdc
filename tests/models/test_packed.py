"""Experts that stay packed: the same values as dequantising all of them, whichever way they are computed."""

import pytest
import torch

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.kernels import experts as kernels
from lamella.models import experts_cpu
from lamella.models.layout import pack_rows
from lamella.models.packed import ExpertBytes
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from lamella.store.reader import Store
from tests.fixtures import moe_config, write_checkpoint

ROWS = [(list(range(3, 40)), [i > 9 for i in range(37)]), (list(range(5, 30)), [i > 4 for i in range(25)])]


@pytest.fixture(scope="module", params=[True, False], ids=["double", "single"])
def store(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("packed")
    # every token goes to every expert: rounding must not change the choice
    config = moe_config(experts=6, top_k=6, inner=64, hidden_size=128)
    source = write_checkpoint(root / "moe", config, dtype=torch.bfloat16)
    quantize_checkpoint(source, root / "store", QuantizeSettings(double_quant=request.param))
    return Store.open(root / "store")


def gradients(store, dropout=0.0, dtype="bf16"):
    engine = Engine.open(store, dtype=dtype)
    adapter = Adapter.create(
        engine.skeleton, LoraConfig(rank=8, alpha=16, targets="all-linear", dropout=dropout), seed=1
    )
    with torch.no_grad():
        for name, p in adapter.parameters().items():
            if name.endswith("lora_B"):
                p.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    engine.attach(adapter)
    batch = pack_rows(ROWS)
    out = engine.step([batch], step_index=0, label_tokens=batch.score_tokens.numel())
    return out.loss_sum, {n: p.grad for n, p in adapter.parameters().items()}


def difference(a, b):
    return max((a[n] - b[n]).norm() / (b[n].norm() + 1e-8) for n in b)


def test_an_expert_equals_its_slice_of_the_whole(store):
    engine = Engine.open(store, dtype="fp32")
    weights = engine.walk.weights
    weights.bind(1)
    (experts,) = weights._experts[1]
    assert set(experts.plans) == {"gate_up_proj", "down_proj"}
    for name, plan in experts.plans.items():
        whole = torch.empty(plan.shape)
        group = store.load(1)
        group.dequantize_many([p.source for p in sorted(plan.pieces, key=lambda p: p.at)], whole)
        parameter = experts.parameter(name, torch.float32)
        assert all(torch.equal(parameter[e], whole[e]) for e in range(plan.shape[0]))


def test_a_slice_of_a_fused_tensor(store):
    group = store.load(0)
    name = next(n for n, r in group.records.items() if r.format == "nf4" and r.numel > 4096)
    whole = torch.empty(group.records[name].numel)
    group.dequantize(name, whole)
    for first, count in ((0, 64), (64, 128), (4096, 64), (whole.numel() - 64, 64), (0, whole.numel())):
        assert torch.equal(group.dequantize_slice(name, first, torch.empty(count)), whole[first : first + count])


def test_no_buffer_holds_all_experts(store):
    engine = Engine.open(store, dtype="fp32")
    attention = (
        128 * (engine.config.num_attention_heads * 2 + engine.config.num_key_value_heads * 2) * engine.config.head_dim
    )
    assert engine.walk.weights._buffer.numel() == attention


def test_a_layer_that_left_cannot_be_used(store):
    engine = Engine.open(store)
    engine.walk.weights.bind(0)
    engine.walk.weights.bind(1)
    (left,) = engine.walk.weights._experts[0]
    assert isinstance(left, ExpertBytes)
    with pytest.raises(AssertionError, match="not at work"):
        left.at_work()


@pytest.mark.skipif(kernels.route() is None, reason="no AVX-512 BF16 here")
def test_fused_and_general_way_agree(store, monkeypatch):
    exact_loss, exact = gradients(store, dtype="fp32")
    fused_loss, fused = gradients(store)
    monkeypatch.setattr(experts_cpu.kernels, "route", lambda: None)
    general_loss, general = gradients(store)
    assert fused_loss == pytest.approx(exact_loss, rel=2e-3)
    assert general_loss == pytest.approx(exact_loss, rel=2e-3)
    assert difference(fused, exact) <= 1.5 * difference(general, exact) + 1e-3


@pytest.mark.skipif(kernels.route() is None, reason="no AVX-512 BF16 here")
def test_fused_only_without_dropout(store, monkeypatch):
    calls = []
    fused = experts_cpu.fused_experts
    monkeypatch.setattr(experts_cpu, "fused_experts", lambda *a: calls.append(1) or fused(*a))
    _, with_dropout = gradients(store, dropout=0.1)
    assert not calls
    assert all(g.any() for g in with_dropout.values())
    gradients(store)
    assert calls
