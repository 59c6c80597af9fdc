"""Costs, break-even, verdicts and what would change them."""

import datetime
import json
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lamella.cli import app
from lamella.decide.model import (
    Choice,
    Gain,
    Point,
    World,
    break_even,
    capacity_of_one,
    cost,
    fixed,
    net,
    over_utilisation,
    pace,
    paces,
    why_out,
)
from lamella.decide.run import decide, would_change
from lamella.decide.settings import load_decide
from lamella.decide.verdict import Case, changed, flip, flips, inputs_of, judge, look_again, pays_from, sensitivity
from lamella.errors import UserError
from lamella.report.artifacts import sections_of

WORLD = World(200_000, 800, 50, 2.0, 730, 12, 60.0, 300.0)
API = Choice("API", "API base", False, input_price=2.0, output_price=8.0)
OWN = Choice("own", "self-hosted tuned", True, machine_per_hour=0.5, documents_per_s=1.0, once=600, retrain=300, retrain_every=6,
             staff_hours_once=10, staff_hours_per_month=2, gain=Gain(0.05, 0.03, 0.07))  # fmt: skip
CASE = Case(WORLD, (API, OWN), "API", "own")


def test_a_months_cost_by_hand():
    assert cost(API, WORLD).total == pytest.approx(200_000 * (800 * 2 + 50 * 8) / 1e6)  # 400
    own = cost(OWN, WORLD)
    assert own.machines == 1 and own.capacity == 730 * 3600 and own.utilisation == pytest.approx(200_000 / (730 * 3600))
    assert own.parts == {
        "machines": 365.0,
        "training and set-up": (600 + 600) / 12,
        "re-training": 50.0,
        "staff": 120.0,
        "other": 0.0,
    }
    assert net(OWN, API, WORLD) == pytest.approx(5 * 300 - (635 - 400))
    assert cost(OWN, replace(WORLD, documents=2_000_000)).machines == 2  # the busiest hour has twice the mean
    assert over_utilisation(OWN, WORLD)[-1] == (1.0, pytest.approx(1000 * (365 + 270) / (730 * 3600)))


def test_wrong_labels_count_by_documents():
    world = replace(WORLD, by_label=True, worth=0.1)
    assert net(OWN, API, world) == pytest.approx(0.05 * 200_000 * 0.1 - (635 - 400))


def test_a_difference_whose_interval_holds_zero_is_none():
    unsure = replace(OWN, gain=Gain(0.05, -0.01, 0.11))
    assert net(unsure, API, WORLD) == pytest.approx(-(635 - 400)) and net(unsure, API, WORLD, low=True) < net(
        unsure, API, WORLD
    )
    worse = replace(OWN, gain=Gain(-0.05, -0.08, -0.02))
    assert net(worse, API, WORLD) == pytest.approx(-5 * 300 - 235)


prices = st.floats(0.01, 50)
choices = st.builds(
    lambda machine, rate, once, staff: Choice("own", "self-hosted base", True, machine_per_hour=machine, documents_per_s=rate, once=once,
                                              staff_hours_per_month=staff),
    prices, st.floats(0.01, 100), st.floats(0, 1e5), st.floats(0, 100),
)  # fmt: skip
worlds = st.builds(
    lambda docs, peak, hours: World(docs, 800, 50, peak, hours, 12, 60.0, 100.0),
    st.floats(1, 1e8),
    st.floats(1, 5),
    st.floats(50, 744),
)


@given(choices, worlds, prices)
@settings(max_examples=200, deadline=None)
def test_at_the_break_even_the_costs_are_equal_and_below_it_it_costs_more(own, world, price):
    api = replace(API, input_price=price, output_price=price)
    even = break_even(own, api, world)
    if even is None:
        for documents in (1e3, 1e5, 1e7, 1e9):
            here = replace(world, documents=documents)
            assert cost(own, here).total > cost(api, here).total * (1 - 1e-9)
        return
    assume(even > 1)
    at = replace(world, documents=even)
    assert cost(own, at).total <= cost(api, at).total * (1 + 1e-6)
    for share in (0.5, 0.9, 0.999):
        below = replace(world, documents=even * share)
        assert cost(own, below).total > cost(api, below).total * (1 - 1e-9)
    # equal, but where a further machine has just been left out
    on_a_stair = (even * world.peak / capacity_of_one(own, world)) % 1 < 1e-6
    assert on_a_stair or cost(own, at).total == pytest.approx(cost(api, at).total, rel=1e-6)


