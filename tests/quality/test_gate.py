"""The gate blames what is damaged, and leaves the store as it was."""

import json
import shutil

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lamella.cli import app
from lamella.engine.values import CheckpointValues, StoreValues
from lamella.errors import UserError
from lamella.quality.divergence import Base, Stored, divergence
from lamella.quality.gate import QUALITY_NAME, check_store, texts_for
from lamella.quality.weights import outliers, weight_errors
from lamella.store.quantize import quantize_checkpoint
from lamella.store.reader import Store
from tests.export.gguf_models import config_of, random_tensors, write_model
from tests.fixtures import chat12, dense_config, make_tokenizer, moe_config, write_checkpoint, write_jsonl


@pytest.fixture(scope="module")
def made_checkpoint(tmp_path_factory):
    """A MoE checkpoint with a tokenizer, its store, and texts."""
    path = tmp_path_factory.mktemp("gate")
    write_checkpoint(path / "checkpoint", moe_config(), tokenizer=make_tokenizer())
    quantize_checkpoint(path / "checkpoint", path / "store")
    write_jsonl(path / "text.jsonl", chat12())
    return path


def damaged(path, target, wanted):
    """A copy of the store with the scales of some layer tensors doubled."""
    shutil.copytree(path / "store", target)
    store = Store.open(target)
    for i in range(store.manifest.num_layers):
        file = target / store.manifest.layers[i].file
        data = np.fromfile(file, dtype=np.uint8)
        for record in store.records(i):
            if wanted(record):
                for part in ("absmax2", "offset"):
                    offset, nbytes = record.parts[part]
                    values = data[offset : offset + nbytes].view(np.float32)
                    values *= 3
        data.tofile(file)
    return target


def test_a_damaged_class_is_blamed(made_checkpoint, tmp_path):
    path = made_checkpoint
    store = damaged(path, tmp_path / "store", lambda r: r.tensor_class == "attention" and r.format == "nf4")
    texts = texts_for(path / "checkpoint", path / "text.jsonl", 200)
    quality = check_store(path / "checkpoint", store, texts)
    attention, experts = (quality.parts[frozenset({name})] for name in ("attention", "experts"))
    assert attention.kl_mean > 20 * experts.kl_mean
    assert quality.verdict.keep == ("attention",)
    assert quality.verdict.level == "keep"
    assert quality.verdict.then == experts
    assert '[classes]\nattention = "int8"' in quality.fragment
    assert all(e.tensor_class == "attention" for e in quality.worst())
    written = json.loads((store / QUALITY_NAME).read_text())
    assert written["verdict"]["keep"] == ["attention"]
    assert written["whole"]["kl_mean"] == quality.whole.kl_mean
    assert written["dtype"] == "float32"
    healthy = divergence(Base(path / "checkpoint"), Stored(path / "store"), texts.ids)
    assert quality.whole.kl_mean > 5 * healthy.kl_mean


def test_a_damaged_tensor_is_named(made_checkpoint, tmp_path):
    path, name = made_checkpoint, "model.layers.1.self_attn.v_proj.weight"
    store = damaged(path, tmp_path / "store", lambda r: r.name == name)
    plain, stored = CheckpointValues.open(path / "checkpoint"), StoreValues.open(store)
    errors = weight_errors(plain, stored)
    assert [e.name for e in outliers(errors)] == [name]
    whole = Store.open(store)
    packed = whole.load(1)
    for error in errors:
        if ".layers.1." in error.name:
            shape = next(r.shape for r in whole.records(1) if r.name == error.name)
            source, kept = torch.empty(shape), packed.dequantize(error.name, torch.empty(shape))
            plain.fill(error.name, 0, source)
            assert error.relative == pytest.approx(float((kept - source).norm() / source.norm()), rel=1e-5)
    assert 0.05 < min(e.relative for e in errors) < 0.15


def run(*arguments):
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    return result


