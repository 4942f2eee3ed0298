"""Arenas on a card, under torch and its graphs: growth moves nothing, and replays are right after all that may be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tonnage.buffers import Device, Stream, VaArena
from tonnage.buffers.graph_ranges import GraphRanges
from tonnage.buffers.restore import Restore
from tonnage.buffers.stable import StableBuffer
from tonnage.errors import BufferInUse, CaptureError, GraphRangeUnmapped, RangeReferenced
from tonnage.ledger import Ledger
from tonnage.terms import LineKind
from tonnage.units import GiB, MiB

pytestmark = pytest.mark.gpu

STEP = 64 * MiB


@pytest.fixture
def stream() -> Iterator[Stream]:
    torch = pytest.importorskip("torch")
    from tonnage.device.cuda import CudaDriver

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    driver = CudaDriver(0)
    yield Stream(Device(driver))
    torch.cuda.synchronize()
    assert driver.close() == ()


def make(stream: Stream, *, num_bytes: int = 0, **arguments: object) -> StableBuffer:
    return StableBuffer.make(
        stream,
        ledger=Ledger(0, 140 * GiB),
        owner="workspace",
        line=LineKind.SCRATCH,
        most_bytes=2 * GiB,
        num_bytes=num_bytes,
        tag="workspace",
        **arguments,  # type: ignore[arg-type]
    )


def ints(buffer: StableBuffer, start: int, num_bytes: int):
    from tonnage.buffers.torch_view import as_tensor, typed_view

    return typed_view(as_tensor(buffer), start, (num_bytes // 4,), "int32")


def pattern(start: int, num_bytes: int):
    """What every int32 of that range is to hold: its own index, mixed."""
    import torch

    index = torch.arange(start // 4, (start + num_bytes) // 4, device="cuda", dtype=torch.int64)
    return ((index * 2_654_435_761) % (2**31 - 1)).to(torch.int32)


def test_from_64_mib_to_1_gib_nothing_moves_and_nothing_is_lost(stream: Stream) -> None:
    import torch

    free_before, _ = stream.driver.mem_info()
    buffer = make(stream)
    address, whole = buffer.address, ints(buffer, 0, buffer.size_bytes)  # a view over nothing, yet
    for start in range(0, GiB, STEP):
        buffer.grow(start + STEP)
        assert (buffer.address, whole.data_ptr()) == (address, address)
        whole[start // 4 : (start + STEP) // 4] = pattern(start, STEP)
    torch.cuda.synchronize()
    for start in range(0, GiB, STEP):
        assert torch.equal(whole[start // 4 : (start + STEP) // 4], pattern(start, STEP))
    assert buffer.committed_bytes == GiB
    assert buffer.arena.num_edits == 2 * (GiB // STEP)  # map and set_access of every step
    with pytest.raises(BufferInUse):
        buffer.close()
    del whole
    buffer.close()
    torch.cuda.empty_cache()
    free_after, _ = stream.driver.mem_info()
    assert abs(free_before - free_after) <= 256 * MiB  # of 1 GiB: kernels that torch loads on the way stay


def captured(buffer: StableBuffer, graphs: GraphRanges, num_bytes: int):
    """A graph over the first ``num_bytes``: out = 3 * in + 1, from the first half into the second."""
    import torch

    half = num_bytes // 8
    view = ints(buffer, 0, num_bytes)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.add(view[:half] * 3, 1, out=view[half:])  # warm up outside the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with graphs.capture("triple") as capture, torch.cuda.graph(graph):
        capture.only(buffer, num_bytes)
        torch.mul(view[:half], 3, out=view[half:])
        view[half:].add_(1)
    return graph, view, half


def replay_is_right(graphs: GraphRanges, graph, view, half: int, seed: int) -> None:
    import torch

    view[:half] = pattern(seed * 4, half * 4)
    view[half:].zero_()
    graphs.launch("triple", graph.replay)
    torch.cuda.synchronize()
    assert torch.equal(view[half:], pattern(seed * 4, half * 4) * 3 + 1)


def test_replays_are_right_after_growth_a_refused_shrink_and_a_sleep(stream: Stream) -> None:
    import torch

    graphs = stream.device.graphs
    buffer = make(stream, num_bytes=256 * MiB)
    graph, view, half = captured(buffer, graphs, 256 * MiB)
    replay_is_right(graphs, graph, view, half, 1)

    buffer.grow(384 * MiB)  # by half
    ints(buffer, 256 * MiB, 128 * MiB).fill_(77)
    replay_is_right(graphs, graph, view, half, 2)
    assert bool((ints(buffer, 256 * MiB, 128 * MiB) == 77).all())

    with pytest.raises(RangeReferenced, match="'triple'"):
        buffer.shrink(255 * MiB)
    assert buffer.shrink(256 * MiB) == 128 * MiB
    replay_is_right(graphs, graph, view, half, 3)

    virtual = stream.device.virtual
    free_awake, _ = stream.driver.mem_info()
    assert virtual.release("workspace").freed_bytes == 256 * MiB
    free_asleep, _ = stream.driver.mem_info()
    assert free_asleep - free_awake >= 256 * MiB
    with pytest.raises(GraphRangeUnmapped, match="'triple'"):
        graphs.launch("triple", graph.replay)
    virtual.materialize("workspace").sync()
    replay_is_right(graphs, graph, view, half, 4)

    graphs.destroy("triple")
    del graph, view
    torch.cuda.synchronize()
    buffer.close()


def test_contents_and_zeros_survive_a_sleep(stream: Stream) -> None:
    import torch

    buffer = make(stream, num_bytes=128 * MiB, restore=Restore.PINNED, zero_ranges=((4 * MiB, 4096),))
    view = ints(buffer, 0, 128 * MiB)
    expected = pattern(0, 128 * MiB)
    view.copy_(expected)
    expected[MiB : MiB + 1024] = 0
    torch.cuda.synchronize()
    for _ in range(2):
        stream.device.virtual.release("workspace")
        stream.device.virtual.materialize("workspace").sync()
        assert torch.equal(view, expected)
    del view
    buffer.close()


def test_nothing_is_unmapped_under_a_running_kernel(stream: Stream) -> None:
    import torch

    arena = VaArena(stream, ledger=Ledger(0, 1), owner="kv", line=LineKind.KV, reserve_bytes=GiB)
    buffer = StableBuffer(arena, num_bytes=256 * MiB)
    view = ints(buffer, 0, 256 * MiB)
    view.zero_()
    side = torch.cuda.Stream()
    stream.device.fences.register(side.cuda_stream)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)  # about a second
        view.add_(1)
    with pytest.raises(BufferInUse, match="still running"):
        buffer.shrink(0, timeout_s=0.05)
    assert buffer.committed_bytes == 256 * MiB
    assert buffer.shrink(128 * MiB) == 128 * MiB  # waits until the kernel is done
    assert bool((view[: 32 * MiB] == 1).all())
    stream.device.fences.forget(side.cuda_stream)
    del view
    buffer.close()
    arena.close()


def test_no_page_changes_while_a_stream_is_captured(stream: Stream) -> None:
    import torch

    buffer = make(stream, num_bytes=STEP)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.device.fences.register(side.cuda_stream)
    view = ints(buffer, 0, STEP)
    with torch.cuda.graph(graph, stream=side):
        view.add_(1)
        for call in (lambda: buffer.grow(2 * STEP), lambda: buffer.shrink(0)):
            with pytest.raises(CaptureError):
                call()
    view.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert bool((view == 1).all())
    stream.device.fences.forget(side.cuda_stream)
    del graph, view
    buffer.close()


def test_a_large_arena_takes_few_calls(stream: Stream) -> None:
    arena = VaArena(stream, ledger=Ledger(0, 1), owner="kv", line=LineKind.KV, reserve_bytes=64 * GiB, tag="kv")
    arena.commit(2 * GiB + 4 * MiB)
    assert arena.num_edits == 32 + 2 + 1
    assert arena.decommit(2 * GiB + 2 * MiB) == 2 * MiB
    assert stream.device.virtual.release("kv").freed_bytes == 2 * GiB + 2 * MiB
    assert stream.device.virtual.materialize("kv").num_bytes == 2 * GiB + 2 * MiB
    arena.close()
