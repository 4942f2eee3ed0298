"""Ctrl-C in the middle of a step: it arrives, and only when everything is in the books."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from virtual_bench import CAPACITY, PAGE, is_intact, write

from tonnage.buffers import Device, Restore, StableBuffer, Stream, VaArena
from tonnage.buffers.allocation import VirtualAllocation
from tonnage.buffers.chunk import Chunk, PageRun, State, pieces_of
from tonnage.buffers.graph_ranges import GraphRanges
from tonnage.buffers.runs import ArenaRun
from tonnage.buffers.scopes import ScopeConfig
from tonnage.buffers.uninterrupted import undone_if_interrupted, uninterrupted
from tonnage.device.decorator import CALLS, Call, DriverDecorator
from tonnage.device.driver import Driver
from tonnage.device.host import HostDriver
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind


class Handled(BaseException):
    """What a handler of the caller's own raises."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


# the tool


def test_a_signal_waits_for_the_end() -> None:
    done = []

    @uninterrupted
    def press_and_go_on() -> None:
        press()
        press()
        with uninterrupted:
            done.append("inner")
            press()
        done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        press_and_go_on()
    assert done == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt):
        press()


def test_it_arrives_when_the_body_raises_too() -> None:
    @uninterrupted
    def press_and_fail() -> None:
        press()
        raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt) as caught:
        press_and_fail()
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError), uninterrupted:
        raise ZeroDivisionError
    with uninterrupted:
        pass  # what was told is not told again


def test_the_handler_before_is_called_with_what_it_would_have_seen() -> None:
    seen = []

    def mine(number: int, frame: Any) -> None:
        seen.append((number, frame is not None))

    signal.signal(signal.SIGINT, mine)
    with uninterrupted:
        press()
        assert seen == []
    assert (seen, signal.getsignal(signal.SIGINT)) == ([(signal.SIGINT, True)], mine)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_that_the_body_sets_stays() -> None:
    def mine(*_: object) -> None:
        raise Handled

    with uninterrupted:
        signal.signal(signal.SIGINT, mine)
    with pytest.raises(Handled):
        press()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_what_the_system_does_by_itself_is_left_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        press()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_change_no_handler() -> None:
    seen = []

    @uninterrupted
    def look() -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    look()
    assert seen[0] is signal.default_int_handler
    assert seen[1] is not signal.default_int_handler


def test_what_does_not_reach_its_caller_is_undone() -> None:
    undone = []
    with pytest.raises(KeyboardInterrupt), undone_if_interrupted(lambda: undone.append("made")):
        press()
    assert undone == ["made"]
    with pytest.raises(ZeroDivisionError), undone_if_interrupted(lambda: undone.append("not made")):
        raise ZeroDivisionError
    with undone_if_interrupted(lambda: undone.append("kept")):
        pass
    assert undone == ["made"]


# every driver call of every step


class PressDriver(DriverDecorator):
    """SIGINT comes as soon as call number ``nth`` is done, before its result is with the caller."""

    nth: int | None
    num_calls: int

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.nth, self.num_calls = None, 0

    def _around(self, call: str) -> Call | None:
        def pressed(*args: Any, **kwargs: Any) -> Any:
            result = getattr(self.wrapped, call)(*args, **kwargs)
            if self.nth is not None:
                self.num_calls += 1
                if self.num_calls == self.nth:
                    press()
            return result

        return pressed if call in CALLS else None