@given(choices, worlds, st.floats(1, 10))
@settings(deadline=None)
def test_costs_rise_with_volume(own, world, factor):
    more = replace(world, documents=world.documents * factor)
    assert cost(own, more).total >= cost(own, world).total and cost(API, more).total >= cost(API, world).total
    assert cost(own, world).utilisation <= 1 / world.peak * (1 + 1e-9)


def test_break_even_between_other_kinds():
    cheap = replace(API, name="tuned", kind="API tuned", input_price=1.0, once=1200.0)
    even = break_even(cheap, API, WORLD)
    assert cost(cheap, replace(WORLD, documents=even)).total == pytest.approx(
        cost(API, replace(WORLD, documents=even)).total
    )
    assert break_even(API, replace(API, input_price=1.0), WORLD) is None
    assert break_even(OWN, replace(API, input_price=0.0, output_price=0.0), WORLD) is None


def test_verdicts():
    assert judge(CASE) == "deploy"
    assert judge(replace(CASE, choices=(API, replace(OWN, gain=Gain())))) == "do not deploy"
    assert judge(replace(CASE, choices=(API, replace(OWN, out="too slow")))) == "do not deploy"
    better = replace(OWN, name="other", gain=Gain(0.2, 0.1, 0.3))
    assert judge(replace(CASE, choices=(API, OWN, better))) == "do not deploy"
    assert judge(replace(CASE, choices=(API, OWN, replace(better, out="too slow")))) == "deploy"
    unsure = replace(OWN, gain=Gain(0.01, 0.001, 0.02))
    assert judge(Case(WORLD, (API, unsure), "API", "own")) == "wait"  # 300 - 235 > 0, 30 - 235 < 0
    small = Case(replace(WORLD, documents=100_000), (API, replace(OWN, gain=Gain())), "API", "own", growth=0.2)
    assert judge(small) == "wait" and pays_from(small) == 7 and judge(replace(small, growth=0.0)) == "do not deploy"


@given(st.floats(50, 2000), st.floats(1e4, 1e6), st.floats(0.1, 20))
@settings(max_examples=25, deadline=None)
def test_what_is_said_to_flip_the_verdict_flips_it(worth, documents, machine):
    case = Case(
        replace(WORLD, worth=worth, documents=documents), (API, replace(OWN, machine_per_hour=machine)), "API", "own"
    )
    now = judge(case)
    for name, value in inputs_of(case).items():
        found = flip(case, name)
        if found is None:
            continue
        at, verdict = found.at, found.verdict
        assert judge(changed(case, name, at)) == verdict != now
        assert judge(changed(case, name, at + (value - at) * 1e-6)) == now or math.isclose(at, value, rel_tol=1e-6)


def test_sensitivity_is_what_changing_one_input_gives():
    rows = sensitivity(CASE, {"documents per month": (1000.0, 500_000.0)})
    by_name = {r["input"]: r for r in rows}
    assert by_name["documents per month"]["net_low"] == pytest.approx(net(OWN, API, replace(WORLD, documents=1000.0)))
    assert by_name["own: machine an hour"]["net_high"] == pytest.approx(
        net(replace(OWN, machine_per_hour=1.0), API, WORLD)
    )
    widths = [abs(r["net_high"] - r["net_low"]) for r in rows]
    assert widths == sorted(widths, reverse=True)
    assert by_name["own: quality gain"]["net_low"] == pytest.approx(
        net(replace(OWN, gain=Gain(0.03, 0.01, 0.05)), API, WORLD)
    )


def test_the_date_to_look_again_is_the_earliest():
    today = datetime.date(2026, 12, 1)
    assert look_again(today, [], math.inf, None) == (datetime.date(2027, 5, 30), "new base models come out")
    assert look_again(today, [datetime.date(2026, 11, 1)], 6, None)[0] == datetime.date(2027, 1, 30)
    assert look_again(today, [], 2, None)[1] == "re-training is due"
    assert look_again(today, [datetime.date(2020, 1, 1)], 6, None)[0] == datetime.date(2026, 12, 2)
    assert look_again(today, [], 6, datetime.date(2026, 12, 24)) == (datetime.date(2026, 12, 24), "as asked")


