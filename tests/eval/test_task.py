import io
import json
from collections import Counter

import pytest
from rich.console import Console

from lamella.errors import UserError
from lamella.eval.baseline import majority_baseline, tfidf_baseline
from lamella.eval.metrics import Prediction, measure
from lamella.eval.run import SystemResult
from lamella.eval.split import document_key, split_rows
from lamella.eval.table import compare_table, to_json, write_results
from lamella.eval.task import TaskConfig, TaskRow, build_task, load_task
from tests.eval.conftest import LABELS, fcls
from tests.fixtures import write_jsonl

TOML = 'name = "t"\ntest = "test.jsonl"\ntrain = ["train.jsonl"]\nprompt = "{text} - {entity}: {labels}"\n'


def row(**over):
    return {"tenant": "a", "text": "x y", "entity": "y", "label": "L1", **over}


def write_task(folder, toml=TOML, test=None, train=None):
    write_jsonl(folder / "test.jsonl", test or [row(), row(text="z", label="L2")])
    write_jsonl(folder / "train.jsonl", train or [row(text="u"), row(text="v", label="L3")])
    (folder / "task.toml").write_text(toml)
    return folder / "task.toml"


def test_task_reads_rows_labels_and_prompt(tmp_path):
    task = load_task(write_task(tmp_path, TOML + 'system = "Be brief, {tenant}."\n'))
    assert task.labels == {"a": ("L1", "L2", "L3")}
    assert [r.id for r in task.test] == ["test.jsonl:1", "test.jsonl:2"]
    assert task.training_messages(task.test[0]) == [
        {"role": "system", "content": "Be brief, a."},
        {"role": "user", "content": "x y - y: L1, L2, L3"},
        {"role": "assistant", "content": "L1"},
    ]
    assert "tenant a: 0 rows in test for `L3`; left out of macro-F1" in task.notes


def test_declared_labels_keep_their_order_and_bind_the_rows(tmp_path):
    toml = TOML + '[labels]\na = ["L3", "L2", "L1"]\n'
    assert load_task(write_task(tmp_path, toml)).labels["a"] == ("L3", "L2", "L1")
    with pytest.raises(UserError, match=r"'L9'.*not in `labels.a`"):
        load_task(write_task(tmp_path, toml, test=[row(label="L9")]))


def test_braces_of_the_data_are_text(tmp_path):
    task = load_task(write_task(tmp_path, test=[row(text="{entity} {0}"), row(label="L2")]))
    assert task.user_text(task.test[0]).startswith("{entity} {0} - y")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (TOML + "sistem = 'x'\n", r"unknown key `sistem`; nearest valid name: `system`"),
        (TOML.replace("{labels}", "{lables}"), r"unknown field \{lables\}; nearest: \{labels\}"),
        (TOML.replace("{text} - {entity}", ""), "neither"),
        (TOML.replace("{entity}", "{entity.__class__}"), "unknown field"),
        (TOML + "system = '{text}'\n", "unknown field"),
        (TOML + "[instructions]\nb = 'x'\n", "no row has this tenant"),
        (TOML + "[aliases.a]\nw = 'L8'\n", "is no label"),
        (TOML + "[labels]\na = ['L1']\n", "labels of tenant"),
        (TOML + "name = 't'\n", "not valid TOML"),
    ],
)
def test_bad_task_files_are_refused(tmp_path, toml, message):
    with pytest.raises(UserError, match=message) as caught:
        load_task(write_task(tmp_path, toml))
    assert "task.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"tenant": "a"', "test.jsonl:2:"),
        (json.dumps({**row(), "lable": "x"}), "test.jsonl:2.*unknown key `lable`; nearest valid name: `label`"),
        (json.dumps(row(label=3)), "test.jsonl:2.*`label` = 3"),
        (json.dumps({"tenant": "a", "text": "x"}), "test.jsonl:2.*`label` is required"),
        ("[1]", "test.jsonl:2"),
        (json.dumps(row(split="train")), 'says "split": "train"'),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, line, message):
    path = write_task(tmp_path)
    (tmp_path / "test.jsonl").write_text(f"{json.dumps(row())}\n{line}\n")
    with pytest.raises(UserError, match=message):
        load_task(path)


