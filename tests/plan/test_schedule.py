"""In which order stages work."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.plan.schedule import held, schedule


def play(orders, forward, back):
    """Each stage does its list in order and blocks until its input has come: seconds, and each stage's busy spans."""
    stages = len(orders)
    at, free = [0] * stages, [0.0] * stages
    came, spans = {}, [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for s, order in enumerate(orders):
            while at[s] < len(order):
                kind, group = order[at[s]]
                if kind == "F" and s > 0:
                    needs = ("F", s - 1, group)
                elif kind == "B":
                    needs = ("F", s, group) if s == stages - 1 else ("B", s + 1, group)
                else:
                    needs = None
                if needs is not None and needs not in came:
                    break
                start = max(free[s], came.get(needs, 0.0))
                free[s] = came[kind, s, group] = start + (forward if kind == "F" else back)[s][group]
                spans[s].append((start, free[s]))
                at[s] += 1
                moved = True
    assert at == [len(order) for order in orders], "deadlock"
    return max(free), spans


times = st.floats(0, 10, allow_nan=False)


@st.composite
def durations(draw):
    stages, groups = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    grid = st.lists(st.lists(times, min_size=groups, max_size=groups), min_size=stages, max_size=stages)
    moves = st.lists(st.lists(times, min_size=groups, max_size=groups), min_size=stages - 1, max_size=stages - 1)
    return draw(grid), draw(grid), draw(st.one_of(st.none(), moves)), draw(st.one_of(st.none(), st.integers(1, 10)))


@given(durations())
@settings(max_examples=150, deadline=None)
def test_blocking_receives_never_deadlock(given_times):
    forward, back, transfers, limit = given_times
    orders = schedule(forward, back, limit, transfers)
    play(orders, forward, back)
    for s, order in enumerate(orders):
        assert sorted(order) == sorted((kind, g) for kind in "FB" for g in range(len(forward[0])))
        assert all(order.index(("F", g)) < order.index(("B", g)) for g in range(len(forward[0])))
        assert [g for kind, g in order if kind == "F"] == list(range(len(forward[0])))
        if limit is not None:
            assert max(map(len, held(order))) <= max(1, limit - s)


@pytest.mark.parametrize("jitter", [0, 0.1])
@pytest.mark.parametrize(
    ("stages", "bottleneck"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (4, 2), (4, 3)]
)
def test_the_bottleneck_stage_never_waits_with_enough_groups(stages, bottleneck, jitter):
    rng = random.Random(1)
    forward = [
        [(1.3 if s == bottleneck else 1.0) * (1 + rng.uniform(-jitter, jitter)) for _ in range(4 * stages)]
        for s in range(stages)
    ]
    back = [[2 * f for f in row] for row in forward]
    _, spans = play(schedule(forward, back), forward, back)
    waits = [b[0] - a[1] for a, b in pairwise(spans[bottleneck])]
    assert sum(waits) == pytest.approx(0, abs=1e-9)


def test_one_forward_one_backward_holds_as_few_groups_as_stages():
    orders = schedule([[1.0] * 8] * 4, [[2.0] * 8] * 4)
    assert [max(map(len, held(order))) for order in orders] == [4, 3, 2, 1]


def test_two_stages_take_what_arithmetic_says():
    orders = schedule([[1.0] * 6] * 2, [[2.0] * 6] * 2)
    seconds, _ = play(orders, [[1.0] * 6] * 2, [[2.0] * 6] * 2)
    assert seconds == pytest.approx(6 * 3 + 3)  # all groups on one stage, and one group once more to fill and drain


@pytest.mark.parametrize("seed", range(5))
def test_slow_links_are_covered_by_more_groups_in_flight(seed):
    rng = random.Random(seed)
    forward, back = [[1.0] * 10] * 2, [[2.0] * 10] * 2
    slow = [[rng.uniform(1.0, 1.5)] * 10]
    few = max(map(len, held(schedule(forward, back)[0])))
    more = max(map(len, held(schedule(forward, back, None, slow)[0])))
    assert more > few
