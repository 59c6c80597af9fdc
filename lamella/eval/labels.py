"""From what a model wrote to a label, or to the reason why there is none.

Reasoning is cut off first and never reaches the parser. A label is taken only when the whole answer is that label.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lamella.data.formats import THINK_CLOSE, THINK_OPEN
from lamella.errors import UserError

Status = Literal["answered", "truncated", "empty", "invalid"]


def normalise_label(text: str) -> str:
    """NFKC, case folded, runs of white space as one blank, punctuation and blanks at both ends removed."""
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    start, end = 0, len(text)
    while start < end and _outer(text[start]):
        start += 1
    while end > start and _outer(text[end - 1]):
        end -= 1
    return text[start:end]


def _outer(char: str) -> bool:
    return char.isspace() or char in string.punctuation or unicodedata.category(char).startswith("P")


class LabelParser:
    """Matches a whole answer with one label of a fixed set.

    The answer, trimmed, equal to a label wins. Unless `strict`, the normalised answer equal to one normalised label
    (or alias) wins next; a normalised form that two labels share matches neither. Nothing is searched for inside
    the answer: `pos/neg` is no label.

    Args:
        labels: the fixed label set.
        aliases: other words for labels, alias -> label; not used when `strict`.
        strict: exact match only.

    Raises:
        UserError: a blank label, labels that differ in outer white space only, an alias for no label.
    """

    def __init__(
        self, labels: Sequence[str], aliases: Mapping[str, str] | None = None, *, strict: bool = False
    ) -> None:
        self._exact: dict[str, str] = {}
        for label in labels:
            if not label.strip():
                raise UserError(f"label {label!r} is blank", fix="give every label a text")
            if (other := self._exact.setdefault(label.strip(), label)) != label:
                raise UserError(
                    f"labels {other!r} and {label!r} differ in white space at their ends only",
                    fix="write them alike, or rename one",
                )
        self._normalised: dict[str, str] = {}
        if strict:
            return
        shared = set()
        for word, label in [*((label, label) for label in labels), *(aliases or {}).items()]:
            if label not in labels:
                raise UserError(f"alias {word!r} stands for {label!r}, which is no label", fix=f"labels: {labels}")
            key = normalise_label(word)
            if self._normalised.setdefault(key, label) != label:
                shared.add(key)
        for key in shared | {""}:
            self._normalised.pop(key, None)

    def __call__(self, answer: str) -> str | None:
        """The label, or None when the answer is not exactly one of them."""
        found = self._exact.get(answer.strip())
        return found if found is not None else self._normalised.get(normalise_label(answer))


@dataclass(frozen=True)
class ParsedAnswer:
    """One generation read: `label` is None unless `status` is "answered"."""

    status: Status
    label: str | None
    answer: str
    reasoning: str


def parse_generation(text: str, *, stopped: bool, parser: LabelParser, thinking_opened: bool = False) -> ParsedAnswer:
    """Read one generation.

    truncated: the token limit ended it, be it inside the reasoning or inside the answer.
    empty: it ended by itself, and nothing but blanks follows the reasoning (or the reasoning never closed).
    invalid: an answer that is no label. answered: a label.

    Args:
        text: what was generated, without the terminator.
        stopped: True when a terminator ended it, False when the token limit did.
        parser: reads the answer.
        thinking_opened: the prompt itself ended inside an opened `<think>`.
    """
    reasoning, closed, answer = text.rpartition(THINK_CLOSE)
    answer, opened, rest = answer.partition(THINK_OPEN)
    unfinished = bool(opened) or (thinking_opened and not closed)
    if unfinished:
        reasoning, answer = reasoning + answer + rest, ""
    reasoning = reasoning.replace(THINK_OPEN, "").strip()
    if not stopped:
        return ParsedAnswer("truncated", None, answer, reasoning)
    if not answer.strip():
        return ParsedAnswer("empty", None, answer, reasoning)
    label = parser(answer)
    return ParsedAnswer("answered" if label is not None else "invalid", label, answer, reasoning)
