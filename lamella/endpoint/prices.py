"""What tokens cost: by hand, with the date of the price, or from genai-prices' data, which comes with the package."""

from __future__ import annotations

import datetime
import importlib.metadata
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pydantic import Field, field_validator

from lamella.config import Section
from lamella.errors import UserError

MILLION = 1_000_000


class GivenPrice(Section):
    """A price by hand, per million tokens."""

    input: float = Field(ge=0, le=1e6)
    """Of input tokens."""
    output: float = Field(ge=0, le=1e6)
    """Of output tokens, thinking included."""
    cached_input: float | None = Field(None, ge=0, le=1e6)
    """Of input tokens that the server had cached; None: as input."""
    currency: str = "USD"
    """ISO code."""
    date: str
    """When this was the price, YYYY-MM-DD."""

    @field_validator("date")
    @classmethod
    def _check(cls, value: str) -> str:
        if not 2000 <= datetime.date.fromisoformat(value).year < 2200:
            raise ValueError(f"{value} is no date of a price")
        return value


@dataclass(frozen=True)
class Price:
    """Per million tokens."""

    input: float
    output: float
    cached_input: float
    currency: str
    source: str
    date: str

    def cost(self, input_tokens: int, output_tokens: int, cached: int = 0) -> float:
        """Of so many tokens; `cached` of the input ones were cached."""
        cached = min(cached, input_tokens)
        return (
            (input_tokens - cached) * self.input + cached * self.cached_input + output_tokens * self.output
        ) / MILLION

    def to_json(self) -> dict[str, Any]:
        return {"input_per_mtok": self.input, "output_per_mtok": self.output, "cached_input_per_mtok": self.cached_input,
                "source": self.source, "date": self.date}  # fmt: skip


def price_of(given: GivenPrice | str) -> Price:
    """A price.

    Args:
        given: by hand, or `provider:model` (or a model alone) as genai-prices names it.

    Raises:
        UserError: genai-prices does not know it.
    """
    if isinstance(given, GivenPrice):
        cached = given.input if given.cached_input is None else given.cached_input
        return Price(given.input, given.output, cached, given.currency, "given", given.date)
    from genai_prices import Usage, calc_price

    provider, _, model = given.rpartition(":")

    def asked(**tokens: int) -> float:
        found = calc_price(Usage(**tokens), model_ref=model, provider_id=provider or None)
        return float(Decimal(found.total_price))

    try:
        once = asked(input_tokens=MILLION)
        output = asked(output_tokens=MILLION)
        cached = asked(input_tokens=MILLION, cache_read_tokens=MILLION)
    except LookupError as error:
        raise UserError(f"genai-prices knows no price of {given!r}: {error}",
                        fix="give it by hand: price = {input = 0.5, output = 1.5, date = \"2026-11-01\"}") from error  # fmt: skip
    version = importlib.metadata.version("genai-prices")
    return Price(once, output, cached, "USD", f"genai-prices {version}: {given}", _data_date())


def _data_date() -> str:
    """When genai-prices' data was packed: the date of its files."""
    import genai_prices

    assert genai_prices.__file__ is not None
    from pathlib import Path

    return datetime.date.fromtimestamp(Path(genai_prices.__file__).with_name("data.py").stat().st_mtime).isoformat()
