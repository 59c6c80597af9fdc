"""FLOPs of a step by arithmetic, against torch's own counter on a plain autograd graph, and by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.engine.flops import FlopCounter, visible_pairs
from lamella.models.layout import Tree, pack_rows, pack_trees
from tests.conftest import random_rows
from tests.fixtures import dense_config, moe_config
from tests.oracle import load_reference, peft_model

ROWS = random_rows((12, 12))
TARGETS = ["all-linear", ("q_proj", "v_proj"), ("o_proj",), ("down_proj",), ("gate_proj", "down_proj")]


def counted(model, ids) -> tuple[int, int]:
    """Torch's count of one forward and backward: plain products, and batched ones (attention, rotary tables)."""
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.tensor([ids])).logits.float().logsumexp(-1).sum().backward()
    by_op = counter.get_flop_counts()["Global"]
    batched = sum(n for op, n in by_op.items() if "bmm" in str(op))
    return sum(by_op.values()) - batched, batched


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_products_are_those_torch_counts_in_transformers_and_peft(kind, targets, made, tmp_path):
    if kind == "moe" and targets != ("o_proj",):
        targets = ("q_proj", "v_proj")  # PEFT merges an expert's pair into its weight: another arithmetic
    store, base = made(dense_config(layers=3) if kind == "dense" else moe_config(layers=3))
    engine = Engine.open(store, dtype="fp32")
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=4, targets=targets), 0)
    adapter.save(tmp_path)
    ids, _ = ROWS[0]
    products, batched = counted(peft_model(load_reference(base), tmp_path), ids)
    mine = FlopCounter(engine.skeleton, adapter.sites.values()).step([pack_rows([(ids, [False] * 12)])])
    head = 2 * 2 * 12 * 512 * 64
    assert mine.total - mine.attention + head == products
    needs_inputs = 2 if targets in ("all-linear", ("q_proj", "v_proj")) else 2 * 2 / 3  # none in layer 0's attention
    squares = 3 * (1 + needs_inputs) * 2 * 4 * 2 * 16 * 12**2
    keys = 2 * 4 * 16 * 12**2 if targets == ("q_proj", "v_proj") else 0  # layer 0's keys need no gradient; we give it
    assert batched == pytest.approx(squares - keys, rel=1e-9)
    assert mine.attention == pytest.approx(squares * visible_pairs(pack_rows(ROWS[:1]), None) / 12**2)


def test_experts_count_their_tokens(made):
    store, _ = made(moe_config(layers=2))
    engine = Engine.open(store, dtype="fp32")
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=8, targets=("experts",), expert_rank=3), 0)
    counter = FlopCounter(engine.skeleton, adapter.sites.values())
    found = counter.step([pack_rows([([1] * 10, [])])], recomputed={1})
    experts = 2 * (48 * 64 + 64 * 24)  # two of four experts per token
    others = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 4 * 64
    assert found.forward == 2 * found.recompute == 2 * 10 * 2 * (experts + others)
    below = 2 * 64 * 24  # layer 0: down_proj alone lies behind an adapted weight
    assert found.input_gradients == 2 * 10 * (experts + others + below)
    pairs = 2 * 3 * (64 + 48) + 2 * 3 * (24 + 64)
    assert found.lora == 2 * 10 * (2 * 3 * pairs + pairs - 2 * 3 * 64)


def test_parts_by_hand(made):
    store, _ = made(dense_config(layers=2))
    engine = Engine.open(store, dtype="fp32")
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=4, targets=("q_proj",)), 0)
    counter = FlopCounter(engine.skeleton, adapter.sites.values())
    batch = pack_rows([([1] * 10, [False] * 9 + [True])])
    found = counter.step([batch], recomputed={0, 1})
    attention, mlp = 64 * 64 + 2 * 32 * 64 + 64 * 64, 3 * 128 * 64
    assert found.forward == found.recompute == 2 * 10 * 2 * (attention + mlp)
    assert found.input_gradients == 2 * 10 * (
        2 * (attention + mlp) - 64 * 64 - 2 * 32 * 64
    )  # layer 0: none for q, k, v
    once = 2 * 10 * 4 * (64 + 64)
    assert (
        found.lora == 2 * 2 * once + 2 * 2 * once - 2 * 10 * 4 * 64
    )  # forward, recompute, backward; no input of layer 0
    assert found.attention == 2 * (1 + 1 + 2) * 2 * 4 * (16 + 16) * 55
    assert found.head == 2 * 2 * 1 * 512 * 64
    assert found.total == pytest.approx(sum(vars(found).values()))


def test_layers_below_the_first_adapted_one_only_run_forward(made):
    store, _ = made(dense_config(layers=2))
    engine = Engine.open(store, dtype="fp32")
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=4, targets=("layers.1.mlp.down_proj",)), 0)
    found = FlopCounter(engine.skeleton, adapter.sites.values()).step([pack_rows(ROWS)])
    assert found.input_gradients == 0
    assert found.attention == 2 * 2 * 4 * 32 * sum(visible_pairs(pack_rows([r]), None) for r in ROWS)
    bare = FlopCounter(engine.skeleton).step([pack_rows(ROWS)])
    assert bare.lora == bare.input_gradients == 0
    assert (bare.forward, bare.head * 2) == (found.forward, found.head)


def test_windows_and_trees_bound_what_is_seen():
    batch = pack_rows([([1] * 10, []), ([1] * 3, [])])
    assert visible_pairs(batch, None) == 55 + 6
    mask = torch.ones(10, 10).tril().triu(-3)
    assert visible_pairs(pack_rows([([1] * 10, [])]), 4) == int(mask.sum())
    tree = pack_trees([Tree([1, 2], [], [Tree([3], [True]), Tree([4, 5], [True, True])])])
    assert visible_pairs(tree, None) == 3 + 3 + (3 + 4)


def test_sliding_layers_count_their_window(made):
    from tests.engine.test_families import FAMILIES

    store, _ = made(FAMILIES["gemma3"]())
    engine = Engine.open(store, dtype="fp32")
    batch = pack_rows([([1] * 20, [])])
    found = FlopCounter(engine.skeleton).step([batch])
    assert found.attention == 2 * 4 * 32 * (2 * visible_pairs(batch, 8) + visible_pairs(batch, None))
