"""Lists of pieces played through: cases worked out by hand, and what holds for every list."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.forecast.events import fill, play
from lamella.forecast.items import Item


def compute(seconds, rank=0, after=(), kind="forward", name="forward 0"):
    return Item(kind, name, rank, "compute", seconds, after=tuple(after))


def load(nbytes, rank=0, after=(), links=("disk",), lane="read", kind="load", seconds=0.0, **more):
    return Item(kind, "layer 0", rank, lane, seconds, nbytes=nbytes, after=tuple(after), links=tuple(links), **more)


def test_a_lane_takes_its_pieces_in_order():
    played = play([compute(2), compute(3), compute(1, rank=1), compute(1, after=(2,))], {})
    assert played.start_s == (0, 2, 0, 5)
    assert played.step_s == 6
    assert played.seconds == {0: {"forward": 6}, 1: {"forward": 1}}
    assert played.busy == {0: 1.0, 1: pytest.approx(1 / 6)}
    assert played.idle[1] == pytest.approx(5 / 6)


def test_a_later_piece_does_not_overtake_one_that_waits():
    played = play([compute(5, rank=1), compute(1, after=(0,)), compute(1)], {})
    assert played.start_s == (0, 5, 6)
    assert played.wait_s[0] == {"rank 1": 5}


def test_compute_bound():
    """Reading goes beside computing: the first read shows, the others hide."""
    items, n = [], 5
    for i in range(n):
        items.append(load(100, after=(2 * i - 3,) if i >= 2 else ()))
        items.append(compute(3, after=(2 * i,)))
    played = play(items, {"disk": 100})
    assert played.step_s == pytest.approx(1 + 3 * n)
    assert played.wait_s[0] == {"disk": pytest.approx(1)}
    assert played.bottleneck[0].what == "compute of rank 0"
    assert played.bottleneck[0].seconds == pytest.approx(3 * n)


def test_disk_bound():
    items, n = [], 5
    for i in range(n):
        items.append(load(100, after=(2 * i - 3,) if i >= 2 else ()))
        items.append(compute(3, after=(2 * i,)))
    played = play(items, {"disk": 20})
    assert played.step_s == pytest.approx(5 * n + 3)
    assert played.wait_s[0]["disk"] == pytest.approx(5 + 2 * (n - 1))
    assert (played.bottleneck[0].what, played.bottleneck[0].seconds) == ("disk", pytest.approx(5 * n))
    assert played.links["disk"].nbytes == 100 * n
    assert played.links["disk"].share == pytest.approx(5 * n / (5 * n + 3))


def test_two_devices_on_one_root_copy_at_half_rate():
    links = {"card 0": 10.0, "card 1": 10.0, "root": 10.0}
    both = [load(100, r, links=(f"card {r}", "root"), lane="copy", kind="copy") for r in range(2)]
    assert play(both[:1], links).step_s == pytest.approx(10)
    assert play(both, links).step_s == pytest.approx(20)
    # The second begins when the first is half done, at 5 s: both at half rate until the first ends at 15, then 50 bytes are left.
    late = play([both[0], compute(5, rank=1), both[1]._replace(after=(1,))], links)
    assert late.end_s == pytest.approx((15, 5, 20))


def test_what_one_leaves_of_a_link_another_takes():
    rates = fill([("slow", "root"), ("root",)], {"slow": 2.0, "root": 10.0})
    assert rates == {("slow", "root"): (2.0, "slow"), ("root",): (8.0, "root")}
    rates = fill([("a", "b"), ("a",), ("b",), ("b",)], {"a": 10.0, "b": 12.0})
    assert rates == {("a", "b"): (4.0, "b"), ("a",): (6.0, "a"), ("b",): (4.0, "b")}


def test_a_slow_device_keeps_the_others_waiting():
    items = [compute(1), compute(4, rank=1)]
    items += [Item("meet", "meeting", r, "compute", 0.0, after=(0, 1)) for r in range(2)]
    played = play(items, {})
    assert played.step_s == 4
    assert played.wait_s == {0: {"rank 1": 3}, 1: {}}


def test_latency_delays_what_waits_and_not_the_lane():
    sends = [Item("send", "send to rank 1", 0, "to 1", 0.0, nbytes=10, peer=1, links=("wire",), latency_s=0.5)] * 3
    played = play([*sends, compute(1, rank=1, after=(0,))], {"wire": 10.0})
    assert played.end_s == pytest.approx((1.5, 2.5, 3.5, 2.5))
    assert played.wait_s[1] == {"rank 0": pytest.approx(1.5)}
    before = play([load(10, seconds=0.5), load(10, seconds=0.5)], {"disk": 10.0})
    assert before.end_s == pytest.approx((1.5, 3.0))


@pytest.mark.parametrize("groups", [1, 4, 9])
def test_one_forward_one_backward(groups):
    """Of S stages with G groups a step takes (G + S - 1) (F + B) (Narayanan et al. 2019): each waits S - 1 of them."""
    stages, f, b = 3, 1.0, 2.0
    order = []
    for s in range(stages):
        ahead = min(groups, stages - s)
        taken = [("F", g) for g in range(ahead)]
        for g in range(groups):
            taken.append(("B", g))
            if ahead + g < groups:
                taken.append(("F", ahead + g))
        order.append(taken)
    items, at, where = [], [0] * stages, {}
    while any(at[s] < len(order[s]) for s in range(stages)):
        for s in range(stages):
            while at[s] < len(order[s]):
                kind, g = order[s][at[s]]
                needs = ("F", s - 1, g) if kind == "F" else ("B", s + 1, g)
                if kind == "B" and s == stages - 1:
                    needs = ("F", s, g)
                if 0 <= needs[1] < stages and needs not in where:
                    break
                where[kind, s, g] = len(items)
                after = (where[needs],) if needs in where else ()
                items.append(compute(f if kind == "F" else b, s, after))
                at[s] += 1
    played = play(items, {})
    assert played.step_s == pytest.approx((groups + stages - 1) * (f + b))
    for s in range(stages):
        assert played.idle[s] == pytest.approx((stages - 1) / (groups + stages - 1))


def test_what_cannot_be_played_is_refused():
    with pytest.raises(ValueError, match="waits for"):
        play([compute(1, after=(1,)), compute(1)], {})
    with pytest.raises(ValueError, match="'disk'"):
        play([load(1)], {"wire": 1.0})
    assert play([], {}).step_s == 0


# ---- what holds for every list ------------------------------------------------------------------

LINKS = {"disk": 7.0, "card 0": 5.0, "card 1": 3.0, "root": 6.0, "wire": 2.0}
TRANSFERS = (("read", ("disk",)), ("copy", ("card 0", "root")), ("copy", ("card 1", "root")), ("to 1", ("wire",)))


@st.composite
def lists(draw):
    items = []
    for n in range(draw(st.integers(1, 30))):
        rank = draw(st.integers(0, 2))
        after = tuple(sorted(draw(st.sets(st.integers(0, n - 1), max_size=3)))) if n else ()
        seconds = draw(st.sampled_from([0.0, 0.25, 1.0, 2.5]))
        if draw(st.booleans()):
            items.append(compute(seconds, rank, after))
            continue
        lane, links = draw(st.sampled_from(TRANSFERS))
        items.append(load(draw(st.integers(0, 50)), rank, after, links, lane, seconds=seconds,
                          latency_s=draw(st.sampled_from([0.0, 0.5]))))  # fmt: skip
    return items


def least(items, links):
    """Each piece's earliest end if no link were ever shared."""
    ends, lane_free = [], {}
    for item in items:
        lane = (item.rank, item.lane)
        start = max([lane_free.get(lane, 0.0), *(ends[n] for n in item.after)])
        rate = min((links[x] for x in item.links), default=float("inf"))
        lane_free[lane] = start + item.seconds + (item.nbytes / rate if item.links else 0.0)
        ends.append(lane_free[lane] + item.latency_s)
    return max(ends)


