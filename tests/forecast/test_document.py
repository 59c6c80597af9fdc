"""A plan as a file, and the run that it describes."""

import json

import pytest

from lamella.config import build_run_config
from lamella.errors import UserError
from lamella.forecast.document import asked_of, check_store, plain, read_plan, run_of, write_plan
from tests.forecast import shapes
from tests.forecast.outcomes import forecast_of, question_of
from tests.forecast.test_present import document_of


@pytest.fixture(scope="module")
def document():
    question = question_of()
    found = forecast_of(question)
    return document_of(
        question, found, figures=plain(found.ranks[0]) | {"hosts": plain(found.hosts)},
        asked={"store": "/somewhere/store", "lora": {"rank": 8}, "data": {"train": ["/data/rows.jsonl"]}},
    )  # fmt: skip


@pytest.fixture
def store_plan(document, tmp_path):
    plan = document.model_copy(update={"model": document.model.model_copy(update={"kind": "store"})})
    return plan, tmp_path / "plan.json"


def test_what_is_written_is_read(document, tmp_path):
    write_plan(tmp_path / "plan.json", document)
    again = read_plan(tmp_path / "plan.json")
    assert again == document
    tree = json.loads((tmp_path / "plan.json").read_text())
    assert tree["kind"] == "lamella plan" and tree["figures"]["parts"]["base"] == 30_000_000_000


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"format_version": 2}, "format version 2"),
        ({"format_version": None}, "format version None"),
        ({"kind": "receipt"}, "not a plan"),
        ({"fits": "perhaps"}, "fits"),
        ({"fitz": True}, "unknown key `fitz`"),
    ],
)
def test_other_files_are_refused(document, change, what, tmp_path):
    write_plan(tmp_path / "plan.json", document)
    tree = json.loads((tmp_path / "plan.json").read_text()) | change
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=what) as caught:
        read_plan(tmp_path / "plan.json")
    assert caught.value.path == str(tmp_path / "plan.json") and caught.value.fix


def test_no_file_no_json_no_object(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(UserError, match="no such file"):
        read_plan(path)
    path.write_text('{"kind": ')
    with pytest.raises(UserError, match="not JSON") as caught:
        read_plan(path)
    assert caught.value.line == 1
    path.write_text("[]")
    with pytest.raises(UserError, match="not a plan"):
        read_plan(path)


def test_a_plan_is_a_run_with_what_it_settled(store_plan):
    plan, path = store_plan
    config = run_of(plan, path, ["train.learning_rate=1e-5", "name=other", "lora.rank=8"])
    assert (config.lora.rank, config.memory.recompute, config.split.kind) == (8, "always", "experts")
    assert (config.train.learning_rate, config.name, str(config.store)) == (1e-5, "other", "/somewhere/store")


@pytest.mark.parametrize(
    ("override", "there", "now"),
    [("lora.rank=64", 8, 64), ("memory.recompute=never", "'always'", "'never'"), ('split.kind="tokens"', "'experts'", "'tokens'"),
     ("train.micro_batch_tokens=512", 2048, 512), ("memory.budget=1GB", None, "'1GB'"), ("data.max_tokens=64", 2048, 64)],
)  # fmt: skip
def test_overrides_against_the_plan_name_both_values(store_plan, override, there, now):
    plan, path = store_plan
    with pytest.raises(UserError) as caught:
        run_of(plan, path, [override])
    key = override.partition("=")[0]
    assert f"{key}: {there} in the plan, {now} asked for now" in caught.value.what


def test_a_plan_of_a_checkpoint_needs_a_store(document, tmp_path):
    with pytest.raises(UserError) as caught:
        run_of(document, tmp_path / "plan.json")
    assert "lamella quantize" in caught.value.fix and "store=STORE" in caught.value.fix
    assert str(run_of(document, tmp_path / "plan.json", ["store=mine"]).store) == "mine"


def test_a_plan_that_does_not_fit_is_not_run(store_plan):
    plan, path = store_plan
    with pytest.raises(UserError, match="does not fit"):
        run_of(plan.model_copy(update={"fits": False}), path)


def test_a_store_of_another_model_is_refused(document, tmp_path):
    check_store(document, question_of().shape, tmp_path)
    with pytest.raises(UserError, match="32 layers, 8,030,261,248 parameters"):
        check_store(document, shapes.llama_8b(), tmp_path)


def test_asked_settings_are_those_given_with_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = build_run_config({"store": "s", "lora": {"rank": 4}, "data": {"train": ["a.jsonl"]}})
    assert asked_of(config) == {
        "store": str(tmp_path / "s"), "lora": {"rank": 4}, "data": {"train": [str(tmp_path / "a.jsonl")]},
    }  # fmt: skip


def test_a_folder_that_cannot_be_written(document, tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        write_plan(tmp_path / "none" / "plan.json", document)


def test_plain_values():
    assert plain({(1, 2): {3}, "a": (1.5, None)}) == {"1-2": [3], "a": [1.5, None]}