# ---- files


def comparison(path, **more):
    figure = {"value": 0.7, "low": 0.66, "high": 0.74}
    better = {"value": 0.78, "low": 0.75, "high": 0.81}

    def one(name, role, f1, money):
        return {"name": name, "role": role, "metrics": {"average": f1, "average_accuracy": f1}, "latency_s": {"p50": 0.4, "p99": 1.5},
                "tokens": {"input": 80_000, "output": 5_000}, "money": money}  # fmt: skip

    price = {
        "currency": "USD",
        "prices": {"input_per_mtok": 2.0, "output_per_mtok": 8.0, "source": "given", "date": "2026-11-15"},
    }
    candidates = [one("api", "api-base", figure, price), one("tuned", "self-hosted-tuned", better, None)]
    difference = {"before": "api", "after": "tuned", "average": {"value": 0.08, "low": 0.04, "high": 0.12}}
    tree = {"kind": "compare", "rows": 100, "candidates": candidates, "differences": [difference], **more}
    path.write_text(json.dumps(tree))


TOML = """
name = "d"
comparisons = ["compare.json"]
current = "API"
proposal = "tuned"
staff_per_hour = 60.0
{top}
[volume]
documents_per_month = 500000
peak_factor = 2.0
[worth]
per_f1_point_per_month = 100.0
[[options]]
name = "API"
kind = "API base"
candidate = "api"
[[options]]
name = "tuned"
kind = "self-hosted tuned"
candidate = "tuned"
machine = "1xRTX4090"
{own}
once = 500.0
retrain = 200.0
retrain_every_months = 6
staff_hours_per_month = 4
"""


def write(folder, top="", own="documents_per_s = 3.0"):
    comparison(folder / "compare.json")
    (folder / "decide.toml").write_text(TOML.format(top=top, own=own))
    return folder / "decide.toml"


def test_from_files(tmp_path):
    tree, figures = decide(load_decide(write(tmp_path)), datetime.date(2026, 12, 1))
    api, tuned = tree["options"]
    assert api["per_month"] == pytest.approx(500_000 * (800 * 2 + 50 * 8) / 1e6)
    assert (
        tuned["f1"]["value"] == 0.78
        and tuned["gain"]["value"] == 0.08
        and tuned["gain_per_month"] == pytest.approx(800)
    )
    assert tree["verdict"] == "deploy" and tree["sentence"].startswith("Deploy tuned: on 1 machine")
    assert tree["look_again"] == "2026-12-02" and "a price of 2026-07-31 is older" in tree["look_again_because"]
    assert tree["sources"]["tuned: machine an hour"].startswith("catalogue of 2026")
    assert tree["sources"]["tuned: quality gain"] == "paired bootstrap over documents"
    named = {f.name: f.value for f in figures}
    assert named["tuned: net value a month"] == pytest.approx(tree["net_value_per_month"])
    assert tree["net_value_per_month"] == pytest.approx(800 - (tuned["per_month"] - api["per_month"]))
    (tmp_path / "decide.json").write_text(json.dumps(tree))
    shown = next(s for s in sections_of(tmp_path) if s["id"].startswith("decide"))
    assert shown["note"].startswith("DEPLOY: Deploy tuned") and [c["kind"] for c in shown["charts"]] == [
        "lines",
        "tornado",
    ]


def test_a_load_test_gives_rate_and_latency(tmp_path):
    four = {"p50": 1.0, "p90": 2.0, "p99": 3.5, "mean": 1.2}
    rates = {"requests_per_s": 9.0, "labels_per_s": 2.5}
    tree = {"kind": "loadtest", "throughput": rates, "goodput": None, "e2e_s": four, "label_s": four}
    (tmp_path / "loadtest.json").write_text(json.dumps(tree))
    file = write(tmp_path, top="latency_p99_s = 2.0", own='load_test = "loadtest.json"')
    tree, _ = decide(load_decide(file))
    assert tree["options"][1]["latency_p99_s"] == 3.5 and tree["verdict"] == "do not deploy"
    assert (
        tree["sentence"]
        == "Do not deploy tuned: its p99 of 3.5 s misses the target of 2 s, though it would be worth 981 USD a month."
    )
    assert tree["inputs"]["tuned: documents per second"] == 2.5


