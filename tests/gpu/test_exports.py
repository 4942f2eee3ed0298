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


@pytest.mark.parametrize("view", [torch.from_dlpack, as_tensor])
def test_a_view_that_ends_while_an_error_is_on_its_way_loses_neither(manager: BufferManager, view) -> None:
    buffer = manager.gpu(16, line=LineKind.TABLES)
    with pytest.raises(IndexError, match="out of bounds"):
        view(buffer)[100]
    assert buffer.exports.names == ()
    buffer.close()


def test_an_arena_is_all_its_addresses_to_torch_and_cupy(device: Device) -> None:
    cupy = pytest.importorskip("cupy")
    arena = VaArena(Stream(device), ledger=Ledger(0, GiB), owner="tests", line=LineKind.KV, reserve_bytes=8 * GiB)
    tensor, array = torch.from_dlpack(arena), cupy.from_dlpack(arena)  # nothing is mapped yet
    assert (tensor.numel(), array.size, tensor.data_ptr(), array.data.ptr) == (8 * GiB, 8 * GiB, *[arena.address] * 2)
    arena.commit(2 * MiB)
    tensor[: 2 * MiB].fill_(3)
    torch.cuda.synchronize()
    assert int(array[: 2 * MiB].max()) == 3
    with pytest.raises(BufferInUse):
        arena.close()
    del tensor, array
    torch.cuda.synchronize()
    arena.close()


def test_a_free_waits_for_the_stream_that_the_consumer_named(manager: BufferManager) -> None:
    side = torch.cuda.Stream()
    buffer = manager.gpu(64 * MiB, line=LineKind.TABLES)
    with torch.cuda.stream(side):
        tensor = torch.from_dlpack(buffer)
        torch.cuda._sleep(400_000_000)
        tensor.fill_(3)
    assert buffer.used_on == (side.cuda_stream,)
    del tensor
    buffer.close()  # the fill has not begun
    again = manager.gpu(64 * MiB, line=LineKind.TABLES)
    manager.set_mem(again, 9)
    torch.cuda.synchronize()
    tensor = as_tensor(again)
    assert int(tensor.min()) == int(tensor.max()) == 9
    del tensor
    torch.cuda.synchronize()
    again.close()


def test_the_host_reads_pinned_memory_when_the_copy_into_it_is_done(manager: BufferManager) -> None:
    numpy = pytest.importorskip("numpy")
    source = manager.gpu(256 * MiB, line=LineKind.TABLES)
    target = manager.pinned(256 * MiB, line=LineKind.TABLES)
    manager.set_mem(source, 7)
    manager.copy(src=source, dst=target)
    array = numpy.from_dlpack(target)  # no synchronisation of ours
    assert (int(array[0]), int(array[-1])) == (7, 7)
    del array
    target.close()
    source.close()


def test_memory_is_not_exported_across_a_capture(manager: BufferManager) -> None:
    buffer = manager.gpu(MiB, line=LineKind.TABLES)
    manager.stream.sync()
    stream, graph, inside = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            with pytest.raises(CaptureError, match="export it before the capture"):
                torch.from_dlpack(buffer)
            inside += 1
        finally:
            graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert inside.tolist() == [1] * 4  # the capture was not harmed
    assert not buffer.exports.is_alive
    del graph
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
