"""Steps played through."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from lamella.plan.costs import RowCost, row_flops
from lamella.plan.devices import Device, Link, Links
from lamella.plan.memory import memory_of
from lamella.plan.simulate import simulate
from lamella.plan.split import Split, Stage
from lamella.plan.work import plan_step
from tests.plan.cases import FAST, GB, devices, model, random_rows

NOWHERE = Links(Link(1e18, 0), Link(1e18, 0))


def played(split, cost, machines, rows, links=FAST, micro_batch_tokens=4096, in_flight=None):
    plan = plan_step(split, cost, [d.flops_per_s for d in machines], rows, micro_batch_tokens, in_flight)
    return simulate(split, plan, cost, machines, links, rows)


def tokens(cost, *shares):
    total = sum(shares)
    last = len(cost.layers)
    return Split((Stage(0, last, tuple(range(len(shares))), tuple(x / total for x in shares)),))


def test_one_device_takes_its_flops_dequantising_and_reading():
    cost = model(4, dequantised_bytes=10**9)
    rows = [RowCost(1000, 100), RowCost(50, 5)]
    machine = Device("d", "a", 1e12, 2e9, 1e8, None)
    flops = sum(row_flops(cost, row) for row in rows)
    timeline = played(tokens(cost, 1), cost, [machine], rows)
    assert timeline.step_s == pytest.approx(flops / 1e12 + 2 * 3 * 1e9 / 2e9)  # at each turn a layer stays
    assert timeline.idle == pytest.approx((0.0,))
    # Without room for a layer beside two slots, each pass reads the two layers that are in no slot at the turn: 1 s each.
    small = replace(machine, memory_bytes=int(1e9 + 1050 * (50_000 + 4 * 8192) + 4 * 1.6e6 + 2.5e8))
    timeline = played(tokens(cost, 1), cost, [small], rows)
    assert timeline.read_bytes == (2 * 2 * 10**8,)
    slow = played(tokens(cost, 1), cost, [replace(small, read_bytes_per_s=1e7)], rows)
    assert slow.step_s == pytest.approx(40.0 + slow.busy_s[0] / 2)  # beside the two others nothing is read
    fast = played(tokens(cost, 1), cost, [replace(small, read_bytes_per_s=1e9)], rows)
    assert fast.step_s == pytest.approx(fast.busy_s[0])


@pytest.mark.parametrize("seed", range(5))
def test_two_devices_of_speed_1_and_04(seed):
    """At most 60 % of an even split's time (57.1 % at best), nobody idle for more than 6 %."""
    rows = random_rows(random.Random(seed), 32)
    machines = devices(1, 0.4)
    even = played(tokens(model(), 1, 1), model(), machines, rows)
    uneven = played(tokens(model(), 1, 0.4), model(), machines, rows)
    assert uneven.step_s <= 0.6 * even.step_s
    assert max(uneven.idle) <= 0.06


@pytest.mark.parametrize("seed", range(5))
def test_three_devices_come_within_ten_percent_of_the_ideal(seed):
    rows = random_rows(random.Random(seed), 24)
    machines = devices(1, 0.6, 0.3)
    ideal = sum(row_flops(model(), row) for row in rows) / sum(d.flops_per_s for d in machines)
    assert played(tokens(model(), 1, 0.6, 0.3), model(), machines, rows).step_s <= 1.1 * ideal


def test_a_pipeline_of_equal_stages_takes_what_arithmetic_says():
    cost = model(4, head=0)
    rows = [RowCost(1000, 1)] * 6
    split = Split((Stage(0, 2, (0,), (1.0,)), Stage(2, 4, (1,), (1.0,))), 6)
    one = row_flops(cost, rows[0], 0, 2) / 1e13
    timeline = played(split, cost, devices(1, 1), rows, NOWHERE)
    assert timeline.step_s == pytest.approx(7 * one)
    assert timeline.sent_bytes == {(0, 1): 6000 * 8192, (1, 0): 6000 * 8192}


def test_messages_wait_for_each_other_on_a_link():
    cost = model(2, head=0)
    rows = [RowCost(1000, 1)] * 4
    split = Split((Stage(0, 1, (0,), (1.0,)), Stage(1, 2, (1,), (1.0,))), 4)
    slow = Links(Link(1000 * 8192, 0.5), NOWHERE.remote)  # a second for each group
    timeline = played(split, cost, devices(1, 1), rows, slow, in_flight=4)
    first = timeline.spans[0].end_s
    arrivals = sorted(span.start_s for span in timeline.spans if span.rank == 1 and span.kind == "F")
    assert arrivals == pytest.approx([first + 1.5 + k for k in range(4)])
    hosts = [replace(d, host=h) for d, h in zip(devices(1, 1), "ab", strict=True)]
    assert played(split, cost, hosts, rows, slow, in_flight=4).step_s < timeline.step_s  # another link


