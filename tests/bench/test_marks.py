from itertools import pairwise

import pytest

from bench.marks import line_chart, nice_ticks, running_mean


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.5, 1]),
        (0, 199, [0, 50, 100, 150, 200]),
        (0.33, 3.4, [0, 1, 2, 3, 4]),
        (5, 5, [4, 6, 8, 10]),
        (-3e-5, 2e-5, [-4e-5, -2e-5, 0, 2e-5]),
    ],
)
def test_nice_ticks_cover_the_span(low, high, expected):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    if len(expected) == len(ticks):
        assert ticks == pytest.approx(expected, abs=1e-12)
    steps = {round(b - a, 12) for a, b in pairwise(ticks)}
    assert len(steps) == 1


def test_nice_ticks_refuses_nan():
    with pytest.raises(ValueError, match="finite"):
        nice_ticks(0, float("nan"))


def test_running_mean_of_a_window():
    assert running_mean([1, 3, 5, 7], 2) == pytest.approx([1, 2, 4, 6])
    assert running_mean([1, 3, 5, 7], 10) == pytest.approx([1, 2, 3, 4])


def test_line_chart_places_points_in_percent():
    chart = line_chart("t", [0, 10], {"a": [0.0, 1.0]}, x_label="step")
    assert chart.lines[0].points == "0.00,100.00 100.00,0.00"
    assert chart.y_ticks[0].at == 0
    assert chart.y_ticks[-1].at == pytest.approx(100)


def test_line_chart_needs_two_points_and_leaves_nan_out():
    assert line_chart("t", [0], {"a": [1.0]}, x_label="step") is None
    chart = line_chart("t", [0, 1, 2], {"a": [0.0, float("nan"), 1.0]}, x_label="step")
    assert len(chart.lines[0].points.split()) == 2
