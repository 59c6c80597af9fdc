"""A figure with the formula and the inputs it follows from, so that `--explain` can show how each one came about."""

from __future__ import annotations

from pydantic import Field

from lamella.config import Section


class Number(Section):
    """One figure of a plan.

    `formula` is an expression in the names of `inputs` (Python's operators, `floor`, `ceil`, `min`, `max`), or words where
    `inputs` are not numbers alone.
    """

    name: str
    """Dotted: what it is about, then what it is."""
    value: float
    unit: str
    formula: str
    inputs: dict[str, float | str] = Field(default_factory=dict)
