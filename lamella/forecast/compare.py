"""What a run was expected to take beside what it took: line by line, the largest misses first.

Expected is `plan.json` of the run's folder; measured are the medians over its steps, the first ones left out, of
`metrics.jsonl` (every step) and `trace.json` (the last steps, piece by piece). What is not there is named, never made up.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lamella.errors import UserError
from lamella.forecast.document import read_plan
from lamella.forecast.pieces import Key, Spent, Traced, from_plain, read_traced
from lamella.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WARM_UP = 2
"""First steps left out: they read what stays, compile kernels and measure the base beside the adapter."""
_BUSY_CAUSES = {"compute": "computing", "dequantise": "dequantising", "optimizer": "norm and update"}
_SHOWN = 12

Unit = Literal["s", "B", "tokens", "tokens/s", "share"]

_DAMAGED = "give the folder of a run of `lamella train`; if this is one, the file is damaged"


_NOTHING = 1e-6
"""In any unit: what is planned with less has no ratio."""


@dataclass(frozen=True)
class Line:
    """One figure: `what` of `where` ("step", "rank 0", "rank 0, layer 3"), expected and measured, each None where unknown."""

    where: str
    what: str
    unit: Unit
    planned: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over planned; None where either is unknown or next to nothing was planned."""
        if self.planned is None or self.measured is None or abs(self.planned) < _NOTHING:
            return None
        return self.measured / self.planned

    @property
    def missed(self) -> float:
        """How far off, in the line's unit."""
        return 0.0 if self.planned is None or self.measured is None else abs(self.measured - self.planned)

    def text(self) -> str:
        """`rank 0: computing 1.2 s, measured 1.3 s (1.08x)`."""
        ratio = "" if self.ratio is None else f" ({self.ratio:.2f}x)"
        return f"{self.where}: {self.what} {_shown(self.planned, self.unit)}, measured {_shown(self.measured, self.unit)}{ratio}"


@dataclass(frozen=True)
class Comparison:
    """A run beside its plan.

    Attributes:
        run: its folder.
        steps, traced_steps: how many are measured: whole, and piece by piece.
        summary: of the step and every rank, in order.
        pieces: of every rank's layers and the rest of its step, largest misses first.
        missing: what could not be compared, and why.
    """

    run: Path
    steps: int
    traced_steps: int
    summary: tuple[Line, ...]
    pieces: tuple[Line, ...]
    missing: tuple[str, ...]

    def lines(self, shown: int = _SHOWN) -> list[str]:
        """As text: the summary, then the largest misses among pieces."""
        found = [f"{self.run.name}: medians of {self.steps} steps, {self.traced_steps} of them piece by piece"]
        found += [line.text() for line in self.summary]
        found += [line.text() for line in self.pieces[:shown]]
        if len(self.pieces) > shown:
            found.append(f"{len(self.pieces) - shown} more pieces are closer")
        return found + [f"not compared: {text}" for text in self.missing]

    def table(self, shown: int = _SHOWN) -> Table:
        """The same for a terminal."""
        from rich.table import Table

        title = f"{self.run.name}: planned and measured (medians of {self.steps} steps)"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("where", "what", "planned", "measured", "ratio"):
            table.add_column(name, justify="left" if name in ("where", "what") else "right")
        for line in (*self.summary, *self.pieces[:shown]):
            ratio = "" if line.ratio is None else f"{line.ratio:.2f}x"
            table.add_row(
                line.where, line.what, _shown(line.planned, line.unit), _shown(line.measured, line.unit), ratio
            )
        return table

    def render(self, shown: int = _SHOWN) -> list[RenderableType]:
        """What a terminal prints, piece by piece."""
        notes = [f"not compared: {text}" for text in self.missing]
        more = len(self.pieces) - shown
        return [self.table(shown), *([f"{more} more pieces are closer"] if more > 0 else []), *notes]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""

        def plain(lines: Iterable[Line]) -> list[dict[str, Any]]:
            return [{"where": x.where, "what": x.what, "unit": x.unit, "planned": x.planned, "measured": x.measured,
                     "ratio": x.ratio} for x in lines]  # fmt: skip

        return {"run": str(self.run), "steps": self.steps, "traced_steps": self.traced_steps, "summary": plain(self.summary),
                "pieces": plain(self.pieces), "missing": list(self.missing)}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """What a run's folder tells.

    Attributes:
        figures: of its plan.
        lines: of `metrics.jsonl`, without warm-up and skipped steps.
        traced: None where there is no trace of steps beyond warm-up.
        receipt: None where the run has not ended.
        missing: what is not there.
    """

    run: Path
    figures: dict[str, Any]
    lines: tuple[dict[str, Any], ...]
    traced: Traced | None
    receipt: dict[str, Any] | None
    missing: list[str] = field(default_factory=list)

    @property
    def planned_pieces(self) -> dict[Key, Spent]:
        return from_plain((self.figures.get("played") or {}).get("pieces", []))

    @property
    def tokens_of_pieces(self) -> float | None:
        """Tokens of the step that was played; the plan's `step_s` is that of a step of mean length."""
        played = (self.figures.get("played") or {}).get("step_s")
        return (
            self.figures["step_tokens"] * played / self.figures["step_s"] if played and self.figures["step_s"] else None
        )

    def traced_tokens(self) -> float | None:
        """Median tokens of the traced steps."""
        if self.traced is None:
            return None
        tokens = [line["tokens"] for line in self.lines if line["step"] in self.traced.steps]
        return statistics.median(tokens) if tokens else None


