"""Any driver, with a watch over what would kill a real device's context or corrupt its memory.

A kernel that runs while its memory is unmapped, freed or handed out again faults at some later moment, or never, and
then somewhere else. Here it is an error at the call that is to blame, with the work it harms by name.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from tonnage.device.copies import clash, copies
from tonnage.device.decorator import Call, DriverDecorator
from tonnage.device.driver import Driver
from tonnage.device.hazardcapture import Capture
from tonnage.device.hazardclock import HazardClock, Span
from tonnage.device.hazardplaces import Allocated, HazardPlaces, Mapped
from tonnage.errors import DeviceLost, DriverError
from tonnage.units import round_up

#: What fresh memory reads, so that nobody relies on zeros; what freed memory reads; what lies behind an allocation.
FRESH, FREED, RED = 0xA5, 0xDD, 0xFD
#: Bytes: allocations are padded to this, as pools do themselves, and the padding is the red zone.
PADDING = 512

#: Refused by a device while any of its streams is being captured, or quietly wrong then.
_NOT_IN_CAPTURE = frozenset(
    ("map", "unmap", "set_access", "va_free", "mem_alloc", "mem_free", "managed_alloc", "host_alloc", "host_free",
     "pool_trim", "pool_destroy", "device_sync")
)  # fmt: skip


class HazardDriver(DriverDecorator):
    """Copies and fills say themselves what they touch; ``launch`` and ``work`` say it of kernels.

    A hazard raises ``DeviceLost``, and so does every later call. With ``strict=False`` it is only noted in
    ``hazards``, and what must raise is left to the wrapped driver. ``reservation_hazard``: editing any page of a
    reservation is a hazard while work touches any other page of it. ``poison``: fresh memory is filled with FRESH,
    freed memory with FREED, and the red zones behind allocations are checked when these are freed.
    """

    hazards: list[str]
    strict: bool
    reservation_hazard: bool
    poison: bool
    lost: DeviceLost | None

    def __init__(
        self, driver: Driver, *, strict: bool = True, reservation_hazard: bool = False, poison: bool = True
    ) -> None:
        super().__init__(driver)
        self.strict, self.reservation_hazard, self.poison = strict, reservation_hazard, poison
        self.hazards, self.lost = [], None
        self._lock = threading.RLock()
        self._num_calls = 0
        self._clock = HazardClock()
        self._places = HazardPlaces(self._is_still_ours)
        self._fresh: set[int] = set()  # handles that were never accessible
        self._captures: dict[int, Capture] = {}  # by stream
        self._captured_events: dict[int, Capture] = {}

    # what tests and kernels say

    def launch(
        self, stream: int, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), what: str = "a kernel"
    ) -> None:
        """A kernel is now queued on ``stream`` that touches these (address, size), or becomes part of the graph."""
        with self._lock:
            self._require_alive("launch")
            self._queue("launch", stream, what, tuple(reads), tuple(writes), nobodys_is_fine=False)

    @contextmanager
    def work(
        self, stream: int, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), what: str = "kernels"
    ) -> Iterator[None]:
        """Kernels are queued on ``stream`` all the while: nothing that is waited for inside is after them."""
        spans = tuple(reads), tuple(writes)
        with self._lock:
            self._require_alive("work")
            self._queue("work", stream, what, *spans, nobodys_is_fine=False)
            held = self._clock.queue(stream, what, *spans, self._num_calls)
            self._clock.hold(held)
        try:
            yield
        finally:
            with self._lock:
                self._clock.let_go(held)

    @contextmanager
    def capturing(self, stream: int, *, what: str = "a graph") -> Iterator[Capture]:
        """What is queued on ``stream`` inside becomes part of the capture and runs in ``replay`` alone."""
        capture = Capture(what, self.wrapped)
        with self._lock:
            self._require_alive("capture")
            self._captures[stream] = capture
        try:
            yield capture
        finally:
            with self._lock:
                self._captures = {one: found for one, found in self._captures.items() if found is not capture}

    def replay(self, capture: Capture, *, stream: int) -> None:
        """All that was captured is queued on ``stream``, over the addresses it had then."""
        with self._lock:
            self._require_alive("replay")
            for what, reads, writes in capture.works:
                told = f"{what} of {capture.what}"
                self._queue("replay", stream, told, reads, writes, nobodys_is_fine=False)
            capture.run(stream)

    def adopt(self, addr: int, size: int) -> None:
        """Kernels may touch this memory although it was not allocated here (torch's, say)."""
        with self._lock:
            self._places.adopted.add(addr, size, None)

    def disown(self, addr: int) -> None:
        with self._lock:
            self._places.adopted.remove(addr)

    def blocking(self, stream: int) -> None:
        """``stream`` and stream 0 wait for each other: it was made without the non-blocking flag."""
        self._clock.blocking.add(stream)

    # the seam

    def _around(self, call: str) -> Call | None:
        ours = getattr(type(self), f"_{call}", None)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._num_calls += 1
                self._require_alive(call)
                if call in _NOT_IN_CAPTURE and self._captures:
                    stream, capture = next(iter(self._captures.items()))
                    self._hazard(call, "CAPTURE", f"{capture.what} is being captured on stream {stream:#x}")
                return ours(self, *args, **kwargs) if ours else getattr(self.wrapped, call)(*args, **kwargs)

        return watched

    def _va_reserve(self, size: int, *, align: int) -> int:
        addr = self.wrapped.va_reserve(size, align=align)
        self._places.reserve(addr, size)
        return addr

    def _va_free(self, addr: int, size: int) -> None:
        self._require_idle("va_free", addr, size)
        self.wrapped.va_free(addr, size)
        self._places.reserved.remove(addr)

    def _phys_create(self, size: int, *, exportable: bool = False) -> int:
        handle = self.wrapped.phys_create(size, exportable=exportable)
        self._fresh.add(handle)
        return handle

    def _phys_release(self, handle: int) -> None:
        self.wrapped.phys_release(handle)  # what is mapped stays alive, on a device too
        if not any(one.value.handle == handle for one in self._places.mapped):
            self._fresh.discard(handle)

    def _map(self, addr: int, size: int, handle: int) -> None:
        self._require_quiet("map", addr, size)
        self.wrapped.map(addr, size, handle)
        self._places.mapped.add(addr, size, Mapped(handle))

    def _unmap(self, addr: int, size: int) -> None:
        self._require_idle("unmap", addr, size)
        self._require_quiet("unmap", addr, size)
        self.wrapped.unmap(addr, size)
        self._clock.forget_span((addr, size))
        for one in self._places.mapped.overlapping(addr, size):
            self._places.mapped.remove(one.start)

    def _set_access(self, addr: int, size: int, *, peers: tuple[int, ...] = ()) -> None:
        self._require_idle("set_access", addr, size)
        self._require_quiet("set_access", addr, size)
        self.wrapped.set_access(addr, size, peers=peers)
        for one in self._places.mapped.overlapping(addr, size):
            one.value.accessible = True
            if one.value.handle in self._fresh:
                self._fresh.discard(one.value.handle)
                self._paint(one.start, FRESH, one.size, stream=0, wait=True)

    def _pool_alloc(self, pool: int, size: int, *, stream: int) -> int:
        if capture := self._captures.get(stream):
            self._hazard("pool_alloc", "CAPTURE", f"{capture.what} is being captured on stream {stream:#x}")
        addr = self.wrapped.pool_alloc(pool, _padded(size), stream=stream)
        return self._allocated("pool_alloc", addr, size, stream=stream)

    def _pool_free(self, addr: int, *, stream: int) -> None:
        found = self._places.allocated.get(addr)
        if found is not None:
            # The free is work of its stream: what comes before it there may still run, anything else must be done.
            span = (addr, found.size)
            if work := self._clock.unordered(stream, (), (span,)):
                told = f"{found.size:,} bytes at {addr:#x}, freed on stream {stream:#x}, which does not wait for {work}"
                self._hazard("pool_free", "IN_USE", told)
            self._check_red_zone("pool_free", addr, stream=stream)
            self._paint(addr, FREED, found.size, stream=stream)
        self.wrapped.pool_free(addr, stream=stream)
        if found is not None:
            self._places.free(addr, "pool_free", remember=True)
            self._clock.forget_span((addr, found.size))  # who gets it next comes after: the pool sees to that

    def _mem_alloc(self, size: int) -> int:
        return self._allocated("mem_alloc", self.wrapped.mem_alloc(_padded(size)), size)

    def _managed_alloc(self, size: int) -> int:
        return self._allocated("managed_alloc", self.wrapped.managed_alloc(_padded(size)), size)

    def _host_alloc(self, size: int, *, flags: int) -> int:
        return self._allocated("host_alloc", self.wrapped.host_alloc(_padded(size), flags=flags), size)

    def _mem_free(self, addr: int) -> None:
        self._free("mem_free", addr, remember=True)

    def _host_free(self, addr: int) -> None:
        self._free("host_free", addr, remember=False)  # given back to the process, which may use the place at once

    def _copy(self, dst: int, src: int, size: int, *, stream: int) -> None:
        what = f"a copy of {size:,} bytes from {src:#x} to {dst:#x}"
        capture = self._queue("copy", stream, what, ((src, size),), ((dst, size),), nobodys_is_fine=True)
        self._do(capture, "copy", (dst, src, size), stream)

    def _copy_many(self, dsts: Sequence[int], srcs: Sequence[int], sizes: Sequence[int], *, stream: int) -> None:
        batch = copies(dsts, srcs, sizes)
        what = f"a batch of {len(batch)} copies" + (f" from {batch[0][1]:#x} to {batch[0][0]:#x} on" if batch else "")
        if (at := clash(batch)) is not None:
            self._hazard("copy_many", "RACE", f"{what} has no order inside, and writes what it touches at {at:#x}")
        reads = tuple((src, size) for _, src, size in batch)
        writes = tuple((dst, size) for dst, _, size in batch)
        capture = self._queue("copy_many", stream, what, reads, writes, nobodys_is_fine=True)
        self._do(capture, "copy_many", (dsts, srcs, sizes), stream)

    def _fill(self, dst: int, byte: int, size: int, *, stream: int) -> None:
        what = f"a fill of {size:,} bytes at {dst:#x}"
        capture = self._queue("fill", stream, what, (), ((dst, size),), nobodys_is_fine=True)
        self._do(capture, "fill", (dst, byte, size), stream)

    def _stream_capturing(self, stream: int) -> bool:
        return self.wrapped.stream_capturing(stream) or stream in self._captures

    def _stream_sync(self, stream: int) -> None:
        if capture := self._captures.get(stream):
            self._hazard("stream_sync", "CAPTURE", f"{capture.what} is being captured on stream {stream:#x}")
        self.wrapped.stream_sync(stream)
        self._clock.host_waited_for_stream(stream)

    def _stream_wait(self, stream: int, event: int) -> None:
        self.wrapped.stream_wait(stream, event)
        if event in self._captured_events:
            self._captures[stream] = self._captured_events[event]  # a captured event draws its waiter in
        else:
            self._clock.wait(stream, event)

    def _event_record(self, event: int, *, stream: int) -> None:
        self.wrapped.event_record(event, stream=stream)
        self._captured_events.pop(event, None)
        if capture := self._captures.get(stream):
            self._captured_events[event] = capture
        else:
            self._clock.record(event, stream)

    def _event_destroy(self, event: int) -> None:
        self.wrapped.event_destroy(event)
        self._captured_events.pop(event, None)
        self._clock.forget_event(event)

    def _event_done(self, event: int) -> bool:
        done = self.wrapped.event_done(event)
        if done:
            self._clock.host_waited_for_event(event)
        return done

    def _event_sync(self, event: int) -> None:
        self.wrapped.event_sync(event)
        self._clock.host_waited_for_event(event)

    def _device_sync(self) -> None:
        self.wrapped.device_sync()
        self._clock.host_waited_for_all()

    # what is checked

    def _queue(
        self,
        call: str,
        stream: int,
        what: str,
        reads: tuple[Span, ...],
        writes: tuple[Span, ...],
        *,
        nobodys_is_fine: bool,
    ) -> Capture | None:
        """Check one piece of work and take it as in flight; when its stream is captured, only note it there."""
        for span in reads + writes:
            if told := self._places.fault(span, nobodys_is_fine=nobodys_is_fine):
                self._hazard(call, "ILLEGAL_ADDRESS", f"{what} on stream {stream:#x}: {told}")
        if capture := self._captures.get(stream):
            capture.works.append((what, reads, writes))
            return capture
        if other := self._clock.unordered(stream, reads, writes):
            self._hazard(call, "RACE", f"{what} on stream {stream:#x} does not wait for {other}, over the same bytes")
        self._clock.queue(stream, what, reads, writes, self._num_calls)
        return None

    def _do(self, capture: Capture | None, call: str, args: tuple[Any, ...], stream: int) -> None:
        if capture is not None:
            return capture.take(call, args, stream)
        try:
            getattr(self.wrapped, call)(*args, stream=stream)
        except DriverError as error:
            if "ILLEGAL_ADDRESS" in error.code:
                self._lose(call, error.code, error.detail)
            raise

    def _require_idle(self, call: str, addr: int, size: int) -> None:
        if work := self._clock.touching((addr, size)):
            self._hazard(call, "IN_USE", f"{size:,} bytes at {addr:#x} are used by {work}")

    def _require_quiet(self, call: str, addr: int, size: int) -> None:
        """Nothing in flight anywhere in the reservation, where that is asked."""
        whole = self._places.reservation_of(addr) if self.reservation_hazard else None
        if whole is not None and (work := self._clock.touching((whole.start, whole.size))):
            told = f"{size:,} bytes at {addr:#x}, in the reservation of {whole.size:,} at {whole.start:#x}"
            self._hazard(call, "RESERVATION_IN_USE", f"{told} that is used by {work}")

    def _free(self, call: str, addr: int, *, remember: bool) -> None:
        found = self._places.allocated.get(addr)
        if found is not None:
            self._require_idle(call, addr, found.size)
            self._check_red_zone(call, addr, stream=0)
            self._paint(addr, FREED, found.size, stream=0, wait=True)
        getattr(self.wrapped, call)(addr)
        if found is not None:
            self._places.free(addr, call, remember=remember)
            self._clock.forget_span((addr, found.size))  # told above, if it was one

    # what is painted

    def _allocated(self, call: str, addr: int, size: int, *, stream: int = 0) -> int:
        padded = _padded(size)
        self._places.allocate(addr, Allocated(call, size, padded))
        self._paint(addr, FRESH, size, stream=stream)
        self._paint(addr + size, RED, padded - size, stream=stream, wait=call != "pool_alloc")
        return addr

    def _paint(self, addr: int, byte: int, size: int, *, stream: int, wait: bool = False) -> None:
        """``wait``: the memory may be used on any stream as soon as the call returns."""
        if not self.poison or stream in self._captures:
            return
        if size:
            self.wrapped.fill(addr, byte, size, stream=stream)
        if wait:
            self.wrapped.stream_sync(stream)

    def _check_red_zone(self, call: str, addr: int, *, stream: int) -> None:
        found = self._places.allocated.get(addr)
        if not self.poison or found is None or stream in self._captures or found.value.padded == found.value.size:
            return
        start, size = addr + found.value.size, found.value.padded - found.value.size
        staging = (ctypes.c_char * size)()
        self.wrapped.copy(ctypes.addressof(staging), start, size, stream=stream)
        self.wrapped.stream_sync(stream)
        wrong = [index for index, byte in enumerate(staging.raw) if byte != RED]
        if wrong:
            told = f"{len(wrong)} bytes were written past the {found.value.size:,} that {found.value.call} gave at"
            self._hazard(call, "RED_ZONE", f"{told} {addr:#x}, from byte {found.value.size + wrong[0]:,} on")

    # what happens then

    def _hazard(self, call: str, code: str, told: str) -> None:
        self.hazards.append(f"{call}: {code}: {told}")
        if self.strict:
            self._lose(call, code, told)

    def _lose(self, call: str, code: str, told: str) -> NoReturn:
        self.lost = DeviceLost(call, code, told)
        raise self.lost

    def _require_alive(self, call: str) -> None:
        if self.lost is not None:
            raise DeviceLost(call, self.lost.code, f"the context is dead since: {self.lost}") from self.lost

    def _is_still_ours(self, addr: int, size: int) -> bool:
        """Freed memory of a simulated device goes back to the process, which may put anything there."""
        accessible = getattr(self.wrapped, "is_accessible", None)
        return accessible is None or accessible(addr, size) is not None


def _padded(size: int) -> int:
    return round_up(size, PADDING)
