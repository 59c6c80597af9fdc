"""What the training loop works with, said as protocols: the loop knows no model, store or file format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lamella.adapter.pages import StatePages
from lamella.forecast.document import PlanFile
from lamella.models.layout import PackedBatch


class StepOutput(Protocol):
    """`loss_sum`: cross-entropy summed over label tokens, not yet divided; `aux`: router balancing loss, unweighted;
    `start`: see `Parts.start`, when asked for; `first_bad_layer()`: first layer whose output was not finite, or None;
    `flops`: useful floating-point operations."""

    @property
    def loss_sum(self) -> float: ...
    @property
    def aux(self) -> float: ...
    @property
    def label_tokens(self) -> int: ...
    @property
    def start(self) -> dict[str, float] | None: ...
    @property
    def flops(self) -> float: ...
    def first_bad_layer(self) -> int | None: ...


class MatmulRate(Protocol):
    """`best`: FLOP/s of a large matrix product on the engine's device in its dtype."""

    @property
    def best(self) -> float: ...


class Engine(Protocol):
    """`step` takes what `Spread.take` gave."""

    def step(
        self, work: Any, *, step_index: int, label_tokens: int, aux_coef: float,
        beside_base: bool = False,
    ) -> StepOutput: ...  # fmt: skip
    def loss_sums(self, batches: Sequence[PackedBatch]) -> list[Tensor]: ...
    def facts(self) -> dict[str, Any]: ...
    def matmul_rate(self) -> MatmulRate: ...
    def expert_load(self) -> dict[str, list[int]]: ...
    def close(self) -> None: ...


class Adapter(Protocol):
    """`save` and `load_state` keep every bit (`save` may tell its large files' xxh3_128 by name); `settings` tells
    targets, rank, alpha, ... by their names in the config (`lora.rank`), from the pairs there are; `saved_settings` the
    same from saved files."""

    def parameters(self) -> dict[str, torch.nn.Parameter]: ...
    def save(self, folder: Path) -> dict[str, str] | None: ...
    def load_state(self, folder: Path) -> None: ...
    def settings(self) -> dict[str, Any]: ...
    def saved_settings(self, folder: Path) -> dict[str, Any]: ...


class Redraw(Protocol):
    """Makes an adapter's initial values again, bit for bit: `recipe` says what they are a function of, `begins_zero` which
    parameters are zero, `initial` gives one parameter's."""

    def recipe(self) -> str: ...
    def begins_zero(self, name: str) -> bool: ...
    def initial(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class StepRows:
    """Rows of one optimizer step: `epoch` from 0, `index` of the first row in that epoch, and their ids."""

    epoch: int
    index: int
    rows: tuple[int, ...]


class TrainData(Protocol):
    """Encoded rows and the plan that deals them to steps; both follow from the seed alone."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def steps(self) -> int: ...
    def rows_of(self, step_index: int) -> StepRows: ...
    def tokens(self, row: int) -> int: ...
    def label_tokens(self, row: int) -> int: ...
    def pack(self, rows: Sequence[int]) -> list[PackedBatch]: ...
    def report(self) -> dict[str, Any]: ...
    def decoded_labels(self, count: int) -> list[dict[str, Any]]: ...


class Spread(Protocol):
    """How steps are divided among ranks (`spread.py`).

    `take`: this rank's part of a step, for `Engine.step`; None: nothing to do. `counts`: its tokens
    and rows. `owners`: ranks that train a parameter, the
    first of which speaks for it. `pipelined`: ranks wait for each other within a step. `adapt`: take another split when
    measured busy seconds ask for it, and name the parameters whose owners changed; None: all stays. `settle`: the
    parameters are with their new owners. `lines`: the split in words.
    `planned_s`: seconds that a step should take. `state`: for the checkpoint.
    """

    @property
    def pipelined(self) -> bool: ...
    def take(self, rows: Sequence[int]) -> Any | None: ...
    def counts(self, work: Any | None) -> tuple[int, int]: ...
    def owners(self, name: str) -> tuple[int, ...]: ...
    def adapt(self, rows: Sequence[int], busy_s: Sequence[float]) -> tuple[str, ...] | None: ...
    def settle(self) -> None: ...
    def lines(self) -> list[str]: ...
    def planned_s(self, rows: Sequence[int]) -> float | None: ...
    def state(self) -> dict[str, Any] | None: ...


class Validator(Protocol):
    """Measures the model as it is; `names` says what `measure` will return."""

    @property
    def names(self) -> tuple[str, ...]: ...
    def measure(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Base:
    """The frozen model, as the receipt shows it.

    Attributes:
        fingerprint: identity of the store's content.
        tensors: per tensor class and format: class, format, dtype, count, parameters, bytes.
        verify: names of stored tensors whose checksum differs now.
        in_memory: checksum of the base's bytes held in memory, as they are now.
        expected: adapter parameters by class, computed from the store's shapes and the asked rank; with the formula.
    """

    fingerprint: str
    path: Path
    tensors: list[dict[str, Any]]
    verify: Callable[[], list[str]]
    in_memory: Callable[[], str]
    expected: dict[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Parts:
    """Everything a run works with, opened from its config.

    Attributes:
        start: loss per label token of the first micro-batch without (`base`) and with the adapter (`adapter`) before
            training; empty: the engine measures it in the first step, which brings the layers anyway.
        class_of: parameter name -> tensor class ("attention", "mlp", "experts", ...).
        fresh: adapter B is zero at the start (no `init_adapter`).
        aux_coef: weight of the router balancing loss.
        pages: where the adapter's state is, if not in RAM.
        redraw: makes the initial values of a fresh adapter again; None: they are known from its parameters alone.
        spread: divides steps among several ranks, from a checkpoint's `split` or anew; None: rows evenly.
        started_from: path, layout and checksum of the adapter whose values the run began with.
        forecast: what the run should take, given the file of a measured machine or None; None: nothing can be said.
    """

    engine: Engine
    adapter: Adapter
    data: TrainData
    base: Base
    vocab_size: int
    class_of: Callable[[str], str]
    validator: Validator | None = None
    start: dict[str, float] = field(default_factory=dict)
    fresh: bool = True
    aux_coef: float = 0.0
    pages: StatePages | None = None
    redraw: Redraw | None = None
    spread: Callable[[dict[str, Any] | None], Spread] | None = None
    started_from: dict[str, str] | None = None
    forecast: Callable[[Path | None], PlanFile | None] | None = None


@dataclass(frozen=True)
class TrainResult:
    """Where the run lies and its main figures; `final_loss` is the mean of the last (up to 10) logged losses."""

    run_dir: Path
    receipt_path: Path
    tokens_per_s: float
    peak_rss_bytes: int
    train_s: float
    final_loss: float
