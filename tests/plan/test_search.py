"""The search for a split."""

import random
from itertools import combinations, permutations

import numpy as np
import pytest

from lamella.config import SplitConfig
from lamella.errors import UserError
from lamella.plan.costs import ModelCost, RowCost
from lamella.plan.devices import Device, Link, Links
from lamella.plan.explain import explain
from lamella.plan.fluid import Fluid, Team, cut, in_pipeline, level_shares
from lamella.plan.memory import in_flight_of
from lamella.plan.schedule import schedule
from lamella.plan.search import find_split
from lamella.plan.simulate import simulate
from lamella.plan.split import Split, Stage
from lamella.plan.teams import find_teams
from lamella.plan.work import plan_step
from tests.plan.cases import FAST, GB, devices, layer, model, random_rows
from tests.plan.test_schedule import play


def cuts(layers, stages):
    return ([*ends, layers] for ends in combinations(range(1, layers), stages - 1))


def ordered_teams(ranks):
    """All ways to divide ranks into an ordered list of sets."""
    if not ranks:
        yield []
    for size in range(1, len(ranks) + 1):
        for first in combinations(ranks, size):
            for rest in ordered_teams([r for r in ranks if r not in first]):
                yield [first, *rest]


def hosts_kept_together(teams, machines):
    hosts = [machines[r].host for team in teams for r in team]
    inside = all(len({machines[r].host for r in team}) == 1 for team in teams)
    return inside and len([h for k, h in enumerate(hosts) if k == 0 or hosts[k - 1] != h]) == len(set(hosts))


