"""B26: keys missing from config.json whose default changes the maths are told, one line each."""

import json

import pytest

from lamella.checkpoint.defaults import defaulted
from lamella.store.quantize import quantize_checkpoint
from tests.fixtures import dense_config, write_checkpoint

FULL = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "eos_token_id": 4,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}  # fmt: skip


def without(*keys, **over):
    return {key: value for key, value in FULL.items() if key not in keys} | over


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (FULL, []),
        (without("head_dim"), ["say head_dim: transformers' default for llama is used, hidden_size / num_att"]),
        (without("head_dim", model_type="qwen3"), ["say head_dim: transformers' default for qwen3 is used, 128"]),
        (without("head_dim", model_type="qwen2"), []),  # this family knows no such key
        (without("eos_token_id"), ["say eos_token_id: transformers' default for llama is used, 2"]),
        (without("eos_token_id", model_type="qwen3"), ["eos_token_id: transformers' default for qwen3 is used, null"]),
        (without("rope_parameters"), ['rope_parameters: transformers\' default for llama is used, {"rope_theta": 100']),
        (without("rope_parameters", rope_parameters={"rope_type": "default"}), ["say rope_parameters"]),
        (without("rope_parameters", rope_theta=1e6), []),
        (without("rope_parameters", rope_parameters={"full_attention": {"rope_theta": 1e6}}), []),
        (without("rope_parameters", model_type="gpt2", n_embd=64), []),  # no rotary embedding
        (without("eos_token_id", "rope_parameters"), ["say rope_parameters", "say eos_token_id"]),
        ({"model_type": "none-such"}, []),
        ({"model_type": "gemma3", "text_config": without("head_dim", model_type="gemma3_text")}, ["say head_dim"]),
    ],
)
def test_b26_defaulted_keys(config, told, tmp_path):
    lines = defaulted(config, tmp_path)
    assert len(lines) == len(told)
    for line, part in zip(lines, told, strict=True):
        assert part in line


def test_b26_eos_of_generation_config_counts(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 4}')
    assert defaulted(without("eos_token_id"), tmp_path) == []


def test_b26_defaults_are_printed_and_recorded_in_the_manifest(tmp_path, capsys):
    source = write_checkpoint(tmp_path / "c", dense_config())
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    for key in ("head_dim", "rope_parameters", "eos_token_id"):
        del config[key]
    (source / "config.json").write_text(json.dumps(config))
    manifest = quantize_checkpoint(source, tmp_path / "store")
    printed = capsys.readouterr().err
    for key in ("head_dim", "rope_parameters", "eos_token_id"):
        lines = [line for line in manifest.notices if f"does not say {key}:" in line]
        assert len(lines) == 1
        assert lines[0] in printed
