"""What goes on beside a capture on a card: mode "global", as torch's, on a stream of its own that nobody registered.

Another thread frees, waits and polls meanwhile, and the graph that comes out must be whole and right.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tonnage.buffers.device import Device
from tonnage.buffers.fences import Fences
from tonnage.buffers.manager import BufferManager
from tonnage.buffers.stream import Stream
from tonnage.device.cuda import CudaDriver
from tonnage.errors import CaptureError
from tonnage.ledger import Ledger
from tonnage.terms import LineKind, MemoryKind
from tonnage.units import MiB

pytestmark = pytest.mark.gpu

PLAIN = (MemoryKind.GPU_SYNC, MemoryKind.PINNED, MemoryKind.PINNED_POOL, MemoryKind.MANAGED)


@pytest.fixture
def driver():
    driver = CudaDriver(0)
    driver.capabilities()
    yield driver
    driver.close()


@contextmanager
def captured(driver: CudaDriver, stream: int) -> Iterator[list[Any]]:
    """Everything asked of ``stream`` inside goes into a graph; the list has it afterwards. The capture fails the test
    where it was invalidated meanwhile."""
    graph: list[Any] = []
    api, on = driver._api, driver._streams[stream]
    mode = api.module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    driver.activate()
    api.call("cuStreamBeginCapture", on, mode)
    try:
        yield graph
    finally:
        status, made = api.module.cuStreamEndCapture(on)
        assert not status, f"the capture was broken: {status!r}"
        graph.append(made)


def replay(driver: CudaDriver, graph: Any, stream: int) -> None:
    api = driver._api
    made = api.call("cuGraphInstantiate", graph, 0)
    api.call("cuGraphLaunch", made, driver._streams[stream])
    driver.stream_sync(stream)
    api.call("cuGraphExecDestroy", made)
    api.call("cuGraphDestroy", graph)


def in_a_thread(call: Callable[[], object]) -> None:
    """Do it in another thread, and raise here what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def calls(driver: CudaDriver) -> dict[str, Callable[[], object]]:
    """What the other thread may do, unannounced; all but the waits for the whole device."""
    stream, event, pool = driver.stream_create(priority=0), driver.event_create(), driver.pool_create()
    held, device = driver.host_alloc(MiB, flags=0), driver.mem_alloc(MiB)
    driver.event_record(event, stream=stream)
    fences = Fences(driver)
    mark = fences.mark(stream)
    fences.after(mark, lambda: None)
    page = driver.capabilities().page_bytes

    def map_and_unmap() -> None:
        addr, handle = driver.va_reserve(page, align=page), driver.phys_create(page)
        driver.map(addr, page, handle)
        driver.set_access(addr, page)
        driver.unmap(addr, page)
        driver.phys_release(handle)
        driver.va_free(addr, page)

    return {
        "event_done": lambda: driver.event_done(event),
        "event_sync": lambda: driver.event_sync(event),
        "stream_sync": lambda: driver.stream_sync(stream),
        "event_create": lambda: driver.event_destroy(driver.event_create()),
        "event_record": lambda: driver.event_record(event, stream=stream),
        "stream_wait": lambda: driver.stream_wait(stream, event),
        "stream_create": lambda: driver.stream_destroy(driver.stream_create(priority=-1)),
        "reap": fences.reap,
        "mem_alloc": lambda: driver.mem_free(driver.mem_alloc(MiB)),
        "host_alloc": lambda: driver.host_free(driver.host_alloc(MiB, flags=0)),
        "managed_alloc": lambda: driver.mem_free(driver.managed_alloc(MiB)),
        "pool_create": lambda: driver.pool_destroy(driver.pool_create()),
        "pool_trim": lambda: driver.pool_trim(pool, 0),
        "pool_stats": lambda: driver.pool_stats(pool),
        "mem_info": driver.mem_info,
        "copy": lambda: driver.copy(device, held, MiB, stream=stream),
        "fill": lambda: driver.fill(device, 1, MiB, stream=stream),
        "map and unmap": map_and_unmap,
    }


