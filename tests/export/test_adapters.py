"""An exported adapter and what goes with it: template, stop ids, base, receipt, card."""

import hashlib
import json
import shutil
import socket
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from lamella.adapter import Adapter
from lamella.adapter.layouts import LAYOUTS
from lamella.data.encode import Encoder, load_tokenizer
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.export.adapters import export_adapter
from lamella.export.travel import identity_of
from lamella.models.layout import pack_rows
from lamella.store.quantize import quantize_checkpoint
from lamella.store.reader import Store
from tests import fixtures
from tests.export.conftest import T1

CHATS = [
    [{"role": "user", "content": "the layer walk"}],
    [{"role": "system", "content": "Name the city."}, {"role": "user", "content": "street 12"}],
    [{"role": "user", "content": "basil, onion"}, {"role": "assistant", "content": "food"}, {"role": "user", "content": "café"}],
    [{"role": "user", "content": "  court of appeal \n"}],
    [{"role": "user", "content": "state"}, {"role": "assistant", "content": "name"}],
]  # fmt: skip


@pytest.fixture(scope="module")
def out(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    return {name: export_adapter(run[0], folder / name, name) for name in LAYOUTS}


def test_b69_the_saved_adapter_holds_every_pair(run):
    receipt = json.loads((run[0] / "receipt.json").read_text())
    path = run[0] / "adapter_model.safetensors"
    tensors = load_file(path)
    assert len(tensors) == receipt["adapter"]["tensors"] == sum(row["tensors"] for row in receipt["trainable"])
    assert sum(t.numel() for t in tensors.values()) == sum(row["parameters"] for row in receipt["trainable"])
    (header,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert path.stat().st_size == 8 + header + 4 * sum(t.numel() for t in tensors.values())
    assert all(t.any() for t in tensors.values())


@pytest.mark.parametrize("fault", ["zero", "empty", "nan"])
def test_b69_an_adapter_that_changes_nothing_is_not_exported(fault, run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "run")
    file = folder / "adapter_model.safetensors"
    tensors = {} if fault == "empty" else load_file(file)
    for name in tensors:
        if "lora_B" in name:
            tensors[name] = torch.zeros_like(tensors[name]) if fault == "zero" else tensors[name] * torch.nan
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"every B of the adapter is zero|has no tensors|is not finite"):
        export_adapter(folder, tmp_path / "out", "vllm", run[1])
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b79_exported_tokenizers_render_as_training_did(layout, run, out):
    folder = out[layout].folder
    trained = load_tokenizer(run[1])
    exported = AutoTokenizer.from_pretrained(folder)
    assert trained.chat_template != T1
    encoder = Encoder(trained, chat_template=T1)
    differ = 0
    for chat in CHATS:
        for generation in (False, True):
            for thinking in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
                settings = {"add_generation_prompt": generation, "tokenize": True, "return_dict": False, **thinking}
                ids = exported.apply_chat_template(chat, **settings)
                assert ids == trained.apply_chat_template(chat, chat_template=T1, **settings)
                differ += ids != trained.apply_chat_template(chat, **settings)
                if not thinking:
                    assert ids == encoder.encode_prompt(chat, add_generation_prompt=generation)
    assert differ == 30


def test_b79_template_stop_ids_and_added_tokens_travel(run, out):
    sha = hashlib.sha256(T1.encode()).hexdigest()
    end = load_tokenizer(run[1]).convert_tokens_to_ids("<|im_end|>")
    for exported in out.values():
        folder = exported.folder
        assert (folder / "chat_template.jinja").read_text() == T1
        assert json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template", T1) == T1
        identity = identity_of(folder)
        assert identity["chat_template_sha256"] == sha
        assert identity["system"] == "Be short."
        stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        assert stops[0] == end
        assert stops == identity["stop_ids"]
        assert "<think>" in load_tokenizer(folder).get_vocab()
        assert not (folder / "config.json").exists()  # it is no model


def test_card_and_receipt(run, out):
    card = (out["vllm"].folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n")
    assert "| rows | 8 |" in card
    assert "--enable-lora" in card
    assert str(run[0]) not in card
    assert json.loads((out["mlx"].folder / "receipt.json").read_text())["status"] == "ok"
    assert "library_name: mlx" in (out["mlx"].folder / "README.md").read_text()
    assert out["vllm"].pairs == 14
    assert out["vllm"].tensors == 28
    assert set(out["vllm"].files) >= {"adapter_model.safetensors", "adapter_config.json", "README.md", "receipt.json"}


def test_existing_folders_are_not_touched(run, out):
    with pytest.raises(UserError, match="exists already"):
        export_adapter(run[0], out["peft"].folder, "peft")


def test_b80_moved_folders_work_offline_with_the_base_given(run, out, tmp_path, monkeypatch):
    moved = tmp_path / "elsewhere"
    shutil.copytree(run[0], moved / "run")
    shutil.copytree(run[1], moved / "store")
    receipt = json.loads((moved / "run" / "receipt.json").read_text())
    receipt["base"]["path"] = str(tmp_path / "gone")
    (moved / "run" / "receipt.json").write_text(json.dumps(receipt))
    with pytest.raises(UserError, match=r"not at .* any more"):
        export_adapter(moved / "run", tmp_path / "x", "peft")

    def no_network(*args, **kwargs):
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    again = export_adapter(moved / "run", tmp_path / "peft", "peft", moved / "store")
    first, second = (load_file(f / "adapter_model.safetensors") for f in (out["peft"].folder, again.folder))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for file in again.folder.iterdir():
        if file.name != "receipt.json":
            assert str(run[1].parent) not in file.read_text(errors="replace"), file.name
    engine = Engine.open(Store.open(moved / "store"), dtype="fp32", threads=1)
    rows = pack_rows([([5, 9, 30, 7], [False, True, True, True])])
    bare = engine.logits(rows)
    engine.attach(Adapter.load(again.folder, engine.skeleton))
    assert (engine.logits(rows) - bare).abs().max() > 0


def test_b80_another_base_of_the_same_shapes_is_refused(run, tmp_path):
    fixtures.write_checkpoint(
        tmp_path / "checkpoint", fixtures.dense_config(eos_token_id=1), seed=5, tokenizer=fixtures.make_tokenizer()
    )
    quantize_checkpoint(tmp_path / "checkpoint", tmp_path / "store", threads=1)
    for base in ("checkpoint", "store"):
        with pytest.raises(UserError, match="trained on a base with fingerprint"):
            export_adapter(run[0], tmp_path / "out", "peft", tmp_path / base)
    given = export_adapter(run[0], tmp_path / "out", "peft", tmp_path / "store", another_base=True)
    engine = Engine.open(Store.open(tmp_path / "store"), dtype="fp32", threads=1)
    with pytest.raises(UserError, match="trained on a base with fingerprint"):
        engine.attach(Adapter.load(given.folder, engine.skeleton))
