"""Virtual memory: it comes and goes by its tag, at the same addresses, and nothing is half done."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_bench import CAPACITY, PAGE, Bench, ends, is_intact, write

from tonnage.buffers import Device, Stream, VaArena
from tonnage.buffers.backing import Retain
from tonnage.buffers.chunk import Chunk, PageRun, Piece, State, pieces_of
from tonnage.buffers.entries import FixedExtent
from tonnage.buffers.restore import Restore
from tonnage.buffers.scopes import ScopeConfig
from tonnage.buffers.virtual import VirtualMemory
from tonnage.device.host import HostDriver
from tonnage.errors import (
    BufferInUse,
    BufferOOM,
    CannotMaterialize,
    CaptureError,
    DriverUnsupported,
    ForkedProcess,
    LedgerError,
    NotMaterialized,
    RangeReferenced,
)
from tonnage.terms import LineKind

ASLEEP, AWAKE = State.RELEASED, State.MATERIALIZED


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


# allocations


def test_an_allocation_takes_whole_pages_and_is_booked(bench: Bench) -> None:
    made = bench.allocate(3, "kv")
    assert (made.size_bytes, made.padded_bytes) == (3 * PAGE - 10, 3 * PAGE)
    assert made.address % PAGE == 0
    assert bench.books() == {"kv": (3 * PAGE - 10, 3 * PAGE, 1)}
    assert bench.host.used_bytes == 3 * PAGE
    assert is_intact(made)
    made.require_materialized()


def test_freeing_waits_for_the_streams_and_then_gives_all_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench.allocate(3, "kv")
    monkeypatch.setattr(bench.host, "event_done", lambda _: False)
    made.free()
    made.free()
    bench.device.fences.reap()
    assert bench.host.used_bytes == 3 * PAGE  # something may still run on it
    (left,) = bench.memory.leftovers("kv")
    assert (left.owner, left.held_bytes, left.why) == ("kv", 3 * PAGE, "waiting for a fence")
    assert bench.books() == {"kv": (3 * PAGE - 10, 3 * PAGE, 1)}
    monkeypatch.undo()
    bench.device.fences.reap()
    assert (bench.host.used_bytes, bench.host.leaks(), bench.books()) == (0, (), {"kv": (0, 0, 0)})


def test_the_next_call_reaps_what_was_freed(bench: Bench) -> None:
    bench.allocate(60, "kv").free()
    bench.allocate(60, "kv")


def test_freeing_at_once(bench: Bench) -> None:
    made = bench.allocate(3, "kv")
    made.free(sync=True)
    made.free(sync=True)
    assert (bench.host.used_bytes, bench.host.leaks(), bench.device.fences.num_waiting) == (0, (), 0)


def test_an_old_handle_does_not_free_a_new_allocation(bench: Bench) -> None:
    old = bench.allocate(1, "kv")
    old.free(sync=True)
    new = next((made for made in (bench.allocate(1, "kv") for _ in range(20)) if made.address == old.address), None)
    old.free(sync=True)
    if new is not None:
        assert new.state is AWAKE
        assert is_intact(new)


def test_beyond_the_capacity_nothing_changes(bench: Bench) -> None:
    bench.allocate(60, "kv")
    with pytest.raises(BufferOOM) as caught:
        bench.allocate(5, "weights")
    error = caught.value
    assert (error.size_bytes, error.used_bytes, error.capacity_bytes) == (5 * PAGE - 10, 60 * PAGE, CAPACITY)
    assert error.owner == "weights"
    assert bench.books()["weights"] == (0, 0, 0)
    bench.require_balance()
    assert [one.tag for one in bench.memory.leftovers()] == ["kv"]


@pytest.mark.parametrize("size", [0, -1])
def test_nothing_is_not_an_allocation(bench: Bench, size: int) -> None:
    with pytest.raises(ValueError, match="virtual memory of"):
        bench.memory.allocate(size, config=ScopeConfig(tag="kv"), account=None, owner="kv", stream=bench.stream)


def test_a_strict_seal_undoes_the_allocation(bench: Bench) -> None:
    bench.ledger.seal(strict=True)
    with pytest.raises(LedgerError, match="'kv'"):
        bench.allocate(3, "kv")
    assert (bench.host.used_bytes, bench.host.leaks(), bench.memory.leftovers()) == (0, (), ())


def test_a_device_without_virtual_memory_says_so() -> None:
    driver = HostDriver(CAPACITY, page_bytes=PAGE, without=frozenset({"vmm"}))
    stream = Stream(Device(driver))
    with pytest.raises(DriverUnsupported):
        stream.device.virtual.allocate(1, config=ScopeConfig(tag="kv"), account=None, owner="kv", stream=stream)
    assert driver.close() == ()


def test_a_granule_is_whole_pages_of_both_sides() -> None:
    small = os.sysconf("SC_PAGE_SIZE")
    driver = HostDriver(CAPACITY, page_bytes=3 * small)
    assert VirtualMemory(Device(driver)).granule_bytes == 3 * small
    driver.close()


def test_the_device_makes_its_own(bench: Bench) -> None:
    assert isinstance(bench.device.virtual, VirtualMemory)
    assert bench.device.virtual is bench.device.virtual


# release and materialise


@pytest.mark.parametrize("restore", Restore)
def test_memory_comes_back_at_the_same_address(bench: Bench, restore: Restore) -> None:
    made = bench.allocate(3, "kv", restore)
    address = made.address
    done = bench.memory.release("kv")
    assert (done.num_chunks, done.freed_bytes) == (1, 3 * PAGE)
    assert (made.state, made.address, bench.host.used_bytes) == (ASLEEP, address, 0)
    assert bench.books() == {"kv": (0, 0, 0)}
    assert bench.memory.leftovers() == ()
    with pytest.raises(NotMaterialized, match="materialise the tag 'kv'"):
        made.require_materialized()
    wake = bench.memory.materialize("kv")
    wake.sync()
    assert (wake.num_chunks, wake.num_bytes, made.state) == (1, 3 * PAGE, AWAKE)
    assert bench.books() == {"kv": (3 * PAGE - 10, 3 * PAGE, 1)}
    assert is_intact(made) == (not restore.discards)
    if restore is Restore.MEMSET:
        assert ends(made) == (bytes(64), bytes(64))
    write(made)
    assert is_intact(made)


@pytest.mark.parametrize("restore", [Restore.CPU, Restore.PINNED])
@settings(max_examples=40)
@given(data=st.data())
def test_release_then_materialise_is_the_identity_on_bytes(restore: Restore, data: st.DataObject) -> None:
    bench = Bench()
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    tags = [data.draw(st.sampled_from(["a", "b"])) for _ in sizes]
    made = [bench.allocate(size, tag, restore) for size, tag in zip(sizes, tags, strict=True)]
    contents = {}
    for one in made:
        contents[one] = data.draw(st.binary(min_size=1, max_size=64)) * 5
        ctypes.memmove(one.address, contents[one], len(contents[one]))
        ctypes.memmove(one.address + one.size_bytes - len(contents[one]), contents[one], len(contents[one]))
    before = [ctypes.string_at(one.address, one.size_bytes) for one in made]
    for _ in range(data.draw(st.integers(1, 3))):
        chosen = data.draw(st.sets(st.sampled_from(["a", "b"])))
        freed = bench.memory.release(*chosen).freed_bytes
        assert freed == sum(one.padded_bytes for one, tag in zip(made, tags, strict=True) if tag in chosen)
        bench.require_balance()
        other = bench.host.phys_create(max(PAGE, bench.host.capacity_bytes - bench.host.used_bytes))
        bench.host.phys_release(other)  # the pages were somebody else's meanwhile
        bench.memory.materialize(*chosen).sync()
    assert [ctypes.string_at(one.address, one.size_bytes) for one in made] == before
    bench.close()


def test_tags_are_independent(bench: Bench) -> None:
    kv, weights, other = bench.allocate(3, "kv"), bench.allocate(4, "weights"), bench.allocate(5, "other")
    assert bench.memory.release("kv", "weights", "unknown").num_chunks == 2
    assert bench.states() == [ASLEEP, ASLEEP, AWAKE]
    assert is_intact(other)
    bench.memory.materialize("weights")
    assert bench.states() == [ASLEEP, AWAKE, AWAKE]
    bench.memory.materialize("kv", "weights")
    assert (kv.state, weights.state) == (AWAKE, AWAKE)


def test_again_is_nothing(bench: Bench) -> None:
    bench.allocate(3, "kv", Restore.CPU)
    assert not bench.memory.materialize("kv")
    bench.memory.release("kv")
    bench.fault.arm(None, calls=frozenset({"unmap", "copy", "phys_create", "map"}))
    again = bench.memory.release("kv")
    assert (again.num_chunks, again.freed_bytes, bool(again)) == (0, 0, False)
    assert bench.fault.num_calls == 0
    bench.memory.materialize("kv")
    bench.fault.arm(None, calls=frozenset({"unmap", "copy", "phys_create", "map"}))
    wake = bench.memory.materialize("kv")
    assert (wake.num_chunks, wake.num_bytes, wake.event) == (0, 0, None)
    wake.wait(0)
    wake.sync()
    assert bench.fault.num_calls == 0
    assert not bench.memory.release()


def test_what_sleeps_is_freed_at_once_with_its_host_memory(bench: Bench) -> None:
    made = bench.allocate(3, "kv", Restore.PINNED)
    bench.memory.release("kv")
    assert bench.memory.backings.held_bytes == 3 * PAGE - 10
    made.free()
    assert (bench.host.leaks(), bench.memory.backings.held_bytes) == ((), 0)
    assert not bench.memory.materialize("kv")


def test_a_wake_that_finds_too_little_changes_nothing_and_succeeds_later(bench: Bench) -> None:
    kept, asleep = bench.allocate(10, "kv", Restore.CPU), bench.allocate(20, "weights", Restore.PINNED)
    bench.memory.release("kv", "weights")
    bench.host.foreign_bytes = 40 * PAGE
    before = (bench.host.leaks(), bench.books())
    bench.fault.arm(None, calls=frozenset({"phys_create"}))
    for _ in range(3):
        with pytest.raises(CannotMaterialize, match="need 1,966,080 bytes, have 1,572,864 free") as caught:
            bench.memory.materialize("kv", "weights")
        assert "waking kv, weights" in str(caught.value)
        assert caught.value.size_bytes == 30 * PAGE
        assert (bench.host.leaks(), bench.books(), bench.fault.num_calls) == (*before, 0)
    bench.memory.materialize("kv")  # this much there is
    bench.host.foreign_bytes = 0
    assert bench.memory.materialize("kv", "weights").num_chunks == 1
    assert is_intact(kept)
    assert is_intact(asleep)


def test_a_wake_takes_what_our_own_pool_keeps_and_nobody_uses(bench: Bench) -> None:
    bench.allocate(20, "kv")
    bench.memory.release("kv")
    pool = bench.device.pool.ensure()
    assert pool is not None
    bench.host.pool_free(bench.host.pool_alloc(pool, 50 * PAGE, stream=0), stream=0)
    assert bench.host.mem_info()[0] == 14 * PAGE
    assert bench.memory.materialize("kv").num_chunks == 1
    assert bench.device.pool.stats().reserved_bytes == 0


def test_a_margin_is_left_alone(bench: Bench) -> None:
    bench.allocate(60, "kv")
    bench.memory.release("kv")
    bench.memory.margin_bytes = 5 * PAGE
    with pytest.raises(CannotMaterialize, match="327,680 to spare"):
        bench.memory.materialize("kv")
    bench.memory.margin_bytes = 4 * PAGE
    assert bench.memory.materialize("kv")


def test_a_hundred_cycles_leak_nothing(bench: Bench) -> None:
    made = [bench.allocate(3, "kv", restore) for restore in Restore]
    before = bench.host.leaks()
    for number in range(100):
        assert bench.memory.release("kv").num_chunks == len(Restore)
        assert bench.host.used_bytes == 0
        assert bench.memory.materialize("kv").num_chunks == len(Restore)
        if number == 0:
            events = len(bench.host._events)
    assert [is_intact(one) for one in made] == [not restore.discards for restore in Restore]
    assert len(bench.host._events) == events
    # The books hold the same things: only the numbers of handles, and the pinned page, are new.
    assert [one.split(": ")[1] for one in bench.host.leaks() if "host memory" not in one] == [
        one.split(": ")[1] for one in before
    ]
    bench.require_balance()


@pytest.mark.parametrize(("retain", "kept"), [(Retain.always(), True), (Retain.never(), False)])
def test_host_memory_after_the_wake(bench: Bench, retain: Retain, kept: bool) -> None:
    bench.memory.retain = retain
    assert bench.memory.retain == retain
    made = bench.allocate(3, "kv", Restore.CPU)
    for _ in range(3):
        bench.memory.release("kv")
        bench.memory.materialize("kv").sync()
        bench.device.fences.reap()
        assert bench.memory.backings.held_bytes == kept * made.size_bytes
        assert is_intact(made)


def test_a_device_that_is_not_idle_in_time_keeps_everything(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench.allocate(3, "kv", Restore.CPU)
    monkeypatch.setattr(bench.host, "event_done", lambda _: False)
    with pytest.raises(BufferInUse, match="stays awake: work was still running"):
        bench.memory.release("kv", timeout_s=0.01)
    monkeypatch.undo()
    assert (made.state, bench.memory.backings.held_bytes) == (AWAKE, 0)
    assert bench.memory.release("kv", timeout_s=1).num_chunks == 1


def test_consumers_wait_for_one_event_behind_all_copies(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Stream.create(bench.device), Stream.create(bench.device)
    bench.allocate(1, "kv", Restore.CPU, restore_stream=first)
    bench.allocate(1, "kv", Restore.CPU, restore_stream=second)
    bench.memory.release("kv")
    asked: list[tuple[str, int]] = []
    for call in ("copy", "event_record", "stream_wait"):
        real = getattr(bench.host, call)

        def told(*args, call=call, real=real, **kwargs):
            asked.append((call, kwargs.get("stream", args[0])))
            return real(*args, **kwargs)

        monkeypatch.setattr(bench.host, call, told)
    wake = bench.memory.materialize("kv")
    one, two = sorted((first.handle, second.handle))
    assert asked[:2] in ([("copy", one), ("copy", two)], [("copy", two), ("copy", one)])
    assert asked[2:5] == [("event_record", two), ("stream_wait", one), ("event_record", one)]
    wake.wait(0)
    assert asked[-1] == ("stream_wait", 0)
    wake.wait(second)
    assert asked[-1] == ("stream_wait", second.handle)
    wake.sync()
    wake.close()
    assert wake.event is None
    monkeypatch.undo()
    for one in bench.made:
        one.free(sync=True)
    first.close()
    second.close()


def test_nothing_is_edited_during_a_capture(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    awake, asleep = bench.allocate(3, "kv"), bench.allocate(3, "weights")
    bench.memory.release("weights")
    monkeypatch.setattr(bench.host, "stream_capturing", lambda _: True)
    for call in (
        lambda: bench.memory.release("kv"),
        lambda: bench.memory.materialize("weights"),
        lambda: bench.allocate(1, "kv"),
        awake.free,
        asleep.free,
    ):
        with pytest.raises(CaptureError):
            call()
    assert bench.states() == [AWAKE, ASLEEP]
    monkeypatch.undo()
    assert is_intact(awake)


def test_a_child_process_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench.allocate(3, "kv")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (lambda: bench.memory.release("kv"), lambda: bench.memory.materialize("kv"), made.free):
        with pytest.raises(ForkedProcess):
            call()
    monkeypatch.undo()
    assert made.state is AWAKE


def test_saves_are_read_twice_when_asked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.memory.verify = True
    made = bench.allocate(3, "kv", Restore.CPU)
    bench.memory.release("kv")
    bench.memory.materialize("kv").sync()
    assert is_intact(made)
    real = bench.host.copy

    def wrong(dst: int, src: int, size: int, *, stream: int) -> None:
        real(dst, src, size, stream=stream)
        if size == made.size_bytes and src == made.address and dst != staging:
            ctypes.memset(dst + 5, 0, 1)

    staging = 0
    write(made)
    ctypes.memset(made.address + 5, 9, 1)
    monkeypatch.setattr(bench.host, "copy", wrong)
    real_alloc = bench.host.host_alloc

    def host_alloc(size: int, *, flags: int) -> int:
        nonlocal staging
        staging = real_alloc(size, flags=flags)
        return staging

    monkeypatch.setattr(bench.host, "host_alloc", host_alloc)
    with pytest.raises(Exception, match="MISMATCH"):
        bench.memory.release("kv")
    monkeypatch.undo()
    assert made.state is AWAKE
    assert ctypes.string_at(made.address + 5, 1) == b"\x09"


# zero ranges, references, registrations


def test_declared_ranges_are_zero_after_every_wake(bench: Bench) -> None:
    made = bench.allocate(3, "kv", Restore.CPU)
    made.keep_zero(100, 50)
    ctypes.memset(made.address + 90, 5, 70)
    for _ in range(2):
        bench.memory.release("kv")
        bench.memory.materialize("kv").sync()
        assert ctypes.string_at(made.address + 90, 70) == b"\x05" * 10 + bytes(50) + b"\x05" * 10
        ctypes.memset(made.address + 90, 5, 70)
    for offset, size in ((-1, 5), (made.size_bytes, 1), (0, made.size_bytes + 1)):
        with pytest.raises(ValueError):
            made.keep_zero(offset, size)
    bench.memory.release("kv")
    with pytest.raises(NotMaterialized):
        made.keep_zero(0, 1)


def test_ranges_declared_at_birth_are_zero_from_the_first_moment(bench: Bench) -> None:
    bench.allocate(64, "dirt").free(sync=True)
    config = ScopeConfig(tag="kv")
    made = bench.memory.allocate(
        PAGE, config=config, account=None, owner="kv", stream=bench.stream, zero_ranges=[(7, 9)]
    )
    ctypes.memset(made.address, 1, PAGE)
    bench.memory.release("kv")
    bench.memory.materialize("kv").sync()
    assert ctypes.string_at(made.address + 7, 9) == bytes(9)
    made.free(sync=True)
    with pytest.raises(ValueError, match="zero ranges"):
        bench.memory.allocate(
            PAGE, config=config, account=None, owner="kv", stream=bench.stream, zero_ranges=[(PAGE, 1)]
        )


def test_a_pinned_registration_forbids_the_release_before_anything_is_done(bench: Bench) -> None:
    first, second = bench.allocate(3, "kv", Restore.CPU), bench.allocate(3, "kv", Restore.CPU)
    held = bench.ranges.register(second.address + 5, 10, owner="nccl")
    with pytest.raises(RangeReferenced, match="nccl"):
        bench.memory.release("kv")
    assert bench.states() == [AWAKE, AWAKE]
    assert bench.memory.backings.held_bytes == 0
    with pytest.raises(RangeReferenced, match="cannot be freed"):
        second.free()
    held.close()
    assert bench.memory.release("kv").num_chunks == 2
    bench.memory.materialize("kv").sync()
    assert is_intact(first)
    assert is_intact(second)


def test_a_registration_with_callbacks_is_taken_down_and_put_up(bench: Bench) -> None:
    made = bench.allocate(3, "kv", Restore.CPU)
    told: list[object] = []
    held = bench.ranges.register(
        made.address,
        PAGE,
        owner="nccl",
        unregister=lambda: told.append(("down", made.state)),
        reregister=lambda addr, size: told.append((addr, size, made.state)),
    )
    bench.memory.release("kv")
    assert told == [("down", AWAKE)]
    bench.memory.materialize("kv")
    assert told[1:] == [(made.address, PAGE, AWAKE)]
    held.close()


def test_a_registration_that_cannot_be_put_up_rolls_the_wake_back(bench: Bench) -> None:
    made = bench.allocate(3, "kv", Restore.CPU)
    works = False

    def reregister(addr: int, size: int) -> None:
        if not works:
            raise KeyError("no more registrations")

    held = bench.ranges.register(made.address, PAGE, owner="nccl", unregister=lambda: None, reregister=reregister)
    bench.memory.release("kv")
    with pytest.raises(KeyError):
        bench.memory.materialize("kv")
    assert (made.state, bench.host.used_bytes, bench.books()) == (ASLEEP, 0, {"kv": (0, 0, 0)})
    works = True
    bench.memory.materialize("kv").sync()
    assert is_intact(made)
    held.close()


def test_graphs_are_told_what_is_mapped(bench: Bench) -> None:
    made = bench.allocate(3, "kv", Restore.CPU)
    with bench.ranges.capture("decode") as capture:
        capture.touch(made.address, PAGE)
    assert bench.ranges.launch("decode", lambda: "replayed") == "replayed"
    bench.memory.release("kv")  # remapping is allowed while nothing replays
    with pytest.raises(Exception, match="not mapped"):
        bench.ranges.launch("decode", lambda: pytest.fail("launched over nothing"))
    bench.memory.materialize("kv")
    assert bench.ranges.launch("decode", lambda: "replayed") == "replayed"
    with pytest.raises(RangeReferenced, match="decode"):
        made.free()
    bench.ranges.destroy("decode")


# addresses of others, chunks of others


def test_memory_at_addresses_that_the_caller_keeps(bench: Bench) -> None:
    address = bench.host.va_reserve(8 * PAGE, align=PAGE)
    config = ScopeConfig(tag="comm", restore=Restore.CPU)
    arguments = {"config": config, "account": None, "owner": "nvls", "stream": bench.stream}
    for wrong in ((address + 1, PAGE), (address, PAGE + 1)):
        with pytest.raises(ValueError, match="whole granules"):
            bench.memory.map_at(*wrong, **arguments)
    made = bench.memory.map_at(address + PAGE, 2 * PAGE, **arguments)
    with pytest.raises(ValueError, match="registered already"):
        bench.memory.map_at(address + PAGE, PAGE, **arguments)
    with pytest.raises(Exception, match="mapped already"):
        bench.memory.map_at(address + 2 * PAGE, PAGE, **arguments)
    write(made)
    bench.memory.release("comm")
    assert bench.host.used_bytes == 0
    bench.memory.materialize("comm").sync()
    assert is_intact(made)
    bench.memory.unmap(made.address)
    bench.memory.unmap(made.address)
    assert bench.host.used_bytes == 0
    bench.host.va_free(address, 8 * PAGE)


def entry_of(bench: Bench, num_pages: int) -> tuple[int, Chunk[list[Piece]], FixedExtent]:
    address = bench.host.va_reserve(num_pages * PAGE, align=PAGE)
    run = PageRun(bench.fault, pieces_of(address, num_pages * PAGE))
    return address, Chunk(run, [run]), FixedExtent(address, num_pages * PAGE - 10, num_pages * PAGE)


def test_a_chunk_of_someone_else_sleeps_with_its_tag(bench: Bench) -> None:
    address, chunk, extent = entry_of(bench, 3)
    zeros = [(address + 5, 2)]
    arguments = {"tag": "kv", "owner": "arena", "extent": extent, "stream": bench.stream, "restore": Restore.CPU}
    bench.memory.add(address, chunk, zero_ranges=zeros, **arguments)
    with pytest.raises(ValueError, match="registered already"):
        bench.memory.add(address, Chunk(PageRun(bench.fault, [])), **arguments)
    assert bench.memory.materialize("kv").num_bytes == 3 * PAGE
    ctypes.memset(address, 7, 3 * PAGE)
    assert bench.memory.release("kv").freed_bytes == 3 * PAGE
    zeros[:] = [(address, 3)]  # the list is read anew
    bench.memory.materialize("kv").sync()
    assert ctypes.string_at(address, 3 * PAGE - 10) == bytes(3) + b"\x07" * (3 * PAGE - 13)
    with pytest.raises(ValueError, match="remove it"):
        bench.memory.free(address)
    assert bench.memory.remove(address) is chunk
    assert (chunk.state, bench.memory.backings.held_bytes) == (AWAKE, 0)
    assert bench.memory.remove(address).state is State.INVALID
    bench.memory.add(address, chunk, **arguments)  # awake this time
    assert bench.memory.release("kv").num_chunks == 1
    bench.memory.remove(address)
    with pytest.raises(ValueError, match="cannot be registered"):
        bench.memory.add(address, Chunk(), **arguments)
    bench.host.va_free(address, 3 * PAGE)


def test_a_new_chunk_is_registered_only_when_it_came_up(bench: Bench) -> None:
    address, _, extent = entry_of(bench, 3)
    run = PageRun(bench.fault, pieces_of(address, 3 * PAGE, handle_bytes=PAGE))
    arguments = {"tag": "kv", "owner": "arena", "extent": extent, "stream": bench.stream}
    for nth in range(1, 8):
        bench.fault.arm(nth)
        with pytest.raises(BufferOOM, match="INJECTED"):
            bench.memory.add_new(address, run, [run], **arguments)
        assert (bench.host.used_bytes, bench.memory.leftovers()) == (0, ())
        assert bench.memory.remove(address).state is State.INVALID
    bench.memory.add_new(address, run, [run], **arguments)
    assert bench.host.used_bytes == 3 * PAGE
    chunk = bench.memory.remove(address)
    chunk.release()
    bench.host.va_free(address, 3 * PAGE)


def test_allocations_are_freed_not_removed(bench: Bench) -> None:
    with pytest.raises(ValueError, match="free it"):
        bench.memory.remove(bench.allocate(1, "kv").address)


def test_leftovers_by_owner(bench: Bench) -> None:
    bench.allocate(3, "kv", owner="pool")
    bench.memory.release("kv")
    assert bench.memory.leftovers("kv") == ()
    bench.allocate(2, "kv", owner="late")
    bench.allocate(4, "weights", owner="model")
    found = [(one.owner, one.tag, one.held_bytes, one.why) for one in bench.memory.leftovers()]
    assert found == [
        ("model", "weights", 4 * PAGE, "materialized"),
        ("late", "kv", 2 * PAGE, "materialized"),
    ]
    assert [one.owner for one in bench.memory.leftovers("kv")] == ["late"]


# threads


def test_threads_release_and_materialise_and_free_at_will(bench: Bench) -> None:
    kept = [bench.allocate(2, tag, Restore.CPU) for tag in ("a", "b", "a", "b")]
    failures: list[BaseException] = []

    def work(tags: tuple[str, ...]) -> None:
        try:
            for _ in range(25):
                made = bench.memory.allocate(
                    PAGE, config=ScopeConfig(tag=tags[0]), account=None, owner="thread", stream=bench.stream
                )
                bench.memory.release(*tags)
                bench.memory.materialize(*tags)
                made.free()
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(tags,)) for tags in (("a",), ("b", "a"), ("a", "b"), ("b",))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert failures == []
    bench.memory.materialize("a", "b").sync()
    assert [is_intact(one) for one in kept] == [True] * 4
    bench.device.fences.quiesce()
    bench.memory.sweep()
    bench.require_balance()


# what is asked of the device, and in which order


def test_a_release_with_a_time_out_waits_no_longer_for_anything(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        bench.allocate(1, "kv")
    with monkeypatch.context() as patch:
        patch.setattr(bench.host, "device_sync", lambda: pytest.fail("a wait without an end"))
        assert bench.memory.release("kv", timeout_s=5).num_chunks == 3
    syncs: list[None] = []
    bench.memory.materialize("kv").sync()
    monkeypatch.setattr(bench.host, "device_sync", lambda: syncs.append(None))
    bench.memory.release("kv")
    assert len(syncs) == 2  # before the launches are kept out, and after; not once an entry


def test_a_launch_between_the_wait_and_the_edit_is_waited_for_within_the_time(bench: Bench) -> None:
    bench.allocate(1, "kv")
    idle = iter((True, False))
    bench.device.fences.wait_idle = lambda **_: next(idle)  # type: ignore[method-assign]
    with pytest.raises(BufferInUse, match="still running after 3 s"):
        bench.memory.release("kv", timeout_s=3)
    assert bench.states() == [AWAKE]
    del bench.device.fences.wait_idle


def test_a_wake_asks_the_others_for_what_is_missing_and_no_more(bench: Bench) -> None:
    bench.allocate(60, "kv")
    bench.memory.release("kv")
    others = [bench.host.mem_alloc(PAGE) for _ in range(5)]
    asked: list[int] = []

    def give(num_bytes: int) -> int:
        asked.append(num_bytes)
        bench.host.mem_free(others.pop())
        return PAGE

    bench.device.pressure.register("cache", give)
    bench.memory.materialize("kv").sync()
    assert asked == [PAGE]
    for address in others:
        bench.host.mem_free(address)


@pytest.mark.parametrize("restore", Restore)
def test_what_was_restored_on_a_stream_that_is_closed_wakes_all_the_same(bench: Bench, restore: Restore) -> None:
    first, second = Stream.create(bench.device), Stream.create(bench.device)
    early = bench.allocate(2, "early", restore, restore_stream=first)
    late = bench.allocate(2, "late", restore, restore_stream=second)
    first.close()
    bench.memory.release("early", "late")
    second.close()
    bench.memory.materialize("early", "late").sync()
    assert restore.discards or (is_intact(early) and is_intact(late))
    early.keep_zero(0, 1)


def test_an_event_that_cannot_be_destroyed_is_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.allocate(1, "kv")
    bench.memory.release("kv")
    wake = bench.memory.materialize("kv")
    assert wake.event is not None
    bench.host.event_destroy(wake.event)  # by somebody else: it fails for us, now and for ever
    bench.memory.release("kv")
    bench.device.fences.quiesce()
    assert (wake.event, bench.device.fences.num_waiting) == (None, 0)
    wake.close()


def test_closing_an_arena_beside_a_release_of_its_tag_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both want its entry and the graphs' lock. Each is made to wait inside its first wait for the other."""
    arena = VaArena(bench.stream, ledger=bench.ledger, owner="kv", line=LineKind.KV, reserve_bytes=16 * PAGE, tag="kv")
    arena.commit(4 * PAGE)
    both, device_sync, met = threading.Barrier(2), bench.host.device_sync, set()
    failed: list[Exception] = []

    def wait_for_the_other() -> None:
        name = threading.current_thread().name
        if name in ("close", "release") and name not in met:
            met.add(name)
            with suppress(threading.BrokenBarrierError):
                both.wait(1)
        device_sync()

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - told by the main thread
            failed.append(error)

    unmap = bench.host.unmap

    def unmap_slowly(addr: int, size: int) -> None:
        time.sleep(0.1)  # meanwhile the other one comes to its second lock
        unmap(addr, size)

    monkeypatch.setattr(bench.host, "unmap", unmap_slowly)
    monkeypatch.setattr(bench.host, "device_sync", wait_for_the_other)
    threads = [
        threading.Thread(target=run, args=(call,), name=name, daemon=True)
        for name, call in (("release", lambda: bench.device.virtual.release("kv")), ("close", arena.close))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), f"{thread.name} waits for ever"
    assert failed == []
    assert arena.address == 0
    assert bench.host.used_bytes == 0
