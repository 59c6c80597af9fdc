"""What is asked: rows of a task, JSONL, or made-up text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from lamella.config import Section, explain_validation
from lamella.data.read import read_rows
from lamella.errors import UserError
from lamella.eval.labels import LabelParser
from lamella.eval.task import Task


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        messages: turns for chat; their texts, a blank line between, for completions.
        document: {text, entity} for classify.
        parser: reads a label out of the answer; None: no label is asked for.
        labels: what a label may be; empty: not known here.
    """

    messages: tuple[dict[str, str], ...]
    document: dict[str, str]
    tenant: str = ""
    parser: LabelParser | None = None
    labels: tuple[str, ...] = ()


class PromptRow(Section):
    """One row of a JSONL file of prompts: `messages` or `text`."""

    text: str | None = None
    """The user turn; for classify the document."""
    entity: str = ""
    """What in the text is classified."""
    messages: tuple[dict[str, str], ...] = Field(default=(), min_length=0)
    """Turns, each with role and content."""
    tenant: str = ""
    """Whose it is."""

    @model_validator(mode="after")
    def _one(self) -> PromptRow:
        if (self.text is None) == (not self.messages):
            raise ValueError("give one of `text` and `messages`")
        if any(set(m) != {"role", "content"} for m in self.messages):
            raise ValueError("each of `messages` has `role` and `content`, and nothing else")
        return self


def in_turn(groups: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """One of each tenant in turn, as long as any is left."""
    return [prompt for turn in zip_longest(*groups) for prompt in turn if prompt is not None]


def of_task(task: Task) -> list[Prompt]:
    """The test rows of a task, tenants in turn."""
    groups = []
    for tenant in task.tenants:
        parser, labels = task.parser_of(tenant), task.labels[tenant]
        groups.append(
            [
                Prompt(
                    tuple(task.messages(row)),
                    {"text": row.text, "entity": row.entity},
                    tenant,
                    parser,
                    labels,
                )
                for row in task.rows_of(tenant)
            ]
        )
    return in_turn(groups)


def of_jsonl(path: Path) -> list[Prompt]:
    """Rows of a file, tenants in turn. Raises `UserError` with path and line."""
    groups: dict[str, list[Prompt]] = {}
    for raw in read_rows(path):
        if raw.problem is not None:
            raise UserError(str(raw.problem), fix="write one JSON object per line", path=path, line=raw.line)
        try:
            row = PromptRow.model_validate_json(json.dumps(raw.value))
        except ValidationError as error:
            told = explain_validation(error, path, PromptRow)
            raise UserError(told.what, fix=told.fix, path=path, line=raw.line) from error
        messages = row.messages or ({"role": "user", "content": row.text or ""},)
        document = {"text": row.text if row.text is not None else messages[-1]["content"], "entity": row.entity}
        groups.setdefault(row.tenant, []).append(Prompt(messages, document, row.tenant))
    if not groups:
        raise UserError("holds no prompts", fix='write rows such as {"text": "..."}', path=path)
    return in_turn(list(groups.values()))


def made_up(lengths: str, seed: int, count: int = 1000) -> list[Prompt]:
    """Random words, every prompt different from its first word on, so that no cache of prefixes helps.

    Args:
        lengths: words, as `200`, or `64-512` for any number between.

    Raises:
        UserError: no such length.
    """
    low, _, high = lengths.partition("-")
    try:
        least, most = int(low), int(high or low)
    except ValueError as error:
        raise UserError(f"--synthetic {lengths!r} is no length", fix="give words, as 200 or 64-512") from error
    if not 1 <= least <= most <= 1_000_000:
        raise UserError(f"--synthetic {lengths!r}: from 1 to 1000000 words", fix="give words, as 200 or 64-512")
    draw = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    prompts = []
    for _ in range(count):
        text = " ".join("".join(draw.choices(syllables, k=2)) for _ in range(draw.randint(least, most)))
        prompts.append(Prompt(({"role": "user", "content": text},), {"text": text, "entity": ""}))
    return prompts


@dataclass(frozen=True)
class Models:
    """Which model answers what: names in turn, or one for each tenant."""

    names: tuple[str, ...]
    of_tenant: dict[str, str]

    def of(self, prompt: Prompt, turn: int) -> str:
        """The model of a prompt; `turn` counts rounds over all tenants."""
        named = self.of_tenant.get(prompt.tenant)
        return named if named is not None else self.names[turn % len(self.names)]

    @property
    def shown(self) -> str:
        return ", ".join([*self.names, *(f"{t}={m}" for t, m in self.of_tenant.items())])


def read_models(texts: Sequence[str], prompts: Sequence[Prompt]) -> Models:
    """`["foods=foods-v2", "base"]`; a name without a tenant answers all tenants that are not mapped.

    Raises:
        UserError: a tenant that no prompt has, one mapped twice, one without a model.
    """
    tenants = list(dict.fromkeys(p.tenant for p in prompts))
    names: list[str] = []
    mapped: dict[str, str] = {}
    for text in texts:
        tenant, equals, model = text.partition("=")
        if not equals:
            names.append(text)
        elif tenant not in tenants or not model or tenant in mapped:
            known = ", ".join(t for t in tenants if t) or "none: the prompts have no tenants"
            raise UserError(f"--model {text!r}: {'given twice' if tenant in mapped else 'no such tenant'}",
                            fix=f"TENANT=MODEL with a tenant of the prompts: {known}")  # fmt: skip
        else:
            mapped[tenant] = model
    left = [t for t in tenants if t not in mapped]
    if left and not names:
        raise UserError(
            f"no model for tenant {left[0]!r}", fix=f"--model {left[0]}=MODEL, or --model MODEL for the rest"
        )
    return Models(tuple(names), mapped)


def body_of(prompt: Prompt, mode: str, model: str, max_tokens: int) -> dict[str, Any]:
    """The request of one prompt; greedy."""
    if mode == "classify":
        return {"model": model, "documents": [{k: v for k, v in prompt.document.items() if v or k == "text"}]}
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0,
                            "stream_options": {"include_usage": True}}  # fmt: skip
    if mode == "chat":
        return body | {"messages": [dict(m) for m in prompt.messages]}
    return body | {"prompt": "\n\n".join(m["content"] for m in prompt.messages)}
