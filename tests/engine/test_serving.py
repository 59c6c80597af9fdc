"""Batches of several adapters and rows that join and leave: each request is what it is alone."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

from lamella.engine import Engine
from lamella.engine.serving import Serving, Share, read_resident
from lamella.errors import UserError
from lamella.eval.scoring import plan_batches, score_prompts
from lamella.eval.trie import LabelTrie
from lamella.kernels import lora_rows, paged
from lamella.models.layout import pack_rows
from lamella.models.paged import BLOCK, PagedCache
from tests.engine import families as every
from tests.engine.test_families import FAMILIES
from tests.engine.test_mixers import MIXERS
from tests.serve.tenants import attached, prompt, save_adapters

KINDS = {
    **{name: FAMILIES[name] for name in ("llama", "qwen3_moe", "gemma3", "gpt_oss", "gemma2-softcap")},
    "llama4": lambda: every.tiny("llama4_text"),
    "qwen3_5": MIXERS["qwen3_5"],
    "jamba": MIXERS["jamba"],
}
"""Dense; LoRA on experts; sliding windows; sinks, biases, windows; soft caps; chunks; two kinds of recurrent mixers."""

NEW = 5
TRIE = LabelTrie(["a", "b", "c"], [(7, 8, 4), (7, 9, 4), (20, 4)])


class Rows:
    """A greedy loop over running rows, as simple as can be."""

    def __init__(self, serving, cache):
        self.serving, self.cache, self.running = serving, cache, {}

    def step(self, joining):
        """joining: id -> (adapter, prompt). Every running row and every joining one gets a token."""
        shares, ids = [], []
        if self.running:
            ids += sorted(self.running, key=lambda i: id(self.running[i][0]))
            rows = [self.running[i] for i in ids]
            shares.append(self.serving.next_tokens(
                self.cache, [r[1] for r in rows], [r[3][-1] for r in rows], [len(r[2]) + len(r[3]) - 1 for r in rows],
                [r[0] for r in rows],
            ))  # fmt: skip
        new = sorted(joining, key=lambda i: id(joining[i][0]))
        for i in new:
            adapter, ids_of = joining[i]
            self.running[i] = (adapter, self.cache.reserve(len(ids_of) + NEW), ids_of, [])
        if new:
            rows = [self.running[i] for i in new]
            shares.append(
                self.serving.prompts(self.cache, [r[1] for r in rows], [r[2] for r in rows], [r[0] for r in rows])
            )
        hidden = self.serving.walk(shares)
        last = hidden[:-1] if new else hidden
        if new:
            ends = torch.tensor([len(self.running[i][2]) for i in new]).cumsum(0) - 1
            last = [*last, hidden[-1][ends]]
        chosen = self.serving.logits(torch.cat(last)).argmax(-1).tolist()
        for i, token in zip([*ids, *new], chosen, strict=True):
            self.running[i][3].append(token)

    def leave(self, i):
        _, row, _, tokens = self.running.pop(i)
        self.cache.release(row)
        return tokens


@pytest.mark.parametrize(
    ("kind", "plain"), [(kind, False) for kind in KINDS] + [(kind, True) for kind in ("qwen3_moe", "gpt_oss", "gemma2-softcap", "llama4")]
)  # fmt: skip
def test_rows_of_several_adapters_that_come_and_go_are_each_what_they_are_alone(
    kind, plain, made, tmp_path, monkeypatch
):
    """`plain`: without the C kernels, as on other machines and devices."""
    if plain:
        monkeypatch.setattr(paged, "takes", lambda *_: False)
        monkeypatch.setattr(lora_rows, "takes", lambda *_: False)
    store, _ = made(KINDS[kind]())
    engine = Engine.open(store, dtype="fp32")
    folders = save_adapters(engine, tmp_path)
    vocabulary = engine.config.vocab_size
    asked = {n: ((None, "t0", "t1", "t2")[n % 4], prompt(3 + 7 * n % 40, n, vocabulary)) for n in range(9)}
    alone = {i: attached(engine, folders, name).generate([p], NEW, set())[0].ids for i, (name, p) in asked.items()}
    engine.attach(None)
    serving = Serving(engine)
    residents = {n: read_resident(engine, n, f, serving.names, None) for n, f in folders.items()}
    cache = PagedCache(serving.form(), serving.form().token_bytes * BLOCK * 14, torch.device("cpu"))
    rows, waiting, found, rnd = Rows(serving, cache), sorted(asked), {}, random.Random(3)
    while waiting or rows.running:
        joining = {i: (residents.get(asked[i][0]), asked[i][1]) for i in waiting[: rnd.randint(0, 3)]}
        joining = {i: x for i, x in joining.items() if len(rows.running) + len(joining) <= 5}
        waiting = [i for i in waiting if i not in joining]
        if joining or rows.running:
            rows.step(joining)
        for i in [i for i, row in rows.running.items() if len(row[3]) == NEW or (i == 4 and len(row[3]) == 2)]:
            found[i] = rows.leave(i)
    alone[4] = alone[4][:2]  # it left early
    assert found == alone
    assert len({tuple(x) for x in alone.values()}) > 4
    assert cache.tokens_used == 0


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3", "qwen3_5"])
def test_scores_and_answers_share_a_walk(kind, made, tmp_path):
    store, _ = made(KINDS[kind]())
    engine = Engine.open(store, dtype="fp32")
    folders = save_adapters(engine, tmp_path)
    prompts = [prompt(20, 1) + prompt(n, n + 50) for n in (3, 9, 1, 14)]
    names = (None, "t0", "t2")
    alone = [
        score_prompts(attached(engine, folders, n), prompts, TRIE, batch_tokens=64, walk_tokens=1000) for n in names
    ]
    engine.attach(None)
    serving = Serving(engine)
    residents = {n: read_resident(engine, n, f, serving.names, None) for n, f in folders.items()}
    cache = PagedCache(serving.form(), 1 << 20, torch.device("cpu"))
    planned = [(n, batch) for n in names for batch in plan_batches(prompts, TRIE, 64)]
    shares = [Share(b.batch, (residents.get(n),) * len(b.batch.row_ids)) for n, b in planned]
    answers = serving.prompts(cache, [cache.reserve(40)] * 1, [prompts[0]], [residents["t1"]])
    hidden = serving.walk([*shares[:3], answers, *shares[3:]])
    del hidden[3]
    for (name, batch), share, h in zip(planned, shares, hidden, strict=True):
        got = serving.scores(h, share.batch).double().view(len(batch.prompts), TRIE.num_edges)
        wanted = torch.from_numpy(alone[names.index(name)][list(batch.prompts)])
        assert torch.allclose(got, wanted, atol=2e-5)
    assert abs(alone[0] - alone[1]).max() > 0.1


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_several_adapters_in_bf16_are_as_near_as_one(kind, made, tmp_path):
    """Runs of rows filled up, experts one by one: the same to bf16's rounding."""
    store, _ = made(KINDS[kind]())
    engine = Engine.open(store, dtype="bf16")
    folders = save_adapters(engine, tmp_path)
    serving = Serving(engine)
    residents = [None, *(read_resident(engine, n, f, serving.names, None) for n, f in folders.items())]
    rows = [list(prompt(n, n)) for n in (5, 3, 70, 11)]
    (mixed,) = serving.walk([Share(pack_rows([(r, []) for r in rows]), tuple(residents))])
    apart = [serving.walk([Share(pack_rows([(r, [])]), (a,))])[0] for r, a in zip(rows, residents, strict=True)]
    assert mixed.shape[0] == sum(map(len, rows))
    difference = (mixed.double() - torch.cat(apart).double()).norm() / torch.cat(apart).double().norm()
    assert difference < 0.02