def unlike(rng, count, layers, hosts="aab"):
    cost = ModelCost(tuple(layer(flops_per_token=rng.uniform(1, 4) * 1e9, packed_bytes=rng.randint(1, 4) * 10**8,
                                 dequantised_bytes=10**9, divisible=0.8) for _ in range(layers)), 1e9, GB // 2, GB)  # fmt: skip
    machines = [Device(f"d{k}", hosts[k % len(hosts)], rng.uniform(0.3, 1) * 1e13, rng.uniform(1, 5) * 1e11, 5e9,
                       rng.choice([None, int(rng.uniform(2.5, 6) * GB)])) for k in range(count)]  # fmt: skip
    machines.sort(key=lambda d: d.host)
    return cost, machines


@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("seed", range(8))
def test_cuts_are_as_good_as_every_cut_tried(seed, groups):
    rng = random.Random(seed)
    layers, stages = 8, rng.randint(2, 4)
    matrices = [np.array([[rng.uniform(1, 9) * (b - a) if a < b and rng.random() < 0.9 else np.inf
                           for b in range(layers + 1)] for a in range(layers + 1)]) for _ in range(stages)]  # fmt: skip
    best = np.inf
    for ends in cuts(layers, stages):
        times = [float(m[a, b]) for m, a, b in zip(matrices, [0, *ends[:-1]], ends, strict=True)]
        best = min(best, max(times) if groups is None else in_pipeline(times, groups))
    found = cut(matrices, groups)
    assert (np.inf if found is None else found[0]) == best


@pytest.mark.parametrize("seed", range(8))
def test_a_pipeline_of_equal_groups_takes_what_is_estimated(seed):
    rng = random.Random(seed)
    stages, groups = rng.randint(2, 4), 12
    times = [rng.uniform(8, 12) for _ in range(stages)]
    forward = [[t / groups / 3] * groups for t in times]
    back = [[2 * t / groups / 3] * groups for t in times]
    seconds, _ = play(schedule(forward, back), forward, back)
    assert in_pipeline(times, groups) <= seconds * (1 + 1e-9)
    assert seconds <= 1.03 * in_pipeline(times, groups)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_teams_are_as_good_as_every_order_tried(seed, experts):
    cost, machines = unlike(random.Random(seed), 4, 6)
    fluid = Fluid(cost, machines, FAST, random_rows(random.Random(seed), 16), 4096)
    best = {}
    for teams in ordered_teams(list(range(4))):
        if len(teams) > 1 and hosts_kept_together(teams, machines):
            matrices = []
            for team in teams:
                ways = ["tokens", "experts"] if experts and len(team) > 1 else ["tokens"]
                matrices.append(np.minimum.reduce([fluid.seconds(Team(team, way), 4, 1) for way in ways]))
            found = cut(matrices, 4)
            if found is not None:
                best[len(teams)] = min(best.get(len(teams), np.inf), found[0])
    found = [f for f in find_teams(fluid, 4, experts) if sorted(r for t in f.teams for r in t.ranks) == [0, 1, 2, 3]]
    assert {len(f.teams): f.seconds for f in found} == best
    for f in found:
        again = cut([fluid.seconds(team, 4, 1) for team in f.teams], 4)
        assert again[0] == f.seconds


@pytest.mark.parametrize("seed", range(4))
def test_a_pipeline_comes_within_two_percent_of_all_pipelines_played(seed):
    cost, machines = unlike(random.Random(seed), 3, 7, hosts="a")
    rows = random_rows(random.Random(seed), 18)
    choice = find_split(cost, machines, FAST, rows, SplitConfig(kind="stages", groups=6), 4096)
    fluid = Fluid(cost, machines, FAST, rows, 4096)
    best = np.inf
    for teams in ordered_teams([0, 1, 2]):
        for ends in cuts(7, len(teams)) if len(teams) > 1 else ():
            if not np.isfinite(fluid.estimate([Team(t) for t in teams], ends, 6)):
                continue
            split = fluid.split([Team(t) for t in teams], ends, 6)
            plan = plan_step(split, cost, [d.flops_per_s for d in machines], rows, 4096, devices=machines, links=FAST)
            best = min(best, simulate(split, plan, cost, machines, FAST, rows).step_s)
    assert choice.timeline.step_s <= 1.02 * best


def test_shares_level_fixed_and_divided_work():
    assert level_shares([0, 0], [1, 2.5]) == pytest.approx((1 / 1.4, 0.4 / 1.4))
    fixed, whole = [1.0, 0.5, 4.0], [10.0, 20.0, 5.0]
    shares = level_shares(fixed, whole)
    ends = [f + w * x for f, w, x in zip(fixed, whole, shares, strict=True)]
    assert sum(shares) == pytest.approx(1) and max(ends) == pytest.approx(min(ends))
    shares = level_shares([0.0, 9.0], [4.0, 4.0])  # the second would still dequantise when the first has done it all
    assert shares == (1.0, 0.0)
    assert min(level_shares([0.0, 9.0], [4.0, 4.0], keep=True)) > 0
    assert level_shares([0, 0, 0], [1, 1, 2], [0.2, 1, 1]) == pytest.approx((0.2, 1.6 / 3, 0.8 / 3))
    assert level_shares([0, 0], [1, 1], [0.3, 0.1]) == pytest.approx((0.75, 0.25))


def test_a_fast_device_with_little_memory_gets_what_it_has_room_for():
    """Boundaries of all rows: 6 GB; the fast card has room for a third of them."""
    rows = [RowCost(1000, 100)] * 32
    cost = model(24, boundary_bytes_per_token=8192)
    machines = [Device("fast", "a", 2e13, 1e12, 25e9, 2_500_000_000), Device("large", "a", 1e13, 1e12, 25e9, 16 * GB)]
    for kind in ("tokens", "auto"):
        choice = find_split(cost, machines, FAST, rows, SplitConfig(kind=kind), 2000)
        assert all(m.fits for m in choice.memory)
        if kind == "tokens":
            assert 0.25 < choice.split.stages[0].shares[0] < 0.4


@pytest.mark.parametrize("speeds", [(1, 0.4), (1, 0.6, 0.3)])
def test_unlike_devices_get_unlike_shares(speeds):
    rows = random_rows(random.Random(0), 32)
    choice = find_split(model(), devices(*speeds), FAST, rows, SplitConfig(), 4096)
    (stage,) = choice.split.stages
    assert stage.way == "tokens" and stage.shares == pytest.approx([v / sum(speeds) for v in speeds])
    assert max(choice.timeline.idle) <= 0.06


def test_all_kinds_can_be_chosen():
    """Tokens where links are slow and memory is plenty; stages where nothing can be streamed; experts with few long rows."""
    rows = random_rows(random.Random(0), 32)
    assert find_split(model(), devices(1, 1), FAST, rows, SplitConfig(), 4096).split.stages[0].way == "tokens"
    small = devices(1, 1, memory=6 * GB, read=0)
    choice = find_split(model(24, packed_bytes=4 * 10**8), small, FAST, rows, SplitConfig(), 4096)
    assert len(choice.split.stages) == 2 and all(m.fits for m in choice.memory)
    single = [RowCost(4000, 100)]
    choice = find_split(model(divisible=0.95), devices(1, 0.5), FAST, single, SplitConfig(), 4096)
    assert choice.split.stages[0].way == "experts" and choice.split.stages[0].shares[0] > 0.6


def test_stages_across_hosts_and_tokens_within():
    """Two hosts of two devices, a thin link between them, and a large adapter."""
    machines = [Device(f"{h}{k}", h, 1e13, 1e12, 25e9) for h in "ab" for k in range(2)]
    links = Links(Link(50e9, 1e-6), Link(2e8, 1e-4))
    rows = random_rows(random.Random(0), 48)
    big = model(adapter_bytes=400_000_000, boundary_bytes_per_token=512)
    choice = find_split(big, machines, links, rows, SplitConfig(), 4096)
    hosts = [{machines[r].host for r in stage.ranks} for stage in choice.split.stages]
    assert all(len(h) == 1 for h in hosts) and len(hosts) > 1
    whole = [r for r in choice.rejected if len(r.split.stages) == 1]
    assert whole and all(r.step_s > choice.timeline.step_s for r in whole)


@pytest.mark.parametrize("alike", [True, False])
def test_a_large_model_on_eight_devices(alike):
    cost = model(94, packed_bytes=1_284_000_000, dequantised_bytes=4_980_000_000, divisible=0.97, first=GB, last=GB)
    machines = [Device(f"d{k}", "a", (1 if alike else 1 + k / 3) * 1e14, 5e11, 20e9, (48 if alike else 24 + 8 * k) * GB)
                for k in range(8)]  # fmt: skip
    choice = find_split(cost, machines, FAST, random_rows(random.Random(0), 32), SplitConfig(), 8192)
    assert len({r for stage in choice.split.stages for r in stage.ranks}) == 8
    assert all(m.fits for m in choice.memory)
    assert all(r.step_s is None or r.step_s >= choice.timeline.step_s for r in choice.rejected)


def test_fewer_layers_than_hosts():
    machines = [Device(f"d{k}", f"h{k}", 1e13, 1e12, 25e9) for k in range(3)]
    choice = find_split(model(2), machines, FAST, random_rows(random.Random(0), 12), SplitConfig(kind="stages"), 4096)
    assert len(choice.split.stages) == 2 and {r for s in choice.split.stages for r in s.ranks} == {0, 1, 2}


def test_experts_are_divided_by_memory_where_reading_is_slow():
    """24 layers of 1 GB; the faster card has room for a quarter of them, and reads slowly."""
    machines = [Device("fast", "a", 2e13, 1e12, 1e8, 9 * GB), Device("large", "a", 1e13, 1e12, 1e8, 40 * GB)]
    cost = model(24, packed_bytes=GB, divisible=1.0, boundary_bytes_per_token=2048)
    rows = [RowCost(1000, 100)] * 4
    choice = find_split(cost, machines, FAST, rows, SplitConfig(kind="experts"), 4000)
    assert not any(m.streamed_bytes for m in choice.memory)
    assert 0.25 < choice.split.stages[0].shares[0] < 0.4


def test_more_than_eight_unlike_devices():
    machines = [Device(f"d{k}", "ab"[k // 6], (1 + k / 7) * 1e13, 5e11, 20e9, (8 + k) * GB) for k in range(12)]
    rows = random_rows(random.Random(0), 40)
    choice = find_split(model(40), machines, FAST, rows, SplitConfig(kind="stages"), 4096)
    assert sorted(r for stage in choice.split.stages for r in stage.ranks) == list(range(12))


class TestCards:
    """B63: cards of 8, 24 and 24 GB, 40 layers of 0.9 GB, embeddings and head of 2 GB; no layer can be streamed."""

    cost = model(40, packed_bytes=900_000_000, first=2 * GB, last=2 * GB, adapter_bytes=16_000_000,
                 boundary_bytes_per_token=100_000, activation_bytes_per_token=2e6)  # fmt: skip
    rows = (RowCost(1000, 100), RowCost(1000, 100))

    def cards(self, *sizes):
        return [Device(f"card{k}", "a", 1e13, 1e12, 0, size * GB) for k, size in enumerate(sizes)]

    def test_the_same_plan_five_times_and_within_each_card(self):
        choices = [find_split(self.cost, self.cards(8, 24, 24), FAST, self.rows, SplitConfig(), 1000) for _ in range(5)]
        assert len({(c.split, c.plan) for c in choices}) == 1
        for memory, size in zip(choices[0].memory, (8, 24, 24), strict=True):
            assert memory.need <= size * GB and memory.streamed_bytes == 0
            assert memory.parts["boundaries"] > 0 and memory.parts["activations"] > 0
        held = [m.parts["packed layers"] for m in choices[0].memory]
        assert sum(held) == 40 * 900_000_000 and min(held) == held[0]
        head = choices[0].split.stages[-1].ranks
        assert [r for r, m in enumerate(choices[0].memory) if m.parts["head"]] == list(head)

    def test_what_cannot_fit_says_what_each_card_needs_and_has(self):
        with pytest.raises(UserError) as error:
            find_split(self.cost, self.cards(2, 2), FAST, self.rows, SplitConfig(), 1000)
        text = str(error.value)
        assert text.count("have 2 GB") >= 4 and "card0: need" in text and "card1: need" in text
        assert "packed layers" in text and "head 2 GB" in text

    def test_streaming_helps_where_it_is_possible(self):
        cards = [Device(f"card{k}", "a", 1e13, 1e12, 25e9, 12 * GB) for k in range(2)]
        choice = find_split(self.cost, cards, FAST, self.rows, SplitConfig(), 1000)
        assert any(m.streamed_bytes for m in choice.memory) and all(m.fits for m in choice.memory)


class TestMixedCards:
    """B64: one rank three times as slow, memory 1:2, 30 rows."""

    rows = tuple(random_rows(random.Random(0), 30))

    def test_the_limiting_device_and_the_shares_are_stated(self):
        machines = [Device("slow", "a", 1e13 / 3, 1e12, 25e9, 4 * GB), Device("fast", "a", 1e13, 1e12, 25e9, 8 * GB)]
        choice = find_split(model(), machines, FAST, self.rows, SplitConfig(), 4096)
        text = "\n".join(explain(choice, machines))
        assert "25.0% of the sequences" in text and "75.0% of the sequences" in text
        assert "limited by slow (computing)" in text or "limited by fast (computing)" in text
        assert "leave" not in text

    def test_leaving_a_device_out_is_suggested_where_that_is_faster(self):
        machines = [Device("slow", "a", 1e12, 1e9, 25e9, 8 * GB), Device("fast", "b", 1e13, 1e12, 25e9, 16 * GB)]
        thin = Links(Link(50e9, 1e-6), Link(1e6, 1e-2))
        choice = find_split(model(dequantised_bytes=GB), machines, thin, self.rows, SplitConfig(), 4096)
        assert {r for stage in choice.split.stages for r in stage.ranks} == {0, 1}
        assert any(line.startswith("leave slow out of [[devices]]") for line in choice.suggestions)
        alone = [r for r in choice.rejected if [s.ranks for s in r.split.stages] == [(1,)]]
        assert alone and alone[0].step_s < choice.timeline.step_s
        assert any("leave slow out" in line for line in explain(choice, machines))

    def test_where_only_the_larger_card_has_room_the_error_says_so(self):
        machines = [Device("small", "a", 1e13, 1e12, 25e9, 10**8), Device("large", "a", 1e13, 1e12, 25e9, 8 * GB)]
        with pytest.raises(UserError, match="leave small out"):
            find_split(model(), machines, FAST, self.rows, SplitConfig(kind="tokens"), 4096)


def test_memory_is_stated_by_part_and_refused_when_over():
    """B68: adapter state, slots and copies are counted; the frozen base has neither gradient nor moments."""
    machines = devices(1, 1, memory=2 * GB)
    rows = random_rows(random.Random(0), 8)
    choice = find_split(model(dequantised_bytes=2 * 10**8), machines, FAST, rows, SplitConfig(kind="tokens"), 2000)
    for memory in choice.memory:
        assert {"packed layers", "slots", "adapter state", "dequantised layer", "activations", "boundaries"} <= set(
            memory.parts
        )
        assert memory.parts["adapter state"] == 24 * 1_600_000 and memory.need <= 2 * GB
    text = "\n".join(explain(choice, machines))
    assert "adapter state 38.4 MB" in text and "layers stay" in text
    large = model(dequantised_bytes=2 * 10**8, adapter_bytes=100_000_000)
    with pytest.raises(UserError) as error:
        find_split(large, machines, FAST, rows, SplitConfig(kind="tokens"), 2000)
    assert "adapter state 2.4 GB" in str(error.value) and "have 2 GB" in str(error.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(kind="stages", layers=(10, 10)), "sum to 20, and the model has 24 layers"),
        (dict(kind="stages", layers=(24,)), "are for 1 stages, and there are 2"),
        (dict(kind="stages", layers=(24, 0)), "every stage needs a layer"),
        (dict(stages=(2, 1)), "have 3 devices, and there are 2"),
        (dict(stages=(2, 0)), "every stage needs a device"),
        (dict(shares=(1.0,)), "are 1, and there are 2 devices"),
        (dict(shares=(1.0, 0.0)), "0 is not positive"),
        (dict(shares=(1.0, -1.0)), "-1 is not positive"),
        (dict(kind="experts"), "none that can be divided"),
        (dict(kind="tokens", stages=(1, 1)), 'goes with kind = "stages"'),
        (dict(kind="tokens", groups=2), 'goes with kind = "stages"'),
    ],
)
def test_settings_that_cannot_be(asked, message):
    with pytest.raises(UserError) as error:
        find_split(model(), devices(1, 1), FAST, [RowCost(10, 1)], SplitConfig(**asked), 4096)
    assert message in str(error.value) and error.value.fix


def test_settings_that_cannot_be_on_these_devices():
    for kind in ("stages", "experts"):
        with pytest.raises(UserError, match="two devices or more"):
            find_split(model(divisible=0.5), devices(1), FAST, [RowCost(10, 1)], SplitConfig(kind=kind), 4096)
    with pytest.raises(UserError, match="3 stages, and the model has 2 layers"):
        find_split(model(2), devices(1, 1, 1), FAST, [RowCost(10, 1)], SplitConfig(stages=(1, 1, 1)), 4096)


@pytest.mark.parametrize(
    ("asked", "stages", "groups"),
    [
        (dict(kind="tokens", shares=(3.0, 1.0, 1.0)), [Stage(0, 24, (0, 1, 2), (0.6, 0.2, 0.2))], 1),
        (dict(layers=(12, 8, 4), groups=5), [Stage(0, 12, (0,), (1.0,)), Stage(12, 20, (1,), (1.0,)), Stage(20, 24, (2,), (1.0,))], 5),
        (dict(stages=(2, 1), layers=(16, 8), shares=(1.0, 3.0, 7.0), groups=4),
         [Stage(0, 16, (0, 1), (0.25, 0.75)), Stage(16, 24, (2,), (1.0,))], 4),
        (dict(kind="experts", shares=(2.0, 1.0, 1.0)), [Stage(0, 24, (0, 1, 2), (0.5, 0.25, 0.25), "experts")], 1),
        (dict(kind="experts", stages=(2, 1), layers=(16, 8), groups=2, shares=(1.0, 1.0, 1.0)),
         [Stage(0, 16, (0, 1), (0.5, 0.5), "experts"), Stage(16, 24, (2,), (1.0,))], 2),
    ],
)  # fmt: skip
def test_what_is_set_by_hand_is_taken(asked, stages, groups):
    rows = random_rows(random.Random(0), 20)
    choice = find_split(model(divisible=0.9), devices(1, 0.6, 0.3), FAST, rows, SplitConfig(**asked), 4096)
    assert choice.split == Split(tuple(stages), groups)


def test_stages_set_by_hand_get_their_layers():
    rows = random_rows(random.Random(0), 20)
    choice = find_split(model(), devices(1, 0.5), FAST, rows, SplitConfig(stages=(1, 1)), 4096)
    a, b = choice.split.stages
    assert (a.ranks, b.ranks) == ((0,), (1,)) and 14 <= a.last <= 18 and b.last == 24


def test_later_steps_keep_to_the_groups_in_flight_that_memory_was_reckoned_with():
    rng = random.Random(0)
    machines = devices(1, 0.9, 1.1, memory=3 * GB)
    cost = model(24, boundary_bytes_per_token=16384)
    asked = SplitConfig(kind="stages", groups=9)
    choice = find_split(cost, machines, FAST, random_rows(rng, 27), asked, 4096)
    assert choice.in_flight is not None and all(m.fits for m in choice.memory)
    for _ in range(5):
        rows = random_rows(rng, 27)
        plan = plan_step(choice.split, cost, [d.flops_per_s for d in machines], rows, 4096, choice.in_flight)
        assert in_flight_of(plan) <= choice.in_flight
    again = plan_step(choice.split, cost, [d.flops_per_s for d in machines], random_rows(rng, 27), 4096, 1)
    assert in_flight_of(again) == 1


def test_one_device_and_one_row():
    choice = find_split(model(), devices(1), FAST, [RowCost(100, 1)], SplitConfig(), 4096)
    assert choice.split == Split((Stage(0, 24, (0,), (1.0,)),)) and explain(choice, devices(1))
    choice = find_split(model(), devices(1, 1, 1, 1), FAST, [RowCost(100, 1)], SplitConfig(), 4096)
    assert choice.timeline.step_s > 0


def test_every_order_is_tried_that_keeps_hosts_together():
    """The helper that the other tests rest on."""
    machines = [Device(str(k), h, 1, 1, 1) for k, h in enumerate("aab")]
    orders = [[*map(list, p)] for p in permutations([(0,), (1,), (2,)]) if hosts_kept_together(p, machines)]
    assert len(orders) == 4 and [[0], [2], [1]] not in orders
