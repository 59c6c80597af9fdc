"""`decide.toml`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from lamella.config import Section, checked, read_toml
from lamella.endpoint.prices import GivenPrice

Kind = Literal["self-hosted tuned", "self-hosted base", "API base", "API tuned"]


def check_date(text: str) -> None:
    """Raises `ValueError` for what is no date of our time."""
    if not 2000 <= datetime.date.fromisoformat(text).year < 2200:
        raise ValueError(f"{text} is no date between 2000 and 2200")


class Volume(Section):
    documents_per_month: float = Field(gt=0, le=1e12)
    """Documents a month."""
    input_tokens: float = Field(0.0, ge=0, le=1e9)
    """Of a document's prompt."""
    output_tokens: float = Field(0.0, ge=0, le=1e9)
    """Of an answer, thinking included."""
    peak_factor: float = Field(1.0, ge=1, le=1e4)
    """Busiest hour over the mean one: machines are bought for it."""
    hours_per_month: float = Field(730.0, ge=1, le=744)
    """Hours a month that machines are paid for; fewer where they are switched off at night."""
    growth_per_month: float = Field(0.0, gt=-1, le=10)
    """Share by which documents grow each month."""
    horizon_months: int = Field(12, ge=1, le=120)
    """Months over which what is paid once is spread, and over which growth is looked at."""


class Worth(Section):
    per_f1_point_per_month: float | None = Field(None, ge=0, le=1e12)
    """What one point of macro-F1 (0.01) is worth a month."""
    per_wrong_label: float | None = Field(None, ge=0, le=1e9)
    """What one wrong label costs; then accuracy counts instead of F1."""

    @model_validator(mode="after")
    def _check(self) -> Worth:
        if (self.per_f1_point_per_month is None) == (self.per_wrong_label is None):
            raise ValueError("give one of per_f1_point_per_month and per_wrong_label")
        return self


class Quality(Section):
    value: float = Field(ge=0, le=1)
    """Macro-F1 (or accuracy, with per_wrong_label)."""
    low: float | None = Field(None, ge=0, le=1)
    """Lower end of its 95 % interval."""
    high: float | None = Field(None, ge=0, le=1)
    """Upper end."""

    @model_validator(mode="after")
    def _check(self) -> Quality:
        if (self.low is None) != (self.high is None):
            raise ValueError("give both ends of the interval, or none")
        if self.low is not None and self.high is not None and not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value:g} is not within {self.low:g} to {self.high:g}")
        return self


class GivenGain(Section):
    value: float = Field(ge=-1, le=1)
    """Quality less the current option's, as a share: 0.076 is 7.6 points."""
    low: float = Field(ge=-1, le=1)
    """Lower end of its 95 % interval."""
    high: float = Field(ge=-1, le=1)
    """Upper end."""

    @model_validator(mode="after")
    def _check(self) -> GivenGain:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value:g} is not within {self.low:g} to {self.high:g}")
        return self