def test_gradients_are_reduced_in_a_ring():
    cost = model(4, adapter_bytes=16_000_000)
    rows = [RowCost(1000, 1)] * 4
    links = Links(Link(1e6, 0.25), Link(1e6, 0.25))
    fast = played(tokens(cost, 1, 1), cost, devices(1, 1), rows, NOWHERE)
    slow = played(tokens(cost, 1, 1), cost, devices(1, 1), rows, links)
    nbytes = 4 * 16_000_000 / 4
    assert slow.step_s - fast.step_s == pytest.approx(2 * (nbytes / 2 / 1e6 + 0.25))


def test_experts_divide_what_is_divisible():
    cost = model(4, divisible=0.9, head=0)
    rows = [RowCost(1000, 1)] * 4
    split = Split((Stage(0, 4, (0, 1), (0.75, 0.25), "experts"),))
    whole = sum(row_flops(cost, row) for row in rows)
    timeline = played(split, cost, devices(1, 1), rows, NOWHERE)
    assert timeline.busy_s == pytest.approx([whole * (0.1 + 0.9 * x) / 1e13 for x in (0.75, 0.25)])
    assert timeline.step_s == pytest.approx(max(timeline.busy_s))
    links = Links(Link(1e9, 0.01), Link(1e9, 0.01))
    slow = played(split, cost, devices(1, 1), rows, links)
    # Two a layer forward, four back where it is recomputed, two turns each, one micro-batch; then the gradients.
    ring, gradients = 2 * (4000 * 8192 / 2 / 1e9 + 0.01), 2 * (4 * 400_000 / 2 / 1e9 + 0.01)
    assert slow.step_s - timeline.step_s == pytest.approx(4 * 6 * ring + gradients)
    kept = played(split, replace(cost, recompute=False), devices(1, 1), rows, links)
    assert slow.step_s - kept.step_s == pytest.approx(4 * 2 * ring)


@pytest.mark.parametrize("seed", range(12))
def test_any_composition_runs_to_its_end(seed):
    rng = random.Random(seed)
    cost = model(6, divisible=0.5)
    stages, first, rank = [], 0, 0
    for last in sorted({*rng.sample(range(1, 6), rng.randint(0, 3)), 6}):
        n = rng.randint(1, 3)
        shares = [rng.uniform(0.2, 1) for _ in range(n)]
        ranks = tuple(range(rank, rank + n))
        way = rng.choice(["tokens", "experts"])
        stages.append(Stage(first, last, ranks, tuple(x / sum(shares) for x in shares), way))
        first, rank = last, rank + n
    split = Split(tuple(stages), rng.randint(1, 6))
    machines = devices(*(rng.uniform(0.3, 1) for _ in range(rank)), dequantise=1e10)
    rows = random_rows(rng, rng.randint(1, 20))
    timeline = played(split, cost, machines, rows, micro_batch_tokens=2000)
    assert timeline.step_s == pytest.approx(max(s.end_s for s in timeline.spans), rel=0.05)
    for r in range(rank):
        mine = sorted((s.start_s, s.end_s) for s in timeline.spans if s.rank == r)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(mine))
        assert 0 <= timeline.idle[r] <= 1


def test_memory_by_parts():
    cost = model(4, first=3 * GB, last=2 * GB, dequantised_bytes=7 * 10**8)
    rows = [RowCost(1000, 1), RowCost(500, 1)]
    split = Split((Stage(0, 3, (0,), (1.0,)), Stage(3, 4, (1,), (1.0,))), 2)
    machines = devices(1, 1)
    plan = plan_step(split, cost, [1e13] * 2, rows, 4096, 2)
    a, b = memory_of(split, cost, machines, plan, rows)
    assert a.parts == {
        "packed layers": 3 * 10**8, "embeddings": 3 * GB, "head": 0, "adapter state": 3 * 1_600_000,
        "dequantised layer": 7 * 10**8, "activations": 50_000 * 1000, "boundaries": 1500 * 3 * 8192,
    }  # fmt: skip
    assert b.parts["head"] == 2 * GB and b.parts["embeddings"] == 0
    assert b.parts["boundaries"] == 1000 * 8192  # one group at a time
    short = [replace(machines[0], memory_bytes=a.need - 1), machines[1]]
    (c, _) = memory_of(split, cost, short, plan, rows)
    assert c.layers_held == 0 and c.streamed_bytes == 3 * 10**8 and c.parts["slots"] == 2 * 10**8
    assert c.fits
    unreadable = [replace(short[0], read_bytes_per_s=0), machines[1]]
    assert not memory_of(split, cost, unreadable, plan, rows)[0].fits
    beside = [replace(machines[0], memory_bytes=a.need, fixed_bytes=1), machines[1]]
    (d, _) = memory_of(split, cost, beside, plan, rows)
    assert d.parts["program"] == 1 and d.layers_held < 3, "what a program takes is no room for layers"
