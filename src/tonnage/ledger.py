"""Who holds what on one device, now and at its highest, and in which phase.

One ``Ledger`` per device, made by whoever opens the device and passed in; there is no global one. It keeps accounts,
not allocations. Each account says how its bytes are known: COUNTED by our own allocators, SAMPLED from someone
else's statistics, or assigned by whoever opened the device from what was left unexplained at one moment (REMAINDER).
What the device says this process holds, minus all accounts, is ``unattributed``: reported as it is, negative values
too.

Memory of another device (pinned host pages of a GPU engine, say) belongs in that device's ledger.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from tonnage.errors import LedgerError
from tonnage.terms import How, LedgerEntry, LedgerEvent, LineKind, MemoryKind, Reading, Snapshot

DEFAULT_NUM_EVENTS = 65_536
FIRST_PHASE = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One line, planned against actual, in bytes. ``None``: nothing has been read from the device, so unknown."""

    line: LineKind
    planned_bytes: int
    actual_bytes: int | None
    high_water_bytes: int | None

    @property
    def error_bytes(self) -> int | None:
        """Actual minus planned: positive is overspent."""
        return None if self.actual_bytes is None else self.actual_bytes - self.planned_bytes

    @property
    def high_error_bytes(self) -> int | None:
        """The highest ever held minus planned: what matters for a line that is empty between steps."""
        return None if self.high_water_bytes is None else self.high_water_bytes - self.planned_bytes


class Account:
    """One owner's memory of one kind, line and tag. Made by ``Ledger.open``; safe to use from any thread."""

    __slots__ = (
        "_first_phase", "_high_phase", "_ledger", "high_water_bytes", "how", "line", "memory", "num_live", "owner",
        "physical_bytes", "released_bytes", "requested_bytes", "tag",
    )  # fmt: skip

    def __init__(
        self, ledger: Ledger, *, owner: str, line: LineKind, memory: MemoryKind, tag: str = "", how: How = How.COUNTED
    ) -> None:
        self._ledger = ledger
        self.owner, self.line, self.memory, self.tag, self.how = owner, line, memory, tag, how
        self.requested_bytes = self.physical_bytes = self.high_water_bytes = 0
        self.released_bytes = self.num_live = 0
        self._first_phase = self._high_phase = ""

    def __repr__(self) -> str:
        tag = f" tag={self.tag!r}" if self.tag else ""
        return f"<Account {self.owner!r} {self.line}{tag} {self.physical_bytes:,} bytes in {self.num_live}>"

    def add(self, requested_bytes: int, physical_bytes: int, *, stream: int | None = None) -> None:
        """One more live allocation, on ``stream`` if any. ``physical_bytes`` counts the rounding to pages.

        Raises ``LedgerError`` for negative bytes, on a SAMPLED account, and after a strict seal when this owner had
        nothing before; the account is then unchanged, so the caller can give the memory back.
        """
        self._require(How.COUNTED, "add")
        if requested_bytes < 0 or physical_bytes < 0:
            raise LedgerError(f"{self!r}: cannot add {requested_bytes:,} requested, {physical_bytes:,} physical bytes")
        with self._ledger._lock:
            self._ledger._admit(self, physical_bytes)
            self.num_live += 1
            self._move(physical_bytes, requested_bytes, stream)

    def sub(self, requested_bytes: int, physical_bytes: int, *, stream: int | None = None) -> None:
        """One live allocation fewer. Raises ``LedgerError``, changing nothing, for more than the account holds."""
        self._require(How.COUNTED, "sub")
        with self._ledger._lock:
            left = (self.requested_bytes - requested_bytes, self.physical_bytes - physical_bytes, self.num_live - 1)
            if min(left) < 0 or min(requested_bytes, physical_bytes) < 0:
                raise LedgerError(
                    f"{self!r}: cannot return {requested_bytes:,} requested, {physical_bytes:,} physical bytes "
                    f"of {self.requested_bytes:,} and {self.physical_bytes:,}"
                )
            self.num_live = left[2]
            self.released_bytes += physical_bytes
            self._move(-physical_bytes, -requested_bytes, stream)

    def adjust_requested(self, delta_bytes: int) -> None:
        """More or less of the same physical memory is asked for: an arena grows inside its last page."""
        self._require(How.COUNTED, "adjust_requested")
        with self._ledger._lock:
            if self.requested_bytes + delta_bytes < 0:
                raise LedgerError(f"{self!r}: requested bytes would fall below zero by {delta_bytes:,}")
            self.requested_bytes += delta_bytes
            self._ledger._requested(self.line, delta_bytes)

    def sampled(self, num_bytes: int) -> None:
        """The account of a SAMPLED owner now stands at ``num_bytes``."""
        self._require_not(How.COUNTED, "sampled")
        if num_bytes < 0:
            raise LedgerError(f"{self!r}: sampled {num_bytes:,} bytes")
        with self._ledger._lock:
            delta = num_bytes - self.physical_bytes
            if delta > 0:
                self._ledger._admit(self, delta)
            self.released_bytes += max(0, -delta)
            self.num_live = int(num_bytes > 0)
            self._move(delta, delta)

    def entry(self, *, device: int, planned_bytes: int | None) -> LedgerEntry:
        """A frozen copy. ``planned_bytes`` is the plan's whole line, which may have several accounts."""
        return LedgerEntry(
            owner=self.owner,
            line=self.line,
            tag=self.tag,
            memory=self.memory,
            device=device,
            how=self.how,
            requested_bytes=self.requested_bytes,
            physical_bytes=self.physical_bytes,
            high_water_bytes=self.high_water_bytes,
            released_bytes=self.released_bytes,
            num_live=self.num_live,
            first_phase=self._first_phase,
            high_water_phase=self._high_phase,
            planned_bytes=planned_bytes,
        )

    def _require(self, how: How, call: str) -> None:
        if self.how is not how:
            raise LedgerError(f"{self!r} is {self.how}: {call} is for {how} accounts")

    def _require_not(self, how: How, call: str) -> None:
        if self.how is how:
            raise LedgerError(f"{self!r} is {self.how}: {call} is not for {how} accounts")

    def _move(self, delta: int, requested_delta: int, stream: int | None = None) -> None:
        self.physical_bytes += delta
        self.requested_bytes += requested_delta
        phase = self._ledger._phases[-1]
        self._first_phase = self._first_phase or phase
        if self.physical_bytes > self.high_water_bytes:
            self.high_water_bytes, self._high_phase = self.physical_bytes, phase
        self._ledger._moved(self, delta, stream)
        self._ledger._requested(self.line, requested_delta)


