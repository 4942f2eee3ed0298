"""The pinned pool against a naive model, and what its chunks, limits and waiting blocks do."""

from __future__ import annotations

import ctypes
import itertools
import threading

import pytest
from finalisers import at_every_step
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tonnage.buffers.device import Device
from tonnage.buffers.pinned_pool import ALIGNMENT, PinnedPool
from tonnage.device.fault import FaultDriver
from tonnage.device.host import HostDriver
from tonnage.errors import DriverError, DriverOOM
from tonnage.units import round_up

CHUNK = 16 * ALIGNMENT


class Point:
    """A point that is passed when the test says so."""

    def __init__(self) -> None:
        self.passed = False


@pytest.fixture
def driver():
    driver = HostDriver(2**22, page_bytes=2**16)
    yield driver
    assert driver.close() == ()


@pytest.fixture
def pool(driver: HostDriver):
    pool = PinnedPool(Device(driver), chunk_bytes=CHUNK)
    yield pool
    pool.trim()


def test_blocks_are_aligned_disjoint_and_come_from_one_chunk(pool: PinnedPool) -> None:
    first, second, third = pool.alloc(1), pool.alloc(300), pool.alloc(0)
    assert (second - first, third - second) == (ALIGNMENT, 2 * ALIGNMENT)
    stats = pool.stats()
    assert (stats.used_bytes, stats.reserved_bytes, stats.free_bytes) == (4 * ALIGNMENT, CHUNK, CHUNK - 4 * ALIGNMENT)
    ctypes.memset(second, 7, 300)
    for address in (second, first, third):
        pool.free(address)
    assert pool.stats().used_bytes == 0
    assert pool.alloc(CHUNK) == first  # all neighbours are one block again
    pool.free(first)


def test_a_larger_request_gets_a_chunk_of_its_own_size(pool: PinnedPool) -> None:
    small, large = pool.alloc(1), pool.alloc(3 * CHUNK + 1)
    assert pool.stats().reserved_bytes == CHUNK + round_up(3 * CHUNK + 1, ALIGNMENT)
    pool.free(large)
    pool.free(small)
    pool.trim()
    small = pool.alloc(1)
    assert pool.stats().reserved_bytes == CHUNK  # once large is not for ever large
    pool.free(small)


