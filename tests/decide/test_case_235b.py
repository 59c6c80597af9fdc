"""The decision in docs/case-235b.md: every figure of it is computed here. `python -m tests.decide.test_case_235b` writes the
tables and docs/case-235b-plan.json."""

import json
import re
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from lamella.config import LoraConfig
from lamella.decide.inputs import read_case
from lamella.decide.model import break_even, cost, paces
from lamella.decide.run import decide
from lamella.decide.settings import load_decide
from lamella.decide.verdict import judge
from lamella.files import write_json
from lamella.forecast.document import FORMAT_VERSION
from lamella.forecast.serving import preview
from lamella.forecast.trainable import sites_of
from lamella.hardware.machines import open_machine
from tests.forecast.test_case_235b import DOC, make_shape

TOML = DOC.with_name("case-235b-decide.toml")
PLAN = DOC.with_name("case-235b-plan.json")
TODAY = date(2026, 12, 1)
OWN, NEWER = "own 235B, tuned", "newer open base, API"


def plan_of(shape):
    """Of a plan for the job's machine what a decision reads."""
    found = preview(shape, open_machine("4xH100-80"), [], 4096, sites_of(shape, LoraConfig()))
    here = json.loads(found.model_dump_json())["here"]
    return {"kind": "lamella plan", "format_version": FORMAT_VERSION, "serving": {"here": here}}


def options_table():
    tree, _ = decide(load_decide(TOML), TODAY)
    lines = [
        "| option | F1 | p99 | machines used | a month | per 1,000 documents | net value a month |",
        "|---|---|---|---|---|---|---|",
    ]
    for o in tree["options"]:
        used = "-" if o["utilisation"] is None else f"{o['machines']} x 4 cards, {o['utilisation']:.0%}"
        value = (
            "now"
            if o["name"] == tree["current"]
            else f"{o['net_value_per_month']:,.0f}".replace("-", "-$")
            if o["net_value_per_month"] < 0
            else f"${o['net_value_per_month']:,.0f}"
        )
        lines.append(f"| {o['name']} | {o['f1']['value']:.3f} | {o['latency_p99_s']:.0f} s | {used} | ${o['per_month']:,.0f} | "
                     f"${o['per_1000_documents']:.2f} | {value} |")  # fmt: skip
    lines += ["", f"**{tree['sentence']}**", "", *(f"- {text}" for text in tree["would_change_it"])]
    return "\n".join(lines)


def paces_table():
    case, _ = read_case(load_decide(TOML))
    own = case.choice(OWN)
    lines = [
        "| documents at once | documents/s | p99 | machines for the busiest hour | used | a month |",
        "|---|---|---|---|---|---|",
    ]
    for p in paces(own, case.world):
        spent = cost(own, replace(case.world, latency_target=p.latency_p99_s))
        lines.append(f"| {p.sequences} | {p.documents_per_s:.2f} | {p.latency_p99_s:.0f} s | {spent.machines} | {spent.utilisation:.0%} | "
                     f"${spent.total:,.0f} |")  # fmt: skip
    return "\n".join(lines)


def nobody_waits():
    """The same, were any latency good enough."""
    case, _ = read_case(load_decide(TOML))
    return replace(case, world=replace(case.world, latency_target=float("inf")))


def without_newer(case):
    return replace(case, choices=tuple(c for c in case.choices if c.name != NEWER))


def even_of(case, peak):
    return break_even(case.choice(OWN), case.choice(case.current), replace(case.world, peak=peak))


@pytest.fixture(scope="module")
def text():
    return " ".join(DOC.read_text().split())


def test_the_plan_is_what_the_forecast_says(tmp_path):
    assert json.loads(PLAN.read_text()) == plan_of(make_shape(tmp_path))


def test_the_tables_are_in_the_document():
    assert options_table() in DOC.read_text(), options_table()
    assert paces_table() in DOC.read_text(), paces_table()


def test_what_the_text_says_of_the_verdict(text):
    tree, _ = decide(load_decide(TOML), TODAY)
    assert tree["verdict"] == "do not deploy" and tree["look_again"] in text
    assert {b["against"]: b["documents_per_month"] for b in tree["break_even"]}["tuned API"] is None
    case, _ = read_case(load_decide(TOML))
    gain = case.choice(NEWER).gain
    assert gain.low < 0 < gain.high and gain.value == pytest.approx(-0.01)
    assert f"worth ${case.net_of(NEWER):,.0f} a month more" in text


def test_what_the_text_says_of_nobody_waiting(text):
    case = nobody_waits()
    assert judge(case) == "do not deploy" and cost(case.choice(OWN), case.world).machines == 1
    assert f"even if nobody waits, it loses ${-case.net:,.0f} a month" in text
    assert even_of(case, 4.0) is None
    assert f"from {even_of(case, 2.0):,.0f} documents a month on" in text
    alone = without_newer(replace(case, world=replace(case.world, peak=1.0)))
    assert judge(alone) == "do not deploy"
    grown = replace(alone, world=replace(alone.world, documents=2_000_000))
    assert judge(grown) == "deploy" and f"worth ${grown.net:,.0f} a month at 2,000,000 documents" in text


def write_document():
    with tempfile.TemporaryDirectory() as scratch:
        write_json(PLAN, plan_of(make_shape(Path(scratch))))
    text = DOC.read_text()
    for name, table in (("decision", options_table()), ("paces", paces_table())):
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S
        )
    DOC.write_text(text)
    case = nobody_waits()
    alone = without_newer(replace(case, world=replace(case.world, peak=1.0, documents=2_000_000)))
    print(case.net, even_of(case, 4.0), even_of(case, 2.0), judge(alone), alone.net)
    print(decide(load_decide(TOML), TODAY)[0]["look_again"])


if __name__ == "__main__":
    write_document()
