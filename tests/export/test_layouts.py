"""Layouts of adapters: every way there and back gives the same bits; axes against their definitions."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file

from lamella.adapter.layouts import LAYOUTS
from lamella.adapter.places import Names, places_of
from lamella.adapter.read import AdapterFile
from lamella.engine import Engine
from lamella.export.adapter_base import open_base
from lamella.export.adapters import write_layout
from tests.engine.test_families import FAMILIES, trained_adapter

MODELS = ("llama", "qwen3_moe-dense-first", "mixtral", "gpt_oss", "olmoe")


@pytest.fixture(scope="module")
def exported(made, tmp_path_factory):
    """exported(model, rslora) -> (base, places, names, {layout: AdapterFile of the adapter in it}, ours)."""
    cache = {}

    def make(model, rslora=False):
        if (model, rslora) not in cache:
            store, _ = made(FAMILIES[model]())
            folder = tmp_path_factory.mktemp(model)
            engine = Engine.open(store, dtype="fp32", threads=1)
            ours = trained_adapter(engine, rslora=rslora)
            ours.save(folder / "ours", facts={"base_fingerprint": store.manifest.source_fingerprint})
            base = open_base(store.path)
            places = places_of(base.skeleton, base.shapes)
            names = Names(base.skeleton, places_of(base.skeleton))
            first = AdapterFile(folder / "ours", base.skeleton, names=names)
            files = {}
            for layout in LAYOUTS.values():
                files[layout.name] = write(layout, first, places, folder / layout.name, base, names)
            cache[model, rslora] = base, places, names, files, ours
        return cache[model, rslora]

    return make


def write(layout, file, places, folder, base, names):
    folder.mkdir()
    write_layout(layout, file, places, folder, base)
    return AdapterFile(folder, base.skeleton, names=names)


def same_tensors(a, b):
    x, y = load_file(a.path), load_file(b.path)
    assert x.keys() == y.keys()
    assert all(torch.equal(x[name], y[name]) for name in x)


@pytest.mark.parametrize("model", MODELS)
def test_every_ordered_pair_of_layouts_round_trips_bit_for_bit(model, exported, tmp_path):
    base, places, names, files, ours = exported(model)
    for name, file in files.items():
        assert list(file.sites) == list(ours.sites)
        for key, site in ours.sites.items():
            assert (file.sites[key].rank, file.sites[key].alpha) == (site.rank, site.alpha)
            assert all(torch.equal(x, y) for x, y in zip(file.pair(key), ours.pair(key), strict=True)), (name, key)
    for x, y in itertools.permutations(LAYOUTS, 2):
        there = write(LAYOUTS[y], files[x], places, tmp_path / f"{x}-{y}", base, names)
        back = write(LAYOUTS[x], there, places, tmp_path / f"{x}-{y}-{x}", base, names)
        same_tensors(files[x], back)
        assert json.loads((back.folder / "adapter_config.json").read_text()) == json.loads(
            (files[x].folder / "adapter_config.json").read_text()
        )
