"""Who moves the bytes of blocks: inside the device, out to the host and back, each batch as one piece of stream work.

A block is a slab of fixed size, whatever group of layers it belongs to; places are given by slot numbers. Moves inside
the device run on the execution stream, in line with the kernels. Transfers to and from the host run beside it on a
stream of their own, ordered against it by events, so that no call here makes the host wait.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from tonnage.buffers.memory import Memory, require_usable
from tonnage.buffers.stream import Stream
from tonnage.device.driver import Driver
from tonnage.errors import DeviceLost, DriverError, ResourceError
from tonnage.resources.slot_runs import Ids, check_slots, require_disjoint, runs

__all__ = ["CountingMover", "DeviceMover", "HostSlots", "Ids", "Load", "Mover"]


class Load(Protocol):
    """Blocks on their way from the host."""

    @property
    def is_done(self) -> bool:
        """Whether they have come: work that is asked for from now on may read them. Never waits."""

    def wait(self) -> None:
        """Make the host wait until they have come."""


class Mover(Protocol):
    """Moves slabs of ``slab_bytes``. The slots of one call are arrays of equal length, no destination twice.

    Raises ``ResourceError`` for slots that cannot be meant, with nothing done, and what the driver raises: the
    destinations hold anything then, the sources what they held, and no work of the call is left running.
    """

    slab_bytes: int

    def move(self, src: Ids, dst: Ids) -> None:
        """Device to device on the execution stream, as one batch: no slot may be both source and destination."""

    def offload(self, slots: Ids, host_slots: Ids) -> None:
        """Device to host, after what the execution stream was asked so far. The device slots may be written again by
        what the execution stream is asked after ``before_launch``, and by later moves and loads."""

    def load(self, host_slots: Ids, slots: Ids) -> Load:
        """Host to device, after earlier offloads and what the execution stream was asked so far: the old readers of
        the slots. Nothing may touch the slots before the load is done."""

    def before_launch(self) -> None:
        """The execution stream waits for the offloads so far: their slots are about to be written again."""

    def sync(self) -> None:
        """Make the host wait for all transfers that were asked for."""

    def stats(self) -> dict[str, int]:
        """Since the start: blocks and bytes by what was done with them, ``num_batches``, the ``num_copies`` they
        took (slots that follow each other are one), and ``call_ns``, the host's time for asking."""

    def close(self) -> None:
        """Wait for transfers and give events and streams back. Closing again does nothing."""


@dataclass(slots=True)
class _Tally:
    """What a mover has done."""

    num_moved: int = 0
    num_offloaded: int = 0
    num_loaded: int = 0
    num_batches: int = 0
    num_copies: int = 0
    call_ns: int = 0

    def told(self, slab_bytes: int) -> dict[str, int]:
        sums = {f"{what}_bytes": getattr(self, f"num_{what}") * slab_bytes for what in ("moved", "offloaded", "loaded")}
        return asdict(self) | sums


class CountingMover:
    """A mover without bytes, for engines that have none and for tests. It checks what it is asked and counts it.

    With ``hold_loads`` (may be set at any time) loads are not done before ``finish_loads`` or their ``wait``.
    ``num_slots`` and ``num_host_slots`` bound the slots where they are given.
    """

    def __init__(
        self,
        slab_bytes: int,
        *,
        num_slots: int | None = None,
        num_host_slots: int | None = None,
        hold_loads: bool = False,
    ) -> None:
        self.slab_bytes, self.hold_loads = slab_bytes, hold_loads
        self._num_slots, self._num_host_slots = num_slots, num_host_slots
        self._tally = _Tally()
        self._held: list[_CountedLoad] = []
        self._num_unwaited = 0

    @property
    def num_loads(self) -> int:
        """Loads that are held back now."""
        return sum(not load.is_done for load in self._held)

    @property
    def num_unwaited(self) -> int:
        """Blocks offloaded since the last ``before_launch``."""
        return self._num_unwaited

    def move(self, src: Ids, dst: Ids) -> None:
        check_slots(src, self._num_slots, dst, self._num_slots)
        require_disjoint(src, dst)
        self._count(src, dst)
        self._tally.num_moved += src.size

    def offload(self, slots: Ids, host_slots: Ids) -> None:
        check_slots(slots, self._num_slots, host_slots, self._num_host_slots)
        self._count(slots, host_slots)
        self._tally.num_offloaded += slots.size
        self._num_unwaited += slots.size

    def load(self, host_slots: Ids, slots: Ids) -> Load:
        check_slots(host_slots, self._num_host_slots, slots, self._num_slots)
        self._count(host_slots, slots)
        self._tally.num_loaded += slots.size
        made = _CountedLoad(is_done=not (self.hold_loads and slots.size))
        if not made.is_done:
            self._held.append(made)
        return made

    def finish_loads(self, num_loads: int | None = None) -> None:
        """Let the loads that are held back be done: all of them, or the oldest ``num_loads``."""
        waiting = [load for load in self._held if not load.is_done]
        for load in waiting[:num_loads]:
            load.wait()
        self._held = [load for load in waiting if not load.is_done]

    def before_launch(self) -> None:
        self._num_unwaited = 0

    def sync(self) -> None:
        self.finish_loads()

    def stats(self) -> dict[str, int]:
        return self._tally.told(self.slab_bytes)

    def close(self) -> None:
        self.finish_loads()

    def _count(self, src: Ids, dst: Ids) -> None:
        if src.size:
            self._tally.num_batches += 1
            self._tally.num_copies += runs(src, dst)[0].size


