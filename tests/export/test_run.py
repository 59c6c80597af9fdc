"""`lamella export` and `lamella parity` from end to end on a tiny run."""

import json
import resource
import shutil

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lamella.cli import app
from lamella.errors import RunFailed, UserError
from lamella.export.engines.child import TRANSFORMERS
from lamella.export.run import Ask, Export, export, prove
from lamella.export.verify import EXACT
from tests import fixtures


def cli(*arguments):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def test_an_adapter_is_exported_and_proven(run, tmp_path):
    folder, _ = run
    told = json.loads(cli("export", folder, "-o", tmp_path / "out", "--to", "peft", "--verify", "--json"))
    (proof,) = told["verified"]
    assert proof["ok"] and proof["limit"] == EXACT and proof["tuned"]["largest"] < EXACT
    assert proof["engine"].startswith("transformers ") and proof["prompts"] == 12
    assert proof["from_base"]["largest"] > 10 * proof["tuned"]["largest"]
    assert json.loads((tmp_path / "out" / "export.json").read_text()) == {k: v for k, v in told.items() if k != "out"}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "chat_template.jinja",
                     "generation_config.json", "receipt.json", "README.md"}  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]  # the base written for the engine is gone


def test_a_model_is_merged_measured_and_compared_again(run, tmp_path):
    folder, _ = run
    cli("export", folder, "-o", tmp_path / "out", "--to", "fp32", "--prompts", folder.parent.parent / "rows.jsonl")
    found = Export.read(tmp_path / "out")
    assert found.kind == "merged" and 0 <= found.facts["divergence"]["kl_mean"] < 1e-9
    assert found.facts["base_divergence"]["kl_mean"] > 1e-9
    printed = cli("parity", tmp_path / "out")
    assert "log p within" in printed and "transformers" in printed
    (proof,) = Export.read(tmp_path / "out").facts["verified"]
    assert proof["ok"] and proof["base"] is None and proof["tuned"]["largest"] < EXACT


@pytest.mark.parametrize(
    ("to", "says"),
    [
        ("pfet", "--to 'pfet' is no target"),
        ("peft", "exists already"),
        ("gguf", "exists already"),
        ("bf16", "exists already"),
    ],
)
def test_what_cannot_be_exported(run, tmp_path, to, says):
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=says):
        export(Ask(run[0], tmp_path / "out", to))


def test_an_engine_of_the_wrong_kind(run, tmp_path):
    gguf = Export(tmp_path, "gguf", "adapter", run[1], run[0], {})
    with pytest.raises(UserError, match="transformers does not take GGUF files, the export is 'gguf'"):
        prove(gguf, TRANSFORMERS, None, [(1, 2)], tmp_path)


def test_b71_an_export_that_lost_its_effect_is_refused(run, tmp_path):
    """The exported adapter's B is zeroed: PEFT loads it without a word, and says what the base says."""
    found = export(Ask(run[0], tmp_path / "out", "peft"))
    file = tmp_path / "out" / "adapter_model.safetensors"
    save_file({k: v * 0 if "lora_B" in k else v for k, v in load_file(file).items()}, file)
    with pytest.raises(RunFailed, match="the adapter has no effect there"):
        prove(found, TRANSFORMERS, None, [tuple(range(5, 25))], tmp_path)
    assert not Export.read(tmp_path / "out").facts["verified"][0]["ok"]


def changed_b(run, folder, which, value):
    """The run with B of some modules changed."""
    shutil.copytree(run[0], folder)
    file = folder / "adapter_model.safetensors"
    save_file({k: v * value if "lora_B" in k and which in k else v for k, v in load_file(file).items()}, file)
    return folder


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--to peft --max-loss 0", "--max-loss: about merged models"),
        ("--to peft --onto elsewhere --dtype bf16", "--onto, --dtype: about merged models"),
        ("--to peft --measure", "--measure is about merged models"),
        ("--to peft --engine foo", "--engine: about --verify"),
        ("--to bf16 --max-loss nan", "--max-loss nan is no share"),
        ("--to bf16 --allow q_proj", "--allow is not looked at"),
        ("--to bf16 --verify --base .", "is a whole model"),
        ("--to bf16 --verify --limit nan", "--limit nan is no difference"),
        ("--to bf16 --verify --engine llama.cpp", "llama.cpp takes GGUF files"),
        ("--to peft --verify --engine foo", "no engine 'foo'"),
        ("--to peft --verify --engine vllm=no/such/python", "cannot be run"),
        ("--to peft --verify --base no/such/base", "no such --base"),
    ],
)
def test_options_are_looked_at_before_anything_is_written(run, tmp_path, options, says):
    with pytest.raises(UserError, match=says):
        cli("export", run[0], "-o", tmp_path / "out", *options.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["peft", "gguf", "bf16"])
def test_no_folder_and_no_room(run, tmp_path, to):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not a folder, so the export cannot be made there"):
        export(Ask(run[0], tmp_path / "file" / "out", to))
    with pytest.raises(UserError, match="no such folder"):
        export(Ask(tmp_path / "none", tmp_path / "out", to))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(UserError, match=r"cannot be written|disk is full"):
            export(Ask(run[0], tmp_path / "out", to))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_weights_that_nothing_is_added_to_lose_nothing(run, tmp_path):
    """B of the MLPs is zero, as of experts that no token reached."""
    source = changed_b(run, tmp_path / "run", ".mlp.", 0)
    found = export(Ask(source, tmp_path / "out", "bf16"))
    assert found.facts["loss"]["mlp"]["error"] == 0 < found.facts["loss"]["attention"]["error"] < 0.1


@pytest.mark.parametrize(
    ("to", "value", "says"),
    [("gguf", float("nan"), "holds NaN"), ("peft", -0.0, "changes nothing"), ("gguf", 0, "changes nothing")],
)
def test_adapters_that_no_server_should_load(run, tmp_path, to, value, says):
    source = changed_b(run, tmp_path / "run", "", value)
    with pytest.raises(UserError, match=says):
        export(Ask(source, tmp_path / "out", to))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (None, "is no export"),
        ("[]", "is not a JSON object"),
        ('{"to": "peft", "kind": "adapter", "store": 3, "source": "r"}', "store is 3"),
        ('{"to": "peft", "kind": "merged", "store": "s", "source": "r"}', "to is 'peft', kind 'merged'"),
        ('{"to": "peft", "kind": "adapter", "store": "s", "source": "r", "verified": 5}', "verified is 5"),
    ],
)
def test_a_broken_export_is_not_compared(tmp_path, said, says):
    if said is not None:
        (tmp_path / "export.json").write_text(said)
    with pytest.raises(UserError, match=says):
        cli("parity", tmp_path)


def test_b80_a_merge_onto_another_base_is_asked_for(run, tmp_path):
    other = fixtures.write_checkpoint(tmp_path / "other", fixtures.dense_config(eos_token_id=1), seed=7)
    with pytest.raises(UserError, match="is another model: fingerprint"):
        export(Ask(run[0], tmp_path / "out", "bf16", onto=str(other)))
    assert not (tmp_path / "out").exists()
    export(Ask(run[0], tmp_path / "out", "bf16", onto=str(other), another_base=True))
