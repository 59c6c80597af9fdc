"""A run beside its plan."""

import io
import json

import pytest
from rich.console import Console

from lamella.errors import UserError
from lamella.forecast.compare import compare_run
from lamella.plan.split import Split, Stage
from tests.forecast.cases import Fake
from tests.forecast.runs import LAYERS, write_run

PLANNED = Fake(1.0, 2.0, 1.0, 5.0, 0.5, 0.01, 0.001)
TWO = Split((Stage(0, LAYERS, (0, 1), (0.5, 0.5)),))


def line(comparison, where, what):
    (found,) = [x for x in (*comparison.summary, *comparison.pieces) if (x.where, x.what) == (where, what)]
    return found


def test_a_run_as_planned(tmp_path):
    comparison = compare_run(write_run(tmp_path / "run", PLANNED, PLANNED, resident=(0, 1)))
    assert (comparison.steps, comparison.traced_steps) == (4, 4)
    assert comparison.missing == ()
    ratios = {(x.where, x.what): x.ratio for x in (*comparison.summary, *comparison.pieces)}
    assert ratios.pop(("rank 0", "peak memory")) == pytest.approx(0.9)
    assert list(ratios.values()) == pytest.approx([1.0] * len(ratios), rel=1e-6)
    names = {what for _, what in ratios}
    assert {"forward 0", "backward 5", "dequantise layer 3", "read layer 4", "head", "update", "gradient norm",
            "seconds", "speed", "waiting for disk", "reading", "bytes from disk", "idle"} <= names  # fmt: skip


def test_the_largest_miss_comes_first(tmp_path):
    truth = Fake(1.0, 2.0, 1.0, 5.0, 0.5, 0.01, 0.001, slower={3: 1.5})
    comparison = compare_run(write_run(tmp_path / "run", PLANNED, truth))
    first, second, third, *_ = comparison.pieces
    assert (first.what, second.what) == ("backward 3", "forward 3")
    assert (first.planned, first.measured, first.ratio) == (pytest.approx(180), pytest.approx(270), pytest.approx(1.5))
    assert third.missed == pytest.approx(0, abs=1e-6)
    assert line(comparison, "step", "seconds").measured == pytest.approx(
        line(comparison, "step", "seconds").planned + 90 + 30
    )
    assert "rank 0: backward 3 3 min 00 s, measured 4 min 30 s (1.50x)" in comparison.lines()
    tree = json.loads(json.dumps(comparison.to_dict()))
    assert tree["pieces"][0] == {"where": "rank 0", "what": "backward 3", "unit": "s", "planned": pytest.approx(180),
                                 "measured": pytest.approx(270), "ratio": pytest.approx(1.5)}  # fmt: skip


def test_first_steps_are_left_out_of_metrics_and_trace(tmp_path):
    comparison = compare_run(write_run(tmp_path / "run", PLANNED, PLANNED, steps=5, traced=5))
    assert (comparison.steps, comparison.traced_steps) == (3, 3)
    assert line(comparison, "step", "seconds").ratio == pytest.approx(1)
    short = compare_run(write_run(tmp_path / "short", PLANNED, PLANNED, steps=1, traced=1))
    assert short.steps == 1 and any("its first one counts" in text for text in short.missing)


def test_of_two_ranks_each(tmp_path):
    comparison = compare_run(write_run(tmp_path / "run", PLANNED, PLANNED, lengths=(40, 20), split=TWO))
    waits = [x for x in comparison.summary if x.what == "exchange and waiting for others"]
    assert [x.where for x in waits] == ["rank 1"]  # the one with the shorter row
    assert waits[0].ratio == pytest.approx(1)
    assert line(comparison, "rank 1", "idle").ratio == pytest.approx(1)
    assert line(comparison, "rank 1", "peak memory").measured == 1000


def test_what_is_missing_is_named(tmp_path):
    comparison = compare_run(write_run(tmp_path / "run", PLANNED, PLANNED, traced=0, receipt=False))
    assert comparison.pieces == () and comparison.traced_steps == 0
    assert line(comparison, "rank 0", "computing").measured is None
    assert ["trace.json" in text for text in comparison.missing] == [True, False]
    assert "receipt.json" in comparison.missing[1]
    assert any("measured ?" in text for text in comparison.lines())
    other = write_run(tmp_path / "other", PLANNED, PLANNED, steps=2, traced=1)
    trace = json.loads((other / "trace.json").read_text())
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["name"] != "compute forward 2"]
    (other / "trace.json").write_text(json.dumps(trace))
    assert "planned pieces that the trace has not: forward 2" in compare_run(other).missing


def test_it_is_printed(tmp_path):
    comparison = compare_run(write_run(tmp_path / "run", PLANNED, PLANNED))
    text = io.StringIO()
    console = Console(file=text, width=80)
    for part in comparison.render(shown=3):
        console.print(part)
    assert "1.00x" in text.getvalue() and "more pieces are closer" in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= 80


@pytest.mark.parametrize(
    ("file", "content", "what", "where"),
    [
        ("plan.json", None, "no plan.json", None),
        ("metrics.jsonl", None, "no metrics.jsonl", None),
        ("metrics.jsonl", '{"step": 1}\n', "not a line of metrics", 1),
        ("metrics.jsonl", "{\n", "not JSON", 1),
        ("metrics.jsonl", "", "no step", None),
        ("trace.json", "[]", "not a trace", None),
        ("trace.json", "{\n{", "not JSON", 2),
        ("receipt.json", "{", "not JSON", 1),
    ],
)
def test_bad_files(tmp_path, file, content, what, where):
    run = write_run(tmp_path / "run", PLANNED, PLANNED)
    (run / file).unlink()
    if content is not None:
        (run / file).write_text(content)
    with pytest.raises(UserError, match=what) as caught:
        compare_run(run)
    assert caught.value.line == where
    with pytest.raises(UserError, match="no such run"):
        compare_run(tmp_path / "nowhere")
