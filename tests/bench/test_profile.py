"""Causes of a profile, from made-up events."""

from dataclasses import dataclass

import pytest

from bench.profile import cause, table


@dataclass
class Event:
    name: str
    self_cpu_time_total: float
    cpu_parent: "Event | None" = None


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["aten::mm", "_LoraLinear"], "matmul"),
        (["aten::addmm_", "_LoraLinearBackward"], "matmul"),
        (
            ["aten::mm", "_GroupedLinearBackward", "autograd::engine::evaluate_function: _GroupedLinearBackward"],
            "experts",
        ),
        (["lamella_experts_forward"], "experts"),
        (["lamella_dequantize_nf4"], "dequantise"),
        (["lamella_attention_backward"], "attention"),
        (["aten::_scaled_dot_product_flash_attention_for_cpu"], "attention"),
        (["aten::_log_softmax"], "loss"),
        (["lamella_cross_entropy"], "loss"),
        (["aten::_fused_adamw_", "optimizer"], "optimizer"),
        (["aten::mul", "optimizer"], "optimizer"),
        (["lamella_rms_norm"], "norm and elementwise"),
        (["aten::silu"], "norm and elementwise"),
        (["_LoraLinear"], None),
        (["autograd::engine::evaluate_function: MulBackward0"], None),
    ],
)
def test_cause(names, label):
    assert cause(names) == label


def test_what_no_operator_accounts_for_is_python():
    grouped = Event("_GroupedLinear", 900_000)
    events = [
        grouped,
        Event("aten::mm", 1_000_000, grouped),
        Event("aten::mm", 2_000_000),
        Event("aten::copy_", 500_000),
        Event("lamella_rms_norm", 500_000),
    ]
    lines = {line["cause"]: line for line in table(events, 8.0)}
    assert {name: line["seconds"] for name, line in lines.items()} == {
        "matmul": 2.0, "experts": 1.0, "norm and elementwise": 1.0, "python": 4.0,
    }  # fmt: skip
    assert lines["python"]["share"] == 0.5
    assert lines["norm and elementwise"]["calls"] == 2
    assert lines["norm and elementwise"]["longest"] == {"aten::copy_": 0.5, "lamella_rms_norm": 0.5}
    assert next(iter(lines)) == "python"