@settings(max_examples=150, deadline=None)
@given(lists())
def test_bounds(items):
    played = play(items, LINKS)
    assert played.step_s >= least(items, LINKS) * (1 - 1e-9)
    for link, rate in LINKS.items():
        nbytes = sum(item.nbytes for item in items if link in item.links)
        assert played.step_s >= nbytes / rate * (1 - 1e-9)
        assert nbytes / rate * (1 - 1e-9) <= played.links[link].busy_s + 1e-9
    assert played.step_s <= sum(
        i.seconds + i.latency_s + (i.nbytes / min(LINKS[x] for x in i.links) if i.links else 0) for i in items
    ) * (1 + 1e-9)
    for n, item in enumerate(items):
        assert all(played.start_s[n] >= played.end_s[k] - 1e-9 for k in item.after)
    assert sum(part.seconds for part in played.bottleneck) == pytest.approx(played.step_s)


@settings(max_examples=60, deadline=None)
@given(lists())
def test_twice_as_fast_takes_half(items):
    played = play(items, LINKS)
    assert played == play(items, LINKS)
    fast = [item._replace(seconds=item.seconds / 2, latency_s=item.latency_s / 2) for item in items]
    twice = play(fast, {link: 2 * rate for link, rate in LINKS.items()})
    assert twice.end_s == pytest.approx([end / 2 for end in played.end_s])
    assert twice.path == played.path


@settings(max_examples=60, deadline=None)
@given(lists())
def test_every_second_of_a_compute_lane_has_a_cause(items):
    played = play(items, LINKS)
    for rank in played.seconds:
        mine = [n for n, item in enumerate(items) if item.rank == rank and item.lane == "compute"]
        if mine:
            last = max(played.end_s[n] for n in mine)
            spent = sum(played.seconds[rank].values()) + sum(played.wait_s[rank].values())
            assert spent == pytest.approx(last)
