"""`lamella compare`: against a fake server, and on a tiny store."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lamella.cli import app
from lamella.compare.run import compare
from lamella.compare.settings import load_compare
from lamella.compare.statistics import confusion, difference, holm, p_value
from lamella.errors import RunFailed, UserError
from lamella.eval.metrics import Prediction
from lamella.eval.run import evaluate
from tests.endpoint.fake import FakeServer, error, no_sleep
from tests.serve.tiny import make_tiny

KEY = "sk-very-secret-0123456789"
LABELS = {"north": ("cold", "warm", "mild"), "south": ("yes", "no")}


@pytest.fixture
def folder(tmp_path):
    rows = [
        {"tenant": tenant, "text": f"{tenant} text {k}", "label": labels[k % len(labels)], "split": side, "id": f"{tenant}-{side}-{k}"}
        for tenant, labels in LABELS.items() for side, count in (("test", 12), ("train", 6)) for k in range(count)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "task.toml").write_text(
        'name = "t"\ndata = "rows.jsonl"\nprompt = "{text}: {labels}"\nmax_new_tokens = 32\n'
        + "[labels]\n" + "".join(f"{t} = {json.dumps(x)}\n" for t, x in LABELS.items())
    )  # fmt: skip
    return tmp_path


def write(folder, *candidates, **top):
    lines = ['name = "c"', 'task = "task.toml"', "resamples = 200", *(f"{k} = {json.dumps(v)}" for k, v in top.items())]
    for c in candidates:
        lines += ["[[candidates]]", *(f"{k} = {_toml(v)}" for k, v in c.items())]
    (folder / "compare.toml").write_text("\n".join(lines) + "\n")
    return load_compare(folder / "compare.toml")


def _toml(value):
    return (
        "{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in value.items()) + "}"
        if isinstance(value, dict)
        else json.dumps(value)
    )


def api(**more):
    return {"name": "api", "endpoint": "http://test/v1", "model": "m", "answering": "generate", "attempts": 3, **more}


def gold(body):
    """The right answer: rows' labels go round."""
    text = body["messages"][-1]["content"]
    tenant, number = text.split()[0], int(text.split()[2].rstrip(":"))
    return LABELS[tenant][number % len(LABELS[tenant])]


def right(body):
    return (gold(body) if "text" in body["messages"][-1]["content"] else "banana"), "", "stop"


def run(config, folder, server):
    return compare(config, folder / "out", transport=server.transport, sleep=no_sleep)


def test_a_perfect_server_beside_a_baseline(folder):
    server = FakeServer(right, tokens=(100, 4, 0))
    price = {"input": 1.0, "output": 10.0, "date": "2026-11-01"}
    tree = run(write(folder, {"name": "majority", "baseline": "majority"}, api(price=price)), folder, server)
    base, ours = tree["candidates"]
    assert ours["metrics"]["average"]["value"] == 1.0 and ours["tokens"] == {
        "input": 2400,
        "output": 96,
        "reasoning": 0,
        "cached_input": 0,
    }
    assert ours["money"]["total"] == pytest.approx(24 * (100 * 1 + 4 * 10) / 1e6) and ours["money"][
        "per_1000_documents"
    ] == pytest.approx(0.14)
    assert (
        ours["role"] == "api-base"
        and base["role"] == "baseline"
        and ours["latency_s"]["p99"] >= ours["latency_s"]["p50"]
    )
    (d,) = tree["differences"]
    assert d["tenants"]["south"]["significant"] and d["average"]["value"] == pytest.approx(
        1 - base["metrics"]["average"]["value"]
    )
    assert tree["confusion"]["api"]["north"] == {"labels": ["cold", "warm", "mild"], "predicted": ["cold", "warm", "mild", "(none)"],
                                                 "counts": [[4, 0, 0, 0], [0, 4, 0, 0], [0, 0, 4, 0]]}  # fmt: skip
    changed = [json.loads(x) for x in (folder / "out" / "changed.jsonl").read_text().splitlines()]
    assert len(changed) == tree["changed"]["api"]["gained"] == 14 and changed[0]["change"] == "gained"
    assert json.loads(json.dumps(tree)) == json.loads((folder / "out" / "compare.json").read_text())


