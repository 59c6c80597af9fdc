"""The decision in docs/case-235b.md: every figure of it is computed here. `python -m tests.decide.test_case_235b` writes it."""

import re
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from lamella.decide.inputs import read_case
from lamella.decide.model import break_even
from lamella.decide.run import decide
from lamella.decide.settings import load_decide
from lamella.decide.verdict import judge
from lamella.forecast.serving import preview
from lamella.hardware.machines import open_machine
from tests.forecast.test_case_235b import DOC, make_shape

TOML = DOC.with_name("case-235b-decide.toml")
TODAY = date(2026, 12, 1)
SHARE = 0.5
"""Of the bound that a server is taken to reach."""


def served(shape):
    """(documents per second at full load, seconds of an answer then, seconds of one alone), half of the bounds in FP8."""
    found = preview(shape, open_machine("4xH100-80"), [], 4096)
    (entry,) = [s for s in found.here if s.format == "fp8"]
    alone, *_, full = entry.decode
    volume = load_decide(TOML).volume
    read_s = volume.input_tokens / (entry.prefill_tokens_per_s * SHARE)
    rate = 1 / (volume.output_tokens / (full.tokens_per_s * SHARE) + read_s)
    return (rate, full.sequences, volume.output_tokens * full.sequences / (full.tokens_per_s * SHARE),
            volume.output_tokens / (alone.tokens_per_s * SHARE))  # fmt: skip


def table():
    tree, _ = decide(load_decide(TOML), TODAY)
    lines = [
        "| option | F1 | a month | per 1,000 documents | machines used | p99 | net value a month |",
        "|---|---|---|---|---|---|---|",
    ]
    for o in tree["options"]:
        used = "-" if o["utilisation"] is None else f"{o['machines']} x 4 cards, {o['utilisation']:.0%}"
        value = "now" if o["name"] == tree["current"] else f"${o['net_value_per_month']:,.0f}"
        lines.append(f"| {o['name']} | {o['f1']['value']:.3f} | ${o['per_month']:,.0f} | ${o['per_1000_documents']:.2f} | {used} | "
                     f"{o['latency_p99_s']:.0f} s | {value} |")  # fmt: skip
    lines += ["", f"**{tree['sentence']}**"]
    return "\n".join(lines)


def without_target():
    """What is left when nobody waits for the label."""
    case, _ = read_case(load_decide(TOML))
    free = replace(case, choices=tuple(replace(c, out="") for c in case.choices))
    return free, judge(free)


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    return make_shape(tmp_path_factory.mktemp("235b"))


def test_rate_and_latency_are_the_forecasts(shape):
    rate, sequences, full_s, alone_s = served(shape)
    own = load_decide(TOML).options[1]
    assert own.documents_per_s == pytest.approx(rate, rel=0.01) and own.latency_p99_s == pytest.approx(full_s, rel=0.01)
    text = DOC.read_text()
    assert f"{sequences} documents at once" in text and f"{full_s:.0f} s" in text and f"{alone_s:.1f} s" in text


def test_the_table_is_in_the_document():
    assert table() in DOC.read_text()


def test_what_the_text_says():
    text = " ".join(DOC.read_text().split())
    tree, _ = decide(load_decide(TOML), TODAY)
    assert tree["verdict"] == "do not deploy"
    assert {b["against"]: b["documents_per_month"] for b in tree["break_even"]}[
        "tuned API"
    ] is None and "at any volume" in text
    free, verdict = without_target()
    even = break_even(free.choice(free.proposal), free.choice(free.current), replace(free.world, peak=2.0))
    assert f"from {even:,.0f} documents a month on" in text
    assert verdict == "do not deploy" and f"even if nobody waits, it loses ${-free.net:,.0f} a month" in text
    assert f"${free.net_of('newer open base, API'):,.0f} a month more" in text
    alone = replace(
        free, choices=tuple(c for c in free.choices if "newer" not in c.name), world=replace(free.world, peak=1.0)
    )
    assert judge(alone) == "do not deploy"
    assert judge(replace(alone, world=replace(alone.world, documents=2_000_000))) in ("wait", "deploy")
    assert tree["look_again"] in text


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(served(make_shape(Path(scratch))))
    free, _ = without_target()
    print(break_even(free.choice(free.proposal), free.choice(free.current), replace(free.world, peak=2.0)), free.net)
    DOC.write_text(
        re.sub(r"(<!-- decision -->\n).*?(<!-- /decision -->)", rf"\1{table()}\n\2", DOC.read_text(), flags=re.S)
    )
