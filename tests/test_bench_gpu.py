"""`bench.gpu` at tiny shapes on the CPU: every part runs, figures are there, the table has a line for each."""

import json

import pytest
import torch

pytest.importorskip("lamella.store.synth", reason="the bench makes its store with `lamella store synth`")
from bench import gpu


def test_every_part_runs_on_the_cpu(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu", "--dry-run-cpu"])
    gpu.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    results = [json.loads(line) for line in lines][1:]
    cases = [r["case"] for r in results]
    assert cases[:4] == ["matmul", "copy on the device", "host to device", "device to host"]
    assert {"dequantize", "grouped forward", "grouped input gradient", "lora linear", "loss", "step"} <= set(cases)
    assert all(v > 0 for r in results for k, v in r.items() if k in ("tflops", "gb_per_s", "of_matmul", "step_s"))
    steps = [r for r in results if r["case"] == "step"]
    assert [(r["weights"], r["tokens"]) for r in steps] == [
        (w, t) for w in ("resident", "streamed") for t in gpu.TINY.tokens
    ]
    for one, other in zip(steps[:2], steps[2:], strict=True):
        assert one["loss"] == other["loss"]
    text = gpu.table(results)
    assert len(text.splitlines()) == len(results) + len(gpu.TINY.tokens)
    assert "streamed at 64 tokens" in text


def test_flops_are_those_of_qwen3_235b():
    """Forward 0.513 G and input gradient 0.613 G a token and layer at 4,096 tokens (module docstring of the plan)."""
    size = gpu.Size()
    assert size.forward_flops() == pytest.approx(0.513e9, rel=0.005)
    assert size.input_flops() == pytest.approx(0.613e9, rel=0.005)
    assert gpu.layer_values(size) == pytest.approx(2.488e9, rel=0.001)


def test_rows_are_sorted_and_every_expert_is_hit():
    on = gpu.Device(cpu=True)
    expert_S = gpu.sorted_rows(on, gpu.TINY, 64)
    assert torch.equal(expert_S, expert_S.sort().values)
    assert len(expert_S.unique()) == gpu.TINY.experts