def test_a_second_run_asks_nothing(folder):
    server, config = FakeServer(right), write(folder, api())
    first = run(config, folder, server)
    asked = len(server.bodies)
    second = run(config, folder, server)
    assert len(server.bodies) == asked == 24 and second["candidates"][0]["from_cache"] == 24
    for tree in (first, second):
        tree.pop("created")
        tree["candidates"][0].pop("from_cache")
        tree["candidates"][0].pop("wall_s")
    assert first == second
    run(write(folder, api(temperature=0.5)), folder, server)
    assert len(server.bodies) == 48  # another question


def test_a_run_that_broke_goes_on(folder):
    server, config = FakeServer(right), write(folder, api(concurrency=1))
    server.fails = [None] * 10 + [error(500)] * 3
    with pytest.raises(RunFailed, match="1 of 24 rows of 'api' got no answer after 3 attempts"):
        run(config, folder, server)
    assert not (folder / "out" / "compare.json").exists() and len(server.bodies) == 26
    assert run(config, folder, server)["candidates"][0]["from_cache"] == 23
    assert len(server.bodies) == 27


def test_the_ceiling_stops_before_it_is_passed(folder):
    server = FakeServer(right, tokens=(1000, 32, 0))
    price = {"input": 1000.0, "output": 0.0, "date": "2026-11-01"}
    config = write(folder, api(price=price, concurrency=8), ceiling="7 USD")
    with pytest.raises(RunFailed, match="ceiling of 7 is reached") as caught:
        run(config, folder, server)
    billed = len(server.bodies) * 1.0
    assert billed <= 7 and "nothing is asked twice" in caught.value.fix
    with pytest.raises(RunFailed):  # the same again: what was spent counts
        run(config, folder, server)
    assert len(server.bodies) * 1.0 == billed
    tree = run(write(folder, api(price=price), ceiling="100 USD"), folder, server)
    assert tree["spent"]["total"] == pytest.approx(24.0) and len(server.bodies) == 24


def test_concurrency_is_what_was_asked(folder):
    import asyncio

    server = FakeServer(right)

    async def slow(body):
        await asyncio.sleep(0.002)

    server.gate = slow
    run(write(folder, api(concurrency=5)), folder, server)
    assert server.most == 5


@pytest.mark.parametrize("way", ["choice", "json_schema", "enum_schema", "guided_choice"])
def test_labels_are_enforced_in_the_way_that_holds(folder, way):
    server = FakeServer(right, enforce=(way,))
    tree = run(write(folder, api(answering="constrained")), folder, server)
    assert tree["in_effect"]["api"]["way"] == way and tree["candidates"][0]["metrics"]["average"]["value"] == 1.0
    assert any(way in note for note in tree["candidates"][0]["notes"])


def test_a_server_that_cannot_be_held_is_told_before_any_row(folder):
    server = FakeServer(right, enforce=())
    with pytest.raises(UserError, match="cannot be held to labels"):
        run(write(folder, api(answering="constrained")), folder, server)
    assert len(server.bodies) == 4


def test_b85_thinking_that_used_up_its_budget_is_truncated(folder):
    """Statuses by row; half-finished reasoning is never graded; both rates are there, and a warning."""

    def answer(body):
        label = gold(body)
        kind = int(body["messages"][-1]["content"].split()[2].rstrip(":")) % 6
        return [
            (label, "because", "stop"),  # complete, thinking in a field of its own
            (f"<think>so {label}</think>{label}", "", "stop"),  # complete, thinking in the text
            (f"<think>it may be {label}", "", "length"),  # cut inside thinking
            ("", "long", "stop"),  # empty after thinking
            (label, "", "stop"),  # no thinking at all
            (f"and so</think>{label}", "", "stop"),  # closing tag only
        ][kind]

    tree = run(write(folder, api(answering="think", thinking_budget=32)), folder, FakeServer(answer))
    m = tree["candidates"][0]["metrics"]
    assert (m["truncated"], m["empty"], m["invalid"]) == (4, 4, 0)
    assert m["truncated_rate"] == pytest.approx(1 / 6)
    assert m["average_accuracy"]["value"] == pytest.approx(4 / 6) and m["accuracy_answered"] == 1.0
    assert any("truncated" in note for note in tree["candidates"][0]["notes"])
    lines = [json.loads(x) for x in (folder / "out" / "predictions.jsonl").read_text().splitlines()]
    assert {x["status"] for x in lines if x["label"] is None} == {"truncated", "empty"}