class _CountedLoad:
    def __init__(self, *, is_done: bool) -> None:
        self.is_done = is_done

    def wait(self) -> None:
        self.is_done = True


class HostSlots(Protocol):
    """``num_slots`` slabs of host memory in a row, such as ``HostPool``."""

    @property
    def address(self) -> int: ...
    @property
    def num_slots(self) -> int: ...


class DeviceMover:
    """Moves real bytes: slot i of the device lies at ``memory.address`` + i * ``slab_bytes``, as do those of the host.

    Slots must lie within the memory's usable bytes. Without ``host_pool`` there are moves only. ``stream`` is the
    execution stream; transfers run on ``transfer_stream``, or on one that is made here. Of one thread at a time.
    """

    def __init__(
        self,
        memory: Memory,
        host_pool: HostSlots | None,
        *,
        slab_bytes: int,
        stream: Stream,
        transfer_stream: Stream | None = None,
    ) -> None:
        if slab_bytes < 1:
            raise ResourceError(f"slabs of {slab_bytes} bytes")
        self.slab_bytes = slab_bytes
        self._memory, self._host_pool, self._stream = memory, host_pool, stream
        self._driver = stream.driver
        self._own_stream = Stream.create(stream.device) if host_pool is not None and transfer_stream is None else None
        self._transfers = transfer_stream or self._own_stream
        self._offloaded: int | None = None  # recorded behind the last offload that nobody waits for yet
        self._loads: deque[_DeviceLoad] = deque()  # oldest first, which is the order in which they are done
        self._tally = _Tally()

    @property
    def num_slots(self) -> int:
        """Slots of the device that may be touched now."""
        return self._memory.usable_bytes // self.slab_bytes

    @property
    def num_host_slots(self) -> int:
        return 0 if self._host_pool is None else self._host_pool.num_slots

    @property
    def num_loads(self) -> int:
        """Loads of which nobody has seen yet that they are done."""
        return sum(not load.is_seen for load in self._loads)

    def move(self, src: Ids, dst: Ids) -> None:
        self._require_usable()
        check_slots(src, self.num_slots, dst, self.num_slots)
        require_disjoint(src, dst)
        if not src.size:
            return
        self.before_launch()  # an offload may still read what is written now
        self._copy(self._memory.address, src, self._memory.address, dst, stream=self._stream)
        self._tally.num_moved += src.size

    def offload(self, slots: Ids, host_slots: Ids) -> None:
        self._require_usable()
        check_slots(slots, self.num_slots, host_slots, self.num_host_slots)
        if not slots.size:
            return
        event = self._transfer(self._memory.address, slots, self._host_address, host_slots)
        before, self._offloaded = self._offloaded, event  # whoever waits for the last waits for all
        self._tally.num_offloaded += slots.size
        if before is not None:
            self._driver.event_destroy(before)

    def load(self, host_slots: Ids, slots: Ids) -> Load:
        self._require_usable()
        check_slots(host_slots, self.num_host_slots, slots, self.num_slots)
        self._reap()
        if not slots.size:
            return _DeviceLoad(self._driver, None)
        event = self._transfer(self._host_address, host_slots, self._memory.address, slots)
        self._loads.append(made := _DeviceLoad(self._driver, event))
        self._tally.num_loaded += slots.size
        return made

    def before_launch(self) -> None:
        if self._offloaded is None:
            return
        self._driver.stream_wait(self._stream.bare_handle, self._offloaded)
        event, self._offloaded = self._offloaded, None
        self._driver.event_destroy(event)

    def sync(self) -> None:
        """Make the host wait for all transfers that were asked for."""
        if self._transfers is not None:
            self._transfers.sync()

    def stats(self) -> dict[str, int]:
        return self._tally.told(self.slab_bytes)

    def reset_stats(self) -> None:
        """Count from here: what was moved so far was a trial."""
        self._tally = _Tally()

    def close(self) -> None:
        """As of every mover. On a lost device there is nothing to wait for and nothing to give back."""
        with suppress(DeviceLost):
            self.sync()
            self.before_launch()
            while self._loads:
                with suppress(DriverError):
                    self._loads.popleft().wait()
            if self._own_stream is not None:
                self._own_stream.close()
        self._transfers = self._own_stream = None
        self._host_pool = None

    @property
    def _host_address(self) -> int:
        assert self._host_pool is not None  # else no host slot is in range
        return self._host_pool.address

    def _require_usable(self) -> None:
        require_usable(self._memory)

    def _reap(self) -> None:
        """Events of loads that are done go back, whether or not anybody asks again."""
        while self._loads:
            with suppress(DriverError):  # whose it is asks by itself, and is told
                if not self._loads[0].is_done:
                    return
            self._loads.popleft()

    def _transfer(self, src_address: int, src: Ids, dst_address: int, dst: Ids) -> int:
        """One batch on the transfer stream behind what the execution stream was asked so far; the event behind it."""
        assert self._transfers is not None
        driver, stream = self._driver, self._transfers
        event = driver.event_create()
        try:
            self._follow()
            try:
                self._copy(src_address, src, dst_address, dst, stream=stream)
                driver.event_record(event, stream=stream.bare_handle)
            except BaseException:
                with suppress(DriverError):
                    stream.sync()  # part of it may be queued, and nobody would wait for that
                raise
        except BaseException:
            _destroy(driver, event)
            raise
        return event

    def _follow(self) -> None:
        """What the transfer stream is asked from now on comes after all that the execution stream was asked so far."""
        assert self._transfers is not None
        event = self._driver.event_create()
        try:
            self._driver.event_record(event, stream=self._stream.bare_handle)
            self._driver.stream_wait(self._transfers.bare_handle, event)
        except BaseException:
            _destroy(self._driver, event)
            raise
        self._driver.event_destroy(event)  # who waits for it already goes on waiting

    def _copy(self, src_address: int, src: Ids, dst_address: int, dst: Ids, *, stream: Stream) -> None:
        began_ns = time.perf_counter_ns()
        first_src, first_dst, lengths = (part.astype(np.int64) * self.slab_bytes for part in runs(src, dst))
        dsts, srcs = (first_dst + dst_address).tolist(), (first_src + src_address).tolist()
        self._driver.copy_many(dsts, srcs, lengths.tolist(), stream=stream.bare_handle)
        self._tally.num_batches += 1
        self._tally.num_copies += len(dsts)
        self._tally.call_ns += time.perf_counter_ns() - began_ns


class _DeviceLoad:
    """The event behind a batch, which goes back to the driver as soon as it is seen to be done."""

    def __init__(self, driver: Driver, event: int | None) -> None:
        self._driver, self._event = driver, event

    @property
    def is_seen(self) -> bool:
        return self._event is None

    @property
    def is_done(self) -> bool:
        if self._event is not None and self._driver.event_done(self._event):
            self._give_back()
        return self._event is None

    def wait(self) -> None:
        if self._event is not None:
            self._driver.event_sync(self._event)
            self._give_back()

    def _give_back(self) -> None:
        event, self._event = self._event, None
        assert event is not None
        self._driver.event_destroy(event)


def _destroy(driver: Driver, event: int) -> None:
    """For roll-backs: what is already on its way up counts, not what comes on top."""
    with suppress(DriverError):
        driver.event_destroy(event)
