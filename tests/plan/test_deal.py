"""Rows dealt to ranks."""

import random
from itertools import product

import pytest

from lamella.plan.deal import deal


def largest(costs, shares, owner, before=None):
    loads = list(before or [0.0] * len(shares))
    for cost, rank in zip(costs, owner, strict=True):
        loads[rank] += cost
    return max(load / share for load, share in zip(loads, shares, strict=True) if share > 0)


def optimum(costs, shares, before=None):
    return min(largest(costs, shares, owner, before) for owner in product(range(len(shares)), repeat=len(costs)))


@pytest.mark.parametrize("seed", range(30))
def test_few_rows_are_dealt_as_well_as_can_be(seed):
    rng = random.Random(seed)
    ranks = rng.choice([2, 3])
    shares = [rng.choice([1, 0.6, 0.4, 0.3]) for _ in range(ranks)]
    costs = [rng.uniform(1, 20) ** 1.5 for _ in range(rng.randint(1, 8))]
    before = [rng.uniform(0, 10) for _ in range(ranks)] if seed % 2 else None
    found = largest(costs, shares, deal(costs, shares, before), before)
    assert found <= optimum(costs, shares, before) * 1.002


@pytest.mark.parametrize("shares", [(1, 0.4), (1, 0.6, 0.3), (1, 1, 1, 1), (8, 7, 6, 5, 4, 3, 2, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_many_rows_come_within_two_percent_of_the_bound(shares, seed):
    rng = random.Random(seed)
    costs = [rng.uniform(1, 20) for _ in range(16 * len(shares))]
    assert largest(costs, shares, deal(costs, shares)) <= sum(costs) / sum(shares) * 1.02


def test_a_rank_without_share_gets_nothing():
    assert set(deal([1.0] * 9, [1, 0, 2])) == {0, 2}


def test_no_rows_and_fewer_rows_than_ranks():
    assert deal([], [1, 2]) == []
    assert len(set(deal([3.0, 3.0], [1, 1, 1, 1]))) == 2


def test_dealing_repeats():
    rng = random.Random(3)
    costs = [rng.uniform(1, 20) for _ in range(40)]
    assert len({tuple(deal(costs, [1, 0.6, 0.3])) for _ in range(5)}) == 1
