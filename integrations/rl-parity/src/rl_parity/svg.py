"""Small charts as inline SVG: lines and bars, readable without scripts or external files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 30


@dataclass(frozen=True)
class Series:
    """One line; ``kind`` names its CSS class (``strict`` or ``native``)."""

    name: str
    kind: str
    values: Sequence[float | None]


def number(x: float | None) -> str:
    """A figure for people: integers with separators, others with four significant digits."""
    if x is None:
        return "–"
    if isinstance(x, bool):
        return "yes" if x else "no"
    if isinstance(x, int) or (math.isfinite(x) and x == int(x) and abs(x) < 1e6):
        return f"{int(x):,}"
    return f"{x:.4g}"


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    if high <= low:
        return [low]
    raw = (high - low) / count
    step = 10 ** math.floor(math.log10(raw))
    step *= next(m for m in (1, 2, 5, 10) if m * step >= raw)
    first = math.ceil(low / step) * step
    ticks, tick = [], first
    while tick <= high + step * 1e-9:
        ticks.append(0.0 if abs(tick) < step * 1e-9 else tick)
        tick += step
    return ticks


def _frame(title: str, body: str, label: str) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{body}<text class="axis" x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 4}" '
        f'text-anchor="middle">{escape(label)}</text></svg></figure>'
    )


def lines(title: str, series: Sequence[Series], *, label: str = "step", zero: bool = False, log: bool = False) -> str:
    """A line chart over the index of the values.

    Args:
        zero: the vertical axis starts at zero.
        log: logarithmic; exact zeros are drawn on a line of their own at the bottom, marked ``exact 0``.
    """
    shown = [v for s in series for v in s.values if v is not None and math.isfinite(v)]
    if not shown:
        return _frame(
            title, f'<text class="axis" x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no data</text>', label
        )
    positive = [v for v in shown if v > 0]
    bottom, top = HEIGHT - _BOTTOM, _TOP
    gap = 22 if log and len(positive) < len(shown) else 0
    if log and positive:
        low, high = float(math.floor(math.log10(min(positive)))), float(math.ceil(math.log10(max(positive))))
        high = max(high, low + 1)
    else:
        low, high = (min(shown), max(shown))
        low = min(0.0, low) if zero or low == high else low
        high = high if high > low else low + 1.0

    def y(v: float) -> float:
        if log and v <= 0:
            return bottom
        t = math.log10(v) if log else v
        return (bottom - gap) - (t - low) / (high - low) * (bottom - gap - top)

    count = max(len(s.values) for s in series)

    def x(i: int) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (i / (count - 1) if count > 1 else 0.5)

    out = []
    ticks: list[tuple[float, str]]
    if log and positive:
        every = max(1, math.ceil((high - low) / 5))
        ticks = [(10.0**e, f"1e{e}") for e in range(int(low), int(high) + 1, every)]
        if gap:
            ticks.append((0.0, "exact 0"))
    elif log:
        ticks = [(0.0, "exact 0")]
    else:
        ticks = [(t, number(t)) for t in _ticks(low, high)]
    for value, text in ticks:
        out.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        out.append(f'<text class="axis" x="{_LEFT - 6}" y="{y(value) + 3.5:.1f}" text-anchor="end">{text}</text>')
    for i in sorted({0, count - 1, *(int(t) for t in _ticks(0, count - 1, 5))}):
        if 0 <= i < count:
            out.append(f'<text class="axis" x="{x(i):.1f}" y="{bottom + 14}" text-anchor="middle">{i}</text>')
    for s in series:
        points = [(x(i), y(v)) for i, v in enumerate(s.values) if v is not None and math.isfinite(v)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        out.append(f'<polyline class="line {s.kind}" points="{path}"/>')
        if len(points) <= 40:
            out += [f'<circle class="dot {s.kind}" cx="{px:.1f}" cy="{py:.1f}" r="2.6"/>' for px, py in points]
    if log and not positive:
        out.append(
            f'<text class="big" x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT / 2}" text-anchor="middle">exactly 0</text>'
        )
    return _frame(title, "".join(out), label)


def bars(
    title: str, labels: Sequence[str], series: Sequence[Series], *, label: str = "", highlight: int | None = None
) -> str:
    """Grouped bars of shares in percent; the bucket ``highlight`` stands on a tinted ground."""
    bottom, top = HEIGHT - _BOTTOM - 14, _TOP + 8
    slot = (WIDTH - _LEFT - _RIGHT) / max(1, len(labels))
    out = []
    for share in (0, 25, 50, 75, 100):
        yy = bottom - share / 100 * (bottom - top)
        out.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{yy:.1f}" y2="{yy:.1f}"/>')
        out.append(f'<text class="axis" x="{_LEFT - 6}" y="{yy + 3.5:.1f}" text-anchor="end">{share}%</text>')
    if highlight is not None:
        out.append(
            f'<rect class="exact" x="{_LEFT + highlight * slot:.1f}" y="{top - 8}" width="{slot:.1f}" '
            f'height="{bottom - top + 8}"/>'
        )
    for i, text in enumerate(labels):
        middle = _LEFT + (i + 0.5) * slot
        out.append(
            f'<text class="axis small" x="{middle:.1f}" y="{bottom + 13}" text-anchor="middle">{escape(text)}</text>'
        )
        width = slot * 0.8 / len(series)
        for j, s in enumerate(series):
            value = s.values[i]
            if value is None or value <= 0:
                continue
            height = max(1.0, value / 100 * (bottom - top))
            left = middle - slot * 0.4 + j * width
            out.append(
                f'<rect class="bar {s.kind}" x="{left:.1f}" y="{bottom - height:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}"><title>{escape(s.name)}: {value:.2f}%</title></rect>'
            )
    return _frame(title, "".join(out), label)


def timeline(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """One horizontal bar a row, cut into named phases whose lengths are seconds."""
    longest = max((sum(seconds for _, seconds in phases) for _, phases in rows), default=0.0) or 1.0
    left, height, width = 250, 20, 940
    out = []
    for i, (name, phases) in enumerate(rows):
        y = 4 + i * (height + 4)
        out.append(f'<text class="axis" x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        x = float(left)
        for phase, seconds in phases:
            w = seconds / longest * (width - left - 60)
            out.append(
                f'<rect class="p-{escape(phase)}" x="{x:.1f}" y="{y}" width="{max(w, 0.5):.1f}" height="{height}">'
                f"<title>{escape(phase)}: {seconds:.2f} s</title></rect>"
            )
            x += w
        total = sum(seconds for _, seconds in phases)
        out.append(f'<text class="axis" x="{x + 6:.1f}" y="{y + 14}">{total:.1f} s</text>')
    total_height = 8 + len(rows) * (height + 4)
    return (
        f'<figure class="wide"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {width} {total_height}" role="img" aria-label="{escape(title)}">{"".join(out)}</svg>'
        "</figure>"
    )