def test_an_adapter_s_memory_goes_with_its_last_user(made, tmp_path):
    store, _ = made(FAMILIES["llama"]())
    engine = Engine.open(store, dtype="fp32")
    folders = save_adapters(engine, tmp_path, 1)
    serving = Serving(engine)
    resident = read_resident(engine, "t0", folders["t0"], serving.names, None)
    pairs = [weakref.ref(h.pair.a) for hangers in resident.layers.values() for h in hangers]
    share = Share(pack_rows([([1, 2, 3], []), ([4, 5], [])]), (None, resident))
    serving.walk([share])
    assert all(ref() is not None for ref in pairs)
    del resident, share
    gc.collect()
    assert all(ref() is None for ref in pairs)


def test_a_failed_walk_leaves_no_adapter_hung(made, tmp_path):
    store, _ = made(FAMILIES["llama"]())
    engine = Engine.open(store, dtype="fp32")
    folders = save_adapters(engine, tmp_path, 2)
    serving = Serving(engine)
    one, two = (read_resident(engine, n, f, serving.names, None) for n, f in folders.items())
    batch = pack_rows([([1, 2, 3], [])])
    (before,) = serving.walk([Share(batch, (None,))])
    cache = PagedCache(serving.form(), 1 << 20, torch.device("cpu"))
    broken = serving.prompts(cache, [cache.reserve(5), cache.reserve(5)], [[1, 2], [3]], [one, two])
    broken.cache.slot_T[0] = 1 << 40
    with pytest.raises((IndexError, RuntimeError)):
        serving.walk([broken])
    (after,) = serving.walk([Share(batch, (None,))])
    assert torch.equal(before, after)


def test_b71_an_adapter_without_effect_is_refused(made, tmp_path):
    store, _ = made(FAMILIES["llama"]())
    engine = Engine.open(store, dtype="fp32")
    folders = save_adapters(engine, tmp_path, 1)
    serving = Serving(engine)
    resident = read_resident(engine, "t0", folders["t0"], serving.names, None)
    assert serving.effect(resident) > 0.01
    for hangers in resident.layers.values():
        for hanger in hangers:
            hanger.pair.b.zero_()
    with pytest.raises(UserError, match="has no effect"):
        serving.effect(resident)


def test_a_cache_too_small_for_a_block_is_refused(made):
    store, _ = made(FAMILIES["llama"]())
    form = Serving(Engine.open(store, dtype="fp32")).form()
    assert form.token_bytes == 2 * 2 * 2 * 16 * 4  # layers, key and value, kv heads, head size, fp32
    with pytest.raises(UserError, match="no room for a block"):
        PagedCache(form, form.token_bytes * BLOCK, torch.device("cpu"))
    cache = PagedCache(form, form.token_bytes * BLOCK * 4, torch.device("cpu"))
    assert (cache.tokens, cache.can_hold(3 * BLOCK), cache.can_hold(3 * BLOCK + 1)) == (3 * BLOCK, True, False)
    row = cache.reserve(BLOCK + 1)
    assert (cache.tokens_used, cache.reserve(BLOCK + 1)) == (2 * BLOCK, None)
    cache.release(row)
    assert cache.tokens_used == 0
