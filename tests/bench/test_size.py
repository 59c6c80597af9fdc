"""`bench.size` and `bench.checkpoint` with tiny shapes: the whole way, under a real limit."""

import dataclasses
import json
import sys

import pytest

from bench import checkpoint, size
from lamella.data.encode import load_tokenizer
from lamella.hardware.limit import memory_limit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("size")


@pytest.mark.parametrize(
    "case",
    [size.TINY[0], *(pytest.param(c, marks=pytest.mark.slow) for c in size.TINY[1:])],
    ids=lambda case: case.name,
)
def test_tiny_cases_train_under_the_limit(case, folder):
    line = size.measure(case, folder, steps=2)
    assert line["ok"], line
    assert line["receipt"] == "ok"
    assert line["layers_streamed"] > 0
    assert line["state"] == ("disk" if case.state == "disk" else line["state"])
    assert all(tokens >= case.rows * case.row_tokens for tokens in line["tokens_per_step"])
    assert 0 < line["peak_rss_bytes"] <= case.bar_bytes
    assert set(line["trainable"]) == {"attention", "experts"}
    assert abs(line["losses"][0] - line["ln_vocabulary"]) < 1
    assert line["limit"] in ("cgroup v1", "cgroup v2", "RLIMIT_DATA")
    json.dumps(line)


@pytest.mark.slow
def test_start_up_ends_before_the_first_step(folder):
    line = size.measure(size.TINY[1], folder, steps=1, only_start=True)
    assert line["start_up_s"] > 0
    assert 0 < line["peak_rss_bytes"] <= size.TINY[1].bar_bytes
    assert "step_s" not in line


def test_a_job_that_needs_more_than_the_limit_is_ended(folder):
    case = dataclasses.replace(size.TINY[0], bar_bytes=120 << 20)  # less than its imports take
    line = size.measure(case, folder, steps=1)
    assert line["ok"] is False
    assert line["exit_code"] != 0
    assert "peak_rss_bytes" not in line


def test_limited_ends_what_exceeds_it():
    take = "x = bytearray(300 << 20); x[::4096] = b'x' * len(x[::4096]); print('alive')"
    with memory_limit(100 << 20) as limit:
        done = size.limited([sys.executable, "-c", take], limit)
    assert done.returncode != 0
    assert "alive" not in done.stdout


def test_rows_have_the_tokens_asked_for(folder, tmp_path):
    case = size.TINY[0]
    tokenizer = load_tokenizer(size.make_store(folder, case))
    size.write_rows(tmp_path / "rows.jsonl", case, steps=3)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * case.rows
    for row in rows:
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        assert case.row_tokens <= len(ids) < 2 * case.row_tokens
        assert max(ids) > 1000


def test_shapes_are_the_models():
    parameters = {}
    for case in size.CASES:
        c = case.config
        assert case.rows * case.row_tokens >= 1024
        if "num_experts" not in c:
            continue
        attention = c["head_dim"] * c["hidden_size"] * 2 * (c["num_attention_heads"] + c["num_key_value_heads"])
        experts = 3 * c["num_experts"] * c["hidden_size"] * c["moe_intermediate_size"]
        router = c["num_experts"] * c["hidden_size"]
        outer = 2 * c["vocab_size"] * c["hidden_size"]
        parameters[case.name] = c["num_hidden_layers"] * (attention + experts + router) + outer
    assert parameters["30B"] == pytest.approx(30.5e9, rel=0.01)
    assert parameters["235B"] == pytest.approx(235e9, rel=0.01)


def test_what_a_save_adds_to_its_turns():
    turns = [1.0, 1.0, 1.0, 1.1, 1.3, 1.0, 1.0, 1.1, 1.3, 1.0, 1.0]  # turns 3 and 7 save, 4 and 8 come after
    base, save = checkpoint.share(turns, 4)
    assert base == 1.0
    assert save == pytest.approx(0.4)
