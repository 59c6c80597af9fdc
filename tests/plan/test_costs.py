"""What rows cost."""

import pytest

from lamella.plan.costs import CostTable, ModelCost, RowCost, row_flops, visible_pairs
from tests.plan.cases import layer


@pytest.mark.parametrize(("tokens", "window"), [(1, None), (7, None), (7, 3), (7, 7), (7, 9), (1, 1)])
def test_pairs_are_those_that_can_be_counted(tokens, window):
    counted = sum(1 for q in range(tokens) for k in range(q + 1) if window is None or q - k < window)
    assert visible_pairs(tokens, window) == counted


def test_layers_add_up_and_the_head_belongs_to_the_last():
    model = ModelCost(
        (layer(), layer(window=16, flops_per_pair=5e6), layer(flops_per_token=3e9)), head_flops_per_label=7.0
    )
    row = RowCost(100, 10)
    whole = row_flops(model, row)
    assert whole == pytest.approx(row_flops(model, row, 0, 1) + row_flops(model, row, 1, 2) + row_flops(model, row, 2))
    assert row_flops(model, row, 2, 3) == pytest.approx(100 * 3e9 + 5050 * 1e3 + 70)
    windowed = visible_pairs(100, 16) * 5e6
    assert row_flops(model, row, 1, 2) == pytest.approx(100 * 1e9 + windowed)


def test_forward_and_back_add_up_and_the_head_is_forward():
    model = ModelCost((layer(forward_share=0.25),) * 2, head_flops_per_label=1e6)
    table, row = CostTable(model), RowCost(100, 10)
    forward, back = table.passes([row])
    assert forward + back == pytest.approx(row_flops(model, row))
    assert forward - 10 * 1e6 == pytest.approx((forward + back - 10 * 1e6) / 4)
    assert table.before([row])[-1] == pytest.approx(row_flops(model, row) - 10 * 1e6)
