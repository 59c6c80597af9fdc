"""Positions of marks, in percent of a chart's width and height, so that a page scales them without scaling its text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tick:
    """A labelled position on an axis; `at` in percent from the axis' start."""

    at: float
    label: str


@dataclass(frozen=True)
class Line:
    """One polyline: `points` is an SVG points list in a 100 x 100 box, y downwards; `name` is its CSS class."""

    points: str
    name: str


@dataclass(frozen=True)
class LineChart:
    """Lines over a common x, with ticks on both axes."""

    title: str
    x_label: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover `low` to `high`, both ends included.

    Returns about `wanted` values; two at least.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"axis limits must be finite, got {low} and {high}")
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / max(wanted - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    means, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        means.append(total / min(i + 1, window))
    return means


def _points(xs: Sequence[float], ys: Sequence[float], x_span: tuple[float, float], y_span: tuple[float, float]) -> str:
    (x0, x1), (y0, y1) = x_span, y_span
    return " ".join(
        f"{100 * (x - x0) / (x1 - x0):.2f},{100 * (y1 - y) / (y1 - y0):.2f}" for x, y in zip(xs, ys, strict=True)
    )


def line_chart(
    title: str,
    xs: Sequence[float],
    series: dict[str, Sequence[float]],
    *,
    x_label: str,
    from_zero: bool = False,
    divisor: float = 1.0,
) -> LineChart | None:
    """A chart of one or more series over `xs`; None when fewer than two points are finite.

    Args:
        series: CSS class -> values, as long as `xs`.
        from_zero: begin the y axis at zero.
        divisor: y labels show values divided by this.
    """
    finite = [y for ys in series.values() for y in ys if math.isfinite(y)]
    if len(xs) < 2 or len(finite) < 2:
        return None
    y_values = nice_ticks(0.0 if from_zero else min(finite), max(finite))
    x_span = (min(xs), max(xs))
    y_span = (y_values[0], y_values[-1])
    lines = []
    for name, ys in series.items():
        kept = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
        lines.append(Line(_points([x for x, _ in kept], [y for _, y in kept], x_span, y_span), name))
    x_values = [x for x in nice_ticks(*x_span) if x_span[0] <= x <= x_span[1]]
    return LineChart(
        title, x_label, lines,
        [Tick(100 * (x - x_span[0]) / (x_span[1] - x_span[0]), f"{x:g}") for x in x_values],
        [Tick(100 * (y - y_span[0]) / (y_span[1] - y_span[0]), f"{y / divisor:.4g}") for y in y_values],
    )  # fmt: skip
