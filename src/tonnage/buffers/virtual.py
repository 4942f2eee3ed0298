"""Virtual memory with tags: allocated under a tag, released and materialised by it, always at the same addresses."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tonnage.buffers.allocation import VirtualAllocation
from tonnage.buffers.backing import Backings, Retain
from tonnage.buffers.batch import Batch, Released, Wake
from tonnage.buffers.chunk import Chunk, Configurator, Creator, PageRun, State, pieces_of
from tonnage.buffers.device import Device
from tonnage.buffers.entries import Entry, Extent, FixedExtent, Ranges, Watcher
from tonnage.buffers.fences import Mark
from tonnage.buffers.memory import out_of_memory
from tonnage.buffers.registry import Leftover, Registry
from tonnage.buffers.restore import Restore, Span, restorer_for
from tonnage.buffers.scopes import ScopeConfig
from tonnage.buffers.stream import Stream
from tonnage.buffers.uninterrupted import undone_if_interrupted, uninterrupted
from tonnage.errors import (
    BufferInUse,
    DriverError,
    DriverOOM,
    DriverUnsupported,
    ForkedProcess,
    RangeReferenced,
)
from tonnage.ledger import Account
from tonnage.units import round_up


class VirtualMemory:
    """Memory of one device by address: chunks with a tag, an owner, an account and a way to restore their contents.

    retain        how much host memory stays allocated while what it backed is awake
    margin_bytes  free memory that a materialise leaves alone; 0, so that what was released can always come back
                  where nobody took it
    verify        read everything that is saved a second time and compare, before anything is unmapped

    Safe to use from any thread: every entry has its own lock, and the registry's is never held across driver calls.
    What is registered by physical page and what graphs replay over is known to ``ranges``.
    """

    def __init__(self, device: Device, *, ranges: Ranges | None = None) -> None:
        self.device, self._driver = device, device.driver
        self.backings = Backings(device.driver)
        self.margin_bytes, self.verify = 0, False
        self._ranges: Ranges = device.graphs if ranges is None else ranges
        self._registry = Registry(device.driver, self._ranges)
        self._ranges.add_source(self._registry.awake)
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<VirtualMemory {len(self._registry)} entries on {self.device!r}>"

    @property
    def retain(self) -> Retain:
        return self.backings.retain

    @retain.setter
    def retain(self, value: Retain) -> None:
        self.backings.retain = value

    @property
    def granule_bytes(self) -> int:
        """Sizes and addresses are multiples of it: of the device's page and of the host's."""
        return math.lcm(os.sysconf("SC_PAGE_SIZE"), self._driver.capabilities().page_bytes)

    # allocations

    def allocate(
        self,
        size_bytes: int,
        *,
        config: ScopeConfig,
        account: Account | None,
        owner: str,
        stream: Stream,
        zero_ranges: Sequence[Span] = (),
        peers: tuple[int, ...] = (),
    ) -> VirtualAllocation:
        """Addresses of our own with memory behind them, rounded up to granules; all or nothing.

        ``zero_ranges`` are (offset, bytes) that are zero now and after every materialise; everything else is
        undefined. ``peers`` are devices that may touch it too. Raises ``BufferOOM``, ``LedgerError`` after a strict
        seal, ``CaptureError`` during a capture, ``DriverUnsupported`` where the device has no virtual memory.
        """
        self._require_size(size_bytes)
        if not all(0 <= offset <= offset + size <= size_bytes for offset, size in zero_ranges):
            raise ValueError(f"zero ranges {list(zero_ranges)} do not lie within {size_bytes:,} bytes")
        self._start("an allocation of virtual memory")
        padded = round_up(size_bytes, self.granule_bytes)
        with undone_if_interrupted(lambda: self.free(address)):
            try:
                address = self._driver.va_reserve(padded, align=self._driver.capabilities().page_bytes)
            except DriverOOM as error:
                raise out_of_memory(error, stream, size_bytes=size_bytes, owner=owner) from error
            entry = self._entry(address, size_bytes, config, account, owner, stream, peers)
            entry.reserved_bytes = padded
            entry.zero_ranges = [(address + offset, size) for offset, size in zero_ranges]
            self._bring_up(entry, stream)
        return VirtualAllocation(self, entry, size_bytes=size_bytes)

    def map_at(
        self,
        address: int,
        size_bytes: int,
        *,
        config: ScopeConfig,
        account: Account | None,
        owner: str,
        stream: Stream,
        peers: tuple[int, ...] = (),
    ) -> VirtualAllocation:
        """As ``allocate``, at addresses that the caller has reserved and keeps: ``unmap`` before freeing them.

        ``ValueError`` unless both are multiples of ``granule_bytes``, and where something is registered already.
        """
        self._require_size(size_bytes)
        if address % self.granule_bytes or size_bytes % self.granule_bytes:
            raise ValueError(f"{size_bytes:,} bytes at {address:#x} are not whole granules of {self.granule_bytes:,}")
        self._start("a mapping")
        with undone_if_interrupted(lambda: self.unmap(address)):
            entry = self._entry(address, size_bytes, config, account, owner, stream, peers)
            self._bring_up(entry, stream)
        return VirtualAllocation(self, entry, size_bytes=size_bytes)

    def unmap(self, address: int) -> None:
        """Take back what ``map_at`` put there, once nothing uses it; the addresses stay the caller's."""
        self.free(address, sync=True)

    @uninterrupted
    def free(self, address: int, *, sync: bool = False, only: Entry | None = None) -> None:
        """Give the allocation at ``address`` back; nothing where there is none.

        Its memory goes when every stream of the device has passed this moment: on a later call, or with ``sync``
        before this one returns. What sleeps has only addresses and host memory to give back, and does so at once.
        Raises ``RangeReferenced`` while a graph or a registration holds it, ``CaptureError`` during a capture, and
        with ``sync`` the ``DriverError`` of a release that failed.
        """
        entry = self._registry.get(address)
        if entry is None or (only is not None and entry is not only):
            return
        if entry.run is None:
            raise ValueError(f"{entry!r} was registered by add: remove it")
        self._require_own_process()
        holder = self._ranges.referenced(address, entry.extent.padded_bytes)
        if holder is not None:
            raise RangeReferenced(f"{entry!r} cannot be freed: {holder}")
        mark = self._mark()
        if not self._registry.retire(entry):
            mark.close()
            return  # another thread was quicker
        if entry.is_busy:
            entry.must_drain = True  # a call in the middle of it may ask for copies after our mark
        if entry.chunk.state is State.RELEASED and not entry.is_busy:
            mark.close()
            self._registry.discard_soon(entry)
        elif sync:
            mark.wait()
            self._registry.discard(entry, raises=True)
        else:
            self.device.fences.after(mark, lambda: self._registry.discard_soon(entry))

    # entries whose memory is made elsewhere

    @uninterrupted
    def add(
        self,
        handle: int,
        chunk: Chunk[Any],
        *,
        tag: str,
        owner: str,
        extent: Extent,
        stream: Stream,
        account: Account | None = None,
        restore: Restore = Restore.NONE,
        zero_ranges: Sequence[Span] = (),
        tells_graphs: bool = False,
    ) -> None:
        """Register a chunk that is RELEASED or MATERIALIZED under ``handle``, the address that ``extent`` begins at.

        From now on it is released and materialised with its tag. An arena is one entry: its ``extent`` tells what is
        committed at the moment, and its creator brings exactly that back. Leave ``account`` out when the creator
        books by itself. ``zero_ranges`` are (address, bytes), read anew at every materialise, so a list may change
        with what is committed. ``tells_graphs``: its maker tells ``GraphRanges`` of every edit and of what a capture
        uses; else that is done here, all of it. Raises ``ValueError`` for a handle that is taken.
        """
        if chunk.state not in (State.RELEASED, State.MATERIALIZED):
            raise ValueError(f"{chunk!r} cannot be registered")
        restorer = restorer_for(restore, self._driver, self.backings)
        entry = Entry(handle, chunk, tag, owner, extent, stream.bare_handle, account, restorer)
        entry.zero_ranges, entry.tells_graphs = zero_ranges, tells_graphs
        self._registry.insert(entry)
        try:
            entry.book()
        except BaseException:
            self._registry.forget(entry)
            raise

    def add_new(
        self,
        handle: int,
        creator: Creator[Any],
        configurators: Iterable[Configurator[Any]],
        *,
        tag: str,
        owner: str,
        extent: Extent,
        stream: Stream,
        account: Account | None = None,
        restore: Restore = Restore.NONE,
        zero_ranges: Sequence[Span] = (),
    ) -> None:
        """As ``add``, with a new chunk that is materialised here. When that fails nothing is registered."""
        self._start("a materialise")
        restorer = restorer_for(restore, self._driver, self.backings)
        entry = Entry(handle, Chunk(creator, configurators), tag, owner, extent, stream.bare_handle, account, restorer)
        entry.zero_ranges = zero_ranges
        with uninterrupted:
            self._bring_up(entry, stream)

    @contextmanager
    def holding(self, handle: int) -> Iterator[None]:
        """Nobody releases or materialises what is registered under ``handle`` meanwhile; nothing where there is none.

        For a maker who also edits it by himself. Taken before ``GraphRanges.editing``, as every release does.
        """
        entry = self._registry.get(handle)
        if entry is None:
            yield
        else:
            with entry.held():
                yield

    def watch(self, handle: int, watcher: Watcher) -> bool:
        """Tell ``watcher`` before what is registered under ``handle`` sleeps and when it woke; False: there is none."""
        entry = self._registry.get(handle)
        if entry is not None:
            entry.watchers.append(watcher)
        return entry is not None

    def unwatch(self, handle: int, watcher: Watcher) -> None:
        """Tell it no more; nothing where it was not told."""
        entry = self._registry.get(handle)
        if entry is not None and watcher in entry.watchers:
            entry.watchers.remove(watcher)

    @uninterrupted
    def remove(self, handle: int) -> Chunk[Any]:
        """The chunk that ``add`` registered, now the caller's and no longer booked; an INVALID one for no such handle.

        ``ValueError`` for what ``allocate`` made: that is freed.
        """
        entry = self._registry.get(handle)
        if entry is None:
            return Chunk()
        if entry.run is not None:
            raise ValueError(f"{entry!r} was allocated here: free it")
        with entry.held():
            self._registry.forget(entry)
            if not entry.tells_graphs:
                self._ranges.forget(entry.address, entry.extent.padded_bytes)
            if entry.restorer is not None:
                entry.restorer.close()
            if entry.account is not None and any(entry.booked):
                entry.account.sub(*entry.booked)
                entry.booked = (0, 0)
        return entry.chunk

    # tags

    @uninterrupted
    def release(self, *tags: str, timeout_s: float | None = None) -> Released:
        """Give the memory of these tags back to the device and keep the addresses; what is released already stays so.

        Waits until the device is idle: nothing may be asked of it meanwhile that touches this memory. Then everything
        that is to be saved is saved; if that fails, or a registration forbids it (``RangeReferenced``), nothing has
        changed. Then everything is unmapped; if that fails for some, the rest is unmapped all the same, the failed
        are poisoned (``bad_handles``), and the last ``DriverError`` is raised. ``CaptureError`` during a capture;
        ``BufferInUse``, with nothing changed, when the streams are not idle after ``timeout_s``, and when a watcher
        says that it must not sleep.
        """
        self._start("a release")
        until = None if timeout_s is None else time.monotonic() + timeout_s

        def drain() -> None:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            if not self.device.fences.wait_idle(timeout_s=left_s):
                raise BufferInUse(f"{', '.join(tags)} stays awake: work was still running after {timeout_s} s")

        with self._batch(tags) as batch:
            return batch.release(drain)

    @uninterrupted
    def materialize(self, *tags: str) -> Wake:
        """Bring the memory of these tags back, contents included as far as they were saved. All or nothing.

        What is awake already stays so. Returns the point that consumers on other streams wait for. Raises
        ``CannotMaterialize`` when there is not enough memory now: nothing has changed and nothing is lost, the call
        may be repeated. ``RangePoisoned`` when a chunk of these tags was lost in a release; free it first.
        """
        self._start("a materialise")
        with self._batch(tags) as batch:
            return batch.materialize(margin_bytes=self.margin_bytes, tags=tags)

    def bad_handles(self) -> tuple[int, ...]:
        """Addresses whose release failed since this was last asked; they are poisoned until they are freed."""
        return self._registry.take_bad()

    def leftovers(self, *tags: str) -> tuple[Leftover, ...]:
        """What still takes memory under these tags, or under all; largest first. Empty after a release that worked."""
        return self._registry.leftovers(tags)

    @uninterrupted
    def sweep(self) -> None:
        """Try again to give back what the driver would not take. Raises ``DeviceLost`` alone."""
        self._registry.sweep()
        self.backings.sweep()

    # inside

    def _start(self, what: str) -> None:
        """What comes before every edit: our process, a device that can, no capture; and what waited is done."""
        self._require_own_process()
        capabilities = self._driver.capabilities()
        if not capabilities.vmm:
            raise DriverUnsupported("va_reserve", "NOT_SUPPORTED", capabilities.reasons.get("vmm", "no virtual memory"))
        self.device.fences.require_no_capture(what)
        self.device.fences.reap()
        self._registry.catch_up()

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"virtual memory was made in process {self._process} and cannot be used in its child {os.getpid()}: "
                "start workers with 'spawn', or open the device in the child"
            )

    def _require_size(self, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise ValueError(f"virtual memory of {size_bytes:,} bytes")

    def _entry(
        self,
        address: int,
        size_bytes: int,
        config: ScopeConfig,
        account: Account | None,
        owner: str,
        stream: Stream,
        peers: tuple[int, ...],
    ) -> Entry:
        padded = round_up(size_bytes, self.granule_bytes)
        run = PageRun(self._driver, pieces_of(address, padded), peers=peers)
        restorer = restorer_for(config.restore, self._driver, self.backings)
        extent = FixedExtent(address, size_bytes, padded)
        on = (config.stream or stream).bare_handle
        return Entry(address, Chunk(run, (run,)), config.tag, owner, extent, on, account, restorer, run)

    def _bring_up(self, entry: Entry, stream: Stream) -> None:
        """Register and materialise; when that fails nothing is left but what the driver would not take back."""
        with entry.held():
            self._registry.insert(entry)
            try:
                entry.chunk.materialize()
                entry.zero(self._driver)
                entry.book()
            except BaseException as error:
                self._registry.forget(entry)
                with suppress(DriverError):  # zeros may be on their way to pages that go now
                    self._driver.device_sync()
                self._registry.discard(entry)
                if isinstance(error, DriverOOM):
                    size = sum(size for _, size in entry.extent.spans)
                    raise out_of_memory(error, stream, size_bytes=size, owner=entry.owner) from error
                raise

    @contextmanager
    def _batch(self, tags: Sequence[str]) -> Iterator[Batch]:
        with self._registry.chosen(tags) as entries:
            batch = Batch(self.device, self._ranges, entries, verify=self.verify)
            try:
                yield batch
            finally:
                self._registry.note_bad(batch.lost)

    def _mark(self) -> Mark:
        """A mark on all streams; where there is no event to be had, one that is passed, after waiting for all."""
        try:
            return self.device.fences.mark()
        except DriverOOM:
            self._driver.device_sync()
            return Mark(self._driver, [])
