"""A step's rows divided."""

import random

import pytest

from lamella.plan.costs import RowCost, row_flops
from lamella.plan.split import Split, Stage
from lamella.plan.work import plan_step
from tests.plan.cases import model, random_rows

MODEL = model(8)
SPLITS = {
    "one": Split((Stage(0, 8, (0,), (1.0,)),)),
    "tokens": Split((Stage(0, 8, (0, 1, 2), (0.5, 0.3, 0.2)),)),
    "experts": Split((Stage(0, 8, (0, 1), (0.7, 0.3), "experts"),)),
    "stages": Split((Stage(0, 5, (0,), (1.0,)), Stage(5, 8, (1,), (1.0,))), 4),
    "composed": Split((Stage(0, 3, (0, 1), (0.6, 0.4)), Stage(3, 5, (2,), (1.0,)), Stage(5, 8, (3, 4), (0.2, 0.8))), 3),
    "experts in stages": Split((Stage(0, 3, (0, 1), (0.6, 0.4), "experts"), Stage(3, 8, (2, 3), (0.5, 0.5))), 4),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_every_row_is_done_once_everywhere(name, count):
    split, rows = SPLITS[name], random_rows(random.Random(count), count)
    plan = plan_step(split, MODEL, [1e12] * 5, rows, 2500)
    assert sorted(i for item in plan.items for i in item) == list(range(count))
    assert sorted(m for group in plan.groups for m in group) == list(range(len(plan.items)))
    assert all(plan.groups) and len(plan.groups) <= split.groups
    for item in plan.items:
        assert list(item) == sorted(item)
        assert len(item) == 1 or sum(rows[i].tokens for i in item) <= 2500
    for stage, owners, actions in zip(split.stages, plan.owners, plan.actions, strict=True):
        for who in owners:
            assert who == stage.ranks if stage.way == "experts" else len(who) == 1 and who[0] in stage.ranks
        assert sorted((a.kind, a.group) for a in actions) == sorted(
            (kind, g) for kind in "FB" for g in range(len(plan.groups))
        )
    assert plan == plan_step(split, MODEL, [1e12] * 5, rows, 2500)


def test_a_single_stage_goes_forward_and_back_once():
    plan = plan_step(SPLITS["tokens"], MODEL, [1e12] * 3, random_rows(random.Random(0), 9), 1000)
    assert [(a.kind, a.group) for a in plan.actions[0]] == [("F", 0), ("B", 0)]


def test_shares_are_met_in_every_stage_although_groups_are_small():
    split, rows = SPLITS["composed"], random_rows(random.Random(1), 60)
    plan = plan_step(split, MODEL, [1e12] * 5, rows, 3000)
    for s, stage in enumerate(split.stages):
        done = dict.fromkeys(stage.ranks, 0.0)
        for item, (rank,) in zip(plan.items, plan.owners[s], strict=True):
            done[rank] += sum(row_flops(MODEL, rows[i], stage.first, stage.last) for i in item)
        total = sum(done.values())
        assert [done[r] / total for r in stage.ranks] == pytest.approx(stage.shares, abs=0.02)


def test_stages_of_like_shares_deal_alike():
    split = Split((Stage(0, 4, (0, 1), (0.7, 0.3)), Stage(4, 8, (2, 3), (0.3, 0.7))), 2)
    plan = plan_step(split, MODEL, [1e12] * 4, random_rows(random.Random(2), 30), 3000)
    assert {(a, b) for (a,), (b,) in zip(*plan.owners, strict=True)} == {(0, 3), (1, 2)}


def test_long_sequences_cost_their_attention():
    costly = model(8, flops_per_pair=1e6)
    rows = [RowCost(2000, 1), *[RowCost(200, 1)] * 10]
    plan = plan_step(Split((Stage(0, 8, (0, 1), (0.5, 0.5)),)), costly, [1e12] * 2, rows, 4000)
    assert [item for item in plan.items if 0 in item] == [(0,)]
    assert sum(owner == plan.owners[0][plan.items.index((0,))] for owner in plan.owners[0]) == 1


def test_fewer_rows_than_ranks():
    split = Split((Stage(0, 8, (0, 1, 2, 3), (0.25,) * 4),))
    plan = plan_step(split, MODEL, [1e12] * 4, [RowCost(10, 2)], 100)
    assert plan.items == ((0,),) and len(plan.owners[0]) == 1 and len(plan.owners[0][0]) == 1
    assert plan_step(split, MODEL, [1e12] * 4, [], 100).items == ()
