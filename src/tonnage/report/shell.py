"""Command lines as they can be pasted: cut at options into rows that a shell reads as one."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

#: What joins a row to the next one, to a shell.
GOES_ON = " \\"


def pasteable(command: str, width: int, *, label: str = "", indent: str = "    ") -> str:
    """``command`` in rows of at most ``width`` cells, the first one behind ``label``, the others behind ``indent``.

    Words stay whole, quoted as a shell needs them, and an option keeps its value beside it where a row has room for
    both. A word wider than ``width`` makes its row wider.
    """
    room = width - len(indent) - len(GOES_ON)
    rows = [label]
    for piece in _pieces(shlex.split(command), room):
        is_first = rows[-1] in (label, indent)
        if is_first:
            rows[-1] += piece
        elif len(rows[-1]) + 1 + len(piece) + len(GOES_ON) <= width:
            rows[-1] += f" {piece}"
        else:
            rows.append(indent + piece)
    return f"{GOES_ON}\n".join(rows)


def _pieces(words: Iterable[str], room: int) -> Iterator[str]:
    """What comes before the first option, then each option with its values; word by word where that is too wide."""
    piece: list[str] = []
    for word in (*map(shlex.quote, words), None):
        if piece and (word is None or word.startswith("-")):
            together = " ".join(piece)
            yield from [together] if len(together) <= room else piece
            piece = []
        piece.append(word or "")
