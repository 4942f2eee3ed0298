"""A step of the engine: what it computes (``StepPlan``) and the transaction that makes it all or nothing (``Txn``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tonnage.errors import TonnageError
from tonnage.terms import StepShape

#: One entry a row: token positions and counts, int64; and yes or no.
Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]


class Veto(TonnageError):
    """A manager refuses a prepared step; every manager is rolled back and the step is not launched."""

    def __init__(self, manager: str, reason: str) -> None:
        self.manager, self.reason = manager, reason
        super().__init__(f"{manager}: {reason}")


class MustLand(TonnageError):
    """Somebody must give memory up while steps are under way: what they draw would be lost. They are to land first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """One row: tokens ``[start, start + count)`` of a request; it samples if it reaches the last known token."""

    request_id: str
    start: int
    count: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_decode(self) -> bool:
        """One token on top of a cached prefix."""
        return self.count == 1 and self.start > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """What one step computes, fixed before anything is launched: one row a request, kept as arrays.

    Row i computes tokens ``[starts[i], ends[i])`` of ``request_ids[i]``, and samples if ``samples[i]``. The last
    ``drafts[i]`` of them are guesses, of which the outcome accepts some; None: there are none. All arrays have one
    entry a row and are not to be written to.
    """

    id: int
    request_ids: tuple[str, ...]
    starts: Ints
    counts: Ints
    samples: Flags
    drafts: Ints | None = None
    bucket: int | None = None
    lookahead: int = 0
    shape: StepShape = field(default_factory=StepShape)

    @classmethod
    def build(
        cls,
        step_id: int,
        request_ids: Sequence[str],
        *,
        starts: Ints,
        counts: Ints,
        samples: Flags,
        drafts: Ints | None = None,
    ) -> StepPlan:
        """From arrays of one length, with the shape counted from them."""
        ends = starts + counts
        is_decode = (counts == 1) & (starts > 0)
        num_rows, num_tokens, num_decodes = len(request_ids), int(counts.sum()), int(np.count_nonzero(is_decode))
        shape = StepShape(
            num_tokens=num_tokens,
            prefill_tokens=num_tokens - num_decodes,
            prefill_rows=num_rows - num_decodes,
            decode_rows=num_decodes,
            attended_tokens=int(ends.sum()),
            max_row_tokens=int(ends.max(initial=0)),
            logits_rows=int(np.count_nonzero(samples)),
        )
        return cls(
            id=step_id,
            request_ids=tuple(request_ids),
            starts=starts,
            counts=counts,
            samples=samples,
            drafts=drafts,
            shape=shape,
        )

    @classmethod
    def of(cls, step_id: int, items: Sequence[StepItem]) -> StepPlan:
        """From rows written out."""
        return cls.build(
            step_id,
            [item.request_id for item in items],
            starts=np.array([item.start for item in items], np.int64),
            counts=np.array([item.count for item in items], np.int64),
            samples=np.array([item.samples for item in items], np.bool_),
        )

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def ends(self) -> Ints:
        return self.starts + self.counts

    @property
    def items(self) -> tuple[StepItem, ...]:
        """The rows written out, made anew at every call: for reading, not for the path of a step."""
        rows = zip(self.request_ids, self.starts.tolist(), self.counts.tolist(), self.samples.tolist(), strict=True)
        return tuple(StepItem(request_id=id, start=s, count=c, samples=x) for id, s, c, x in rows)


class Txn:
    """An undo list. Managers register how to undo each thing they did; ``rollback`` runs it newest first.

    After ``commit`` or ``rollback`` the transaction is closed: registering more is a defect. A second ``rollback``
    does nothing. An undo that raises does not stop the ones before it; the first such error is raised at the end.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._open = True

    @property
    def is_open(self) -> bool:
        return self._open

    def undo(self, action: Callable[[], object]) -> None:
        assert self._open, "the transaction is closed"
        self._undo.append(action)

    def commit(self) -> None:
        assert self._open, "the transaction is closed"
        self._open = False
        self._undo.clear()

    def rollback(self) -> None:
        self._open = False
        first: Exception | None = None
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:  # noqa: BLE001 - every undo must get its turn
                first = first or error
        if first is not None:
            raise first
