"""Past runs calibrate later plans: factors by cause, measured over planned, in a file that can be read and removed.

`calibration.json` lies beside `machine.json`. Of every run it holds what its steps showed, per kind of device, threads and dtype; the
factors follow from all of them together:

- of dequantising, embedding, head and optimizer, which are timed by themselves, the median over runs of measured over planned;
- of the causes of a layer's pass (products, experts, attention, ...), which are timed together only, those with which planned
  times fit the measured passes best: least squares of relative errors, errors beyond `ROBUST` counting linearly (Huber 1964), drawn
  weakly (`PULL`) to the one factor that fits all causes, where passes do not tell them apart.

Factors are kept between `LEAST` and `MOST`: beyond that something else is wrong than a rate.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from lamella import __version__
from lamella.config import Section, explain_validation
from lamella.errors import UserError
from lamella.files import write_text
from lamella.forecast.compare import Measured, measure
from lamella.forecast.pieces import Key, Spent
from lamella.forecast.times import StepTimes

FILE = "calibration.json"
FORMAT_VERSION = 1
LEAST, MOST = 0.2, 5.0
ROBUST = 0.05
PULL = 0.01
TOKENS_APART = 0.25
"""Of the planned step's tokens that traced steps may differ by: times are then taken per token."""
DIRECT = ("dequantise", "embed", "head", "optimizer")
"""Causes that are timed by themselves."""
_ROUNDS = 20


class Identity(Section):
    """Which device a factor is for."""

    device: str
    threads: int | None
    """Of a CPU."""
    dtype: Literal["bf16", "fp16", "fp32"]
    kernels: bool = False
    """Plans take its times from measured kernels; else from rates of the whole device, which are off by other factors."""

    kept: bool = False
    """Activations are kept: passes then write fresh memory, where recomputing ones find theirs in the caches."""

    def text(self) -> str:
        threads = "" if self.threads is None else f", {self.threads} threads"
        how = "measured kernels" if self.kernels else "rates alone"
        return (
            f"{self.device}{threads}, {self.dtype}, {how}, {'activations kept' if self.kept else 'layers recomputed'}"
        )


class Pass(Section):
    """Like layers' passes of a run in one direction: seconds planned by cause, and measured (medians over steps and layers)."""

    planned: dict[str, float]
    measured: float = Field(gt=0)


class RunShown(Section):
    """What one run showed of one kind of device."""

    run: str
    date: str
    """When it was taken in, ISO."""
    steps: int
    """Traced."""
    direct: dict[str, float]
    """Measured over planned, of causes timed by themselves."""
    passes: tuple[Pass, ...]


class Entry(Section):
    """All that is known of one kind of device."""

    identity: Identity
    lamella: str
    """Version whose runs these are."""
    factors: dict[str, float]
    runs: tuple[RunShown, ...]


class CalibrationFile(Section):
    """`calibration.json`, whole."""

    kind: Literal["lamella calibration"] = "lamella calibration"
    format_version: int = FORMAT_VERSION
    range: tuple[float, float] = (LEAST, MOST)
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """Factors by kind of device; `notices`: what of the file is not used, and why."""

    entries: tuple[Entry, ...] = ()
    notices: tuple[str, ...] = ()

    def factors(self, identity: Identity) -> dict[str, float]:
        """By cause; none for a device that no run was on. Where runs there did all but keep (or recompute) as well, theirs."""
        entry = self._entry(identity)
        return {} if entry is None else dict(entry.factors)

    def _entry(self, identity: Identity) -> Entry | None:
        other = identity.model_copy(update={"kept": not identity.kept})
        found = {entry.identity: entry for entry in self.entries}
        return found.get(identity) or found.get(other)

    def apply(self, times: StepTimes, identity: Identity) -> StepTimes:
        """The times as runs on such a device have shown them; the same where none has."""
        factors = self.factors(identity)
        return Calibrated(times, factors) if factors else times

    def lines(self, identity: Identity) -> list[str]:
        """What is taken from it, for people."""
        entry = self._entry(identity)
        if entry is None:
            others = "; ".join(e.identity.text() for e in self.entries)
            return [f"{FILE}: no run was on {identity.text()}, only on {others}"] if others else []
        shown = ", ".join(
            f"{cause} x{factor:.2f}" + (" (the most that is taken)" if factor in (LEAST, MOST) else "")
            for cause, factor in sorted(entry.factors.items())
        )
        runs = ", ".join(Path(run.run).name for run in entry.runs)
        return [f"calibrated by {len(entry.runs)} run{'s' * (len(entry.runs) > 1)} ({runs}): {shown}"]


