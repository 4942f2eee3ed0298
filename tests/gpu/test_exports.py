"""Our memory in other libraries' tensors on a card: no copy, pages not yet mapped included, and streams in order."""

from __future__ import annotations

import contextlib
import gc
import warnings

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from tonnage.buffers import BufferManager, Device, Stream, VaArena, dlpack  # noqa: E402
from tonnage.buffers.torch_view import as_tensor, typed_view  # noqa: E402
from tonnage.errors import BufferInUse, CaptureError  # noqa: E402
from tonnage.ledger import Ledger  # noqa: E402
from tonnage.terms import LineKind, MemoryKind  # noqa: E402
from tonnage.units import GiB, MiB  # noqa: E402

KINDS = [MemoryKind.GPU, MemoryKind.GPU_SYNC, MemoryKind.MANAGED, MemoryKind.PINNED, MemoryKind.PINNED_POOL]


@pytest.fixture(scope="module")
def device() -> Device:
    from tonnage.device.cuda import CudaDriver

    torch.cuda.init()
    return Device(CudaDriver(0))


@pytest.fixture
def manager(device: Device):
    manager = BufferManager(Stream.create(device), ledger=Ledger(0, 8 * GiB), owner="tests", trim_on_close=True)
    yield manager
    manager.close()


def test_a_tensor_over_addresses_without_memory_and_then_with(device: Device) -> None:
    arena = VaArena(Stream(device), ledger=Ledger(0, GiB), owner="tests", line=LineKind.KV, reserve_bytes=64 * GiB)
    tensor = as_tensor(arena)  # nothing is mapped: nobody may look behind the pointer
    assert (tensor.data_ptr(), tensor.numel(), tensor.device) == (arena.address, 64 * GiB, torch.device("cuda", 0))
    for num_pages in (1, 5, 9):
        arena.commit(num_pages * 2 * MiB)
        tensor[: num_pages * 2 * MiB].fill_(num_pages)
        assert int(tensor[: 2 * MiB].sum(dtype=torch.int64)) == num_pages * 2 * MiB
        assert as_tensor(arena) is tensor
    view = typed_view(tensor, 2 * MiB, (1000,), "float32")
    del tensor
    torch.cuda.synchronize()
    with pytest.raises(BufferInUse):
        arena.close()
    del view
    gc.collect()
    arena.close()


@pytest.mark.parametrize("kind", KINDS)
def test_torch_works_on_the_memory_itself(manager: BufferManager, kind: MemoryKind) -> None:
    if kind is MemoryKind.MANAGED and not manager.stream.driver.capabilities().managed:
        pytest.skip("no managed memory here")
    buffer = manager.allocate(kind, (64, 64), "float32", line=LineKind.TABLES)
    manager.set_zero(buffer)
    manager.stream.sync()
    tensor = torch.from_dlpack(buffer)
    assert tensor.data_ptr() == buffer.address
    assert tensor.is_cuda == (kind not in (MemoryKind.PINNED, MemoryKind.PINNED_POOL))
    tensor += 2.0
    assert float(tensor.sum()) == 2.0 * 64 * 64
    assert buffer.exports.names == ("a tensor of 16,384 bytes",)
    with pytest.raises(BufferInUse, match="16,384"):
        buffer.close()
    del tensor
    torch.cuda.synchronize()
    buffer.close()


def test_a_consumer_waits_for_what_our_stream_was_asked(manager: BufferManager) -> None:
    buffer = manager.gpu(256 * MiB, line=LineKind.TABLES)
    for byte in range(1, 20):
        manager.set_mem(buffer, byte)
    tensor = torch.from_dlpack(buffer)  # no synchronisation of ours: the protocol orders the streams
    assert int(tensor.max()) == int(tensor.min()) == 19
    buffer.record_stream(torch.cuda.current_stream().cuda_stream)
    del tensor
    buffer.close()


def test_cupy_takes_it_too(manager: BufferManager) -> None:
    cupy = pytest.importorskip("cupy")
    buffer = manager.gpu((8, 8), "int32", line=LineKind.TABLES)
    manager.set_zero(buffer)
    array = cupy.from_dlpack(buffer)
    array += 3
    assert (int(array.sum()), array.data.ptr) == (192, buffer.address)
    with pytest.raises(BufferInUse):
        buffer.close()
    del array
    cupy.cuda.runtime.deviceSynchronize()
    buffer.close()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "int64", "bool", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_arrive(manager: BufferManager, name: str) -> None:
    buffer = manager.gpu((2, 3), name, line=LineKind.TABLES)
    assert buffer.__dlpack_device__() == (dlpack.CUDA, 0)
    tensor = torch.from_dlpack(buffer)
    assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, name), (2, 3))
    del tensor
    buffer.close()


def test_nothing_is_allocated_or_freed_into_a_capture(manager: BufferManager) -> None:
    stream = torch.cuda.ExternalStream(manager.stream.handle)
    before, other = (manager.gpu(MiB, line=LineKind.TABLES) for _ in range(2))
    manager.stream.sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            with pytest.raises(CaptureError):
                manager.gpu(MiB, line=LineKind.TABLES)
            manager.copy(src=before, dst=other)  # copies may be captured
        finally:
            graph.capture_end()
    manager.set_mem(before, 7)
    graph.replay()
    torch.cuda.synchronize()
    tensor = as_tensor(other)
    assert int(tensor.min()) == int(tensor.max()) == 7
    del tensor, graph
    torch.cuda.synchronize()
    before.close()
    other.close()


def test_a_capture_that_frees_is_refused_with_the_buffer_intact(manager: BufferManager) -> None:
    stream = torch.cuda.ExternalStream(manager.stream.handle)
    buffer = manager.gpu(MiB, line=LineKind.TABLES)
    manager.stream.sync()
    graph = torch.cuda.CUDAGraph()
    refused = False
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            buffer.close()
        except CaptureError:
            refused = True
        finally:
            # The driver may give the capture up, and torch finds it empty: what counts is the buffer.
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph.capture_end()
    assert refused
    assert buffer.size_bytes == MiB
    torch.cuda.synchronize()
    buffer.close()


def test_graph_memory_lives_while_its_graph_runs(manager: BufferManager) -> None:
    kept = manager.gpu(MiB, line=LineKind.TABLES)
    stream = torch.cuda.ExternalStream(manager.stream.handle)
    manager.stream.sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        inside = manager.gpu(MiB, line=LineKind.TABLES, graph_memory=True)
        assert inside.path == "graph"
        manager.set_mem(inside, 9)
        manager.copy(src=inside, dst=kept)
        inside.close()
        graph.capture_end()
    for _ in range(3):
        manager.set_zero(kept)
        manager.stream.sync()
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize()
        tensor = as_tensor(kept)
        assert int(tensor.min()) == 9
        del tensor
    del graph
    torch.cuda.synchronize()
    kept.close()
