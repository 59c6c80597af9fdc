"""A step's list of pieces: what is in it, in which order, and how long it takes."""

from dataclasses import replace

import pytest

from lamella.forecast.events import play
from lamella.forecast.items import RankPlan, Route, part_of_share, step_items
from lamella.plan.costs import RowCost
from lamella.plan.split import Split, Stage
from lamella.plan.work import Action, StepPlan
from tests.forecast.cases import HIDDEN, Fake, rank_plan, shape, sites

ROWS = [RowCost(10, 4), RowCost(6, 2)]
ALONE = Split((Stage(0, 6, (0,), (1.0,)),))
ONE_GROUP = StepPlan(((0,), (1,)), ((0, 1),), (((0,), (0,)),), ((Action("F", 0), Action("B", 0)),))


def listed(rank, split=ALONE, plan=ONE_GROUP, routes=None, trained=0, rows=ROWS, model=None):
    ranks = [rank] * 3 if isinstance(rank, RankPlan) else rank
    return step_items(split, plan, model or shape(), rows, ranks, routes or {}, sites(first=trained))


def names(items, *kinds):
    return [item.name for item in items if item.kind in kinds]


def seen(*layers):
    return [f"layer {i}" for i in layers]


def test_everything_resident():
    times = Fake(1, 2, 1, 0.5, 3, 0.25, 0.125)
    items = listed(rank_plan(times, range(6)))
    assert names(items, "forward", "backward", "head") == [
        *(f"forward {i}" for i in range(6)), "head", *(f"backward {i}" for i in reversed(range(6)))
    ]  # fmt: skip
    # The first layer is still at hand from the step before, the last one from the way there.
    assert names(items, "dequantise") == seen(1, 2, 3, 4, 5, 4, 3, 2, 1, 0)
    assert names(items, "load", "copy", "send", "reduce", "meet") == []
    assert names(items, "optimizer") == ["gradient norm", "update"]
    parameters = sum(site.parameters for site in sites())
    expected = 16 * 0.25 + 16 * 6 * (1 + 2 + 1) + 10 * 0.5 + 6 * 3 + parameters * 0.125
    played = play(items, {})
    assert played.step_s == pytest.approx(expected)
    assert played.idle[0] == pytest.approx(0)
    assert played.causes[0] == pytest.approx({"linear": 0.75 * 16 * 24, "attention": 0.25 * 16 * 24})


def test_kept_activations_are_not_recomputed():
    played = play(listed(rank_plan(resident=range(6), recompute=False)), {})
    assert played.step_s == pytest.approx(16 * 6 * 3)


def test_layers_without_an_adapter_above_are_not_walked_back():
    items = listed(rank_plan(), trained=4)
    assert names(items, "backward") == ["backward 5", "backward 4"]
    # Layer 3 was read ahead, for nothing, and layer 0 has to be read anew; then 1, in which nothing was read ahead.
    assert names(items, "load") == seen(0, 1, 2, 3, 4, 5, 3)
    assert names(items, "dequantise") == seen(0, 1, 2, 3, 4, 5, 4)


def test_streamed_layers_are_read_beside_the_layer_at_work():
    items = listed(rank_plan(Fake(dequantise_s=1.0), read=Route(("disk",))))
    assert names(items, "load") == seen(2, 3, 4, 5, 3, 2, 1, 0)
    assert names(items, "dequantise") == seen(1, 2, 3, 4, 5, 4, 3, 2, 1, 0)
    # Reading a layer takes as long as a forward pass: hidden but for the dequantising before it begins.
    played = play(items, {"disk": 1000 / 16})
    computing = 16 * 6 * 4 + 10
    assert played.step_s == pytest.approx(computing)
    assert played.links["disk"].nbytes == 8000
    slow = play(items, {"disk": 1000 / 160})  # forward 16 + 1, backward 48 + 1
    assert slow.wait_s[0]["disk"] == pytest.approx(4 * (160 - 16) + 4 * (160 - 48))
    assert slow.bottleneck[0].what == "disk"


def test_some_layers_stay():
    items = listed(rank_plan(resident=(0, 1, 2), read=Route(("disk",))))
    # 4 and 3 are in the slots from the step before, on the way back 4 still is.
    assert names(items, "load") == seen(5, 3)


def test_an_accelerator_copies_ahead_and_reads_from_disk_what_is_not_pinned():
    own = rank_plan(Fake(dequantise_s=1.0), (0, 3), pinned=frozenset({1, 2}), accelerator=True, read=Route(("disk",)),
                    copy=Route(("to device",)), back=Route(("from device",)))  # fmt: skip
    items = listed(own)
    assert set(names(items, "load")) == {"layer 4", "layer 5"}
    assert names(items, "copy") == seen(4, 5, 2, 1)
    assert names(items, "spill") == [f"gradients {i}" for i in reversed(range(6))]
    played = play(items, {"disk": 1e12, "to device": 1e12, "from device": 1e12})
    assert played.step_s == pytest.approx(16 * 6 * 4 + 10)