@dataclass(frozen=True)
class Calibrated:
    """Step times multiplied by factors; implements `StepTimes`."""

    times: StepTimes
    by: Mapping[str, float]

    def _scaled(self, seconds: Mapping[str, float]) -> dict[str, float]:
        return {cause: value * self.by.get(cause, 1.0) for cause, value in seconds.items()}

    def forward(self, layer: int, lengths: Sequence[int]) -> dict[str, float]:
        return self._scaled(self.times.forward(layer, lengths))

    def backward(self, layer: int, lengths: Sequence[int], recompute: bool) -> dict[str, float]:
        return self._scaled(self.times.backward(layer, lengths, recompute))

    def dequantise(self, layer: int) -> float:
        return self.times.dequantise(layer) * self.by.get("dequantise", 1.0)

    def hang(self, layer: int) -> float:
        return self.times.hang(layer) * self.by.get("hang", 1.0)

    def prologue(self, tokens: int) -> float:
        return self.times.prologue(tokens) * self.by.get("embed", 1.0)

    def head(self, label_tokens: int) -> float:
        return self.times.head(label_tokens) * self.by.get("head", 1.0)

    def update(self, parameters: int) -> float:
        return self.times.update(parameters) * self.by.get("optimizer", 1.0)


# ---- the file -----------------------------------------------------------------------------------


def beside(machine: Path) -> Calibration | None:
    """What past runs say on a machine that is a file: `calibration.json` beside it; None where there is none."""
    path = machine.with_name(FILE)
    return load_calibration(path) if machine.is_file() and path.is_file() else None


def load_calibration(path: Path, identities: Iterable[Identity] = ()) -> Calibration:
    """What past runs say; nothing where there is no file.

    Args:
        identities: devices that a notice is wanted of where no run was on them (`Calibration.lines` says it too).

    Raises:
        UserError: the file is damaged; names the line.
    """
    if not path.exists():
        return Calibration()
    file, wanted = _read(path), list(dict.fromkeys(identities))
    used, notices = [], []
    for entry in file.entries:
        if entry.lamella != __version__:
            notices.append(f"{path.name}: what lamella {entry.lamella} showed on {entry.identity.text()} is not used: this is "
                           f"{__version__}")  # fmt: skip
        else:
            used.append(entry)
    known = {entry.identity for entry in used}
    found = Calibration(tuple(used))
    notices += [line for identity in wanted if identity not in known for line in found.lines(identity)]
    return replace(found, notices=tuple(notices))


def calibrate(run: Path, path: Path) -> Calibration:
    """Take a run with a plan into the file, in place of what it showed before; written atomically.

    Of a run that was itself planned with factors these are taken off first.

    Raises:
        UserError: a run that cannot be compared, has no trace, or took steps of other lengths than planned; a damaged file.
    """
    found = measure(run)
    shown = observe(found, str(run.resolve()))
    file = _read(path) if path.exists() else CalibrationFile()
    entries = {entry.identity: entry for entry in file.entries if entry.lamella == __version__}
    for identity, one in shown.items():
        before = entries.get(identity)
        runs = [r for r in (before.runs if before is not None else ()) if r.run != one.run]
        runs.append(one)
        entries[identity] = Entry(identity=identity, lamella=__version__, factors=fit(runs), runs=tuple(runs))
    old = [entry for entry in file.entries if entry.lamella != __version__]
    written = CalibrationFile(entries=(*old, *(entries[i] for i in sorted(entries, key=Identity.text))))
    try:
        write_text(path, written.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror}",
            fix="make room, or give a machine.json in a folder of yours",
            path=path,
        ) from error
    return Calibration(tuple(entries.values()))


def _read(path: Path) -> CalibrationFile:
    remove = "remove the file: plans are then made without it"
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", fix=remove, path=path) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"not JSON: {error.msg}", fix=remove, path=path, line=error.lineno, column=error.colno
        ) from error
    if not isinstance(tree, dict) or tree.get("kind") != "lamella calibration":
        raise UserError("not a calibration", fix=remove, path=path, line=1)
    if tree.get("format_version") != FORMAT_VERSION:
        raise UserError(f"format version {tree.get('format_version')!r}, this lamella reads {FORMAT_VERSION}", fix=remove,
                        path=path, line=1)  # fmt: skip
    try:
        return CalibrationFile.model_validate_json(text)
    except ValidationError as error:
        raise explain_validation(error, path, CalibrationFile) from error


# ---- what a run shows ---------------------------------------------------------------------------


