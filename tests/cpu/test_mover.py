"""Blocks on the move: the bytes arrive, each batch is one call, and nothing races, leaks or is half done."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.buffers import Device, Stream, VaArena
from tonnage.device.driver import Driver
from tonnage.device.fault import FaultDriver
from tonnage.device.hazard import HazardDriver
from tonnage.device.host import HostDriver
from tonnage.device.trace import TraceDriver
from tonnage.errors import DeviceLost, DriverError, DriverOOM, NotMaterialized, ResourceError
from tonnage.ledger import Ledger
from tonnage.resources.host_pool import HostPool
from tonnage.resources.mover import CountingMover, DeviceMover, Ids
from tonnage.resources.slot_runs import runs
from tonnage.resources.transfers import TransferBudget, measure_rate
from tonnage.terms import LineKind

PAGE = 2**12
SLAB = 1024
NUM_SLOTS, NUM_HOST_SLOTS = 16, 8


def ids(*slots: int) -> Ids:
    return np.array(slots, np.int32)


class Bench:
    """An arena of numbered slabs, a host pool and a mover between them, over a host device inside ``wrap``."""

    def __init__(self, wrap: Callable[[Driver], Driver] = lambda driver: driver, **arguments: object) -> None:
        self.host = HostDriver(64 * PAGE, page_bytes=PAGE)
        self.driver = wrap(self.host)
        self.stream = Stream.create(Device(self.driver))
        self.arena = VaArena(
            self.stream, ledger=Ledger(0, 64 * PAGE), owner="kv pool", line=LineKind.KV, reserve_bytes=16 * PAGE,
            **arguments,  # type: ignore[arg-type]
        )  # fmt: skip
        self.arena.commit(NUM_SLOTS * SLAB)
        self.pool = HostPool(self.driver, asked_bytes=NUM_HOST_SLOTS * SLAB, slab_bytes=SLAB)
        for slot in range(NUM_SLOTS):
            self.driver.fill(self.address(slot), 100 + slot, SLAB, stream=self.stream.bare_handle)
        self.stream.sync()
        self.mover = DeviceMover(self.arena, self.pool, slab_bytes=SLAB, stream=self.stream)

    def address(self, slot: int) -> int:
        return self.arena.address + slot * SLAB

    @property
    def num_events(self) -> int:
        return len(self.host._events)

    def bytes_of(self, slot: int) -> bytes:
        return ctypes.string_at(self.address(slot), SLAB)

    def host_bytes_of(self, slot: int) -> bytes:
        return ctypes.string_at(self.pool.address + slot * SLAB, SLAB)

    def close(self) -> None:
        for part in (self.mover, self.pool, self.arena, self.stream):
            part.close()
        assert self.num_events == 0
        assert self.host.close() == ()


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Over a driver that ends the device when work races."""
    made = Bench(lambda host: HazardDriver(host, poison=False))
    yield made
    if made.driver.lost is None:
        made.close()
    else:  # by a race that was meant
        made.mover.close()
        made.host.close()