def test_trim_gives_back_wholly_free_chunks_only(pool: PinnedPool) -> None:
    kept, *others = [pool.alloc(CHUNK // 2 + 1) for _ in range(4)]
    for address in others:
        pool.free(address)
    assert pool.trim(keep_bytes=3 * CHUNK) == CHUNK
    assert pool.trim() == 2 * CHUNK
    stats = pool.stats()
    assert (stats.reserved_bytes, stats.reserved_high_bytes, stats.used_high_bytes) == (
        CHUNK, 4 * CHUNK, 4 * round_up(CHUNK // 2 + 1, ALIGNMENT),
    )  # fmt: skip
    pool.free(kept)
    assert pool.trim() == CHUNK


def test_a_block_that_is_still_read_is_never_handed_out(pool: PinnedPool) -> None:
    point = Point()
    address = pool.alloc(CHUNK)
    pool.free(address, after=point)
    assert (pool.stats().waiting_bytes, pool.stats().free_bytes, pool.trim()) == (CHUNK, 0, 0)
    other = pool.alloc(CHUNK)
    assert other != address
    point.passed = True
    assert pool.alloc(1) == address  # found again without being told
    assert pool.stats().waiting_bytes == 0
    pool.free(address)
    pool.free(other)


def test_what_is_not_handed_out_cannot_be_freed(pool: PinnedPool) -> None:
    address = pool.alloc(1)
    pool.free(address)
    for wrong in (address, address + 1, 5):
        with pytest.raises(ValueError, match="handed out no block"):
            pool.free(wrong)


def test_the_limit_is_kept_and_told(driver: HostDriver) -> None:
    pool = PinnedPool(Device(driver), chunk_bytes=CHUNK, limit_bytes=CHUNK + 2 * ALIGNMENT)
    kept = [pool.alloc(CHUNK), pool.alloc(2 * ALIGNMENT)]  # where no chunk fits, what is needed still does
    with pytest.raises(
        DriverOOM, match=r"256 bytes more than the 4,608 pinned now would pass the pool's limit of 4,608"
    ):
        pool.alloc(1)
    assert pool.stats().reserved_bytes == CHUNK + 2 * ALIGNMENT
    for address in kept:
        pool.free(address)
    assert pool.trim() == CHUNK + 2 * ALIGNMENT


def test_driver_failures_change_nothing() -> None:
    host = HostDriver(2**22, page_bytes=2**16)
    fault = FaultDriver(host)
    pool = PinnedPool(Device(fault), chunk_bytes=CHUNK)
    fault.arm(1, forever=True)
    with pytest.raises(DriverOOM):
        pool.alloc(1)
    assert pool.stats().reserved_bytes == 0
    fault.arm(1)  # the chunk cannot be had, what is needed can
    address = pool.alloc(1)
    assert pool.stats().reserved_bytes == ALIGNMENT
    pool.free(address)
    fault.arm(1, calls=frozenset({"host_free"}))
    with pytest.raises(DriverError):
        pool.trim()
    assert pool.stats().reserved_bytes == ALIGNMENT
    assert pool.trim() == ALIGNMENT
    assert host.close() == ()


def test_threads_share_it(pool: PinnedPool) -> None:
    errors: list[BaseException] = []

    def work(mark: int) -> None:
        try:
            for size in range(1, 200):
                address = pool.alloc(size)
                ctypes.memset(address, mark, size)
                assert ctypes.string_at(address, size) == bytes([mark]) * size
                pool.free(address)
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert pool.stats().used_bytes == 0


@pytest.mark.parametrize("step", ["alloc", "new chunk", "large", "free", "free later", "reap", "trim", "stats"])
def test_a_finaliser_may_free_and_allocate_anywhere_inside_the_pool(driver: HostDriver, step: str) -> None:
    """Three blocks between four free gaps: what is freed in the middle joins its neighbours all the same."""

    def scenario():
        pool = PinnedPool(Device(driver), chunk_bytes=CHUNK)
        blocks = [pool.alloc(ALIGNMENT) for _ in range(7)]
        for gap in blocks[::2]:
            pool.free(gap)
        used, point = {blocks[1], blocks[3], blocks[5]}, Point()
        if step == "reap":
            pool.free(blocks[1], after=point)
            used.remove(blocks[1])
            point.passed = True

        def free(address: int, *, after: Point | None = None) -> None:
            used.remove(address)
            pool.free(address, after=after)

        steps = {
            "alloc": lambda: used.add(pool.alloc(1)),
            "new chunk": lambda: used.add(pool.alloc(CHUNK - ALIGNMENT)),
            "large": lambda: used.add(pool.alloc(2 * CHUNK)),
            "free": lambda: free(blocks[5]),
            "free later": lambda: free(blocks[5], after=point),
            "reap": pool.reap,
            "trim": pool.trim,
            "stats": pool.stats,
        }

        def finaliser() -> None:
            free(blocks[3])
            address = pool.alloc(2 * ALIGNMENT)
            assert address not in used
            used.add(address)
            pool.reap()
            pool.trim()
            pool.stats()

        def check() -> None:
            point.passed = True
            pool.reap()
            sizes = {address: pool.block_bytes(address) for address in used}
            ends = [(start, start + size) for start, size in sorted(sizes.items())]
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
            stats = pool.stats()
            assert (stats.used_bytes, stats.waiting_bytes) == (sum(sizes.values()), 0)
            assert stats.reserved_bytes == driver._host_used_bytes
            for address in sorted(used):
                pool.free(address)
            assert pool.trim() == stats.reserved_bytes, "every chunk is in one piece again"
            assert driver._host_used_bytes == 0

        return steps[step], finaliser, check

    assert at_every_step("pinned_pool.py", scenario) > 20


class PoolMachine(RuleBasedStateMachine):
    """The model is a list of ranges: handed out, waiting, or neither."""

    @initialize(limit=st.one_of(st.none(), st.integers(CHUNK, 6 * CHUNK)))
    def start(self, limit: int | None) -> None:
        self.driver = HostDriver(2**22, page_bytes=2**16)
        self.pool = PinnedPool(Device(self.driver), chunk_bytes=CHUNK, limit_bytes=limit)
        self.used: dict[int, tuple[int, int]] = {}  # address -> (bytes, byte written)
        self.waiting: list[tuple[int, int, Point]] = []
        self.byte = 0

    @rule(size=st.one_of(st.integers(0, 5 * ALIGNMENT), st.integers(0, 3 * CHUNK)))
    def alloc(self, size: int) -> None:
        try:
            address = self.pool.alloc(size)
        except DriverOOM:
            assert self.pool.limit_bytes is not None
            return
        need = max(ALIGNMENT, round_up(size, ALIGNMENT))
        assert address % ALIGNMENT == 0
        self.waiting = [one for one in self.waiting if not one[2].passed]
        ranges = [(start, length) for start, (length, _) in self.used.items()]
        ranges += [(start, length) for start, length, _ in self.waiting]
        assert all(address + need <= start or start + length <= address for start, length in ranges)
        self.byte = (self.byte + 1) % 256
        ctypes.memset(address, self.byte, need)
        self.used[address] = (need, self.byte)

    @precondition(lambda self: self.used)
    @rule(data=st.data(), wait=st.booleans())
    def free(self, data: st.DataObject, wait: bool) -> None:
        address = data.draw(st.sampled_from(sorted(self.used)))
        size, byte = self.used.pop(address)
        assert ctypes.string_at(address, size) == bytes([byte]) * size
        if wait:
            self.waiting.append((address, size, Point()))
            self.pool.free(address, after=self.waiting[-1][2])
        else:
            self.pool.free(address)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def reach(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.waiting))[2].passed = True

    @rule(keep=st.integers(0, 4 * CHUNK))
    def trim(self, keep: int) -> None:
        before = self.pool.stats().reserved_bytes
        given = self.pool.trim(keep)
        after = self.pool.stats().reserved_bytes
        assert before - after == given
        assert given == 0 or after >= keep

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        stats = self.pool.stats()
        assert stats.used_bytes == sum(size for size, _ in self.used.values())
        assert stats.free_bytes >= 0
        assert stats.used_high_bytes >= stats.used_bytes
        limit = self.pool.limit_bytes
        assert limit is None or stats.reserved_bytes <= limit
        assert stats.reserved_bytes == self.driver._host_used_bytes

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for _, _, point in self.waiting:
            point.passed = True
        for address in self.used:
            self.pool.free(address)
        self.pool.trim()
        assert self.pool.stats().reserved_bytes == 0
        assert self.driver.close() == ()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=50, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
