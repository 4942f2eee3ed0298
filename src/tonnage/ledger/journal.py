"""What happened: a bounded ring of changes, with the phase, the step and the seal that they happened in."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import TYPE_CHECKING, TypeAlias

from tonnage.errors import LedgerError
from tonnage.ledger.tally import Tally, tallies_of
from tonnage.terms import LedgerEvent, LineKind

if TYPE_CHECKING:
    from tonnage.ledger.account import Account

DEFAULT_NUM_EVENTS = 65_536
FIRST_PHASE = "start"
#: Changes are counted at the latest when so many are noted: enough that the price is small, and soon done.
MAX_NOTED = 512

#: Phase, step, sealed: made anew when one of them changes, so that a change only points at it.
Moment: TypeAlias = tuple[str, int, bool]
#: At (ns), the account's number, physical delta in bytes, stream, moment. A plain tuple of plain values, because the
#: ring takes one for every allocation: anything richer costs microseconds, and the collector would walk through it.
Change: TypeAlias = tuple[int, int, int, int | None, Moment]


class Journal:
    """The changes of one ledger's accounts, the last ``num_events`` of them, and the one lock of that ledger.

    Whoever reads takes ``lock`` with a ``with`` statement and calls ``count`` first. A method of ours around it, or a
    call of ``acquire``, would leave a gap: Ctrl-C is raised as a call returns, and the lock would be nobody's for ever.
    It may be taken again by the thread that has it: a finaliser may give memory back at any moment.

    A change may also be noted without the lock: ``noted`` is a list, whose ``append`` is one step for all threads.
    Whoever takes the lock counts what is noted first, in its order. So every figure that is read is exact, and noting
    costs a third of counting.
    """

    __slots__ = (
        "_due", "_is_strict", "_num_counted", "_phases", "_seen", "accounts", "append", "changes", "first_uses", "lock",
        "moment", "noted",
    )  # fmt: skip

    def __init__(self, num_events: int) -> None:
        self.lock = threading.RLock()
        self.accounts: list[Account] = []  # by their numbers
        self.changes: deque[Change] = deque(maxlen=num_events)
        self.append = self.changes.append
        self.noted: list[Change] = []
        self.moment: Moment = (FIRST_PHASE, 0, False)
        self.first_uses: dict[str, LedgerEvent] = {}
        self._due: Iterator[Tally] = iter(())
        self._num_counted = 0
        self._phases = [FIRST_PHASE]
        self._seen: set[str] = set()  # owners that have held something
        self._is_strict = False

    @property
    def phase_name(self) -> str:
        return self.moment[0]

    @property
    def is_sealed(self) -> bool:
        return self.moment[2]

    def catch_up(self) -> None:
        """Count what is noted. Whoever gives memory back looks whether it is time; what is only taken is alive, and so
        bounded anyway."""
        with self.lock:
            self.count()

    def count(self) -> None:
        """Bring the accounts up to what is noted; called with the lock held.

        A finaliser that runs in the middle, on this thread, may come here too: it finds the changes still noted and
        counts them itself, or finds them counted and puts the rest of the result into the accounts. Both times we see
        it when we go on. For that, nothing is called between the first and the last of the four marked lines.
        """
        self._put()
        while self.noted:
            batch, num_counted = self.noted[:], self._num_counted
            num_noted, due = len(batch), iter(tallies_of(batch, self.accounts))
            if self._num_counted == num_counted:
                self._num_counted = num_counted + 1  # first
                self._due = due
                del self.noted[:num_noted]
                self.changes += batch  # last
                self._put()
                return

    def _put(self) -> None:
        # One iterator for all who come here, so that each tally is put once; no call while one is.
        for tally in self._due:
            account, level = tally.account, tally.level
            account._physical_bytes += tally.delta_bytes
            account._requested_bytes += tally.delta_bytes
            account._released_bytes += tally.released_bytes
            account._num_takes += tally.num_takes
            account._num_frees += tally.num_frees
            account._high_water_bytes, account._high_phase = tally.high_bytes, tally.high_phase
            level.bytes += tally.delta_bytes
            if tally.level_high_bytes > level.high:
                level.high = tally.level_high_bytes

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Changes inside belong to ``name``; nested phases read ``outer/inner``."""
        with self.lock:
            self.count()
            path = name if len(self._phases) == 1 else f"{self._phases[-1]}/{name}"
            self._phases.append(path)
            self._now(phase=path)
        try:
            yield
        finally:
            with self.lock:
                self.count()
                self._phases.remove(path)
                self._now(phase=self._phases[-1])

    def step(self, number: int) -> None:
        with self.lock:
            self.count()
            self._now(step=number)

    def seal(self, *, strict: bool, declared: Iterable[str]) -> None:
        with self.lock:
            self.count()
            self.know(*declared)
            self._is_strict = strict
            self._now(sealed=True)

    def know(self, *owners: str) -> None:
        """These are not new to us, whatever they hold."""
        with self.lock:
            self.count()
            self._seen.update(owners)

    def admit(self, owner: str, line: LineKind, tag: str, delta: int, *, stream: int | None) -> None:
        """The first bytes of an account: those of a new owner after the seal are reported, or refused if it is strict.

        Called with the lock held. Raises ``LedgerError``; the owner is then as new as before.
        """
        if owner in self._seen:
            return
        if self.is_sealed:
            event = event_of((monotonic_ns(), 0, delta, stream, self.moment), owner=owner, line=line, tag=tag)
            self.first_uses.setdefault(owner, event)
            if self._is_strict:
                raise LedgerError(
                    f"{owner!r} asks for its first {delta:,} bytes ({line}) after the ledger was sealed: it declared "
                    "nothing before"
                )
        self._seen.add(owner)

    def _now(self, *, phase: str | None = None, step: int | None = None, sealed: bool | None = None) -> None:
        was = self.moment
        self.moment = (
            was[0] if phase is None else phase,
            was[1] if step is None else step,
            was[2] if sealed is None else sealed,
        )


def event_of(change: Change, *, owner: str, line: LineKind, tag: str) -> LedgerEvent:
    """A change as it is read."""
    at_ns, _, delta, stream, (phase, step, sealed) = change
    return LedgerEvent(
        at_ns=at_ns, owner=owner, line=line, tag=tag, delta=delta, phase=phase, step=step, sealed=sealed, stream=stream
    )
