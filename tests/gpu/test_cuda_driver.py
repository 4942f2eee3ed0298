"""The CUDA driver on a card. The contract suite runs there too; here is what only a real card can show.

Nothing here touches memory that is not mapped: that would end the context for every test of this process. What is
left after it is looked at in a process of its own.
"""

from __future__ import annotations

import array
import ctypes
import os
import socket
import subprocess
import sys
import threading

import pytest

from tonnage.device.cuda import CudaDriver, cuda_devices
from tonnage.errors import DriverError, DriverOOM
from tonnage.units import MiB

pytestmark = pytest.mark.gpu


@pytest.fixture
def driver():
    driver = CudaDriver(0)
    yield driver
    driver.close()


def mapped(driver: CudaDriver, size: int, *, exportable: bool = False) -> tuple[int, int]:
    addr, handle = driver.va_reserve(size, align=MiB), driver.phys_create(size, exportable=exportable)
    driver.map(addr, size, handle)
    driver.set_access(addr, size)
    return addr, handle


def read(driver: CudaDriver, addr: int, size: int) -> bytes:
    staging = driver.host_alloc(size, flags=0)
    driver.copy(staging, addr, size, stream=0)
    driver.device_sync()
    found = ctypes.string_at(staging, size)
    driver.host_free(staging)
    return found


def test_what_the_card_can_do_was_tried_and_left_nothing_behind(driver):
    driver.mem_info()
    before = driver.mem_info()[0]
    found = driver.capabilities()
    print(f"\n{driver!r}\n{found}")
    assert found.page_bytes >= 64 * 1024
    for name in ("pools", "vmm", "managed", "exportable"):
        assert getattr(found, name) or found.reasons[name]
    assert found.vmm
    assert found.pools
    assert before - driver.mem_info()[0] <= 34 * MiB, "a pool may keep a block of its own in the context"


def test_devices_are_listed_as_torch_sees_them():
    import torch

    found = cuda_devices()
    assert found.reason == ""
    assert len(found.devices) == torch.cuda.device_count()
    one, properties = found.devices[0], torch.cuda.get_device_properties(0)
    assert (one.name, one.num_sms) == (properties.name, properties.multi_processor_count)
    assert one.sm == 10 * properties.major + properties.minor
    assert one.uuid.removeprefix("GPU-") == str(properties.uuid)


def test_two_drivers_of_one_device_share_its_context(driver):
    other = CudaDriver(0)
    addr, _ = mapped(other, other.capabilities().page_bytes)
    driver.fill(addr, 9, 16, stream=0)
    assert read(driver, addr, 16) == b"\x09" * 16
    assert other.uuid == driver.uuid
    assert len(other.close()) == 2
    assert driver.mem_info()


def test_a_second_thread_allocates_copies_and_frees_without_being_prepared(driver):
    stream, pool = driver.stream_create(priority=0), driver.pool_create()
    found = []

    def work():
        try:
            for on in (stream, 0):
                held = driver.pool_alloc(pool, 1 * MiB, stream=on)
                driver.fill(held, 3, MiB, stream=on)
                driver.pool_free(held, stream=on)
            addr, _ = mapped(driver, driver.capabilities().page_bytes)
            driver.fill(addr, 4, 8, stream=0)
            found.append(read(driver, addr, 8))
        except BaseException as error:  # noqa: BLE001 - looked at below
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [b"\x04" * 8]


def test_a_thread_without_any_context_may_allocate_on_a_stream(driver):
    """What the short path relies on: it works, or says that there is no context, and is asked again."""
    from cuda.bindings import driver as cuda

    stream, pool = driver.stream_create(priority=0), driver.pool_create()
    cuda.cuCtxSetCurrent(0)
    held = driver.pool_alloc(pool, MiB, stream=stream)
    cuda.cuCtxSetCurrent(0)
    driver.pool_free(held, stream=stream)
    driver.stream_sync(stream)
    assert driver.pool_stats(pool).used_bytes == 0


