"""Stores in other formats than NF4, and checkpoints that are quantised already."""

import pytest
import torch

from lamella.engine.values import CheckpointValues, StoreValues
from lamella.quality.divergence import Base, Stored, divergences
from lamella.quality.weights import weight_errors
from lamella.store.reader import Store
from tests.conftest import random_rows
from tests.engine.test_formats import gpt_oss, mixed
from tests.oracle import write_dequantised

TEXTS = [ids for ids, _ in random_rows([9, 23, 14])]


@pytest.mark.parametrize("make", [gpt_oss, mixed])
def test_formats_are_compared_as_they_dequantise(make, tmp_path):
    make(tmp_path)
    store = Store.open(tmp_path / "store")
    base = write_dequantised(store, tmp_path / "base")
    for hold_bytes in (1 << 30, 0):  # experts as part of the layer, and one at a time
        found = divergences(Base(base), {"b": Stored(store.path)}, TEXTS, hold_bytes=hold_bytes)["b"]
        assert abs(found.kl_mean) < 1e-12
        assert found.top1_agreement == 1
        assert found.largest_logit_difference < 1e-5
    source = divergences(Base(tmp_path / "hf"), {"b": Stored(store.path)}, TEXTS)["b"]
    again = divergences(Base(tmp_path / "hf"), {"b": Stored(store.path)}, TEXTS, hold_bytes=0)["b"]
    assert source.kl_mean > 1e-5
    assert again.kl_mean == pytest.approx(source.kl_mean, rel=1e-3)
    plain, dequantised = CheckpointValues.open(tmp_path / "hf"), CheckpointValues.open(base)
    errors = weight_errors(plain, StoreValues(store))
    for error in errors:
        a, b = torch.empty(error.numel), torch.empty(error.numel)
        plain.fill(error.name, 0, a)
        dequantised.fill(error.name, 0, b)
        assert error.relative == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-5, abs=1e-7)
    if make is gpt_oss:  # experts are taken over as they lie
        assert {e.relative for e in errors if e.tensor_class == "experts"} == {0.0}
        assert {e.tensor_class for e in errors} == {"attention", "experts"}