def kernel(bench: Bench, *, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> None:
    """One on the execution stream that touches these slots."""
    spans = [[(bench.address(slot), SLAB) for slot in slots] for slots in (reads, writes)]
    bench.driver.launch(bench.stream.bare_handle, reads=spans[0], writes=spans[1])


# bytes and calls


STEPS = st.lists(
    st.tuples(st.sampled_from(["move", "offload", "load", "launch", "poll"]), st.integers(0, 2**31 - 1)), max_size=30
)


def drawn(kind: str, seed: int) -> tuple[Ids, Ids]:
    """Source and destination slots of one batch, 0 to 8 of them, in no order."""
    draw = np.random.default_rng(seed)
    device, host = draw.permutation(NUM_SLOTS), draw.permutation(NUM_HOST_SLOTS)
    number = int(draw.integers(0, NUM_HOST_SLOTS + 1))
    pairs = {"move": (device[8:], device[:8]), "offload": (device, host), "load": (host, device)}
    src, dst = pairs[kind]
    return src[:number].astype(np.int32), dst[:number].astype(np.int32)


@given(STEPS)
def test_any_batches_in_any_order_leave_the_bytes_where_they_belong(steps: list[tuple[str, int]]) -> None:
    """Against two lists of bytes; the driver watches that no two batches race, and counts who forgets an event."""
    bench = Bench(lambda host: HazardDriver(host, poison=False))
    counting = CountingMover(SLAB, num_slots=NUM_SLOTS, num_host_slots=NUM_HOST_SLOTS)
    device, host = [100 + slot for slot in range(NUM_SLOTS)], [0] * NUM_HOST_SLOTS
    for kind, seed in steps:
        if kind == "launch":
            bench.mover.before_launch()
            kernel(bench, writes=tuple(range(NUM_SLOTS)))
        elif kind == "poll":
            assert bench.mover.load(ids(), ids()).is_done
        else:
            src, dst = drawn(kind, seed)
            for mover in (bench.mover, counting):
                made = getattr(mover, kind)(src, dst)
                if made is not None:
                    made.wait()  # nobody may touch its slots before
            of, to = {"move": (device, device), "offload": (device, host), "load": (host, device)}[kind]
            for slot, value in zip(dst.tolist(), [of[slot] for slot in src.tolist()], strict=True):
                to[slot] = value
        assert bench.num_events <= 1  # the last offload's
    assert [bench.bytes_of(slot) for slot in range(NUM_SLOTS)] == [bytes([value]) * SLAB for value in device]
    assert [bench.host_bytes_of(slot) for slot in range(NUM_HOST_SLOTS)] == [bytes([value]) * SLAB for value in host]
    told, counted = bench.mover.stats(), counting.stats()
    assert {**told, "call_ns": 0} == counted
    assert told["moved_bytes"] == told["num_moved"] * SLAB
    bench.close()


@given(st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_runs_are_the_pairs_and_as_few_as_can_be(seed: int, number: int) -> None:
    draw = np.random.default_rng(seed)
    src, dst = (draw.permutation(60)[:number].astype(np.int32) for _ in range(2))
    if number > 10:  # a run, backwards
        src[3:9], dst[3:9] = np.arange(105, 99, -1), np.arange(205, 199, -1)
    firsts, to, lengths = runs(src, dst)
    made = {(a + i, b + i) for a, b, n in zip(firsts, to, lengths, strict=True) for i in range(n)}
    pairs = set(zip(src.tolist(), dst.tolist(), strict=True))
    assert made == pairs
    assert lengths.sum() == number
    # A pair begins a run if and only if the pair before it on both sides is not there.
    assert len(lengths) == sum((a - 1, b - 1) not in pairs for a, b in pairs)


def test_a_batch_is_one_call_and_neighbours_are_one_copy() -> None:
    bench = Bench(lambda host: TraceDriver(host, in_pages=False))
    bench.driver.log.clear()
    bench.mover.move(ids(5, 3, 4, 9), ids(12, 10, 11, 1))
    assert bench.driver.log == [
        "copy_many([va0+0x2800, va0+0x400], [va0+0xc00, va0+0x2400], [0xc00, 0x400], stream=stream1)"
    ]
    bench.driver.log.clear()
    bench.mover.offload(ids(0, 1, 2, 3), ids(4, 5, 6, 7))
    bench.mover.before_launch()
    bench.mover.before_launch()  # nothing is left to wait for
    bench.mover.load(ids(4), ids(8))
    assert [line for line in bench.driver.log if not line.startswith(("event_create", "event_destroy"))] == [
        "event_record(event1, stream=stream1)",
        "stream_wait(stream2, event1)",
        "copy_many([host0+0x1000], [va0], [0x1000], stream=stream2)",
        "event_record(event0, stream=stream2)",
        "stream_wait(stream1, event0)",
        "event_record(event3, stream=stream1)",
        "stream_wait(stream2, event3)",
        "copy_many([va0+0x2000], [host0+0x1000], [0x400], stream=stream2)",
        "event_record(event2, stream=stream2)",
    ]
    assert bench.mover.stats() | {"call_ns": 0} == {
        "num_moved": 4, "moved_bytes": 4 * SLAB, "num_offloaded": 4, "offloaded_bytes": 4 * SLAB,
        "num_loaded": 1, "loaded_bytes": SLAB, "num_batches": 3, "num_copies": 4, "call_ns": 0,
    }  # fmt: skip
    assert bench.mover.stats()["call_ns"] > 0
    bench.close()


def test_nothing_to_move_asks_the_driver_nothing() -> None:
    bench = Bench(TraceDriver)
    bench.driver.log.clear()
    bench.mover.move(ids(), ids())
    bench.mover.offload(ids(), ids())
    assert bench.mover.load(ids(), ids()).is_done
    bench.mover.before_launch()
    assert bench.driver.log == []
    bench.close()


# order


def test_a_kernel_may_overwrite_an_offloaded_slot_once_the_launch_was_announced(bench: Bench) -> None:
    kernel(bench, writes=(3,))
    bench.mover.offload(ids(3), ids(0))
    bench.mover.before_launch()
    kernel(bench, writes=(3,))


def test_without_the_announcement_it_would_race(bench: Bench) -> None:
    bench.mover.offload(ids(3), ids(0))
    kernel(bench, writes=(2,))
    with pytest.raises(DeviceLost, match="RACE"):
        kernel(bench, writes=(3,))


def test_every_offload_is_waited_for_and_not_only_the_last(bench: Bench) -> None:
    bench.mover.offload(ids(3), ids(0))
    bench.mover.offload(ids(4), ids(1))
    assert bench.num_events == 1
    bench.mover.before_launch()
    assert bench.num_events == 0
    kernel(bench, writes=(3, 4))


def test_a_move_may_take_the_place_of_what_is_still_on_its_way_out(bench: Bench) -> None:
    bench.mover.offload(ids(3), ids(0))
    bench.mover.move(ids(9), ids(3))
    bench.mover.load(ids(0), ids(9))  # and what was moved away may be overwritten: the load comes after the move
    assert bench.host_bytes_of(0) == bytes([103]) * SLAB


def test_a_load_comes_after_the_readers_of_its_slots_and_before_who_saw_it_done(bench: Bench) -> None:
    kernel(bench, reads=(5,))
    load = bench.mover.load(ids(1), ids(5))
    assert bench.num_events == 1
    assert load.is_done
    assert bench.num_events == 0
    assert load.is_done
    load.wait()
    kernel(bench, reads=(5,))


def test_who_does_not_wait_for_a_load_races(bench: Bench) -> None:
    bench.mover.load(ids(1), ids(5))
    with pytest.raises(DeviceLost, match="RACE"):
        kernel(bench, reads=(5,))


def test_a_launch_does_not_wait_for_loads(bench: Bench) -> None:
    """Only for what goes out: a request that loads is not part of the step."""
    bench.mover.offload(ids(3), ids(0))
    bench.mover.load(ids(1), ids(5))
    bench.mover.before_launch()
    kernel(bench, writes=(3,))
    with pytest.raises(DeviceLost, match="RACE"):
        kernel(bench, reads=(5,))


def test_loads_that_nobody_asks_about_keep_no_events(bench: Bench) -> None:
    for _ in range(20):
        bench.mover.load(ids(1, 2), ids(5, 6))
    assert bench.num_events == bench.mover.num_loads == 1


# failures


REFUSED = {
    "outside": ("move", (0,), (NUM_SLOTS,)),
    "below": ("move", (-1,), (0,)),
    "outside the host's": ("offload", (0,), (NUM_HOST_SLOTS,)),
    "from outside the host's": ("load", (NUM_HOST_SLOTS,), (0,)),
    "unequal": ("move", (0, 1), (2,)),
    "onto itself": ("move", (0, 1), (1, 2)),
    "two onto one": ("offload", (0, 1), (2, 2)),
}


@pytest.mark.parametrize("counting", [True, False], ids=["counting", "real"])
@pytest.mark.parametrize(("call", "src", "dst"), REFUSED.values(), ids=REFUSED.keys())
def test_slots_that_cannot_be_meant_are_refused(bench: Bench, counting: bool, call: str, src, dst) -> None:
    mover = CountingMover(SLAB, num_slots=NUM_SLOTS, num_host_slots=NUM_HOST_SLOTS) if counting else bench.mover
    before = mover.stats()
    with pytest.raises(ResourceError):
        getattr(mover, call)(ids(*src), ids(*dst))
    assert mover.stats() == before
    assert bench.num_events == 0


def test_without_a_host_pool_there_are_moves_only() -> None:
    bench = Bench()
    mover = DeviceMover(bench.arena, None, slab_bytes=SLAB, stream=bench.stream)
    mover.move(ids(1), ids(2))
    assert bench.bytes_of(2) == bytes([101]) * SLAB
    for call in (mover.offload, mover.load):
        with pytest.raises(ResourceError, match="not one of 0"):
            call(ids(0), ids(0))
    mover.close()
    with pytest.raises(ResourceError):
        DeviceMover(bench.arena, None, slab_bytes=0, stream=bench.stream)
    bench.close()


def test_only_memory_that_is_there_is_touched() -> None:
    bench = Bench(tag="kv")
    assert bench.mover.num_slots == NUM_SLOTS
    bench.arena.commit(NUM_SLOTS * SLAB + PAGE)
    assert bench.mover.num_slots == NUM_SLOTS + PAGE // SLAB
    bench.stream.device.virtual.release("kv")
    for call in (bench.mover.move, bench.mover.offload, bench.mover.load):
        with pytest.raises(NotMaterialized):
            call(ids(0), ids(1))
    bench.stream.device.virtual.materialize("kv")
    bench.mover.move(ids(0), ids(1))
    bench.stream.device.fences.quiesce()
    bench.close()


BLOCKS = ("num_moved", "num_offloaded", "num_loaded", "moved_bytes", "offloaded_bytes", "loaded_bytes")
POINTS = frozenset(("event_create", "event_record", "stream_wait", "copy_many"))


@pytest.mark.parametrize("error", [DriverError, DriverOOM])
@pytest.mark.parametrize("call", ["move", "offload", "load", "before_launch"])
@pytest.mark.parametrize("is_pending", [True, False], ids=["behind an offload", "alone"])
def test_wherever_the_driver_fails_nothing_is_half_done(call: str, error: type[DriverError], is_pending: bool) -> None:
    num_points = 0
    for nth in range(1, 20):
        bench = Bench(FaultDriver)
        if is_pending:
            bench.mover.offload(ids(4), ids(4))
        before, num_events = bench.mover.stats(), bench.num_events
        asked = (ids(1, 2), ids(5, 6)) if call != "before_launch" else ()
        bench.driver.arm(nth, calls=POINTS, error=error)
        try:
            getattr(bench.mover, call)(*asked)
        except error:
            num_points += 1
            after, now = bench.mover.stats(), bench.num_events
            bench.driver.arm(None)
            assert {name: after[name] for name in BLOCKS} == {name: before[name] for name in BLOCKS}
            assert now in (num_events, 0)  # 0: a move waited for the offload before it failed
            getattr(bench.mover, call)(*asked)  # and it can be asked again
            bench.close()
        else:
            bench.driver.arm(None)
            bench.close()
            break
    expected = {"move": 1 + is_pending, "offload": 6, "load": 6, "before_launch": int(is_pending)}
    assert num_points == expected[call]


def test_a_lost_device_can_be_closed_and_tells_the_first_error() -> None:
    bench = Bench(FaultDriver)
    load = bench.mover.load(ids(0), ids(1))
    every = frozenset(("event_done", "event_sync", "event_destroy", "stream_sync", "stream_wait", "copy_many"))
    bench.driver.arm(1, calls=every, error=DeviceLost, code="ILLEGAL_ADDRESS", forever=True)
    for call in (lambda: load.is_done, load.wait, lambda: bench.mover.offload(ids(1), ids(1))):
        with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
            call()
    bench.mover.close()
    bench.mover.close()
    bench.driver.arm(None)
    for part in (bench.pool, bench.arena, bench.stream):
        part.close()
    bench.host.close()


def test_closing_waits_and_gives_everything_back_once() -> None:
    bench = Bench(TraceDriver)
    bench.mover.offload(ids(1), ids(1))
    bench.mover.load(ids(1), ids(2))
    bench.mover.close()
    assert bench.num_events == 0
    calls = Counter(line.partition("(")[0] for line in bench.driver.log)
    assert calls["event_create"] == calls["event_destroy"] == 4
    assert calls["stream_destroy"] == 1
    num_calls = len(bench.driver.log)
    bench.mover.close()
    assert len(bench.driver.log) == num_calls
    bench.close()


def test_a_transfer_stream_that_was_given_stays_its_owners() -> None:
    bench = Bench()
    given_stream = Stream.create(bench.stream.device)
    mover = DeviceMover(bench.arena, bench.pool, slab_bytes=SLAB, stream=bench.stream, transfer_stream=given_stream)
    mover.load(ids(1), ids(2)).wait()
    mover.close()
    given_stream.sync()
    given_stream.close()
    bench.close()


# without bytes


def test_held_loads_come_when_they_are_let_go() -> None:
    mover = CountingMover(SLAB, hold_loads=True)
    loads = [mover.load(ids(n), ids(n)) for n in range(4)]
    assert mover.num_loads == 4
    mover.finish_loads(1)
    assert [load.is_done for load in loads] == [True, False, False, False]
    loads[2].wait()
    assert mover.num_loads == 2
    mover.finish_loads(1)
    assert [load.is_done for load in loads] == [True, True, True, False]
    mover.hold_loads = False
    assert mover.load(ids(9), ids(9)).is_done
    mover.offload(ids(1, 2), ids(1, 2))
    assert mover.num_unwaited == 2
    mover.before_launch()
    assert mover.num_unwaited == 0
    mover.close()
    assert loads[3].is_done


# the allowance


@given(st.integers(1, 4096), st.floats(1.0, 1e12), st.floats(1e-6, 1.0), st.lists(st.integers(0, 50), max_size=30))
def test_a_step_moves_what_the_link_moves_in_its_slice(
    slab: int, rate: float, slice_s: float, asked: list[int]
) -> None:
    budget = TransferBudget(slab_bytes=slab, bytes_per_second=rate, slice_s=slice_s)
    for _ in range(2):
        budget.begin_step()
        granted = [budget.take(number) for number in asked]
        assert all(0 <= got <= number for got, number in zip(granted, asked, strict=True))
        # Never more than the link moves, but one block; and nobody is refused while there is any left.
        assert sum(granted) == min(sum(asked), budget.blocks_per_step)
        assert budget.num_left == budget.blocks_per_step - sum(granted)
        assert budget.blocks_per_step == 1 or budget.blocks_per_step * slab <= rate * slice_s * (1 + 1e-9)
        assert (budget.blocks_per_step + 1) * slab > rate * slice_s * (1 - 1e-9)


def test_an_endless_rate_grants_everything_and_nonsense_is_refused() -> None:
    assert TransferBudget(slab_bytes=1, bytes_per_second=math.inf, slice_s=1.0).take(10**12) == 10**12
    for wrong in ({"slab_bytes": 0}, {"bytes_per_second": 0.0}, {"slice_s": -1.0}, {"bytes_per_second": math.nan}):
        with pytest.raises(ResourceError):
            TransferBudget(**{"slab_bytes": 1, "bytes_per_second": 1.0, "slice_s": 1.0, **wrong})
    with pytest.raises(ResourceError):
        TransferBudget(slab_bytes=1, bytes_per_second=1.0, slice_s=1.0).take(-1)


def test_the_rate_is_timed_each_way_and_leaves_the_device_as_it_was() -> None:
    bench = Bench(lambda host: HazardDriver(host, poison=False))
    before = [bench.bytes_of(slot) for slot in range(NUM_SLOTS)]
    # Seconds out and in, three times; the first round is not counted, and the best of the others is.
    spans = [0.01, 0.01, 0.5, 0.25, 0.125, 0.5]
    readings = iter([reading for span in spans for reading in (0.0, span)])
    rate = measure_rate(bench.mover, num_rounds=2, clock=lambda: next(readings))
    assert rate.offload == NUM_HOST_SLOTS * SLAB / 0.125
    assert rate.load == rate.least == NUM_HOST_SLOTS * SLAB / 0.25
    assert [bench.bytes_of(slot) for slot in range(NUM_SLOTS)] == before
    assert bench.mover.stats()["num_offloaded"] == bench.num_events == 0
    assert measure_rate(bench.mover).least > 0
    lone = DeviceMover(bench.arena, None, slab_bytes=SLAB, stream=bench.stream)
    with pytest.raises(ResourceError, match="0 slabs"):
        measure_rate(lone)
    bench.close()