def observe(found: Measured, name: str) -> dict[Identity, RunShown]:
    """What a run shows of each kind of device it was on (raises as `calibrate`)."""
    if found.traced is None:
        raise UserError("this run has no trace of steps beyond the first ones, so nothing can be learnt from it",
                        fix="train with trace.steps = 5 or more, for more than a few steps", path=found.run)  # fmt: skip
    if found.receipt is None:
        raise UserError("this run has no receipt.json, so its threads and dtype are not known",
                        fix="calibrate with a run that has ended", path=found.run)  # fmt: skip
    planned_tokens, traced_tokens = found.tokens_of_pieces, found.traced_tokens()
    if not planned_tokens or not traced_tokens:
        raise UserError("tokens of the planned or the traced steps are not known",
                        fix="calibrate with a run that has a plan.json and a trace.json of this version", path=found.run)  # fmt: skip
    scale = planned_tokens / traced_tokens
    if abs(scale - 1) > TOKENS_APART:
        raise UserError(
            f"the traced steps took {traced_tokens:,.0f} tokens, the planned one {planned_tokens:,.0f}: their times are not "
            "comparable", fix="calibrate with a run of steps like those planned", path=found.run,
        )  # fmt: skip
    measured, planned = found.traced.median(), found.planned_pieces
    by_identity: dict[Identity, list[int]] = {}
    used: dict[Identity, dict[str, float]] = {}
    for rank, one in enumerate(found.figures["calibrated"]):
        identity = Identity.model_validate(one["identity"])
        used[identity] = one["factors"]
        by_identity.setdefault(identity, []).append(rank)
    _check_effect(found, next(iter(by_identity)))
    when = datetime.now(UTC).isoformat(timespec="seconds")
    shown = {}
    for identity, ranks in by_identity.items():
        factors = used[identity]
        pairs = {k: (_without(planned[k], factors), measured[k].seconds * scale)
                 for k in planned if k.rank in ranks and k in measured}  # fmt: skip
        shown[identity] = RunShown(run=name, date=when, steps=len(found.traced.steps),
                                   direct=_direct(pairs, factors), passes=_passes(pairs))  # fmt: skip
    return shown


def _check_effect(found: Measured, planned: Identity) -> None:
    """Raises `UserError` when rank 0 computed otherwise than it was planned to."""
    assert found.receipt is not None
    engine = found.receipt["engine"]
    threads = engine["threads"] if str(engine["device"]).startswith("cpu") else None
    effect = planned.model_copy(update={"threads": threads, "dtype": engine["dtype"]})
    if effect != planned:
        raise UserError(f"the plan was for {planned.text()}, the run computed on {effect.text()}",
                        fix="calibrate with a run that did what its plan says", path=found.run)  # fmt: skip


def _without(spent: Spent, factors: Mapping[str, float]) -> Spent:
    """As planned without the factors that were applied to it."""
    causes = {cause: seconds / factors.get(cause, 1.0) for cause, seconds in spent.causes.items()}
    return replace(spent, causes=causes)


def _direct(pairs: Mapping[Key, tuple[Spent, float]], factors: Mapping[str, float]) -> dict[str, float]:
    """Measured over planned of each cause that is timed by itself."""
    sums: dict[str, tuple[float, float]] = {}
    for key, (spent, seconds) in pairs.items():
        cause = key.name if key.cause == "compute" else key.cause
        if cause in DIRECT and spent.seconds > 0 and seconds > 0:
            a, b = sums.get(cause, (0.0, 0.0))
            sums[cause] = (a + spent.seconds / factors.get(cause, 1.0), b + seconds)
    return {cause: measured / planned for cause, (planned, measured) in sums.items()}


def _passes(pairs: Mapping[Key, tuple[Spent, float]]) -> tuple[Pass, ...]:
    """Passes of layers, those that were planned alike as one."""
    alike: dict[tuple[Any, ...], list[tuple[dict[str, float], float]]] = {}
    for key, (spent, seconds) in pairs.items():
        if key.cause == "compute" and spent.causes and seconds > 0:
            what = (key.name.split()[0], tuple((cause, f"{s:.3g}") for cause, s in sorted(spent.causes.items())))
            alike.setdefault(what, []).append((spent.causes, seconds))
    return tuple(
        Pass(planned=each[0][0], measured=statistics.median(seconds for _, seconds in each)) for each in alike.values()
    )


# ---- factors ------------------------------------------------------------------------------------


def fit(runs: Sequence[RunShown]) -> dict[str, float]:
    """Factors by cause from what runs have shown, between `LEAST` and `MOST`."""
    factors = fit_passes([each for run in runs for each in run.passes])
    for cause in DIRECT:
        ratios = [run.direct[cause] for run in runs if cause in run.direct]
        if ratios:
            factors[cause] = statistics.median(ratios)
    return {cause: min(max(factor, LEAST), MOST) for cause, factor in sorted(factors.items())}


def fit_passes(passes: Sequence[Pass]) -> dict[str, float]:
    """Factors of the causes of layers' passes."""
    import numpy as np

    causes = sorted({cause for each in passes for cause, seconds in each.planned.items() if seconds > 0})
    if not causes:
        return {}
    shares = np.array([[each.planned.get(cause, 0.0) / each.measured for cause in causes] for each in passes])
    common = 1 / float(np.median(shares.sum(1)))
    factors = np.full(len(causes), common)
    pull = PULL * np.eye(len(causes))
    for _ in range(_ROUNDS):
        errors = np.abs(shares @ factors - 1)
        weights = np.minimum(1.0, ROBUST / np.maximum(errors, 1e-12))
        weighted = shares * weights[:, None]
        factors = np.linalg.solve(shares.T @ weighted + pull, weighted.sum(0) + PULL * common)
    return {cause: float(factor) for cause, factor in zip(causes, factors, strict=True)}
