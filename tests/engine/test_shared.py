"""One copy of the base per host: maps that ranks share, what they count for, and what happens to changed files."""

import ctypes
import gc
import mmap
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.shared import case_of
from bench.size import make_store
from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.engine.engine import DTYPES
from lamella.engine.memory import predict, shape_of
from lamella.engine.walk import Walk
from lamella.engine.weights import LayerWeights
from lamella.errors import UserError
from lamella.forecast.residency import plan_residency
from lamella.hardware.limit import MemoryLimit, memory_limit
from lamella.hardware.memory import held_by
from lamella.models.layout import pack_rows
from lamella.models.skeleton import Skeleton, load_config
from lamella.store.reader import Store
from tests.engine.processes import run_group
from tests.engine.test_families import ROWS, step_gradients, trained_adapter
from tests.engine.test_weights import Recording
from tests.fixtures import dense_config, moe_config

CPU = torch.device("cpu")


def opened(store, **more):
    engine = Engine.open(store, **{"dtype": "fp32", "recompute": "always", "threads": 1, **more})
    trained_adapter(engine)
    return engine


# ---- the same results ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_shared_map_gives_the_bits_of_private_copies(kind, dtype, made):
    store, _ = made(dense_config(layers=4) if kind == "dense" else moe_config(layers=4, inner=32, experts=8))
    private, shared = opened(store, dtype=dtype), opened(store, dtype=dtype, ranks_here=4)
    before = shared.walk.weights.resident_checksum()
    (a, wanted), (b, found) = step_gradients(private, [ROWS]), step_gradients(shared, [ROWS])
    assert a.loss_sum == b.loss_sum
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert private.facts()["base"] == "private"
    facts = shared.facts()
    assert (facts["base"], facts["ranks_per_copy"]) == ("shared map", 4)
    assert shared.walk.weights.resident_checksum() == before == private.walk.weights.resident_checksum()
    for i in range(4):
        packed = shared.walk.weights._packed[i]
        assert packed.buffer.data_ptr() % mmap.PAGESIZE == 0
        assert torch.equal(packed.buffer, store.load(i).buffer)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f"{store.path}/layers" in line]
    assert len({line[5] for line in maps}) == 4
    assert {line[1] for line in maps} == {"r--s"}  # read-only


