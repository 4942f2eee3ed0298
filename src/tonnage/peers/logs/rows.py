"""One line of a log beside what it should be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tonnage.peers.logs.log import Figure, Unit

#: A difference so many times smaller than the largest explains nothing of it.
_NOTHING = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``said`` in the log, ``found`` by a formula or a prediction, in the unit of the figure.

    low, high  within which it agrees; the rounding of what was printed is in them
    how        the formula, or the rule of the prediction
    line       of the log; 0 where several make it
    terms      names of the prediction's terms that it stands for; the first takes the difference
    """

    name: str
    said: int
    found: int
    low: int
    high: int
    unit: Unit
    how: str
    line: int
    terms: tuple[str, ...] = ()

    @property
    def difference(self) -> int:
        """Above zero: the log has more."""
        return self.said - self.found

    @property
    def agrees(self) -> bool:
        return self.low <= self.said <= self.high

    @property
    def share(self) -> float:
        """The difference as a share of the larger of the two."""
        most = max(abs(self.said), abs(self.found))
        return abs(self.difference) / most if most else 0.0


def worst(rows: Iterable[Row]) -> Row | None:
    """The row that differs most in bytes: one that stands for terms, unless that is next to nothing of what others
    differ by. None where all agree."""
    apart = [row for row in rows if not row.agrees]
    in_bytes = [row for row in apart if row.unit is Unit.BYTES]
    most = max((abs(row.difference) for row in in_bytes), default=0)
    of_terms = [row for row in in_bytes if row.terms and abs(row.difference) * _NOTHING >= most]
    found = max(of_terms or in_bytes, key=lambda row: abs(row.difference), default=None)
    return found or next(iter(apart), None)


def row_of(
    figure: Figure,
    found: int,
    *,
    name: str,
    how: str,
    slack: int = 0,
    low: int | None = None,
    high: int | None = None,
    terms: tuple[str, ...] = (),
) -> Row:
    """A row of one figure; ``slack``: what the others of its formula were rounded by, beside its own rounding."""
    room = slack + figure.rounding
    return Row(
        name=name,
        said=figure.value,
        found=found,
        low=(found if low is None else low) - room,
        high=(found if high is None else high) + room,
        unit=Unit.BYTES if figure.is_bytes else figure.unit,
        how=how,
        line=figure.line,
        terms=terms,
    )