def test_quantize_with_a_check(made_checkpoint, tmp_path):
    path = made_checkpoint
    first = run(
        path / "checkpoint", "-o", tmp_path / "store", "--check", path / "text.jsonl", "--check-tokens", 150, "--json"
    )
    assert first.exit_code == 0, first.output
    report = json.loads(first.stdout)
    assert report["quality"]["text"]["positions"] <= 150
    assert {tuple(p["from_store"]) for p in report["quality"]["parts"]} >= {("attention",), ("experts",)}
    assert json.loads((tmp_path / "store" / QUALITY_NAME).read_text()) == report["quality"]
    verified = CliRunner().invoke(app, ["store", "verify", str(tmp_path / "store")])
    assert verified.exit_code == 0, verified.output
    before = {f.name: f.stat().st_mtime_ns for f in (tmp_path / "store" / "layers").iterdir()}
    again = run(path / "checkpoint", "-o", tmp_path / "store", "--check", path / "text.jsonl", "--check-tokens", 150)
    assert again.exit_code == 0, again.output
    assert "nothing is quantised again" in again.output
    assert "verdict: " in again.output
    assert "all of it" in again.output
    assert {f.name: f.stat().st_mtime_ns for f in (tmp_path / "store" / "layers").iterdir()} == before
    level = report["quality"]["verdict"]["level"]
    strict = run(path / "checkpoint", "-o", damaged(path, tmp_path / "bad", lambda r: r.format == "nf4"), "--check",
                 path / "text.jsonl", "--check-tokens", 60, "--strict")  # fmt: skip
    assert strict.exit_code == 3
    assert "WARNING" in strict.output
    assert level in ("fine", "keep", "poor")


def test_what_a_check_refuses(made_checkpoint, tmp_path):
    path = made_checkpoint
    other = write_checkpoint(tmp_path / "other", moe_config(), seed=5, tokenizer=make_tokenizer())
    text = ("--check", path / "text.jsonl")
    for arguments, message in (
        ((other, "-o", path / "store", *text), "was made from a checkpoint with fingerprint"),
        ((path / "checkpoint", "-o", path / "store", *text, "--block-size", 128), "block_size 64, not 128"),
        ((path / "checkpoint", "-o", tmp_path / "new", "--check", tmp_path / "none.jsonl"), "no such file"),
        ((path / "checkpoint", "-o", tmp_path / "new", "--strict"), "--strict is about the verdict of --check"),
    ):
        with pytest.raises(UserError, match=message):
            raise run(*arguments).exception
    assert not (tmp_path / "new").exists()
    assert not (path / "store" / QUALITY_NAME).exists()


def test_an_interrupted_check_leaves_nothing(made_checkpoint, tmp_path, monkeypatch):
    path = made_checkpoint
    store = shutil.copytree(path / "store", tmp_path / "store")
    texts = texts_for(path / "checkpoint", path / "text.jsonl", 60)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lamella.quality.divergence._compare", stop)
    names = sorted(str(f) for f in store.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        check_store(path / "checkpoint", store, texts)
    assert sorted(str(f) for f in store.rglob("*")) == names


def test_a_dense_store_has_two_parts(tmp_path):
    write_checkpoint(tmp_path / "checkpoint", dense_config(), tokenizer=make_tokenizer())
    quantize_checkpoint(tmp_path / "checkpoint", tmp_path / "store")
    text = write_jsonl(tmp_path / "text.jsonl", [{"text": "the layer walk reads each block once"}])
    quality = check_store(tmp_path / "checkpoint", tmp_path / "store", texts_for(tmp_path / "checkpoint", text, 50))
    assert set(quality.parts) == {frozenset({"attention"}), frozenset({"mlp"})}
    assert quality.whole.texts == 1


def test_texts_for_a_gguf_model_are_looked_at_first(tmp_path):
    config = config_of("llama", num_hidden_layers=1)
    write_model(tmp_path / "m.gguf", config, random_tensors(config))
    for file, says in (("none.jsonl", "no such file"), ("rows.jsonl", "no usable tokenizer")):
        write_jsonl(tmp_path / "rows.jsonl", [{"text": "the layer walk"}])
        with pytest.raises(UserError, match=says):
            quantize_cli(tmp_path / "m.gguf", tmp_path / "store", tmp_path / file)
    assert not list(tmp_path.glob("store*"))


def quantize_cli(model, store, texts):
    done = CliRunner().invoke(app, ["quantize", str(model), "-o", str(store), "--check", str(texts)])
    raise done.exception or AssertionError(done.stdout)
