"""Requests that failed or were refused, by reason, and how many of them had no reason to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tonnage.bench.moves import Ask
from tonnage.bench.witness import Heard

if TYPE_CHECKING:
    from tonnage.engine import Completion

#: Of the text of an error, by which failures are counted.
NUM_CHARACTERS = 100
REFUSED = "refused on arrival"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Requests that failed with one kind of reason; ``num_feasible`` of them had none, as the oracle sees it."""

    kind: str
    num_requests: int
    num_feasible: int


class FailureCounts:
    """``note`` each that failed. ``explains``: whether an error may come of failures that were made."""

    def __init__(self, explains: Callable[[str | None], bool]) -> None:
        self._explains = explains
        self._counts: Counter[tuple[str, bool]] = Counter()  # by kind, and whether it could have been served

    def note(self, ask: Ask, completion: Completion, heard: Heard | None) -> None:
        error = completion.error or ""
        if heard is not None and heard.has_raised:
            self._counts["its own callback raised", False] += 1
        elif self._explains(error):
            self._counts["made to fail", False] += 1
        else:
            self._counts[error.replace(ask.id, "...")[:NUM_CHARACTERS], True] += 1

    def all(self, *, num_refused: int, num_refused_wrongly: int) -> tuple[Failures, ...]:
        """In order of their kinds, with those that never came in."""
        counts = self._counts + Counter(
            {(REFUSED, True): num_refused_wrongly, (REFUSED, False): num_refused - num_refused_wrongly}
        )
        return tuple(
            Failures(kind=kind, num_requests=counts[kind, True] + counts[kind, False], num_feasible=counts[kind, True])
            for kind in sorted({kind for kind, _ in counts})
        )
