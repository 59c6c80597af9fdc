"""The loss by vocabulary: which heads are plain, and losses and gradients through it, its kernel in the interpreter."""

import pytest
import torch
import transformers as tf

from lamella.engine import Engine
from lamella.engine.head import plain_head, vocabulary_loss
from lamella.models.layout import pack_rows
from tests.engine.test_families import FAMILIES, LABELS, ROWS, SMALL, step_gradients, trained_adapter
from tests.kernels.triton import need_interpreter
from tests.oracle import relative_error

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3_moe", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_plain_heads_are_recognised(family, dtype, made):
    store, _ = made(FAMILIES[family]())
    engine = Engine.open(store, fused=False, dtype=dtype)
    weight = plain_head(engine.skeleton, CPU)
    assert weight is engine.skeleton.model.get_output_embeddings().weight


def test_soft_caps_and_scales_are_not_plain(made):
    store, _ = made(FAMILIES["gemma2-softcap"]())
    assert plain_head(Engine.open(store, fused=False, dtype="fp32").skeleton, CPU) is None
    store, _ = made(tf.CohereConfig(**SMALL, logit_scale=0.25))
    assert plain_head(Engine.open(store, fused=False, dtype="bf16").skeleton, CPU) is None


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_same_loss_and_gradients_as_through_the_models_head(family, made):
    need_interpreter()
    store, _ = made(FAMILIES[family]())
    found = []
    for by_vocabulary in (False, True):
        engine = Engine.open(store, fused=False, dtype="fp32")
        engine.walk.head_weight = plain_head(engine.skeleton, CPU) if by_vocabulary else None
        trained_adapter(engine)
        out, gradients = step_gradients(engine, [ROWS[:2], ROWS[2:]])
        found.append((out.loss_sum, torch.cat([g.flatten() for g in gradients.values()])))
        assert engine.facts()["loss"] == ("vocabulary" if by_vocabulary else "positions")
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert relative_error(found[1][1], found[0][1]) < 1e-5


def test_a_batch_without_labels(made):
    need_interpreter()
    store, _ = made(FAMILIES["llama"]())
    skeleton = Engine.open(store, fused=False, dtype="fp32").skeleton
    batch = pack_rows([([1, 2, 3], [False] * 3)])
    loss, grad = vocabulary_loss(skeleton, plain_head(skeleton, CPU), torch.randn(3, 64), batch, LABELS)
    assert float(loss) == 0.0
    assert grad.shape == (1, 3, 64)
    assert not grad.any()
