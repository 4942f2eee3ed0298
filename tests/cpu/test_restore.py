"""Contents of memory that sleeps: what is saved, where, for how long, and what a failure leaves."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.buffers.backing import Backings, Retain
from tonnage.buffers.fences import Fences
from tonnage.buffers.restore import HostCopy, Restore, Zeros, restorer_for
from tonnage.device.fault import RELEASING, FaultDriver
from tonnage.device.host import HostDriver
from tonnage.errors import BufferOOM, DriverError

PAGE = 2**16


@pytest.fixture
def memory(driver: HostDriver):
    """The address of eight pages of the device."""
    address = driver.mem_alloc(8 * PAGE)
    yield address
    driver.mem_free(address)


def sleep(copy: HostCopy, spans, *, owner: str = "kv") -> None:
    copy.prepare(spans, owner=owner)
    copy.save(stream=0)
    copy.verify(stream=0)


def test_which_modes_discard() -> None:
    assert {mode: mode.discards for mode in Restore} == {
        Restore.NONE: True, Restore.MEMSET: True, Restore.CPU: False, Restore.PINNED: False,
    }  # fmt: skip


def test_nothing_is_done_for_none(driver: HostDriver) -> None:
    assert restorer_for(Restore.NONE, driver, Backings(driver)) is None


def test_zeros_come_back(driver: HostDriver, memory: int) -> None:
    driver.fill(memory, 7, 8 * PAGE, stream=0)
    zeros = restorer_for(Restore.MEMSET, driver, Backings(driver))
    assert isinstance(zeros, Zeros)
    zeros.restore([(memory + 10, 20), (memory + 100, 5)], stream=0)
    expected = bytearray(b"\x07" * 200)
    expected[10:30] = expected[100:105] = b""
    expected = bytearray(b"\x07" * 10 + bytes(20) + b"\x07" * 70 + bytes(5) + b"\x07" * 95)
    assert ctypes.string_at(memory, 200) == bytes(expected)


@pytest.mark.parametrize("pinned", [False, True])
@settings(max_examples=50)
@given(data=st.data())
def test_saving_and_restoring_is_the_identity_on_the_spans(pinned: bool, data: st.DataObject) -> None:
    driver = HostDriver(4 * PAGE, page_bytes=PAGE)
    memory = driver.mem_alloc(PAGE)
    cuts = sorted(data.draw(st.sets(st.integers(0, 400), min_size=2, max_size=8)))
    spans = [(memory + start, end - start) for start, end in zip(cuts[::2], cuts[1::2], strict=False)]
    before = bytes(number % 233 for number in range(400))  # no 0xEE in it
    ctypes.memmove(memory, before, 400)
    backings = Backings(driver)
    copy = HostCopy(driver, backings, pinned=pinned)
    sleep(copy, spans)
    assert backings.held_bytes == sum(size for _, size in spans)
    driver.fill(memory, 0xEE, 400, stream=0)
    copy.restore(spans, stream=0)
    expected = bytearray(b"\xee" * 400)
    for addr, size in spans:
        expected[addr - memory : addr - memory + size] = before[addr - memory : addr - memory + size]
    assert ctypes.string_at(memory, 400) == bytes(expected)
    copy.close()
    assert backings.held_bytes == 0
    driver.mem_free(memory)
    assert driver.close() == ()


def test_pinned_memory_is_made_once(driver: HostDriver, memory: int) -> None:
    fault = FaultDriver(driver)
    fault.arm(None, calls=frozenset({"host_alloc", "host_free"}))
    copy = HostCopy(fault, Backings(fault), pinned=True)
    for _ in range(5):
        copy.prepare([(memory, 8 * PAGE)], owner="kv")
        copy.save(stream=0)
        copy.restore([(memory, 8 * PAGE)], stream=0)
        copy.settle(Fences(driver), stream=0)
    assert dict(fault.by_call) == {"host_alloc": 1}
    copy.close()
    copy.close()
    assert dict(fault.by_call) == {"host_alloc": 1, "host_free": 1}


def test_a_different_size_takes_a_different_backing(driver: HostDriver, memory: int) -> None:
    backings = Backings(driver)
    copy = HostCopy(driver, backings, pinned=True)
    for size in (PAGE, 3 * PAGE, PAGE, 0):
        sleep(copy, [(memory, size)])
        copy.restore([(memory, size)], stream=0)
        copy.settle(Fences(driver), stream=0)
        assert (backings.held_bytes, backings.kept_bytes) == (size, size)
    copy.close()
    assert backings.held_bytes == 0


@pytest.mark.parametrize(
    ("retain", "kept"),
    [(Retain.always(), 3), (Retain.never(), 0), (Retain.budget(2 * PAGE), 2), (Retain.budget(2 * PAGE - 1), 1)],
)
def test_what_stays_on_the_host_while_the_device_is_awake(
    driver: HostDriver, memory: int, retain: Retain, kept: int
) -> None:
    backings, fences = Backings(driver, retain=retain), Fences(driver)
    copies = [HostCopy(driver, backings, pinned=True) for _ in range(3)]
    for _ in range(3):
        for number, copy in enumerate(copies):
            sleep(copy, [(memory + number * PAGE, PAGE)])
        assert (backings.held_bytes, backings.kept_bytes) == (3 * PAGE, 0)  # asleep: all of it is in use
        for copy in copies:
            copy.settle(fences, stream=0)
        assert backings.held_bytes == 3 * PAGE  # the copies back may still run
        fences.reap()
        assert (backings.held_bytes, backings.kept_bytes) == (kept * PAGE, kept * PAGE)
    for copy in copies:
        copy.close()
    assert (backings.held_bytes, backings.kept_bytes) == (0, 0)


def test_host_memory_goes_only_after_the_copy_back(
    driver: HostDriver, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backings, fences = Backings(driver, retain=Retain.never()), Fences(driver)
    copy = HostCopy(driver, backings, pinned=True)
    sleep(copy, [(memory, PAGE)])
    copy.restore([(memory, PAGE)], stream=0)
    monkeypatch.setattr(driver, "event_done", lambda _: False)
    copy.settle(fences, stream=0)
    fences.reap()
    assert backings.held_bytes == PAGE
    monkeypatch.undo()
    fences.reap()
    assert backings.held_bytes == 0


def test_without_an_event_it_stays_until_the_next_sleep(driver: HostDriver, memory: int) -> None:
    fault = FaultDriver(driver)
    backings, fences = Backings(fault, retain=Retain.never()), Fences(fault)
    copy = HostCopy(fault, backings, pinned=True)
    sleep(copy, [(memory, PAGE)])
    fault.arm(1, forever=True, calls=frozenset({"event_create"}))
    copy.settle(fences, stream=0)
    assert (backings.held_bytes, fences.num_waiting) == (PAGE, 0)
    copy.close()
    assert backings.held_bytes == 0


def test_calling_it_off_gives_back_what_is_new_and_keeps_what_was_kept(driver: HostDriver, memory: int) -> None:
    backings, fences = Backings(driver), Fences(driver)
    copy = HostCopy(driver, backings, pinned=False)
    copy.prepare([(memory, PAGE)], owner="kv")
    copy.abandon()
    assert backings.held_bytes == 0
    sleep(copy, [(memory, PAGE)])
    copy.settle(fences, stream=0)
    copy.prepare([(memory, PAGE)], owner="kv")
    copy.abandon()
    assert (backings.held_bytes, backings.kept_bytes) == (PAGE, PAGE)
    backings.retain = Retain.never()
    copy.prepare([(memory, PAGE)], owner="kv")
    copy.abandon()
    assert (backings.held_bytes, backings.kept_bytes) == (0, 0)


def test_a_full_host_is_told_with_its_own_figures(driver: HostDriver, memory: int) -> None:
    fault = FaultDriver(driver, 1, calls=frozenset({"host_alloc"}))
    with pytest.raises(BufferOOM, match="pinned host memory") as caught:
        HostCopy(fault, Backings(fault), pinned=True).prepare([(memory, PAGE)], owner="weights")
    assert (caught.value.owner, caught.value.size_bytes) == ("weights", PAGE)
    assert caught.value.capacity_bytes > 64 * PAGE
    with pytest.raises(BufferOOM, match="pageable host memory"):
        Backings(driver).take(2**62, pinned=False, owner="weights")


def test_host_memory_that_would_not_go_is_tried_again(driver: HostDriver) -> None:
    fault = FaultDriver(driver)
    backings = Backings(fault)
    backing = backings.take(PAGE, pinned=True, owner="kv")
    fault.arm(1, calls=RELEASING)
    backings.give_back(backing)
    assert (fault.num_injected, backings.held_bytes) == (1, PAGE)
    backings.sweep()
    assert backings.held_bytes == 0


def test_a_copy_that_differs_is_found(driver: HostDriver, memory: int) -> None:
    copy = HostCopy(driver, Backings(driver), pinned=False)
    driver.fill(memory, 1, 2 * PAGE, stream=0)
    copy.prepare([(memory, PAGE), (memory + PAGE, PAGE)], owner="kv")
    copy.save(stream=0)
    copy.verify(stream=0)
    ctypes.memset(memory + PAGE + 17, 2, 1)
    with pytest.raises(DriverError, match="MISMATCH"):
        copy.verify(stream=0)
    copy.close()
