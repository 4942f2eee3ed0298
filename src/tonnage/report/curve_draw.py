"""Areas stacked over one another in a terminal: one character a cell, with a line drawn across at some height."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

#: Rows of a picture, cells of the labels at its left, and the widest it is drawn.
HEIGHT, LABEL_CELLS, MOST_CELLS = 14, 12, 64
#: Fills of the areas from the lowest up, taken round where there are more; then the line's own character.
BLOCKS, PLAIN = "█▓▒░▚▞▘▝", "#%=+:o.~"
LINES = {False: "─", True: "-"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """One layer of a picture: a height for every position along the axis, and a rich style."""

    name: str
    heights: tuple[int, ...]
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Areas over the positions 0 .. n - 1. ``line`` is drawn at its height; ``labels`` stand left of theirs.

    marks  (position, one character) under the axis; where two fall into one cell, the later is shown
    """

    areas: tuple[Area, ...]
    top: int
    line: int
    labels: tuple[tuple[int, str], ...]
    marks: tuple[tuple[int, str], ...]


def cells(console: Console) -> int:
    """Cells of the axis that fit into the console."""
    return max(8, min(MOST_CELLS, console.width - LABEL_CELLS - 2))


def fill(place: int, *, ascii_only: bool) -> str:
    """The character of one area."""
    fills = PLAIN if ascii_only else BLOCKS
    return fills[place % len(fills)]


def draw(picture: Picture, *, width: int, ascii_only: bool) -> Text:
    """The picture in ``width`` cells beside its labels, ``HEIGHT`` rows and one for the marks."""
    from rich.text import Text

    num = len(picture.areas[0].heights)
    labels = {_row(height, picture.top): told for height, told in picture.labels}
    line_row = _row(picture.line, picture.top)
    text = Text()
    for row in reversed(range(HEIGHT)):
        text.append(f"{labels.get(row, ''):>{LABEL_CELLS}} ")
        for cell in range(width):
            position = cell * (num - 1) // max(1, width - 1)
            if row == line_row:
                text.append(LINES[ascii_only], "bold red")
            elif (place := area_at(picture, position, row)) is not None:
                text.append(fill(place, ascii_only=ascii_only), picture.areas[place].style)
            else:
                text.append(" ")
        text.append("\n")
    return text.append(" " * (LABEL_CELLS + 1) + _marks(picture, num, width))


def area_at(picture: Picture, position: int, row: int) -> int | None:
    """The area that covers the middle of a cell; None above all of them."""
    middle, height = (2 * row + 1) * picture.top, 0
    for place, area in enumerate(picture.areas):
        height += area.heights[position]
        if 2 * HEIGHT * height > middle:
            return place
    return None


def legend(picture: Picture, told: Sequence[str], *, ascii_only: bool) -> Text:
    """One row an area, the highest first: its fill, its name and what there is to say about it."""
    from rich.text import Text

    text, width = Text(), max(len(area.name) for area in picture.areas)
    rows = list(zip(picture.areas, told, strict=True))
    for place in reversed(range(len(rows))):
        area, what = rows[place]
        text.append(" " * (LABEL_CELLS - 1))
        text.append(2 * fill(place, ascii_only=ascii_only), area.style)
        text.append(f" {area.name:<{width}}  {what}" + ("\n" if place else ""))
    return text


def _row(height: int, top: int) -> int:
    return min(HEIGHT - 1, height * HEIGHT // max(1, top))


def _marks(picture: Picture, num: int, width: int) -> str:
    found = [" "] * width
    for position, mark in picture.marks:
        found[position * (width - 1) // max(1, num - 1)] = mark
    return "".join(found).rstrip()
