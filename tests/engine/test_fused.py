"""The engine with fused modules against the engine with the families' own."""

import pytest
import torch
import transformers as tf

from lamella.engine import Engine
from lamella.kernels import rows
from lamella.models.layout import Tree, pack_rows, pack_trees
from tests.engine.test_families import FAMILIES, LABELS, ROWS, SMALL, step_gradients, trained_adapter
from tests.fixtures import dense_config
from tests.oracle import relative_error

pytestmark = pytest.mark.skipif(not rows.supported(), reason="needs AVX-512 with bf16")


def flat(gradients):
    return torch.cat([g.flatten() for g in gradients.values()])


def opened(store, dtype, fused, dropout=0.0, **over):
    engine = Engine.open(store, dtype=dtype, fused=fused, **over)
    trained_adapter(engine, dropout=dropout)
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_in_bf16(family, made):
    """No further from fp32 than with the family's own modules, and 1e-2 of rounding beside."""
    store, _ = made(FAMILIES[family]())
    truth = flat(step_gradients(opened(store, "fp32", False), [ROWS])[1])
    off = {}
    for fused in (False, True):
        _, gradients = step_gradients(opened(store, "bf16", fused), [ROWS])
        off[fused] = relative_error(flat(gradients), truth)
    assert off[True] < off[False] + 1e-2, off


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_dropout_is_the_same(family, made):
    store, _ = made(FAMILIES[family]())
    own = step_gradients(opened(store, "fp32", False, 0.3), [ROWS])
    fused = step_gradients(opened(store, "fp32", True, 0.3), [ROWS])
    assert fused[0].loss_sum == pytest.approx(own[0].loss_sum, rel=1e-6)
    assert relative_error(flat(fused[1]), flat(own[1])) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2-softcap"])
def test_kept_and_recomputed_in_bf16_and_run_to_run(family, made):
    store, _ = made(FAMILIES[family]())
    runs = [
        step_gradients(opened(store, "bf16", True, 0.1, recompute=r), [ROWS[:2], ROWS[2:]])
        for r in ("never", "always", "never")
    ]
    for out, gradients in runs[1:]:
        assert out.loss_sum == runs[0][0].loss_sum
        assert all(torch.equal(gradients[n], runs[0][1][n]) for n in gradients)


@pytest.mark.parametrize(
    "targets", [("q_proj",), ("k_proj", "v_proj"), ("up_proj",), ("down_proj",), ("gate_proj", "o_proj")]
)
def test_some_layers_adapted(targets, made):
    store, _ = made(FAMILIES["qwen3"]())
    found = []
    for fused in (False, True):
        engine = Engine.open(store, dtype="fp32", fused=fused)
        trained_adapter(engine, targets=targets)
        found.append(step_gradients(engine, [ROWS])[1])
    assert all(relative_error(found[1][n], found[0][n]) < 1e-5 for n in found[0])


def test_gradients_lie_as_their_parameters(made):
    """torch's fused AdamW on a CPU goes through memory, whatever the strides say."""
    store, _ = made(FAMILIES["qwen3"]())
    for fused in (False, True):
        engine = opened(store, "bf16", fused)
        step_gradients(engine, [ROWS])
        assert all(p.grad.stride() == p.stride() for p in engine.adapter.parameters().values())


def test_fewer_bytes_are_kept(made):
    store, _ = made(FAMILIES["llama"]())
    kept = {}
    for fused in (False, True):
        engine = opened(store, "bf16", fused)
        step_gradients(engine, [ROWS])
        kept[fused] = engine.facts()["saved_bytes_per_token_and_layer"]
    assert kept[True] < 0.7 * kept[False], kept


# ---- the head -------------------------------------------------------------------------------------------------------

HEADS = {
    "llama": (lambda: dense_config(), True),
    "llama-tied": (lambda: dense_config(tie_word_embeddings=True), True),
    "gemma3": (FAMILIES["gemma3"], True),
    "gemma2-softcap": (FAMILIES["gemma2-softcap"], False),
    "cohere-scaled": (lambda: tf.CohereConfig(**SMALL), False),
    "granite-scaled": (lambda: tf.GraniteConfig(**SMALL, logits_scaling=4.0), False),
}


@pytest.mark.parametrize("family", HEADS)
def test_which_heads_are_plain(family, made):
    config, plain = HEADS[family]
    store, _ = made(config())
    for dtype in ("fp32", "bf16"):
        engine = opened(store, dtype, True)
        step_gradients(engine, [ROWS])
        assert engine.facts()["fused"]["head"] is plain


def test_head_in_chunks(made):
    store, _ = made(dense_config())
    for dtype, near in (("fp32", 1e-6), ("bf16", 5e-3)):
        engine = opened(store, dtype, True)
        whole, gradients = step_gradients(engine, [ROWS])
        engine.walk.logits_bytes = 1  # 16 positions at a time
        assert len(engine.walk.head_chunks(LABELS)) > 1
        parts, again = step_gradients(engine, [ROWS])
        assert parts.loss_sum == pytest.approx(whole.loss_sum, rel=1e-5)
        assert relative_error(flat(again), flat(gradients)) < near


def test_positions_with_several_labels(made):
    """In trees a position predicts the first token of every branch."""
    store, _ = made(dense_config())
    branches = [Tree([5, 6], [True, True]), Tree([7], [True]), Tree([8, 9, 10], [True, False, True])]
    batch = pack_trees([Tree([1, 2, 3, 4], (), branches)])
    assert len(batch.score_positions.unique()) < len(batch.score_positions)
    found = []
    for fused in (False, True):
        engine = opened(store, "fp32", fused)
        out = engine.step([batch], step_index=0, label_tokens=5)
        found.append((out.loss_sum, flat({n: p.grad for n, p in engine.adapter.parameters().items()})))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert relative_error(found[1][1], found[0][1]) < 1e-5


def test_a_row_without_labels(made):
    store, _ = made(dense_config())
    engine = opened(store, "bf16", True)
    out = engine.step([pack_rows([([1, 2, 3], [False] * 3)])], step_index=0, label_tokens=4)
    assert out.loss_sum == 0.0
    assert all(p.grad is None or not p.grad.any() for p in engine.adapter.parameters().values())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_generation_is_the_same(family, made):
    store, _ = made(FAMILIES[family]())
    answers = [
        [g.ids for g in Engine.open(store, dtype="fp32", fused=fused).generate([[1, 2, 3], [4, 5]], 6, set())]
        for fused in (False, True)
    ]
    assert answers[0] == answers[1]
