"""A classification task: rows of {tenant, text, entity, label}, a prompt, a fixed label set per tenant."""

from __future__ import annotations

import difflib
import json
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, field_validator

from lamella.config import Section, explain_validation, read_toml
from lamella.data.read import read_rows
from lamella.errors import UserError
from lamella.eval.labels import LabelParser
from lamella.eval.split import document_key, stable_order

PROMPT_FIELDS = ("tenant", "text", "entity", "labels", "instructions")


class TaskConfig(Section):
    """`task.toml`. Paths are relative to the file that names them."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the task."""
    test: tuple[Path, ...] = ()
    """JSONL files of rows to measure on."""
    train: tuple[Path, ...] = ()
    """JSONL files of rows for few-shot examples and for the TF-IDF baseline."""
    data: tuple[Path, ...] = ()
    """JSONL files whose rows name their side in `split`."""
    prompt: str
    """User turn, with fields {tenant} {text} {entity} {labels} {instructions}; {{ and }} are braces."""
    system: str | None = None
    """System turn, with the same fields except {text} and {entity}. None: no system turn."""
    labels: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Fixed label set by tenant, in the order that breaks ties; a tenant not named here has the labels that its
    train and test rows declare, sorted. Never taken from predictions."""
    instructions: dict[str, str] = Field(default_factory=dict)
    """Text for {instructions} by tenant."""
    aliases: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Other words for labels by tenant, `word = "label"`, for free generation."""
    parsing: Literal["normalised", "strict"] = "normalised"
    """How a generated answer becomes a label; see `labels.LabelParser`."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Token limit of free generation, reasoning included."""

    @field_validator("prompt", "system")
    @classmethod
    def _check_template(cls, template: str | None, info: Any) -> str | None:
        if template is None:
            return None
        allowed = [f for f in PROMPT_FIELDS if info.field_name == "prompt" or f not in ("text", "entity")]
        used = set()
        try:
            parts = list(string.Formatter().parse(template))
        except ValueError as error:
            raise ValueError(f"{error}; write {{{{ and }}}} for braces") from error
        for _, name, spec, conversion in parts:
            if name is None:
                continue
            if name not in allowed or spec or conversion:
                near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.0)
                raise ValueError(f"unknown field {{{name}}}; nearest: {{{near[0]}}}; fields: {', '.join(allowed)}")
            used.add(name)
        if info.field_name == "prompt" and not used & {"text", "entity"}:
            raise ValueError("the prompt shows neither {text} nor {entity}")
        return template


class TaskRow(Section):
    """One row of a task's JSONL file."""

    tenant: str = Field(min_length=1)
    """Whose row it is."""
    text: str
    """The document."""
    entity: str = ""
    """What in the text is classified; empty: the text itself."""
    label: str = Field(min_length=1)
    """The right answer."""
    id: str | int | None = None
    """Identity; default: `file:line`."""
    split: Literal["train", "test"] | None = None
    """Side, for rows of `data` files."""
    _place: tuple[Path, int] | None = PrivateAttr(default=None)

    @property
    def place(self) -> tuple[Path, int] | None:
        """File and line it was read from."""
        return self._place

    @property
    def document(self) -> str:
        return document_key(self.text)