def test_b85_an_answer_after_too_long_thinking_is_truncated_too(folder):
    tree = run(
        write(folder, api(answering="think", thinking_budget=32)), folder, FakeServer(right, tokens=(10, 60, 50))
    )
    assert (
        tree["candidates"][0]["metrics"]["truncated"] == 24
        and tree["candidates"][0]["metrics"]["average"]["value"] == 0
    )


def test_without_usage_the_most_is_counted(folder):
    server = FakeServer(right)
    server.usage = False
    price = {"input": 1.0, "output": 1.0, "date": "2026-11-01"}
    tree = run(write(folder, api(price=price)), folder, server)
    assert any("does not say how many tokens 24 answers took" in note for note in tree["candidates"][0]["notes"])
    assert tree["candidates"][0]["money"]["total"] > 24 * 32 / 1e6 and tree["candidates"][0]["tokens"]["input"] == 0


def test_the_key_is_written_nowhere(folder, monkeypatch, capfd):
    monkeypatch.setenv("TEST_KEY", KEY)
    server = FakeServer(right)
    run(write(folder, api(key_env="TEST_KEY")), folder, server)
    assert set(server.keys) == {f"Bearer {KEY}"}
    server.fails = [error(401, f"bad key {KEY}")]
    with pytest.raises(UserError) as caught:
        run(write(folder, api(key_env="TEST_KEY", temperature=0.1)), folder, server)
    assert KEY not in str(caught.value)
    said = "".join(capfd.readouterr())
    assert KEY not in said
    for path in folder.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        ({"name": "x"}, "give one of store, checkpoint, endpoint, baseline"),
        ({"name": "x", "store": "s", "baseline": "tfidf"}, "give one of"),
        ({"name": "x", "endpoint": "ftp://x", "model": "m"}, "no http"),
        ({"name": "x", "endpoint": "http://x/v1"}, "needs `model`"),
        ({"name": "x", "endpoint": "http://", "model": "m"}, "no http"),
        ({"name": "x", "endpoint": "http://127.0.0.1:99999/v1", "model": "m"}, "no http"),
        ({"name": "x", "endpoint": "http://[::1/v1", "model": "m"}, "no http"),
        ({"name": "x", "endpoint": "http://x/v1", "model": "m", "answering": "likelihood"}, "tokenizer"),
        ({"name": "x", "baseline": "tfidf", "adaptor": "a"}, "nearest valid name: `adapter`"),
        ({"name": "x", "baseline": "tfidf", "few_shot": -1}, "few_shot"),
        ({"name": "x", "store": "nowhere"}, "no layer store"),
        (api(key_env="SURELY_NOT_SET"), "SURELY_NOT_SET"),
        (api(price="nobody:nothing"), "knows no price"),
        (api(price={"input": 1.0, "output": 1.0, "date": "then"}), "date"),
        (api(price={"input": 1.0, "output": 1.0, "date": "2026-01-01", "currency": "EUR"}), "one currency"),
    ],
)  # fmt: skip
def test_bad_input_asks_nobody(folder, candidate, said):
    server = FakeServer(right)
    with pytest.raises(UserError) as caught:
        run(write(folder, candidate), folder, server)
    assert said in str(caught.value) and server.bodies == [] and not (folder / "out" / "compare.json").exists()


def test_bad_files(folder):
    (folder / "compare.toml").write_text("name = ")
    with pytest.raises(UserError, match="not valid TOML"):
        load_compare(folder / "compare.toml")
    with pytest.raises(UserError, match="two candidates have one name"):
        write(folder, {"name": "a", "baseline": "tfidf"}, {"name": "a", "baseline": "majority"})
    with pytest.raises(UserError, match="no amount"):
        write(folder, {"name": "a", "baseline": "tfidf"}, ceiling="much")
    with pytest.raises(UserError, match="not in USD"):
        write(folder, {"name": "a", "baseline": "tfidf"}, ceiling="5 EUR")
    with pytest.raises(UserError, match="no price, and there is a ceiling"):
        run(write(folder, api(), ceiling="5 USD"), folder, FakeServer(right))
    with pytest.raises(UserError, match="no such model") as caught:
        run(write(folder, api(model="gone")), folder, _refusing())
    assert "compare.toml" in caught.value.fix


