"""Line charts as one SVG file that needs nothing else; marks are placed by `bench.marks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from bench.marks import LineChart, line_chart

COLOURS = ("#0b6fb8", "#c2571a", "#2c7a3f", "#7a4fa3", "#8a8a8a", "#b8285b")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 250, 64, 16, 46, 34


@dataclass(frozen=True)
class Panel:
    """One chart: series by name, as long as the common x."""

    title: str
    series: dict[str, Sequence[float]]


def svg(xs: Sequence[float], panels: Sequence[Panel], *, x_label: str) -> str:
    """The panels one above the other.

    Raises:
        ValueError: a panel with fewer than two finite points.
    """
    height = HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for i, panel in enumerate(panels):
        names = {f"c{k}": name for k, name in enumerate(panel.series)}
        chart = line_chart(panel.title, xs, {c: panel.series[n] for c, n in names.items()}, x_label=x_label)
        if chart is None:
            raise ValueError(f"{panel.title}: fewer than two points to draw")
        parts += [f'<g transform="translate(0 {i * HEIGHT})">', *_panel(chart, names), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _panel(chart: LineChart, names: dict[str, str]) -> list[str]:
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    parts = [f'<text x="{LEFT}" y="16" font-weight="600">{escape(chart.title)}</text>']
    x = LEFT
    for name in names.values():
        parts.append(f'<rect x="{x}" y="26" width="14" height="3" fill="{_colour(names, name)}"/>')
        parts.append(f'<text x="{x + 19}" y="32">{escape(name)}</text>')
        x += 36 + 7 * len(name)
    for tick in chart.y_ticks:
        y = TOP + high * (1 - tick.at / 100)
        parts.append(f'<path d="M{LEFT} {y:.1f}h{wide}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(tick.label)}</text>')
    for tick in chart.x_ticks:
        at = LEFT + wide * tick.at / 100
        parts.append(f'<text x="{at:.1f}" y="{TOP + high + 16}" text-anchor="middle">{escape(tick.label)}</text>')
    parts.append(f'<text x="{LEFT + wide}" y="{TOP + high + 30}" text-anchor="end">{escape(chart.x_label)}</text>')
    for line in chart.lines:
        pairs = (point.split(",") for point in line.points.split())
        points = " ".join(f"{LEFT + wide * float(a) / 100:.1f},{TOP + high * float(b) / 100:.1f}" for a, b in pairs)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{_colour(names, names[line.name])}" stroke-width="1.3"/>'
        )
    return parts


def _colour(names: dict[str, str], name: str) -> str:
    return COLOURS[list(names.values()).index(name) % len(COLOURS)]
