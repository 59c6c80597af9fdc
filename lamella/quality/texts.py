"""Texts to compare models on: rows of a JSONL file as the checkpoint's own tokenizer and chat template write them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella.data.encode import Encoder, load_tokenizer
from lamella.data.formats import read_conversation
from lamella.data.read import RawRow, RowError, line_sizes, read_rows
from lamella.errors import UserError

SCAN_BYTES = 256 << 20
"""Of the file, from its start: rows beyond are not looked at."""
_BYTES_PER_TOKEN = 16
"""Of a JSONL file at most: rows enough for the tokens asked for are read."""


@dataclass(frozen=True)
class Texts:
    """Attributes:
    source: the file.
    ids: token ids of each text.
    rows: in the file, as far as it was looked at.
    cut: texts that were cut at the end.
    unusable: reason -> rows that could not be encoded and were passed over.
    """

    source: Path
    ids: tuple[tuple[int, ...], ...]
    rows: int
    cut: int
    unusable: dict[str, int]

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.ids)


def read_texts(file: Path, folder: Path, tokens: int, context: int | None = None) -> Texts:
    """Rows of a file, spread over it by a seeded shuffle, until `tokens` are taken.

    Rows are of any format that training reads, or `{"text": ...}`; a chat is taken whole, with its answers.

    Args:
        folder: holds the tokenizer.
        tokens: in all; the last text is cut there.
        context: most tokens of a text; longer ones are cut at the end.

    Raises:
        UserError: no such file, no tokenizer, no row that can be encoded (with the reasons).
    """
    if not file.is_file():
        raise UserError("no such file", fix="give a JSONL file of texts", path=file)
    encoder = Encoder(load_tokenizer(folder))
    sizes, _ = line_sizes(file, SCAN_BYTES)
    order = list(range(len(sizes)))
    random.Random(0).shuffle(order)
    wanted, nbytes = [], 0
    for i in order:
        wanted.append(sizes[i][0])
        nbytes += sizes[i][1]
        if nbytes >= _BYTES_PER_TOKEN * tokens:
            break
    by_line = {raw.line: raw for raw in read_rows(file, set(wanted))}
    found: list[tuple[int, ...]] = []
    unusable: Counter[str] = Counter()
    left, cut = tokens, 0
    for raw in (by_line[line] for line in wanted if line in by_line):
        if left < 2:
            break
        try:
            ids = _ids(raw, encoder)
        except RowError as problem:
            unusable[problem.reason] += 1
            continue
        except UserError as error:
            raise UserError(error.what, fix=error.fix, path=file, line=raw.line) from error
        most = left if context is None else min(left, context)
        cut += len(ids) > most
        if len(ids) > 1:
            found.append(tuple(ids[:most]))
            left -= len(found[-1])
    if not found:
        reasons = ", ".join(f"{n} {reason}" for reason, n in unusable.most_common()) or "there are none of two tokens"
        raise UserError(f"no row can be used: {reasons}",
                        fix="rows need `text`, `messages`, or `prompt` and `completion`", path=file)  # fmt: skip
    return Texts(file, tuple(found), len(sizes), cut, dict(unusable.most_common()))


def _ids(raw: RawRow, encoder: Encoder) -> list[int]:
    """Raises `RowError` for a row that cannot be encoded, `UserError` for a chat without a chat template."""
    if raw.value is None:
        assert raw.problem is not None
        raise raw.problem
    text: Any = raw.value.get("text")
    if isinstance(text, str) and not {"messages", "conversations", "prompt", "instruction"} & raw.value.keys():
        return list(encoder.tokenizer(text)["input_ids"])
    _, row = read_conversation(raw.value, "auto")
    return list(encoder.encode(row).ids)
