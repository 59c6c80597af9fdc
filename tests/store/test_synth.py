"""Stores of random weights from a config.json alone."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from lamella.adapter import Adapter
from lamella.cli import app
from lamella.config import LoraConfig
from lamella.data.encode import load_tokenizer
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.models.layout import pack_rows
from lamella.models.names import checkpoint_shapes
from lamella.models.skeleton import Skeleton, read_config
from lamella.store import synth
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from lamella.store.reader import Store
from lamella.store.tokens import FIRST_WORD, word
from tests.conftest import random_rows
from tests.fixtures import dense_config, make_tokenizer, moe_config, write_checkpoint


def shapes_of(file):
    return checkpoint_shapes(Skeleton(read_config(file), torch.bfloat16))


def config_file(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "my.json").write_text(config.to_json_string())
    return folder / "my.json"


def make(tmp_path, config, name="store", **options):
    synth.synthesize_store(config_file(tmp_path, config), tmp_path / name, shapes_of, threads=1, **options)
    return Store.open(tmp_path / name)


@pytest.mark.parametrize("config", [dense_config(layers=3), moe_config(layers=3), dense_config(tie_word_embeddings=True)],
                         ids=["dense", "moe", "tied"])  # fmt: skip
def test_the_format_is_that_of_quantize(config, tmp_path):
    store = make(tmp_path, config)
    quantize_checkpoint(write_checkpoint(tmp_path / "hf", config, dtype=torch.bfloat16), tmp_path / "real", threads=1)
    real = Store.open(tmp_path / "real")
    assert store.manifest.synthetic
    assert not real.manifest.synthetic
    assert "SYNTHETIC" in store.manifest.notices[0]
    assert store.manifest.tie_word_embeddings == real.manifest.tie_word_embeddings
    for (_, mine), (_, theirs) in zip(store.manifest.groups(), real.manifest.groups(), strict=True):
        assert mine.nbytes == theirs.nbytes
        blank = [[r.model_copy(update={"checksum": ""}) for r in g.tensors] for g in (mine, theirs)]
        assert blank[0] == blank[1]
    assert store.verify() == []


@pytest.mark.parametrize("double_quant", [True, False])
def test_values_have_their_deviations(double_quant, tmp_path):
    settings = QuantizeSettings(double_quant=double_quant)
    store = make(tmp_path, moe_config(layers=2, experts=8, hidden_size=256, inner=64), settings=settings)
    packed = store.load(1)
    found = {}
    for name, record in packed.records.items():
        found[name] = packed.dequantize(name, torch.empty(record.shape))
    wanted = {"q_proj": 0.02, "gate_proj": 0.02, "o_proj": 0.01, "down_proj": 0.01, "mlp.gate": 1 / 16}
    for part, std in wanted.items():
        values = torch.cat([v.flatten() for n, v in found.items() if f"{part}.weight" in n])
        assert abs(float(values.std()) / std - 1) < 0.05, part
        assert abs(float(values.mean())) < 0.1 * std, part
    assert all(bool((v == 1).all()) for n, v in found.items() if "norm" in n)
    assert len({bytes(v.numpy()) for v in found.values() if v.dim() == 2}) == sum(v.dim() == 2 for v in found.values())


def test_a_step_on_it_is_sane_and_experts_share_the_tokens(tmp_path):
    config = moe_config(layers=6, experts=16, top_k=4, hidden_size=128, head_dim=32, inner=64)
    engine = Engine.open(make(tmp_path, config), dtype="fp32", recompute="always")
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=4), seed=0)
    engine.attach(adapter)
    batch = pack_rows(random_rows([256, 256]))
    labels = int(batch.score_tokens.numel())
    out = engine.step([batch], step_index=0, label_tokens=labels)
    assert abs(out.loss_sum / labels - math.log(512)) < 1
    assert out.first_bad_layer() is None
    assert max(out.peaks) < 100
    assert all(bool(torch.isfinite(p.grad).all()) for p in adapter.parameters().values())
    assert sum(float(p.grad.norm()) ** 2 for p in adapter.parameters().values()) > 0
    for counts in engine.walk.expert_hits().values():
        assert min(counts) > 0
        assert max(counts) < 4 * sum(counts) / len(counts)


def test_layers_alike_share_one_file(tmp_path):
    config = moe_config(layers=5, mlp_only_layers=[2])
    store = make(tmp_path, config, share_layers=True)
    files = [(store.path / g.file).stat() for g in store.manifest.layers]
    assert [f.st_nlink for f in files] == [4, 4, 1, 4, 4]
    assert files[0].st_ino == files[4].st_ino
    assert "3 layers share" in store.manifest.notices[1]
    assert store.verify() == []
    file = store.path / store.manifest.layers[3].file
    record = next(r for r in store.manifest.layers[3].tensors if r.format == "nf4")
    start = record.parts["codes"][0]
    byte = file.read_bytes()[start]
    with file.open("r+b") as stream:
        stream.seek(start)
        stream.write(bytes([255 ^ byte]))
    rest = record.name.removeprefix("model.layers.3.")
    changed = [name for name in store.verify() if name.endswith(rest)]
    assert changed == [f"model.layers.{i}.{rest}" for i in (0, 1, 3, 4)]


def test_same_seed_same_bytes_with_any_number_of_threads(tmp_path):
    file = config_file(tmp_path, moe_config())
    made = [synth.synthesize_store(file, tmp_path / f"s{n}", shapes_of, seed=seed, threads=n)
            for n, seed in ((1, 0), (3, 0), (2, 1))]  # fmt: skip
    assert made[0].layers == made[1].layers
    assert made[0].outer == made[1].outer
    assert made[0].source_fingerprint == made[1].source_fingerprint != made[2].source_fingerprint
    assert made[0].layers != made[2].layers


def test_the_made_tokenizer_writes_any_word_as_one_token(tmp_path):
    tokenizer = load_tokenizer(make(tmp_path, dense_config()).path)
    text = "".join(f" {word(i)}" for i in (0, 7, 512 - 256 - 4))
    assert tokenizer(text)["input_ids"] == [FIRST_WORD, FIRST_WORD + 7, 508]
    assert tokenizer.decode(tokenizer("naïve <|im_end|> aaaaa")["input_ids"]) == "naïve <|im_end|> aaaaa"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 511


def test_a_folder_with_a_tokenizer_keeps_it(tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "config.json").write_text(dense_config().to_json_string())
    make_tokenizer().save_pretrained(tmp_path / "given")
    synth.synthesize_store(tmp_path / "given", tmp_path / "store", shapes_of, threads=1)
    assert (tmp_path / "store" / "tokenizer.json").read_bytes() == (tmp_path / "given" / "tokenizer.json").read_bytes()
    assert Store.open(tmp_path / "store").verify() == []


BAD = {
    "no such file": None,
    "not valid JSON": "{",
    "has no model_type": "{}",
    "does not know model_type 'nonesuch'": {"model_type": "nonesuch", "num_hidden_layers": 2},
    "cannot (build|read)": {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 65,
        "num_attention_heads": "x",
    },
    "multimodal": {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}},
    "dtype 'int4'": {"model_type": "llama", "num_hidden_layers": 2, "dtype": "int4"},
}


@pytest.mark.parametrize("told", list(BAD))
def test_bad_configs_get_one_error_and_leave_nothing(told, tmp_path):
    content = BAD[told]
    if content is not None:
        (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=told):
        synth.synthesize_store(tmp_path / "config.json", tmp_path / "store", shapes_of)
    assert sorted(tmp_path.iterdir()) == before


def test_refusals(tmp_path, monkeypatch):
    file = config_file(tmp_path, dense_config())
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").touch()
    with pytest.raises(UserError, match="exists already"):
        synth.synthesize_store(file, tmp_path / "there", shapes_of)
    with pytest.raises(UserError, match="block size 48"):
        synth.synthesize_store(file, tmp_path / "s", shapes_of, QuantizeSettings(block_size=48))
    (tmp_path / "s.partial").mkdir()
    with pytest.raises(UserError, match="is in the way"):
        synth.synthesize_store(file, tmp_path / "s", shapes_of)
    monkeypatch.setattr(synth, "free_bytes", lambda _: 1000)
    with pytest.raises(UserError, match=r"too little room[\s\S]*--share-layers"):
        synth.synthesize_store(file, tmp_path / "t", shapes_of)
    assert not (tmp_path / "t.partial").exists()


def test_command(tmp_path):
    file = config_file(tmp_path, dense_config())
    done = CliRunner().invoke(app, ["store", "synth", str(file), str(tmp_path / "s"), "--share-layers", "--json"])
    assert done.exit_code == 0, done.output
    tree = json.loads(done.stdout)
    assert tree["synthetic"] is True
    assert tree["layers"] == 2
    assert CliRunner().invoke(app, ["store", "verify", str(tmp_path / "s")]).exit_code == 0