class Ledger:
    """The accounts of device number ``device``, which has ``total_bytes``.

    ``num_events`` bounds the ring of past changes. Every method may be called from any thread; phases and steps
    belong to the ledger, not to a thread.
    """

    def __init__(self, device: int, total_bytes: int, *, num_events: int = DEFAULT_NUM_EVENTS) -> None:
        self.device, self.total_bytes = device, total_bytes
        self._lock = threading.RLock()
        self._accounts: dict[tuple[str, LineKind, MemoryKind, str], Account] = {}
        self._events: deque[LedgerEvent] = deque(maxlen=num_events)
        self._phases = [FIRST_PHASE]
        self._step = 0
        self._seen: set[str] = set()  # owners that have held something
        self._first_uses: dict[str, LedgerEvent] = {}
        self._sealed = self._strict = False
        self._planned: dict[LineKind, int] = {}
        self._lines: dict[LineKind, _Level] = {}
        self._unattributed = _Level()
        self._reading: Reading | None = None

    def open(self, *, owner: str, line: LineKind, memory: MemoryKind, tag: str = "", how: How = How.COUNTED) -> Account:
        """The account of that owner, line, memory and tag: the same object when it is opened again.

        How.REMAINDER says that its bytes were assigned from what no account explained at one moment (a driver's
        context, say): they are set by ``sampled``, and every view shows that nobody counted them.
        Raises ``LedgerError`` when it is open with another ``how``.
        """
        with self._lock:
            account = self._accounts.get((owner, line, memory, tag))
            if account is None:
                account = Account(self, owner=owner, line=line, memory=memory, tag=tag, how=how)
                self._accounts[owner, line, memory, tag] = account
            if account.how is not how:
                raise LedgerError(f"{account!r} is {account.how}; it cannot also be {how}")
            return account

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Changes inside belong to ``name``; nested phases read ``outer/inner``."""
        with self._lock:
            path = name if len(self._phases) == 1 else f"{self._phases[-1]}/{name}"
            self._phases.append(path)
        try:
            yield
        finally:
            with self._lock:
                self._phases.remove(path)

    def step(self, number: int) -> None:
        """Events from now on carry this step number."""
        with self._lock:
            self._step = number

    def expect(self, plan_lines: Mapping[LineKind, int]) -> None:
        """What the plan gives each line, in bytes; replaces what was expected before."""
        with self._lock:
            self._planned = dict(plan_lines)

    def sample(self, reading: Reading) -> None:
        """Take note of what the device says; the remainder is compared with the accounts as they stand now."""
        with self._lock:
            self._reading = reading
            remainder = self._remainder()
            if remainder is not None:
                self._unattributed.reach(remainder)

    def seal(self, *, strict: bool = False, declared: Iterable[str] = ()) -> None:
        """Start-up is over: from now on the first bytes of an owner that had none are reported by name.

        ``strict``: they raise ``LedgerError`` and are not booked. Owners that held something before go on as usual,
        and so do those ``declared`` here: the plan has a line for them although they hold nothing yet.
        """
        with self._lock:
            self._seen.update(declared)
            self._sealed, self._strict = True, strict

    @property
    def is_sealed(self) -> bool:
        return self._sealed

    @property
    def accounted_bytes(self) -> int:
        """Physical bytes of all accounts together."""
        with self._lock:
            return sum(account.physical_bytes for account in self._accounts.values())

    def events(self) -> tuple[LedgerEvent, ...]:
        """The last changes, oldest first; at most ``num_events``."""
        with self._lock:
            return tuple(self._events)

    def snapshot(self) -> Snapshot:
        """The ledger now. ``own``, ``free`` and ``foreign`` are as of the last reading: ``sample`` one just before."""
        with self._lock:
            reading = self._reading
            return Snapshot(
                phase=self._phases[-1],
                entries=tuple(
                    account.entry(device=self.device, planned_bytes=self._planned.get(account.line))
                    for account in self._accounts.values()
                ),
                own=reading.own_bytes if reading else None,
                own_source=reading.own_source if reading else "unread",
                foreign=self._foreign(),
                free=reading.free_bytes if reading else self.total_bytes - self.accounted_bytes,
                unattributed=self._remainder(),
                first_uses=tuple(self._first_uses.values()),
            )

    def audit(self) -> tuple[AuditRow, ...]:
        """Planned against actual for every line that is in the plan or holds something; the remainder comes last.

        A line counts what was asked for; what whole pages add to it is the line ROUNDING, there as in the plan.
        """
        with self._lock:
            known = {*self._planned, *self._lines}
            if self._level(LineKind.ROUNDING).bytes:
                known.add(LineKind.ROUNDING)
            lines = [kind for kind in LineKind if kind in known and kind is not LineKind.UNATTRIBUTED]
            return (*(self._audit_row(kind) for kind in lines), self._audit_remainder())

    def _audit_row(self, kind: LineKind) -> AuditRow:
        level = self._level(kind)
        foreign = self._foreign() if kind is LineKind.FOREIGN else 0
        return AuditRow(
            line=kind,
            planned_bytes=self._planned.get(kind, 0),
            actual_bytes=level.bytes + foreign,
            high_water_bytes=(level.high or 0) + foreign,
        )

    def _audit_remainder(self) -> AuditRow:
        return AuditRow(
            line=LineKind.UNATTRIBUTED,
            planned_bytes=self._planned.get(LineKind.UNATTRIBUTED, 0),
            actual_bytes=self._remainder(),
            high_water_bytes=self._unattributed.high,
        )

    def _level(self, kind: LineKind) -> _Level:
        level = self._lines.get(kind, _Level(bytes=0, high=0))
        if kind is not LineKind.ROUNDING:
            return level
        added = sum(account.physical_bytes - account.requested_bytes for account in self._accounts.values())
        return _Level(bytes=level.bytes + added, high=(level.high or 0) + added)

    def _remainder(self) -> int | None:
        if self._reading is None or self._reading.own_bytes is None:
            return None
        return self._reading.own_bytes - self.accounted_bytes

    def _foreign(self) -> int:
        """Bytes that others hold. Not below zero: on a host, our own heap is ours but takes no device page."""
        if self._reading is None:
            return 0
        own = self._reading.own_bytes if self._reading.own_bytes is not None else self.accounted_bytes
        return max(0, self._reading.total_bytes - self._reading.free_bytes - own)

    def _admit(self, account: Account, delta: int) -> None:
        """Report, or refuse, the first bytes of an owner after the seal. Called with the lock held."""
        if account.owner in self._seen:
            return
        if self._sealed:
            self._first_uses.setdefault(account.owner, self._event(account.owner, delta))
            if self._strict:
                raise LedgerError(
                    f"{account.owner!r} asks for its first {delta:,} bytes ({account.line}) after the ledger was "
                    "sealed: it declared nothing before"
                )
        self._seen.add(account.owner)

    def _requested(self, line: LineKind, delta: int) -> None:
        level = self._lines.setdefault(line, _Level(bytes=0, high=0))
        level.reach(level.bytes + delta)

    def _moved(self, account: Account, delta: int, stream: int | None) -> None:
        self._events.append(self._event(account.owner, delta, stream))

    def _event(self, owner: str, delta: int, stream: int | None = None) -> LedgerEvent:
        return LedgerEvent(
            at_ns=time.monotonic_ns(),
            owner=owner,
            delta=delta,
            phase=self._phases[-1],
            step=self._step,
            sealed=self._sealed,
            stream=stream,
        )


@dataclass(slots=True)
class _Level:
    """Bytes now and at their highest; ``high`` is None until something was reached."""

    bytes: int = 0
    high: int | None = None

    def reach(self, num_bytes: int) -> None:
        self.bytes = num_bytes
        self.high = num_bytes if self.high is None else max(self.high, num_bytes)
