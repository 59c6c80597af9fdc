"""Tasks whose answer is a list of entities, scored by nervaluate.

An answer is a JSON list of `{"label", "start", "end"}` (characters, end exclusive) or `{"label", "text"}` (its first occurrence
that no other entity of the list has taken). What is no such list is invalid: all its entities are missed. An entity with a label
that is none, or with words that the text does not hold, is spurious.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from lamella.compare.statistics import tested
from lamella.config import Section, checked, explain_validation
from lamella.data.read import read_rows
from lamella.errors import UserError
from lamella.eval.metrics import Floats, Prediction, interval, resample_weights
from lamella.eval.split import document_key, stable_order

SCHEMES = ("strict", "exact", "partial", "ent_type")
"""nervaluate's: borders and type; borders; borders in part; type with any overlap."""
COUNTS = ("correct", "incorrect", "partial", "missed", "spurious")
Spans = list[tuple[str, int, int]]


class Span(Section):
    label: str = Field(min_length=1)
    """Kind of the entity."""
    start: int | None = Field(None, ge=0)
    """First character."""
    end: int | None = Field(None, ge=1)
    """Behind its last character."""
    text: str | None = None
    """Its words, in the place of start and end."""

    @model_validator(mode="after")
    def _check(self) -> Span:
        placed = self.start is not None and self.end is not None
        if placed == (self.text is not None):
            raise ValueError("give start and end, or text")
        if placed and self.end <= self.start:  # type: ignore[operator]
            raise ValueError(f"start {self.start} and end {self.end} hold nothing")
        return self


class SpanRow(Section):
    """One row: a text and its entities."""

    tenant: str = Field(min_length=1)
    """Whose row it is."""
    text: str
    """The document."""
    spans: tuple[Span, ...]
    """The right answer."""
    id: str | int | None = None
    """Identity; default: `file:line`."""
    _gold: str = PrivateAttr(default="")

    @property
    def label(self) -> str:
        """The right answer, in one form."""
        return self._gold

    @property
    def document(self) -> str:
        return document_key(self.text)

    @property
    def place(self) -> None:
        return None


class SpanTaskConfig(Section):
    """`task.toml` with `kind = "spans"`."""

    kind: Literal["spans"]
    """What the answers are."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the task."""
    test: tuple[Path, ...]
    """JSONL files of rows to measure on."""
    train: tuple[Path, ...] = ()
    """JSONL files of rows for few-shot examples."""
    prompt: str
    """User turn, with fields {tenant} {text} {labels}; {{ and }} are braces."""
    system: str | None = None
    """System turn."""
    labels: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Kinds of entities by tenant; default: those of its rows."""
    max_new_tokens: int = Field(256, ge=1)
    """Tokens of an answer."""

    @field_validator("prompt")
    @classmethod
    def _check(cls, value: str) -> str:
        try:
            value.format(tenant="", text="", labels="")
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"{error!r}: fields are tenant, text, labels; write {{{{ and }}}} for braces") from error
        if "{text}" not in value:
            raise ValueError("the prompt does not show {text}")
        return value


@dataclass(frozen=True)
class SpanTask:
    """A task of spans, with what candidates need of a task."""

    config: SpanTaskConfig
    labels: dict[str, tuple[str, ...]]
    train: tuple[SpanRow, ...]
    test: tuple[SpanRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def tenants(self) -> tuple[str, ...]:
        return tuple(self.labels)

    def rows_of(self, tenant: str) -> list[SpanRow]:
        return [r for r in self.test if r.tenant == tenant]

    def pool_of(self, tenant: str) -> list[SpanRow]:
        return [r for r in self.train if r.tenant == tenant]

    def choose_shots(self, tenant: str, count: int, seed: int = 0) -> list[SpanRow]:
        """Training rows whose documents are not measured, in the order of a seeded hash."""
        measured = {r.document for r in self.test}
        usable = sorted(
            (r for r in self.pool_of(tenant) if r.document not in measured),
            key=lambda r: stable_order(r.document, seed),
        )
        if len(usable) < count:
            raise UserError(f"tenant {tenant!r} has {len(usable)} usable training rows, {count} examples were asked for",
                            fix="ask for fewer, or name more rows in `train`")  # fmt: skip
        return usable[:count]

    def messages(self, row: SpanRow, shots: Sequence[SpanRow] = ()) -> list[dict[str, str]]:
        """System, one user and one assistant turn per shot, the question."""
        turns = [] if self.config.system is None else [{"role": "system", "content": self.config.system}]
        for shot in shots:
            said = [{"label": label, "text": shot.text[a:b]} for label, a, b in json.loads(shot.label)]
            turns += [
                {"role": "user", "content": self._question(shot)},
                {"role": "assistant", "content": json.dumps(said, ensure_ascii=False)},
            ]
        return [*turns, {"role": "user", "content": self._question(row)}]

    def _question(self, row: SpanRow) -> str:
        return self.config.prompt.format(tenant=row.tenant, text=row.text, labels=", ".join(self.labels[row.tenant]))

    def parser_of(self, tenant: str) -> Callable[[str], str | None]:
        """An answer in one form; None: it is no list of entities. Places are found later, as they need the row's text."""
        return read_answer

    def system_text(self, tenant: str) -> str | None:
        return self.config.system

    def limited(self, rows: int) -> SpanTask:
        """At most so many test rows per tenant, by a hash of their ids."""
        keep: set[tuple[str, Any]] = set()
        for tenant in self.tenants:
            chosen = sorted(self.rows_of(tenant), key=lambda r: stable_order(str(r.id), 0))[:rows]
            keep |= {(r.tenant, r.id) for r in chosen}
        return SpanTask(
            self.config, self.labels, self.train, tuple(r for r in self.test if (r.tenant, r.id) in keep), self.notes
        )


