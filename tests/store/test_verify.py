"""One flipped byte anywhere is found and named."""

from __future__ import annotations

import json
import random

import pytest
import torch
from typer.testing import CliRunner

from lamella.cli import app
from lamella.errors import UserError
from lamella.store.manifest import MANIFEST_NAME
from lamella.store.quantize import quantize_checkpoint
from lamella.store.reader import Store
from tests.fixtures import dense_config, make_tokenizer, write_checkpoint


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("verify")
    source = write_checkpoint(root / "d", dense_config(), dtype=torch.bfloat16, tokenizer=make_tokenizer())
    quantize_checkpoint(source, root / "store")
    return root / "store"


def flip(file, position):
    with file.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 0x10]))


def test_every_part_of_every_tensor(store):
    opened = Store.open(store)
    for _, group in opened.manifest.groups():
        for record in group.tensors:
            for offset, nbytes in record.parts.values():
                position = offset + random.Random(offset).randrange(nbytes)
                flip(store / group.file, position)
                assert record.name in opened.verify()
                flip(store / group.file, position)
    assert opened.verify() == []


def test_padding_and_small_files(store):
    opened = Store.open(store)
    layer = opened.manifest.layers[0]
    end = max(offset + nbytes for record in layer.tensors for offset, nbytes in record.parts.values())
    assert end < layer.nbytes
    for file, position, told in (
        (layer.file, end, f"{layer.file}: padding at byte {end}"),
        ("tokenizer.json", 100, "tokenizer.json"),
        ("config.json", 10, "config.json"),
    ):
        flip(store / file, position)
        assert opened.verify() == [told]
        flip(store / file, position)


def found_in_manifest(store) -> bool:
    """Whether opening refuses, or verifying names the manifest."""
    try:
        return MANIFEST_NAME in Store.open(store).verify()
    except UserError:
        return True


def test_manifest_itself(store):
    size = (store / MANIFEST_NAME).stat().st_size
    for position in random.Random(0).sample(range(size), 60):
        flip(store / MANIFEST_NAME, position)
        assert found_in_manifest(store), f"byte {position}"
        flip(store / MANIFEST_NAME, position)
    assert Store.open(store).verify() == []


def test_command(store):
    runner = CliRunner()
    done = runner.invoke(app, ["store", "verify", str(store)])
    assert done.exit_code == 0
    assert "every checksum right" in done.output
    info = runner.invoke(app, ["store", "info", str(store), "--json"])
    tree = json.loads(info.stdout)
    assert tree["layers"] == 2
    assert {row["tensor_class"] for row in tree["classes"]} == {"attention", "mlp", "norm", "embedding", "head"}
    assert "attention" in runner.invoke(app, ["store", "info", str(store)]).stdout
    flip(store / "outer.bin", 3)
    broken = runner.invoke(app, ["store", "verify", str(store), "--json"])
    flip(store / "outer.bin", 3)
    assert isinstance(broken.exception, UserError)
    assert broken.exception.exit_code == 2
    assert len(json.loads(broken.stdout)["wrong"]) == 1