def compare_run(run: Path) -> Comparison:
    """Compare a run with its plan.

    Raises:
        UserError: no such folder, no plan in it, no measured step, or a file that cannot be read.
    """
    found = measure(run)
    summary = [*_step_lines(found), *_rank_lines(found)]
    pieces = sorted(_piece_lines(found), key=lambda line: (-line.missed, line.where, line.what))
    traced = len(found.traced.steps) if found.traced is not None else 0
    return Comparison(run, len(found.lines), traced, tuple(summary), tuple(pieces), tuple(found.missing))


# ---- the run's files ----------------------------------------------------------------------------


def measure(run: Path) -> Measured:
    """Read a run's folder (raises as `compare_run`)."""
    if not run.is_dir():
        raise UserError("no such run", fix="give a run's folder, such as runs/run", path=run)
    plan_path, metrics_path = run / "plan.json", run / "metrics.jsonl"
    if not plan_path.exists():
        raise UserError("this run has no plan.json: what it was expected to take is not known",
                        fix="train again; every run writes its plan first", path=run)  # fmt: skip
    plan = read_plan(plan_path)
    missing: list[str] = []
    if plan.figures.get("played") is None:
        raise UserError("the plan says nothing of time: nothing fitted", fix="train a plan that fits", path=plan_path)
    lines = _metrics(metrics_path, missing)
    traced = None
    trace_path = run / "trace.json"
    warm_up = min(line["step"] for line in lines) - 1
    if not trace_path.exists():
        missing.append("single pieces: there is no trace.json (trace.steps was 0, or the run has not ended)")
    else:
        traced = read_traced(trace_path, warm_up)
        if traced.missing:
            missing.append(f"pieces of ranks {', '.join(map(str, traced.missing))}: the trace has none of theirs")
        if traced.dropped:
            missing.append(f"{traced.dropped} spans that the trace had no room for")
        if not traced.steps:
            missing.append("single pieces: the trace shows none but the first steps")
            traced = None
    receipt = _receipt(run / "receipt.json", missing)
    return Measured(run, plan.figures, tuple(lines), traced, receipt, missing)


def _metrics(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    """Lines beyond the warm-up that were not skipped."""
    if not path.exists():
        raise UserError("this run has no metrics.jsonl: nothing was measured", fix="give a run that made some steps",
                        path=path.parent)  # fmt: skip
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"not JSON: {error.msg}", fix=_DAMAGED, path=path, line=number,
                            column=error.colno) from error  # fmt: skip
        if not isinstance(line, dict) or not {"step", "step_s", "tokens", "devices"} <= line.keys():
            raise UserError("not a line of metrics: it lacks step, step_s, tokens or devices", fix=_DAMAGED,
                            path=path, line=number)  # fmt: skip
        found.append(line)
    kept = [line for line in found if not line.get("skipped")]
    if not kept:
        raise UserError("no step of this run was completed", fix="give a run that made some steps", path=path)
    left_out = WARM_UP if len(kept) > WARM_UP else len(kept) - 1
    if left_out < WARM_UP:
        missing.append(f"steps beyond the first {WARM_UP}: the run has {len(kept)}, so its first one counts")
    return kept[left_out:]


def _receipt(path: Path, missing: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        missing.append("what was in effect: there is no receipt.json (the run has not ended)")
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg}", fix=_DAMAGED, path=path, line=error.lineno,
                        column=error.colno) from error  # fmt: skip
    if not isinstance(tree, dict):
        raise UserError(
            "not a receipt",
            fix=_DAMAGED,
            path=path,
        )
    return tree


# ---- lines --------------------------------------------------------------------------------------


def _median(values: Iterable[float]) -> float | None:
    all_ = list(values)
    return statistics.median(all_) if all_ else None


def _step_lines(found: Measured) -> list[Line]:
    figures, lines = found.figures, found.lines
    return [
        Line("step", "seconds", "s", figures["step_s"], _median(x["step_s"] for x in lines)),
        Line("step", "tokens", "tokens", figures["step_tokens"], _median(x["tokens"] for x in lines)),
        Line("step", "speed", "tokens/s", figures["tokens_per_s"], _median(x["tokens"] / x["step_s"] for x in lines)),
    ]