def read_answer(text: str) -> str | None:
    """A JSON list of entities in one form, also inside a ``` fence; None for all else."""
    text = text.strip()
    if text.startswith("```"):
        text = text.split("\n", 1)[-1].rsplit("```", 1)[0]
    try:
        tree = json.loads(text)
        found = [Span.model_validate(entry) for entry in tree] if isinstance(tree, list) else None
    except (ValueError, ValidationError, TypeError):
        return None
    return None if found is None else json.dumps([s.model_dump(exclude_none=True) for s in found], ensure_ascii=False)


def placed(spans: Sequence[Span], text: str) -> Spans:
    """Entities as (label, start, end); words and places that the text does not hold lie behind its end, each at a place
    of its own."""
    given = [s for s in spans if s.text is None]
    found: Spans = []
    beyond = len(text) + 1
    for span in given:
        assert span.start is not None and span.end is not None
        if span.end <= len(text):
            found.append((span.label, span.start, span.end))
        else:  # a place that the text does not have
            found.append((span.label, beyond, beyond + 1))
            beyond += 3
    taken = {(a, b) for _, a, b in found}
    for span in spans:
        if span.text is None:
            continue
        at = text.find(span.text) if span.text else -1
        while at >= 0 and (at, at + len(span.text)) in taken:
            at = text.find(span.text, at + 1)
        if at < 0:
            at, beyond = beyond, beyond + len(span.text) + 2
        taken.add((at, at + len(span.text)))
        found.append((span.label, at, at + max(len(span.text), 1)))
    return sorted(found, key=lambda s: (s[1], s[2], s[0]))


def is_span_task(path: Path) -> bool:
    """Whether a task.toml says `kind = "spans"`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig")).get("kind") == "spans"
    except (OSError, ValueError):
        return False  # `load_task` says what is wrong with it


def load_span_task(path: Path) -> SpanTask:
    """Read a task of spans. Raises `UserError` with file, key and line."""
    tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    for key in ("test", "train"):
        if isinstance(tree.get(key), str):
            tree[key] = [tree[key]]
    config = checked(SpanTaskConfig, tree, path)
    test, train = (
        [row for file in files for row in _rows(path.parent / file)] for files in (config.test, config.train)
    )
    if not test:
        raise UserError("the task has no test rows", fix="name JSONL files in `test`", path=path)
    seen_ids: set[tuple[str, Any]] = set()
    for row in test:
        if (row.tenant, row.id) in seen_ids:
            raise UserError(f"two test rows of tenant {row.tenant!r} have the id {row.id!r}", fix="make ids unique within a tenant",
                            path=path)  # fmt: skip
        seen_ids.add((row.tenant, row.id))
    labels = {}
    for tenant in dict.fromkeys(r.tenant for r in test):
        seen = sorted({s.label for r in (*test, *train) if r.tenant == tenant for s in r.spans})
        labels[tenant] = config.labels.get(tenant) or tuple(seen)
        for name in seen:
            if name not in labels[tenant]:
                near = difflib.get_close_matches(name, labels[tenant], n=1, cutoff=0.0)
                raise UserError(
                    f"rows of tenant {tenant!r} have the label {name!r}, not in `labels.{tenant}`",
                    fix=f"nearest: {near[0]!r}",
                    path=path,
                )
    return SpanTask(config, labels, tuple(train), tuple(test))


def _rows(path: Path) -> list[SpanRow]:
    found = []
    for raw in read_rows(path):
        if raw.problem is not None:
            raise UserError(str(raw.problem), fix="write one JSON object per line", path=path, line=raw.line)
        try:
            row = SpanRow.model_validate_json(json.dumps(raw.value))
        except ValidationError as error:
            told = explain_validation(error, path, SpanRow)
            raise UserError(told.what, fix=told.fix, path=path, line=raw.line) from error
        spans = placed(row.spans, row.text)
        lost = [s for s in spans if s[2] > len(row.text)]
        if lost:
            raise UserError(
                f"the text does not hold the entity {lost[0]}", fix="correct `spans`", path=path, line=raw.line
            )
        row = row if row.id is not None else row.model_copy(update={"id": f"{path.name}:{raw.line}"})
        row._gold = json.dumps(spans, ensure_ascii=False)
        found.append(row)
    return found


# ---- scoring ---------------------------------------------------------------------------------------


def counts_of(gold: Spans, said: Spans) -> dict[str, list[int]]:
    """nervaluate's counts of one row by scheme, in the order of `COUNTS`."""
    from nervaluate import Evaluator

    def entities(spans: Spans) -> list[dict[str, Any]]:
        return [{"label": label, "start": a, "end": b - 1} for label, a, b in spans]  # its ends are inclusive

    tags = sorted({s[0] for s in (*gold, *said)})  # it drops entities with other tags
    if not tags:
        return {scheme: [0] * len(COUNTS) for scheme in SCHEMES}
    told = Evaluator([entities(gold)], [entities(said)], tags=tags, loader="dict").evaluate()["overall"]
    return {scheme: [int(getattr(told[scheme], name)) for name in COUNTS] for scheme in SCHEMES}


