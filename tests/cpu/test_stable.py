"""Stable buffers: they grow in place, never copy, and refuse to shrink below what holds them."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.buffers import Device, Stream, VaArena
from tonnage.buffers.stable import StableBuffer
from tonnage.device.host import HostDriver
from tonnage.errors import BufferInUse, BufferOOM, RangeReferenced
from tonnage.ledger import Ledger
from tonnage.terms import LineKind

PAGE = 2**16


@pytest.fixture
def buffer(driver: HostDriver):
    buffer = make(driver, num_bytes=10)
    yield buffer
    buffer.close()


def make(driver: HostDriver, **arguments) -> StableBuffer:
    return StableBuffer.make(
        Stream(Device(driver)),
        ledger=Ledger(0, 64 * PAGE),
        owner="workspace",
        line=LineKind.SCRATCH,
        most_bytes=100 * PAGE,
        **arguments,
    )


def test_it_grows_where_it_is(buffer: StableBuffer, driver: HostDriver) -> None:
    address = buffer.address
    ctypes.memset(address, 3, 10)
    buffer.grow(5 * PAGE)
    buffer.grow(2 * PAGE)  # it is larger already
    assert (buffer.address, buffer.num_bytes, buffer.usable_bytes) == (address, 5 * PAGE, 5 * PAGE)
    assert ctypes.string_at(address, 10) == b"\x03" * 10
    assert driver.used_bytes == 5 * PAGE


def test_a_growth_that_fails_changes_nothing(buffer: StableBuffer) -> None:
    with pytest.raises(BufferOOM, match="workspace"):
        buffer.grow(70 * PAGE)
    assert (buffer.num_bytes, buffer.committed_bytes) == (10, PAGE)


def test_nothing_is_left_of_one_that_could_not_be_made(driver: HostDriver) -> None:
    with pytest.raises(BufferOOM):
        make(driver, num_bytes=65 * PAGE)
    assert driver.leaks() == ()


def test_it_shrinks_to_what_graphs_hold_and_no_further(buffer: StableBuffer, driver: HostDriver) -> None:
    graphs = buffer.stream.device.graphs
    buffer.grow(4 * PAGE)
    with graphs.capture("decode 8"):
        buffer.address  # noqa: B018 - reading it is using the buffer
    buffer.grow(6 * PAGE)
    with pytest.raises(RangeReferenced, match=r"'decode 8' replays over 262,144 bytes at 0x\w+ of 'workspace'"):
        buffer.shrink(4 * PAGE - 1)  # no page would go, but it is no longer what the graph was captured over
    with pytest.raises(RangeReferenced):
        buffer.shrink(0)
    assert (buffer.num_bytes, driver.used_bytes) == (6 * PAGE, 6 * PAGE)
    assert buffer.shrink(4 * PAGE) == 2 * PAGE
    graphs.check("decode 8")
    with pytest.raises(RangeReferenced):
        buffer.close()
    graphs.destroy("decode 8")
    assert buffer.shrink(4 * PAGE) == 0
    assert buffer.shrink(-1) == 4 * PAGE
    assert buffer.num_bytes == 0


def test_a_graph_may_be_bound_to_less_than_all_of_it(buffer: StableBuffer) -> None:
    graphs = buffer.stream.device.graphs
    buffer.grow(4 * PAGE)
    number = buffer.exports.add("a tensor")
    with graphs.capture("paged") as capture:
        capture.only(buffer, PAGE)
    buffer.exports.drop(number)
    assert [(one.addr, one.size) for one in graphs.ranges("paged")] == [(buffer.address, PAGE)]
    assert buffer.shrink(PAGE) == 3 * PAGE
    graphs.destroy("paged")


def test_over_somebodys_arena_it_gives_back_memory_but_not_the_arena(driver: HostDriver) -> None:
    arena = VaArena(Stream(Device(driver)), ledger=Ledger(0, 1), owner="kv", line=LineKind.KV, reserve_bytes=10 * PAGE)
    buffer = StableBuffer(arena, num_bytes=3 * PAGE)
    assert (buffer.address, driver.used_bytes) == (arena.address, 3 * PAGE)
    buffer.close()
    buffer.close()
    assert (driver.used_bytes, arena.committed_bytes) == (0, 0)
    assert arena.address
    arena.close()


def test_a_tensor_over_it_sees_it_grow_and_keeps_it_open(buffer: StableBuffer) -> None:
    torch = pytest.importorskip("torch")
    from tonnage.buffers.torch_view import as_tensor, typed_view

    whole = as_tensor(buffer)
    assert whole.data_ptr() == buffer.address
    typed_view(whole, 0, (2,), "float32").fill_(1.5)
    buffer.grow(8 * PAGE)
    view = typed_view(whole, 7 * PAGE, (4,), "int64")
    view.fill_(7)
    assert torch.equal(typed_view(whole, 0, (2,), "float32"), torch.full((2,), 1.5))
    assert ctypes.string_at(buffer.address + 7 * PAGE, 8) == (7).to_bytes(8, "little")
    with pytest.raises(BufferInUse):
        buffer.close()
    del whole, view


MOVES = st.tuples(st.booleans(), st.integers(0, 20 * PAGE))


@settings(max_examples=40)
@given(st.integers(0, 12).flatmap(lambda size: st.lists(MOVES, min_size=size, max_size=size)))
def test_whatever_it_did_its_bytes_are_where_they_were(moves: list[tuple[bool, int]]) -> None:
    driver = HostDriver(24 * PAGE, page_bytes=PAGE)
    buffer = make(driver)
    pattern = bytes(range(251)) * (20 * PAGE // 251 + 1)
    address, size, written = buffer.address, 0, 0
    for grows, num_bytes in moves:
        if grows:
            buffer.grow(num_bytes)
            size = max(size, num_bytes)
        else:
            buffer.shrink(num_bytes)
            size, written = min(size, num_bytes), min(written, num_bytes)
        assert ctypes.string_at(address, written) == pattern[:written]
        ctypes.memmove(address, pattern[:size], size)
        written = size
        assert (buffer.address, buffer.num_bytes) == (address, size)
        assert size <= buffer.committed_bytes == driver.used_bytes < size + PAGE
    buffer.close()
    assert driver.close() == ()