class Desk:
    """A small device whose user presses Ctrl-C."""

    def __init__(self) -> None:
        self.host = HostDriver(CAPACITY, page_bytes=PAGE)
        self.driver = PressDriver(self.host)
        self.device = Device(self.driver)
        self.stream = Stream(self.device)
        self.ledger = Ledger(0, CAPACITY, host_is_device=False)

    def arena(self) -> VaArena:
        return VaArena(
            self.stream, ledger=self.ledger, owner="kv", line=LineKind.KV, reserve_bytes=16 * PAGE, tag="kv",
            chunk_bytes=2 * PAGE, zero_ranges=((10, 20),), restore=Restore.CPU,
        )  # fmt: skip

    def allocate(self) -> VirtualAllocation:
        account = self.ledger.open(owner="w", line=LineKind.TABLES, memory=MemoryKind.GPU, tag="w")
        config = ScopeConfig(tag="w", restore=Restore.PINNED)
        return self.device.virtual.allocate(
            3 * PAGE, config=config, account=account, owner="w", stream=self.stream, zero_ranges=[(200, 8)]
        )

    def stable(self) -> StableBuffer:
        return StableBuffer.make(
            self.stream, ledger=self.ledger, owner="s", line=LineKind.TABLES, most_bytes=8 * PAGE, num_bytes=2 * PAGE
        )

    def require_balance(self) -> None:
        assert self.ledger.accounted_bytes == self.host.used_bytes

    def close(self) -> None:
        self.driver.nth = None
        self.device.fences.quiesce()
        self.device.virtual.sweep()
        self.require_balance()
        assert self.ledger.accounted_bytes == 0
        assert self.device.virtual.leftovers() == ()
        self.device.virtual.backings.sweep()
        assert self.host.leaks() == ()
        assert len(self.host._events) == 0
        self.host.close()


def points(step: Callable[[Desk], Callable[[], None]], check: Callable[[Desk], None]) -> int:
    """``step`` prepares and returns what is interrupted after driver call 1, 2, 3 ... until there is none left."""
    for nth in count(1):
        desk = Desk()
        run = step(desk)
        desk.driver.nth, desk.driver.num_calls = nth, 0
        try:
            run()
            was_reached = False
        except KeyboardInterrupt:
            was_reached = True
        assert was_reached == (desk.driver.num_calls >= nth), "Ctrl-C did not arrive"
        desk.driver.nth = None
        desk.require_balance()
        check(desk)
        desk.close()
        if not was_reached:
            return nth - 1
    raise AssertionError("unreachable")


@pytest.mark.parametrize(("before", "after"), [(0, 5), (3, 8), (8, 1), (5, 0)])
def test_a_commit_or_decommit_is_whole(before: int, after: int) -> None:
    arenas: list[VaArena] = []

    def step(desk: Desk) -> Callable[[], None]:
        arenas[:] = [desk.arena()]
        arenas[0].commit(before * PAGE)
        call = arenas[0].commit if after > before else arenas[0].decommit
        return lambda: call(after * PAGE) and None

    def check(desk: Desk) -> None:
        arena = arenas[0]
        assert arena.poisoned == ()
        assert (arena.leftover_bytes, desk.host.used_bytes) == (0, arena.committed_bytes)
        arena.decommit(0)
        arena.commit(4 * PAGE)  # every address is free to be mapped, and every page to be unmapped
        arena.close()

    assert points(step, check) >= 5


def test_closing_an_arena_is_whole() -> None:
    arenas: list[VaArena] = []

    def step(desk: Desk) -> Callable[[], None]:
        arenas[:] = [desk.arena()]
        arenas[0].commit(5 * PAGE)
        return arenas[0].close

    def check(desk: Desk) -> None:
        arenas[0].close()

    assert points(step, check) >= 4


@pytest.mark.parametrize("what", ["arena", "allocation", "stable"])
def test_what_is_made_is_there_or_not_at_all(what: str) -> None:
    made: list[Any] = []

    def step(desk: Desk) -> Callable[[], None]:
        made.clear()
        make: dict[str, Callable[[], Any]] = {"arena": desk.arena, "allocation": desk.allocate, "stable": desk.stable}
        return lambda: made.append(make[what]())

    def check(desk: Desk) -> None:
        for one in made:
            one.free(sync=True) if what == "allocation" else one.close()

    assert points(step, check) >= (1 if what == "arena" else 4)


def sleepers(desk: Desk) -> tuple[VaArena, VirtualAllocation]:
    arena, made = desk.arena(), desk.allocate()
    arena.commit(3 * PAGE)
    write(made)
    return arena, made