def test_bytes_of_this_process_follow_what_it_takes(driver):
    """NVML against our own books, while a second driver and torch use the same context."""
    import torch

    torch.zeros(1, device="cuda")
    before = driver.own_bytes()
    if before is None:
        assert driver.nvml.reason
        pytest.skip(f"NVML does not tell: {driver.nvml.reason}")
    size = 512 * MiB
    mapped(driver, size)
    assert abs(driver.own_bytes() - before - size) <= 16 * MiB
    with_torch = torch.empty(256 * MiB, dtype=torch.uint8, device="cuda")
    assert abs(driver.own_bytes() - before - size - with_torch.nbytes) <= 16 * MiB
    del with_torch
    torch.cuda.empty_cache()
    memory = driver.nvml.memory()
    assert memory.used_bytes + memory.free_bytes <= memory.total_bytes
    assert memory.total_bytes >= driver.mem_info()[1]


def test_torch_reads_memory_that_is_mapped_bit_by_bit(driver):
    """Growth under a tensor: torch sees the same address, old bytes stay, new pages are usable after their commit."""
    import torch

    page = driver.capabilities().page_bytes
    base = driver.va_reserve(4 * page, align=page)
    for index in range(2):
        handle = driver.phys_create(page)
        driver.map(base + index * page, page, handle)
        driver.set_access(base + index * page, page)
        driver.phys_release(handle)

    class View:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (4 * page,), "typestr": "|u1", "data": (base, False), "version": 3, "strides": None,
        }  # fmt: skip

    tensor = torch.as_tensor(View(), device="cuda")
    assert tensor.data_ptr() == base
    tensor[: 2 * page].fill_(7)
    handle = driver.phys_create(2 * page)
    driver.map(base + 2 * page, 2 * page, handle)
    driver.set_access(base + 2 * page, 2 * page)
    tensor[2 * page :].fill_(1)
    assert int(tensor.sum(dtype=torch.int64)) == 2 * page * 7 + 2 * page
    torch.cuda.synchronize()
    del tensor
    driver.unmap(base, 4 * page)
    driver.va_free(base, 4 * page)
    driver.phys_release(handle)
    assert driver.leaks() == ()
    assert float(torch.ones(8, device="cuda").sum()) == 8.0, "torch goes on"


def test_torchs_streams_are_used_by_their_handle_and_its_captures_are_seen(driver):
    import torch

    stream, pool = torch.cuda.Stream(), driver.pool_create()
    held = driver.pool_alloc(pool, MiB, stream=stream.cuda_stream)
    driver.fill(held, 1, MiB, stream=stream.cuda_stream)
    driver.pool_free(held, stream=stream.cuda_stream)
    stream.synchronize()
    assert not driver.stream_capturing(stream.cuda_stream)
    tensor, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        tensor += 1
        assert driver.stream_capturing(stream.cuda_stream)
    assert not driver.stream_capturing(stream.cuda_stream)
    graph.replay()
    torch.cuda.synchronize()
    assert float(tensor.sum()) == 8.0


