"""What a decision reads of `compare.json`, `loadtest.json` and `plan.json`. Other keys are theirs."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lamella.config import explain_validation
from lamella.errors import UserError


class Part(BaseModel):
    """Keys that are not named here are left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Interval(Part):
    value: float
    low: float
    high: float


class TenantDifference(Interval):
    significant: bool = False


class Metrics(Part):
    """A comparison of spans has no accuracy."""

    average: Interval
    average_accuracy: Interval | None = None


class Tokens(Part):
    input: float = Field(ge=0)
    output: float = Field(ge=0)


class Latency(Part):
    p99: float = Field(ge=0)


class Prices(Part):
    """Those of a machine have no price of tokens."""

    input_per_mtok: float | None = None
    output_per_mtok: float | None = None
    source: str = ""
    date: str = ""

    @model_validator(mode="after")
    def _check(self) -> Prices:
        if self.input_per_mtok is not None:
            if self.output_per_mtok is None:
                raise ValueError("a price of input tokens and none of output tokens")
            datetime.date.fromisoformat(self.date)
        return self


class Money(Part):
    currency: str
    prices: Prices


class Candidate(Part):
    name: str
    where: str = "endpoint"
    metrics: Metrics
    tokens: Tokens
    latency_s: Latency | None = None
    money: Money | None = None


class Difference(Part):
    before: str
    after: str
    average: Interval
    tenants: dict[str, TenantDifference] = Field(default_factory=dict)


class Comparison(Part):
    rows: int = Field(gt=0)
    candidates: tuple[Candidate, ...]
    differences: tuple[Difference, ...] = ()


class Throughput(Part):
    requests_per_s: float = Field(ge=0)
    labels_per_s: float | None = Field(None, ge=0)


class Goodput(Part):
    requests_per_s: float = Field(ge=0)


class LoadTest(Part):
    throughput: Throughput
    goodput: Goodput | None = None
    e2e_s: Latency
    label_s: Latency | None = None


class Decode(Part):
    sequences: int = Field(ge=1)
    tokens_per_s: float = Field(gt=0)


class Serve(Part):
    format: str
    machine: str
    prefill_tokens_per_s: float = Field(gt=0)
    decode: tuple[Decode, ...]


class Serving(Part):
    here: tuple[Serve, ...] = ()


class Plan(Part):
    serving: Serving | None = None


_MADE_BY: dict[type[Part], str] = {Comparison: "compare", LoadTest: "loadtest", Plan: "plan"}
File = TypeVar("File", Comparison, LoadTest, Plan)


def read(path: Path, model: type[File]) -> File:
    """Read a file of another verb. Raises `UserError` with file and key."""
    verb = _MADE_BY[model]
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", fix=f"make it with `lamella {verb}`", path=path) from error
    except ValueError as error:
        raise UserError(f"not JSON: {error}", fix=f"make it again with `lamella {verb}`", path=path) from error
    if not isinstance(tree, dict) or tree.get("kind") not in (verb, f"lamella {verb}"):
        raise UserError(f"is no result of `lamella {verb}`", fix=f"give a file that `lamella {verb}` wrote", path=path)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise explain_validation(error, path, model) from error