@pytest.mark.parametrize("step_name", ["release", "materialize", "free", "free asleep"])
def test_a_sleep_a_wake_and_a_free_are_whole(step_name: str) -> None:
    held: list[Any] = []

    def step(desk: Desk) -> Callable[[], None]:
        held[:] = sleepers(desk)
        virtual = desk.device.virtual
        if step_name in ("materialize", "free asleep"):
            virtual.release("kv", "w")
        if step_name.startswith("free"):
            return lambda: held[1].free(sync=True)
        return lambda: getattr(virtual, step_name)("kv", "w") and None

    def check(desk: Desk) -> None:
        arena, made = held
        virtual = desk.device.virtual
        assert virtual.bad_handles() == ()
        virtual.materialize("kv", "w").sync()
        if not step_name.startswith("free"):
            assert made.state is State.MATERIALIZED
            assert is_intact(made)
            assert desk.ledger.accounted_bytes == 6 * PAGE
        made.free(sync=True)
        arena.close()

    assert points(step, check) >= 3


# an interrupt that comes out of the driver's own call, as one on another thread does


class _Cut(DriverDecorator):
    """Call number ``nth`` of ``name`` is done, and raises ``KeyboardInterrupt`` all the same."""

    def __init__(self, driver: Driver, name: str, nth: int = 1) -> None:
        super().__init__(driver)
        self._name, self._left = name, nth

    def _around(self, call: str) -> Call | None:
        def cut(*args: Any, **kwargs: Any) -> Any:
            result = getattr(self.wrapped, call)(*args, **kwargs)
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
            return result

        return cut if call == self._name else None


def test_nobody_believes_a_mapping_that_may_be_gone() -> None:
    host = HostDriver(CAPACITY, page_bytes=PAGE)
    address = host.va_reserve(8 * PAGE, align=PAGE)
    driver = _Cut(host, "unmap")
    told: list[tuple[int, int, bool]] = []
    ledger = Ledger(0, CAPACITY)
    account = ledger.open(owner="kv", line=LineKind.KV, memory=MemoryKind.GPU)
    run = ArenaRun(Device(driver), account, edited=lambda *edit: told.append(edit))
    run.pieces += pieces_of(address, 2 * PAGE, handle_bytes=PAGE) + pieces_of(address + 4 * PAGE, PAGE)
    run.create_pieces(run.pieces)
    run.map_pieces(run.pieces)
    run.book(run.pieces)
    told.clear()
    with pytest.raises(KeyboardInterrupt):
        run.take_away(run.pieces)
    assert told == [(address, 2 * PAGE, False), (address + 4 * PAGE, PAGE, False)]
    assert not any(piece.is_held for piece in run.pieces)
    assert (host.used_bytes, ledger.accounted_bytes, run.poisoned) == (0, 0, [])
    host.va_free(address, 8 * PAGE)
    assert host.close() == ()


@pytest.mark.parametrize(("call", "nth"), [("map", 2), ("unmap", 1)])
def test_a_chunk_that_is_cut_short_holds_no_page(call: str, nth: int) -> None:
    host = HostDriver(CAPACITY, page_bytes=PAGE)
    address = host.va_reserve(3 * PAGE, align=PAGE)
    run = PageRun(_Cut(host, call, nth), pieces_of(address, 3 * PAGE, handle_bytes=PAGE))
    chunk = Chunk(run, [run])

    def come_and_go() -> None:
        chunk.materialize()
        chunk.release()

    with pytest.raises(KeyboardInterrupt):
        come_and_go()
    if chunk.is_releasable:
        chunk.release()
    assert (host.used_bytes, run.held_bytes) == (0, 0)
    host.va_free(address, 3 * PAGE)
    assert host.close() == ()


def test_the_graphs_hear_of_it() -> None:
    desk = Desk()
    arena = desk.arena()
    arena.commit(4 * PAGE)
    graphs: GraphRanges = desk.device.graphs
    with graphs.capture("g") as capture:
        capture.only(arena, 0)
    before = graphs.epoch
    desk.driver.nth, desk.driver.num_calls = 1, 0
    with pytest.raises(KeyboardInterrupt):
        arena.decommit(0)
    assert graphs.epoch > before
    arena.close()
    desk.close()