def f1_of(counts: Floats, scheme: str) -> Floats:
    """F1 along the last axis (`COUNTS`); entities found in part count half where the scheme knows parts."""
    correct, incorrect, partial, missed, spurious = np.moveaxis(counts, -1, 0)
    hits = correct + (0.5 * partial if scheme in ("partial", "ent_type") else 0.0)
    actual, possible = correct + incorrect + partial + spurious, correct + incorrect + partial + missed
    return np.where(actual + possible > 0, 2 * hits / np.maximum(actual + possible, 1), 1.0)


@dataclass(frozen=True)
class SpanMetrics:
    """Figures of one candidate: `tree` as compare.json has them; values and draws of strict F1 by tenant."""

    tree: dict[str, Any]
    values: dict[str, float]
    draws: dict[str, Floats]
    documents: dict[str, int]


def measure_spans(task: SpanTask, predictions: Sequence[Prediction], resamples: int, seed: int) -> SpanMetrics:
    """F1 by scheme and tenant, with intervals from resampling each tenant's documents."""
    texts = {(r.tenant, r.id): r.text for r in task.test}
    tenants: dict[str, Any] = {}
    values, draws = {}, {}
    for tenant in task.tenants:
        rows = [p for p in predictions if p.tenant == tenant]
        documents = {key: n for n, key in enumerate(sorted({r.document for r in rows}))}
        sums = {scheme: np.zeros((len(documents), len(COUNTS))) for scheme in SCHEMES}
        for row in rows:
            said = (
                []
                if row.label is None
                else placed([Span.model_validate(s) for s in json.loads(row.label)], texts[row.tenant, row.id])
            )
            gold = [(label, a, b) for label, a, b in json.loads(row.gold)]
            if row.label is None and not gold:
                said = [(f"({row.status})", 0, 1)]  # no answer is wrong also where there was nothing to find
            for scheme, counts in counts_of(gold, said).items():
                sums[scheme][documents[row.document]] += counts
        weights_BD = resample_weights(len(documents), tenant, resamples, seed)
        schemes = {}
        for scheme, counts_DC in sums.items():
            value, drawn = float(f1_of(counts_DC.sum(0), scheme)), f1_of(weights_BD @ counts_DC, scheme)
            schemes[scheme] = interval(value, drawn)
            if scheme == "strict":
                values[tenant], draws[tenant] = value, drawn
        counted = {s: dict(zip(COUNTS, (int(x) for x in sums[s].sum(0)), strict=True)) for s in SCHEMES}
        tenants[tenant] = {
            "rows": len(rows), "macro_f1": _tree(schemes["strict"]), "schemes": {s: _tree(x) for s, x in schemes.items()},
            "counts": counted, **_statuses(rows),
        }  # fmt: skip
    average = interval(float(np.mean(list(values.values()))), np.mean(list(draws.values()), axis=0))
    tree = {
        "kind": "spans",
        "tenants": tenants,
        "average": _tree(average),
        "rows": len(predictions),
        **_statuses(predictions),
    }
    counted_documents = {t: len({p.document for p in predictions if p.tenant == t}) for t in values}
    return SpanMetrics(tree, values, draws, counted_documents)


def _tree(x: Any) -> dict[str, float]:
    return {"value": x.value, "low": x.low, "high": x.high}


def _statuses(rows: Sequence[Prediction]) -> dict[str, float]:
    found: dict[str, float] = {}
    for status in ("invalid", "truncated", "empty"):
        count = sum(r.status == status for r in rows)
        found |= {status: count, f"{status}_rate": count / max(len(rows), 1)}
    return found


def span_difference(before: SpanMetrics, after: SpanMetrics) -> tuple[Any, dict[str, Any]]:
    """(average, per tenant): strict F1 of the second less the first's, on the same resampled documents."""
    values = {t: after.values[t] - before.values[t] for t in before.values}
    return tested(values, {t: after.draws[t] - before.draws[t] for t in values}, before.documents)
