"""Chunks: every step in order, undone in reverse, and a state that tells what may be called next."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.buffers.chunk import Chunk, PageRun, Piece, State, pieces_of
from tonnage.device.fault import ALLOCATING, RELEASING, FaultDriver
from tonnage.device.hazard import HazardDriver
from tonnage.device.host import HostDriver
from tonnage.errors import DriverError, DriverOOM

PAGE = 2**16
UP = ["create", "setup 1", "setup 2", "setup 3"]
DOWN = ["teardown 3", "teardown 2", "teardown 1", "release"]


class Broken(Exception):
    """A step that fails on purpose; its name is the argument."""


class Steps:
    """A creator and three configurators that write down what is asked of them and fail where ``fails`` says."""

    def __init__(self, *fails: str) -> None:
        self.calls: list[str] = []
        self.handles: list[object] = []
        self.destructing: set[bool] = set()
        self.fails = set(fails)

    def chunk(self) -> Chunk[object]:
        return Chunk(self, [_Step(self, number) for number in (1, 2, 3)])

    def call(self, name: str, handle: object = None) -> None:
        self.calls.append(name)
        self.handles.append(handle)
        if name in self.fails:
            raise Broken(name)

    def create(self) -> object:
        self.call("create")
        return "the handle"

    def release(self, handle: object, *, destructing: bool) -> None:
        self.destructing.add(destructing)
        self.call("release", handle)


class _Step:
    def __init__(self, steps: Steps, number: int) -> None:
        self._steps, self._number = steps, number

    def setup(self, handle: object) -> None:
        self._steps.call(f"setup {self._number}", handle)

    def teardown(self, handle: object, *, destructing: bool) -> None:
        self._steps.destructing.add(destructing)
        self._steps.call(f"teardown {self._number}", handle)


def test_up_in_order_and_down_in_reverse() -> None:
    steps = Steps()
    chunk = steps.chunk()
    assert (chunk.state, chunk.is_releasable) == (State.RELEASED, False)
    chunk.materialize()
    assert (steps.calls, chunk.state, chunk.is_releasable) == (UP, State.MATERIALIZED, True)
    chunk.release()
    assert (steps.calls, chunk.state) == (UP + DOWN, State.RELEASED)
    assert set(steps.handles) == {None, "the handle"}
    assert steps.destructing == {False}


def test_it_comes_and_goes_as_often_as_one_likes() -> None:
    steps = Steps()
    chunk = steps.chunk()
    for _ in range(5):
        chunk.materialize()
        chunk.release()
    assert steps.calls == (UP + DOWN) * 5


@pytest.mark.parametrize("handle", [0, (), ""])
def test_any_handle_but_none_counts(handle: object) -> None:
    steps = Steps()
    steps.create = lambda: handle  # type: ignore[method-assign]
    chunk = steps.chunk()
    chunk.materialize()
    assert chunk.state is State.MATERIALIZED
    chunk.release()


@pytest.mark.parametrize("num_done", range(4), ids=UP)
def test_a_failure_on_the_way_up(num_done: int) -> None:
    steps = Steps(UP[num_done])
    chunk = steps.chunk()
    with pytest.raises(Broken, match=UP[num_done]):
        chunk.materialize()
    assert steps.calls == UP[: num_done + 1]  # nothing is undone yet
    assert not chunk.is_terminal
    if num_done == 0:
        assert chunk.state is State.RELEASED
    else:
        assert chunk.state is State.ERRORED
        with pytest.raises(ValueError, match="cannot be materialised"):
            chunk.materialize()
        steps.calls.clear()
        chunk.release()
        assert steps.calls == DOWN[4 - num_done :]  # only what was set up, then the creator
        assert chunk.state is State.RELEASED
    steps.fails.clear()
    chunk.materialize()
    assert chunk.state is State.MATERIALIZED


@pytest.mark.parametrize("fails", [DOWN[:1], DOWN[1:2], DOWN[3:], DOWN[:2], DOWN], ids=" and ".join)
def test_a_failure_on_the_way_down_stops_nothing(fails: list[str], caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(*fails)
    chunk = steps.chunk()
    chunk.materialize()
    steps.calls.clear()
    with caplog.at_level(logging.ERROR), pytest.raises(Broken, match=fails[-1]):
        chunk.release()
    assert steps.calls == DOWN
    assert [fail in caplog.text for fail in fails[:-1]] == [True] * (len(fails) - 1)  # the earlier ones are logged
    assert (chunk.state, chunk.is_terminal, chunk.is_releasable) == (State.ERRORED, True, False)
    for call in (chunk.materialize, chunk.release):
        with pytest.raises(ValueError):
            call()
    chunk.destroy()
    assert (steps.calls, chunk.is_terminal) == (DOWN, True)


def test_twice_is_refused_and_changes_nothing() -> None:
    steps = Steps()
    chunk = steps.chunk()
    with pytest.raises(ValueError, match="nothing to release"):
        chunk.release()
    assert (steps.calls, chunk.state) == ([], State.RELEASED)
    chunk.materialize()
    with pytest.raises(ValueError, match="cannot be materialised"):
        chunk.materialize()
    assert (steps.calls, chunk.state) == (UP, State.MATERIALIZED)


def test_an_empty_chunk_does_nothing() -> None:
    chunk: Chunk[object] = Chunk()
    assert chunk.state is State.INVALID
    for call in (chunk.materialize, chunk.release):
        with pytest.raises(ValueError):
            call()
    chunk.destroy()


def test_destroying_releases_once() -> None:
    steps = Steps()
    chunk = steps.chunk()
    chunk.materialize()
    chunk.destroy()
    chunk.destroy()
    assert (steps.calls, steps.destructing) == (UP + DOWN, {True})

    steps = Steps()
    chunk = steps.chunk()
    chunk.materialize()
    chunk.release()
    chunk.destroy()
    assert steps.calls == UP + DOWN  # released by hand: not again

    steps = Steps("setup 2")
    chunk = steps.chunk()
    with pytest.raises(Broken):
        chunk.materialize()
    chunk.destroy()
    assert steps.calls == [*UP[:3], "teardown 1", "release"]


def test_a_finaliser_edits_no_page_table_under_running_work(caplog: pytest.LogCaptureFixture) -> None:
    host = HostDriver(8 * PAGE, page_bytes=PAGE)
    driver = HazardDriver(host, strict=False)
    address = driver.va_reserve(PAGE, align=PAGE)
    run = PageRun(driver, pieces_of(address, PAGE))
    chunk = Chunk(run, [run])
    chunk.materialize()
    driver.launch(0, writes=[(address, PAGE)], what="a step")
    del chunk  # nothing refers back to it: it goes here and now
    assert driver.hazards == []
    assert host.used_bytes == PAGE  # the process gives it back, or the driver's close
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "was dropped with its memory" in caplog.text
    driver.device_sync()
    run.give_back()
    driver.va_free(address, PAGE)
    assert host.close() == ()


def test_destroying_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps("teardown 2")
    chunk = steps.chunk()
    chunk.materialize()
    with caplog.at_level(logging.ERROR):
        chunk.destroy()
        chunk.destroy()
    assert (steps.calls, "teardown 2" in caplog.text) == (UP + DOWN, True)


# pages


def paged(driver, num_pages: int, *, handle_pages: int = 4) -> tuple[Chunk[list[Piece]], PageRun, int]:
    address = driver.va_reserve(num_pages * PAGE, align=PAGE)
    run = PageRun(driver, pieces_of(address, num_pages * PAGE, handle_bytes=handle_pages * PAGE))
    return Chunk(run, [run]), run, address


@given(size=st.integers(1, 100), handle=st.integers(1, 100))
def test_pieces_cover_the_range_without_gap(size: int, handle: int) -> None:
    pieces = pieces_of(7, size, handle_bytes=handle)
    assert [piece.addr for piece in pieces] == list(range(7, 7 + size, handle))
    assert sum(piece.size for piece in pieces) == size
    assert max(piece.size for piece in pieces) <= handle


def test_neighbours_are_opened_and_unmapped_by_one_call(driver: HostDriver) -> None:
    fault = FaultDriver(driver)
    chunk, run, address = paged(fault, 10)
    fault.arm(None, calls=ALLOCATING | RELEASING)
    chunk.materialize()
    assert dict(fault.by_call) == {"phys_create": 3, "map": 3, "set_access": 1}
    assert run.held_bytes == run.padded_bytes == driver.used_bytes == 10 * PAGE
    fault.arm(None, calls=ALLOCATING | RELEASING)
    chunk.release()
    assert dict(fault.by_call) == {"unmap": 1, "phys_release": 3}
    assert run.held_bytes == driver.used_bytes == 0
    driver.va_free(address, 10 * PAGE)


def test_a_run_with_gaps_grows_and_shrinks_while_awake(driver: HostDriver) -> None:
    address = driver.va_reserve(10 * PAGE, align=PAGE)
    run = PageRun(driver, [Piece(address, PAGE), Piece(address + 2 * PAGE, PAGE)])
    chunk = Chunk(run, [run])
    chunk.materialize()
    more = [Piece(address + 3 * PAGE, 2 * PAGE)]
    run.create_pieces(more)
    run.map_pieces(more)
    run.pieces += more
    driver.fill(address + 2 * PAGE, 1, 3 * PAGE, stream=0)
    gone = [run.pieces.pop(0)]
    run.unmap_pieces(gone)
    run.release_pieces(gone)
    chunk.release()
    assert driver.used_bytes == 0
    chunk.materialize()
    assert driver.used_bytes == 3 * PAGE
    assert driver.is_accessible(address + 2 * PAGE, 3 * PAGE)
    assert not driver.is_accessible(address, PAGE)
    chunk.release()
    driver.va_free(address, 10 * PAGE)


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_run_that_fails_on_the_way_up_holds_nothing(driver: HostDriver, nth: int) -> None:
    fault = FaultDriver(driver)
    chunk, run, address = paged(fault, 10)
    fault.arm(nth)
    with pytest.raises(DriverOOM, match="INJECTED"):
        chunk.materialize()
    assert fault.num_injected == 1
    if chunk.state is State.ERRORED:
        chunk.release()
    assert (driver.used_bytes, run.held_bytes, chunk.state) == (0, 0, State.RELEASED)
    chunk.materialize()
    chunk.release()
    driver.va_free(address, 10 * PAGE)


@pytest.mark.parametrize("nth", range(1, 5))
@pytest.mark.parametrize("forever", [False, True])
def test_what_the_driver_would_not_take_is_remembered(driver: HostDriver, nth: int, forever: bool) -> None:
    fault = FaultDriver(driver)
    chunk, run, address = paged(fault, 10)
    chunk.materialize()
    fault.arm(nth, forever=forever, calls=RELEASING)
    with pytest.raises(DriverError, match="INJECTED"):
        chunk.release()
    assert chunk.is_terminal
    assert run.held_bytes >= driver.used_bytes > 0
    fault.arm(None)
    run.give_back()
    assert run.held_bytes == driver.used_bytes == 0
    driver.va_free(address, 10 * PAGE)


@pytest.mark.parametrize(("num_refusals", "works"), [(1, True), (3, True), (4, False)])
def test_a_driver_that_is_not_ready_is_waited_for_a_few_times(
    driver: HostDriver, num_refusals: int, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    left = [num_refusals]
    real = driver.set_access

    def set_access(addr: int, size: int, *, peers: tuple[int, ...] = ()) -> None:
        if left[0]:
            left[0] -= 1
            raise DriverError("set_access", "CUDA_ERROR_NOT_READY")
        real(addr, size, peers=peers)

    monkeypatch.setattr(driver, "set_access", set_access)
    monkeypatch.setattr(driver, "device_sync", lambda: waits.append(1))
    chunk, run, address = paged(driver, 10)
    if works:
        chunk.materialize()
        assert len(waits) == num_refusals
    else:
        with pytest.raises(DriverError, match="NOT_READY"):
            chunk.materialize()
        assert [piece.mapped for piece in run.pieces] == [False] * 3
    chunk.release()
    driver.va_free(address, 10 * PAGE)


def test_all_who_may_touch_it_are_named_in_one_call(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    real = driver.set_access

    def set_access(addr: int, size: int, *, peers: tuple[int, ...] = ()) -> None:
        seen.append(peers)
        real(addr, size)

    monkeypatch.setattr(driver, "set_access", set_access)
    address = driver.va_reserve(4 * PAGE, align=PAGE)
    run = PageRun(driver, pieces_of(address, 4 * PAGE, handle_bytes=PAGE), peers=(1, 3))
    chunk = Chunk(run, [run])
    chunk.materialize()
    assert seen == [(1, 3)]
    chunk.release()
    driver.va_free(address, 4 * PAGE)
