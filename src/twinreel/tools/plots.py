"""Plots as SVG text: lines over an index, points with names. No scripts, no fonts but the reader's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#1f6feb", "#d1571b", "#2da44e", "#8250df", "#bf3989", "#9a6700", "#57606a")
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 28, 40
LEGEND = 190  # on the right, where series have names


@dataclass(frozen=True)
class Point:
    """One point of a scatter plot; equal `series` share a colour and a line."""

    x: float
    y: float
    label: str
    series: str


@dataclass(frozen=True)
class Frame:
    """A plot's outside: title, what its axes count, size in pixels."""

    title: str
    x: str
    y: str
    width: int = 720
    height: int = 300


class _Axes:
    def __init__(self, frame: Frame, xs: Sequence[float], ys: Sequence[float], right: int = RIGHT) -> None:
        self.frame, self.right = frame, right
        self.x, self.y = _range(xs), _range(ys)

    def place(self, x: float, y: float) -> tuple[float, float]:
        width, height = self.frame.width - LEFT - self.right, self.frame.height - TOP - BOTTOM
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return LEFT + across * width, TOP + (1 - up) * height

    def draw(self, inside: Sequence[str]) -> str:
        frame = self.frame
        lines = []
        for value in _ticks(*self.y):
            x, y = self.place(self.x[0], value)
            lines.append(
                f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{frame.width - self.right}" y2="{y:.1f}" stroke="#d0d7de"/>'
            )
            lines.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        for value in _ticks(*self.x):
            x, y = self.place(value, self.y[0])
            lines.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{value:g}</text>')
        texts = (
            f'<text x="{LEFT}" y="16" font-weight="bold">{escape(frame.title)}</text>'
            f'<text x="{frame.width / 2}" y="{frame.height - 6}" text-anchor="middle">{escape(frame.x)}</text>'
            f'<text transform="translate(14 {frame.height / 2}) rotate(-90)" text-anchor="middle">'
            f"{escape(frame.y)}</text>"
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {frame.width} {frame.height}" '
            f'width="{frame.width}" height="{frame.height}" font-family="system-ui, sans-serif" font-size="12" '
            f'fill="#24292f"><rect width="100%" height="100%" fill="#fff"/>{"".join([*lines, *inside])}{texts}</svg>'
        )


def draw_lines(frame: Frame, series: Mapping[str, Sequence[float | None]], step: float = 1.0) -> str:
    """Each series over 0, step, 2 step, ...; None leaves a gap (an exact value has no decibels)."""
    series = {name: [v if v is not None and math.isfinite(v) else None for v in vs] for name, vs in series.items()}
    known = [value for values in series.values() for value in values if value is not None]
    longest = max((len(values) for values in series.values()), default=0)
    axes, inside = _Axes(frame, [0, max(1, longest - 1) * step], known or [0.0]), list[str]()
    for number, (name, values) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        for run in _runs(values):
            places = " ".join("{:.1f},{:.1f}".format(*axes.place(i * step, value)) for i, value in run)
            inside.append(f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if len(series) > 1:
            inside.append(_legend(frame, number, name, color))
    return axes.draw(inside)


def draw_points(frame: Frame, points: Sequence[Point]) -> str:
    """Named points; those of a series are joined in order of x. The series are named on the right."""
    axes = _Axes(frame, [point.x for point in points], [point.y for point in points], right=LEGEND)
    inside, labels = list[str](), list[tuple[float, float]]()
    for number, name in enumerate(dict.fromkeys(point.series for point in points)):
        color = COLORS[number % len(COLORS)]
        group = sorted((point for point in points if point.series == name), key=lambda point: point.x)
        places = [axes.place(point.x, point.y) for point in group]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        inside.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1" opacity="0.5"/>')
        for point, (x, y) in zip(group, places, strict=True):
            inside.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"><title>{escape(point.label)}</title></circle>'
            )
            height = y - 6
            while any(abs(x - other_x) < 90 and abs(height - other_y) < 11 for other_x, other_y in labels):
                height += 11  # below the label that is there already
            labels.append((x, height))
            inside.append(
                f'<text x="{x + 6:.1f}" y="{height:.1f}" font-size="10" fill="{color}">{escape(point.label)}</text>'
            )
        x, y = frame.width - LEGEND + 12, TOP + 10 + 18 * number
        inside.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        inside.append(f'<text x="{x + 14}" y="{y}">{escape(name)}</text>')
    return axes.draw(inside)


def _legend(frame: Frame, number: int, name: str, color: str) -> str:
    x = frame.width - RIGHT - 96 * (number + 1)
    return f'<rect x="{x}" y="7" width="10" height="10" fill="{color}"/><text x="{x + 14}" y="16">{escape(name)}</text>'


def _runs(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    runs: list[list[tuple[int, float]]] = [[]]
    for i, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((i, value))
    return [run for run in runs if run]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - pad, high + pad


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between."""
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
