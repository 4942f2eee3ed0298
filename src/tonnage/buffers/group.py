"""Ranks that do something together: the few words that collective memory needs, and ranks that are threads."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol

from tonnage.errors import DriverError


class Group(Protocol):
    """One rank's end of a group. All ranks make the same calls in the same order; each waits for the others.

    Descriptors are valid in the process that gets them, whichever made them. A call raises ``DriverError`` when a
    rank does not come.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def barrier(self) -> None: ...
    def agree(self, problem: str | None) -> dict[int, str]:
        """The problems of all ranks by rank, empty when none has any. A barrier: all have spoken when it returns."""

    def exchange(self, number: int) -> list[int]:
        """The numbers of all ranks, in order."""

    def exchange_fds(self, fd: int) -> list[int]:
        """The descriptors of all ranks, in order, each the receiver's to close; the own place holds -1. ``fd`` stays
        the giver's and may be closed on return.
        """

    def broadcast_fd(self, fd: int | None, *, root: int) -> int:
        """The descriptor of ``root``, the receiver's to close; -1 at ``root``, which may close ``fd`` on return."""


class ThreadGroup:
    """A rank that is a thread of this process. Made for all ranks at once by ``make``."""

    def __init__(self, rank: int, table: _Table) -> None:
        self.rank, self._table = rank, table

    @classmethod
    def make(cls, size: int, *, timeout_s: float = 60.0) -> list[ThreadGroup]:
        """One end for each of ``size`` threads; a rank that stays away longer than ``timeout_s`` breaks the group."""
        table = _Table(size, timeout_s)
        return [cls(rank, table) for rank in range(size)]

    @property
    def size(self) -> int:
        return self._table.barrier.parties

    def barrier(self) -> None:
        self._table.wait(f"rank {self.rank} waited")

    def agree(self, problem: str | None) -> dict[int, str]:
        said = self._gather(problem)
        return {rank: one for rank, one in enumerate(said) if one is not None}

    def exchange(self, number: int) -> list[int]:
        return self._gather(number)

    def exchange_fds(self, fd: int) -> list[int]:
        return self._take(fd, range(self.size))

    def broadcast_fd(self, fd: int | None, *, root: int) -> int:
        return self._take(fd, (root,))[root]

    def _take(self, fd: int | None, of: Any) -> list[int]:
        """Copies of the descriptors of the ranks ``of``; -1 in all other places."""
        given = self._table.put(self.rank, fd)
        taken = [-1] * self.size
        try:
            for rank in of:
                if rank != self.rank:
                    taken[rank] = os.dup(given[rank])
        except BaseException:
            for one in taken:
                if one >= 0:
                    os.close(one)
            raise
        finally:
            self.barrier()  # the givers may close theirs now
        return taken

    def _gather(self, one: Any) -> list[Any]:
        said = self._table.put(self.rank, one)
        self.barrier()
        return said


class _Table:
    """Where the threads of a group lay down what they say."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self._places: list[Any] = [None] * size

    def wait(self, what: str) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise DriverError("group", "BROKEN", f"{what}, but a rank did not come") from error

    def put(self, rank: int, one: Any) -> list[Any]:
        """What all ranks laid down. Wait once more before the next call may overwrite it."""
        self._places[rank] = one
        self.wait(f"rank {rank} spoke")
        return list(self._places)
