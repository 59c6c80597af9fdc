"""What is measured of the kernels (not how fast they are)."""

import pytest
import torch

from lamella.hardware.machine import KernelRates
from lamella.kernels import experts, rows
from lamella.probe import own, products
from lamella.probe.pool import Pool
from lamella.probe.rates import measure_kernels
from lamella.probe.timing import Effort, Piece, measure


def test_every_round_runs_every_piece_and_keeps_its_best():
    ran = []
    pieces = [Piece(key, lambda key=key: ran.append(key)) for key in "ab"]
    measure(pieces, Effort(3, 0.0))
    assert ran == ["a", "a", "b", "b"] * 3  # one to warm up, one that counts
    assert all(len(piece.seconds) == 3 and piece.best_s == min(piece.seconds) for piece in pieces)


def test_products_are_what_their_form_says():
    pool = Pool()
    for shape in [
        products.Shape("forward", 5, 6, 7),
        products.Shape("backward", 5, 7, 6),
        products.Shape("gradient", 2, 5, 6),
    ]:
        a, b = shape.operands(pool)()
        assert (a.shape, b.shape) == ((shape.rows, shape.inner), (shape.inner, shape.columns))
        assert b.is_contiguous() == (shape.form != "forward")
        assert a.is_contiguous() == (shape.form != "gradient")
    point = products.Shape("narrow", 4, 8, 2).point(0.5)
    assert point.flops_per_s == 2 * 4 * 8 * 2 / 0.5


@pytest.mark.slow
def test_a_quick_measurement_is_whole_and_leaves_the_threads_alone():
    before = torch.get_num_threads()
    told = []
    rates = measure_kernels(1, True, told.append)
    assert torch.get_num_threads() == before
    assert rates.threads == 1
    assert len(told) == 7
    assert KernelRates.model_validate_json(rates.model_dump_json()) == rates
    assert len(rates.matmul) == len({(p.form, p.rows, p.inner, p.columns) for p in rates.matmul}) == 56
    assert {f.work for f in rates.fixed} >= {"forward", "backward", "bind", "head", "prologue", "update"}
    assert {f.experts for f in rates.fixed if f.work == "forward"} == {False, True}
    if experts.route() is not None:
        grid = own.EXPERTS_QUICK
        assert len(rates.experts) == len(grid.rows) * len(grid.hidden) * len(grid.inner) * len(grid.ranks)
    if rows.supported():
        assert {p.kind for p in rates.rows} >= {
            "norm",
            "norm_back",
            "gated",
            "gated_back",
            "rotate",
            "add",
            "loss",
            "cast",
        }