@dataclass(frozen=True)
class Task:
    """A task ready to be measured; made by `load_task` or `build_task`.

    Attributes:
        labels: fixed label set of each tenant with test rows, tenants in order of first appearance.
        train, test: rows; each has an id, unique within its tenant and side.
        notes: facts about the data that a reader of the numbers must know.
    """

    config: TaskConfig
    labels: dict[str, tuple[str, ...]]
    train: tuple[TaskRow, ...]
    test: tuple[TaskRow, ...]
    notes: tuple[str, ...]

    @property
    def tenants(self) -> tuple[str, ...]:
        return tuple(self.labels)

    def rows_of(self, tenant: str) -> list[TaskRow]:
        """Test rows of a tenant, in file order."""
        return [r for r in self.test if r.tenant == tenant]

    def pool_of(self, tenant: str) -> list[TaskRow]:
        """Training rows of a tenant, in file order."""
        return [r for r in self.train if r.tenant == tenant]

    def parser_of(self, tenant: str) -> LabelParser:
        strict = self.config.parsing == "strict"
        return LabelParser(self.labels[tenant], self.config.aliases.get(tenant), strict=strict)

    def user_text(self, row: TaskRow) -> str:
        return self.config.prompt.format(text=row.text, entity=row.entity, **self._fields(row.tenant))

    def system_text(self, tenant: str) -> str | None:
        """System turn of a tenant's prompts; None: no such turn."""
        system = self.config.system
        return None if system is None else system.format(**self._fields(tenant))

    def _fields(self, tenant: str) -> dict[str, str]:
        labels = ", ".join(self.labels[tenant])
        return {"tenant": tenant, "labels": labels, "instructions": self.config.instructions.get(tenant, "")}

    def messages(self, row: TaskRow, shots: Sequence[TaskRow] = ()) -> list[dict[str, str]]:
        """Turns that ask for `row`'s label: system, one user and one assistant turn per shot, the question."""
        turns = []
        if (system := self.system_text(row.tenant)) is not None:
            turns.append({"role": "system", "content": system})
        for shot in shots:
            turns.append({"role": "user", "content": self.user_text(shot)})
            turns.append({"role": "assistant", "content": shot.label})
        return [*turns, {"role": "user", "content": self.user_text(row)}]

    def training_messages(self, row: TaskRow) -> list[dict[str, str]]:
        """Turns to train on: the zero-shot question and its answer."""
        return [*self.messages(row), {"role": "assistant", "content": row.label}]

    def choose_shots(self, tenant: str, count: int, seed: int = 0) -> list[TaskRow]:
        """`count` training rows of a tenant, the same for all its questions: one per label in turn (label order),
        documents in the order of a seeded hash; documents that are also measured are never used.

        Raises:
            UserError: fewer usable rows than asked for.
        """
        if count == 0:
            return []
        measured = {r.document for r in self.test}
        queues: list[list[TaskRow]] = []
        for label in self.labels[tenant]:
            rows = [r for r in self.pool_of(tenant) if r.label == label and r.document not in measured]
            queues.append(sorted(rows, key=lambda r: stable_order(r.document + r.entity, seed)))
        usable = sum(map(len, queues))
        if usable < count:
            raise UserError(
                f"tenant {tenant!r} has {usable} usable training rows, {count} few-shot examples were asked for",
                fix="ask for fewer with --few-shot, or name more rows in `train`",
            )
        chosen: list[TaskRow] = []
        for turn in range(usable):
            chosen += [queue[turn] for queue in queues if turn < len(queue)]
            if len(chosen) >= count:
                break
        return sorted(chosen[:count], key=lambda r: stable_order(r.document + r.entity, seed + 1))

    def limited(self, rows_per_tenant: int) -> Task:
        """The same task with at most so many test rows per tenant, chosen by a hash of their ids, in file order."""
        keep: set[tuple[str, str | int | None]] = set()
        for tenant in self.tenants:
            rows = sorted(self.rows_of(tenant), key=lambda r: stable_order(str(r.id), 0))
            keep |= {(r.tenant, r.id) for r in rows[:rows_per_tenant]}
        test = tuple(r for r in self.test if (r.tenant, r.id) in keep)
        return Task(self.config, self.labels, self.train, test, _notes(self.labels, self.train, test))


def _notes(labels: dict[str, tuple[str, ...]], train: Sequence[TaskRow], test: Sequence[TaskRow]) -> tuple[str, ...]:
    notes = []
    for tenant, names in labels.items():
        for side, rows in (("train", train), ("test", test)):
            present = {r.label for r in rows if r.tenant == tenant}
            absent = [n for n in names if n not in present]
            if absent and (rows or side == "test"):
                rule = "; left out of macro-F1" if side == "test" else ""
                notes.append(f"tenant {tenant}: 0 rows in {side} for {', '.join(f'`{n}`' for n in absent)}{rule}")
        trained = {r.document for r in train if r.tenant == tenant}
        leaked = sum(r.document in trained for r in test if r.tenant == tenant)
        if leaked:
            notes.append(f"tenant {tenant}: the text of {leaked} test rows is also in train")
    return tuple(notes)


def _with_ids(rows: Iterable[TaskRow], side: str) -> tuple[TaskRow, ...]:
    done: dict[tuple[str, str | int], TaskRow] = {}
    for n, row in enumerate(rows):
        identity = row.id if row.id is not None else f"{side}:{n}"
        if (row.tenant, identity) in done:
            raise UserError(
                f"two {side} rows of tenant {row.tenant!r} have the id {identity!r}",
                fix="make ids unique within a tenant",
            )
        done[row.tenant, identity] = row.model_copy(update={"id": identity})
    return tuple(done.values())


