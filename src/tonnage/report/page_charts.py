"""Two line charts of a grid as inline SVG: sequences at once, and tokens of cache, against the length of one.

Lines differ by colour, by dashes and by the mark at their points. Lengths are on a logarithmic axis, for they double.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log2
from typing import TYPE_CHECKING

from tonnage.report.draw import plural

if TYPE_CHECKING:
    from tonnage.report.page import Cell, Series

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 24, 16, 40
#: Colour class, dashes, and mark of each batch size in turn.
STYLES = (
    ("s0", "", "circle"), ("s1", "7 3", "square"), ("s2", "2 3", "diamond"), ("s3", "9 3 2 3", "triangle"),
    ("s4", "4 2", "circle"), ("s5", "1 2", "square"),
)  # fmt: skip


def charts(series: Series) -> str:
    """Both charts, each in a figure with a text alternative."""
    at_once = [[float(cell.num_sequences) for cell in column] for column in _columns(series)]
    tokens = [[float(cell.kv_tokens) for cell in column] for column in _columns(series)]
    return _figure(series, at_once, "Full-length sequences at once", is_log=True) + _figure(
        series, tokens, "Tokens of cache", is_log=False
    )


def legend(series: Series) -> str:
    """Which line is which batch size."""
    items = []
    for place, batch in enumerate(series.batches):
        name, dashes, mark = STYLES[place % len(STYLES)]
        items.append(
            f'<li><svg viewBox="0 0 40 12" class="{name}" aria-hidden="true"><line x1="2" y1="6" x2="38" y2="6" '
            f'stroke-dasharray="{dashes}"/>{_mark(mark, 20, 6)}</svg>max_batch_size {batch:,}</li>'
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _columns(series: Series) -> list[list[Cell]]:
    return [[row[place] for row in series.cells] for place in range(len(series.batches))]


def _figure(series: Series, lines: Sequence[Sequence[float]], title: str, *, is_log: bool) -> str:
    most = max((value for line in lines for value in line), default=0.0)
    ticks = _log_ticks(most) if is_log else _ticks(most)
    top = ticks[-1]

    def x(place: int) -> float:
        low, high = log2(series.lengths[0]), log2(series.lengths[-1])
        part = (log2(series.lengths[place]) - low) / (high - low) if high > low else 0.5
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        part = (log2(value) / log2(top) if top > 1 else 0.0) if is_log else value / top
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    drawn = "".join(_axis_y(tick, y(tick)) for tick in ticks) + _axis_x(
        series, [x(i) for i in range(len(series.lengths))]
    )
    for place, line in enumerate(lines):
        points = [(x(i), y(value)) for i, value in enumerate(line) if value > 0]
        drawn += _line(points, *STYLES[place % len(STYLES)])
    own = x(series.lengths.index(series.own[0]))
    stops = ",".join(f"{x(i):.1f}" for i in range(len(series.lengths)))
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(_told(series, lines, title))}">{drawn}<line class="cursor" x1="{own:.1f}" x2="{own:.1f}" '
        f'y1="{TOP}" y2="{HEIGHT - BOTTOM}" data-stops="{stops}"/></svg></figure>'
    )


def _told(series: Series, lines: Sequence[Sequence[float]], title: str) -> str:
    """What the picture shows, in words: the ends of each line."""
    first, last = series.lengths[0], series.lengths[-1]
    ends = "; ".join(
        f"with max_batch_size {batch:,} from {line[0]:,.0f} at {plural(first, 'token')} to {line[-1]:,.0f} at {last:,}"
        for batch, line in zip(series.batches, lines, strict=True)
    )
    return f"{title} against max_seq_len: {ends}. Every figure is in the table below."


def _line(points: Sequence[tuple[float, float]], name: str, dashes: str, mark: str) -> str:
    if not points:
        return ""
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    marks = "".join(_mark(mark, px, py) for px, py in points)
    return f'<g class="{name}"><polyline points="{path}" stroke-dasharray="{dashes}"/>{marks}</g>'


def _mark(kind: str, x: float, y: float) -> str:
    r = 3.4
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
    if kind == "square":
        return f'<rect x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r}" height="{2 * r}"/>'
    corners = (
        [(0, -r - 1), (r + 1, 0), (0, r + 1), (-r - 1, 0)] if kind == "diamond" else [(0, -r - 1), (r, r), (-r, r)]
    )
    return f'<polygon points="{" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)}"/>'


def _axis_y(tick: float, y: float) -> str:
    return (
        f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>'
    )


def _axis_x(series: Series, places: Sequence[float]) -> str:
    """A tick a length, named where the one before leaves room."""
    made, last = [], -1e9
    for length, x in zip(series.lengths, places, strict=True):
        made.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}"/>')
        if x - last >= 34:
            made.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{short(length)}</text>')
            last = x
    made.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">max_seq_len</text>')
    return "".join(made)


def _ticks(most: float) -> list[float]:
    """From nothing up to a round number that is not below ``most``, in four steps or five."""
    if most <= 0:
        return [0.0, 1.0]
    step = 10.0 ** len(str(int(most)))
    for factor in (0.01, 0.02, 0.025, 0.05, 0.1, 0.2, 0.25, 0.5, 1):
        if most <= 5 * step * factor:
            step *= factor
            break
    return [step * i for i in range(int(-(-most // step)) + 1)]


def _log_ticks(most: float) -> list[float]:
    """1, 4, 16 ... up to the first that is not below ``most``."""
    ticks = [1.0]
    while ticks[-1] < most or len(ticks) < 2:
        ticks.append(ticks[-1] * 4)
    return ticks


def short(number: float) -> str:
    """A number for an axis: 512, 32Ki (a multiple of 1,024), 1.5M."""
    whole = int(number)
    for unit, size in (("Mi", 2**20), ("Ki", 2**10)):
        if whole >= size and whole % size == 0:
            return f"{whole // size}{unit}"
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if whole >= size:
            return f"{whole / size:.3g}{unit}"
    return str(whole)