def _rank_lines(found: Measured) -> list[Line]:
    """Of every rank: seconds by cause, waits, idle share, memory and bytes."""
    played, planned = found.figures["played"], found.planned_pieces
    measured = found.traced.median() if found.traced is not None else {}
    ranks = found.figures.get("ranks", [])
    world = min((len(line["devices"]) for line in found.lines), default=0)
    if world != len(ranks):
        found.missing.append(f"ranks: the plan has {len(ranks)}, the run {world}")
    lines = []
    for rank in range(min(world, len(ranks))):
        where, devices = f"rank {rank}", [line["devices"][rank] for line in found.lines]
        lines += _causes(where, rank, planned, measured if found.traced is not None else None)
        for what, name in (("disk", "waiting for disk"), ("host", "waiting for copies")):
            lines.append(Line(where, name, "s", played["wait_s"].get(str(rank), {}).get(what, 0.0),
                              _median(d["wait_s"].get(what, 0.0) for d in devices)))  # fmt: skip
        others = (_others(played["wait_s"].get(str(rank), {})) + _sum_of(planned, rank, ("reduce", "meet")),
                  _median(_others(d["wait_s"]) + sum(d["move_s"].values()) for d in devices))  # fmt: skip
        if world > 1:
            lines.append(Line(where, "exchange and waiting for others", "s", *others))
        lines.append(Line(where, "idle", "share", 1 - played["busy"].get(str(rank), 0.0),
                          _median(1 - d["busy_s"] / d["step_s"] for d in devices if d["step_s"])))  # fmt: skip
        lines.append(_peak(where, ranks[rank], devices))
        lines += _bytes(where, rank, planned, devices)
    return [line for line in lines if line.planned or line.measured]


def _causes(where: str, rank: int, planned: Mapping[Key, Spent], measured: Mapping[Key, Spent] | None) -> list[Line]:
    """Seconds at work; from the trace, so that what lies within a layer's pass is told apart."""
    return [
        Line(where, name, "s", _sum_of(planned, rank, (cause,)),
             None if measured is None else _sum_of(measured, rank, (cause,)))
        for cause, name in {**_BUSY_CAUSES, "load": "reading"}.items()
    ]  # fmt: skip


def _sum_of(pieces: Mapping[Key, Spent], rank: int, causes: Sequence[str]) -> float:
    return sum(spent.seconds for key, spent in pieces.items() if key.rank == rank and key.cause in causes)


def _others(wait_s: Mapping[str, float]) -> float:
    return sum(seconds for what, seconds in wait_s.items() if what.startswith("rank "))


def _peak(where: str, rank: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]) -> Line:
    peaks = [d["peak_bytes"] for d in devices if d.get("peak_bytes")]
    return Line(where, "peak memory", "B", rank["need"], max(peaks) if peaks else None)


def _bytes(where: str, rank: int, planned: Mapping[Key, Spent], devices: Sequence[Mapping[str, Any]]) -> list[Line]:
    """By link, as `metrics.jsonl` has them."""
    expected: dict[str, float] = {}
    for key, spent in planned.items():
        if key.rank != rank or not spent.nbytes:
            continue
        link = {"load": "disk", "wait_host": "host", "reduce": "reduce"}.get(key.cause)
        if key.cause == "send":
            link = key.name.removeprefix("send to ")
        if link is not None:
            expected[link] = expected.get(link, 0.0) + spent.nbytes
    links = sorted({*expected, *(link for d in devices for link in d["bytes"])})
    names = {"disk": "from disk", "host": "to and from its host", "reduce": "in sums", "group": "within its group"}
    return [
        Line(where, f"bytes {names.get(link, 'to ' + link)}", "B", expected.get(link, 0.0),
             _median(d["bytes"].get(link, 0) for d in devices))
        for link in links
    ]  # fmt: skip


def _piece_lines(found: Measured) -> list[Line]:
    """Every piece of which the trace tells seconds of its own. Sends run beside other work, and in sums a rank waits for the
    slowest one: of those the summary tells."""
    if found.traced is None:
        return []
    planned, measured = found.planned_pieces, found.traced.median()
    own: Callable[[Key], bool] = lambda key: key.cause in ("compute", "dequantise", "load", "optimizer")  # noqa: E731
    never = sorted({key.name for key in planned if own(key) and key not in measured})
    extra = sorted({key.name for key in measured if own(key) and key not in planned})
    if never:
        found.missing.append(f"planned pieces that the trace has not: {_some(never)}")
    if extra:
        found.missing.append(f"traced pieces that the plan has not: {_some(extra)}")
    return [
        Line(f"rank {key.rank}", _piece_name(key), "s", planned[key].seconds, measured[key].seconds)
        for key in planned
        if own(key) and key in measured
    ]


def _piece_name(key: Key) -> str:
    verb = {"dequantise": "dequantise ", "load": "read "}.get(key.cause, "")
    return verb + key.name


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _shown(value: float | None, unit: Unit) -> str:
    if value is None:
        return "?"
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if 0 < value < 0.1 else format_seconds(value) if value else "0 s"
    if unit == "B":
        return format_bytes(value)
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