def test_blank_lines_bom_and_crlf_are_harmless(tmp_path):
    path = write_task(tmp_path)
    text = "\ufeff" + json.dumps(row()) + "\r\n\r\n  \n" + json.dumps(row(text="z", label="L2")) + "\r\n\n"
    (tmp_path / "test.jsonl").write_bytes(text.encode())
    assert [r.id for r in load_task(path).test] == ["test.jsonl:1", "test.jsonl:4"]


def test_data_files_are_divided_by_their_rows(tmp_path):
    write_jsonl(tmp_path / "all.jsonl", [row(split="train"), row(text="q", split="test", label="L2")])
    (tmp_path / "task.toml").write_text('name = "t"\ndata = "all.jsonl"\nprompt = "{text}"\n')
    task = load_task(tmp_path / "task.toml")
    assert (len(task.train), len(task.test)) == (1, 1)
    write_jsonl(tmp_path / "all.jsonl", [row()])
    with pytest.raises(UserError, match="no `split`"):
        load_task(tmp_path / "task.toml")


def test_doubled_ids_are_refused():
    config = TaskConfig(name="t", prompt="{text}")
    rows = [TaskRow(**row(id=1)), TaskRow(**row(id=1, label="L2"))]
    with pytest.raises(UserError, match="the id 1"):
        build_task(config, [], rows)


def test_leaked_text_is_said():
    config = TaskConfig(name="t", prompt="{text}")
    task = build_task(config, [TaskRow(**row(text="x  y"))], [TaskRow(**row()), TaskRow(**row(text="z", label="L2"))])
    assert any("1 test rows is also in train" in n for n in task.notes)
    with pytest.raises(UserError, match="0 usable training rows"):
        task.choose_shots("a", 1)


def test_shots_go_round_the_labels_and_are_the_same_each_time(task):
    shots = task.choose_shots("left", 6, seed=1)
    assert Counter(s.label for s in shots) == {label: 2 for label in LABELS}
    assert shots == task.choose_shots("left", 6, seed=1)
    assert not {s.document for s in shots} & {r.document for r in task.test}
    with pytest.raises(UserError, match="few-shot"):
        task.choose_shots("left", 600)


def test_limit_keeps_so_many_rows_per_tenant(task):
    small = task.limited(7)
    assert Counter(r.tenant for r in small.test) == {"left": 7, "right": 7}
    assert small.labels == task.labels
    assert [r.id for r in small.test] == sorted(r.id for r in small.test)


def test_split_never_divides_a_text():
    rows = fcls(120, 40)
    split = split_rows(rows, 0.25, seed=3)
    assert len(split.train) + len(split.test) + split.duplicates == 120
    assert not {document_key(r.text) for r in split.train} & {document_key(r.text) for r in split.test}
    assert 0.15 < len(split.test) / 120 < 0.35
    for label in LABELS:
        share = sum(r.label == label for r in split.test) / sum(r.label == label for r in rows)
        assert 0.1 < share < 0.45
    rows = split.train + split.test  # without duplicates the order of rows does not matter
    again = split_rows(rows[::-1], 0.25, seed=3)
    assert {r.id for r in again.test} == {r.id for r in split.test}
    assert {r.id for r in split_rows(rows, 0.25, seed=4).test} != {r.id for r in split.test}


def test_split_drops_duplicates_and_counts_conflicts():
    rows = [TaskRow(**row(text=f"t{n}")) for n in range(8)]
    split = split_rows([*rows, TaskRow(**row(text="t1")), TaskRow(**row(text=" t2", label="L2"))], 0.5)
    assert (split.duplicates, split.conflicts) == (2, 1)
    assert len(split.train) + len(split.test) == 8


