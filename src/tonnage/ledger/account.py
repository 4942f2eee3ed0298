"""One owner's memory: bytes asked for and held, live allocations, and their highest."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic_ns

from tonnage.errors import LedgerError
from tonnage.ledger.journal import MAX_NOTED, Change, Journal, event_of
from tonnage.terms import How, LedgerEntry, LedgerEvent, LineKind, MemoryKind


@dataclass(slots=True, eq=False)
class Level:
    """Bytes now and at their highest: what a line's accounts hold together at one moment."""

    bytes: int = 0
    high: int = 0

    def move(self, delta: int) -> None:
        self.bytes += delta
        if self.bytes > self.high:
            self.high = self.bytes


class Figure:
    """A number of an account as it is when everything that was noted is counted."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_{name}"

    def __get__(self, account: Account, owner: type) -> int:
        journal = account._journal
        with journal.lock:
            journal.count()
            figure: int = getattr(account, self._slot)
            return figure


class Account:
    """One owner's memory of one kind, line and tag. Made by ``Ledger.open``; safe to use from any thread.

    ``add`` and ``sub`` are checked. In them no call stands between reading a figure and writing it back: a finaliser
    that ran there, on this thread, would find the lock its own, and one of the two changes would be lost. ``take`` and
    ``give`` are for those who cannot be wrong, and note a change without the lock: they stand in the path of every
    allocation from a pool.
    """

    __slots__ = (
        "_first_phase", "_high_phase", "_high_water_bytes", "_is_ready", "_journal", "_level", "_num_frees",
        "_num_samples", "_num_takes", "_physical_bytes", "_released_bytes", "_requested_bytes", "how", "line",
        "memory", "note", "number", "owner", "tag",
    )  # fmt: skip

    requested_bytes, physical_bytes, high_water_bytes = Figure(), Figure(), Figure()
    released_bytes, num_takes, num_frees, num_samples = Figure(), Figure(), Figure(), Figure()

    def __init__(
        self,
        journal: Journal,
        level: Level,
        *,
        number: int,
        owner: str,
        line: LineKind,
        memory: MemoryKind,
        tag: str = "",
        how: How = How.COUNTED,
    ) -> None:
        self._journal, self._level, self.number = journal, level, number
        self.note = journal.noted.append
        self.owner, self.line, self.memory, self.tag, self.how = owner, line, memory, tag, how
        self._requested_bytes = self._physical_bytes = self._high_water_bytes = self._released_bytes = 0
        self._num_takes = self._num_frees = self._num_samples = 0
        self._first_phase = self._high_phase = ""
        self._is_ready = False  # COUNTED, and its owner was admitted

    def __repr__(self) -> str:
        tag = f" tag={self.tag!r}" if self.tag else ""
        return f"<Account {self.owner!r} {self.line}{tag} {self._physical_bytes:,} bytes in {self._live()}>"

    @property
    def num_live(self) -> int:
        with self._journal.lock:
            self._journal.count()
            return self._live()

    @property
    def num_changes(self) -> int:
        """Events that this account ever made, those that the ring has lost among them."""
        with self._journal.lock:
            self._journal.count()
            return self._changes()

    def take(self, num_bytes: int, stream: int) -> None:
        """``add`` for more than no bytes, physical as requested; they are counted before anything is read.

        Raises ``LedgerError`` after a strict seal, as ``add`` does. Where it has been called before, a caller may do
        what it does by himself: ``note`` the ``Change``. So ``PooledBuffer`` does.
        """
        if self._is_ready:
            self.note((monotonic_ns(), self.number, num_bytes, stream, self._journal.moment))
        else:
            self.add(num_bytes, num_bytes, stream=stream)

    def give(self, num_bytes: int, stream: int) -> None:
        """Gives back what one ``take`` took. Not checked: whoever gives more has a negative account from then on."""
        self.note((monotonic_ns(), self.number, -num_bytes, stream, self._journal.moment))
        if len(self._journal.noted) >= MAX_NOTED:
            self._journal.catch_up()

    def add(self, requested_bytes: int, physical_bytes: int, *, stream: int | None = None) -> None:
        """One more live allocation, on ``stream`` if any. ``physical_bytes`` counts the rounding to pages.

        Raises ``LedgerError`` for negative bytes and fractions, on an account that is not COUNTED, and after a strict
        seal when this owner had nothing before; the account is then unchanged, so the caller can give the memory back.
        """
        journal, level = self._journal, self._level
        with journal.lock:
            if journal.noted:
                journal.count()
            if not self._is_ready or _is_wrong(requested_bytes, physical_bytes):
                self._begin(requested_bytes, physical_bytes, stream)
            moment, at_ns = journal.moment, monotonic_ns()
            self._physical_bytes = held = self._physical_bytes + physical_bytes
            if held > self._high_water_bytes:
                self._high_water_bytes, self._high_phase = held, moment[0]
            self._requested_bytes += requested_bytes
            self._num_takes += 1
            level.bytes = held = level.bytes + requested_bytes
            if held > level.high:
                level.high = held
            journal.append((at_ns, self.number, physical_bytes, stream, moment))

    def sub(self, requested_bytes: int, physical_bytes: int, *, stream: int | None = None) -> None:
        """One live allocation fewer. Raises ``LedgerError``, changing nothing, for more than the account holds."""
        journal, level = self._journal, self._level
        with journal.lock:
            if journal.noted:
                journal.count()
            is_wrong, at_ns = _is_wrong(requested_bytes, physical_bytes), monotonic_ns()
            held, asked = self._physical_bytes - physical_bytes, self._requested_bytes - requested_bytes
            if is_wrong or held < 0 or asked < 0 or self._num_takes <= self._num_frees:
                self._refuse_sub(requested_bytes, physical_bytes)
            self._physical_bytes, self._requested_bytes = held, asked
            self._released_bytes += physical_bytes
            self._num_frees += 1
            level.bytes -= requested_bytes
            journal.append((at_ns, self.number, -physical_bytes, stream, journal.moment))

    def restart_high(self) -> None:
        """The highest is what is held now; the journal is locked and counted."""
        self._high_water_bytes, self._high_phase = self._physical_bytes, self._journal.phase_name

    def adjust_requested(self, delta_bytes: int) -> None:
        """More or less of the same physical memory is asked for: an arena grows inside its last page."""
        self._require_counted("adjust_requested")
        with self._journal.lock:
            self._journal.count()
            if self._requested_bytes + delta_bytes < 0:
                raise LedgerError(f"{self!r}: requested bytes would fall below zero by {delta_bytes:,}")
            self._requested_bytes += delta_bytes
            self._level.move(delta_bytes)

    def sampled(self, num_bytes: int) -> None:
        """The account of a SAMPLED or REMAINDER owner now stands at ``num_bytes``."""
        if self.how is How.COUNTED:
            raise LedgerError(f"{self!r} is {self.how}: sampled is not for {How.COUNTED} accounts")
        if num_bytes < 0:
            raise LedgerError(f"{self!r}: sampled {num_bytes:,} bytes")
        with self._journal.lock:
            self._journal.count()
            if num_bytes > self._physical_bytes:
                self._admit(num_bytes - self._physical_bytes, None)
            moment = self._journal.moment
            self._first_phase = self._first_phase or moment[0]
            delta = num_bytes - self._physical_bytes
            self._physical_bytes = self._requested_bytes = num_bytes
            if num_bytes > self._high_water_bytes:
                self._high_water_bytes, self._high_phase = num_bytes, moment[0]
            if delta < 0:
                self._released_bytes -= delta
            self._num_samples += 1
            self._level.move(delta)
            self._journal.append((monotonic_ns(), self.number, delta, None, moment))

    def entry(self, *, device: int, planned_bytes: int | None) -> LedgerEntry:
        """A frozen copy. ``planned_bytes`` is the plan's whole line, which may have several accounts."""
        return LedgerEntry(
            owner=self.owner,
            line=self.line,
            tag=self.tag,
            memory=self.memory,
            device=device,
            how=self.how,
            requested_bytes=self._requested_bytes,
            physical_bytes=self._physical_bytes,
            high_water_bytes=self._high_water_bytes,
            released_bytes=self._released_bytes,
            num_live=self._live(),
            first_phase=self._first_phase,
            high_water_phase=self._high_phase,
            planned_bytes=planned_bytes,
        )

    def event(self, change: Change) -> LedgerEvent:
        """A change of this account as it is read."""
        return event_of(change, owner=self.owner, line=self.line, tag=self.tag)

    def _live(self) -> int:
        return self._num_takes - self._num_frees if self.how is How.COUNTED else int(self._physical_bytes > 0)

    def _changes(self) -> int:
        return self._num_takes + self._num_frees + self._num_samples

    def _begin(self, requested_bytes: int, physical_bytes: int, stream: int | None) -> None:
        """What ``add`` asks once, and when something is wrong."""
        self._require_counted("add")
        if _is_wrong(requested_bytes, physical_bytes):
            raise LedgerError(f"{self!r}: cannot add {requested_bytes:,} requested, {physical_bytes:,} physical bytes")
        self._admit(physical_bytes, stream)
        self._is_ready = True

    def _admit(self, delta: int, stream: int | None) -> None:
        self._journal.admit(self.owner, self.line, self.tag, delta, stream=stream)
        self._first_phase = self._first_phase or self._journal.phase_name

    def _refuse_sub(self, requested_bytes: int, physical_bytes: int) -> None:
        self._require_counted("sub")
        raise LedgerError(
            f"{self!r}: cannot return {requested_bytes:,} requested, {physical_bytes:,} physical bytes "
            f"of {self._requested_bytes:,} and {self._physical_bytes:,}"
        )

    def _require_counted(self, call: str) -> None:
        if self.how is not How.COUNTED:
            raise LedgerError(f"{self!r} is {self.how}: {call} is for {How.COUNTED} accounts")


def _is_wrong(requested_bytes: int, physical_bytes: int) -> bool:
    """Below zero, or no integers: fractions of bytes would stay in every sum."""
    try:
        return requested_bytes | physical_bytes < 0
    except TypeError:
        return True
