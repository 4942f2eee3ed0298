"""Our memory in other libraries' hands: what ends a view, who waits for whom, and what is never handed out."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from tonnage.buffers import BufferManager, Device, StableBuffer, Stream, VaArena, dlpack  # noqa: E402
from tonnage.buffers.scopes import scope  # noqa: E402
from tonnage.buffers.torch_view import as_tensor  # noqa: E402
from tonnage.device.host import HostDriver  # noqa: E402
from tonnage.errors import BufferInUse, CaptureError, NotMaterialized  # noqa: E402
from tonnage.ledger import Ledger  # noqa: E402
from tonnage.terms import LineKind  # noqa: E402

PAGE = 2**16


class Card(HostDriver):
    """A simulated device that says it is a card, and keeps what is asked of its streams."""

    asked: list[tuple[object, ...]]
    captured = frozenset[int]()

    @property
    def kind(self) -> str:
        return "cuda"

    def event_record(self, event: int, *, stream: int) -> None:
        super().event_record(event, stream=stream)
        self.asked.append(("record", stream))

    def event_sync(self, event: int) -> None:
        super().event_sync(event)
        self.asked.append(("sync",))

    def stream_wait(self, stream: int, event: int) -> None:
        super().stream_wait(stream, event)
        self.asked.append(("wait", stream))

    def stream_capturing(self, stream: int) -> bool:
        return stream in self.captured


@pytest.fixture
def driver():
    driver = Card(64 * PAGE, page_bytes=PAGE)
    driver.asked = []
    yield driver
    driver.close()


@pytest.fixture
def host():
    driver = HostDriver(64 * PAGE, page_bytes=PAGE)
    yield driver
    assert driver.close() == ()


@pytest.fixture
def manager(host: HostDriver):
    manager = manager_on(host)
    yield manager
    manager.close()


def manager_on(driver: HostDriver) -> BufferManager:
    return BufferManager(Stream.create(Device(driver)), ledger=Ledger(0, 64 * PAGE), owner="tests", trim_on_close=True)


def arena_on(stream: Stream) -> VaArena:
    return VaArena(stream, ledger=Ledger(0, 64 * PAGE), owner="kv", line=LineKind.KV, reserve_bytes=2**30, tag="kv")


# the end of a view


@pytest.mark.parametrize("view", [torch.from_dlpack, numpy.from_dlpack, as_tensor])
def test_a_view_that_ends_while_an_error_is_on_its_way_loses_neither(manager: BufferManager, view) -> None:
    buffer = manager.gpu(16, line=LineKind.TABLES)
    with pytest.raises(IndexError, match="out of bounds"):
        view(buffer)[100]
    assert buffer.exports.names == ()
    buffer.close()


def test_a_frame_that_raises_lets_go_of_its_views(manager: BufferManager) -> None:
    buffer = manager.gpu(16, line=LineKind.TABLES)

    def use() -> None:
        views = [torch.from_dlpack(buffer), numpy.from_dlpack(buffer), as_tensor(buffer), buffer.__dlpack__()]
        raise KeyError(len(views))

    with pytest.raises(KeyError, match="4"):
        use()
    gc.collect()
    assert buffer.exports.names == ()
    buffer.close()


def test_a_capsule_that_a_consumer_refuses_lets_go_and_the_refusal_is_heard(manager: BufferManager) -> None:
    buffer = manager.gpu(16, "bfloat16", line=LineKind.TABLES)
    with pytest.raises((BufferError, RuntimeError, TypeError)):
        numpy.from_dlpack(buffer)  # numpy has no such type
    gc.collect()
    assert buffer.exports.names == ()
    buffer.close()


def test_a_view_keeps_a_buffer_that_nobody_else_has(manager: BufferManager) -> None:
    tensor = torch.from_dlpack(manager.gpu(16, line=LineKind.TABLES)).fill_(5)
    manager.gpu(16, line=LineKind.TABLES).close()
    gc.collect()
    assert tensor.tolist() == [5] * 16
    del tensor


def test_torch_takes_memory_where_there_is_no_numpy(manager: BufferManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    buffer = manager.gpu((4, 4), "int32", line=LineKind.TABLES)
    tensor = torch.from_dlpack(buffer)
    assert (tensor.shape, tensor.data_ptr(), buffer.exports.is_alive) == ((4, 4), buffer.address, True)
    del tensor
    with pytest.raises(IndexError):
        torch.from_dlpack(buffer)[100]
    buffer.close()


def test_a_thousand_views_end_on_four_threads(manager: BufferManager) -> None:
    buffer = manager.gpu(16, line=LineKind.TABLES)
    before = set(dlpack._live)  # other tests of this process may look at memory still

    def work() -> None:
        for _ in range(250):
            numpy.from_dlpack(buffer)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (buffer.exports.names, set(dlpack._live) - before) == ((), set())
    buffer.close()


def test_a_daemon_that_makes_and_ends_views_at_the_end_is_silent() -> None:
    """With numpy: a daemon thread inside torch ends the process badly by itself, whatever it does there."""
    program = """
