"""Layers read by parts and gathered: the same bytes, 1/N read by each, no rank waits for ever."""

import itertools
import os
import shutil
import signal
import threading
import time

import pytest
import torch

from lamella.engine import Engine
from lamella.engine.gather import GroupPeers, LayerGather
from lamella.engine.walk import Walk
from lamella.engine.weights import LayerWeights
from lamella.errors import RunFailed, UserError
from lamella.models.layout import pack_rows
from lamella.models.skeleton import Skeleton, load_config
from lamella.store.reader import Store
from tests.engine.processes import run_group
from tests.engine.test_families import LABELS, ROWS, step_gradients, trained_adapter
from tests.engine.test_weights import Recording
from tests.fixtures import moe_config

LAYERS = 6
CPU = torch.device("cpu")


def config():
    return moe_config(layers=LAYERS, inner=64, experts=8)


def streaming_engine(path, held, **more):
    """Holds `held` layers."""
    store = Store.open(path)
    fixed = Engine.open(store, dtype="fp32", threads=1).walk.weights.residency.fixed_bytes
    budget = fixed + (held + 2) * store.group_bytes(0)
    engine = Engine.open(store, dtype="fp32", budget_bytes=budget, recompute="always", threads=1, **more)
    trained_adapter(engine)
    assert len(engine.walk.weights.residency.resident) == held
    return engine


def peers_of(world):
    return GroupPeers.open([range(world)], CPU, 60.0)


def slow_binds(engine, seconds):
    """This rank takes so long in each layer (from the list in turn): others run ahead of it, or it of them."""
    bind, turn = engine.walk.weights.bind, [0]

    def late(i, fill=True):
        time.sleep(seconds[turn[0] % len(seconds)])
        turn[0] += 1
        bind(i, fill)

    engine.walk.weights.bind = late


# ---- what ranks do, each in its process ----------------------------------------------------------


def steps_together(rank, world, path):
    """Rank 0 holds two layers, the others one; rank 2 has no rows in the second step; all are late in turns; between steps
    rank 0 alone walks."""
    engine = streaming_engine(path, 2 if rank == 0 else 1)
    engine.gather_with(peers_of(world))
    weights, store = engine.walk.weights, engine.store
    buffer = torch.zeros(weights.gather.padded_bytes(store.group_bytes(1)) + 64, dtype=torch.uint8)
    buffer = buffer[-buffer.data_ptr() % 64 :]
    same = []
    for i in range(LAYERS):
        buffer.fill_(rank)
        same.append(torch.equal(weights.gather.load(i, buffer).buffer, store.load(i).buffer))
    loaded = weights.gather.facts()
    weights.gather.read_bytes = weights.gather.gathered_bytes = 0
    slow_binds(engine, [[0.0, 0.02, 0.0], [0.02, 0.0, 0.0, 0.03], [0.0, 0.0, 0.02, 0.0, 0.02]][rank])
    gradients = []
    for k in range(4):
        if rank == 2 and k == 1:
            engine.step([], step_index=k, label_tokens=LABELS)
        else:
            gradients.append(step_gradients(engine, [ROWS[:2], ROWS[2:]])[1])
        if rank == 0 and k < 3:
            engine.loss_sums([pack_rows(ROWS)])
    digest = [{name: x.double().sum().item() for name, x in g.items()} for g in gradients]
    return {"same": same, "loaded": loaded, "facts": engine.facts(), "gradients": digest,
            "streamed": weights.residency.streamed}  # fmt: skip