def test_b87_rare_labels_reach_both_sides_or_are_named():
    common = [TaskRow(**row(text=f"t{n}", label="no")) for n in range(95)]
    rare = [TaskRow(**row(text=f"r{n}", label="yes")) for n in range(5)]
    once = TaskRow(**row(text="only", label="once"))
    split = split_rows([*common, *rare, once], 0.1)
    assert Counter(r.label for r in split.test)["yes"] >= 1
    assert Counter(r.label for r in split.train)["yes"] >= 1
    assert split.missing == (("a", "once", "test"),)
    assert split.notes() == ["tenant a: label `once` has 0 rows in test"]


def test_baselines_learn_what_is_there(tmp_path):
    """`street` in the entity decides the label: TF-IDF finds it, the majority cannot."""
    config = TaskConfig(name="t", prompt="{text} {entity}")
    rows = [
        TaskRow(tenant="a", text=f"text {n}", entity=f"{word} {n}", label=label)
        for n in range(30)
        for word, label in (("street", "S"), ("town", "T"), ("town", "T"))
    ]
    unique = [r.model_copy(update={"text": f"{r.text} {n}"}) for n, r in enumerate(rows)]
    task = build_task(config, unique[:60], unique[60:])
    learned, majority = tfidf_baseline(task), majority_baseline(task)
    assert learned.metrics.average.value == 1.0
    assert majority.metrics.average.value == pytest.approx(0.4)
    assert {p.label for p in majority.predictions} == {"T"}
    write_results(tmp_path / "out", task, [majority, learned])
    lines = [json.loads(s) for s in (tmp_path / "out/predictions.jsonl").read_text().splitlines()]
    assert len(lines) == 60
    assert lines[0]["system"] == "majority"
    document = json.loads((tmp_path / "out/metrics.json").read_text())
    assert document == json.loads(json.dumps(to_json(task, [majority, learned])))
    assert document["difference_to_first"]["TF-IDF"]["average"]["value"] == pytest.approx(0.6)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["metrics.json", "predictions.jsonl"]
    system = document["systems"][1]
    for figure in (system["average_accuracy"], system["average_micro_f1"], system["tenants"]["a"]["micro_f1"]):
        assert figure["value"] == figure["low"] == figure["high"] == 1.0
    by_tenant, averages = compare_table([majority, learned]).renderables
    assert by_tenant.row_count == averages.row_count == 2
    assert list(by_tenant.columns[1].cells)[1].startswith("1.000\n[1.000")
    assert [list(c.cells)[1] for c in averages.columns[:7]] == [
        "TF-IDF", "1.000 [1.000, 1.000]", "1.000 [1.000, 1.000]", "1.000", "0", "0", "0",
    ]  # fmt: skip


def test_baseline_without_training_rows_is_refused():
    task = build_task(
        TaskConfig(name="t", prompt="{text}"), [], [TaskRow(**row()), TaskRow(**row(text="z", label="L2"))]
    )
    with pytest.raises(UserError, match="no training rows"):
        tfidf_baseline(task)


def test_b85_tables_show_every_rate_within_130_columns():
    """Four tenants, names of 20 letters, no figure 0 or 1: the widest rows there are in practice."""
    tenants = [f"tenant {n} of the table" for n in range(4)]
    statuses = ("answered", "answered", "invalid", "truncated", "empty")
    rows = [
        Prediction(t, n, f"d{n % 37}", "ab"[n % 2], "ab"[n // 5 % 2] if n % 5 < 2 else None, statuses[n % 5])
        for t in tenants for n in range(250)
    ]  # fmt: skip
    metrics = measure(rows, dict.fromkeys(tenants, ("a", "b")), resamples=100)
    results = [
        SystemResult(name, "generate", 0, tuple(rows), metrics, 123.4) for name in ("16-shot", "tuned: my-adapter")
    ]
    console = Console(width=130, soft_wrap=True, file=io.StringIO())
    console.print(compare_table(results))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= 130
    line = next(s for s in shown.splitlines() if "tuned" in s and "%" in s)
    assert line.count("200 (20.0 %)") == 3
    for figure in (metrics.average_accuracy, metrics.average_micro_f1, metrics.average):
        assert str(figure).split()[0] in shown
        assert str(figure).split(" ", 1)[1] in shown
    assert f"{metrics.accuracy_answered:.3f}".removeprefix("0") in line
    assert "answered" in shown
