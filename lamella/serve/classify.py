"""A tenant's labels for documents, with the prompt that the adapter was tuned with: what `lamella eval` asks."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from lamella.errors import UserError
from lamella.eval.encoder import StoreEncoder
from lamella.eval.metrics import Prediction
from lamella.eval.run import Mode, check_thinking, label_predictions
from lamella.eval.scoring import Ids
from lamella.eval.task import Task, TaskRow, load_task, read_task_config
from lamella.eval.trie import Floats, LabelTrie
from lamella.serve.schema import Document


class Classifier:
    """One tenant of a task, for one adapter.

    Args:
        task: with the tenant's labels.
        encoder: with the adapter's chat template and system text.
        vocabulary: ids are below it.

    Raises:
        UserError: labels that cannot be told apart, a template that opens reasoning where the label is scored.
    """

    def __init__(self, task: Task, tenant: str, encoder: StoreEncoder, vocabulary: int) -> None:
        self.task = task
        self.tenant = tenant
        self.labels = task.labels[tenant]
        self._encoder = encoder
        answers = [encoder.answer_ids(label) for label in self.labels]
        for label, ids in zip(self.labels, answers, strict=True):
            if max(ids) >= vocabulary:
                raise UserError(
                    f"label {label!r} of tenant {tenant!r} needs a token that the model does not have",
                    fix="put the tokenizer that belongs to the model into the checkpoint and quantise again",
                )
        self.trie = LabelTrie(self.labels, answers)
        self.answer_tokens = max(map(len, self.trie.paths)) - 1
        check_thinking(encoder, self.prompt(self._row(Document(text="?"), 0)), "likelihood")

    def _row(self, document: Document, n: int) -> TaskRow:
        return TaskRow(tenant=self.tenant, text=document.text, entity=document.entity, label=self.labels[0], id=n)

    def rows(self, documents: Sequence[Document]) -> list[TaskRow]:
        return [self._row(document, n) for n, document in enumerate(documents)]

    def prompt(self, row: TaskRow) -> Ids:
        """Raises `UserError`: the text cannot be encoded."""
        return tuple(self._encoder.prompt_ids(self.task.messages(row)))

    def read(self, rows: Sequence[TaskRow], edges_NE: Floats, mode: Mode) -> list[Prediction]:
        return label_predictions(rows, self.trie, edges_NE, mode, False)


def task_of(path: Path, tenant: str | None, name: str) -> tuple[Task, str]:
    """The task of a model called `name`, and its tenant. Rows are read only where the file does not list the labels.

    Raises:
        UserError: a broken task, no such tenant, or several and none named.
    """
    config = read_task_config(path)
    declared = config.labels.keys() - {t for t, labels in config.labels.items() if len(set(labels)) < 2}
    if (tenant or name) in declared:
        return Task(config, dict(config.labels), (), (), ()), tenant or name
    if tenant is None and len(declared) == 1 and not config.data and not config.test:
        return Task(config, dict(config.labels), (), (), ()), next(iter(declared))
    task = load_task(path)
    if tenant is None and len(task.tenants) == 1:
        return task, task.tenants[0]
    wanted = tenant or name
    if wanted in task.tenants:
        return task, wanted
    near = difflib.get_close_matches(wanted, task.tenants, n=1, cutoff=0.0)
    raise UserError(
        f"`tenant` of {name!r}: the task has no tenant {wanted!r}" if tenant else f"the task has several tenants, and {name!r} names none",
        fix=f"nearest: {near[0]!r}; tenants: {', '.join(task.tenants)}", path=path,
    )  # fmt: skip
