"""Interpolation of measured times."""

import pytest

from lamella.forecast.grid import Grid


def law(rows: float, inner: float, columns: float) -> float:
    """A call, bytes of both sides, products."""
    return 5e-6 + 1e-10 * rows * inner + 2e-10 * inner * columns + 1e-12 * rows * inner * columns


POINTS = {
    (r, i, c): law(r, i, c) for r in (32.0, 512.0, 2048.0) for i in (256.0, 4096.0) for c in (256.0, 1024.0, 12288.0)
}


@pytest.mark.parametrize("sizes", [(32, 256, 256), (100, 700, 5000), (2000, 4000, 300), (600.5, 256, 12288)])
def test_sums_of_products_of_sizes_are_met_exactly(sizes):
    assert Grid(POINTS).at(*sizes) == pytest.approx(law(*sizes), rel=1e-9)


def test_beyond_the_grid_the_rate_stays():
    grid = Grid(POINTS)
    assert grid.at(4096, 4096, 12288) == pytest.approx(2 * law(2048, 4096, 12288))
    assert grid.at(4096, 8192, 12288) == pytest.approx(4 * law(2048, 4096, 12288))


def test_below_the_grid_no_faster_than_its_first_rate():
    grid = Grid({(100.0,): 1.0, (200.0,): 3.0})
    assert grid.at(90) == pytest.approx(0.9)  # the line through both would give 0.8
    assert Grid({(100.0,): 2.0, (200.0,): 3.0}).at(50) == pytest.approx(1.5)
    assert grid.at(0) == 0.0


def test_noise_does_not_make_more_work_faster():
    grid = Grid({(1.0, 1.0): 1.0, (1.0, 2.0): 5.0, (2.0, 1.0): 0.5, (2.0, 2.0): 4.0})
    times = [grid.at(x / 10, y / 10) for x, y in [(10, 10), (13, 10), (20, 10), (20, 14), (20, 20), (30, 20)]]
    assert times == sorted(times)
    assert grid.at(2, 1) == 1.0
    assert grid.at(2, 2) == 5.0


def test_a_point_left_out_goes_on_at_its_neighbours_rate():
    grid = Grid({(1.0, 1.0): 1.0, (1.0, 4.0): 3.0, (4.0, 1.0): 2.0})
    assert grid.at(4, 4) == 12.0
