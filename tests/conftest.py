"""Stores of tiny models, made once per session."""

from __future__ import annotations

import os
import random

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from lamella.store.quantize import quantize_checkpoint
from lamella.store.reader import Store
from tests.fixtures import write_checkpoint
from tests.oracle import write_dequantised


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """made(config) -> (store, folder of the dequantised base), cached by the config's JSON."""
    cache = {}

    def make(config, seed=0):
        key = config.to_json_string(), seed
        if key not in cache:
            folder = tmp_path_factory.mktemp(config.model_type)
            write_checkpoint(folder / "checkpoint", config, seed=seed)
            quantize_checkpoint(folder / "checkpoint", folder / "store")
            store = Store.open(folder / "store")
            cache[key] = (store, write_dequantised(store, folder / "base"))
        return cache[key]

    return make


def random_rows(lengths, vocab=500, seed=0, labels=0.4):
    """Rows of random ids; each has at least one label."""
    rnd = random.Random(seed)
    rows = []
    for n in lengths:
        ids = [rnd.randrange(vocab) for _ in range(n)]
        mask = [False] + [rnd.random() < labels for _ in range(n - 1)]
        mask[-1] = True
        rows.append((ids, mask))
    return rows
