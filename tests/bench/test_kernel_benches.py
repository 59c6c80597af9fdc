"""Benches of kernels stand in for the engine's own objects: they must go on fitting."""

import json

import pytest
import torch

from bench import attention, experts, kernels, layers
from bench.train import MOE_115M
from lamella.kernels import experts as expert_kernels

TINY = {**MOE_115M, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 512, "eos_token_id": 511}  # fmt: skip


@pytest.mark.skipif(expert_kernels.route() is None, reason="no AVX-512 BF16 here")
@pytest.mark.parametrize("rank", [0, 2])
def test_experts(monkeypatch, rank):
    monkeypatch.setattr(experts, "SHAPES", {"tiny": (4, 64, 64, 2)})
    line = experts.bench("tiny", 8, rank, 1)
    assert line["rows_per_expert"] == 8 and line["forward_ms"] > 0 and line["backward_onednn_ms"] > 0


@pytest.mark.parametrize("cases", ["dequantize_cases", "quantize_cases", "int8_cases", "mxfp4_cases"])
def test_kernels(cases):
    lines = [kernels.measure(case) for case in getattr(kernels, cases)("tiny", 4096, 1)]
    assert lines and all(json.dumps(line) for line in lines)


def test_attention(monkeypatch, capsys):
    monkeypatch.setattr(attention, "CASES", ((2, 24, 4, 2, 64),))
    monkeypatch.setattr(attention, "RUNS", 1)
    monkeypatch.setattr("sys.argv", ["attention", "--threads", str(torch.get_num_threads())])
    attention.main()
    (line,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert line["forward_backward_s"].keys() >= {"sdpa", "matmul"}


@pytest.mark.parametrize("targets", [layers.ATTENTION, "all-linear"])
def test_layers(tmp_path, targets):
    from bench import size

    store = size.make_store(tmp_path, size.Case("tiny", TINY, 0, ""))
    case = layers.Case("tiny", TINY, targets, 2, 16, 0.5)
    line = layers.measure(case, store, 4, "never", 1)
    assert line["tokens_per_step"] == [32, 32] and line["tokens_per_s"] > 0 and line["loss"] > 0
    least, most = layers.measure(case, store, 4, "never", 1, varied=True)["tokens_per_step"]
    assert 30 <= least < most <= 34
