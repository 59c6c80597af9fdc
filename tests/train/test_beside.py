"""What goes with an adapter: system text, chat template, stop ids; and that PEFT reads it as Lamella does."""

import json

import pytest
import torch
from transformers import GenerationConfig

from lamella.adapter import Adapter
from lamella.data.encode import load_tokenizer
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.models.layout import pack_rows
from lamella.ranks.group import Ranks
from lamella.store.quantize import quantize_checkpoint
from lamella.store.reader import Store
from lamella.train.assemble import assemble_parts, generation_config, open_rows
from lamella.train.loop import train_run
from tests import fixtures
from tests.conftest import random_rows
from tests.oracle import load_reference, peft_model, write_dequantised


def facts(folder):
    return json.loads((folder / "lamella_adapter.json").read_text())


def eos_ids(folder):
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


def test_system_text_and_template_go_with_every_saved_adapter(real_config, tmp_path):
    template = tmp_path / "my.jinja"
    template.write_text("{# mine #}" + fixtures.CHATML)
    config = real_config(
        "dense", data={"system": "Be short.", "chat_template": str(template)}, train={"steps": 4},
        checkpoint={"every_steps": 2},
    )  # fmt: skip
    run_dir = train_run(config).run_dir
    for folder in (run_dir, run_dir / "checkpoints" / "step-00000002"):
        assert facts(folder)["system"] == "Be short."
        assert (folder / "chat_template.jinja").read_text() == template.read_text()
        assert 4 in eos_ids(folder)
    record = json.loads((run_dir / "checkpoints" / "step-00000002" / "complete.json").read_text())
    assert {"chat_template.jinja", "generation_config.json"} <= set(record["files"])
    again = real_config("dense", train={"steps": 2})
    train_run(again, "fresh")
    assert facts(run_dir)["system"] is None
    assert not (run_dir / "chat_template.jinja").exists()  # none of the run before stays
    assert (run_dir / "generation_config.json").is_file()


@pytest.fixture(scope="module")
def other_eos(tmp_path_factory):
    """A base whose tokenizer and generation config end with <|eos|> (1) while the template ends turns with
    <|im_end|> (4)."""
    folder = tmp_path_factory.mktemp("eos")
    config = fixtures.dense_config(eos_token_id=1)
    fixtures.write_checkpoint(folder / "hf", config, tokenizer=fixtures.make_tokenizer(eos="<|eos|>"))
    (folder / "hf" / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.7, "do_sample": true}')
    quantize_checkpoint(folder / "hf", folder / "store", threads=1)
    return folder / "store"


def test_b14_the_terminator_is_trained_and_in_the_stop_ids(other_eos, real_config):
    config = real_config("dense", train={"steps": 2}).model_copy(update={"store": other_eos})
    rows = open_rows(config, load_tokenizer(other_eos)).dataset.rows
    for row in rows:
        labels = [token for token, label in zip(row.input_ids, row.label_mask, strict=True) if label]
        assert 4 in labels
        assert 1 not in labels
    run_dir = train_run(config).run_dir
    assert eos_ids(run_dir) == [4, 1]
    loaded = GenerationConfig.from_pretrained(run_dir)
    assert (loaded.eos_token_id, loaded.temperature) == ([4, 1], 0.7)


@pytest.mark.parametrize(("text", "ids"), [(None, [4]), ("{}", [4]), ('{"eos_token_id": [9, 4]}', [4, 9])])
def test_stop_ids_are_added_to_what_the_base_says(tmp_path, text, ids):
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert generation_config(tmp_path, (4,))["eos_token_id"] == ids


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_generation_config_is_refused(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config\.json: not"):
        generation_config(tmp_path, (4,))


@pytest.mark.parametrize("store", ["dense", "moe"])
def test_peft_on_the_dequantised_base_gives_our_logits(store, real_config, tmp_path):
    config = real_config(store, train={"steps": 6})
    run_dir = train_run(config).run_dir
    opened = Store.open(config.store)
    engine = Engine.open(opened, dtype="fp32", threads=1)
    engine.attach(Adapter.load(run_dir, engine.skeleton))
    base = write_dequantised(opened, tmp_path / "base")
    plain = load_reference(base)
    theirs = peft_model(load_reference(base), run_dir).eval()
    with torch.no_grad():
        for k, row in enumerate(random_rows([5, 17, 40])):
            ids = torch.tensor([row[0]])
            ours = engine.logits(pack_rows([row], [k]))
            wanted = theirs(input_ids=ids).logits[0]
            torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)
            assert (wanted - plain(input_ids=ids).logits[0]).abs().max() > 0.1
    engine.close()


@pytest.mark.parametrize("where", ["packed", "norm", "embedding"])
def test_one_flipped_bit_of_the_base_in_memory_fails_the_run(where, real_config):
    from lamella.errors import RunFailed

    def assemble(config, ranks, fresh):
        parts = assemble_parts(config, ranks, fresh)
        weights, step = parts.engine.walk.weights, parts.engine.step
        targets = {
            "packed": lambda: weights._packed[3].buffer[2005:2006],
            "norm": lambda: weights.skeleton.layers[1].input_layernorm.weight.data.view(torch.uint8)[0:1],
            "embedding": lambda: weights.skeleton.model.get_input_embeddings().weight.data.view(torch.uint8)[9, 4:5],
        }

        def spoil(*args, step_index, **kwargs):
            if step_index == 2:  # layers are in memory from the first pass on
                targets[where]().bitwise_xor_(1)
            return step(*args, step_index=step_index, **kwargs)

        parts.engine.step = spoil
        return parts

    config = real_config("dense", train={"steps": 4})
    with pytest.raises(RunFailed, match="frozen base in memory changed"):
        train_run(config, "auto", assemble)
    run_dir = config.runs_dir / "run"
    assert json.loads((run_dir / "receipt.json").read_text())["status"] == "failed"
    assert not (run_dir / "adapter_model.safetensors").exists()


def test_memory_is_the_same_before_and_after_a_run(real_config):
    config = real_config("moe", train={"steps": 3})
    run_dir = train_run(config).run_dir
    tree = json.loads((run_dir / "receipt.json").read_text())
    parts = assemble_parts(config, Ranks(0, 1), False)
    assert tree["frozen"]["memory_xxh3_128"] == parts.base.in_memory()
    parts.engine.close()
    assert {"tokenizers", "numpy", "safetensors", "transformers", "torch"} <= set(tree["versions"])
    assert tree["versions"]["kernels"] == tree["engine"]["kernels"]