def build_task(config: TaskConfig, train: Iterable[TaskRow], test: Iterable[TaskRow]) -> Task:
    """Fix the label sets and check the rows against them.

    Raises:
        UserError: no test rows, a label outside a declared set, a set with one label only, doubled ids, settings
            for a tenant without rows.
    """
    train, test = _with_ids(train, "train"), _with_ids(test, "test")
    if not test:
        raise UserError("the task has no test rows", fix="name JSONL files in `test`, or in `data` with `split`")
    tenants = list(dict.fromkeys(r.tenant for r in test))
    known = {r.tenant for r in (*train, *test)}
    for table in ("labels", "instructions", "aliases"):
        for tenant in getattr(config, table):
            if tenant not in known:
                near = difflib.get_close_matches(tenant, sorted(known), n=1, cutoff=0.0)
                raise UserError(f"`{table}.{tenant}`: no row has this tenant", fix=f"nearest tenant: {near[0]}")
    labels: dict[str, tuple[str, ...]] = {}
    for tenant in tenants:
        rows = [r for r in (*train, *test) if r.tenant == tenant]
        declared = {r.label for r in rows}
        names = config.labels.get(tenant) or tuple(sorted(declared))
        if len(set(names)) < len(names) or len(names) < 2:
            raise UserError(f"labels of tenant {tenant!r}: {list(names)}", fix="give two or more different labels")
        for row in rows:
            if not row.label.strip():
                where, line = row.place or (None, None)
                raise UserError(
                    f"row {row.id!r} of tenant {tenant!r}: the label {row.label!r} is blank",
                    fix="give the row a label, or leave it out", path=where, line=line,
                )  # fmt: skip
            if row.label not in names:
                near = difflib.get_close_matches(row.label, names, n=1, cutoff=0.0)
                raise UserError(
                    f"row {row.id!r} of tenant {tenant!r} has the label {row.label!r}, not in `labels.{tenant}`",
                    fix=f"nearest label: {near[0]!r}",
                )
        labels[tenant] = names
    task = Task(config, labels, train, test, _notes(labels, train, test))
    for tenant in tenants:
        task.parser_of(tenant)
    return task


def _validate(model: type[BaseModel], tree: Any, path: Path, line: int | None = None) -> Any:
    try:
        return model.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        told = explain_validation(error, path, model)
        raise UserError(told.what, fix=told.fix, path=path, line=line) from error


def read_task_rows(path: Path) -> list[TaskRow]:
    """Rows of one JSONL file, with `file:line` as id where they have none. Raises `UserError` with path and line."""
    rows = []
    for raw in read_rows(path):
        if raw.problem is not None:
            raise UserError(
                str(raw.problem), fix="write one JSON object per line", path=path, line=raw.line,
                column=raw.problem.column,
            )  # fmt: skip
        row: TaskRow = _validate(TaskRow, raw.value, path, raw.line)
        row = row if row.id is not None else row.model_copy(update={"id": f"{path.name}:{raw.line}"})
        row._place = (path, raw.line)
        rows.append(row)
    return rows


def read_task_config(path: Path) -> TaskConfig:
    """Read `task.toml` alone. Raises `UserError`: file missing or broken (with line), unknown key, bad value."""
    tree = read_toml(path, "task.toml")
    for key in ("test", "train", "data"):
        if isinstance(tree.get(key), str):
            tree[key] = [tree[key]]
    config: TaskConfig = _validate(TaskConfig, tree, path)
    return config


def load_task(path: Path) -> Task:
    """Read `task.toml` and its rows.

    Raises:
        UserError: file missing or broken (with line), unknown key, and all that `build_task` refuses.
    """
    config = read_task_config(path)
    sides: dict[str, list[TaskRow]] = {"train": [], "test": []}
    for side in sides:
        for file in getattr(config, side):
            rows = read_task_rows(path.parent / file)
            other = next((r for r in rows if r.split not in (None, side)), None)
            if other is not None:
                raise UserError(
                    f'row {other.id!r} says "split": "{other.split}", but the file is named in `{side}`',
                    fix="name files of mixed rows in `data`", path=path.parent / file,
                )  # fmt: skip
            sides[side] += rows
    for file in config.data:
        for row in read_task_rows(path.parent / file):
            if row.split is None:
                raise UserError(
                    f"row {row.id!r} has no `split`", fix='write "split": "train" or "test" in rows of `data` files',
                    path=path.parent / file,
                )  # fmt: skip
            sides[row.split].append(row)
    try:
        return build_task(config, sides["train"], sides["test"])
    except UserError as error:
        raise UserError(error.what, fix=error.fix, path=error.path or path, line=error.line) from error