import threading, time, numpy
from tonnage.buffers import BufferManager, Device, Stream
from tonnage.device.host import HostDriver
from tonnage.ledger import Ledger
from tonnage.terms import LineKind
manager = BufferManager(Stream(Device(HostDriver(2**22))), ledger=Ledger(0, 2**22), owner="x")
buffer = manager.cpu(100, line=LineKind.TABLES)
kept, unused = numpy.from_dlpack(buffer), buffer.__dlpack__()
def work():
    while True:
        view = numpy.from_dlpack(buffer)
        del view
        own = manager.cpu(100, line=LineKind.TABLES)
        view = numpy.from_dlpack(own)
        del view
        own.close()
threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")


# what is not handed out


def test_memory_that_sleeps_or_is_closed_is_not_handed_out(host: HostDriver) -> None:
    device = Device(host)
    manager = BufferManager(Stream(device), ledger=Ledger(0, 64 * PAGE), owner="tests")
    with scope("kv"):
        buffer = manager.gpu(100, line=LineKind.TABLES)
    arena = arena_on(Stream(device))
    stable = StableBuffer(arena, num_bytes=100)
    views = (as_tensor, torch.from_dlpack, numpy.from_dlpack, lambda memory: dlpack.capsule(memory, shape=(1,)))
    remembered = as_tensor(arena)
    device.virtual.release("kv")
    for memory in (buffer, arena, stable):
        for view in views:
            with pytest.raises(NotMaterialized, match="kv"):
                view(memory)
    del remembered
    device.virtual.materialize("kv")
    stable.close()
    arena.close()
    for memory in (arena, stable):
        for view in views:
            with pytest.raises(ValueError, match="is closed"):
                view(memory)
        assert not memory.exports.is_alive
    buffer.close()
    device.fences.reap()


@pytest.mark.parametrize("make", [lambda arena: arena, StableBuffer], ids=["arena", "stable buffer"])
def test_an_arena_is_all_its_addresses_to_everybody(host: HostDriver, make) -> None:
    arena = arena_on(Stream(Device(host)))
    memory = make(arena)
    tensor, array = torch.from_dlpack(memory), numpy.from_dlpack(memory)
    for one in (tensor, array):
        assert (tuple(one.shape), str(one.dtype).removeprefix("torch.")) == ((2**30,), "uint8")
    assert tensor.data_ptr() == array.ctypes.data == arena.address
    arena.commit(PAGE)
    tensor[:PAGE] = 3
    assert array[:PAGE].sum() == 3 * PAGE
    with pytest.raises(BufferInUse):
        arena.close()
    del tensor, array, one
    with pytest.raises(IndexError):
        torch.from_dlpack(memory)[2**30]
    arena.close()


# streams


def test_the_host_reads_pinned_memory_only_when_the_copies_into_it_are_done(driver: Card) -> None:
    manager = manager_on(driver)
    other = Stream.create(manager.stream.device)
    buffer = manager.pinned(100, line=LineKind.TABLES)
    assert numpy.from_dlpack(buffer).size == 100
    assert driver.asked == []  # nothing uses it
    buffer.record_stream(other)
    array = numpy.from_dlpack(buffer)
    assert driver.asked == [("record", other.bare_handle), ("sync",)]
    driver.asked.clear()
    driver.captured = frozenset((other.bare_handle,))
    with pytest.raises(CaptureError):
        numpy.from_dlpack(buffer)
    assert driver.asked == []
    driver.captured = frozenset()
    del array
    buffer.close()


@pytest.mark.parametrize(("said", "meant"), [(None, 0), (1, 0), (7, 7)])
def test_a_consumers_stream_waits_and_is_waited_for(driver: Card, said: int | None, meant: int) -> None:
    manager = manager_on(driver)
    own = manager.stream.bare_handle
    while meant and driver.stream_create(priority=0) != meant:
        pass
    buffer = manager.gpu(100, line=LineKind.TABLES)
    taken = buffer.__dlpack__(stream=said)
    assert driver.asked == [("record", own), ("wait", meant)]
    assert buffer.used_on == (meant,)
    assert meant in manager.stream.device.fences.streams
    driver.asked.clear()
    del taken
    buffer.close()
    index = driver.asked.index(("record", meant))
    assert driver.asked[index + 1] == ("wait", own)


def test_a_consumer_that_orders_by_itself_is_left_alone(driver: Card) -> None:
    buffer = manager_on(driver).gpu(100, line=LineKind.TABLES)
    buffer.__dlpack__(stream=-1)
    assert (driver.asked, buffer.used_on) == ([], ())
    buffer.close()


@pytest.mark.parametrize("end", ["ours", "the consumer's"])
def test_a_capture_on_either_end_is_refused_before_anything_is_recorded(driver: Card, end: str) -> None:
    manager = manager_on(driver)
    consumer = driver.stream_create(priority=0)
    buffer = manager.gpu(100, line=LineKind.TABLES)
    driver.captured = frozenset((manager.stream.bare_handle if end == "ours" else consumer,))
    with pytest.raises(CaptureError, match="export it before the capture"):
        buffer.__dlpack__(stream=consumer)
    assert (driver.asked, buffer.used_on, buffer.exports.is_alive) == ([], (), False)
    driver.captured = frozenset()
    buffer.close()
