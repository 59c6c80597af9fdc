import json
import time

import pytest

from lamella.config import DataConfig, LoraConfig, RunConfig, TrainConfig
from lamella.demo.job import run_job
from lamella.eval.task import TaskConfig, TaskRow, build_task
from lamella.store.quantize import QuantizeSettings, quantize_checkpoint
from tests.fixtures import dense_config, make_tokenizer, moe_config, write_checkpoint, write_jsonl

WORDS = {"red": ("apple", "brick", "rose"), "blue": ("sky", "sea", "jeans")}


def rows(tenant, count, offset):
    for i in range(count):
        label = ("red", "blue")[i % 2]
        word = WORDS[label][i % 3]
        yield TaskRow(tenant=tenant, text=f"{word} number {offset + i}", entity=word, label=label)


@pytest.mark.parametrize("config", [dense_config(), moe_config()], ids=["dense", "moe"])
def test_job_measures_trains_and_reports(tmp_path, config):
    checkpoint = write_checkpoint(tmp_path / "model", config, tokenizer=make_tokenizer())
    quantize_checkpoint(str(checkpoint), tmp_path / "store", QuantizeSettings())
    settings = TaskConfig(name="colours", system="Colour.", prompt="{tenant}: {entity} in {text}")
    train = [*rows("a", 16, 0), *rows("b", 16, 100)]
    task = build_task(settings, train, [*rows("a", 8, 200), *rows("b", 8, 300)])
    messages = write_jsonl(tmp_path / "m.jsonl", [{"messages": task.training_messages(row)} for row in task.train])
    run = RunConfig(
        name="demo", runs_dir=tmp_path / "runs", store=tmp_path / "store", data=DataConfig(train=(messages,)),
        lora=LoraConfig(rank=4, alpha=8.0), train=TrainConfig(steps=30, rows_per_step=8, learning_rate=2e-2),
    )  # fmt: skip
    figures = run_job(task, run, time.monotonic())
    assert {"macro_f1_zero_shot", "macro_f1_few_shot", "macro_f1_tuned", "by_tenant", "train_s", "total_s",
            "peak_rss_bytes", "tokens_per_s", "receipt"} <= figures.keys()  # fmt: skip
    assert json.loads(json.dumps(figures)) == figures
    assert figures["macro_f1_tuned"] > 0.9 > figures["macro_f1_zero_shot"]
    assert set(figures["by_tenant"]) == {"a", "b"}
    mean = sum(t["tuned"] for t in figures["by_tenant"].values()) / 2
    assert mean == pytest.approx(figures["macro_f1_tuned"], abs=1e-3)
    receipt = json.loads((tmp_path / "runs" / "demo" / "receipt.json").read_text())
    assert receipt["status"] == "ok"
    page = (tmp_path / "runs" / "demo" / "report.html").read_text(encoding="utf-8")
    for expected in ("zero-shot", "8-shot", "tuned", "TF-IDF", "Loss per label token"):
        assert expected in page
    assert "Not in this run" not in page
