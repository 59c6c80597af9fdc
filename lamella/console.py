"""What people see while work goes on: notices and progress with rate and time left.

Everything here goes to stderr, so stdout stays free for results and JSON.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from lamella.units import format_bytes, format_count, format_seconds

err = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, soft_wrap=True)


def keep_stdout() -> None:
    """From now on tables go to stderr too: the command prints one JSON object."""
    out.file = sys.stderr


def notice(message: str) -> None:
    """One line that the user must be able to see (a fallback, a repair, a conflict)."""
    err.print(Text(message))


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if speed is None:
            return Text("")
        text = format_bytes(speed) if self.unit == "B" else f"{format_count(speed)} {self.unit}"
        return Text(f"{text}/s")


@dataclass
class Meter:
    """Handle given by `progress`: call `advance(amount)`; `note` replaces the text at the end."""

    _progress: Progress | None
    _task: int
    total: float
    label: str
    unit: str
    done: float = 0
    _printed_s: float = field(default_factory=time.monotonic)
    _start_s: float = field(default_factory=time.monotonic)

    def advance(self, amount: float, note: str = "") -> None:
        self.done += amount
        if self._progress is not None:
            self._progress.update(self._task, advance=amount, note=note)  # type: ignore[arg-type]
            return
        now_s = time.monotonic()
        if now_s - self._printed_s >= 15:  # logs get a line now and then, not a bar
            self._printed_s = now_s
            rate = self.done / max(now_s - self._start_s, 1e-9)
            left_s = max(self.total - self.done, 0) / rate if rate > 0 else float("inf")
            speed = format_bytes(rate) if self.unit == "B" else f"{format_count(rate)} {self.unit}"
            left = format_seconds(left_s) if left_s != float("inf") else "?"
            notice(
                f"{self.label}: {100 * self.done / max(self.total, 1):.0f} %, {speed}/s, {left} left {note}".rstrip()
            )


@contextmanager
def progress(label: str, total: float, unit: str) -> Iterator[Meter]:
    """Progress of long work. `unit` is "B" for bytes or a noun ("tokens", "rows")."""
    if not sys.stderr.isatty():
        yield Meter(None, 0, total, label, unit)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), _Rate(unit), TimeRemainingColumn(),
               TextColumn("{task.fields[note]}"))  # fmt: skip
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(label, total=total, note="")
        yield Meter(bar, task, total, label, unit)