def _refusing():
    server = FakeServer(right)
    server.fails = [error(404, "no such model")] * 50
    return server


# ---- run here


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def test_candidates_here_are_evals_own_answers(tiny, tmp_path):
    from lamella.adapter import Adapter
    from lamella.engine import Engine
    from lamella.eval.encoder import StoreEncoder
    from lamella.eval.task import load_task
    from lamella.store.reader import Store

    adapter = next(iter(tiny.adapters.values())) if isinstance(tiny.adapters, dict) else tiny.adapters[0]
    task = _task_of(tiny, tmp_path)
    common = {"store": str(tiny.store), "dtype": "fp32", "threads": 1}
    (tmp_path / "compare.toml").write_text(
        f'name = "h"\ntask = "{task}"\nresamples = 100\n'
        + "".join(
            f'[[candidates]]\nname = "{name}"\nanswering = "{how}"\n' + _keys({**common, **more})
            for name, how, more in (
                ("base", "likelihood", {}), ("tuned", "constrained", {"adapter": str(adapter)}),
                ("think", "think", {"thinking_budget": 4, "max_new_tokens": 4, "adapter": str(adapter), "machine_per_hour": 2.0}),
            )
        )
        + f'[[candidates]]\nname = "copy"\ncheckpoint = "{tiny.folder / "checkpoint"}"\ndtype = "fp32"\nthreads = 1\n'
    )  # fmt: skip
    tree = compare(load_compare(tmp_path / "compare.toml"), tmp_path / "out")
    lines = [json.loads(x) for x in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()]
    engine = Engine.open(Store.open(tiny.store), dtype="fp32", threads=1)
    loaded = load_task(task)
    for name, mode, own in (("base", "likelihood", None), ("tuned", "constrained", adapter)):
        engine.attach(None if own is None else Adapter.load(own, engine.skeleton))
        found = evaluate(loaded, engine, StoreEncoder.open(tiny.store, own), mode=mode, resamples=100)
        ours = [x for x in lines if x["candidate"] == name]
        assert [x["label"] for x in ours] == [p.label for p in found.predictions]
        for x, p in zip(ours, found.predictions, strict=True):
            assert x["scores"] == pytest.approx(p.scores, abs=1e-4)
    engine.close()
    assert [c["role"] for c in tree["candidates"]] == [
        "self-hosted-base",
        "self-hosted-tuned",
        "self-hosted-tuned",
        "self-hosted-base",
    ]
    think = tree["candidates"][2]
    assert think["tokens"]["output"] > 0 and think["money"]["total"] == pytest.approx(think["wall_s"] / 3600 * 2.0)
    assert tree["candidates"][3]["tokens"] == tree["candidates"][0]["tokens"]
    again = compare(load_compare(tmp_path / "compare.toml"), tmp_path / "out")
    assert [c["from_cache"] for c in again["candidates"]] == [len(loaded.test)] * 4
    assert [c["metrics"] for c in again["candidates"]] == [c["metrics"] for c in tree["candidates"]]


def _keys(values):
    return "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())


def _task_of(tiny, folder):
    """The tiny store's task with rows of its own."""
    from lamella.eval.task import read_task_config

    labels = read_task_config(tiny.task).labels
    rows = [
        {"tenant": t, "text": f"text {k} of {t}", "label": names[k % len(names)], "id": k}
        for t, names in labels.items()
        for k in range(6)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "task.toml").write_text(f'test = "rows.jsonl"\n{tiny.task.read_text()}')
    return folder / "task.toml"


