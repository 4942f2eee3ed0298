"""Pins: blocks that somebody besides the running sequences holds, so that they are not evicted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TypeAlias

from tonnage.resources.mover import Ids

#: Entered while references are given back, which must not be left half way.
Guard: TypeAlias = Callable[[], AbstractContextManager[object]]


class PinHandle:
    """One more holder of each of the blocks ``ids``, in token order, until ``close``.

    A pinned block counts as live: it is never evicted, and the pool is so much smaller. The manager that gave the
    handle closes it when it is reset or closed itself.
    """

    def __init__(self, ids: Ids, give_back: Callable[[PinHandle, Ids], None], guard: Guard = nullcontext) -> None:
        self._ids: Ids | None = ids
        self._give_back, self._guard = give_back, guard
        self.ids: tuple[int, ...] = tuple(ids.tolist())

    @property
    def is_open(self) -> bool:
        return self._ids is not None

    def close(self) -> None:
        """Give the references back; again: nothing."""
        with self._guard():
            ids, self._ids = self._ids, None
            if ids is not None:
                self._give_back(self, ids)

    def __enter__(self) -> PinHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
