"""`lamella init`: the file it writes is a run as it is, and says what the defaults are."""

import json
import tomllib

import pytest
from typer.testing import CliRunner

from lamella.cli import app
from lamella.config import RunConfig, differences, flat, load_run_config
from lamella.errors import UserError
from lamella.guide.settings import settings_of
from lamella.guide.start import advised_tokens, run_toml, write_run
from lamella.store.quantize import quantize_checkpoint
from tests import fixtures

runner = CliRunner()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fixtures.write_jsonl(tmp_path / "my rows.jsonl", fixtures.chat12())
    return tmp_path


def init(*words):
    return runner.invoke(app, ["init", *map(str, words)])


def test_the_file_is_a_run(here):
    result = init("my rows.jsonl", "--store", "stores/base", "--rank", 8, "--budget", "2GiB")
    assert result.exit_code == 0, result.output
    config = load_run_config(here / "run.toml")
    assert (config.name, config.lora.rank, config.memory.budget) == ("my-rows", 8, "2GiB")
    assert config.store.resolve() == here / "stores/base" and config.data.train[0].resolve() == here / "my rows.jsonl"
    text = (here / "run.toml").read_text()
    assert text.startswith("# my rows.jsonl: 12 rows (12 messages)\n")


def test_every_comment_tells_the_real_default(here):
    """Every commented setting, taken into effect, changes nothing."""
    init("my rows.jsonl", "--store", "s")
    plain = load_run_config(here / "run.toml")
    lines = (here / "run.toml").read_text().splitlines()
    told = [s for s in settings_of(RunConfig) if s.default is not None]
    opened, entry = [], False
    for line in lines:
        entry = line.startswith("# [[") or (entry and bool(line))  # entries of an array that is empty by default
        told_here = not entry and any(line == f"# {s.name} = {s.default}" for s in told)
        opened.append(line.removeprefix("# ") if told_here else line)
    assert sum(a != b for a, b in zip(lines, opened, strict=True)) >= 40
    (here / "all.toml").write_text("\n".join(line for line in opened if not line.startswith("# ")))
    assert flat(tomllib.loads((here / "all.toml").read_text())).keys() > {"train.eps", "split.gather"}
    assert differences(
        plain.model_dump(mode="json"), load_run_config(here / "all.toml").model_dump(mode="json")
    ).keys() == {"runs_dir"}  # a file's paths are from its folder, the default from the working one


def test_every_setting_is_there_with_its_text():
    text = run_toml({"store": "s"})
    for setting in settings_of(RunConfig):
        assert setting.text, f"{setting.key} has no docstring"
        assert f"{setting.name} =" in text


def test_lengths_come_from_the_stores_tokenizer(here):
    tokenizer = fixtures.make_tokenizer()
    fixtures.write_checkpoint(here / "hf", fixtures.dense_config(layers=1), tokenizer=tokenizer)
    quantize_checkpoint(here / "hf", here / "store", threads=1)
    result = init("my rows.jsonl", "--store", "store", "--json")
    tree = json.loads(result.stdout)
    assert tree["config"]["data"]["max_tokens"] == advised_tokens(tree["longest_tokens"])
    assert tree["longest_tokens"] > 5 and tree["rows"] == 12
    assert runner.invoke(app, ["train", "run.toml", "--dry-run"]).exit_code == 0


def test_a_model_to_be_quantised_first(here):
    result = init("my rows.jsonl", "--model", "owner/some-model")
    assert load_run_config(here / "run.toml").store.name == "some-model"
    assert "lamella quantize owner/some-model -o stores/some-model" in " ".join(result.stderr.split())


def test_bad_rows_are_told(here):
    (here / "odd.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"text": "x"}\n{"a\n')
    result = init("odd.jsonl", "--store", "s", "--json")
    assert json.loads(result.stdout)["problems"] == {"wrong format": 1, "broken JSON": 1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing is said of the data and the model"),
        (("my rows.jsonl",), "nothing is said of the model"),
        (("gone.jsonl", "--store", "s"), "No such file"),
        (("empty.jsonl", "--store", "s"), "holds no rows"),
        (("my rows.jsonl", "--store", "s", "--budget", "much"), "much"),
        (("my rows.jsonl", "--store", "s", "--out", "no/run.toml"), "no such folder"),
    ],
)
def test_bad_input_writes_nothing(here, words, said):
    (here / "empty.jsonl").write_text("")
    before = sorted(here.iterdir())
    result = init(*words, "--yes")
    assert isinstance(result.exception, UserError) and said in str(result.exception)
    assert sorted(here.iterdir()) == before


def test_an_error_names_no_file_of_our_own(here):
    with pytest.raises(UserError) as told:
        write_run(here / "new.toml", 'store = "s"\nno_such_key = 1\n')
    assert "trial" not in str(told.value) and "no_such_key" in str(told.value)
    assert not (here / "new.toml").exists() and not list(here.glob(".*"))


def test_a_file_that_is_there_stays(here):
    (here / "run.toml").write_text("mine")
    assert "is there already" in str(init("my rows.jsonl", "--store", "s").exception)
    assert (here / "run.toml").read_text() == "mine"
    assert init("my rows.jsonl", "--store", "s", "--force").exit_code == 0
    assert load_run_config(here / "run.toml").store


def test_it_asks_what_it_was_not_told(here):
    """At a terminal: data, model, memory; the answers are in the file."""
    import os
    import pty
    import subprocess
    import sys

    mine, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "lamella", "init"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=here
    )
    os.close(theirs)
    said = b""
    for question, answer in ((b"Data", "my rows.jsonl"), (b"Model", "owner/model"), (b"Memory", "3GiB")):
        while question not in said:
            said += os.read(mine, 4096)
        said = b""
        os.write(mine, f"{answer}\n".encode())
    assert child.wait(30) == 0
    os.close(mine)
    config = load_run_config(here / "run.toml")
    assert (
        config.memory.budget == "3GiB" and config.store.name == "model" and config.data.train[0].name == "my rows.jsonl"
    )
