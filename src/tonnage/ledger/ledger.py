"""The accounts of one device, reconciled with what the device says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from tonnage.errors import LedgerError
from tonnage.ledger.account import Account, Level
from tonnage.ledger.audit import AuditRow
from tonnage.ledger.journal import DEFAULT_NUM_EVENTS, Journal
from tonnage.terms import How, LedgerEntry, LedgerEvent, LineKind, MemoryKind, Reading, Snapshot

#: The owner of what is on the device and not this process's, in events.
OTHERS = "other processes"

_HOST_KINDS = frozenset({MemoryKind.CPU, MemoryKind.PINNED, MemoryKind.PINNED_POOL})


class Ledger:
    """The accounts of device number ``device``, which has ``total_bytes``.

    ``host_is_device``: host memory (CPU, PINNED, PINNED_POOL) is memory of this device, as it is when the device is
    the host. Otherwise such accounts are kept beside it: they have entries and events, but count neither against the
    device nor against a line of its plan. ``num_events`` bounds the ring of past changes.

    ``free_before_bytes`` may be set by whoever opens the device: what was free there before. Readings infer from it
    what this process holds where nobody can tell, until ``own_is_known`` fixes what no account explains. Every method
    may be called from any thread; phases and steps belong to the ledger, not to a thread.
    """

    def __init__(
        self, device: int, total_bytes: int, *, host_is_device: bool = True, num_events: int = DEFAULT_NUM_EVENTS
    ) -> None:
        self.device, self.total_bytes, self.host_is_device = device, total_bytes, host_is_device
        self.free_before_bytes: int | None = None
        self.beyond_accounts_bytes: int | None = None
        self.journal = Journal(num_events)
        self._accounts: dict[tuple[str, LineKind, MemoryKind, str], Account] = {}
        self._planned: dict[LineKind, int] = {}
        self._levels: dict[LineKind, Level] = {}
        self._beside = Level()  # all host memory of a device that is not the host
        self._reading: Reading | None = None
        self._unattributed_high: int | None = None
        # What others hold is followed as an account is, but it is none of ours: no entry, no part of any sum.
        self._others = Account(
            self.journal, Level(), number=0, owner=OTHERS, line=LineKind.FOREIGN, memory=MemoryKind.GPU,
            how=How.SAMPLED,
        )  # fmt: skip
        self.journal.know(OTHERS)
        self._numbered = self.journal.accounts
        self._numbered.append(self._others)
        self._foreign_low: int | None = None
        self._free_low: int | None = None

    def open(
        self,
        *,
        owner: str,
        line: LineKind,
        memory: MemoryKind,
        tag: str = "",
        how: How = How.COUNTED,
        declared: bool = False,
    ) -> Account:
        """The account of that owner, line, memory and tag: the same object when it is opened again.

        How.REMAINDER says that its bytes were assigned from what no account explained at one moment (a driver's
        context, say): they are set by ``sampled``, and every view shows that nobody counted them.
        ``declared``: the owner's first bytes surprise nobody, even after the seal.
        Raises ``LedgerError`` when it is open with another ``how``.
        """
        key = (owner, line, memory, tag)
        with self.journal.lock:
            self.journal.count()
            account = self._accounts.get(key)
            if account is None:
                on_device = self.host_is_device or memory not in _HOST_KINDS
                level = self._levels.setdefault(line, Level()) if on_device else self._beside
                number = len(self._numbered)
                account = Account(
                    self.journal, level, number=number, owner=owner, line=line, memory=memory, tag=tag, how=how
                )
                self._numbered.append(account)
                self._accounts[key] = account
            if account.how is not how:
                raise LedgerError(f"{account!r} is {account.how}; it cannot also be {how}")
            if declared:
                self.journal.know(owner)
            return account

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What is changed inside is one step for whoever reads: bytes that move between accounts are seen once."""
        with self.journal.lock:
            self.journal.count()
            yield

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Changes inside belong to ``name``; nested phases read ``outer/inner``."""
        return self.journal.phase(name)

    def step(self, number: int) -> None:
        """Events from now on carry this step number."""
        self.journal.step(number)

    def expect(self, plan_lines: Mapping[LineKind, int]) -> None:
        """What the plan gives each line, in bytes; replaces what was expected before.

        The highest figures begin anew: what was held before there was this plan is not measured against it.
        """
        with self.journal.lock:
            self.journal.count()
            self._planned = dict(plan_lines)
            for level in self._levels.values():
                level.high = level.bytes
            for account in self._accounts.values():
                account.restart_high()

    def sample(self, reading: Reading) -> None:
        """Take note of what the device says; the remainder is compared with the accounts as they stand now.

        A change of what others hold becomes an event of the owner ``OTHERS``, so it can be seen when it happened.
        """
        with self.journal.lock:
            self.journal.count()
            self._reading = reading
            remainder = self._remainder()
            if remainder is not None:
                highest = self._unattributed_high
                self._unattributed_high = remainder if highest is None else max(remainder, highest)
            self._see(reading)

    def see_others(self, reading: Reading) -> None:
        """Take note of what others hold by this reading, and of what is free, and of nothing else: it may have been
        taken in the middle of a step, when accounts and device are of different moments."""
        with self.journal.lock:
            self.journal.count()
            self._see(reading)

    def foreign_of(self, reading: Reading) -> int:
        """Bytes that others held when it was taken. Not below zero: on a host, our own heap is ours but takes no device
        page."""
        with self.journal.lock:
            self.journal.count()
            return self._foreign(reading)

    def own_is_known(self) -> None:
        """Start-up is over, and no library will take more of the device unseen: where the device does not tell what is
        ours, what the accounts leave unexplained stays as it is from now on, and what changes beside is others'."""
        with self.journal.lock:
            self.journal.count()
            remainder = self._remainder()
            if remainder is not None:
                self.beyond_accounts_bytes = remainder

    def seal(self, *, strict: bool = False, declared: Iterable[str] = ()) -> None:
        """Start-up is over: from now on the first bytes of an owner that had none are reported by name.

        ``strict``: they raise ``LedgerError`` and are not booked. Owners that held something before go on as usual,
        and so do those ``declared`` here: the plan has a line for them although they hold nothing yet.
        """
        self.journal.seal(strict=strict, declared=declared)

    @property
    def is_sealed(self) -> bool:
        return self.journal.is_sealed

    @property
    def accounted_bytes(self) -> int:
        """Physical bytes of all accounts on the device together."""
        with self.journal.lock:
            self.journal.count()
            return self._accounted()

    @property
    def host_bytes(self) -> int:
        """Physical bytes of the accounts in host memory; 0 where the host is the device."""
        with self.journal.lock:
            self.journal.count()
            return self._on_host()

    @property
    def num_lost_events(self) -> int:
        """Changes that the ring had no room for any more: the oldest ones."""
        with self.journal.lock:
            self.journal.count()
            return sum(account._changes() for account in self._numbered) - len(self.journal.changes)

    def events(self) -> tuple[LedgerEvent, ...]:
        """The last changes, oldest first; at most ``num_events``."""
        return self.history()

    def history(self, *, owner: str | None = None, line: LineKind | None = None) -> tuple[LedgerEvent, ...]:
        """The last changes of that owner, of that line, or of both, oldest first; ``OTHERS`` is an owner too."""
        with self.journal.lock:
            self.journal.count()
            wanted = {
                number: account
                for number, account in enumerate(self._numbered)
                if owner in (None, account.owner) and line in (None, account.line)
            }
            changes = [change for change in self.journal.changes if change[1] in wanted]
        return tuple(wanted[change[1]].event(change) for change in changes)

    def timeline(self, line: LineKind) -> tuple[tuple[int, int], ...]:
        """(ns, physical bytes of the line on the device) after each change that the ring still has, oldest first.

        The last one is what the line holds now; FOREIGN counts what others hold.
        """
        with self.journal.lock:
            self.journal.count()
            drawn = [*self._on_device(), self._others]
            numbers = {account.number for account in drawn if account.line is line}
            held = sum(account._physical_bytes for account in drawn if account.line is line)
            changes = [change for change in self.journal.changes if change[1] in numbers]
        points = []
        # Backwards from what is known now: what the ring has lost need not be known.
        for at_ns, _, delta, _, _ in reversed(changes):
            points.append((at_ns, held))
            held -= delta
        return tuple(reversed(points))

    def snapshot(self) -> Snapshot:
        """The ledger now. ``own``, ``free`` and ``foreign`` are as of the last reading: ``sample`` one just before."""
        with self.journal.lock:
            self.journal.count()
            reading = self._reading
            return Snapshot(
                phase=self.journal.phase_name,
                entries=tuple(self._entry(account) for account in self._numbered[1:]),
                own=reading.own_bytes if reading else None,
                own_source=reading.own_source if reading else "unread",
                foreign=self._others._physical_bytes,
                foreign_low=self._foreign_low,
                foreign_high=self._others._high_water_bytes if reading else None,
                free=reading.free_bytes if reading else self.total_bytes - self._accounted(),
                free_low=self._free_low,
                unattributed=self._remainder(),
                host=self._on_host(),
                first_uses=tuple(self.journal.first_uses.values()),
            )

    def audit(self) -> tuple[AuditRow, ...]:
        """Planned against actual for every line that is in the plan or holds something; the remainder comes last.

        A line counts what was asked for; what whole pages add to it is the line ROUNDING, there as in the plan.
        """
        with self.journal.lock:
            self.journal.count()
            known = {*self._planned, *(account.line for account in self._on_device() if account._changes())}
            if self._level(LineKind.ROUNDING).bytes:
                known.add(LineKind.ROUNDING)
            lines = [kind for kind in LineKind if kind in known and kind is not LineKind.UNATTRIBUTED]
            return (*(self._audit_row(kind) for kind in lines), self._audit_remainder())

    def _audit_row(self, kind: LineKind) -> AuditRow:
        level, others = self._level(kind), self._others if kind is LineKind.FOREIGN else None
        return AuditRow(
            line=kind,
            planned_bytes=self._planned.get(kind, 0),
            actual_bytes=level.bytes + (others._physical_bytes if others else 0),
            high_water_bytes=level.high + (others._high_water_bytes if others else 0),
        )

    def _audit_remainder(self) -> AuditRow:
        return AuditRow(
            line=LineKind.UNATTRIBUTED,
            planned_bytes=self._planned.get(LineKind.UNATTRIBUTED, 0),
            actual_bytes=self._remainder(),
            high_water_bytes=self._unattributed_high,
        )

    def _level(self, kind: LineKind) -> Level:
        level = self._levels.get(kind, Level())
        if kind is not LineKind.ROUNDING:
            return level
        added = sum(account._physical_bytes - account._requested_bytes for account in self._on_device())
        return Level(bytes=level.bytes + added, high=level.high + added)

    def _entry(self, account: Account) -> LedgerEntry:
        planned = self._planned.get(account.line) if account._level is not self._beside else None
        return account.entry(device=self.device, planned_bytes=planned)

    # Below: called with the lock held and everything counted. Nothing more is counted in between, so that all that is
    # told together is of one moment.

    def _accounted(self) -> int:
        return sum(account._physical_bytes for account in self._on_device())

    def _on_host(self) -> int:
        return sum(account._physical_bytes for account in self._numbered if account._level is self._beside)

    def _on_device(self) -> Iterator[Account]:
        # A copy: a finaliser may open an account between two of them.
        return (account for account in self._numbered[1:] if account._level is not self._beside)

    def _remainder(self) -> int | None:
        if self._reading is None or self._reading.own_bytes is None:
            return None
        return self._reading.own_bytes - self._accounted()

    def _see(self, reading: Reading) -> None:
        """What others hold and what is free, at their least and most."""
        foreign, free = self._foreign(reading), reading.free_bytes
        if foreign != self._others._physical_bytes:
            self._others.sampled(foreign)
        self._foreign_low = foreign if self._foreign_low is None else min(foreign, self._foreign_low)
        self._free_low = free if self._free_low is None else min(free, self._free_low)

    def _foreign(self, reading: Reading) -> int:
        own = reading.own_bytes if reading.own_bytes is not None else self._accounted()
        return max(0, reading.total_bytes - reading.free_bytes - own)