class Option(Section):
    name: str = Field(min_length=1)
    """How it is called."""
    kind: Kind
    """What it is."""
    candidate: str | None = None
    """Its name in a comparison: quality, price, latency and tokens come from there."""
    quality: Quality | None = None
    """By hand; in the place of a comparison's."""
    gain: GivenGain | None = None
    """Difference to the current option by hand, where only that is known."""
    input_tokens: float | None = Field(None, ge=0, le=1e9)
    """Of a document, where this option's prompt differs; None: as `volume` or its candidate has it."""
    output_tokens: float | None = Field(None, ge=0, le=1e9)
    """Of an answer, thinking included, where this option's differs."""
    price: GivenPrice | str | None = None
    """Of an API, per million tokens, by hand with its date or "provider:model"; None: the comparison's."""
    machine: str | None = None
    """Of the catalogue, such as "4xH100-80"; its dated price counts."""
    machine_per_hour: float | None = Field(None, ge=0, le=1e6)
    """Money an hour of one machine; in the place of the catalogue's."""
    price_date: str | None = None
    """When that was the price, YYYY-MM-DD."""
    documents_per_s: float | None = Field(None, ge=1e-6, le=1e9)
    """That one machine answers at full load."""
    load_test: Path | None = None
    """loadtest.json: documents per second and latency are its own."""
    plan: Path | None = None
    """plan.json (`lamella plan --json`) with a serving preview: its bounds give documents per second and latency."""
    plan_format: Literal["bf16", "fp8", "nf4"] | None = None
    """Format of the weights in the plan; None: the most exact that fits."""
    p99_over_mean: float = Field(2.0, ge=1, le=1e3)
    """p99 over mean latency, with a plan, which knows the mean alone."""
    plan_share: float = Field(0.5, gt=0, le=1)
    """Share of a plan's bound that a server is taken to reach."""
    latency_p99_s: float | None = Field(None, gt=0, le=1e9)
    """By hand."""
    once: float = Field(0.0, ge=0, le=1e12)
    """Paid once: training, set-up."""
    retrain: float = Field(0.0, ge=0, le=1e12)
    """Each re-training."""
    retrain_every_months: float | None = Field(None, ge=0.01, le=1200)
    """How often; None: never."""
    staff_hours_once: float = Field(0.0, ge=0, le=1e6)
    """To bring it about."""
    staff_hours_per_month: float = Field(0.0, ge=0, le=1e6)
    """To keep it running."""
    per_month: float = Field(0.0, ge=0, le=1e12)
    """Any other cost a month."""

    @property
    def hosted(self) -> bool:
        """Whether it runs on machines of one's own."""
        return self.kind.startswith("self-hosted")

    @field_validator("price_date")
    @classmethod
    def _check_date(cls, value: str | None) -> str | None:
        if value is not None:
            check_date(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> Option:
        hosted = self.hosted
        if hosted and self.price is not None:
            raise ValueError(f"{self.name!r} is {self.kind}: `price` is for APIs; give machine or machine_per_hour")
        if not hosted and (
            self.machine or self.machine_per_hour is not None or self.load_test or self.plan or self.documents_per_s
        ):
            raise ValueError(
                f"{self.name!r} is {self.kind}: machines, load tests and plans are for what is self-hosted"
            )
        if hosted and self.machine is None and self.machine_per_hour is None:
            raise ValueError(f"{self.name!r} is {self.kind}: give machine or machine_per_hour")
        if hosted and sum(x is not None for x in (self.documents_per_s, self.load_test, self.plan)) != 1:
            raise ValueError(f"{self.name!r}: give one of documents_per_s, load_test and plan")
        return self


class DecideConfig(Section):
    """`decide.toml`. Paths are relative to the file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name; the result goes to runs/decide-NAME."""
    currency: str = "USD"
    """Of all money."""
    comparisons: tuple[Path, ...] = ()
    """compare.json files."""
    current: str
    """The option in use now: what all others are measured against."""
    proposal: str
    """The option to decide on."""
    staff_per_hour: float = Field(0.0, ge=0, le=1e6)
    """Cost of an hour of work."""
    latency_p99_s: float | None = Field(None, gt=0, le=1e9)
    """An option that is slower is out."""
    review: str | None = None
    """A date by which to look again anyway, YYYY-MM-DD."""
    volume: Volume
    """How much there is to do."""
    worth: Worth
    """What quality is worth."""
    sensitivity: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Ranges of inputs (names as `--explain` prints them), low and high; others go from half to twice."""
    options: tuple[Option, ...]
    """What there is to choose from."""
    _file: Path | None = PrivateAttr(None)

    @property
    def file(self) -> Path | None:
        """Where it was read."""
        return self._file

    @model_validator(mode="after")
    def _check(self) -> DecideConfig:
        names = [o.name for o in self.options]
        if len(set(names)) < len(names):
            raise ValueError(f"two options have one name: {names}")
        for key in ("current", "proposal"):
            if getattr(self, key) not in names:
                raise ValueError(f"{key} {getattr(self, key)!r} is no option; options: {', '.join(names)}")
        if self.current == self.proposal:
            raise ValueError("current and proposal are the same option: there is nothing to decide")
        if self.review is not None:
            check_date(self.review)
        return self


def load_decide(path: Path) -> DecideConfig:
    """Read `decide.toml`, with its paths from its folder. Raises `UserError` with file and key."""
    tree = read_toml(path, "decide.toml")
    _anchor(tree, path.parent)
    config = checked(DecideConfig, tree, path)
    config._file = path
    return config


def _anchor(tree: dict[str, Any], folder: Path) -> None:
    if isinstance(tree.get("comparisons"), list):
        tree["comparisons"] = [str(folder / p) if isinstance(p, str) else p for p in tree["comparisons"]]
    options = tree.get("options")
    for option in options if isinstance(options, list) else []:
        for key in ("load_test", "plan"):
            if isinstance(option, dict) and isinstance(option.get(key), str):
                option[key] = str(folder / option[key])
