"""Graphs and registrations hold ranges: who holds what, when a launch is refused, and what that costs."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.buffers import BufferManager, Device, Restore, Stream, VaArena, scope
from tonnage.buffers.allocation import VirtualAllocation
from tonnage.buffers.chunk import Chunk, PageRun, pieces_of
from tonnage.buffers.entries import FixedExtent
from tonnage.buffers.graph_ranges import GraphRanges
from tonnage.buffers.scopes import ScopeConfig
from tonnage.device import ranges as ranges_module
from tonnage.device.host import HostDriver
from tonnage.device.ranges import RangeBook
from tonnage.errors import CaptureError, GraphRangeUnmapped, RangeReferenced
from tonnage.ledger import Ledger
from tonnage.terms import LineKind

PAGE = 2**16


@pytest.fixture
def arena(driver: HostDriver):
    arena = make(Stream(Device(driver)), "kv")
    arena.commit(8 * PAGE)
    yield arena
    arena.close()


@pytest.fixture
def graphs(arena: VaArena):
    graphs = arena.stream.device.graphs
    yield graphs
    for graph_id in list(graphs._graphs):
        graphs.destroy(graph_id)


def make(stream: Stream, owner: str, **arguments) -> VaArena:
    return VaArena(
        stream,
        ledger=Ledger(0, 64 * PAGE),
        owner=owner,
        line=LineKind.KV,
        reserve_bytes=32 * PAGE,
        tag=owner,
        **arguments,
    )


def ranges_of(graphs: GraphRanges, graph_id: str) -> set[tuple[int, int, str]]:
    return {(touched.addr, touched.size, touched.owner) for touched in graphs.ranges(graph_id)}


def test_one_for_each_device(arena: VaArena, graphs: GraphRanges) -> None:
    assert arena.stream.device.graphs is graphs
    assert "0 graphs, 0 registrations" in repr(graphs)


# what belongs to a graph


def test_what_is_handed_out_during_the_capture_belongs_to_the_graph(arena: VaArena, graphs: GraphRanges) -> None:
    other = make(arena.stream, "other")
    other.commit(PAGE)
    with graphs.capture("g"):
        address = arena.address
    assert ranges_of(graphs, "g") == {(address, 8 * PAGE, "kv")}
    arena.commit(9 * PAGE)
    assert ranges_of(graphs, "g") == {(address, 8 * PAGE, "kv")}  # as it was when it was captured
    other.close()


def test_what_somebody_looks_at_belongs_to_it_although_nobody_asked(arena: VaArena, graphs: GraphRanges) -> None:
    number = arena.exports.add("a tensor")
    with graphs.capture("g"):
        pass
    arena.exports.drop(number)
    with graphs.capture("h"):
        pass
    assert ranges_of(graphs, "g") == {(arena.address, 8 * PAGE, "kv")}
    assert ranges_of(graphs, "h") == set()


def test_touched_by_hand_and_only_a_part(arena: VaArena, graphs: GraphRanges) -> None:
    with graphs.capture("g") as capture:
        capture.touch(123, 45, owner="cuBLAS")
        capture.only(arena, 2 * PAGE)
        arena.address  # noqa: B018
    assert ranges_of(graphs, "g") == {(123, 45, "cuBLAS"), (arena.address, 2 * PAGE, "kv")}
    assert arena.decommit(2 * PAGE) == 6 * PAGE


def test_a_capture_that_fails_leaves_nothing(arena: VaArena, graphs: GraphRanges) -> None:
    with pytest.raises(ZeroDivisionError), graphs.capture("g"):
        raise ZeroDivisionError
    with pytest.raises(KeyError):
        graphs.check("g")
    with graphs.capture("g"), pytest.raises(ValueError, match="destroy it first"), graphs.capture("g"):
        pass


def test_no_page_changes_during_a_capture(arena: VaArena, graphs: GraphRanges, driver: HostDriver) -> None:
    with graphs.capture("g"):
        for call in (lambda: arena.commit(9 * PAGE), lambda: arena.decommit(0)):
            with pytest.raises(CaptureError, match="'g'"):
                call()
    assert driver.used_bytes == 8 * PAGE


# memory of scopes


@pytest.fixture
def scoped(graphs: GraphRanges, arena: VaArena):
    """Two pages of owner "e" that sleep as "weights"."""
    device = arena.stream.device
    config = ScopeConfig(tag="weights")
    made = device.virtual.allocate(2 * PAGE, config=config, account=None, owner="e", stream=arena.stream)
    yield made
    for graph_id in list(graphs._graphs):
        graphs.destroy(graph_id)
    made.free(sync=True)


def test_memory_of_a_scope_belongs_to_the_graph_and_may_not_sleep_or_go_under_it(
    scoped: VirtualAllocation, graphs: GraphRanges, arena: VaArena
) -> None:
    virtual, launched = arena.stream.device.virtual, []
    with graphs.capture("g"):  # nobody asks us for the address: it may be in a tensor
        pass
    assert ranges_of(graphs, "g") == {(scoped.address, 2 * PAGE, "e")}
    assert graphs.launch("g", lambda: "launched") == "launched"
    with pytest.raises(RangeReferenced, match=r"graph 'g'.*'e' \(tag 'weights'\)"):
        scoped.free()
    virtual.release("weights")
    with pytest.raises(GraphRangeUnmapped, match=r"of 'e' \(tag 'weights'\)"):
        graphs.launch("g", lambda: launched.append(1))
    assert not launched
    virtual.materialize("weights").sync()
    assert graphs.launch("g", lambda: "launched") == "launched"
    graphs.destroy("g")
    scoped.free(sync=True)
    assert virtual.leftovers("weights") == ()


def test_what_sleeps_at_the_end_of_a_capture_is_not_in_it(
    scoped: VirtualAllocation, graphs: GraphRanges, arena: VaArena
) -> None:
    arena.stream.device.virtual.release("weights")
    with graphs.capture("g"):
        pass
    assert ranges_of(graphs, "g") == set()


def test_a_capture_may_say_how_much_of_a_scopes_memory_it_uses(
    scoped: VirtualAllocation, graphs: GraphRanges, arena: VaArena
) -> None:
    with graphs.capture("g") as capture:
        capture.only(scoped, PAGE)
    with graphs.capture("h") as capture:
        capture.only(scoped, 0)
    assert ranges_of(graphs, "g") == {(scoped.address, PAGE, "e")}
    assert ranges_of(graphs, "h") == set()


def test_a_buffer_of_a_scope_keeps_its_memory_while_a_graph_replays_over_it(
    graphs: GraphRanges, arena: VaArena
) -> None:
    manager = BufferManager(arena.stream, ledger=Ledger(0, 64 * PAGE), owner="e")
    with scope("weights", restore=Restore.PINNED):
        buffer = manager.gpu(100, line=LineKind.TABLES)
    with graphs.capture("g") as capture:
        pass
    with graphs.capture("h") as capture:
        capture.only(buffer, 0)
    with pytest.raises(RangeReferenced, match="graph 'g'"):
        buffer.close()
    arena.stream.device.virtual.release("weights")
    with pytest.raises(GraphRangeUnmapped, match="'weights'"):
        graphs.launch("g", lambda: None)
    graphs.check("h")
    graphs.destroy("g")
    buffer.close()
    arena.stream.device.fences.quiesce()


def test_nothing_of_a_scope_is_freed_during_a_capture(
    scoped: VirtualAllocation, graphs: GraphRanges, arena: VaArena
) -> None:
    with graphs.capture("g"), pytest.raises(CaptureError, match="'g'"):
        scoped.free()
    assert ranges_of(graphs, "g") == {(scoped.address, 2 * PAGE, "e")}


def test_a_chunk_of_someone_else_is_told_of_too(graphs: GraphRanges, arena: VaArena, driver: HostDriver) -> None:
    virtual = arena.stream.device.virtual
    address = driver.va_reserve(PAGE, align=PAGE)
    run = PageRun(driver, pieces_of(address, PAGE))
    chunk, extent = Chunk(run, [run]), FixedExtent(address, PAGE, PAGE)
    chunk.materialize()
    virtual.add(address, chunk, tag="comm", owner="peer", extent=extent, stream=arena.stream)
    with graphs.capture("g"):
        pass
    virtual.release("comm")
    with pytest.raises(GraphRangeUnmapped, match="'peer'"):
        graphs.check("g")
    virtual.remove(address)
    driver.va_free(address, PAGE)


# launches


def test_a_launch_over_memory_that_sleeps_is_refused_by_name(arena: VaArena, graphs: GraphRanges) -> None:
    virtual = arena.stream.device.virtual
    with graphs.capture("decode 32"):
        arena.address  # noqa: B018
    assert graphs.launch("decode 32", lambda: 7) == 7
    virtual.release("kv")
    with pytest.raises(GraphRangeUnmapped, match=rf"'decode 32'.*524,288 bytes at {arena.address:#x} of 'kv'"):
        graphs.launch("decode 32", lambda: pytest.fail("it was launched"))
    with pytest.raises(GraphRangeUnmapped):
        graphs.check("decode 32")  # a refusal is not remembered as a success
    virtual.materialize("kv")
    assert graphs.launch("decode 32", lambda: 8) == 8


def test_a_range_that_never_was_mapped_is_found(arena: VaArena, graphs: GraphRanges) -> None:
    with graphs.capture("g") as capture:
        capture.touch(arena.address + 7 * PAGE, 2 * PAGE)
    with pytest.raises(GraphRangeUnmapped, match=rf"65,536 of them at {arena.address + 8 * PAGE:#x}"):
        graphs.check("g")
    arena.commit(9 * PAGE)
    graphs.check("g")
    graphs.destroy("g")
    with pytest.raises(KeyError):
        graphs.check("g")


def test_a_launch_waits_for_an_edit_and_then_looks_again(
    arena: VaArena, graphs: GraphRanges, monkeypatch: pytest.MonkeyPatch
) -> None:
    with graphs.capture("g") as capture:
        capture.touch(arena.address, 12 * PAGE)
    arena.commit(12 * PAGE)
    graphs.check("g")
    graphs.destroy("g")
    with graphs.capture("g") as capture:
        capture.only(arena, PAGE)
    draining, launched = threading.Event(), []
    wait_idle = arena.stream.device.fences.wait_idle

    def slow(**arguments: float | None) -> bool:
        draining.set()
        time.sleep(0.05)
        assert not launched
        return wait_idle(**arguments)

    monkeypatch.setattr(arena.stream.device.fences, "wait_idle", slow)
    editor = threading.Thread(target=arena.decommit, args=(4 * PAGE,))
    editor.start()
    assert draining.wait(10)
    graphs.launch("g", lambda: launched.append(arena.committed_bytes))
    editor.join()
    assert launched == [4 * PAGE]


def test_a_check_costs_less_than_a_microsecond(arena: VaArena, graphs: GraphRanges) -> None:
    for number in range(50):
        with graphs.capture(f"g{number}"):
            arena.address  # noqa: B018
    graphs.check("g7")
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            graphs.check("g7")
        best = min(best, (time.perf_counter() - start) / 1000)
    assert best < 1e-6


# what is held


def test_a_graph_holds_its_pages_until_it_is_destroyed(arena: VaArena, graphs: GraphRanges, driver: HostDriver) -> None:
    with graphs.capture("g") as capture:
        capture.only(arena, 3 * PAGE + 1)
    edits = arena.num_edits
    with pytest.raises(RangeReferenced, match="graph 'g' replays over 196,609 bytes"):
        arena.decommit(3 * PAGE)
    assert (arena.committed_bytes, driver.used_bytes, arena.num_edits) == (8 * PAGE, 8 * PAGE, edits)
    assert arena.decommit(4 * PAGE) == 4 * PAGE
    assert graphs.referenced_bytes(arena.address, 8 * PAGE) == 3 * PAGE + 1
    with pytest.raises(RangeReferenced):
        arena.close()
    graphs.destroy("g")
    assert graphs.referenced(arena.address, 8 * PAGE) is None
    assert graphs.referenced_bytes(arena.address, 8 * PAGE) == 0
    assert arena.decommit(0) == 4 * PAGE


def test_a_registration_without_callbacks_pins_its_pages(arena: VaArena, graphs: GraphRanges) -> None:
    one = graphs.register(arena.address + PAGE, PAGE, owner="RDMA")
    assert graphs.referenced(arena.address, PAGE) is None
    assert "RDMA" in str(graphs.referenced(arena.address + 2 * PAGE - 1, 1))
    assert graphs.referenced(arena.address + 2 * PAGE, PAGE) is None
    with pytest.raises(RangeReferenced, match="'RDMA'"):
        arena.decommit(PAGE)
    with pytest.raises(RangeReferenced, match="no callbacks"):
        arena.stream.device.virtual.release("kv")
    assert not arena.is_asleep
    assert arena.decommit(2 * PAGE) == 6 * PAGE
    one.close()
    one.close()
    assert arena.decommit(0) == 2 * PAGE


def test_a_registration_with_callbacks_is_taken_down_and_put_up_again(arena: VaArena, graphs: GraphRanges) -> None:
    told: list[object] = []
    committed = lambda: arena.committed_bytes // PAGE  # noqa: E731
    start = arena.address
    graphs.register(
        start,
        6 * PAGE,
        owner="NCCL",
        unregister=lambda: told.append(("down", committed(), arena.is_asleep)),
        reregister=lambda addr, size: told.append(("up", addr - start, size // PAGE)),
    )
    arena.decommit(6 * PAGE)  # beside it: nothing to tell
    arena.commit(8 * PAGE)
    assert told == []
    arena.decommit(4 * PAGE)
    arena.commit(5 * PAGE)
    assert told == [("down", 8, False), ("up", 0, 4), ("down", 4, False), ("up", 0, 5)]
    del told[:]
    arena.stream.device.virtual.release("kv")
    arena.stream.device.virtual.materialize("kv")
    assert told == [("down", 5, False), ("up", 0, 5)]


def test_an_edit_that_fails_puts_registrations_up_again(arena: VaArena, graphs: GraphRanges, monkeypatch) -> None:
    told: list[str] = []
    graphs.register(
        arena.address, PAGE, owner="NCCL", unregister=lambda: told.append("down"),
        reregister=lambda *_: told.append("up"),
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError), graphs.editing(arena.address, PAGE, unmaps=True):
        raise ZeroDivisionError
    assert told == ["down", "up"]


def test_an_edit_stands_where_a_registration_cannot_be_put_up_again(arena: VaArena, graphs: GraphRanges) -> None:
    def refuse(_addr: int, _size: int) -> None:
        raise ConnectionError("the library is gone")

    one = graphs.register(arena.address, 20 * PAGE, owner="NCCL", unregister=lambda: None, reregister=refuse)
    with pytest.raises(ConnectionError):
        arena.commit(10 * PAGE)
    assert arena.committed_bytes == 10 * PAGE
    with pytest.raises(ConnectionError):
        arena.decommit(5 * PAGE)
    assert arena.committed_bytes == 5 * PAGE
    one.close()
    assert arena.commit(6 * PAGE) == 6 * PAGE


EDITS = st.tuples(st.integers(0, 30), st.integers(1, 12), st.booleans())


@settings(max_examples=50)
@given(st.integers(0, 25).flatmap(lambda size: st.lists(EDITS, min_size=size, max_size=size)))
def test_holes_are_what_was_unmapped_last(edits: list[tuple[int, int, bool]]) -> None:
    graphs, mapped = GraphRanges(), [True] * 50
    for number in range(50):
        with graphs.capture(str(number)) as capture:
            capture.touch(number, 1)
    for start, size, is_mapped in edits:
        graphs.edited(start, size, mapped=is_mapped, owner="x")
        mapped[start : start + size] = [is_mapped] * size
        for number in range(50):
            if mapped[number]:
                graphs.check(str(number))
            else:
                with pytest.raises(GraphRangeUnmapped):
                    graphs.check(str(number))


def test_a_range_that_cannot_be_made_leaves_the_book_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    book: RangeBook[str] = RangeBook()
    book.add(10, 5, "a")

    def full(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ranges_module, "Range", full)
        with pytest.raises(MemoryError):
            book.add(20, 5, "b")
    assert [one.value for one in book] == ["a"]
    assert [one.value for one in book.overlapping(0, 100)] == ["a"]
