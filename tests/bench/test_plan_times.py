"""What `bench.plan_times` makes of forecasts and spans (no steps are taken here)."""

from collections import namedtuple

import pytest

from bench import plan_times as plan
from bench.plan_cases import FITTED, HELD_OUT, MODELS, Case
from lamella.probe import in_place

Span = namedtuple("Span", "cause name start_s end_s lane")


class Times:
    """One second each, by size."""

    def forward(self, layer, lengths):
        return {"linear": sum(lengths), "calls": 1.0}

    def backward(self, layer, lengths, recompute):
        return {"linear": (3 if recompute else 2) * sum(lengths), "calls": 2.0}

    def hang(self, layer):
        return 0.5

    def dequantise(self, layer):
        return 10.0

    def prologue(self, tokens):
        return 0.1

    def head(self, labels):
        return float(labels)

    def update(self, parameters):
        return parameters / 10


def test_a_step_is_all_its_parts():
    case = Case("one", "moe 640", ((3, 4), (6,)), recompute="always")
    found = plan.predict(case, Times(), 2, 50)
    assert found["forward"] == 2 * (13 + 2 * 1.0 + 0.5)
    assert found["backward"] == 2 * (39 + 2 * 2.0 + 0.5)
    assert found["dequantise"] == 30.0  # the last layer's turn comes once
    assert found["head"] == (2 + 2) + 3
    assert found["optimizer"] == 5.0
    assert found["of linear"] == 2 * (13 + 39)
    parts = ("forward", "backward", "dequantise", "head", "embed", "optimizer")
    assert found["step"] == pytest.approx(sum(found[name] for name in parts))


def test_spans_are_summed_by_what_they_are():
    spans = [Span("compute", "forward 0", 0.0, 1.0, "main"), Span("compute", "forward 1", 1.0, 3.0, "main"),
             Span("compute", "head", 3.0, 3.5, "main"), Span("load", "layer 1", 0.0, 9.0, "read"),
             Span("dequantise", "layer 0", 4.0, 4.25, "main")]  # fmt: skip
    assert plan.by_cause(spans) == {"forward": 3.0, "head": 0.5, "dequantise": 0.25}


def test_the_verdict_tells_what_is_systematic():
    scattered, all_low = plan.verdict([0.8, 1.25, 1.0]), plan.verdict([0.85, 0.86, 0.88])
    assert scattered["met"] and scattered["within_bar"] == 1 and abs(scattered["mean_signed_error"]) < 1e-3
    assert not all_low["met"] and all_low["mean_signed_error"] == pytest.approx(-0.147, abs=0.005)
    assert all_low["worst"] == 0.85


def test_held_out_configurations_are_none_of_the_fitted():
    def key(config):
        names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts", "num_hidden_layers")
        return tuple(config.get(name) for name in names)

    fitted = {key(config) for config in (*FITTED.values(), in_place.DENSE, in_place.EXPERTS)}
    used = {case.model for case in HELD_OUT}
    assert used == set(MODELS)
    assert len(HELD_OUT) >= 12
    assert len({case.name for case in HELD_OUT}) == len(HELD_OUT)
    wide = {name for name in used if key(MODELS[name]) in fitted}
    assert not wide


def test_cases_survive_json():
    import json
    from dataclasses import asdict

    for case in HELD_OUT:
        assert plan.case_of(json.loads(json.dumps(asdict(case)))) == case
