"""`lamella export` and `lamella parity` from end to end on a tiny run."""

import json

import pytest
from typer.testing import CliRunner

from lamella.cli import app
from lamella.errors import RunFailed, UserError
from lamella.export.engines.child import TRANSFORMERS
from lamella.export.run import Ask, Export, export, prove
from lamella.export.verify import EXACT


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
    from safetensors.torch import load_file, save_file

    found = export(Ask(run[0], tmp_path / "out", "peft"))
    file = tmp_path / "out" / "adapter_model.safetensors"
    save_file({k: v * 0 if "lora_B" in k else v for k, v in load_file(file).items()}, file)
    with pytest.raises(RunFailed, match="the adapter has no effect there"):
        prove(found, TRANSFORMERS, None, [tuple(range(5, 25))], tmp_path)
    assert not Export.read(tmp_path / "out").facts["verified"][0]["ok"]
