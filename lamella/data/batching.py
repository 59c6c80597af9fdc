"""A step's rows packed into micro-batches (`steps.py` says which)."""

from __future__ import annotations

from collections.abc import Sequence

from lamella.data.encode import EncodedRow
from lamella.data.steps import pack_lengths
from lamella.models.layout import PackedBatch, pack_rows


def micro_batches(rows: Sequence[EncodedRow], budget_tokens: int) -> list[PackedBatch]:
    """Pack a step's rows as `pack_lengths` says; rows of equal length by number. The order is deterministic.

    A row longer than the budget is a micro-batch of its own.
    """
    ordered = sorted(rows, key=lambda row: row.row_id)
    bins = [[ordered[i] for i in batch] for batch in pack_lengths([row.tokens for row in ordered], budget_tokens)]
    return [pack_rows([(r.input_ids, r.label_mask) for r in b], [r.row_id for r in b]) for b in bins]  # type: ignore[misc]
