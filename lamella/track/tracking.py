"""Sends a run's figures to the trackers that were asked for, each step once, and never lets one of them end the run.

`track.json` in the run's folder holds how each tracker knows the run, and the last step that it was sent: a run that is
resumed goes on in the same one, and steps taken a second time are not sent a second time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from lamella.config import RunConfig, flat
from lamella.errors import UserError

Status = Literal["ok", "failed", "interrupted"]
FILE = "track.json"
MODULES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "trackio": "trackio", "wandb": "wandb"}
"""Tracker -> the module it needs; its package has the same name."""
FIGURES = {
    "loss": "train/loss", "grad_norm": "train/grad_norm", "learning_rate": "train/learning_rate",
    "tokens_per_s": "train/tokens_per_s", "utilisation": "train/utilisation", "step_s": "train/step_s",
    "rss_bytes": "memory/rss_bytes", "epoch": "train/epoch",
}  # fmt: skip
"""Keys of a line of metrics.jsonl -> names in a tracker."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run.

    Attributes:
        name, project: how the run is to be found.
        folder: the run's; trackers that write files write below it, or below `shared`, its parent.
        settings: the resolved configuration, dotted.
        uri: MLflow's server or database; None: a database in `shared`.
        known_as: what the tracker called this run when it began; None: it begins now.
    """

    name: str
    project: str
    folder: Path
    settings: Mapping[str, Any]
    uri: str | None = None
    known_as: str | None = None

    @property
    def shared(self) -> Path:
        return self.folder.parent


class Tracker(Protocol):
    """One tracker. Whatever it raises is told once and ends its use, not the run."""

    def start(self, run: TrackedRun) -> str:
        """Begin, or go on with, a run; what the tracker calls it."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self, status: Status) -> None: ...


Open = Callable[[str], Tracker]


def check_installed(names: tuple[str, ...]) -> None:
    """Raises `UserError` where a tracker that is asked for is not installed."""
    missing = [name for name in names if find_spec(MODULES[name]) is None]
    if missing:
        packages = " ".join(MODULES[name] for name in missing)
        raise UserError(
            f"`log` names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            fix=f"pip install {packages}; or take it out of `log`",
        )


@dataclass
class _Open:
    tracker: Tracker
    known_as: str
    last: dict[str, int]
    """Last step sent, of each kind of figures."""


@dataclass
class Tracking:
    """The trackers of one run; none, when none is asked for.

    Args:
        warn: told once of each tracker that fails.
    """

    folder: Path | None = None
    warn: Callable[[str], None] = lambda text: None
    _open: dict[str, _Open] = field(default_factory=dict)

    @classmethod
    def begin(
        cls, config: RunConfig, folder: Path, warn: Callable[[str], None], opened: Open | None = None
    ) -> Tracking:
        """Start every tracker of `config.log`."""
        tracking = cls(folder, warn)
        if not config.log:
            return tracking
        from lamella.track.trackers import open_tracker

        make = opened or open_tracker
        before = _read(folder / FILE)
        settings = flat(config.model_dump(mode="json"))
        for name in config.log:
            old = before.get(name, {})
            run = TrackedRun(
                config.name, config.track.project, folder, settings, config.track.mlflow_uri, old.get("known_as")
            )
            made = make(name)
            known_as = tracking._guarded(name, lambda made=made, run=run: made.start(run))  # type: ignore[misc]
            if known_as is not None:
                tracking._open[name] = _Open(made, known_as, dict(old.get("last", {})))
        tracking._save()
        return tracking

    def log(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        values = {FIGURES[key]: line[key] for key in FIGURES if key in line}
        self._send("train", int(line["step"]), values)

    def log_validation(self, line: Mapping[str, Any]) -> None:
        """A line of validation.jsonl."""
        values = {f"validation/{key}": value for key, value in line.items() if key not in ("step", "best")}
        self._send("validation", int(line["step"]), values)

    def finish(self, status: Status) -> None:
        for name, one in list(self._open.items()):
            self._guarded(name, lambda one=one: one.tracker.finish(status))  # type: ignore[misc]
        self._open.clear()

    def _send(self, kind: str, step: int, given: Mapping[str, Any]) -> None:
        values = {
            name: float(value) for name, value in given.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }  # fmt: skip
        sent = False
        for name, one in list(self._open.items()):
            if step > one.last.get(kind, 0) and values:
                one.last[kind] = step
                self._guarded(name, lambda one=one: one.tracker.log(step, values))  # type: ignore[misc]
                sent = True
        if sent:
            self._save()

    def _guarded(self, name: str, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except Exception as error:  # noqa: BLE001 - a library and a server of others: training matters more
            self._open.pop(name, None)
            self.warn(f"{name} gets no more of this run's figures: {type(error).__name__}: {_first_line(error)}")
            return None

    def _save(self) -> None:
        if self.folder is not None and self._open:
            known = {name: {"known_as": one.known_as, "last": one.last} for name, one in self._open.items()}
            path, aside = self.folder / FILE, self.folder / f".{FILE}"
            aside.write_text(json.dumps({**_read(path), **known}), encoding="utf-8")  # a kill loses no step: no sync
            aside.replace(path)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"is no JSON: {error}", fix="delete it: trackers then begin the run anew", path=path) from error
    return tree if isinstance(tree, dict) else {}
