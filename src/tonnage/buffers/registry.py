"""The registry of virtual memory: which entries there are, which are on their way out, and which would not go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tonnage.buffers.chunk import State
from tonnage.buffers.entries import Entry, Ranges
from tonnage.buffers.uninterrupted import uninterrupted
from tonnage.device.driver import Driver
from tonnage.errors import DeviceLost, DriverError, TonnageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Memory of ``owner`` that is still on the device. ``why``: awake, errored, waiting for a fence, or poisoned."""

    owner: str
    tag: str
    address: int
    held_bytes: int
    why: str


class Registry:
    """Entries by address. Safe to use from any thread; its lock is never held across a driver call.

    An entry is registered, then ``retire``d, and gone once ``discard`` has undone all of it. One that the driver would
    not take back is poisoned: booked and out of use until ``sweep`` gets rid of it.
    """

    def __init__(self, driver: Driver, ranges: Ranges) -> None:
        self._driver, self._ranges = driver, ranges
        self._lock = threading.RLock()  # a finaliser may free something while its thread holds it
        self._entries: dict[int, Entry] = {}
        self._retired: dict[Entry, None] = {}  # work on a stream may still use them
        self._late: dict[Entry, None] = {}  # nothing uses them, but another thread was just busy with them
        self._poisoned: dict[Entry, None] = {}
        self._bad: list[int] = []

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, address: int) -> Entry | None:
        return self._entries.get(address)

    def insert(self, entry: Entry) -> None:
        """Raises ``ValueError``, changing nothing, where the address is taken."""
        with self._lock:
            if entry.address in self._entries:
                raise ValueError(f"{self._entries[entry.address]!r} is registered already")
            self._entries[entry.address] = entry

    def forget(self, entry: Entry) -> bool:
        """Whether it was registered; now it is not."""
        with self._lock:
            found = self._entries.get(entry.address) is entry
            if found:
                del self._entries[entry.address]
            return found

    def retire(self, entry: Entry) -> bool:
        """Not registered any more, but not to be undone before the work that uses it is done; False: it was gone."""
        with self._lock:
            found = self._entries.get(entry.address) is entry
            if found:
                del self._entries[entry.address]
                self._retired[entry] = None
            return found

    @contextmanager
    def chosen(self, tags: Sequence[str]) -> Iterator[list[Entry]]:
        """The entries of these tags, locked in the order of their addresses so that no two calls block each other."""
        with self._lock:
            entries = tuple(self._entries.values())
            found = sorted((one for one in entries if one.tag in tags), key=lambda one: one.address)
        with ExitStack() as stack:
            for entry in found:
                stack.enter_context(entry.held())
            with self._lock:  # some may have gone while we waited for others
                found = [entry for entry in found if self._entries.get(entry.address) is entry]
            yield found

    def awake(self) -> list[Entry]:
        """What a graph under capture may use and nobody else tells it of."""
        with self._lock:
            entries = tuple(self._entries.values())
        return [one for one in entries if not one.tells_graphs and one.chunk.state is State.MATERIALIZED]

    def note_bad(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            self._bad += [entry.address for entry in entries]

    def take_bad(self) -> tuple[int, ...]:
        with self._lock:
            bad, self._bad = tuple(self._bad), []
        return bad

    def leftovers(self, tags: Sequence[str]) -> tuple[Leftover, ...]:
        with self._lock:
            groups = [
                ("", tuple(self._entries.values())),
                ("waiting for a fence", (*self._retired, *self._late)),
                ("poisoned", tuple(self._poisoned)),
            ]
        found = [
            Leftover(
                owner=entry.owner,
                tag=entry.tag,
                address=entry.address,
                held_bytes=entry.held_bytes,
                why=why or ("poisoned" if entry.chunk.is_terminal else str(entry.chunk.state)),
            )
            for why, entries in groups
            for entry in entries
            if (not tags or entry.tag in tags) and entry.held_bytes
        ]
        return tuple(sorted(found, key=lambda one: (-one.held_bytes, one.address)))

    @uninterrupted
    def discard(self, entry: Entry, *, raises: bool = False) -> None:
        """Undo whatever is left of an entry that is not registered any more and that no work uses.

        Every step done is remembered, so a failed one is repeated by ``sweep``; the ``DriverError`` is logged, or
        raised if ``raises``.
        """
        with entry.held():
            with self._lock:
                self._retired.pop(entry, None)
                self._late.pop(entry, None)
                self._poisoned[entry] = None
            try:
                self._undo(entry)
            except DeviceLost:
                raise
            except DriverError as error:
                logger.error("%r is out of use and leaked: %s", entry, error)
                if raises:
                    raise
                return
            if not entry.held_bytes:
                with self._lock:
                    self._poisoned.pop(entry, None)

    def discard_soon(self, entry: Entry) -> None:
        """As ``discard``, but never waits for another thread: whoever calls may hold what that thread waits for."""
        with self._lock:
            self._retired.pop(entry, None)
            self._late[entry] = None
        if entry.lock.acquire(blocking=False):
            try:
                if not entry.is_busy:  # by this very thread, in a finaliser that runs in the middle of a batch
                    self.discard(entry)
            finally:
                entry.lock.release()

    def catch_up(self) -> None:
        """Discard what was left for later."""
        for entry in tuple(self._late):
            self.discard_soon(entry)

    def sweep(self) -> None:
        """Try once more to give back what the driver would not take; raises ``DeviceLost`` alone."""
        self.catch_up()
        for entry in tuple(self._poisoned):
            self.discard(entry)

    def _undo(self, entry: Entry) -> None:
        if entry.must_drain:
            self._driver.device_sync()
        if entry.restorer is not None:
            entry.restorer.close()
        try:
            if entry.chunk.is_releasable:
                entry.chunk.release(destructing=True)
            if entry.run is not None:
                entry.run.give_back()
        finally:
            _book_leak(entry)
        if entry.reserved_bytes:
            self._driver.va_free(entry.address, entry.reserved_bytes)
            entry.reserved_bytes = 0
        if not entry.tells_graphs:
            self._ranges.forget(entry.address, entry.extent.padded_bytes)


def _book_leak(entry: Entry) -> None:
    """Memory that the driver would not take back is ours until it does, and the ledger says so."""
    try:
        entry.book()
    except TonnageError as error:  # a strict seal refuses owners it does not know; the log still tells
        logger.error("the leak of %r is not in the ledger: %s", entry, error)
