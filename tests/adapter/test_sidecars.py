"""Broken JSON files beside an adapter's weights: one error with the path, never a crash."""

import json

import pytest

from lamella.adapter import Adapter
from lamella.adapter.peft_format import CONFIG, FACTS, read_facts
from lamella.config import LoraConfig
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.eval.encoder import StoreEncoder
from tests.fixtures import dense_config


@pytest.fixture(scope="module")
def engine(made):
    store, _ = made(dense_config())
    return Engine.open(store, dtype="fp32", threads=1)


@pytest.fixture
def folder(engine, tmp_path):
    Adapter.create(engine.skeleton, LoraConfig(rank=2), 0).save(tmp_path)
    Adapter.load(tmp_path, engine.skeleton)
    return tmp_path


@pytest.mark.parametrize("name", [FACTS, CONFIG])
@pytest.mark.parametrize("content", [b"{", b"", b"[]", b"[1]", b"null", b"\xff\xfe{}", b'{"a": ' + b"9" * 5000 + b"}"])
def test_broken_sidecar_is_named(engine, folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        Adapter.load(folder, engine.skeleton)
    assert caught.value.path == str(folder / name)
    if name == FACTS:
        with pytest.raises(UserError) as caught:
            StoreEncoder.open(folder, folder)
        assert caught.value.path == str(folder / name)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        (FACTS, "dropout", "x"), (FACTS, "dropout", None), (FACTS, "dropout", 1.5), (CONFIG, "r", "8"),
        (CONFIG, "r", True), (CONFIG, "lora_dropout", "x"), (CONFIG, "alpha_pattern", [1]),
        (CONFIG, "alpha_pattern", {"q_proj": "x"}), (CONFIG, "alpha_pattern", {"(": 1}),
    ],
)  # fmt: skip
def test_broken_value_is_named(engine, folder, name, key, value):
    tree = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**tree, key: value}))
    with pytest.raises(UserError, match=key) as caught:
        Adapter.load(folder, engine.skeleton)
    assert caught.value.path == str(folder / name)


def test_adapters_of_other_tools_have_no_facts(engine, folder):
    (folder / FACTS).unlink()
    assert read_facts(folder) == {}
    assert Adapter.load(folder, engine.skeleton).origin == {}
