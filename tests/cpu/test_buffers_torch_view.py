"""Torch tensors over arenas and buffers: one address for life, and no tensor left over nothing."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from tonnage.buffers import BufferManager, Device, Stream, VaArena, dlpack  # noqa: E402
from tonnage.buffers.scopes import scope  # noqa: E402
from tonnage.buffers.torch_view import as_tensor, typed_view  # noqa: E402
from tonnage.device.host import HostDriver  # noqa: E402
from tonnage.errors import BufferInUse, NotMaterialized  # noqa: E402
from tonnage.layout import DTYPE_BYTES  # noqa: E402
from tonnage.ledger import Ledger  # noqa: E402
from tonnage.terms import LineKind  # noqa: E402

PAGE = 2**16


@pytest.fixture
def arena(driver: HostDriver):
    arena = VaArena(
        Stream(Device(driver)), ledger=Ledger(0, 64 * PAGE), owner="kv", line=LineKind.KV, reserve_bytes=2**36
    )
    yield arena
    arena.close()


def test_a_tensor_over_the_reservation_is_valid_before_and_after_growth(arena: VaArena) -> None:
    tensor = as_tensor(arena)
    assert (tensor.data_ptr(), tensor.numel(), tensor.dtype) == (arena.address, 2**36, torch.uint8)
    for num_pages in (1, 10, 3):
        arena.commit(num_pages * PAGE)
        tensor[: num_pages * PAGE].fill_(num_pages)
        assert as_tensor(arena) is tensor
        assert int(tensor[:PAGE].sum()) == num_pages * PAGE
    arena.decommit(0)
    arena.commit(PAGE)
    assert (int(tensor[:PAGE].sum()), tensor.data_ptr()) == (0, arena.address)


def test_closing_is_refused_while_any_view_is_alive(arena: VaArena) -> None:
    arena.commit(PAGE)
    view = typed_view(as_tensor(arena), 64, (4, 4), "float32")
    gc.collect()
    with pytest.raises(BufferInUse, match=r"'kv'.*cannot be closed: a tensor of 68,719,476,736 bytes"):
        arena.close()
    view.fill_(2.0)  # still there: the refusal changed nothing
    assert arena.committed_bytes == PAGE
    del view
    arena.close()


def test_a_view_outlives_the_tensor_and_a_new_tensor_sees_the_same_bytes(arena: VaArena) -> None:
    arena.commit(PAGE)
    view = as_tensor(arena)[10:20]
    view.fill_(9)
    assert int(as_tensor(arena)[10:20].sum()) == 90
    assert as_tensor(arena).data_ptr() == arena.address
    again = as_tensor(arena)
    del view
    with pytest.raises(BufferInUse):
        arena.close()
    del again


def test_a_buffer_is_a_tensor_too(driver: HostDriver) -> None:
    manager = BufferManager(Stream(Device(driver)), ledger=Ledger(0, 64 * PAGE), owner="tests")
    for make in (manager.gpu_sync, manager.cpu):
        buffer = make(400, line=LineKind.TABLES)
        tensor = as_tensor(buffer)
        typed_view(tensor, 0, (100,), "int32").fill_(7)
        assert int(tensor.sum()) == 700
        with pytest.raises(BufferInUse, match="400"):
            buffer.close()
        del tensor
        buffer.close()


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_every_dtype_of_the_layout_has_a_view(arena: VaArena, name: str) -> None:
    arena.commit(PAGE)
    view = typed_view(as_tensor(arena), 128, (3, 5), name)
    assert (view.dtype, tuple(view.shape)) == (getattr(torch, name), (3, 5))
    assert view.data_ptr() == arena.address + 128
    assert view.element_size() == DTYPE_BYTES[name]


@pytest.mark.parametrize(("offset", "shape"), [(1, (1,)), (-4, (1,)), (0, (26,)), (100, (1,))])
def test_a_view_that_does_not_lie_in_the_tensor_is_refused(offset: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not lie in 100 bytes"):
        typed_view(torch.zeros(100, dtype=torch.uint8), offset, shape, "float32")


def test_an_empty_view_is_fine() -> None:
    assert typed_view(torch.zeros(8, dtype=torch.uint8), 8, (2, 0), "float32").shape == (2, 0)


# DLPack by hand


def test_numpy_and_torch_write_into_the_same_memory(driver: HostDriver) -> None:
    numpy = pytest.importorskip("numpy")
    manager = BufferManager(Stream(Device(driver)), ledger=Ledger(0, 64 * PAGE), owner="tests")
    buffer = manager.pinned((3, 4), "float32", line=LineKind.TABLES)
    assert buffer.__dlpack_device__() == (1, 0)
    array, tensor = numpy.from_dlpack(buffer), torch.from_dlpack(buffer)
    assert array.flags.writeable
    array[:] = numpy.arange(12.0).reshape(3, 4)
    assert torch.equal(tensor, torch.arange(12.0).reshape(3, 4))
    assert (array.ctypes.data, tensor.data_ptr()) == (buffer.address, buffer.address)
    assert buffer.exports.names == ("a tensor of 48 bytes", "a tensor of 48 bytes")
    del array
    with pytest.raises(BufferInUse):
        buffer.close()
    del tensor
    buffer.close()


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_torch_reads_every_dtype_as_it_is(driver: HostDriver, name: str) -> None:
    manager = BufferManager(Stream(Device(driver)), ledger=Ledger(0, 64 * PAGE), owner="tests")
    buffer = manager.cpu((2, 3), name, line=LineKind.TABLES)
    tensor = torch.from_dlpack(buffer)
    assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, name), (2, 3))
    assert tensor.nbytes == buffer.size_bytes
    del tensor
    buffer.close()


@pytest.mark.parametrize("versioned", [False, True])
def test_a_capsule_that_nobody_takes_lets_go(arena: VaArena, versioned: bool) -> None:
    one = dlpack.capsule(arena, shape=(5,), versioned=versioned)
    with pytest.raises(BufferInUse, match="a tensor of 5 bytes"):
        arena.close()
    del one
    assert not arena.exports.is_alive


def test_copies_and_other_devices_are_refused(driver: HostDriver) -> None:
    manager = BufferManager(Stream(Device(driver)), ledger=Ledger(0, 64 * PAGE), owner="tests")
    buffer = manager.gpu_sync(10, line=LineKind.TABLES)
    for wrong in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError, match="no copy, no other device"):
            buffer.__dlpack__(**wrong)
    with pytest.raises(ValueError, match="do not lie in"):
        dlpack.capsule(buffer, shape=(3,), dtype="float32")
    assert not buffer.exports.is_alive
    buffer.close()


def test_the_last_view_may_go_on_any_thread(arena: VaArena) -> None:
    held = [as_tensor(arena)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert not arena.exports.is_alive


def test_a_resized_buffer_has_a_tensor_of_its_new_size(driver: HostDriver) -> None:
    manager = BufferManager(Stream(Device(driver)), ledger=Ledger(0, 64 * PAGE), owner="tests")
    buffer = manager.gpu_sync(100, line=LineKind.TABLES)
    before = as_tensor(buffer)
    buffer.resize(50)  # within the capacity: what looks at it still looks at our memory
    assert (as_tensor(buffer).numel(), before.numel()) == (50, 100)
    del before
    buffer.close()


def test_sleeping_memory_is_not_touched_through_us(driver: HostDriver) -> None:
    device = Device(driver)
    manager = BufferManager(Stream(device), ledger=Ledger(0, 64 * PAGE), owner="tests")
    with scope("sleepy"):
        buffer = manager.gpu(100, line=LineKind.TABLES)
    device.virtual.release("sleepy")
    for touch in (lambda: manager.set_zero(buffer), lambda: manager.copy(src=buffer, dst=buffer), buffer.__dlpack__):
        with pytest.raises(NotMaterialized, match="sleepy"):
            touch()
    device.virtual.materialize("sleepy")
    manager.set_zero(buffer)
    buffer.close()
    device.fences.reap()


def test_tensors_that_outlive_the_interpreter_end_it_cleanly() -> None:
    """At exit the memory, its tensors and we ourselves go in an order that nobody knows."""
    program = """
import threading, torch
from tonnage.buffers import BufferManager, Device, Stream
from tonnage.buffers.torch_view import as_tensor
from tonnage.device.host import HostDriver
from tonnage.ledger import Ledger
from tonnage.terms import LineKind
manager = BufferManager(Stream(Device(HostDriver(2**22))), ledger=Ledger(0, 2**22), owner="x")
buffers = [manager.gpu(100, line=LineKind.TABLES) for _ in range(3)]
torch.kept = [as_tensor(buffer) for buffer in buffers]
kept = as_tensor(buffers[0])[3:]
cycle = [torch.from_dlpack(buffers[1])]
cycle.append(cycle)
def late():
    held = as_tensor(buffers[2])
    import time
    time.sleep(60)
threading.Thread(target=late, daemon=True).start()
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
