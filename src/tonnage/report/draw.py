"""What every view is drawn with: the console, bars, cells. rich is imported inside, never by importing this room."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING

from tonnage.terms import LineKind
from tonnage.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

#: Width where the output is no terminal and ``COLUMNS`` does not say.
PIPED_WIDTH = 100

COLOURS = {
    LineKind.WEIGHTS: "blue",
    LineKind.KV: "green",
    LineKind.SCRATCH: "yellow",
    LineKind.TRANSIENT: "yellow",
    LineKind.GRAPHS: "yellow",
    LineKind.TABLES: "cyan",
    LineKind.CONTEXT: "magenta",
    LineKind.LIBRARIES: "magenta",
    LineKind.FOREIGN: "red",
    LineKind.UNATTRIBUTED: "red",
}


#: Cells of the narrowest terminal that is written for, and of a column that wraps.
_LEAST_WIDTH, _LEAST_WORDS = 20, 12


def console_for(stream: IO[str]) -> Console:
    """A console that adapts to its terminal, and writes plain text of a fixed width into a pipe."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            """Rich would end the process with 1; the program's own end knows what to do."""
            raise BrokenPipeError

    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and len(asked) < 6 and int(asked) > 0:
        width: int | None = max(int(asked), _LEAST_WIDTH)
    else:
        width = None if stream.isatty() and not asked else PIPED_WIDTH
    return Piped(file=stream, width=width, highlight=False, markup=False, emoji=False)


def show(parts: Iterable[RenderableType], console: Console) -> None:
    """Print the parts with an empty line between them."""
    for place, part in enumerate(parts):
        if place:
            console.print()
        _print_whole(part, console)


def _print_whole(part: RenderableType, console: Console) -> None:
    """Print a part without cutting it: a command line that is cut could not be pasted, and "450,032" that is cut to
    "4" is another number. A terminal that is too narrow for a table wraps its rows itself."""
    from rich.table import Table

    width = console.width
    if isinstance(part, Table):
        console.width = max(width, _least_width(part))
    console.print(part, crop=False)
    console.width = width


def _least_width(table: Table) -> int:
    """Cells in which no column but the last wraps, and that in no less than a few words."""
    from rich.text import Text

    total = 0
    for column in table.columns:
        cells = [Text(cell) if isinstance(cell, str) else cell for cell in (column.header, *column.cells)]
        widest = max((cell.cell_len for cell in cells if isinstance(cell, Text)), default=0)
        total += (widest if column.no_wrap else min(widest, _LEAST_WORDS)) + 2
    return total


def grid(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, title: str = "") -> Table:
    """A borderless table. A column whose name ends in ``>`` is right-aligned and never wraps; the last one wraps."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title or None, title_justify="left")
    table.title_style, table.header_style = "bold", "dim"
    for place, name in enumerate(columns):
        right, last = name.endswith(">"), place == len(columns) - 1
        table.add_column(
            name.rstrip(">"),
            justify="right" if right else "left",
            no_wrap=not last,
            overflow="fold" if last else "crop",
        )
    for row in rows:
        table.add_row(*row)
    return table


def slice_bar(start: int, size: int, whole: int, *, width: int, ascii_only: bool = False) -> str:
    """``[start, start + size)`` of ``whole`` as a slice of ``width`` cells, so that slices stack up to a full bar.

    A slice too thin for a cell still leaves a mark; an empty one leaves nothing.
    """
    if size <= 0 or whole <= 0:
        return " " * width
    full, thin = ("#", "|") if ascii_only else ("█", "▏")
    first = (2 * start * width + whole) // (2 * whole)
    after = (2 * (start + size) * width + whole) // (2 * whole)
    drawn = full * (after - first) or thin
    return (" " * min(first, width - 1) + drawn).ljust(width)


def share(part: int, whole: int) -> str:
    """``part`` of ``whole`` as a percentage to one decimal; what is there but rounds to nothing is "<0.1 %"."""
    if whole <= 0:
        return "-"
    tenths = (2000 * part + whole) // (2 * whole)
    return "<0.1 %" if part > 0 and tenths == 0 else f"{tenths // 10}.{tenths % 10} %"


def spread(low: int, high: int) -> str:
    """A range of bytes to three digits, with the unit once where both share it; empty where the number is exact."""
    if low == high:
        return ""
    first, last = _three_digits(low), _three_digits(high)
    if first.split()[1] == last.split()[1]:
        first = first.split()[0]
    return f"{first} – {last}"


def _three_digits(num_bytes: int) -> str:
    """Enough for an error bar: ``167 MiB``, ``61.1 GiB``, ``2 GiB``."""
    number, unit = format_bytes(num_bytes).split()
    digits = len(number.split(".")[0])
    return f"{float(number):.{max(0, 3 - digits)}f} {unit}" if "." in number else f"{number} {unit}"


def hanging(text: str, label: str, width: int) -> str:
    """``text`` wrapped behind ``label``, later rows indented to the same column."""
    return textwrap.fill(
        text, max(width, len(label) + 20), initial_indent=label, subsequent_indent=" " * len(label),
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip


def signed_bytes(value: int) -> str:
    return f"+{format_bytes(value)}" if value > 0 else format_bytes(value)


def maybe_bytes(value: int | None) -> str:
    return "–" if value is None else format_bytes(value)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
