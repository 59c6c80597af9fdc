import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella.data.batching import micro_batches
from lamella.data.encode import EncodedRow
from lamella.data.steps import StepPlanner, epoch_order, share_rows


def make_rows(lengths):
    return [
        EncodedRow(i, array("i", range(n)), bytes([0] + [1] * (n - 1)), (Path("a"), i)) for i, n in enumerate(lengths)
    ]


@given(st.integers(1, 200), st.integers(-5, 2**70), st.integers(0, 50))
def test_order_is_a_permutation(rows, seed, epoch):
    assert sorted(epoch_order(rows, seed, epoch)) == list(range(rows))


def test_order_depends_on_seed_and_epoch_and_nothing_else():
    assert epoch_order(60, 0, 0) != epoch_order(60, 0, 1) != epoch_order(60, 1, 0)
    code = "from lamella.data.steps import epoch_order; print(epoch_order(60, 7, 3))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert other.strip() == str(epoch_order(60, 7, 3))


def test_b35_steps_are_found_without_replay():
    settings = {"seed": 0, "rows_per_step": 4, "tokens_per_step": 1}
    unbroken = StepPlanner([5] * 60, **settings)
    steps = [unbroken.step(k) for k in range(45)]
    assert unbroken.total_steps(3) == 45
    for resume in (15, 20, 44, 0):
        fresh = StepPlanner([5] * 60, **settings)
        assert [fresh.step(k) for k in range(resume, 45)] == steps[resume:]
    for epoch in range(3):
        rows = [r for s in steps if s.epoch == epoch for r in s.rows]
        assert sorted(rows) == list(range(60))
    assert steps[20].index == 20
    assert steps[20].first == 20


@given(st.lists(st.integers(2, 50), min_size=1, max_size=40), st.integers(1, 120), st.integers(0, 5))
def test_token_budget_steps_cover_each_epoch_once(lengths, budget, seed):
    planner = StepPlanner(lengths, seed=seed, rows_per_step=None, tokens_per_step=budget)
    total = planner.total_steps(2)
    steps = [planner.step(k) for k in range(total)]
    assert [s.index for s in steps] == list(range(total))
    for epoch in (0, 1):
        assert sorted(r for s in steps if s.epoch == epoch for r in s.rows) == list(range(len(lengths)))
    for step in steps:
        assert len(step.rows) == 1 or sum(lengths[r] for r in step.rows) <= budget
    assert StepPlanner(lengths, seed=seed, rows_per_step=None, tokens_per_step=budget).step(total - 1) == steps[-1]


@pytest.mark.parametrize(("epochs", "steps"), [(1, 15), (0.5, 8), (2.2, 33), (3.0, 45), (0.001, 1)])
def test_parts_of_an_epoch(epochs, steps):
    assert StepPlanner([1] * 60, seed=0, rows_per_step=4, tokens_per_step=1).total_steps(epochs) == steps


@given(st.lists(st.integers(2, 30), min_size=1, max_size=20), st.integers(1, 60))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, budget):
    rows = make_rows(lengths)
    batches = micro_batches(rows, budget)
    assert sorted(i for b in batches for i in b.row_ids) == list(range(len(rows)))
    assert all(b.tokens <= budget or len(b.row_ids) == 1 for b in batches)
    assert sum(b.score_tokens.numel() for b in batches) == sum(r.label_tokens for r in rows)
    again = micro_batches(rows[::-1], budget)
    assert [b.row_ids for b in again] == [b.row_ids for b in batches]


@given(st.lists(st.integers(1, 30), max_size=20), st.lists(st.floats(0.1, 5), min_size=1, max_size=5))
def test_shares_split_rows(lengths, shares):
    shares = [*shares, 0.0]
    split = share_rows(lengths, shares)
    assert sorted(i for rows in split for i in rows) == list(range(len(lengths)))
    assert split[-1] == []


def test_shares_follow_speed():
    split = share_rows([10] * 40, [3, 1])
    assert [len(rows) for rows in split] == [30, 10]
    assert share_rows([10], [1, 1]) == [[0], []]
