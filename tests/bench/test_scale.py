"""The line through the points of `bench.scale`, and its plot."""

import xml.etree.ElementTree as ElementTree

import pytest

from bench.scale import SHAPE, chart_of, fit, points, svg


def test_a_line_is_found_exactly():
    found = fit([1, 2, 4], [5, 7, 11])
    assert (found.intercept, found.slope, found.r2) == pytest.approx((3, 2, 1))
    assert found.largest_residual == pytest.approx(0)


def test_what_is_not_a_line_shows():
    found = fit([1, 2, 3, 4], [1, 4, 9, 16])
    assert found.r2 == pytest.approx(0.969, abs=1e-3)
    assert found.largest_residual == pytest.approx(1.0)
    with pytest.raises(ValueError):
        fit([2, 2], [1, 3])


def test_series_change_one_size():
    assert {dict(p.shape)["num_hidden_layers"] for p in points("layers")} == {p.x for p in points("layers")}
    assert all(p.x == 512 * p.sequences and not p.shape for p in points("tokens"))
    for p in points("experts"):
        assert p.x >= SHAPE["num_experts_per_tok"]


def test_the_plot_is_svg_with_a_dot_per_point():
    charts = [
        chart_of(s, [1.0, 2.0, 4.0], [5.0, 7.0, 11.5], fit([1, 2, 4], [5, 7, 11.5])) for s in ("layers", "tokens")
    ]
    root = ElementTree.fromstring(svg(charts))
    kinds = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert kinds.count("circle") == 6
    assert kinds.count("polyline") == 2
    assert "tokens per step" in [element.text for element in root.iter()]