def test_with_a_budget_some_layers_are_mapped_and_the_others_have_slots(made):
    store, _ = made(moe_config(layers=12, inner=64, experts=8))
    size = store.group_bytes(0)
    part = -(-size // 4)
    alone, four = opened(store), opened(store, ranks_here=4)
    fixed = four.walk.weights.residency.fixed_bytes
    assert fixed < alone.walk.weights.residency.fixed_bytes  # of the mapped head too it counts its part
    _, wanted = step_gradients(alone, [ROWS])
    budget = fixed + 2 * size + 2 * part
    shared = opened(store, budget_bytes=budget, ranks_here=4)
    residency = shared.walk.weights.residency
    assert residency.resident == (0, 1)
    assert residency.packed_bytes == 2 * part
    assert residency.total_bytes <= budget
    for _ in range(2):
        _, found = step_gradients(shared, [ROWS])
        assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    weights = shared.walk.weights
    assert set(weights._shared) == set(weights._packed) == {0, 1}
    weights.limit(fixed + 2 * size + part)
    assert set(weights._shared) == set(weights._packed) == {0}
    weights.limit(fixed + 2 * size)
    assert weights._shared == weights._packed == {}
    _, found = step_gradients(shared, [ROWS])
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_what_a_shared_layer_counts_for(made):
    assert plan_residency([10, 10, 10], 5, 35, sharers=1).resident == (0, 1, 2)
    plan = plan_residency([10, 11, 10], 5, 15, sharers=4)
    assert (plan.resident, plan.packed_bytes, plan.slot_bytes, plan.total_bytes) == ((0, 1, 2), 9, 0, 14)
    plan = plan_residency([40] * 20, 5, 5 + 80 + 29, sharers=4)
    assert (plan.resident, plan.packed_bytes, plan.slot_bytes) == ((0, 1), 20, 80)  # slots are private
    for budget in range(90, 200):
        for sharers in (1, 2, 3, 8):
            plan = plan_residency([40, 42, 40, 41], 5, budget, sharers=sharers)
            assert plan.total_bytes <= budget
            assert sorted(plan.resident + plan.streamed) == [0, 1, 2, 3]
    with pytest.raises(UserError, match=r"memory\.budget is 84 B"):
        plan_residency([40] * 8, 5, 84, sharers=4)


def test_prediction_and_fit_count_the_part(made):
    store, _ = made(moe_config(layers=20, inner=64, experts=8))
    shape = shape_of([pack_rows(ROWS)])
    one, four = opened(store), opened(store, ranks_here=4)
    plans = [predict(e.walk, *shape, kept=False, imports_bytes=0) for e in (one, four)]
    whole = 20 * store.group_bytes(0)
    assert plans[0].fixed["packed layers held"] == whole
    assert plans[1].fixed["packed layers held"] == 20 * -(-store.group_bytes(0) // 4)
    assert any("1/4 of a map that 4 ranks share" in line for line in plans[1].lines())
    budget = plans[1].beyond_program_bytes + 1000
    fitted = [opened(store, budget_bytes=budget, ranks_here=n) for n in (1, 4)]
    for engine in fitted:
        engine.fit(*shape)
    assert len(fitted[1].walk.weights.residency.resident) == 20
    assert len(fitted[0].walk.weights.residency.resident) < 4


# ---- kernels at the end of a map -----------------------------------------------------------------


class Guarded(LayerWeights):
    """Layers end within 64 bytes of a page that must not be touched."""

    def _mapped_layer(self, i):
        n = self.store.group_bytes(i)
        padded = -(-n // 64) * 64
        pages = -(-padded // mmap.PAGESIZE) + 1
        region = mmap.mmap(-1, pages * mmap.PAGESIZE)
        whole = torch.frombuffer(region, dtype=torch.uint8)
        end = (pages - 1) * mmap.PAGESIZE
        packed = self.store.load(i, whole[end - padded : end])
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(whole.data_ptr() + end)
        assert libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        return packed


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["dense", "moe", "fused kernels"])
def test_kernels_read_nothing_behind_a_layer(kind, dtype, made):
    wide = {"hidden_size": 128, "inner": 64, "experts": 4}
    config = {"dense": dense_config, "moe": moe_config, "fused kernels": lambda: moe_config(**wide)}[kind]()
    store, _ = made(config)
    skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), DTYPES[dtype])
    skeleton.fuse()
    weights = Guarded(store, skeleton, CPU, ranks_here=2)
    engine = Engine(store, skeleton, Walk(skeleton, weights), keep_bytes=0, recompute="always")
    trained_adapter(engine)
    _, found = step_gradients(engine, [ROWS])
    plain = opened(store, dtype=dtype)
    _, wanted = step_gradients(plain, [ROWS])
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


# ---- files that change ---------------------------------------------------------------------------


def _cut(file):
    os.truncate(file, 4096)


def _replaced(file):
    shutil.copy(file, f"{file}.new")
    os.replace(f"{file}.new", file)


def _written(file):
    with file.open("r+b") as stream:
        stream.write(b"x")


def _gone(file):
    file.unlink()


CHANGES = [(_cut, r"changed while it is mapped: bytes \d+ -> 4096"), (_replaced, "changed while it is mapped: inode"),
           (_written, "changed while it is mapped: time of change"), (_gone, "is gone while it is mapped")]  # fmt: skip


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_a_file_that_changes_while_it_is_mapped(change, told, made, tmp_path):
    source, _ = made(dense_config(layers=4))
    shutil.copytree(source.path, tmp_path / "store")
    engine = opened(Store.open(tmp_path / "store"), ranks_here=2)
    step_gradients(engine, [ROWS])
    file = tmp_path / "store" / "layers" / "00002.bin"
    change(file)
    with pytest.raises(UserError, match=told) as caught:
        step_gradients(engine, [ROWS])
    assert str(file) in str(caught.value)


def test_a_file_cut_before_its_pages_come_in_is_an_error_and_no_signal(made, tmp_path):
    source, _ = made(dense_config(layers=4))
    shutil.copytree(source.path, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    _, shared = store.share(1)
    _cut(shared.file)
    with pytest.raises(UserError, match="changed while it is mapped: bytes"):
        shared.populate()
    with pytest.raises(UserError, match="cannot be mapped"):
        store.share(1)


# ---- on a device ---------------------------------------------------------------------------------


class Registrar:
    """Remembers what is page-locked; refuses maps of files where told to."""

    def __init__(self, refuse=0):
        self.refuse, self.locked, self.said = refuse, {}, []

    def register(self, memory, read_only):
        assert memory.data_ptr() % mmap.PAGESIZE == 0
        if read_only and self.refuse:
            return self.refuse
        assert memory.data_ptr() not in self.locked
        self.locked[memory.data_ptr()] = (memory.numel(), read_only)
        self.said.append(read_only)
        return 0

    def unregister(self, address):
        del self.locked[address]


@pytest.mark.parametrize("refuse", [0, 801])
def test_pinned_layers_are_page_locked_maps(refuse, made):
    store, _ = made(moe_config(layers=6, inner=64, experts=8))
    _, wanted = step_gradients(opened(store, fused=False), [ROWS])
    registrar = Registrar(refuse)
    size = store.group_bytes(0)

    def weights_of(budget, **more):
        skeleton = Skeleton(load_config(store.path, store.manifest.tie_word_embeddings), torch.float32)
        return skeleton, LayerWeights(
            store, skeleton, CPU, budget, Recording(), registrar=registrar, ranks_here=3, **more
        )

    fixed = weights_of(None)[1].residency.fixed_bytes
    gc.collect()
    skeleton, weights = weights_of(fixed + 3 * size)
    assert (weights.base, weights.sharers) == (
        ("shared map", 3) if not refuse else ("private: a mapped file cannot be page-locked here (CUDA error 801)", 1)
    )
    pinned = weights.residency.pinned
    assert len(pinned) == 5
    locked = {address: nbytes for address, (nbytes, read_only) in registrar.locked.items() if read_only == (not refuse)}
    assert locked == {weights._pinned[i].buffer.data_ptr(): size for i in pinned}
    engine = Engine(store, skeleton, Walk(skeleton, weights), keep_bytes=0, recompute="always")
    trained_adapter(engine)
    _, found = step_gradients(engine, [ROWS])
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert len(weights.resident_checksum()) == 32
    engine.close()
    del engine, skeleton, weights
    gc.collect()
    assert registrar.locked == {}


# ---- several processes ---------------------------------------------------------------------------


def big_store(folder: Path, layers: int) -> Path:
    return make_store(folder, replace(case_of(layers), name=f"store-{layers}"))


def take_steps(rank, world, path, shared, limit_folder, steps):
    """A rank with rows of its own; all hold their layers while each looks at itself."""
    import torch.distributed as dist

    if limit_folder is not None:
        MemoryLimit("cgroup", 0, Path(limit_folder)).enter()
    before = held_by(os.getpid(), path)
    store = Store.open(path)
    engine = Engine.open(store, dtype="bf16", threads=1, recompute="always", ranks_here=world if shared else 1)
    engine.attach(Adapter.create(engine.skeleton, LoraConfig(rank=2, targets=("q_proj",)), seed=0))
    generator = torch.Generator().manual_seed(rank)
    loss = 0.0
    for step in range(steps):
        ids = torch.randint(2048, (24,), generator=generator).tolist()
        out = engine.step([pack_rows([(ids, [False] + [True] * 23)])], step_index=step, label_tokens=23)
        loss += out.loss_sum
    dist.barrier()
    held = held_by(os.getpid(), path)
    dist.barrier()
    return {
        "mapped": held.mapped,
        "private": held.private - before.private,
        "loss": loss,
        "base": engine.facts()["base"],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


def results(world, path, shared, limit=None, steps=1):
    where = None if limit is None or limit.folder is None else str(limit.folder)
    ended = run_group(world, take_steps, path, shared, where, steps)
    return ended, [result for kind, result in ended if kind == "done"]


def test_b67_four_ranks_hold_one_copy_by_proportional_set_size(folder):
    """Scaled down: see the slow test for the case's own sizes."""
    path = big_store(folder, 3)
    store_bytes = sum(group.nbytes for _, group in Store.open(path).manifest.groups())
    ended, shared = results(4, path, True)
    assert len(shared) == 4, ended
    assert {r["base"] for r in shared} == {"shared map"}
    assert abs(sum(r["mapped"] for r in shared) / store_bytes - 1) < 0.05
    ended, private = results(4, path, False)
    assert len(private) == 4, ended
    assert [r["loss"] for r in private] == [r["loss"] for r in shared]
    layers = 3 * Store.open(path).group_bytes(0)
    spared = min(r["private"] for r in private) - max(r["private"] for r in shared)
    assert spared > 0.8 * layers  # each has a copy less


@pytest.mark.slow
def test_b67_four_ranks_and_400_mb_under_a_limit_of_1_gb(folder):
    """Four copies would be 1.6 GB: private ones do not fit, shared ones do, with the same results as without a limit."""
    path = big_store(folder, 51)
    store_bytes = sum(group.nbytes for _, group in Store.open(path).manifest.groups())
    assert abs(store_bytes - 400e6) < 10e6
    with memory_limit(10**9) as limit:
        if limit.folder is None:
            pytest.skip("no cgroup can be made here")
        ended, shared = results(4, path, True, limit)
        assert len(shared) == 4, ended
        assert limit.peak_bytes() <= 10**9
    assert sum(r["mapped"] for r in shared) <= 1.05 * store_bytes
    ended, free = results(4, path, False)
    assert [r["loss"] for r in free] == [r["loss"] for r in shared], ended
    layers = 51 * Store.open(path).group_bytes(0)
    assert max(r["private"] for r in shared) + 0.9 * layers <= min(r["private"] for r in free)
    with memory_limit(10**9) as limit:
        ended, _ = results(4, path, False, limit)
        assert any(kind != "done" for kind, _ in ended)
