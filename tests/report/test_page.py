"""What the page is told of a run, and the file that it is."""

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from typer.testing import CliRunner

from lamella.cli import app
from lamella.errors import UserError
from lamella.report.collect import COLUMNS, Columns, RunFiles, last_line, thinned
from lamella.report.page import render, report_data, script_json, write_report
from lamella.report.tables import parts_of
from lamella.report.view import detail, running_mean, status_of, summary
from tests.report import folders


class Reader(HTMLParser):
    """Attributes, and the text of the data element."""

    def __init__(self):
        super().__init__()
        self.attributes, self.data, self._inside = [], "", False

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        self._inside = ("id", "data") in attrs

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        self.data += data if self._inside else ""


def data_of(html):
    reader = Reader()
    reader.feed(html)
    return json.loads(reader.data)


def shown(run_folder):
    run = RunFiles.of(run_folder)
    run.update()
    return detail(run)


def part(tree, key):
    return next(s for s in tree["sections"] if s["id"] == key)


@pytest.fixture
def run(tmp_path):
    return folders.write_run(tmp_path / "trial", steps=40)


def test_the_file_holds_every_part_and_asks_for_nothing(run):
    html = write_report(run).read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(html)
    assert not [a for a in reader.attributes if a[1] in ("src", "srcset", "action")]
    assert {a[2] for a in reader.attributes if a[1] == "href"} == {"data:,", "#main"}
    policy = next(a[2] for a in reader.attributes if a[1] == "content" and "default-src" in a[2])
    assert (
        policy.startswith("default-src 'none'")
        and "connect-src 'none'" in policy
        and "unsafe" not in policy.split("script-src")[1].split(";")[0]
    )
    tree = data_of(html)["details"]["trial"]
    assert [s["id"] for s in tree["sections"]] == [
        "training",
        "devices",
        "planned",
        "topology",
        "memory",
        "experts",
        "settings",
        "quality",
        "receipt",
    ]
    assert tree["status"] == "ok" and tree["missing"] == []


def test_figures_are_the_files(run):
    tree = shown(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = next(c for c in part(tree, "training")["charts"] if c["key"] == "loss")
    assert loss["series"][0]["x"] == [x["step"] for x in lines]
    assert loss["series"][0]["y"] == pytest.approx([x["loss"] for x in lines], rel=1e-5)
    dots = part(tree, "quality")["charts"][0]
    assert dots["groups"] == ["addresses", "parties", "foods", "courts", "average"]
    assert dots["series"][2] == {"name": "tuned", "values": [pytest.approx(v) for v in (
        [0.83, 0.77, 0.88], [0.68, 0.62, 0.73], [0.8, 0.74, 0.85], [0.78, 0.72, 0.83], [0.78, 0.75, 0.81])]}  # fmt: skip
    memory = part(tree, "memory")["charts"][0]
    assert memory["limits"] == [2.0e9, 1.4e9] and sum(p["values"][0] for p in memory["parts"]) == 1e9
    assert part(tree, "memory")["tables"][0]["rows"][0][1:] == ["1 GB", "900 MB", "2 GB", "50.0%"]
    graph = part(tree, "topology")["charts"][0]
    assert {(x["a"], x["b"], x["label"]) for x in graph["links"]} >= {
        ("box", "RTX 3090 #0", "24.0 GB/s in, 22.0 out"),
        ("RTX 3090 #0", "RTX 3090 #1", "11.0 GB/s pcie"),
    }
    busy = part(tree, "devices")["charts"][0]["parts"]
    assert busy[0] == {"name": "busy", "values": pytest.approx([0.9, 0.7])}
    lanes = part(tree, "devices")["charts"][1]
    assert (
        len(lanes["spans"]) == len([e for e in folders.trace(2)["traceEvents"] if e["ph"] == "X"])
        and lanes["left_out"] == 0
    )
    heat = part(tree, "experts")["charts"][0]
    counts = json.loads((run / "receipt.json").read_text())["expert_load"]["layer 0"]
    assert heat["values"][3][2] == pytest.approx(counts[3] * 16 / sum(counts), rel=1e-5)
    assert tree["verdict"][-1] == f"{40 / 3600 * 1.2:.2f} USD so far at 1.2 USD an hour"
    for s in tree["sections"]:
        for chart in s["charts"]:
            assert chart["table"]["rows"], f"{chart['title']} has no table"


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "receipt.json", "config.json", "plan.json", "trace.json", "eval/metrics.json"]
)
def test_a_missing_part_is_left_out_and_named(run, name):
    (run / name).unlink()
    assert name in shown(run)["missing"]


