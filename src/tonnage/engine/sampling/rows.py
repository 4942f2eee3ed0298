"""What one step asks of the sampler: for each feature the rows that want it, and nothing for features nobody wants.

Every part holds parallel arrays. ``rows`` are indices into the step's sampling rows, in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tonnage.step import Ints

#: Random numbers of one draw: a level of the tree that it walks down takes one.
NUM_UNIFORM = 8

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """Rows that draw at random; the others take the most probable token.

    ``uniform`` [rows, NUM_UNIFORM] in [0, 1) decides. Filters are None where no row has them: ``top_k`` 0, ``top_p``
    1 and ``min_p`` 0 keep everything.
    """

    rows: Ints
    uniform: Floats
    temperature: Floats
    top_k: Ints | None = None
    top_p: Floats | None = None
    min_p: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Penalties:
    """Rows with penalties, and the ``slots`` where the penalty tables count their tokens."""

    rows: Ints
    slots: Ints
    repetition: Floats
    presence: Floats
    frequency: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edits:
    """``values[i]`` is added to the logit of ``tokens[i]`` in row ``rows[i]``: biases, and -inf for stops too early."""

    rows: Ints
    tokens: Ints
    values: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tops:
    """Rows that want the ``counts[i]`` most probable tokens told."""

    rows: Ints
    counts: Ints


Part = TypeVar("Part", Draws, Penalties, Edits, Tops)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingRows:
    """The sampling rows of one step, in the order of the logits' rows."""

    num_rows: int
    draws: Draws | None = None
    penalties: Penalties | None = None
    edits: Edits | None = None
    tops: Tops | None = None

    @property
    def is_plain(self) -> bool:
        """The most probable token of each row, and nothing more."""
        return self.draws is None and self.penalties is None and self.edits is None and self.tops is None

    def between(self, start: int, stop: int) -> SamplingRows:
        """Rows ``[start, stop)`` alone, counted from 0."""
        if start == 0 and stop == self.num_rows:
            return self
        return SamplingRows(
            num_rows=stop - start,
            draws=_between(self.draws, start, stop),
            penalties=_between(self.penalties, start, stop),
            edits=_between(self.edits, start, stop),
            tops=_between(self.tops, start, stop),
        )


def _between(part: Part | None, start: int, stop: int) -> Part | None:
    if part is None:
        return None
    first, last = np.searchsorted(part.rows, (start, stop))
    if first == last:
        return None
    kept: dict[str, Any] = {field.name: getattr(part, field.name) for field in fields(part)}
    kept = {name: None if array is None else array[first:last] for name, array in kept.items()}
    return replace(part, **{**kept, "rows": kept["rows"] - start})
