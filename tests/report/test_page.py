import json
from html.parser import HTMLParser

import pytest

from lamella.errors import UserError
from lamella.report.page import parts_of, render, write_report
from lamella.trace.summary import DeviceFacts, summarise

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Reader(HTMLParser):
    """Text and attributes of a page; fails on tags that do not nest."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(html):
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def figure(value):
    return {"value": value, "low": value - 0.05, "high": value + 0.05}


def system(name, value):
    return {"name": name, "rows": 40, "average": figure(value), "tenants": {"foods": {"macro_f1": figure(value)}}}


@pytest.fixture
def run(tmp_path):
    steps = [
        {"step": i, "loss": 3 - i / 10, "grad_norm": 1.0, "learning_rate": 1e-4, "tokens": 100, "label_tokens": 7,
         "step_s": 0.5, "tokens_per_s": 200.0, "rss_bytes": 10**9 + i}
        for i in range(10)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    (tmp_path / "config.json").write_text(
        json.dumps({"name": "trial", "lora": {"rank": 4, "alpha": 8}, "store": "s/tiny"})
    )
    (tmp_path / "receipt.json").write_text(
        json.dumps({"status": "ok", "peak_rss_bytes": 2_500_000_000, "first_labels": [{"row": 0, "text": "city"}]})
    )
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "metrics.json").write_text(
        json.dumps({"systems": [system("zero-shot", 0.1), system("tuned", 0.7)]})
    )
    return tmp_path


def test_page_shows_every_part_and_asks_for_nothing(run):
    path = write_report(run)
    html = path.read_text(encoding="utf-8")
    page = read(html)
    text = " ".join(" ".join(page.text).split())
    for expected in ("trial", "Macro-F1 by tenant", "foods", "0.70", "0.700 [0.650, 0.750]", "10 steps, 1 k tokens",
                     "2.5 GB", "first labels", "city", "receipt.json"):  # fmt: skip
        assert expected in text, expected
    assert "Not in this run's folder" not in text
    assert not [a for a in page.attributes if a[1] in ("src", "href", "srcset", "action")]
    for outside in ("http:", "https:", "url(", "@import", "<script"):
        assert outside not in html


def test_dots_lie_at_their_value(run):
    styles = [value for tag, name, value in read(render(run)).attributes if name == "style"]
    assert styles.count("left:70.0%") == 2  # foods and average
    assert "left:65.0%;width:10.0%" in styles or any(s.startswith("left:65.0%;width:9.9") for s in styles)


def test_text_from_files_is_escaped(run):
    evil = "<script>alert('x')</script>\"&"
    (run / "config.json").write_text(json.dumps({"name": evil, "store": evil}))
    (run / "receipt.json").write_text(json.dumps({evil: evil, "rows": [{evil: evil}]}))
    (run / "eval" / "metrics.json").write_text(json.dumps({"systems": [system(evil, 0.5)]}))
    html = render(run)
    assert "<script" not in html
    assert evil in "".join(read(html).text)


@pytest.mark.parametrize("name", ["metrics.jsonl", "receipt.json", "config.json", "eval/metrics.json"])
def test_a_missing_part_is_left_out_and_named(run, name):
    (run / name).unlink()
    assert f"Not in this run's folder: {name}." in " ".join(read(render(run)).text)


def test_a_single_step_and_a_loss_that_is_not_finite(run):
    lines = [{"step": 0, "loss": 1.0}, {"step": 1, "loss": None}, {"step": 2, "loss": 0.5}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert "without a finite loss are left out" in render(run)
    (run / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert "Receipt" in render(run)


def test_broken_json_is_named_with_its_line(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{torn\n")
    with pytest.raises(UserError) as caught:
        render(run)
    assert caught.value.path.endswith("metrics.jsonl")
    assert caught.value.line == 11


@pytest.mark.parametrize("torn", [b'{"step": 10, "lo', b'{"step": 10, "loss": 1.0}', '{"note": "é'.encode()[:-1]])
@pytest.mark.parametrize("name", ["metrics.jsonl", "validation.jsonl"])
def test_a_torn_last_line_is_left_out(run, name, torn):
    """The run goes on, or was killed in the middle of a line."""
    whole = render(run)
    with (run / name).open("ab") as file:
        file.write(torn)
    assert render(run) == whole


def test_devices_show_what_they_wait_for(run):
    assert "Bottleneck" not in render(run)

    def device(rank, busy_s, **more):
        return {"rank": rank, "step_s": 1.0, "busy_s": busy_s, "compute_s": busy_s, "wait_s": {}, "move_s": {}, "read_s": 0.0,
                "tokens": 50, "rows": 1, "bytes": {}, **more}  # fmt: skip

    devices = [device(0, 0.4, wait_s={"rank 1": 0.6}, bytes={"reduce": 5 * 10**6}), device(1, 1.0)]
    steps = [{**json.loads(line), "devices": devices} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    text = " ".join(" ".join(read(render(run)).text).split())
    for words in ("Bottleneck: rank 1.", "Rank 0 waits 60% for rank 1 (busy 100%)", "rank 0 500 40.0% 60.0% rank 1 60.0%",
                  "sums over ranks: 5 MB a step"):  # fmt: skip
        assert words in text, text
    receipt = {"status": "ok", "devices": summarise(steps, [DeviceFacts("cpu"), DeviceFacts("cuda:0")])}
    (run / "receipt.json").write_text(json.dumps(receipt))
    assert "rank 1 cuda:0" in " ".join(" ".join(read(render(run)).text).split())


def test_empty_or_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing to report"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "none")


def test_parts_of_nested_values():
    parts = parts_of(
        {"a": 1, "b": {"c_bytes": 1500, "d": {"x": 1, "y": [1, 2], "z": None}}, "rows": [{"n": 1}, {"n": 2}]}
    )
    by_title = {p.title: p.tables[0].rows for p in parts}
    assert by_title[""] == [["a", "1"]]
    assert by_title["b"] == [["c", "1.5 kB (1,500 bytes)"]]
    assert by_title["b / d"] == [["x", "1"], ["y", "1, 2"], ["z", "-"]]
    assert by_title["rows"] == [["1"], ["2"]]