def one_fails(rank, world, path, how):
    """Rank 1 fails in its third step in one of several ways; the others must end soon, with its number."""
    if how == "read" and rank == 1:
        shutil.copytree(path, f"{path}-cut")
        path = f"{path}-cut"
    engine = streaming_engine(path, 0)
    engine.gather_with(peers_of(world))
    for _ in range(2):
        step_gradients(engine, [ROWS])
    begin_s = time.monotonic()
    try:
        if rank == 1 and how == "read":
            os.truncate(f"{path}/layers/00003.bin", 10)
        if rank == 1 and how in ("raise", "killed"):
            bind, hit = engine.walk.weights.bind, {"raise": 4, "killed": 3}[how]

            def failing(i, fill=True):
                if i == hit and how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if i == hit:
                    raise ValueError("this rank has enough")
                bind(i, fill)

            engine.walk.weights.bind = failing
        step_gradients(engine, [ROWS])
    except (UserError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin_s
    return "no error", "", time.monotonic() - begin_s


# ---- tests ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(made):
    return made(config())[0].path


def test_three_ranks_read_a_third_each_and_get_the_same_bits(path):
    ended = run_group(3, steps_together, path)
    assert [kind for kind, _ in ended] == ["done"] * 3, ended
    found = [result for _, result in ended]
    store = Store.open(path)
    total = sum(store.group_bytes(i) for i in range(LAYERS))
    assert all(all(f["same"]) for f in found)
    assert sum(f["loaded"]["read_bytes"] for f in found) == total
    for f in found:
        assert f["loaded"]["layer_bytes"] == total
        assert f["loaded"]["read_bytes"] <= total / 3 + LAYERS * 4096
        assert f["streamed"] == (1, 2, 3, 4, 5)  # the union; lowest layers stay
        assert f["facts"]["gather"]["ranks"] == 3
    steps = [f["facts"]["gather"] for f in found]
    assert len({s["layer_bytes"] for s in steps}) == 1
    assert sum(s["read_bytes"] for s in steps) == steps[0]["layer_bytes"]
    plain = Engine.open(store, dtype="fp32", recompute="always", threads=1)
    trained_adapter(plain)
    _, wanted = step_gradients(plain, [ROWS[:2], ROWS[2:]])
    digest = {name: x.double().sum().item() for name, x in wanted.items()}
    assert [len(f["gradients"]) for f in found] == [4, 4, 3]
    assert all(g == digest for f in found for g in f["gradients"])


@pytest.mark.parametrize("how", ["read", "raise", "killed"])
def test_a_rank_that_fails_ends_the_others(how, path, tmp_path):
    shutil.copytree(path, tmp_path / "store")
    ended = run_group(2, one_fails, str(tmp_path / "store"), how)
    kind, text, seconds = ended[0][1]
    assert kind == ("RankLost" if how == "killed" else "RunFailed"), text
    assert seconds < 30
    if how == "killed":
        assert ended[1] == ("gone", None)
        assert "rank 0 lost the ranks [0, 1] that it reads layers with" in text
    else:
        assert "rank 1 failed while layers were read together" in text
        own = ended[1][1]
        assert own[0] == {"read": "UserError", "raise": "ValueError"}[how]
        assert {"read": "file ends at byte", "raise": "enough"}[how] in own[1]


class ThreadPeers:
    """Ranks that are threads of one process."""

    def __init__(self, rank, barrier, parts):
        self.rank, self.world = rank, barrier.parties
        self.barrier, self.parts = barrier, parts

    def all_gather_bytes(self, into, sizes):
        pieces = into.split(list(sizes))
        self.parts[self.rank] = pieces[self.rank].clone()
        self.barrier.wait(30)
        for piece, part in zip(pieces, list(self.parts), strict=True):
            piece.copy_(part)
        self.barrier.wait(30)

    @classmethod
    def group(cls, world):
        barrier, parts = threading.Barrier(world), [None] * world
        return [cls(rank, barrier, parts) for rank in range(world)]


class Late(Recording):
    """Exchanges wait for what was copied before, as on one stream."""

    def run(self, work, after):
        self.wait(after)
        work()


def in_threads(functions):
    found = [None] * len(functions)

    def run(n):
        found[n] = functions[n]()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(functions))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    return found