def test_boundaries_without_room_go_to_the_host_and_come_back():
    each = 10 * HIDDEN * 2 + 6 * HIDDEN * 2
    own = rank_plan(resident=range(6), accelerator=True, boundary_bytes=2 * each, copy=Route(("to device",)),
                    back=Route(("from device",)))  # fmt: skip
    items = listed(own)
    spilled = [item for item in items if item.kind == "spill" and item.name.startswith("spill")]
    fetched = [item for item in items if item.kind == "fetch"]
    assert [item.name for item in spilled] == [f"spill {i}" for i in range(4)]
    assert [item.name for item in fetched] == [f"fetch {i}" for i in (3, 2, 1, 0)]
    assert sum(i.nbytes for i in spilled) == sum(i.nbytes for i in fetched) == 4 * each
    fast = play(items, {"to device": 1e12, "from device": 1e12})
    assert fast.step_s == pytest.approx(16 * 24)
    slow = play(items, {"to device": each / 100, "from device": 1e12})
    # The first fetch may begin from the start, spilled as it is; the others one after the other beside two layers each.
    assert slow.wait_s[0] == {"host": pytest.approx(slow.step_s - 16 * 24)}
    assert slow.step_s > 16 * 24 + 50


def two_stages(groups):
    split = Split((Stage(0, 3, (0,), (1.0,)), Stage(3, 6, (1,), (1.0,))), groups)
    order = ([Action("F", g) for g in range(min(2, groups))], [])
    for g in range(groups):
        order[0].append(Action("B", g))
        if g + 2 < groups:
            order[0].append(Action("F", g + 2))
        order[1].extend((Action("F", g), Action("B", g)))
    items = tuple((g,) for g in range(groups))
    owners = tuple(((r,),) * groups for r in range(2))
    return split, StepPlan(items, items, owners, tuple(tuple(o) for o in order))


def test_a_pipeline_of_two_stages():
    groups, rows = 4, [RowCost(10, 4)] * 4
    split, plan = two_stages(groups)
    items = listed(rank_plan(resident=range(6)), split, plan, rows=rows)
    assert play(items, {}).step_s == pytest.approx((groups + 1) * 10 * 3 * 4)
    sends = [item for item in items if item.kind == "send"]
    assert {(i.rank, i.peer, i.nbytes) for i in sends} == {(0, 1, 10 * HIDDEN * 2), (1, 0, 10 * HIDDEN * 2)}
    assert len(sends) == 2 * groups
    assert names(items, "meet") == ["meeting"] * 4
    # A message takes 7 s on its way: the first stage hides it, the others wait for each of the first two and the last two.
    wire = {(0, 1): Route(("wire",), 2.0), (1, 0): Route(("back",), 2.0)}
    rate = 10 * HIDDEN * 2 / 5
    late = play(listed(rank_plan(resident=range(6)), split, plan, wire, rows=rows), {"wire": rate, "back": rate})
    assert late.step_s > play(items, {}).step_s + 2 * 7
    assert late.links["wire"].nbytes == 4 * 10 * HIDDEN * 2


def test_groups_of_a_streamed_stage_read_their_first_layers_when_they_come():
    split, plan = two_stages(3)
    items = listed(rank_plan(read=Route(("disk",))), split, plan, rows=[RowCost(10, 4)] * 3)
    mine = [item.name for item in items if item.kind == "load" and item.rank == 0]
    # F0, F1 from anew, B0, F2 turning around, B1, B2 from anew.
    assert mine == seen(*(2,), *(0, 1, 2), *(0,), *(2,), *(0,), *(2, 1, 0))


def test_an_expert_split_sums_in_every_layer():
    split = Split((Stage(0, 6, (0, 1), (0.75, 0.25), "experts"),))
    plan = StepPlan(((0,), (1,)), ((0, 1),), (((0, 1), (0, 1)),), ((Action("F", 0), Action("B", 0)),))
    ranks = [replace(rank_plan(resident=range(6)), part=part_of_share(share)) for share in (0.75, 0.25)]
    items = listed(ranks, split, plan)
    sums = [item for item in items if item.name == "sum of ranks 0, 1"]
    each = 16 * HIDDEN * 2  # of two ranks each sends 2 * 1/2 of it
    assert [i.nbytes for i in sums if i.rank == 0] == [2 * each] * 6 + [each] + [4 * each] * 5 + [3 * each]
    assert names(items, "reduce").count("sum of gradients") == 2
    played = play(items, {})
    assert played.step_s == pytest.approx(0.75 * 16 * 24)
    assert played.wait_s[1] == {"rank 0": pytest.approx(0.5 * 16 * 24)}
    # Layers without attention meet half as often.
    bare = listed(ranks, split, plan, model=shape(core=None))
    assert [i.nbytes for i in bare if i.name == "sum of ranks 0, 1" and i.rank == 0][:6] == [each] * 6


def test_rows_divided_by_tokens_meet_at_the_end_alone():
    split = Split((Stage(0, 6, (0, 1), (0.6, 0.4)),))
    plan = StepPlan(((0,), (1,)), ((0, 1),), (((0,), (1,)),), ((Action("F", 0), Action("B", 0)),))
    wire = {(0, 1): Route(("a",), 0.5), (1, 0): Route(("b",), 0.5)}
    items = listed(rank_plan(resident=range(6)), split, plan, wire)
    parameters = sum(site.parameters for site in sites())
    played = play(items, {"a": 1000.0, "b": 1000.0})
    # A meeting of two turns, a ring of two turns with its bytes, a meeting.
    assert played.step_s == pytest.approx(10 * 24 + 1 + (1 + parameters * 4 / 1000) + 1)
    assert played.wait_s[1]["rank 0"] == pytest.approx(4 * 24)
