"""The plots of the page as inline SVG: its style sheet colours them, nothing else is needed to draw them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 14, 16, 48
_HIGHEST = 30.0  # powers of ten that are drawn at most: beyond, a curve leaves the picture


@dataclass(frozen=True, slots=True)
class _Axes:
    """From data to places: x and y are already what is drawn (logarithms, where the axis is one)."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - _TOP - _BOTTOM)

    def line(self, points: Sequence[tuple[float, float]]) -> str:
        return "M" + " L".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def evidence_plot(path: Sequence[tuple[int, float]], alpha: float, unit: str, name: str) -> str:
    """How the evidence grew; `path`: (samples, log10 of the e-value), `name`: unique in the page."""
    goal = -math.log10(alpha)
    points = [(float(count), min(max(log_e, -_HIGHEST), _HIGHEST)) for count, log_e in path if not math.isnan(log_e)]
    last = max(points[-1][0], 1.0)
    high = max(goal * 1.25, *(y for _x, y in points)) + 0.2
    low = min(-0.5, *(y for _x, y in points))
    axes = _Axes(0, last, low, high)
    step = max(1, math.ceil((high - low) / 6))
    levels = [y for y in range(step * math.ceil(low / step), math.floor(high) + 1, step)]
    parts = [_grid(axes, _linear_ticks(last), [(y, _power(y)) for y in levels], _count, f"{unit} looked at", "evidence")]
    parts.append(f'<path class="area" d="{axes.line([(points[0][0], low), *points, (points[-1][0], low)])} Z"/>')
    parts.append(_threshold(axes, goal, f"fault: {_number(1 / alpha)}"))
    parts.append(f'<path class="curve" d="{axes.line(points)}"/>')
    end = points[-1]
    parts.append(f'<circle class="dot" cx="{axes.x(end[0]):.1f}" cy="{axes.y(end[1]):.1f}" r="4"/>')
    peak = max(y for _x, y in points)
    crossed = "It reached the line of a fault." if peak >= goal else "It stayed below the line of a fault."
    now, most = _power(round(end[1], 1)), _power(round(peak, 1))
    told = f"After {_count(end[0])} {unit} the evidence is {now}; its largest was {most}. {crossed}"
    return _svg(name, "How the evidence grew", told, parts)


def power_plot(samples: int, detectable: float, detect: float | None, unit: str, name: str) -> str:
    """The smallest shift seen, against samples: it falls with their square root. `detectable`: at `samples`, between 0 and 1."""

    def at(count: float) -> float:
        return detectable * math.sqrt(samples / count)

    few = max(1.0, samples / 16, samples * detectable**2)
    many = samples * 16.0
    lows = [at(many), *([detect] if detect else [])]
    axes = _Axes(math.log10(few), math.log10(many), math.log10(min(lows)) - 0.1, math.log10(min(1.0, at(few))) + 0.1)
    parts = [_grid(axes, _log_ticks(axes.x0, axes.x1), _log_labels(axes), lambda x: _count(10**x), unit, "smallest TV seen")]
    parts.append(f'<path class="curve" d="{axes.line([(axes.x0, math.log10(at(few))), (axes.x1, math.log10(at(many)))])}"/>')
    if detect:
        parts.append(_threshold(axes, math.log10(detect), f"asked for: {detect:g}"))
    here = (axes.x(math.log10(samples)), axes.y(math.log10(detectable)))
    parts.append(f'<circle class="dot" cx="{here[0]:.1f}" cy="{here[1]:.1f}" r="5"/>')
    parts.append(f'<text class="mark" x="{here[0] + 9:.1f}" y="{here[1] - 8:.1f}">this run: {detectable:.2g}</text>')
    told = (
        f"{_count(samples)} {unit} see a total variation of {detectable:.2g} with 95 percent power. Four times as many see "
        "half of that."
    )
    return _svg(name, "The smallest shift that so many samples see", told, parts)


def _svg(name: str, title: str, told: str, parts: Sequence[str]) -> str:
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-told">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-told">{escape(told)}</desc>{"".join(parts)}</svg>'
        f"<figcaption><b>{escape(title)}.</b> {escape(told)}</figcaption></figure>"
    )


def _grid(
    axes: _Axes, x_ticks: Sequence[float], y_ticks: Sequence[tuple[float, str]], x_label: Callable[[float], str], x_name: str,
    y_name: str,
) -> str:  # fmt: skip
    parts = []
    for y, label in y_ticks:
        place = axes.y(y)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 8}" y="{place + 4:.1f}">{escape(label)}</text>')
    for x in x_ticks:
        place = axes.x(x)
        parts.append(
            f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{HEIGHT - _BOTTOM}" y2="{HEIGHT - _BOTTOM + 5}"/>'
        )
        anchor = "end" if place > WIDTH - _RIGHT - 12 else "middle"
        parts.append(
            f'<text class="tick" text-anchor="{anchor}" x="{place:.1f}" y="{HEIGHT - _BOTTOM + 19}">{escape(x_label(x))}</text>'
        )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="name" text-anchor="middle" x="{middle:.0f}" y="{HEIGHT - 6}">{escape(x_name)}</text>')
    centre = (_TOP + HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text class="name" text-anchor="middle" transform="rotate(-90 13 {centre:.0f})" x="13" y="{centre:.0f}">'
        f"{escape(y_name)}</text>"
    )
    return "".join(parts)


def _threshold(axes: _Axes, y: float, label: str) -> str:
    place = axes.y(y)
    return (
        f'<line class="goal" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
        f'<text class="goal" text-anchor="start" x="{_LEFT + 6}" y="{place - 6:.1f}">{escape(label)}</text>'
    )


def _linear_ticks(last: float) -> list[float]:
    rough = last / 4
    power = 10 ** math.floor(math.log10(rough)) if rough >= 1 else 1
    step = next(power * unit for unit in (1, 2, 2.5, 5, 10) if power * unit >= rough or unit == 10)
    return [step * i for i in range(int(last / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    tens = [float(i) for i in range(math.ceil(low), math.floor(high) + 1)]
    return tens if len(tens) > 1 else [low, high]


def _log_labels(axes: _Axes) -> list[tuple[float, str]]:
    found = [
        (math.log10(unit) + power, f"{unit * 10.0**power:g}")
        for power in range(math.floor(axes.y0), math.ceil(axes.y1) + 1)
        for unit in (1, 2, 5)
    ]
    return [(y, label) for y, label in found if axes.y0 <= y <= axes.y1]


def _count(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value < 1e6 else f"{value:.0e}"


def _power(exponent: float) -> str:
    """10 to that power, in letters that every font has."""
    if exponent >= _HIGHEST:
        return f"over 10^{_HIGHEST:.0f}"
    value = 10.0**exponent
    if 1e-3 <= value < 1e5:
        return f"{value:,.0f}" if value >= 10 or value == 1 else f"{value:.2g}"
    return f"10^{exponent:g}"
