"""The scheduler: every request's answer is what it is alone, whatever runs beside it."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from contextlib import aclosing

import numpy as np
import pytest
import torch

from lamella.adapter import Adapter
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.eval.scoring import score_prompts
from lamella.eval.trie import LabelTrie
from lamella.serve.backend import (
    Busy,
    EngineFailed,
    Finished,
    GenerateRequest,
    Sampling,
    ScoreRequest,
    Token,
    TooLong,
    UnknownAdapter,
)
from lamella.serve.scheduler import EngineBackend, context_of
from tests.engine.test_families import FAMILIES
from tests.serve.tenants import attached, prompt, save_adapters

TRIE = LabelTrie(["a", "b", "c", "d"], [(7, 8, 4), (7, 9, 4), (20, 4), (21, 22, 23, 4)])
STOP = frozenset({4})
NAMES = (None, "t0", "t1", "t2")
LONGEST = 12


def ask(name=None, ids=(1, 2, 3), limit=LONGEST, **over):
    return GenerateRequest(over.pop("id", "r"), name, tuple(ids), limit, over.pop("stop_ids", STOP), **over)


async def answer(backend, request):
    """Tokens and why they ended."""
    tokens = []
    async for item in backend.generate(request):
        if isinstance(item, Finished):
            return tokens, item.reason
        tokens.append(item)
    raise AssertionError("an answer without an end")


async def ids_of(backend, request):
    tokens, why = await answer(backend, request)
    return [t.id for t in tokens], why


class World:
    """A store, adapters on disk, and an engine for what requests are alone."""

    def __init__(self, store, folder):
        self.store = store
        self.alone = Engine.open(store, dtype="fp32")
        self.folders = save_adapters(self.alone, folder)

    def backend(self, load=("t0", "t1", "t2"), **over):
        given = {"kv_bytes": 1 << 20, "max_rows": 5, "max_batch_tokens": 96, "queue": 200, **over}
        backend = EngineBackend(Engine.open(self.store, dtype="fp32"), **given)
        for name in load:
            backend.load_adapter(name, self.folders[name])
        return backend

    def greedy(self, name, ids, limit=LONGEST):
        found = attached(self.alone, self.folders, name).generate([ids], limit, set(STOP))[0]
        return found.ids, found.finish

    def scores(self, name, prompts):
        engine = attached(self.alone, self.folders, name)
        return score_prompts(engine, prompts, TRIE, batch_tokens=96, walk_tokens=1000)


@pytest.fixture(scope="module")
def worlds(made, tmp_path_factory):
    found = {}

    def world(kind):
        if kind not in found:
            found[kind] = World(made(FAMILIES[kind]())[0], tmp_path_factory.mktemp(kind))
        return found[kind]

    return world


@pytest.fixture
def backend(worlds):
    made = worlds("llama").backend()
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3"])
def test_answers_and_scores_in_a_crowd_are_those_of_each_request_alone(kind, worlds):
    world, rnd = worlds(kind), random.Random(5)
    asked = [(NAMES[n % 4], prompt(rnd.randint(1, 40), n), rnd.randint(1, LONGEST)) for n in range(24)]
    scored = [(NAMES[n % 4], [prompt(10, 1) + prompt(rnd.randint(1, 20), n + m) for m in range(3)]) for n in range(8)]
    backend = world.backend()

    async def leaves(n):
        """A caller that hangs up after some tokens."""
        async with aclosing(backend.generate(ask(NAMES[n % 4], prompt(9, n), LONGEST, stop_ids=frozenset()))) as items:
            for _ in range(1 + n % 3):
                assert isinstance(await anext(items), Token)

    async def crowd():
        work = [ids_of(backend, ask(name, ids, limit)) for name, ids, limit in asked]
        work += [backend.score(ScoreRequest("s", name, tuple(prompts), TRIE)) for name, prompts in scored]
        work += [leaves(n) for n in range(6)]
        order = list(range(len(work)))
        rnd.shuffle(order)
        tasks = {}
        for at in order:
            tasks[at] = asyncio.create_task(work[at])
            await asyncio.sleep(rnd.choice((0, 0, 0.003)))
        return [await tasks[at] for at in range(len(work))]

    try:
        found = asyncio.run(crowd())
        stats = backend.stats()
    finally:
        backend.close()
    for (name, ids, limit), got in zip(asked, found, strict=False):
        assert got == world.greedy(name, ids, limit)
    for (name, prompts), got in zip(scored, found[len(asked) :], strict=False):
        assert np.abs(got - world.scores(name, prompts)).max() < 1e-4  # of values near 8: fp32 rounding
    assert (stats.running, stats.waiting, stats.kv_tokens_used, stats.scored) == (0, 0, 0, len(scored))
    assert max(stats.batches_by_rows) == 5
    assert stats.tokens_out["t1"] >= sum(len(got[0]) for (n, *_), got in zip(asked, found, strict=False) if n == "t1")
    assert stats.finished["cancelled"] == 6


def test_adapters_swapped_while_requests_run_each_answer_is_its_own_adapter_s(worlds):
    """One name, three adapters one after the other; requests in flight keep theirs, new ones get the new one."""
    world = worlds("llama")
    backend, ids, rounds = world.backend(load=()), prompt(6, 3), 9
    wanted = {name: world.greedy(name, ids)[0] for name in world.folders}
    assert len({tuple(w) for w in wanted.values()}) == 3

    async def run():
        found = []
        for n in range(rounds):
            await asyncio.to_thread(backend.load_adapter, "x", world.folders[f"t{n % 3}"])
            running = [asyncio.create_task(ids_of(backend, ask("x", ids))) for _ in range(3)]
            await asyncio.sleep(0)  # all have asked
            found.append((f"t{n % 3}", running))
            if n % 3 == 2:
                backend.unload_adapter("x")
                with pytest.raises(UnknownAdapter):
                    await ids_of(backend, ask("x", ids))
        return [(name, await asyncio.gather(*running)) for name, running in found]

    try:
        for name, answers in asyncio.run(run()):
            assert [got for got, _ in answers] == [wanted[name]] * 3
    finally:
        backend.close()


def test_unloading_gives_memory_back_after_the_last_request(backend):
    pairs = [weakref.ref(h.pair.a) for hangers in backend._adapters["t0"][0].layers.values() for h in hangers]

    async def run():
        async with aclosing(backend.generate(ask("t0", prompt(5, 1), 200, stop_ids=frozenset()))) as items:
            first = await anext(items)
            backend.unload_adapter("t0")
            gc.collect()
            assert all(ref() is not None for ref in pairs)  # it still runs
            assert isinstance(first, Token) and isinstance(await anext(items), Token)
        while backend.stats().running:
            await asyncio.sleep(0.001)
        await backend.score(ScoreRequest("s", "t1", (prompt(3, 1),), TRIE))  # the engine has turned to other work

    asyncio.run(run())
    gc.collect()
    assert all(ref() is None for ref in pairs)
    assert backend.limits().kv_tokens_used == 0


def test_one_tenant_s_flood_does_not_starve_the_others(worlds):
    backend = worlds("llama").backend(max_rows=2, queue=20)
    order, lock = [], threading.Lock()

    async def one(name, n):
        try:
            await ids_of(backend, ask(name, prompt(3, n), 4, stop_ids=frozenset()))
        except Busy:
            return "busy"
        with lock:
            order.append(name)
        return "done"

    async def run():
        flood = [asyncio.create_task(one("t0", n)) for n in range(40)]
        await asyncio.sleep(0)
        few = [asyncio.create_task(one("t1", n)) for n in range(3)]
        return await asyncio.gather(*flood), await asyncio.gather(*few)

    try:
        flood, few = asyncio.run(run())
    finally:
        backend.close()
    assert few == ["done"] * 3  # they found room in a full queue
    assert 10 < flood.count("busy") < 40
    last = max(n for n, name in enumerate(order) if name == "t1")
    assert last < 12  # in turns with the flood, not after it


def test_the_same_seed_gives_the_same_tokens_whatever_else_runs(backend):
    warm = Sampling(temperature=1.5, top_p=0.95, top_k=50, seed=7)

    async def run():
        alone = await ids_of(backend, ask("t1", prompt(4, 9), sampling=warm))
        others = [asyncio.create_task(ids_of(backend, ask(n, prompt(9, 2), sampling=Sampling(2.0)))) for n in NAMES]
        crowd = await asyncio.gather(*(ids_of(backend, ask("t1", prompt(4, 9), sampling=warm)) for _ in range(3)))
        other = await ids_of(backend, ask("t1", prompt(4, 9), sampling=Sampling(1.5, 0.95, 50, seed=8)))
        await asyncio.gather(*others)
        return alone, crowd, other

    alone, crowd, other = asyncio.run(run())
    assert crowd == [alone] * 3
    assert other != alone


def test_log_probabilities_are_the_model_s_own(backend, worlds):
    ids = prompt(8, 4)
    tokens, _ = asyncio.run(answer(backend, ask("t2", ids, 3, top_logprobs=4, stop_ids=frozenset())))
    engine = attached(worlds("llama").alone, worlds("llama").folders, "t2")
    from lamella.models.layout import pack_rows

    row = [*ids, *(t.id for t in tokens)]
    logp = torch.log_softmax(engine.logits(pack_rows([(row, [])]), range(len(ids) - 1, len(row) - 1)), -1)
    for n, token in enumerate(tokens):
        assert token.logprob == pytest.approx(float(logp[n, token.id]), abs=1e-4)
        assert [i for i, _ in token.top] == logp[n].topk(4).indices.tolist()
        assert token.top[0] == (token.id, token.logprob)


def test_choices_constrain_and_their_greedy_walk_is_the_label_trie_s(backend):
    choices = tuple(tuple(x) for x in ([7, 8, 4], [7, 9, 4], [20, 4], [21, 22, 23, 4]))

    async def run():
        found = []
        for name in NAMES:
            ids = prompt(7, 11)
            tokens, why = await ids_of(backend, ask(name, ids, choices=choices))
            edges = await backend.score(ScoreRequest("s", name, (ids,), TRIE))
            sampled = [
                await ids_of(backend, ask(name, ids, choices=choices, sampling=Sampling(3.0, seed=s))) for s in range(6)
            ]
            found.append((tokens, why, choices[TRIE.greedy(edges[0])], sampled))
        return found

    for tokens, why, label, sampled in asyncio.run(run()):
        assert ((*tokens, 4), why) == (label, "stop")
        assert all((*got, 4) in choices and end == "stop" for got, end in sampled)
        assert len({tuple(got) for got, _ in sampled}) > 1


@pytest.mark.parametrize(
    ("over", "error", "text"),
    [
        ({"ids": ()}, ValueError, "no tokens"),
        ({"ids": (1, 512)}, ValueError, "the prompt has 512"),
        ({"limit": 0}, ValueError, "max_new_tokens is 0"),
        ({"limit": 510}, TooLong, "context is 512"),
        ({"name": "other"}, UnknownAdapter, "no adapter 'other'"),
        ({"sampling": Sampling(top_p=0.0)}, ValueError, "no meaning"),
        ({"choices": ((5, 6), (5, 6, 7))}, ValueError, "choice 0 is the beginning of choice 1"),
        ({"choices": ((5, 6, 7), (5, 6))}, ValueError, "choice 1 is the beginning of another"),
        ({"choices": ((5, 600),)}, ValueError, "outside 0 .. 511"),
    ],
)  # fmt: skip
def test_requests_without_meaning_are_refused_before_they_wait(over, error, text, backend):
    with pytest.raises(error, match=text):
        asyncio.run(ids_of(backend, ask(**over)))
    assert backend.stats().waiting == 0


def test_a_request_larger_than_the_cache_is_refused_and_one_that_fills_it_waits_its_turn(worlds):
    world = worlds("llama")
    backend = world.backend(kv_bytes=4 * 32 * 512)  # three blocks of 32 tokens
    assert backend.limits().kv_tokens == 96

    async def run():
        with pytest.raises(TooLong, match="the KV cache holds 96"):
            await ids_of(backend, ask(None, prompt(80, 1), 30))
        work = [ids_of(backend, ask(NAMES[n % 4], prompt((80, 10, 30)[n % 3], n), LONGEST)) for n in range(9)]
        return await asyncio.gather(*work)

    try:
        found = asyncio.run(run())
    finally:
        backend.close()
    assert found == [world.greedy(NAMES[n % 4], prompt((80, 10, 30)[n % 3], n)) for n in range(9)]


def test_a_failed_pass_fails_its_requests_and_the_next_one_works(backend, worlds, monkeypatch, capfd):
    walk = backend._serving.walk
    broken = []

    def fails(shares):
        if broken:
            raise RuntimeError("the disk has gone")
        return walk(shares)

    monkeypatch.setattr(backend._serving, "walk", fails)

    async def run():
        items = backend.generate(ask("t0", prompt(4, 1), 200, stop_ids=frozenset()))
        await anext(items)
        broken.append(True)
        with pytest.raises(EngineFailed, match="the disk has gone"):
            async for _ in items:
                pass
        with pytest.raises(EngineFailed):
            await backend.score(ScoreRequest("s", None, (prompt(4, 1),), TRIE))
        broken.clear()
        return await ids_of(backend, ask("t1", prompt(4, 2)))

    assert asyncio.run(run()) == worlds("llama").greedy("t1", prompt(4, 2))
    assert backend.limits().kv_tokens_used == 0
    assert "a pass of 1 requests failed: RuntimeError: the disk has gone" in capfd.readouterr().err
    assert backend.stats().finished["failed"] == 2


def test_an_engine_that_cannot_go_on_fails_everything_and_says_so(backend, monkeypatch):
    def broken(*args):
        raise KeyError("a bug")

    hooked = []
    monkeypatch.setattr(threading, "excepthook", hooked.append)

    async def run():
        running = asyncio.create_task(ids_of(backend, ask("t0", prompt(4, 1), 400, stop_ids=frozenset())))
        while not backend.stats().running:
            await asyncio.sleep(0.001)
        assert not backend.ended
        monkeypatch.setattr(backend._serving, "walk", broken)
        with pytest.raises(EngineFailed, match="has ended"):
            await running
        with pytest.raises(EngineFailed, match="has ended"):
            await ids_of(backend, ask("t1"))

    asyncio.run(run())
    backend._thread.join(10)
    assert backend.ended
    assert hooked[0].exc_type is KeyError  # not swallowed


def test_numbers_that_are_not_finite_fail_their_own_request_alone(backend, worlds):
    for hangers in backend._adapters["t0"][0].layers.values():
        hangers[0].pair.b.fill_(float("nan"))

    async def run():
        bad = asyncio.create_task(ids_of(backend, ask("t0", prompt(9, 1))))
        scored = asyncio.create_task(backend.score(ScoreRequest("s", "t0", (prompt(9, 2),), TRIE)))
        good = await asyncio.gather(*(ids_of(backend, ask(n, prompt(9, 3))) for n in (None, "t1", "t2")))
        for task in (bad, scored):
            with pytest.raises(EngineFailed, match="not"):
                await task
        return good

    assert asyncio.run(run()) == [worlds("llama").greedy(n, prompt(9, 3)) for n in (None, "t1", "t2")]


def test_draining_refuses_new_requests_and_ends_late_ones(backend):
    async def run():
        items = backend.generate(ask("t0", prompt(4, 1), 6, stop_ids=frozenset()))
        await anext(items)
        draining = asyncio.create_task(backend.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await ids_of(backend, ask("t1"))
        rest = [item async for item in items]
        await draining
        return rest

    assert asyncio.run(run())[-1] == Finished("length")


def test_draining_cancels_what_runs_too_long_and_closing_ends_everything(backend):
    async def run():
        items = backend.generate(ask("t0", prompt(4, 1), 400, stop_ids=frozenset()))
        await anext(items)
        await backend.drain(0)
        return [item async for item in items]

    assert asyncio.run(run())[-1] == Finished("cancelled")
    backend.close()
    backend.close()
    with pytest.raises(EngineFailed):
        asyncio.run(ids_of(backend, ask("t0")))
    with pytest.raises(EngineFailed):
        backend.load_adapter("t9", backend.adapters()["t0"].path)


@pytest.mark.parametrize(("old", "new"), [("model.layers", "model.language_model.layers"), ("model.layers", "layers")])
def test_b71_renamed_keys_that_match_nothing_are_refused_with_samples_of_both_sides(
    old, new, worlds, tmp_path, backend
):
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "renamed"
    shutil.copytree(worlds("llama").folders["t0"], folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.replace(old, new): x for name, x in tensors.items()}, file)
    with pytest.raises(UserError, match=r"0 of 14 modules.*model\.layers") as caught:
        backend.load_adapter("renamed", folder)
    assert str(caught.value).count(f"{new}.0.") >= 3
    half = tmp_path / "half"
    shutil.copytree(worlds("llama").folders["t0"], half)
    save_file({n.replace(old, new) if ".1." in n else n: x for n, x in tensors.items()}, half / file.name)
    with pytest.raises(UserError, match="7 of 14 modules"):
        backend.load_adapter("half", half)
    assert set(backend.adapters()) == {"t0", "t1", "t2"}


def test_b71_an_adapter_that_changes_nothing_or_is_outside_the_allowed_targets_is_refused(worlds, tmp_path):
    world = worlds("llama")
    zero = Adapter.load(world.folders["t0"], world.alone.skeleton)
    with torch.no_grad():
        for name, p in zero.parameters().items():
            if name.endswith("lora_B"):
                p.zero_()
    zero.save(tmp_path / "zero")
    backend = world.backend(load=("t1",), allowed_targets=("q_proj", "o_proj"))
    try:
        with pytest.raises(UserError, match="not among the allowed targets"):
            backend.load_adapter("t0", world.folders["t0"])
    finally:
        backend.close()
    backend = world.backend(load=())
    try:
        with pytest.raises(UserError, match="has no effect"):
            backend.load_adapter("zero", tmp_path / "zero")
        loaded = backend.load_adapter("t0", world.folders["t0"])
        assert (loaded.modules, loaded.rank, loaded.effect > 0.01) == (14, 4, True)
        assert backend.adapters() == {"t0": loaded}
    finally:
        backend.close()


def test_the_context_ends_where_rotary_tables_begin_to_depend_on_the_batch():
    from transformers import LlamaConfig, Phi3Config

    assert context_of(LlamaConfig(max_position_embeddings=512)) == 512
    factors = [1.0] * 16
    long = Phi3Config(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=4096, original_max_position_embeddings=1024,
        pad_token_id=0,
        rope_parameters={"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "rope_theta": 1e4},
    )  # fmt: skip
    assert context_of(long) == 1024


@pytest.mark.parametrize("apart", [None, 12])
def test_prompts_enter_together_or_adapter_by_adapter_with_the_same_answers(apart, backend, worlds):
    backend._serving.apart_tokens = apart
    asked = [(NAMES[n % 4], prompt(3 + 5 * (n % 4), n)) for n in range(5)]

    async def run():
        return await asyncio.gather(*(ids_of(backend, ask(name, ids)) for name, ids in asked))

    assert asyncio.run(run()) == [worlds("llama").greedy(name, ids) for name, ids in asked]
    assert 5 in backend.stats().batches_by_rows
