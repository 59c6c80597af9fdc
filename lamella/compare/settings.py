"""`compare.toml`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from lamella.config import Section, Size, checked, read_toml
from lamella.endpoint.prices import GivenPrice
from lamella.errors import UserError

Answering = Literal["likelihood", "constrained", "think", "generate"]
Way = Literal["auto", "json_schema", "enum_schema", "choice", "guided_choice"]
Role = Literal["self-hosted-tuned", "self-hosted-base", "api-base", "api-tuned", "baseline"]


def check_address(address: str) -> None:
    """Raises `ValueError` for what is no http(s) address of a server."""
    wrong = f"endpoint {address!r} is no http(s) address"
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{wrong}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(wrong)


class Candidate(Section):
    """One of `[[candidates]]`: exactly one of store, checkpoint, endpoint, baseline."""

    name: str = Field(min_length=1)
    """How it is called in tables."""
    store: Path | None = None
    """Layer store, run here."""
    checkpoint: str | None = None
    """Checkpoint folder or hub id, run here in its own precision; its layers are copied once into the output folder."""
    endpoint: str | None = None
    """Address of an OpenAI-compatible server, up to and with /v1."""
    baseline: Literal["tfidf", "majority"] | None = None
    """TF-IDF with logistic regression, or the commonest label."""
    adapter: Path | None = None
    """Adapter folder for a store or checkpoint."""
    model: str | None = None
    """Model name at the endpoint."""
    key_env: str | None = None
    """Environment variable that holds the endpoint's key. The key itself is written nowhere."""
    answering: Answering = "likelihood"
    """`likelihood`: the likeliest label; `constrained`: the model may write labels only; `think`: it may think first;
    `generate`: free text."""
    way: Way = "auto"
    """How an endpoint is told to write labels only; `auto` tries each and says which one held."""
    few_shot: int = Field(0, ge=0)
    """Examples in the prompt."""
    thinking_budget: int = Field(1024, ge=1)
    """Tokens of thinking (`think`); an answer that thought longer is truncated, and wrong."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Tokens of the answer itself; None: the task's."""
    temperature: float = Field(0.0, ge=0)
    """At an endpoint; 0: greedy."""
    tokenizer: Path | None = None
    """Store or checkpoint folder whose tokenizer an endpoint's model has: `likelihood` needs it."""
    role: Role | None = None
    """For the decision; None: by kind, tuned where there is an adapter."""
    price: GivenPrice | str | None = None
    """Per million tokens: by hand with its date, or "provider:model" of genai-prices. None: no money is counted."""
    machine_per_hour: float | None = Field(None, ge=0)
    """Money an hour of the machine that a store or checkpoint runs on, in `currency`."""
    requests_per_min: float | None = Field(None, gt=0)
    """At most so many requests in a minute."""
    tokens_per_min: float | None = Field(None, gt=0)
    """At most so many tokens in a minute, input and the most of output."""
    concurrency: int = Field(8, ge=1)
    """Requests under way at once."""
    timeout_s: float = Field(120.0, gt=0)
    """For one attempt."""
    attempts: int = Field(6, ge=1)
    """At most, for one request."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Compute dtype of a store or checkpoint."""
    device: str = "cpu"
    """Torch device of a store or checkpoint."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of a store or checkpoint."""
    budget: Size | None = None
    """Memory of a store or checkpoint, such as "2GiB"."""

    @model_validator(mode="after")
    def _check(self) -> Candidate:
        kinds = [k for k in ("store", "checkpoint", "endpoint", "baseline") if getattr(self, k) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"{self.name!r} names {' and '.join(kinds) or 'nothing'}: give one of store, checkpoint, endpoint, baseline"
            )
        if self.endpoint is not None:
            check_address(self.endpoint)
            if self.model is None:
                raise ValueError(f"{self.name!r}: an endpoint needs `model`")
            if self.answering == "likelihood" and self.tokenizer is None:
                raise ValueError(
                    f"{self.name!r}: likelihoods at an endpoint need `tokenizer`, a folder with its model's tokenizer"
                )
            if self.adapter is not None:
                raise ValueError(f"{self.name!r}: an endpoint takes no `adapter`; name it in `model`")
        elif self.key_env or self.price is not None:
            raise ValueError(f"{self.name!r}: `key_env` and `price` are for endpoints")
        if self.adapter is not None and self.baseline:
            raise ValueError(f"{self.name!r}: a baseline takes no adapter")
        return self

    @property
    def kind(self) -> str:
        return next(k for k in ("store", "checkpoint", "endpoint", "baseline") if getattr(self, k) is not None)

    @property
    def part(self) -> Role:
        """What it is in a decision."""
        if self.role is not None:
            return self.role
        if self.baseline:
            return "baseline"
        if self.endpoint is not None:
            return "api-base"
        return "self-hosted-tuned" if self.adapter is not None else "self-hosted-base"


class CompareConfig(Section):
    """`compare.toml`. Paths are relative to the file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name; results go to runs/compare-NAME."""
    task: Path
    """task.toml: rows, prompt, labels."""
    limit: int | None = Field(None, ge=1)
    """At most so many test rows per tenant."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Of few-shot examples and resamples."""
    resamples: int = Field(1000, ge=100)
    """Bootstrap resamples."""
    ceiling: str | None = None
    """Money that is not passed, such as "5 USD"."""
    currency: str = "USD"
    """Of `machine_per_hour` and the totals."""
    candidates: tuple[Candidate, ...]
    """In the order of the tables; the first is what the others are compared with."""

    @field_validator("ceiling")
    @classmethod
    def _check_ceiling(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\s*\d+(\.\d+)?\s*[A-Z]{3}\s*", value):
            raise ValueError(f'{value!r} is no amount such as "5 USD"')
        return value

    @model_validator(mode="after")
    def _check(self) -> CompareConfig:
        names = [c.name for c in self.candidates]
        if not names:
            raise ValueError("no candidates")
        if len(set(names)) < len(names):
            raise ValueError(f"two candidates have one name: {names}")
        return self

    @property
    def ceiling_amount(self) -> float | None:
        return None if self.ceiling is None else float(self.ceiling.strip()[:-3])


def load_compare(path: Path) -> CompareConfig:
    """Read `compare.toml`, with its paths from its folder. Raises `UserError` with file and key."""

    tree = read_toml(path, "compare.toml")
    _anchor(tree, path.parent)
    config = checked(CompareConfig, tree, path)
    if config.ceiling is not None and config.ceiling.strip()[-3:] != config.currency:
        raise UserError(
            f"ceiling {config.ceiling!r} is not in {config.currency}", fix="give both in one currency", path=path
        )
    return config


def _anchor(tree: dict[str, Any], folder: Path) -> None:
    entries = (
        [e for e in tree.get("candidates", []) if isinstance(e, dict)]
        if isinstance(tree.get("candidates"), list)
        else []
    )
    for place, names in ((tree, ("task",)), *((e, ("store", "adapter", "tokenizer")) for e in entries)):
        for name in names:
            if isinstance(place.get(name), str):
                place[name] = str(folder / place[name])
    for entry in entries:
        said = entry.get("checkpoint")
        if isinstance(said, str) and (folder / said).exists():
            entry["checkpoint"] = str(folder / said)
