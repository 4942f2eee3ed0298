"""The heaps of the shim, driven as torch drives them: over real bytes, against a naive model, and from many threads."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from shim_fixture import BASE, PAGE, Torch, shim_or_skip

from tonnage.buffers import Device, Stream, VaArena
from tonnage.buffers.shim_heaps import SegmentChange
from tonnage.device.host import HostDriver
from tonnage.errors import BufferInUse, ResourceError
from tonnage.ledger import Ledger
from tonnage.terms import LineKind

ALLOCATED, FREED, REFUSED, UNKNOWN = SegmentChange


@pytest.fixture
def shim(tmp_path_factory):
    return shim_or_skip()


@pytest.fixture
def heap(shim):
    heap = shim.open_heap(address=BASE, limit_bytes=8 * PAGE, align_bytes=PAGE, device=0)
    yield heap
    for segment in heap.segments()[0]:
        Torch(heap).free(segment.address)
    heap.close()


def test_segments_are_carved_from_the_front_in_whole_alignments(heap) -> None:
    torch = Torch(heap)
    before = time.monotonic_ns()
    assert [torch.alloc(size, stream=7) for size in (1, PAGE, PAGE + 1)] == [BASE, BASE + PAGE, BASE + 2 * PAGE]
    events, state = heap.drain()
    assert [(event.num_bytes, event.asked_bytes, event.stream) for event in events] == [
        (PAGE, 1, 7),
        (PAGE, PAGE, 7),
        (2 * PAGE, PAGE + 1, 7),
    ]
    assert [event.sequence for event in events] == [0, 1, 2]
    assert before <= events[0].at_ns <= events[2].at_ns <= time.monotonic_ns()
    assert (state.live_bytes, state.high_bytes, state.top_bytes) == (4 * PAGE, 4 * PAGE, 4 * PAGE)
    assert (state.largest_hole_bytes, state.num_segments, state.next_sequence) == (4 * PAGE, 3, 3)
    assert heap.drain()[0] == []


def test_holes_are_joined_and_the_first_that_fits_is_taken(heap) -> None:
    torch = Torch(heap)
    places = [torch.alloc(PAGE) for _ in range(8)]
    assert torch.alloc(1) == 0
    for index in (5, 1, 3, 2):
        torch.free(places[index])
    assert heap.state().largest_hole_bytes == 3 * PAGE
    assert torch.alloc(2 * PAGE) == places[1]
    assert torch.alloc(PAGE) == places[3]
    assert torch.alloc(2 * PAGE) == 0
    assert (heap.state().num_refused, heap.state().high_bytes) == (2, 8 * PAGE)


@pytest.mark.parametrize("size", [0, -1, -(2**63), 8 * PAGE + 1, 2**63 - 1])
def test_a_size_that_cannot_be_is_refused(heap, size: int) -> None:
    assert Torch(heap).alloc(size) == 0
    assert [event.change for event in heap.drain()[0]] == [REFUSED]


def test_another_device_gets_nothing_from_this_heap(heap) -> None:
    assert Torch(heap).alloc(PAGE, device=1) == 0
    assert heap.state().num_refused == 1


def test_a_free_of_something_unknown_is_counted_and_does_no_harm(heap) -> None:
    torch = Torch(heap)
    kept = torch.alloc(2 * PAGE)
    for address in (kept + PAGE, kept - 1, 12345, 2**64 - 1):
        torch.free(address)
    torch.free(0)  # null is nobody's mistake
    state = heap.state()
    assert (state.num_unknown_frees, state.live_bytes, state.num_freed) == (4, 2 * PAGE, 0)
    torch.free(kept)
    torch.free(kept)
    assert (heap.state().num_unknown_frees, heap.state().live_bytes) == (5, 0)
    assert [event.change for event in heap.drain()[0]] == [ALLOCATED, *[UNKNOWN] * 4, FREED, UNKNOWN]


def test_the_limit_moves_but_not_below_a_segment(heap) -> None:
    torch = Torch(heap)
    first, second = torch.alloc(PAGE), torch.alloc(PAGE)
    torch.free(first)
    with pytest.raises(BufferInUse, match="its last segment ends later"):
        heap.set_limit(PAGE)
    heap.set_limit(2 * PAGE)
    assert torch.alloc(2 * PAGE) == 0
    heap.set_limit(16 * PAGE)
    assert torch.alloc(14 * PAGE) == second + PAGE
    for wrong in (16 * PAGE + 1, 2**64 - PAGE):
        with pytest.raises(ValueError, match="cannot end"):
            heap.set_limit(wrong)


@pytest.mark.parametrize(
    "change", [{"address": BASE + 1}, {"limit_bytes": PAGE + 1}, {"address": 0}, {"align_bytes": 0}]
)
def test_a_range_that_is_not_aligned_is_refused(shim, change: dict[str, int]) -> None:
    arguments = {"address": BASE, "limit_bytes": PAGE, "align_bytes": PAGE, "device": 0, **change}
    with pytest.raises(ValueError, match="multiples of"):
        shim.open_heap(**arguments)


def test_heaps_are_numbered_apart_and_run_out(shim) -> None:
    heaps = []
    refusal = ""
    while not refusal:
        try:
            heaps.append(shim.open_heap(address=BASE, limit_bytes=PAGE, align_bytes=PAGE, device=0))
        except ResourceError as error:
            refusal = str(error)
    assert refusal.startswith("all 16 heaps of the shim are open")
    assert 1 < len({heap.number for heap in heaps}) == len(heaps) <= 16
    Torch(heaps[0]).alloc(PAGE)
    assert Torch(heaps[-1]).alloc(PAGE) == BASE
    with pytest.raises(BufferInUse, match="1 segments are alive"):
        heaps[0].close()
    for heap in (heaps[0], heaps[-1]):
        Torch(heap).free(BASE)
    for heap in heaps:
        heap.close()
        heap.close()


def test_a_closed_heap_refuses_and_its_number_starts_afresh(shim) -> None:
    heap = shim.open_heap(address=BASE, limit_bytes=PAGE, align_bytes=PAGE, device=0)
    torch = Torch(heap)
    torch.free(torch.alloc(1))
    heap.close()
    assert torch.alloc(1) == 0
    again = shim.open_heap(address=2 * BASE, limit_bytes=PAGE, align_bytes=PAGE, device=0)
    heap.close()  # the old handle no longer reaches it
    assert (again.number, again.state().num_allocated, again.drain()[0]) == (heap.number, 0, [])
    assert Torch(again).alloc(1) == 2 * BASE
    Torch(again).free(2 * BASE)
    again.close()


def test_lost_events_are_counted_and_the_totals_stay_exact(heap) -> None:
    torch, num_events = Torch(heap), heap.shim.library.tonnage_num_events()
    kept = torch.alloc(PAGE)
    for _ in range(num_events):
        torch.free(torch.alloc(2 * PAGE))
    events, state = heap.drain()
    assert len(events) == num_events
    assert events[0].sequence == state.num_lost == 1 + num_events
    assert (state.num_allocated, state.num_freed, state.live_bytes) == (1 + num_events, num_events, PAGE)
    segments, at = heap.segments()
    assert [(segment.address, segment.sequence) for segment in segments] == [(kept, 0)]
    assert at == state


def test_the_table_of_segments_is_bounded(shim) -> None:
    most = shim.library.tonnage_max_segments()
    heap = shim.open_heap(address=BASE, limit_bytes=(most + 1) * PAGE, align_bytes=PAGE, device=0)
    torch = Torch(heap)
    places = [torch.alloc(PAGE) for _ in range(most + 1)]
    assert places[-1] == 0
    assert places[:-1] == [BASE + index * PAGE for index in range(most)]
    torch.free(places[5])
    assert torch.alloc(PAGE) == places[5]
    assert len(heap.segments()[0]) == heap.state().num_segments == most
    for place in places[:-1]:
        torch.free(place)
    assert heap.state().live_bytes == 0
    heap.close()


def test_threads_never_share_a_byte_and_the_totals_are_exact(shim) -> None:
    """Each writes its own pattern over what it got, and looks again before it gives it back."""
    page = 2**16
    driver = HostDriver(32 * page, page_bytes=page)
    arena = VaArena(
        Stream(Device(driver)), ledger=Ledger(0, 32 * page), owner="t", line=LineKind.TRANSIENT, reserve_bytes=32 * page
    )
    arena.commit(32 * page)
    heap = shim.open_heap(address=arena.address, limit_bytes=32 * page, align_bytes=4096, device=0)
    spoiled: list[str] = []
    counts = [[0, 0], [0, 0], [0, 0]]

    def hammer(which: int) -> None:
        torch, draw, live = Torch(heap), random.Random(which), {}
        pattern = bytes([65 + which])
        for _ in range(3000):
            if live and (draw.random() < 0.5 or len(live) > 8):
                address = draw.choice(list(live))
                size = live.pop(address)
                if ctypes.string_at(address, size) != pattern * size:
                    spoiled.append(f"thread {which} at {address:#x}")
                torch.free(address)
                counts[which][1] += 1
            else:
                size = draw.randrange(1, 3 * 4096)
                if address := torch.alloc(size, stream=which):
                    ctypes.memset(address, pattern[0], size)
                    live[address] = size
                    counts[which][0] += 1
        for address in live:
            torch.free(address)
            counts[which][1] += 1

    seen: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            events, state = heap.drain()
            seen.append(len(events))
            assert state.live_bytes <= 32 * page

    threads = [threading.Thread(target=hammer, args=(which,)) for which in range(3)]
    reader = threading.Thread(target=read)
    for thread in (*threads, reader):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    reader.join()
    left, state = heap.drain()
    assert spoiled == []
    assert state.num_allocated == sum(count[0] for count in counts)
    assert state.num_freed == sum(count[1] for count in counts)
    assert (state.live_bytes, state.num_segments, state.num_unknown_frees) == (0, 0, 0)
    assert sum(seen) + len(left) + state.num_lost == state.next_sequence
    heap.close()
    arena.close()
    assert driver.close() == ()


class HeapMachine(RuleBasedStateMachine):
    """The heap against a model that knows every unit by its owner and looks for room one unit after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.heap = shim_or_skip().open_heap(address=BASE, limit_bytes=12 * PAGE, align_bytes=PAGE, device=0)
        self.torch = Torch(self.heap)
        self.units: list[int] = [0] * 12  # the number of the segment in each unit, 0 where it is free
        self.live: dict[int, tuple[int, int]] = {}  # address -> number, size asked for
        self.num = self.high = self.num_freed = self.num_refused = self.num_unknown = 0
        self.expected: list[tuple[SegmentChange, int, int]] = []

    def first_fit(self, units: int) -> int | None:
        for start in range(len(self.units) - units + 1):
            if not any(self.units[start : start + units]):
                return start
        return None

    @rule(size=st.integers(0, 5 * PAGE), stream=st.integers(0, 3))
    def allocate(self, size: int, stream: int) -> None:
        units = -(-size // PAGE)
        start = self.first_fit(units) if size else None
        address = self.torch.alloc(size, stream=stream)
        if start is None:
            self.num_refused += 1
            assert address == 0
        else:
            self.num += 1
            self.units[start : start + units] = [self.num] * units
            self.live[address] = (self.num, size)
            assert address == BASE + start * PAGE
        self.high = max(self.high, sum(map(bool, self.units)))
        self.expected.append((ALLOCATED if address else REFUSED, address, size))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data) -> None:
        address = data.draw(st.sampled_from(sorted(self.live)))
        number, size = self.live.pop(address)
        self.units = [0 if unit == number else unit for unit in self.units]
        self.num_freed += 1
        self.torch.free(address)
        self.expected.append((FREED, address, size))

    @rule(offset=st.integers(1, 20 * PAGE))
    def free_something_else(self, offset: int) -> None:
        if BASE + offset not in self.live:
            self.num_unknown += 1
            self.torch.free(BASE + offset, size=3)
            self.expected.append((UNKNOWN, BASE + offset, 3))

    @rule(units=st.integers(0, 16))
    def move_the_limit(self, units: int) -> None:
        if any(self.units[units:]):
            with pytest.raises(BufferInUse):
                self.heap.set_limit(units * PAGE)
        else:
            self.heap.set_limit(units * PAGE)
            self.units = (self.units + [0] * 16)[:units]

    @rule()
    def drain(self) -> None:
        events, _ = self.heap.drain()
        assert [(event.change, event.address, event.asked_bytes) for event in events] == self.expected
        self.expected.clear()

    @invariant()
    def the_figures_agree(self) -> None:
        state = self.heap.state()
        runs = "".join("x" if unit else " " for unit in self.units).split("x")
        used = sum(map(bool, self.units))
        top = max((index + 1 for index, unit in enumerate(self.units) if unit), default=0)
        assert (state.live_bytes, state.high_bytes, state.top_bytes) == (used * PAGE, self.high * PAGE, top * PAGE)
        assert state.limit_bytes == len(self.units) * PAGE
        assert state.largest_hole_bytes == max(map(len, runs)) * PAGE
        assert (state.num_segments, state.num_allocated, state.num_freed) == (len(self.live), self.num, self.num_freed)
        assert (state.num_refused, state.num_unknown_frees, state.num_lost) == (self.num_refused, self.num_unknown, 0)
        segments, at = self.heap.segments()
        assert replace(at) == state
        assert [(segment.address, segment.asked_bytes) for segment in segments] == [
            (address, self.live[address][1]) for address in sorted(self.live)
        ]

    def teardown(self) -> None:
        for address in self.live:
            self.torch.free(address)
        self.heap.close()


TestHeapMachine = HeapMachine.TestCase
TestHeapMachine.settings = settings(max_examples=50, stateful_step_count=30)