def test_text_from_files_cannot_end_the_script(run):
    evil = "</script><img src=x onerror=alert(1)>\u2028<!--"
    (run / "config.json").write_text(json.dumps({"name": evil, "store": evil}))
    (run / "receipt.json").write_text(json.dumps({"status": evil, evil: [{evil: evil}]}))
    html = render(run)
    assert html.count("</script>") == 4 and "<img" not in html and "\u2028" not in html
    assert data_of(html)["details"]["trial"]["title"] == evil
    assert script_json({"a": "<&>"}) == '{"a": "\\u003c\\u0026\\u003e"}'


def test_not_finite_values_become_gaps(run):
    lines = folders.metrics_lines(5)
    lines[2]["loss"], lines[3]["grad_norm"], lines[1]["loss"] = None, math.inf, math.nan
    folders.write_lines(run / "metrics.jsonl", lines)
    tree = data_of(render(run))["details"]["trial"]
    loss = next(c for c in part(tree, "training")["charts"] if c["key"] == "loss")
    assert [y is None for y in loss["series"][0]["y"]] == [False, True, True, False, False]
    assert "2 steps have no finite loss" in part(tree, "training")["note"]


@pytest.mark.parametrize("torn", [b'{"step": 10, "lo', b'{"step": 10, "loss": 1.0}', '{"note": "é'.encode()[:-1]])
@pytest.mark.parametrize("name", ["metrics.jsonl", "validation.jsonl"])
def test_a_torn_last_line_is_left_out(run, name, torn):
    """The run goes on, or was killed in the middle of a line."""
    whole = shown(run)
    with (run / name).open("ab") as file:
        file.write(torn)
    again = shown(run)
    assert again["sections"] == whole["sections"]


def test_broken_json_is_named_with_its_line(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{torn\n")
    with pytest.raises(UserError) as caught:
        render(run)
    assert caught.value.path.endswith("metrics.jsonl") and caught.value.line == 41
    (run / "metrics.jsonl").unlink()
    (run / "receipt.json").write_text("{")
    with pytest.raises(UserError, match=r"receipt.json"):
        render(run)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "receipt.json",
            '{"status": "ok", "figures": 3, "devices": ["x"], "comparison": [1], "warnings": null, "expert_load": {"a": "b"}}',
        ),
        ("receipt.json", "[1, 2]"),
        ("plan.json", '{"figures": {"ranks": 3}, "machine": []}'),
        ("config.json", '{"lora": 1, "train": []}'),
        ("trace.json", '{"traceEvents": [{"ph": "X"}]}'),
        ("eval/metrics.json", '{"systems": [{"name": 1}]}'),
        ("metrics.jsonl", '{"step": 1, "loss": 1' + "0" * 400 + "}\n"),
        ("metrics.jsonl", '{"step": "x"}\n{"step": 1, "devices": "no", "loss": "a"}\n'),
    ],
)
def test_files_of_another_shape_are_told_and_the_rest_is_shown(run, name, text):
    (run / name).write_text(text)
    data = data_of(render(run))
    assert [s["id"] for s in data["details"]["trial"]["sections"]] and data["runs"][0]["name"] == "trial"


def test_only_what_was_appended_is_read(tmp_path):
    file = tmp_path / "m.jsonl"
    folders.write_lines(file, folders.metrics_lines(10))
    columns = Columns(file, COLUMNS)
    assert columns.update() and len(columns) == 10 and not columns.update()
    first = columns.column("loss").tolist()
    folders.write_lines(file, folders.metrics_lines(12)[10:], "a")
    with file.open("a") as stream:
        stream.write('{"step": 13')
    assert columns.update() and len(columns) == 12 and columns.column("loss").tolist()[:10] == first
    with file.open("a") as stream:
        stream.write(', "loss": 0.5}\n')
    assert columns.update() and columns.column("step")[-1] == 13
    folders.write_lines(file, folders.metrics_lines(3, seed=5))  # begun anew
    columns.update()
    assert len(columns) == 3
    file.unlink()
    assert columns.update() and len(columns) == 0


def test_thinning_keeps_what_sticks_out():
    y = np.sin(np.arange(100_000) / 500)
    y[77_777], y[12_345] = 40.0, -30.0
    x, (kept,) = thinned(np.arange(100_000.0), [y], 1000)
    assert len(x) <= 1010 and kept.max() == 40.0 and kept.min() == -30.0
    assert x[0] == 0 and x[-1] == 99_999 and (np.diff(x) > 0).all()