def test_a_plans_bound_gives_a_rate(tmp_path):
    serve = {
        "format": "fp8",
        "machine": "1 x RTX4090",
        "prefill_tokens_per_s": 20_000.0,
        "decode": [{"sequences": 1, "tokens_per_s": 1000.0}, {"sequences": 16, "tokens_per_s": 4000.0}],
    }
    (tmp_path / "plan.json").write_text(json.dumps({"kind": "lamella plan", "serving": {"here": [serve]}}))
    own = 'plan = "plan.json"\nplan_share = 0.5'
    tree, _ = decide(load_decide(write(tmp_path, own=own)))
    tuned, rate = tree["options"][1], 1 / (50 / 2000 + 800 / 10_000)
    assert tuned["capacity_documents_per_month"] == pytest.approx(rate * 730 * 3600) and tuned["sequences"] == 16
    assert tuned["latency_p99_s"] == pytest.approx(2 * 16 / rate)  # Little's law, p99 twice the mean
    tree, _ = decide(load_decide(write(tmp_path, top="latency_p99_s = 1.0", own=own)))
    tuned, rate = tree["options"][1], 1 / (50 / 500 + 800 / 10_000)
    assert tuned["sequences"] == 1 and not tuned["out"] and tuned["latency_p99_s"] == pytest.approx(2 / rate)
    assert tuned["capacity_documents_per_month"] == pytest.approx(rate * 730 * 3600)
    tree, _ = decide(load_decide(write(tmp_path, top="latency_p99_s = 0.3", own=own)))
    assert tree["verdict"] == "do not deploy" and "misses the target of 0.3 s" in tree["sentence"]
    assert any(x.startswith("latency target at least 0.36") for x in tree["would_change_it"])
    file = write(tmp_path, own=own)
    file.write_text(file.read_text().replace("1xRTX4090", "2xRTX4090"))
    config = load_decide(file)
    with pytest.raises(UserError, match="plan is for 1 x RTX4090, its machine is 2 x RTX4090"):
        decide(config)


def test_quality_by_hand_takes_intervals_as_independent(tmp_path):
    file = write(tmp_path, own="documents_per_s = 3.0\nquality = {value = 0.9, low = 0.87, high = 0.93}")
    tree, _ = decide(load_decide(file))
    g = tree["options"][1]["gain"]
    assert g["value"] == pytest.approx(0.2) and g["value"] - g["low"] == pytest.approx(math.hypot(0.04, 0.03))


@pytest.mark.parametrize(
    ("top", "own", "said"),
    [
        ('review = "soon"', "documents_per_s = 3.0", "review|isoformat"),
        ("", "documents_per_s = 0.0", "documents_per_s"),
        ("", "", "give one of documents_per_s, load_test and plan"),
        ("", 'documents_per_s = 1.0\nload_test = "x"', "give one of"),
        ("", 'load_test = "gone.json"', "gone.json"),
        ("", 'load_test = "compare.json"', "no result of `lamella loadtest`"),
        ("", "documents_per_s = 3.0\nprice = \"openai:gpt-4o-mini\"", "`price` is for APIs"),
        ("", "documents_per_sec = 3.0", "nearest valid name: `documents_per_s`"),
        ("sensitivity = {nonsense = [1.0, 2.0]}", "documents_per_s = 3.0", "names no input"),
    ],
)  # fmt: skip
def test_bad_input(tmp_path, top, own, said):
    import re

    with pytest.raises(UserError) as caught:
        decide(load_decide(write(tmp_path, top, own)))
    assert re.search(said, str(caught.value))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("documents_per_s = 3.0", "documents_per_s = 1e-300"), ("peak_factor = 2.0", "peak_factor = 1e300"),
        ("staff_hours_per_month = 4", "staff_hours_per_month = 1e308"),
        ("retrain_every_months = 6", "retrain_every_months = 1e9"), ("once = 500.0", "once = 1e308"),
        ("per_month = 100.0", "per_month = 1e308"),
        ("peak_factor = 2.0", "peak_factor = 2.0\nhours_per_month = 1e-300"), ('name = "d"', 'name = "d"\nreview = "9999-12-31"'),
        ('name = "d"', 'name = "d"\nsensitivity = {"tuned: documents per second" = [1e-310, 1.0]}'),
    ],
)  # fmt: skip
def test_numbers_beyond_all_sense_are_refused(tmp_path, old, new):
    file = write(tmp_path)
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(UserError):
        decide(load_decide(file))