def test_likelihoods_at_an_endpoint_are_sums_over_the_labels_tokens(folder, tiny):
    from lamella.eval.encoder import StoreEncoder

    server = FakeServer(right)
    config = write(folder, api(answering="likelihood", tokenizer=str(tiny.store)))
    tree = run(config, folder, server)
    encoder = StoreEncoder.open(tiny.store)
    lines = [json.loads(x) for x in (folder / "out" / "predictions.jsonl").read_text().splitlines()]
    for line in lines:
        expected = {x: sum(-(t % 7) / 7 for t in encoder.answer_ids(x)) for x in LABELS[line["tenant"]]}
        assert line["scores"] == pytest.approx(expected) and line["label"] == max(expected, key=expected.get)
    assert tree["candidates"][0]["tokens"]["input"] > 0
    server.complete = None


# ---- the verb, and killing it


def test_the_verb_prints_tables_or_json(folder, monkeypatch):
    monkeypatch.chdir(folder)
    write(folder, {"name": "tfidf", "baseline": "tfidf"}, {"name": "majority", "baseline": "majority"})
    result = CliRunner().invoke(app, ["compare", "compare.toml"])
    assert result.exit_code == 0 and "majority less tfidf" in result.stdout and "macro-F1" in result.stdout
    tree = json.loads(CliRunner().invoke(app, ["compare", "compare.toml", "--json"]).stdout)
    assert tree["kind"] == "compare" and (folder / "runs" / "compare-c" / "compare.json").is_file()


def test_a_kill_loses_only_what_was_under_way(folder):
    code = f"""
import os, sys
sys.path.insert(0, {str(__import__("pathlib").Path(__file__).parents[2])!r})
from pathlib import Path
from tests.compare.test_compare import right, run
from tests.endpoint.fake import FakeServer
from lamella.compare.settings import load_compare
server = FakeServer(right)
async def die(body):
    if len(server.bodies) == 15:
        os.kill(os.getpid(), 9)
server.gate = die
run(load_compare(Path({str(folder / "compare.toml")!r})), Path({str(folder)!r}), server)
"""
    config = write(folder, api(concurrency=2))
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -9
    server = FakeServer(right)
    tree = run(config, folder, server)
    assert tree["candidates"][0]["from_cache"] >= 13 and len(server.bodies) <= 11


# ---- statistics


def test_holm_against_a_known_example():
    """Holm 1979's procedure on p values worked out by hand (and as R's p.adjust gives them)."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0]) and holm([]) == []


def test_p_values_tell_a_difference_from_none():
    import numpy as np

    rng = np.random.default_rng(0)
    assert p_value(rng.normal(5, 1, 999), 100) == pytest.approx(2 / 1000)
    assert p_value(rng.normal(0, 1, 999), 100) > 0.5 and p_value(np.zeros(99), 100) == 1.0


@pytest.mark.parametrize(("documents", "least"), [(1, 1.0), (2, 0.5), (5, 0.0625), (6, 0.03125)])
def test_few_documents_show_nothing(documents, least):
    """As a sign test: all of n documents on one side happen by chance in 2 of 2^n."""
    import numpy as np

    assert p_value(np.ones(999), documents) == pytest.approx(least)


def predictions(labels):
    return [Prediction("t", k, f"d{k}", "a" if k % 2 else "b", label) for k, label in enumerate(labels)]


def test_equal_candidates_do_not_differ():
    some = predictions(["a", "b"] * 10)
    average, tenants = difference(some, some, {"t": ("a", "b")}, resamples=200, seed=0)
    assert (
        average.value.value == 0
        and average.p == 1.0
        and tenants["t"].p_holm == 1.0
        and not tenants["t"].to_json()["significant"]
    )


def test_confusion_counts_answers_without_a_label():
    found = confusion(predictions(["a", None, "b", "a"]), {"t": ("a", "b")})["t"]
    assert found["counts"] == [[1, 0, 1], [1, 1, 0]]


def test_a_ceiling_may_be_written_without_a_blank(folder):
    assert (
        write(folder, api(price={"input": 1.0, "output": 1.0, "date": "2026-11-01"}), ceiling="5USD").ceiling_amount
        == 5.0
    )


@pytest.mark.parametrize("below", ["", "x"])
def test_results_that_cannot_be_written_are_told(folder, below):
    (folder / "file").write_text("")
    with pytest.raises(UserError, match="no folder can be made"):
        compare(write(folder, {"name": "a", "baseline": "majority"}), folder / "file" / below)
