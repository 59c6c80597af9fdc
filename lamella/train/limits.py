"""What the model can take: no row longer than its context, no id outside its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lamella.data.encode import EncodedRow
from lamella.errors import UserError


def check_rows(rows: Sequence[EncodedRow], config: Any, tokenizer: Any) -> None:
    """Refuse rows that the model was not made for, before any weight is read.

    Args:
        config: transformers config of the model; a limit that it does not name is not checked.

    Raises:
        UserError: a row longer than `max_position_embeddings` (the longest is named), or a token id that is not below
            `vocab_size`.
    """
    context = getattr(config, "max_position_embeddings", None)
    longest = max(rows, key=lambda row: row.tokens)
    if context is not None and longest.tokens > context:
        over = sum(row.tokens > context for row in rows)
        raise UserError(
            f"{over} of {len(rows)} rows do not fit the model's context of {context} tokens; "
            f"this one, the longest, has {longest.tokens} tokens",
            fix=f'set data.max_tokens = {context}, and data.too_long = "drop" or "cut_prompt"',
            path=longest.source[0], line=longest.source[1],
        )  # fmt: skip
    vocab_size = getattr(config, "vocab_size", None)
    if vocab_size is None:
        return
    for row in rows:
        highest = max(row.input_ids)
        if highest >= vocab_size:
            token = tokenizer.convert_ids_to_tokens(highest)
            raise UserError(
                f"token {token!r} has id {highest}, but the model's vocab_size is {vocab_size}",
                fix="use the tokenizer that belongs to this model, then quantize again",
                path=row.source[0], line=row.source[1],
            )  # fmt: skip
