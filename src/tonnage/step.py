"""A step of the engine: what it computes (``StepPlan``) and the transaction that makes it all or nothing (``Txn``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tonnage.errors import TonnageError
from tonnage.terms import StepShape


class Veto(TonnageError):
    """A manager refuses a prepared step; every manager is rolled back and the step is not launched."""

    def __init__(self, manager: str, reason: str) -> None:
        self.manager, self.reason = manager, reason
        super().__init__(f"{manager}: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """One row: tokens ``[start, start + count)`` of a request; it samples if it reaches the last known token."""

    request_id: str
    start: int
    count: int
    samples: bool
    drafts: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_decode(self) -> bool:
        """One token on top of a cached prefix."""
        return self.count == 1 and self.start > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes, fixed before anything is launched."""

    id: int
    items: tuple[StepItem, ...]
    bucket: int | None = None
    lookahead: int = 0
    shape: StepShape = field(default_factory=StepShape)

    @classmethod
    def of(cls, step_id: int, items: tuple[StepItem, ...]) -> StepPlan:
        prefill = [item for item in items if not item.is_decode]
        shape = StepShape(
            num_tokens=sum(item.count for item in items),
            prefill_tokens=sum(item.count for item in prefill),
            prefill_rows=len(prefill),
            decode_rows=len(items) - len(prefill),
            attended_tokens=sum(item.end for item in items),
            max_row_tokens=max((item.end for item in items), default=0),
            logits_rows=sum(item.samples for item in items),
        )
        return cls(id=step_id, items=items, shape=shape)


class Txn:
    """An undo list. Managers register how to undo each thing they did; ``rollback`` runs it newest first.

    After ``commit`` or ``rollback`` the transaction is closed: registering more is a defect. A second ``rollback``
    does nothing. An undo that raises does not stop the ones before it; the first such error is raised at the end.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._open = True

    @property
    def is_open(self) -> bool:
        return self._open

    def undo(self, action: Callable[[], None]) -> None:
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
