"""Shares follow the speed that steps show."""

import random

import pytest

from lamella.config import SplitConfig
from lamella.plan.balance import Balancer
from lamella.plan.search import find_split
from lamella.plan.simulate import simulate
from lamella.plan.work import plan_step
from tests.plan.cases import FAST, devices, model, random_rows


class Run:
    """Steps on devices whose true speed changes, as a Balancer sees them."""

    def __init__(self, speeds, kind="tokens", rows=40, noise=0.0, seed=0, asked=None, dequantise=1e12, layers=24):
        self.rng = random.Random(seed)
        self.rows, self.noise = rows, noise
        self.model = model(layers, divisible=0.9, dequantised_bytes=10**9)
        self.planned = devices(*speeds, dequantise=dequantise)
        asked = asked or SplitConfig(kind=kind)
        choice = find_split(self.model, self.planned, FAST, random_rows(self.rng, rows), asked, 4096)
        self.balancer = Balancer(choice.split, self.model, self.planned, FAST, asked, micro_batch_tokens=4096)
        self.splits = [choice.split]

    def step(self, *slow):
        """One step at planned speed over `slow`; returns its timeline."""
        rows = random_rows(self.rng, self.rows)
        split = self.balancer.split
        true = [type(d)(d.name, d.host, d.flops_per_s / x, d.dequantise_bytes_per_s / x, d.read_bytes_per_s)
                for d, x in zip(self.planned, slow, strict=True)]  # fmt: skip
        plan = plan_step(split, self.model, [d.flops_per_s for d in self.planned], rows, 4096)
        timeline = simulate(split, plan, self.model, true, FAST, rows)
        busy = [b * (1 + self.rng.gauss(0, self.noise)) for b in timeline.busy_s]
        self.balancer.observe(plan, rows, busy)
        if (found := self.balancer.propose(rows)) is not None:
            assert found is self.balancer.split
            self.splits.append(found)
        return timeline


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [0, 0.05])
def test_a_device_that_slows_to_half_is_balanced_within_five_steps(noise, seed):
    run = Run((1, 1), noise=noise, seed=seed)
    for _ in range(6):
        run.step(1, 1)
    assert len(run.splits) == 1
    for _ in range(5):
        run.step(1, 2)
    timeline = run.step(1, 2)
    assert max(timeline.idle) <= (0.02 if noise == 0 else 0.12)
    assert run.balancer.split.stages[0].shares == pytest.approx((2 / 3, 1 / 3), abs=0.01 if noise == 0 else 0.03)


def test_and_back_again():
    run = Run((1, 0.6, 0.3))
    run.step(1, 1, 1)
    for _ in range(5):
        run.step(2, 1, 1)
    assert max(run.step(2, 1, 1).idle) <= 0.05
    for _ in range(5):
        run.step(1, 1, 1)
    assert max(run.step(1, 1, 1).idle) <= 0.05


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("speeds", [(1, 1), (1, 0.4), (1, 0.6, 0.3)])
def test_noise_changes_nothing(speeds, seed):
    run = Run(speeds, noise=0.05, seed=seed)
    for _ in range(60):
        run.step(*[1] * len(speeds))
    assert len(run.splits) == 1


def test_one_slow_step_changes_nothing():
    run = Run((1, 1))
    for slow in (1, 1, 1, 3, 1, 1, 2, 1, 1):
        run.step(1, slow)
    assert len(run.splits) == 1


def test_speeds_planned_wrong_are_corrected():
    run = Run((1, 1))
    for _ in range(4):
        run.step(1, 1.6)
    assert max(run.step(1, 1.6).idle) <= 0.03


def test_layers_move_to_the_faster_stage():
    run = Run((1, 1, 1), kind="stages", asked=SplitConfig(stages=(1, 1, 1), groups=8))
    before = run.step(1, 2, 1)
    for _ in range(5):
        run.step(1, 2, 1)
    after = run.step(1, 2, 1)
    sizes = [stage.last - stage.first for stage in run.balancer.split.stages]
    assert sizes[1] < 7 and min(sizes[0], sizes[2]) >= 8
    assert after.step_s < 0.8 * before.step_s


def test_layers_set_by_hand_stay_and_shares_within_a_stage_move():
    run = Run((1, 1, 1), asked=SplitConfig(stages=(2, 1), layers=(16, 8), groups=6))
    for _ in range(5):
        run.step(1, 2, 1)
    first, second = run.balancer.split.stages
    assert (first.last, second.last) == (16, 24)
    assert first.shares == pytest.approx((2 / 3, 1 / 3), abs=0.02)


def test_experts_move():
    run = Run((1, 1), kind="experts")
    for _ in range(5):
        run.step(1, 2)
    assert run.balancer.split.stages[0].way == "experts"
    assert max(run.step(1, 2).idle) <= 0.03


def test_rebalancing_can_be_switched_off():
    run = Run((1, 1), asked=SplitConfig(kind="tokens", rebalance=False))
    for _ in range(8):
        run.step(1, 3)
    assert len(run.splits) == 1


def test_a_rank_without_rows_shows_nothing():
    run = Run((1, 1, 1), rows=1)
    for _ in range(4):
        run.step(1, 1, 1)
    assert [d.flops_per_s for d in run.balancer.devices] == pytest.approx([1e13] * 3)
