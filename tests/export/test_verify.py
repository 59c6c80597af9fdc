"""What counts as the same model, and transformers + PEFT asked for real."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.errors import RunFailed, UserError
from lamella.export.answers import judge_answers
from lamella.export.engines.seen import Answer, Asked, Seen, seen_whole
from lamella.export.engines.server import seen_some
from lamella.export.verify import EXACT, TARGETS, distance, judge, target_of, verify
from tests.conftest import random_rows
from tests.fixtures import moe_config


def random_seen(seed, scale=1.0, like=None):
    logits = np.random.default_rng(seed).normal(size=(6, 40)) * scale
    return seen_whole([logits if like is None else like + logits])


LOGITS = np.random.default_rng(0).normal(size=(6, 40))
TUNED = seen_whole([LOGITS])
BASE = random_seen(1, 0.1, LOGITS)
NEAR = random_seen(2, 1e-5, LOGITS)


def top_of(seen, k=5):
    """What a server that tells of the likeliest `k` tokens would say."""
    order = np.argsort(-seen.logprobs, axis=1)[:, :k]
    return seen_some([{int(t): float(row[t]) for t in o} for o, row in zip(order, seen.logprobs, strict=True)])


@pytest.mark.parametrize("part", [lambda seen: seen, top_of], ids=["whole", "top"])
def test_a_true_export_passes(part):
    found = judge(Answer("e", "e 1", part(NEAR), part(BASE)), TUNED, BASE, EXACT, "float32", 2)
    assert found.ok, found.failures
    assert found.tuned.largest < 1e-4 < found.from_base.largest
    assert found.tuned.kl < 1e-8 < found.from_base.kl and found.tuned.top1 == 1.0


@pytest.mark.parametrize("part", [lambda seen: seen, top_of], ids=["whole", "top"])
def test_b71_an_adapter_without_effect_fails(part):
    found = judge(Answer("e", "e 1", part(BASE), part(BASE)), TUNED, BASE, None, "float32", 2)
    assert found.failures == ("the engine's answers are those of the base: the adapter has no effect there",)


def test_a_merged_copy_of_the_base_fails():
    found = judge(
        Answer("e", "e 1", random_seen(3, 1e-4, LOGITS + (BASE.logprobs - TUNED.logprobs)), None),
        TUNED,
        BASE,
        None,
        "float32",
        2,
    )
    assert len(found.failures) == 1 and "nearer to the base" in found.failures[0]


def test_wrong_logits_fail():
    found = judge(Answer("e", "e 1", random_seen(4, 0.01, LOGITS), BASE), TUNED, BASE, EXACT, "float32", 2)
    assert len(found.failures) == 1 and "log p differs by up to 0.0" in found.failures[0]


def test_an_untrained_adapter_fails():
    found = judge(Answer("e", "e 1", NEAR, NEAR), TUNED, TUNED, None, "float32", 2)
    assert "untrained" in found.failures[0]


def test_distance_is_that_of_the_definition():
    p, q = np.exp(TUNED.logprobs.astype(np.float64)), np.exp(BASE.logprobs.astype(np.float64))
    found = distance(TUNED, BASE)
    assert found.kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-5)
    assert found.largest == pytest.approx(np.abs(TUNED.logprobs - BASE.logprobs).max(), rel=1e-6)
    told = distance(TUNED, top_of(BASE, 40))
    assert told.kl == pytest.approx(found.kl, rel=1e-4)
    assert distance(TUNED, top_of(BASE)).kl < found.kl  # others as one: never more than the whole
    padded = Seen(
        np.arange(44) + np.zeros((6, 1), int),
        np.pad(BASE.logprobs, ((0, 0), (0, 4)), constant_values=-50),
        True,
        BASE.top,
    )
    assert distance(TUNED, padded).kl == pytest.approx(found.kl, rel=1e-4)


def test_engines_by_name():
    assert target_of("vllm=envs/bin/python") == (TARGETS["vllm"], Path("envs/bin/python"))
    with pytest.raises(UserError, match=r"no engine 'sglan'\n  fix: one of transformers, vllm"):
        target_of("sglan")
    asked = Asked(Path("m"), None, ((1, 2),), 4)
    with pytest.raises(UserError, match="has no module 'vllm'"):
        TARGETS["vllm"].answer(asked, False, Path(sys.executable))
    with pytest.raises(UserError, match="cannot be run"):
        TARGETS["llama.cpp"].answer(asked, False, Path("no/such/python"))


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory):
    """A tiny MoE, its dequantised base, and an adapter that does something."""
    store, base = made(moe_config())
    engine = Engine.open(store, dtype="fp32")
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=4, alpha=8), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in adapter.parameters().items():
            if name.endswith("lora_B"):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    folder = tmp_path_factory.mktemp("adapter")
    adapter.save(folder)
    return store.path, base, folder


def test_transformers_and_peft_agree_with_us(trained):
    store, base, adapter = trained
    prompts = [tuple(ids) for ids, _ in random_rows((5, 23))]
    found = verify(TARGETS["transformers"], base, adapter, store=store, adapter=adapter, prompts=prompts, limit=EXACT)
    assert found.ok, found.failures
    assert found.positions == 5 + 16 and found.engine.startswith("transformers ") and "peft" in found.engine
    assert found.tuned.largest < EXACT < found.from_base.largest
    assert found.base.largest < EXACT and found.tuned.top1 == found.base.top1 == 1.0
    assert found.from_base.largest == pytest.approx(found.effect.largest, rel=0.01)


def test_an_engine_that_stops_says_why(trained, tmp_path):
    store, _, adapter = trained
    with pytest.raises(RunFailed, match=r"transformers stopped with exit code 1:\n(?s:.*)nothing-here"):
        verify(TARGETS["transformers"], tmp_path / "nothing-here", adapter, store=store, adapter=adapter,
               prompts=[(1, 2, 3)], limit=None)  # fmt: skip


def test_answers_of_a_server_are_ours_or_it_fails():
    tuned, base = ["a", "b", "c"], ["x", "b", "y"]
    assert judge_answers("s 1", "float32", ["a ", "b", "c"], tuned, base).ok
    assert (
        "67% of its answers are Lamella's" in judge_answers("s 1", "float32", ["a", "b", "q"], tuned, base).failures[0]
    )
    ignored = judge_answers("s 1", "float32", base, tuned, base)
    assert ignored.failures[-1] == "100% of its answers are those of the base: the adapter has no effect there"
    assert "changes none" in judge_answers("s 1", "float32", base, base, base).failures[0]