def test_running_mean_leaves_gaps_out():
    values = np.array([1.0, np.nan, 3.0, 5.0])
    assert running_mean(values, 2).tolist() == [1.0, 1.0, 3.0, 4.0]
    assert np.isnan(running_mean(np.array([np.nan]), 3)[0])


def test_a_run_is_running_until_it_has_been_still_for_long(run):
    (run / "receipt.json").unlink()
    touched_s = (run / "metrics.jsonl").stat().st_mtime
    assert summary(run, touched_s + 5)["status"] == "running"
    assert summary(run, touched_s + 500)["status"] == "stopped"
    assert status_of({}, touched_s, 300.0, touched_s + 500) == "running"  # a step takes longer
    assert last_line(run / "metrics.jsonl")["step"] == 40
    files = RunFiles.of(run)
    files.update()
    assert (
        "step 40 of 400, 6 min 00 s left" in detail(files, now_s=touched_s + 1)["verdict"]
    )  # the plan's steps, a second each


def test_comparisons_load_tests_and_decisions_are_shown(tmp_path):
    data = report_data(folders.write_all(tmp_path, runs=2))
    kinds = [s["id"].split("-")[0] for s in data["artifacts"]]
    assert kinds == ["compare", "loadtest", "decide"] and len(data["runs"]) == 2
    compare, load, decide = data["artifacts"]
    assert compare["tables"][0]["rows"][0][:3] == ["zero-shot", "self-hosted-base", "likelihood"]
    assert "+0.630 [+0.580, +0.680]" in compare["tables"][1]["rows"][0]
    confused = compare["tables"][2]
    assert confused["caption"] == "tuned: what was taken for what"
    assert confused["rows"][0] == ["courts", "civil", "penal", "9", "18.0%"] and len(confused["rows"]) == 3
    assert "1,180 answered" in load["note"] and "97.0%" in load["note"]
    assert decide["note"].startswith("DEPLOY: Deploy the tuned model")
    assert [c["kind"] for c in decide["charts"]] == ["lines", "tornado"]
    assert decide["charts"][1]["rows"][-1]["name"] == "documents per month"  # the widest is on top


def test_a_load_test_of_several_loads_and_few_samples(tmp_path):
    tree = folders.load_test()
    tree["e2e_s"] = {**tree["e2e_s"], "samples": 40, "few_for_p99": True}
    tree["levels"] = [{**tree, "concurrency": 1}, {**tree, "concurrency": None, "rate": 5.0}]
    folders.write_run(tmp_path / "a", 5)
    (tmp_path / "loadtest.json").write_text(json.dumps(tree))
    (shown,) = report_data(tmp_path)["artifacts"]
    assert ["whole answer", "0.2 s", "0.4 s", "0.8 s (of 40)", "0.25 s"] in shown["tables"][0]["rows"]
    assert [row[0] for row in shown["tables"][1]["rows"]] == ["1 at a time", "5.0 a second"]


def test_an_artifact_that_is_not_as_expected_says_so_and_harms_nothing(tmp_path):
    folders.write_run(tmp_path / "a", 5)
    (tmp_path / "decide.json").write_text('{"kind": "decide"}')
    (tmp_path / "compare.json").write_text("{")
    notes = [s["note"] for s in report_data(tmp_path)["artifacts"]]
    assert any("not as expected" in n for n in notes) and any("not JSON" in n for n in notes)


def test_empty_or_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing to report"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "none")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["gone/x.html", "."])
def test_a_page_that_cannot_be_written_is_told(run, tmp_path, target):
    with pytest.raises(UserError, match="cannot be written"):
        write_report(run, tmp_path / target)


def test_the_verb(run, tmp_path):
    result = CliRunner().invoke(app, ["report", str(run), "-o", str(tmp_path / "p.html"), "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["details"]["trial"]["status"] == "ok"
    assert re.search(r"<title>trial: runs</title>", (tmp_path / "p.html").read_text())


def test_parts_of_nested_values():
    parts = parts_of(
        {"a": 1, "b": {"c_bytes": 1500, "d": {"x": 1, "y": [1, 2], "z": None}}, "rows": [{"n": 1}, {"n": 2}]}
    )
    by_title = {p.title: p.tables[0].rows for p in parts}
    assert by_title[""] == [["a", "1"]]
    assert by_title["b"] == [["c", "1.5 kB (1,500 bytes)"]]
    assert by_title["b / d"] == [["x", "1"], ["y", "1, 2"], ["z", "-"]]
    assert by_title["rows"] == [["1"], ["2"]]


def test_the_room_imports_no_torch():
    import subprocess
    import sys

    code = "import sys, lamella.report.page, lamella.report.watch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
