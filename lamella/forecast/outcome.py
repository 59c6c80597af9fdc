"""What a forecast says, as values: per rank, per host, and for the whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lamella.forecast.events import Played
from lamella.forecast.shape import Site
from lamella.plan.split import Split
from lamella.plan.work import StepPlan
from lamella.units import format_bytes


@dataclass(frozen=True)
class RankForecast:
    """One rank, at its peak and in a step.

    Attributes:
        name: for people; device: index in the machine; host: of its computer.
        first, last: its layers, `last` excluded; share: of its stage's work.
        parts: bytes at the peak, by part; need: their sum; have: what it may take.
        formulas: how parts came about.
        on_device, in_host, on_disk: layers by where their packed bytes are; on a CPU all that stay are `on_device`.
        keeps: activations are kept; else layers are recomputed.
        state_on_disk: the adapter's state is a file.
        read_bytes: packed bytes that a step reads.
        busy: share of a step in which it computes; idle: the rest.
        seconds: of a step by kind of work; causes: of passes by cause; wait_s: by what it waits for.
    """

    rank: int
    name: str
    device: int
    host: int
    first: int
    last: int
    share: float
    parts: dict[str, int]
    formulas: dict[str, str]
    need: int
    have: int
    on_device: int
    in_host: int
    on_disk: int
    keeps: bool
    state_on_disk: bool
    read_bytes: int
    busy: float
    seconds: dict[str, float]
    causes: dict[str, float]
    wait_s: dict[str, float]

    @property
    def fits(self) -> bool:
        return self.need <= self.have

    @property
    def idle(self) -> float:
        return max(0.0, 1 - self.busy)

    def line(self) -> str:
        """`need 9.3 GB, have 8 GB: base 4.1 GB, ...`, largest part first."""
        parts = sorted(((n, name) for name, n in self.parts.items() if n), key=lambda x: (-x[0], x[1]))
        shown = ", ".join(f"{name} {format_bytes(n)}" for n, name in parts)
        return f"need {format_bytes(self.need)}, have {format_bytes(self.have)}: {shown}"


@dataclass(frozen=True)
class HostForecast:
    """One computer: RAM at the peak of training, page-locked RAM, and its disk, each by part; `have` None: not known."""

    name: str
    ram: dict[str, int]
    ram_have: int | None
    pinned: dict[str, int]
    pinned_have: int | None
    disk: dict[str, int]
    disk_have: int | None
    quantise: dict[str, int]
    """RAM while quantising."""

    def short(self) -> list[str]:
        """What there is too little of, with need and have."""
        return self.short_of_memory() + self._short("disk", self.disk, self.disk_have)

    def short_of_memory(self) -> list[str]:
        """The same, disks aside."""
        return [
            *self._short("RAM", self.ram, self.ram_have),
            *self._short("page-locked RAM", self.pinned, self.pinned_have),
            *self._short("RAM while quantising", self.quantise, self.ram_have),
        ]

    def _short(self, what: str, parts: dict[str, int], have: int | None) -> list[str]:
        need = sum(parts.values())
        if have is None or need <= have:
            return []
        shown = ", ".join(f"{name} {format_bytes(n)}" for name, n in sorted(parts.items(), key=lambda x: -x[1]))
        return [f"{self.name}: {what}: need {format_bytes(need)}, have {format_bytes(have)}: {shown}"]


@dataclass(frozen=True)
class Rejected:
    """Another way: what, its seconds a step (None: it does not fit), and why not."""

    what: str
    step_s: float | None
    why: str


@dataclass(frozen=True)
class Change:
    """One change of settings or machine: `times` faster (None where it is to make things fit)."""

    what: str
    times: float | None = None
    step_s: float | None = None


@dataclass(frozen=True)
class Forecast:
    """A whole run.

    Attributes:
        fits: everything has room; shortfall: what has not, need and have; changes: the smallest ones that would do.
        sites: what is trained.
        split, plan: of the typical step; dtype: of computing.
        played: that step; None where no split fits at all.
        step_s: of a step of mean length; flops: of the typical step.
        tokens_per_s: of training; steps, run_s: of the whole run, start-up included.
        start_s: until the first step; quantise_s: once, before.
        reasons: why this split and this residency.
        rejected: other ways, fastest first; helps: single changes that would make it faster, best first.
        settled: settings that this forecast chose, a tree like run.toml.
        notes: what was assumed.
    """

    fits: bool
    shortfall: tuple[str, ...]
    changes: tuple[Change, ...]
    sites: tuple[Site, ...]
    dtype: str
    split: Split | None
    plan: StepPlan | None
    played: Played | None
    ranks: tuple[RankForecast, ...]
    hosts: tuple[HostForecast, ...]
    step_tokens: float
    step_s: float
    flops: float
    tokens_per_s: float
    utilisation: float
    steps: int
    run_tokens: float
    run_s: float
    start_s: float
    quantise_s: float
    reasons: tuple[str, ...]
    rejected: tuple[Rejected, ...]
    helps: tuple[Change, ...]
    settled: dict[str, Any]
    notes: tuple[str, ...]
