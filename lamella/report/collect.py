"""What a folder of runs holds, read once and then only what has grown: metrics of a long run are tens of megabytes.

A run is a folder with `metrics.jsonl`, `receipt.json` or `config.json`. Comparisons, load tests and decisions are JSON files
of their kind, in the runs folder or one level below.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.errors import UserError

COLUMNS = ("step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "rss_bytes", "step_s", "tokens", "label_tokens",
           "utilisation", "planned_s")  # fmt: skip
"""Of a line of metrics.jsonl, kept for all steps."""
KEPT_LINES = 400
"""Last whole lines kept: devices are summed over these while a run goes on."""
KINDS = {"compare": "compare.json", "loadtest": "loadtest.json", "decide": "decide.json"}
FILES = {"receipt": "receipt.json", "config": "config.json", "plan": "plan.json", "trace": "trace.json",
         "measured": "eval/metrics.json"}  # fmt: skip
"""Of a run, beside its columns: name here -> file."""
_LARGEST = 1 << 1000
"""Whole numbers beyond are no figures of ours, and no floats."""
_MOST_JSON_BYTES = 64 << 20

Floats = NDArray[np.float64]


@dataclass
class Columns:
    """Some columns of a JSON-lines file that is only appended to (or begun anew)."""

    path: Path
    names: tuple[str, ...]
    values: dict[str, list[float]] = field(default_factory=dict)
    last: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0
    _mark: tuple[int, bytes] = (0, b"")

    def update(self) -> bool:
        """Read what was appended; True when there was something. A last line without its newline waits.

        Raises:
            UserError: a whole line that is no JSON object (with its line number).
        """
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            changed = bool(self._read)
            self._clear()
            return changed
        with self.path.open("rb") as file:
            head = file.read(64)
            same = (stat.st_ino, head[: len(self._mark[1])]) == self._mark and stat.st_size >= self._read
            if not same or not self._read:
                self._clear()
                self._mark = (stat.st_ino, head)
            if stat.st_size == self._read:
                return False
            file.seek(self._read)
            data = file.read()
        end = data.rfind(b"\n") + 1
        for line in data[:end].split(b"\n"):
            if line.strip():
                self._add(line)
        self._read += end
        return end > 0

    def _clear(self) -> None:
        self._read, self._mark = 0, (0, b"")
        self.values = {name: [] for name in self.names}
        self.last = []

    def _add(self, line: bytes) -> None:
        try:
            tree = json.loads(line)
        except ValueError as error:  # not JSON, or not UTF-8
            raise UserError(f"line {len(self) + 1} is not JSON: {error}", fix="repair or delete the line", path=self.path,
                            line=len(self) + 1) from error  # fmt: skip
        if not isinstance(tree, dict):
            raise UserError("is no JSON object", fix="repair or delete the line", path=self.path, line=len(self) + 1)
        for name in self.names:
            value = tree.get(name)
            if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) >= _LARGEST):
                value = math.nan
            self.values[name].append(float(value))
        self.last.append(tree)
        if len(self.last) > 2 * KEPT_LINES:
            del self.last[:-KEPT_LINES]

    def __len__(self) -> int:
        return len(next(iter(self.values.values()), ()))

    def column(self, name: str) -> Floats:
        return np.asarray(self.values.get(name, ()), dtype=np.float64)


@dataclass
class RunFiles:
    """One run, as far as it has got.

    Attributes:
        name: its folder's. metrics, validation: columns. receipt, config, plan, trace, measured: the files, {} where absent.
        missing: names of files that are not there.
    """

    folder: Path
    metrics: Columns
    validation: Columns
    receipt: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    trace: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> RunFiles:
        """Made once for a folder; `update` reads."""
        return cls(
            folder, Columns(folder / "metrics.jsonl", COLUMNS), Columns(folder / "validation.jsonl", ("step", "loss"))
        )

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def missing(self) -> list[str]:
        found = [] if len(self.metrics) else ["metrics.jsonl"]
        return found + [file for name, file in FILES.items() if not getattr(self, name)]

    def update(self) -> bool:
        """Read what changed; True when something did.

        Raises:
            UserError: a file that is no JSON.
        """
        changed = [self.metrics.update(), self.validation.update()]
        for name, file in FILES.items():
            path = self.folder / file
            mark = mark_of(path)
            if mark != self._seen.get(name):
                setattr(self, name, read_object(path) if mark is not None else {})
                changed.append(True)
                if mark is None:
                    self._seen.pop(name, None)
                else:
                    self._seen[name] = mark
        return any(changed)

    @property
    def version(self) -> str:
        """Changes when anything did."""
        return f"{len(self.metrics)}-{len(self.validation)}-{hash(tuple(sorted(self._seen.items()))) & 0xFFFFFFFF:x}"


def mark_of(path: Path) -> tuple[int, int] | None:
    """Time and size; None where there is no file."""
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stat.st_mtime_ns, stat.st_size


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object's file.

    Raises:
        UserError: no JSON object, or one too large to be ours.
    """
    if path.stat().st_size > _MOST_JSON_BYTES:
        raise UserError(f"is larger than {_MOST_JSON_BYTES >> 20} MiB", fix="move it away", path=path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        line = getattr(error, "lineno", None)
        raise UserError(f"not JSON: {error}", fix="repair or delete the file", path=path, line=line) from error
    return value if isinstance(value, dict) else {"value": value}


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return any((folder / name).is_file() for name in ("metrics.jsonl", "receipt.json", "eval/metrics.json"))


def find_runs(folder: Path) -> list[Path]:
    """Runs in a folder; the folder itself where it is one."""
    if is_run(folder):
        return [folder]
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".") and is_run(path))


def find_artifacts(folder: Path) -> Iterator[tuple[str, Path]]:
    """(kind, file) of comparisons, load tests and decisions in a folder and the folders in it."""
    for below in (folder, *sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))):
        for kind, name in KINDS.items():
            for path in sorted(below.glob(f"*{name}")):
                yield kind, path


def last_line(path: Path, most_bytes: int = 1 << 16) -> dict[str, Any]:
    """The last whole line of a JSON-lines file, without reading the rest; {} where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            data = file.read()
    except FileNotFoundError:
        return {}
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")
    for line in reversed(lines):
        if line.strip():
            try:
                tree = json.loads(line)
            except ValueError:
                return {}
            return tree if isinstance(tree, dict) else {}
    return {}


def thinned(x: Floats, ys: Sequence[Floats], points: int) -> tuple[Floats, list[Floats]]:
    """At most about `points` positions: of each bin of steps, those of the least and the greatest value of the first series.

    Nothing that sticks out is lost, as it would be by taking every n-th.
    """
    if len(x) <= points:
        return x, list(ys)
    edges = np.linspace(0, len(x), max(points // 2, 1) + 1).astype(int)
    keep = []
    lead = ys[0]
    for a, b in pairwise(edges):
        part = lead[a:b]
        good = np.flatnonzero(np.isfinite(part))
        if not len(good):
            keep += [a]
            continue
        keep += [a + good[part[good].argmin()], a + good[part[good].argmax()]]
    chosen = np.unique(np.array([0, *keep, len(x) - 1]))
    return x[chosen], [y[chosen] for y in ys]
