"""Statistics and plot of loss curves, from made-up ones."""

import json
import math
from xml.etree import ElementTree

import pytest

from bench.curve import SIDES, compare, is_done, read_side, write
from bench.plot import Panel, svg

STEPS = 60
REFERENCE = [3 * math.exp(-k / 20) + 0.3 * math.sin(k * 2.3) for k in range(STEPS)]


def wave(size):
    return [size * math.cos(k * 1.7) for k in range(STEPS)]


def shifted(gaps):
    return [a + b for a, b in zip(REFERENCE, gaps, strict=True)]


def curves(fast, plain):
    return {"bf16": shifted(fast), "bf16-plain": shifted(plain), "fp32": REFERENCE}


def test_noise_of_plain_bf16_is_noise():
    found = compare(curves(wave(0.1), wave(0.1)))
    assert found["within_noise"]
    assert found["bf16"]["rms"] == pytest.approx(0.0707, rel=0.02)
    assert found["bf16"]["largest"] == pytest.approx(0.1, rel=0.01)
    assert found["steps"] == STEPS


def test_the_scatter_of_batches_is_the_standard_deviation_around_the_curve():
    import random

    rnd = random.Random(0)
    flat = {"fp32": [2 + rnd.gauss(0, 0.25) for _ in range(4000)]}
    flat["bf16"] = list(flat["fp32"])
    assert compare(flat)["batch_sd"] == pytest.approx(0.25, rel=0.05)


def test_a_drift_or_more_noise_than_plain_bf16_is_none():
    assert not compare(curves([0.1] * STEPS, wave(0.1)))["within_noise"], "a constant offset"
    assert not compare(curves(wave(0.2), wave(0.1)))["within_noise"], "twice plain bf16's differences"
    assert compare(curves(wave(0.01), wave(0.001)))["within_noise"], "far below what batches scatter"


def test_curves_are_written_as_lines_and_as_a_plot(tmp_path):
    losses = curves(wave(0.1), wave(0.05))
    write(tmp_path / "curve", losses, compare(losses))
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS
    assert lines[4] == {"step": 5, **{side: values[4] for side, values in losses.items()}}
    root = ElementTree.fromstring((tmp_path / "curve.svg").read_text())
    drawn = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert [len(e.get("points").split()) for e in drawn] == [STEPS] * 5
    text = " ".join(e.text for e in root.iter() if e.tag.endswith("text"))
    assert all(side in text for side in SIDES)


def test_points_lie_inside_the_panel_and_names_are_escaped():
    picture = svg([1, 2, 3], [Panel("a < b", {"x & y": [0.0, 5.0, 2.0]})], x_label="step")
    root = ElementTree.fromstring(picture)
    width, height = float(root.get("width")), float(root.get("height"))
    (line,) = [e for e in root.iter() if e.tag.endswith("polyline")]
    points = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
    assert all(0 < x < width and 0 < y < height for x, y in points)
    assert points[1][1] < points[2][1] < points[0][1], "larger values lie higher"
    with pytest.raises(ValueError, match="fewer than two"):
        svg([1], [Panel("one", {"a": [1.0]})], x_label="step")


def test_a_side_is_done_when_all_steps_and_the_receipt_are_there(tmp_path):
    assert read_side(tmp_path, 2) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    assert not is_done(tmp_path, 2)
    (tmp_path / "receipt.json").write_text('{"status": "interrupted"}')
    assert not is_done(tmp_path, 2)
    (tmp_path / "receipt.json").write_text('{"status": "ok"}')
    assert is_done(tmp_path, 2)
    assert not is_done(tmp_path, 3)