@pytest.mark.parametrize(("resident", "pinned"), [(1, 5), (0, 0), (1, 2)])
def test_a_device_gets_its_part_from_the_host_and_the_rest_from_peers(resident, pinned, path):
    store = Store.open(path)
    plain = Engine.open(store, dtype="fp32", fused=False)
    trained_adapter(plain)
    _, wanted = step_gradients(plain, [ROWS])
    size = store.group_bytes(0)

    def rank_of(peers):
        def work():
            skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), torch.float32)
            fixed = LayerWeights(store, skeleton, CPU, copier=Late()).residency.fixed_bytes
            skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), torch.float32)
            host = (pinned if resident + pinned == LAYERS else pinned + 2) * size
            weights = LayerWeights(store, skeleton, CPU, fixed + (2 + resident) * size, Late(), host)
            engine = Engine(store, skeleton, Walk(skeleton, weights), keep_bytes=0, recompute="always")
            trained_adapter(engine)
            engine.gather_with(peers)
            with weights.together():  # one after the other: torch's own state is per process
                for i in (*range(LAYERS), *reversed(range(LAYERS))):
                    weights.bind(i)
                    assert torch.equal(weights._take(i).buffer, store.load(i).buffer)
            return engine, weights

        return work

    ranks = in_threads([rank_of(peers) for peers in ThreadPeers.group(2)])
    for number, (_, weights) in enumerate(ranks):
        residency = weights.residency
        assert (len(residency.resident), len(residency.pinned)) == (resident, pinned)
        part = weights.gather.own_part(1)[1] - weights.gather.own_part(1)[0]
        layers = weights.gather.gathered_bytes // size
        assert layers == {1: 5 + 3, 0: 6 + 4}[resident]
        assert weights.copied_bytes == layers * part
        assert 0.4 * size < part < 0.6 * size
        assert weights.gather.own_part(1) == ((0, part), (size - part, size))[number]
    for engine, _ in ranks:  # alone again: whole layers, equal bits
        engine.walk.weights.gather = None
        _, found = step_gradients(engine, [ROWS])
        assert all(torch.equal(found[n], wanted[n]) for n in wanted)
        engine.close()


def test_parts_cover_a_file_once(path):
    store = Store.open(path)
    for world in (2, 3, 5, 64):
        gathers = [LayerGather(store, ThreadPeers(rank, threading.Barrier(world), [])) for rank in range(world)]
        spans = [g.own_part(0) for g in gathers]
        assert spans[0][0] == 0
        assert spans[-1][1] == store.group_bytes(0)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
        assert gathers[0].padded_bytes(store.group_bytes(0)) >= store.group_bytes(0)
        assert all(first % 4096 == 0 or first == store.group_bytes(0) for first, _ in spans)


def test_ranks_that_ask_for_different_layers_are_told(path):
    store = Store.open(path)
    peers = ThreadPeers.group(2)

    def ask(n):
        def work():
            with pytest.raises(AssertionError, match=r"different layers: \[0, 1\]"):
                LayerGather(store, peers[n]).meet(n, failed=False)
            return True

        return work

    assert in_threads([ask(0), ask(1)]) == [True, True]


def test_without_a_group_nothing_changes(path):
    engine = streaming_engine(path, 1)
    assert engine.facts()["gather"] is None
    out = engine.step([], step_index=0, label_tokens=LABELS)
    assert out.label_tokens == 0
    assert engine.walk.weights.bound is None


def test_failed_once_is_failed_for_good(path):
    store = Store.open(path)
    peers = ThreadPeers.group(2)

    def work(n):
        def run():
            gather = LayerGather(store, peers[n])
            if n == 0:
                gather.leave(failed=True)
            else:
                with pytest.raises(RunFailed, match=r"rank 0 failed .*layer 4"):
                    gather.meet(4, failed=False)
            with pytest.raises(RunFailed, match="no longer"):
                gather.begin(0)
            gather.leave(failed=True)  # nobody waits for it
            return True

        return run

    assert in_threads([work(0), work(1)]) == [True, True]
