"""The configuration tree: strict types, overrides, paths, errors that name the key."""

import subprocess
import sys
from pathlib import Path

import pytest

from lamella.config import RunConfig, build_run_config, load_run_config
from lamella.errors import UserError


def write(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


def test_defaults_and_paths_relative_to_the_file(tmp_path):
    config = load_run_config(write(tmp_path, 'store = "s"\n[data]\ntrain = "rows.jsonl"\n'))
    assert config.store == tmp_path / "s"
    assert config.data.train == (tmp_path / "rows.jsonl",)
    assert config.lora.targets == "all-linear"


def test_overrides_go_before_the_file_and_are_relative_to_the_working_folder(tmp_path):
    file = write(tmp_path, 'store = "s"\n[train]\nsteps = 3\n[lora]\nrank = 4\n')
    config = load_run_config(
        file, ["train.steps=7", "store=elsewhere", 'lora.targets=["q_proj","v_proj"]', "train.schedule=linear"]
    )
    assert config.train.steps == 7
    assert config.lora.rank == 4
    assert config.store == Path("elsewhere")
    assert config.lora.targets == ("q_proj", "v_proj")
    assert config.train.schedule == "linear"


@pytest.mark.parametrize(
    ("key", "near"),
    [("train.stepz", "steps"), ("trian", "train"), ("lora.rnak", "rank"), ("memory.budgt", "budget")],
)
def test_unknown_keys_name_the_nearest(key, near):
    tree = {"store": "s"}
    node = tree
    *parents, leaf = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[leaf] = {} if "." not in key else 1
    with pytest.raises(UserError, match=rf"unknown key `{key}`; nearest valid name: `{near}`"):
        build_run_config(tree)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("lora", "rank", "16"), ("lora", "rank", 0), ("lora", "rank", 1.5), ("lora", "rslora", "yes"), ("lora", "rslora", 1),
        ("lora", "alpha", float("inf")), ("lora", "dropout", 1.0), ("lora", "targets", "q_proj"), ("lora", "targets", []),
        ("lora", "targets", [1]), ("lora", "expert_rank", 0), ("lora", "expert_rank", "many"), ("train", "steps", True),
        ("train", "steps", 0), ("train", "betas", [2, 3]), ("train", "betas", [0.9]), ("train", "learning_rate", float("inf")),
        ("train", "learning_rate", float("nan")), ("train", "epochs", float("inf")), ("train", "learning_rate", -1),
        ("memory", "budget", "2 potatoes"), ("memory", "budget", "-1"), ("memory", "budget", 5), ("memory", "recompute", "maybe"),
        ("compute", "dtype", "int8"), ("compute", "threads", 0), ("data", "max_tokens", 1), ("data", "max_drop_share", 2),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_in_one_line_with_key_and_value(section, key, value):
    with pytest.raises(UserError) as caught:
        build_run_config({"store": "s", section: {key: value}})
    lines = caught.value.what.splitlines()
    assert len(lines) == 1, lines
    assert f"`{section}.{key}`" in lines[0] or f"`{section}`" in lines[0]
    assert caught.value.exit_code == 2


def test_whole_numbers_are_fine_where_fractions_are_meant():
    assert build_run_config({"store": "s", "lora": {"alpha": 8}, "train": {"epochs": 2}}).lora.alpha == 8.0
    assert build_run_config({"store": "s", "memory": {"budget": "2 GiB"}}).memory.budget == "2 GiB"


def test_every_bad_key_is_named_at_once():
    with pytest.raises(UserError) as caught:
        build_run_config({"train": {"steps": 0}, "lora": {"rnk": 3}})
    for part in ("`store` is required", "`train.steps`", "`lora.rnk`"):
        assert part in caught.value.what


@pytest.mark.parametrize("text", ["store = ", "store = 's'\n[train\n", 'store = "s"\nstore = "t"\n'])
def test_bad_toml_says_where(text, tmp_path):
    with pytest.raises(UserError, match=r"run\.toml: not valid TOML.*(line|end of document)"):
        load_run_config(write(tmp_path, text))


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_run_config(tmp_path / "none.toml")
    with pytest.raises(UserError, match="cannot be read"):
        load_run_config(tmp_path)


@pytest.mark.parametrize("override", ["train.steps", "=3", "store.x=1"])
def test_bad_overrides(override, tmp_path):
    with pytest.raises(UserError, match=r"override|unknown key"):
        load_run_config(write(tmp_path, 'store = "s"\n'), [override])


def test_resolved_config_reads_back():
    config = build_run_config({"store": "s", "lora": {"targets": ["q_proj"]}, "train": {"betas": [0.8, 0.9]}})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_config_and_help_import_no_torch():
    code = "import sys, lamella.cli, lamella.config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