def test_names_that_do_not_fit(tmp_path):
    file = write(tmp_path)
    text = file.read_text()
    for old, new, said in (
        ('current = "API"', 'current = "nobody"', "is no option"), ('proposal = "tuned"', 'proposal = "API"', "nothing to decide"),
        ('candidate = "api"', 'candidate = "who"', "no comparison has a candidate 'who'"),
        ('machine = "1xRTX4090"', 'machine = "1xRTX9999"', "RTX9999"),
        ("per_f1_point_per_month = 100.0", "", "give one of per_f1_point"),
    ):  # fmt: skip
        file.write_text(text.replace(old, new))
        with pytest.raises(UserError) as caught:
            decide(load_decide(file))
        assert said in str(caught.value)
    file.write_text(text.replace('"compare.json"', '"none.json"'))
    with pytest.raises(UserError, match=r"none\.json"):
        decide(load_decide(file))


def test_the_verb(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    monkeypatch.setattr("lamella.console.out.width", 220)
    result = CliRunner().invoke(app, ["decide", "decide.toml", "--explain"])
    assert result.exit_code == 0, result.exception
    for words in (
        "Deploy tuned",
        "even from",
        "what would change it",
        "look again on",
        "tuned: machines a month =",
        "x 730 hours",
    ):
        assert words in result.stdout
    tree = json.loads(CliRunner().invoke(app, ["decide", "decide.toml", "--json"]).stdout)
    kept = json.loads((tmp_path / "runs" / "decide-d" / "decide.json").read_text())
    assert {**tree, "created": 0} == {**kept, "created": 0} and tree["kind"] == "decide"


def test_the_room_imports_no_torch():
    import subprocess
    import sys

    subprocess.run(
        [sys.executable, "-c", "import sys, lamella.decide.run; assert 'torch' not in sys.modules"], check=True
    )
    assert sum(fixed(OWN, WORLD).values()) == 270


# ---- latency, and what stands in the way

POINTS = (Point(1, 100.0, 10_000.0), Point(8, 400.0, 10_000.0), Point(64, 1600.0, 10_000.0))
PLANNED = replace(OWN, points=POINTS, share=0.5, spread=2.0)


@given(st.floats(0.5, 500))
@settings(max_examples=50, deadline=None)
def test_of_a_plans_points_the_best_within_the_target_counts(target):
    world = replace(WORLD, latency_target=target)
    ways = paces(PLANNED, world)
    here = pace(PLANNED, world)
    meeting = [p for p in ways if p.latency_p99_s <= target]
    assert bool(meeting) != bool(why_out(PLANNED, world))
    if meeting:
        assert here.documents_per_s == max(p.documents_per_s for p in meeting)
    else:
        assert here.latency_p99_s == min(p.latency_p99_s for p in ways)


def test_a_proposal_that_is_too_slow_is_told_the_target_that_it_would_meet():
    case = Case(replace(WORLD, latency_target=1.0), (API, PLANNED), "API", "own")
    assert judge(case) == "do not deploy" and why_out(PLANNED, case.world).startswith("its p99 of 2.32 s misses")
    found = next(f for f in flips(case) if f.name == "latency target")
    alone = pace(PLANNED, case.world).latency_p99_s
    assert found.at == pytest.approx(alone) and found.at >= alone and found.verdict == "deploy"
    slow = replace(OWN, latency_p99_s=5.0, gain=Gain())
    case = Case(replace(WORLD, latency_target=1.0), (API, slow), "API", "own")
    assert not flips(case)
    said = would_change(case, [])
    assert said[0].startswith("no single input") and any("within the latency target at this cost: " in s for s in said)


def test_better_options_stand_in_the_way():
    better = replace(API, name="new", input_price=0.1, output_price=0.1, gain=Gain(0.2, 0.1, 0.3))
    case = Case(WORLD, (API, OWN, better), "API", "own")
    assert judge(case) == "do not deploy"
    assert would_change(case, []) == [
        "no single input within a hundredth and a hundred times its value",
        'without the option "new": deploy',
    ]


def test_an_option_may_have_tokens_of_its_own(tmp_path):
    file = write(tmp_path)
    file.write_text(file.read_text().replace('candidate = "api"', 'candidate = "api"\noutput_tokens = 100'))
    tree, _ = decide(load_decide(file))
    assert tree["options"][0]["parts"]["tokens"] == pytest.approx(500_000 * (800 * 2 + 100 * 8) / 1e6)
    assert tree["inputs"]["API: output tokens"] == 100


def test_tenants_that_get_worse_are_named(tmp_path):
    file = write(tmp_path)
    one = {"value": -0.05, "low": -0.08, "high": -0.02, "p": 0.001, "p_holm": 0.002, "significant": True}
    tenants = {"foods": one, "tools": {**one, "significant": False}}
    average = {"value": 0.08, "low": 0.04, "high": 0.12, "p": 0.001}
    comparison(
        tmp_path / "compare.json",
        differences=[{"before": "api", "after": "tuned", "average": average, "tenants": tenants}],
    )
    tree, _ = decide(load_decide(file))
    assert [s for s in tree["because"] if "gets worse" in s] == ["foods gets worse by 5.00 points of F1, significantly"]
    comparison(
        tmp_path / "compare.json",
        differences=[{"before": "tuned", "after": "api", "average": average, "tenants": tenants}],
    )
    tree, _ = decide(load_decide(file))
    assert tree["options"][1]["gain"]["value"] == -0.08 and not any("gets worse" in s for s in tree["because"])


@pytest.mark.parametrize(
    ("name", "range_", "said"),
    [
        ("peak factor", "[0.5, 2.0]", "is not within 1"),
        ("documents per month", "[0.0, 2.0]", "is not within 0"),
        ("documents per month", "[5.0, 2.0]", "is above high"),
        ("hours a month", "[5.0, 800.0]", "and 744"),
    ],
)
def test_ranges_that_cannot_be(tmp_path, name, range_, said):
    file = write(tmp_path, top=f'sensitivity = {{"{name}" = {range_}}}')
    config = load_decide(file)
    with pytest.raises(UserError, match=said) as caught:
        decide(config)
    assert caught.value.path == str(file)


def test_files_that_lack_something_are_named_with_the_key(tmp_path):
    file = write(tmp_path, own='load_test = "loadtest.json"')
    (tmp_path / "loadtest.json").write_text(json.dumps({"kind": "loadtest", "throughput": {"requests_per_s": "many"}}))
    config = load_decide(file)
    with pytest.raises(
        UserError, match=r"loadtest\.json: `throughput\.requests_per_s` = 'many'.*\n.*`e2e_s` is required"
    ):
        decide(config)
    (tmp_path / "loadtest.json").write_text("{")
    with pytest.raises(UserError, match=r"loadtest\.json: not JSON"):
        decide(config)
    file = write(tmp_path, top='currency = "EUR"')
    config = load_decide(file)
    with pytest.raises(UserError, match="its price is in USD"):
        decide(config)


def test_bad_input_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, top="latency = 3.0")
    result = CliRunner().invoke(app, ["decide", "decide.toml"])
    assert (
        isinstance(result.exception, UserError) and result.exception.exit_code == 2 and not (tmp_path / "runs").exists()
    )


