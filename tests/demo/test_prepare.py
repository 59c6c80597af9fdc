import json

import pytest

from lamella.demo import tenants
from lamella.demo.prepare import TEST_ROWS, TRAIN_ROWS, prepare, write_task
from lamella.eval.task import TaskRow, load_task


def rows_of(tenant, labels):
    def build(downloads):
        for i in range(900):
            yield TaskRow(tenant=tenant, text=f"{tenant} {i // 2}", entity=f"e{i}", label=labels[i % len(labels)])

    return build


def test_task_is_balanced_split_by_text_and_trained_on_its_own_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr(tenants, "TENANTS", {"a": rows_of("a", "xyz"), "b": rows_of("b", "uv")})
    folder = write_task(tmp_path, tmp_path / "task")
    task = load_task(folder / "task.toml")
    assert task.notes == ()
    for tenant in ("a", "b"):
        assert len(task.rows_of(tenant)) == TEST_ROWS
        assert len(task.pool_of(tenant)) == TRAIN_ROWS
    assert not {r.document for r in task.train} & {r.document for r in task.test}
    chats = [json.loads(line)["messages"] for line in (folder / "messages.jsonl").read_text().splitlines()]
    assert chats == [task.training_messages(row) for row in task.train]
    assert chats[0][-1] == {"role": "assistant", "content": task.train[0].label}
    before = (folder / "test.jsonl").stat().st_mtime_ns
    assert write_task(tmp_path / "nowhere", folder) == folder  # done before: looks, does nothing
    assert (folder / "test.jsonl").stat().st_mtime_ns == before


@pytest.mark.slow
def test_real_packages_give_the_stated_rows_and_a_model_that_talks(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = prepare(tmp_path)
    counts = {}
    for name, build in tenants.TENANTS.items():
        rows = tenants.distinct(build(tmp_path / "downloads"))
        counts[name] = (len(rows), len({r.label for r in rows}))
    assert counts == {"addresses": (7735, 10), "parties": (4854, 9), "foods": (6798, 21), "courts": (3477, 5)}
    config = json.loads((made.checkpoint / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(made.checkpoint)
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]
    model = AutoModelForCausalLM.from_pretrained(made.checkpoint, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2
