"""An adapter's state in a mapped file: the same bits as in RAM, and no more of it in memory than a layer or two."""

import gc
import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lamella.adapter import Adapter, pages
from lamella.adapter.pages import SLOTS, StatePages
from lamella.adapter.peft_format import load_adapter, load_values
from lamella.adapter.tensors_file import TensorsFile, write_tensors
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.models.pieces import Cut
from tests.fixtures import moe_config


def test_slots_are_apart_and_zero(tmp_path):
    shapes = {0: {"a": (3, 5), "b": (7,)}, 4: {"c": (2, 2, 2)}}
    state = StatePages(tmp_path, shapes)
    assert list(tmp_path.iterdir()) == []  # the file has no name
    assert state.groups() == [["a", "b"], ["c"]]
    values = {}
    for name in "abc":
        for slot in SLOTS:
            view = state.view(name, slot)
            assert not view.any()
            assert view.data_ptr() % 64 == 0
            values[name, slot] = torch.randn(view.shape)
            view.copy_(values[name, slot])
    state.enter("a")
    state.enter("c")
    state.enter("b")
    for (name, slot), value in values.items():
        assert torch.equal(state.view(name, slot), value)


def resident_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the mapping that holds this tensor that are in this process's memory, from /proc/self/smaps."""
    found = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(x, 16) for x in first.split("-"))
            inside = low <= tensor.data_ptr() < high
        elif inside and first == "Rss:":
            found += int(line.split()[1]) * 1024
    return found


def test_passing_over_the_parameters_holds_one_layer(tmp_path):
    numel = 1 << 18
    state = StatePages(tmp_path, {i: {f"p{i}": (numel,)} for i in range(12)})
    parameters = pages.PagedParameters(state)
    peak = 0
    for name, p in parameters.items():
        p.data.fill_(1.0)
        state.view(name, "grad").fill_(2.0)
        peak = max(peak, resident_bytes(p))
    layer = 2 * 4 * numel
    assert layer <= peak <= 2 * layer
    assert sum(float(p.sum()) for _, p in parameters.items()) == 12 * numel
    assert float(state.view("p3", "grad").sum()) == 2 * numel


def test_a_full_disk_is_told_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "free_bytes", lambda _: mmap.PAGESIZE)
    with pytest.raises(UserError, match=r"state on disk takes .* free"):
        StatePages(tmp_path, {0: {"a": (1 << 20,)}})
    with pytest.raises(UserError, match="cannot be put there"):
        StatePages(tmp_path / "nowhere", {0: {"a": (8,)}})


@pytest.fixture
def both(made, tmp_path):
    """The same adapter in RAM and in pages, and the engine."""
    store, _ = made(moe_config(layers=3))
    engine = Engine.open(store, dtype="fp32")
    config = LoraConfig(rank=4)
    told = []
    paged = Adapter.create(engine.skeleton, config, 7, lambda n: told.append(n) or tmp_path)
    plain = Adapter.create(engine.skeleton, config, 7, lambda n: None)
    assert told == [plain.num_parameters()]
    assert plain.pages is None
    return engine, plain, paged


def test_same_values_and_files(both, tmp_path):
    engine, plain, paged = both
    assert list(plain.parameters()) == list(paged.parameters())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in plain.parameters().items():
            assert torch.equal(p, paged.parameters()[name])
            p.normal_(generator=generator)
            paged.parameters()[name].copy_(p)
    plain.save(tmp_path / "a")
    paged.save(tmp_path / "b")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    again = Adapter.create(engine.skeleton, LoraConfig(rank=4), 8, lambda _: tmp_path)
    load_values(again, tmp_path / "a")
    assert all(torch.equal(p, again.parameters()[name]) for name, p in plain.parameters().items())
    other = Adapter.create(engine.skeleton, LoraConfig(rank=2), 8)
    with pytest.raises(UserError, match="has shapes"):
        load_values(other, tmp_path / "a")
    shape_only = load_adapter(tmp_path / "a", engine.skeleton, values=False)
    assert shape_only.sites == Adapter.load(tmp_path / "a", engine.skeleton).sites
    assert all(p.is_meta for p in shape_only.parameters().values())


def test_gradients_are_added_alike(both):
    _, plain, paged = both
    for adapter in (plain, paged):
        for name, p in adapter.parameters().items():
            for k in (1, 2):
                given = torch.full(p.shape, 0.5 * k)
                adapter.add_gradient(name, given)
                given.zero_()
            assert bool((p.grad == 1.5).all())
            p.grad = None
            adapter.add_gradient(name, torch.full(p.shape, 3.0, dtype=torch.bfloat16))
            assert p.grad.dtype == torch.float32
            assert bool((p.grad == 3).all())


def test_tensor_files_are_safetensors(tmp_path):
    values = {"b.x": torch.randn(3, 4), "a": torch.randn(()), "c": torch.randn(0, 5)}
    write_tensors(tmp_path / "t", {n: (tuple(v.shape), lambda v=v: v) for n, v in values.items()})
    theirs, mine = load_file(tmp_path / "t"), TensorsFile(tmp_path / "t")
    assert set(theirs) == set(mine) == set(values)
    assert all(torch.equal(theirs[n], v) and torch.equal(mine[n], v) for n, v in values.items())
    data = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(data[:-1])
    with pytest.raises(UserError, match="promises"):
        TensorsFile(tmp_path / "t")
    gc.collect()


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_part_of_a_gradient(on_disk, made, tmp_path):
    """Ranks that hold a part of a weight add to that part; the others' stays zero, and is there."""
    engine = Engine.open(made(moe_config())[0], dtype="fp32")
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=4), 0, (lambda _: tmp_path) if on_disk else None)
    key = "model.layers.1.mlp.experts.down_proj.lora_A"
    master = adapter.parameters()[key]
    cut = Cut(0, 1, 3)
    adapter.add_gradient(key, None)
    assert not master.grad.any()
    for value in (1.0, 2.0):
        adapter.add_gradient(key, torch.full(cut.shape(tuple(master.shape)), value, dtype=torch.bfloat16), cut)
    wanted = torch.zeros_like(master)
    wanted[1:3] = 3.0
    assert torch.equal(master.grad, wanted)
    adapter.add_gradient(key, None)
    assert torch.equal(master.grad, wanted)


def test_initial_values_are_written_when_a_layer_is_entered(both):
    _, plain, paged = both
    names = list(paged.parameters())
    views = {name: paged.pages.view(name, "master") for name in names}
    assert not any(view.any() for view in views.values()), "nothing is written before"
    first, last = paged.layer_sites(0), paged.layer_sites(2)
    assert torch.equal(paged.pair(last[0].key)[0], plain.pair(last[0].key)[0])
    assert all(views[f"{site.key}.lora_A"].any() for site in last)
    assert not any(views[f"{site.key}.lora_A"].any() for site in first)
    for name, p in plain.parameters().items():
        assert torch.equal(paged.initial(name), p)
        assert paged.begins_zero(name) is not bool(p.any())
    assert paged.recipe() == plain.recipe()


def test_starting_over_clears_what_was_trained(both):
    _, plain, paged = both
    for adapter in (plain, paged):
        with torch.no_grad():
            for p in dict(adapter.parameters().items()).values():
                p.fill_(1.0)
        before = adapter.recipe()
        adapter.reset(8)
        assert adapter.recipe() != before
        for name, p in adapter.parameters().items():
            assert torch.equal(p, adapter.initial(name))
            assert adapter.begins_zero(name) is not bool(p.any())