@given(choices, worlds, st.floats(0.01, 50))
@settings(max_examples=100, deadline=None)
def test_nowhere_below_the_break_even_is_it_cheaper(own, world, price):
    api = replace(API, input_price=price, output_price=price)
    even = break_even(own, api, world)
    step = capacity_of_one(own, world) / world.peak
    for machines in (1, 2, 3, 7, 50):
        end = replace(world, documents=machines * step)
        cheaper = cost(own, end).total < cost(api, end).total * (1 - 1e-9)
        assert not cheaper or (even is not None and even <= end.documents)


def test_with_a_cost_of_wrong_labels_accuracy_counts(tmp_path):
    file = write(tmp_path)
    file.write_text(file.read_text().replace("per_f1_point_per_month = 100.0", "per_wrong_label = 0.02"))
    tree, _ = decide(load_decide(file))
    tuned = tree["options"][1]
    assert tuned["f1"] is None and tuned["accuracy"]["value"] == 0.78
    assert tuned["gain_per_month"] == pytest.approx(0.08 * 500_000 * 0.02)
    assert any(s.startswith("its accuracy is +8.00 points [+3.00, +13.00]") for s in tree["because"])


def test_a_comparison_of_spans_has_an_f1_and_no_accuracy(tmp_path):
    file = write(tmp_path)
    tree = json.loads((tmp_path / "compare.json").read_text())
    for candidate in tree["candidates"]:
        del candidate["metrics"]["average_accuracy"]
    (tmp_path / "compare.json").write_text(json.dumps(tree))
    found, _ = decide(load_decide(file), datetime.date(2026, 12, 1))
    assert found["options"][1]["f1"]["value"] == 0.78
    file.write_text(file.read_text().replace("per_f1_point_per_month = 100.0", "per_wrong_label = 0.02"))
    with pytest.raises(UserError, match="no accuracy of labels") as told:
        decide(load_decide(file), datetime.date(2026, 12, 1))
    assert "per_f1_point_per_month" in told.value.fix