#: All but ``pool_alloc``: it breaks a capture of mode "global" in another thread, and is too short to be guarded.
CALLS = (
    "event_done", "event_sync", "stream_sync", "event_create", "event_record", "stream_wait", "stream_create", "reap",
    "mem_alloc", "host_alloc", "managed_alloc", "pool_create", "pool_trim", "pool_stats", "mem_info",
    "copy", "fill", "map and unmap",
)  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_no_call_of_another_thread_breaks_a_capture(driver, name) -> None:
    if name == "managed_alloc" and not driver.capabilities().managed:
        pytest.skip(driver.capabilities().reasons["managed"])
    others = calls(driver)
    assert tuple(others) == CALLS
    foreign, target = driver.stream_create(priority=0), driver.mem_alloc(MiB)
    result = driver.host_alloc(MiB, flags=0)
    driver.fill(target, 0, MiB, stream=foreign)
    driver.device_sync()
    with captured(driver, foreign) as graph:
        driver.fill(target, 7, MiB, stream=foreign)
        in_a_thread(others[name])
        driver.copy(result, target, MiB, stream=foreign)
    replay(driver, graph[0], foreign)
    assert read(result, MiB) == bytes([7]) * MiB


def test_fences_polled_by_another_thread_all_through_a_capture(driver) -> None:
    fences, stream = Fences(driver), driver.stream_create(priority=0)
    foreign, target = driver.stream_create(priority=0), driver.mem_alloc(MiB)
    for _ in range(200):
        fences.after(fences.mark(stream), lambda: None)
    driver.device_sync()
    stop, polled = threading.Event(), []

    def poll() -> None:
        event = driver.event_create()
        while not stop.is_set():
            driver.event_record(event, stream=stream)
            driver.event_done(event)
            polled.append(fences.reap())

    with captured(driver, foreign) as graph:
        thread = threading.Thread(target=poll)
        thread.start()
        for value in range(200):
            driver.fill(target, value, MiB, stream=foreign)
        stop.set()
        thread.join()
    replay(driver, graph[0], foreign)
    assert sum(polled) == 200


@pytest.mark.parametrize("kind", PLAIN)
def test_an_announced_capture_refuses_plain_memory_and_waits(driver, kind) -> None:
    """Though nobody registered the stream that is captured."""
    device = Device(driver)
    manager = BufferManager(Stream.create(device), ledger=Ledger(0, driver.mem_info()[1]), owner="tests")
    foreign, target = driver.stream_create(priority=0), driver.mem_alloc(MiB)
    held = manager.allocate(kind, MiB, line=LineKind.TABLES)
    held.record_stream(manager.stream)
    manager.gpu(MiB, line=LineKind.TABLES).close()  # the pool is made here
    with device.graphs.capture("decode"), captured(driver, foreign) as graph:
        driver.fill(target, 7, MiB, stream=foreign)
        for call in (
            lambda: manager.allocate(kind, MiB, line=LineKind.TABLES),
            held.close,
            device.fences.quiesce,
            device.fences.mark,
        ):
            with pytest.raises(CaptureError, match="'decode'"):
                in_a_thread(call)
        with pytest.raises(CaptureError, match="'decode'"):  # the driver would give the capture up
            manager.gpu(MiB, line=LineKind.TABLES)
    replay(driver, graph[0], foreign)
    held.close()
    manager.close()


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_memory_beside_a_capture_that_nobody_announced_does_not_break_it(driver, kind) -> None:
    device = Device(driver)
    manager = BufferManager(Stream.create(device), ledger=Ledger(0, driver.mem_info()[1]), owner="tests")
    foreign, target = driver.stream_create(priority=0), driver.mem_alloc(MiB)
    with captured(driver, foreign) as graph:
        driver.fill(target, 7, MiB, stream=foreign)
        in_a_thread(lambda: manager.allocate(kind, MiB, line=LineKind.TABLES).close())
    replay(driver, graph[0], foreign)
    manager.close()


def test_stream_0_counts_as_captured_while_a_stream_is_that_it_waits_for(driver) -> None:
    api = driver._api
    blocking = int(api.call("cuStreamCreate", int(api.module.CUstream_flags.CU_STREAM_DEFAULT)))
    target = driver.mem_alloc(MiB)
    device = Device(driver)
    manager = BufferManager(Stream(device), ledger=Ledger(0, driver.mem_info()[1]), owner="tests")
    manager.gpu(MiB, line=LineKind.TABLES).close()
    with captured(driver, blocking) as graph:
        driver.fill(target, 7, MiB, stream=blocking)
        for call in (
            device.fences.quiesce,
            lambda: manager.gpu_sync(MiB, line=LineKind.TABLES),
            lambda: manager.gpu(MiB, line=LineKind.TABLES),
        ):
            with pytest.raises(CaptureError):
                call()
    replay(driver, graph[0], blocking)
    manager.close()


def read(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)