def test_more_than_the_card_has_is_refused_and_nothing_is_taken(driver):
    free, total = driver.mem_info()
    page, pool = driver.capabilities().page_bytes, driver.pool_create()
    size = -(-total // page) * page
    ways = [driver.phys_create, driver.mem_alloc, driver.managed_alloc, lambda n: driver.pool_alloc(pool, n, stream=0)]
    for call in ways:
        with pytest.raises(DriverOOM) as caught:
            call(size)
        assert f"{total:,}" in caught.value.detail
    # Not less than before; more it may be: asked for all, the driver gives back what it kept of earlier work.
    assert free - driver.mem_info()[0] <= 34 * MiB


IMPORTER = """
import array, os, socket, sys
from tonnage.device.cuda import CudaDriver
channel = socket.socket(fileno=int(sys.argv[1]))
size = int(sys.argv[2])
_, ancillary, _, _ = channel.recvmsg(1, socket.CMSG_SPACE(4))
fd = array.array("i", ancillary[0][2])[0]
driver = CudaDriver(0)
handle = driver.phys_import(fd, size)
os.close(fd)
addr = driver.va_reserve(size, align=1 << 20)
driver.map(addr, size, handle)
driver.set_access(addr, size)
driver.copy(addr + 8, addr, 8, stream=0)
driver.device_sync()
driver.unmap(addr, size)
driver.va_free(addr, size)
driver.phys_release(handle)
print(len(driver.close()))
"""


def test_memory_is_handed_to_another_process(driver):
    if not driver.capabilities().exportable:
        pytest.skip(f"not exportable: {driver.capabilities().reasons['exportable']}")
    size = driver.capabilities().page_bytes
    addr, handle = mapped(driver, size, exportable=True)
    driver.fill(addr, 6, 8, stream=0)
    driver.fill(addr + 8, 0, 8, stream=0)
    driver.device_sync()
    here, there = socket.socketpair()
    fd = driver.phys_export(handle)
    with here, there:
        child = subprocess.Popen(
            [sys.executable, "-c", IMPORTER, str(there.fileno()), str(size)],
            pass_fds=[there.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        here.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        out, err = child.communicate(timeout=120)
    os.close(fd)
    assert (child.returncode, out) == (0, "0\n"), err
    assert read(driver, addr, 16) == b"\x06" * 16


def test_descriptors_do_not_pile_up(driver):
    if not driver.capabilities().exportable:
        pytest.skip(f"not exportable: {driver.capabilities().reasons['exportable']}")
    size = driver.capabilities().page_bytes
    handle = driver.phys_create(size, exportable=True)
    counts = []
    for _ in range(20):
        fd = driver.phys_export(handle)
        imported = driver.phys_import(fd, size)
        os.close(fd)
        driver.phys_release(imported)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] == counts[0]


LOSER = """
import os
import torch
from tonnage.device.cuda import CudaDriver
from tonnage.errors import DeviceLost

driver = CudaDriver(0)
page = driver.capabilities().page_bytes
stream, pool = driver.stream_create(priority=0), driver.pool_create()
held = driver.pool_alloc(pool, 64, stream=stream)
base, handle = driver.va_reserve(2 * page, align=page), driver.phys_create(page)
driver.map(base, page, handle)
driver.set_access(base, page)

class View:
    __cuda_array_interface__ = {
        "shape": (2 * page,), "typestr": "|u1", "data": (base, False), "version": 3, "strides": None
    }

tensor = torch.as_tensor(View(), device="cuda")
tensor[page:].fill_(1)  # on purpose: there is nothing behind the second page
try:
    driver.device_sync()
    print("nothing noticed")
except DeviceLost as error:
    print(error.code)
num_lost = 0
calls = [
    driver.mem_info, driver.device_sync, lambda: driver.pool_alloc(pool, 64, stream=stream),
    lambda: driver.pool_free(held, stream=stream), lambda: driver.unmap(base, page), driver.event_create,
    lambda: driver.stream_sync(stream), lambda: driver.phys_create(page),
]
for call in calls:
    try:
        call()
    except DeviceLost:
        num_lost += 1
print(num_lost == len(calls), driver.is_lost, len(driver.close()) == 3, flush=True)
os._exit(0)  # torch's own teardown is not what is looked at
"""


def test_a_stray_write_loses_the_device_for_good():
    done = subprocess.run([sys.executable, "-c", LOSER], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ILLEGAL_ADDRESS\nTrue True True\n", done.stderr


def test_a_process_that_ends_without_closing_ends_in_order():
    script = "from tonnage.device.cuda import CudaDriver; d = CudaDriver(0); d.pool_create(); d.event_create()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_growth_leaves_no_memory_behind(driver):
    """A hundred rounds of create, map, open, unmap and release."""
    size = 64 * MiB
    base = driver.va_reserve(size, align=MiB)
    free = []
    for _ in range(100):
        handle = driver.phys_create(size)
        driver.map(base, size, handle)
        driver.phys_release(handle)
        driver.set_access(base, size)
        driver.unmap(base, size)
        free.append(driver.mem_info()[0])
    driver.va_free(base, size)
    assert abs(free[-1] - free[1]) <= 4 * MiB


def test_errors_of_the_driver_are_not_sticky(driver):
    addr, _ = mapped(driver, driver.capabilities().page_bytes)
    with pytest.raises(DriverError) as caught:
        driver.set_access(addr, driver.capabilities().page_bytes, peers=(99,))
    print(f"\n{caught.value}")
    driver.device_sync()
    assert not driver.is_lost