def test_any_growth_can_be_looked_at():
    for growth in (-0.5, 0.05, 10.0):
        case = replace(CASE, growth=growth, choices=(API, replace(OWN, gain=Gain())))
        rows = sensitivity(case, {})
        (row,) = [r for r in rows if r["input"] == "growth a month"]
        assert -1 <= row["low"] < row["high"] <= 10
        for found in flips(case):
            assert judge(changed(case, found.name, found.at)) == found.verdict != judge(case)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["decide", "decide.toml", "-o", "file"])
    assert isinstance(result.exception, UserError) and "file: cannot be written" in str(result.exception)


def test_break_even_between_two_of_ones_own_is_at_a_stair():
    """The new one is cheaper for a moment only, where the old one needs a further machine: no growing by quarters finds it."""
    world = World(738_500, 0, 0, 1.0, 730, 12, 0.0, 0.0)
    old = Choice("old", "self-hosted base", True, machine_per_hour=0.9165, documents_per_s=0.28064)
    new = Choice("new", "self-hosted tuned", True, machine_per_hour=1.3301, documents_per_s=0.28154, once=500.0)
    assert cost(new, world).total < cost(old, world).total
    even = break_even(new, old, world)
    assert even == pytest.approx(0.28064 * 3600 * 730, rel=1e-6)
    assert cost(new, replace(world, documents=even)).total <= cost(old, replace(world, documents=even)).total


@given(prices, st.floats(0.01, 5), prices, st.floats(0.01, 5), st.floats(0, 5000), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_volume_below_a_break_even_is_cheaper(a, fast_a, b, fast_b, once, api):
    """Against a scan of volumes: between two of one's own, or an API against one's own."""
    world = World(1000.0, 800, 50, 1.5, 730, 12, 0.0, 0.0)
    other = Choice("other", "self-hosted base", True, machine_per_hour=b, documents_per_s=fast_b)
    mine = (Choice("mine", "API tuned", False, input_price=a, output_price=a, once=once) if api
            else Choice("mine", "self-hosted tuned", True, machine_per_hour=a, documents_per_s=fast_a, once=once))  # fmt: skip
    even = break_even(mine, other, world)
    step = capacity_of_one(other, world) / world.peak
    tried = [step * k / 3 for k in range(1, 90)] + [step * k * (1 + 1e-7) for k in range(30)]
    for documents in tried:
        here = replace(world, documents=max(documents, 1e-6))
        cheaper = cost(mine, here).total < cost(other, here).total * (1 - 1e-9)
        assert not cheaper or (even is not None and even <= documents * (1 + 1e-6) + 1e-6)
    if even:
        at = replace(world, documents=even)
        assert cost(mine, at).total <= cost(other, at).total * (1 + 1e-9)


def test_a_target_that_could_not_be_put_to_an_option_is_told(tmp_path):
    file = write(tmp_path, top="latency_p99_s = 2.0")
    tree = json.loads((tmp_path / "compare.json").read_text())
    tree["candidates"][1]["latency_s"] = None
    (tmp_path / "compare.json").write_text(json.dumps(tree))
    found, _ = decide(load_decide(file))
    assert [o["latency_p99_s"] for o in found["options"]] == [1.5, None]
    assert [x for x in found["because"] if "not known" in x] == [
        "how long tuned takes is not known, so the target of 2 s was not put to it"
    ]
