"""Releasing and materialising many entries at once: all that can be refused is refused before anything is changed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from tonnage.buffers.chunk import State
from tonnage.buffers.device import Device
from tonnage.buffers.entries import Entry, Ranges
from tonnage.buffers.fences import Mark
from tonnage.buffers.ladder import relieve
from tonnage.buffers.restore import Restorer
from tonnage.buffers.stream import Stream
from tonnage.buffers.uninterrupted import uninterrupted
from tonnage.device.driver import Driver
from tonnage.errors import CannotMaterialize, DeviceLost, DriverError, DriverOOM, RangePoisoned, TonnageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """What a release gave back to the device: other processes can have it now."""

    num_chunks: int = 0
    freed_bytes: int = 0

    def __bool__(self) -> bool:
        return self.num_chunks > 0


class Wake:
    """What a materialise brought back, and the point on the device from which its contents may be used.

    ``event`` is None once that point is known to be passed: there is nothing to wait for. The event is destroyed then.
    """

    def __init__(self, driver: Driver, *, event: int | None = None, num_chunks: int = 0, num_bytes: int = 0) -> None:
        self._driver, self._lock = driver, threading.Lock()
        self.event, self.num_chunks, self.num_bytes = event, num_chunks, num_bytes

    def __repr__(self) -> str:
        return f"<Wake {self.num_chunks} chunks, {self.num_bytes:,} bytes>"

    def __bool__(self) -> bool:
        return self.num_chunks > 0

    def wait(self, stream: Stream | int) -> None:
        """What is asked of this stream (or its handle) from now on runs after the contents are back."""
        handle = stream if isinstance(stream, int) else stream.handle
        with self._lock:
            if self.event is not None:
                self._driver.stream_wait(handle, self.event)

    def sync(self) -> None:
        """Wait here until the contents are back."""
        with self._lock:
            if self.event is not None:
                self._driver.event_sync(self.event)
        self.close()

    def close(self) -> None:
        """The point is passed, or nobody asks any more. Closing again does nothing."""
        with uninterrupted, self._lock:
            event, self.event = self.event, None  # forgotten first: what cannot be destroyed now never can be
            if event is not None:
                try:
                    self._driver.event_destroy(event)
                except DeviceLost:
                    raise
                except DriverError as error:
                    logger.error("event %#x was not destroyed: %s", event, error)


class Batch:
    """Entries that one call releases or materialises, locked by the caller."""

    def __init__(self, device: Device, ranges: Ranges, entries: Iterable[Entry], *, verify: bool) -> None:
        self.device, self.driver, self.ranges = device, device.driver, ranges
        self.entries, self.verify = list(entries), verify
        self.lost: list[Entry] = []  # of this call: terminal now
        for entry in self.entries:
            entry.stream = device.fences.usable(entry.stream)  # it may have been closed since

    def release(self, drain: Callable[[], None]) -> Released:
        """Save everything, then unmap everything. What fails before the first unmap changes nothing at all.

        ``drain`` returns once nothing runs on the device, and raises where that takes too long.
        """
        awake = self._in(State.MATERIALIZED)
        if not awake:
            return Released()
        for entry in awake:
            for watcher in entry.watchers:
                watcher.require_sleepable()
        drain()  # here already: from there on no graph can be launched, so the second time is short
        with self._editing(awake, unmaps=True, drain=drain):
            self._save(awake)
            return self._give_back(awake)

    def materialize(self, *, margin_bytes: int, tags: tuple[str, ...]) -> Wake:
        """All or nothing; see ``VirtualMemory.materialize``."""
        poisoned = [entry for entry in self.entries if entry.chunk.is_terminal]
        if poisoned:
            raise RangePoisoned(f"{poisoned[0]!r} cannot come back: its release failed half way; free it first")
        asleep = self._in(State.RELEASED)
        if not asleep:
            return Wake(self.driver)
        self._preflight(asleep, margin_bytes, tags)
        try:
            with self._editing(asleep, unmaps=False, drain=_nothing):
                self._map(asleep)
                wake = self._restore(asleep)
        except BaseException as error:
            self._roll_back(asleep)
            if isinstance(error, DriverOOM):
                raise self._refused(asleep, margin_bytes, tags, detail=str(error)) from error
            raise
        for entry in asleep:
            if entry.restorer is not None:
                entry.restorer.settle(self.device.fences, stream=entry.stream)
            for watcher in entry.watchers:
                watcher.woken()
        return wake

    def _in(self, state: State) -> list[Entry]:
        return [entry for entry in self.entries if entry.chunk.state is state]

    @contextmanager
    def _editing(self, entries: Sequence[Entry], *, unmaps: bool, drain: Callable[[], None]) -> Iterator[None]:
        """No graph is launched meanwhile. What is unmapped is idle; what is mapped anew nothing can be using yet."""
        with ExitStack() as stack:
            for entry in entries:
                if size := entry.extent.padded_bytes:
                    stack.enter_context(self.ranges.editing(entry.address, size, unmaps=unmaps, drain=drain))
                    drain = _nothing  # it holds for all: the launches wait since the first
            yield

    def _edited(self, entry: Entry, *, mapped: bool) -> None:
        if not entry.tells_graphs:
            self.ranges.edited(entry.address, entry.extent.padded_bytes, mapped=mapped, owner=entry.owner)

    def _save(self, awake: Sequence[Entry]) -> None:
        """Phase A: room for all, copies of all, all done. Whatever fails, nothing is unmapped and new room is freed."""
        saving = [(entry, entry.restorer) for entry in awake if entry.restorer is not None]
        prepared: list[Restorer] = []
        try:
            for entry, restorer in saving:
                restorer.prepare(entry.extent.spans, owner=entry.owner)
                prepared.append(restorer)
            for entry, restorer in saving:
                restorer.save(stream=entry.stream)
            for stream in {entry.stream for entry, _ in saving}:
                self.driver.stream_sync(stream)
            if self.verify:
                for entry, restorer in saving:
                    restorer.verify(stream=entry.stream)
        except BaseException:
            with suppress(DriverError):  # copies may still be on their way into what is freed now
                self.driver.device_sync()
            for restorer in prepared:
                restorer.abandon()
            raise

    def _give_back(self, awake: Sequence[Entry]) -> Released:
        """Phase B: every entry is tried whatever the others do; the last failure is raised."""
        last: BaseException | None = None
        done = freed = 0
        for entry in awake:
            size = entry.extent.padded_bytes
            failure = self._release_one(entry)
            if failure is None:
                done, freed = done + 1, freed + size
            else:
                last = failure
        if last is not None:
            last.add_note(f"{done} of {len(awake)} chunks were released, {freed:,} bytes; see bad_handles()")
            raise last
        return Released(num_chunks=done, freed_bytes=freed)

    def _release_one(self, entry: Entry) -> BaseException | None:
        failure: BaseException | None = None
        try:
            entry.chunk.release()
        except BaseException as error:  # noqa: BLE001 - the others go on; the caller raises it
            logger.error("releasing %r: %s", entry, error)
            failure = error
            self.lost.append(entry)
        self._edited(entry, mapped=False)
        entry.book()
        return failure

    def _preflight(self, asleep: Sequence[Entry], margin_bytes: int, tags: tuple[str, ...]) -> None:
        """Refuse before anything is touched, once what our own caches and neighbours in this process keep is asked."""
        need_bytes = sum(entry.extent.padded_bytes for entry in asleep) + margin_bytes
        short_bytes = need_bytes - self.driver.mem_info()[0]
        if short_bytes <= 0:
            return
        told = "; ".join(relieve(self.device, short_bytes))
        if need_bytes > self.driver.mem_info()[0]:
            raise self._refused(asleep, margin_bytes, tags, detail=told)

    def _refused(
        self, asleep: Sequence[Entry], margin_bytes: int, tags: tuple[str, ...], *, detail: str
    ) -> CannotMaterialize:
        free, total = self.driver.mem_info()
        need = sum(entry.extent.padded_bytes for entry in asleep)
        margin = f" and {margin_bytes:,} to spare" if margin_bytes else ""
        return CannotMaterialize(
            size_bytes=need,
            used_bytes=total - free,
            capacity_bytes=total,
            owner=f"waking {', '.join(sorted(tags))} ({len(asleep)} chunks)",
            detail=f"need {need:,} bytes{margin}, have {free:,} free; everything still sleeps and nothing was lost: "
            f"free memory here or in the other processes of the device and try again; {detail}",
        )

    def _map(self, asleep: Sequence[Entry]) -> None:
        for entry in asleep:
            entry.chunk.materialize()
            self._edited(entry, mapped=True)

    def _restore(self, asleep: Sequence[Entry]) -> Wake:
        """Ask for every copy and every zero, and for one event behind them all."""
        for entry in asleep:
            if entry.restorer is not None:
                entry.restorer.restore(entry.extent.spans, stream=entry.stream)
            entry.zero(self.driver)
        streams = sorted({entry.stream for entry in asleep})
        event = self._event_after(streams)
        num_bytes = sum(entry.extent.padded_bytes for entry in asleep)
        wake = Wake(self.driver, event=event, num_chunks=len(asleep), num_bytes=num_bytes)
        try:
            for entry in asleep:
                entry.book()
            # Nobody need close it: it goes when the fences see that its point is passed.
            self.device.fences.after(self.device.fences.mark(streams[0]), wake.close)
        except BaseException:
            wake.close()
            raise
        return wake

    def _event_after(self, streams: Sequence[int]) -> int:
        """One event behind all that was asked of the streams."""
        made: list[int] = []
        try:
            for stream in (*streams[1:], streams[0]):
                made.append(self.driver.event_create())
                if stream == streams[0]:
                    for event in made[:-1]:
                        self.driver.stream_wait(stream, event)
                self.driver.event_record(made[-1], stream=stream)
            return made.pop()
        finally:
            Mark(self.driver, made).close()

    def _roll_back(self, asleep: Sequence[Entry]) -> None:
        """Only what this call materialised goes again; the host keeps what was saved. Never raises."""
        woken = [entry for entry in asleep if entry.chunk.is_releasable]
        with suppress(DriverError):  # copies may be on their way to pages that go now
            self.driver.device_sync()
        with ExitStack() as stack:
            try:
                stack.enter_context(self._editing(woken, unmaps=True, drain=self.driver.device_sync))
            except TonnageError:
                logger.exception("taking registrations down again")
            for entry in reversed(woken):
                self._release_one(entry)


def _nothing() -> None:
    """There is nothing to wait for."""
