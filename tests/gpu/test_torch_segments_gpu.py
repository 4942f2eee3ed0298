"""Torch on a card, its segments out of our arenas: every tensor in range, every segment in the ledger."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from tonnage.buffers import Device, Stream  # noqa: E402
from tonnage.buffers.torch_audit import audit_segments  # noqa: E402
from tonnage.buffers.torch_fence import BoundaryMode, close_boundary, open_boundary, reserved_outside  # noqa: E402
from tonnage.buffers.torch_memory import TorchMemory  # noqa: E402
from tonnage.buffers.torch_segments import Route, TorchSegments, find_route  # noqa: E402
from tonnage.errors import BufferInUse  # noqa: E402
from tonnage.ledger import Ledger  # noqa: E402
from tonnage.terms import LineKind  # noqa: E402
from tonnage.units import GiB, MiB  # noqa: E402

WIDTH = 1024


@pytest.fixture(scope="module")
def stream():
    from tonnage.device.cuda import CudaDriver

    return Stream(Device(CudaDriver(0)))


@pytest.fixture(scope="module")
def route() -> Route:
    route = find_route(TorchMemory(0))
    if route.shim is None:
        pytest.skip(route.reason)
    return route


@pytest.fixture
def ledger(stream) -> Ledger:
    return Ledger(0, stream.driver.mem_info()[1])


@pytest.fixture
def make(stream, route, ledger):
    made: list[TorchSegments] = []

    def make(limit_bytes: int, *, line: LineKind = LineKind.TRANSIENT, tag: str = "activations") -> TorchSegments:
        made.append(
            TorchSegments.reserve(
                stream, shim=route.shim, ledger=ledger, owner="torch", line=line, tag=tag,
                reserve_bytes=4 * GiB, limit_bytes=limit_bytes,
            )
        )  # fmt: skip
        return made[-1]

    yield make
    settle()
    for segments in made:
        segments.close()
    assert ledger.accounted_bytes == 0


def settle() -> None:
    """Tensors of the test are gone, and so is what cuBLAS keeps for the streams it has seen."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    up, down = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
    layers = [layer for _ in range(2) for layer in (torch.nn.Linear(*up), torch.nn.GELU(), torch.nn.Linear(*down))]
    model = torch.nn.Sequential(*layers).to(device="cuda", dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model(torch.zeros(8, WIDTH, device="cuda", dtype=torch.bfloat16))  # handles and workspace, outside
    return model


def rows(num: int) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(num)
    return torch.randn(num, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)


def held(segments: TorchSegments, ledger: Ledger) -> tuple[int, int]:
    """Bytes and number of the segments' account."""
    entry = next(entry for entry in ledger.snapshot().entries if entry.tag == segments.tag)
    return entry.physical_bytes, entry.num_live


def test_all_tensors_of_a_forward_lie_in_the_arena_and_the_ledger_agrees_with_torch(make, model, ledger) -> None:
    segments, x = make(512 * MiB), rows(512)
    expected = model(x)
    seen: list[Any] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: seen.append(out)) for layer in model]
    with segments.use():
        y = model(x)
    for hook in hooks:
        hook.remove()
    assert len(seen) == 6
    assert all(segments.holds(out.data_ptr(), out.nbytes) for out in seen)
    assert torch.equal(y, expected)
    state = segments.poll()
    snapshot = segments.pool.snapshot()
    assert held(segments, ledger) == (sum(segment["total_size"] for segment in snapshot), len(snapshot))
    assert state.live_bytes == held(segments, ledger)[0] > 0
    assert state.num_refused == state.num_unknown_frees == state.num_lost == 0
    assert audit_segments(TorchMemory(0), segments).disagreements == ()
    assert ledger.accounted_bytes == 512 * MiB
    assert {event.stream for event in segments.history} == {torch.cuda.current_stream().cuda_stream}
    before = torch.cuda.memory_reserved(0)
    assert reserved_outside(TorchMemory(0), segments) == before - state.live_bytes
    seen.clear()


@pytest.mark.filterwarnings("ignore")  # what a compiler warns of is its own affair
def test_a_compiled_forward_lies_in_the_arena_too(make, model) -> None:
    segments, x = make(512 * MiB), rows(256)
    compiled = torch.compile(model)
    compiled(x)  # compile and autotune outside
    before = torch.cuda.memory_reserved(0)
    with segments.use():
        y = compiled(x)
        again = compiled(x)
    assert segments.holds(y.data_ptr(), y.nbytes)
    assert torch.cuda.memory_reserved(0) - before == segments.poll().live_bytes
    torch.testing.assert_close(y, model(x), rtol=0.05, atol=0.05)
    assert torch.equal(y, again)
    del y, again


def test_a_full_arena_is_torchs_out_of_memory_and_the_next_forward_is_right(make, model) -> None:
    segments, x = make(64 * MiB), rows(256)
    expected = model(x)
    outside = reserved_outside(TorchMemory(0), segments)
    with segments.use():
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(128 * MiB, dtype=torch.uint8, device="cuda")
        y = model(x)
    assert segments.poll().num_refused >= 1
    assert torch.equal(y, expected)
    assert reserved_outside(TorchMemory(0), segments) == outside
    segments.raise_limit(256 * MiB)
    with segments.use():
        big = torch.full((128 * MiB,), 7, dtype=torch.uint8, device="cuda")
    assert segments.holds(big.data_ptr(), big.nbytes)
    assert int(big[-1]) == 7
    with pytest.raises(BufferInUse):
        segments.lower_limit(64 * MiB)
    del y, big


def test_a_graph_captured_into_the_pool_replays_and_holds_it(make, model, ledger) -> None:
    segments, x = make(512 * MiB, line=LineKind.GRAPHS, tag="graphs"), rows(64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=segments.pool_id, stream=side):
        y = model(x)
    assert segments.holds(y.data_ptr(), y.nbytes)
    assert segments.poll().live_bytes == held(segments, ledger)[0] > 0
    for seed in (65, 66):
        x.copy_(rows(seed)[:64])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, model(x))
    low = segments.lower_limit()  # what the graph needs stays, the rest goes
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, model(x))
    assert low == segments.state().top_bytes
    with pytest.raises(BufferInUse, match="a graph captured into its pool"):
        segments.close()
    graph.reset()
    with pytest.raises(BufferInUse, match="tensors hold"):
        segments.close()
    del y, graph


def test_what_another_thread_allocates_is_named_as_outside(make) -> None:
    segments = make(512 * MiB)
    found: list[Any] = []

    def allocate() -> None:
        found.append(torch.empty(100 * MiB, dtype=torch.uint8, device="cuda"))

    with segments.use():
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        ours = torch.empty(40 * MiB, dtype=torch.uint8, device="cuda")
    audit = audit_segments(TorchMemory(0), segments)
    outside = {row.name: row for row in audit.outside}
    assert not segments.holds(found[0].data_ptr())
    assert segments.holds(ours.data_ptr(), ours.nbytes)
    assert outside["torch's default pool"].used_bytes >= 100 * MiB
    assert audit.inside[0].num_bytes == segments.state().live_bytes == 40 * MiB
    assert any("torch's default pool" in line and line.endswith("outside") for line in audit.lines())
    del ours


def test_closing_gives_the_segments_and_the_memory_back(make, stream, ledger) -> None:
    free = stream.driver.mem_info()[0]
    segments = make(512 * MiB)
    with segments.use():
        tensor = torch.empty(40 * MiB, dtype=torch.uint8, device="cuda")
    with pytest.raises(BufferInUse, match="tensors hold"):
        segments.close()
    del tensor
    assert segments.poll().live_bytes == 40 * MiB  # torch keeps a pool's segments, whatever becomes of the tensors
    segments.close()
    assert ledger.accounted_bytes == 0
    assert stream.driver.mem_info()[0] >= free - 4 * MiB


def test_under_the_boundary_no_shape_makes_torch_exceed_the_cap(make, model, route) -> None:
    segments, asked = make(1 * GiB), TorchMemory(0)
    with segments.use():
        for num in (2048, 512, 64):
            model(rows(num))
    segments.lower_limit(segments.state().top_bytes + 32 * MiB)
    boundary = close_boundary(asked, route=route, segments=(segments,))
    try:
        assert (boundary.mode, boundary.reason) == (BoundaryMode.SEGMENTS_AND_CAP, "")
        assert boundary.segment_bytes == segments.state().live_bytes
        draw, num_refused = random.Random(0), 0
        for _ in range(60):
            try:
                with segments.use():
                    model(rows(draw.randrange(1, 4096)))
            except torch.OutOfMemoryError:
                num_refused += 1
            assert asked.reserved_bytes() <= boundary.cap_bytes
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(boundary.cap_bytes, dtype=torch.uint8, device="cuda")
        assert asked.reserved_bytes() <= boundary.cap_bytes
        assert num_refused < 60
    finally:
        open_boundary(asked, boundary)
    assert asked.fraction() == boundary.fraction_before


def test_a_cap_alone_holds_and_says_what_is_missing(model) -> None:
    asked = TorchMemory(0)
    model(rows(2048))
    boundary = close_boundary(asked, route=Route(shim=None, reason="no C compiler"), slack_bytes=64 * MiB)
    try:
        assert (boundary.mode, boundary.cap_bytes) == (BoundaryMode.CAP, boundary.reserved_bytes + 64 * MiB)
        assert "no C compiler" in boundary.paragraph()
        model(rows(1024))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(boundary.cap_bytes, dtype=torch.uint8, device="cuda")
        assert asked.reserved_bytes() <= boundary.cap_bytes
    finally:
        open_boundary(asked, boundary)


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH")}
    return subprocess.run([sys.executable, "-c", code], env={**clean, **environ}, capture_output=True, text=True)


ASK = """
from tonnage.buffers.torch_memory import TorchMemory
from tonnage.buffers.torch_segments import find_route
from tonnage.errors import InvalidSetting
try:
    print(find_route(TorchMemory(0)))
except InvalidSetting as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(
    ("first", "environ"),
    [
        ("", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ("", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("", {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}),
        ("import torch; torch.cuda.memory._set_allocator_settings('expandable_segments:True')", {}),
    ],
)
def test_settings_that_rule_it_out_are_refused_by_name(first: str, environ: dict[str, str]) -> None:
    done = run(first + "\n" + ASK, **environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused:"), done.stdout
    assert all(name in done.stdout for name in environ)
    assert "To change:" in done.stdout


FAILED_CAPTURE = """
import torch
from tonnage.buffers import Device, Stream
from tonnage.buffers.torch_memory import TorchMemory
from tonnage.buffers.torch_segments import TorchSegments, find_route
from tonnage.device.cuda import CudaDriver
from tonnage.errors import BufferInUse
from tonnage.ledger import Ledger
from tonnage.terms import LineKind

stream = Stream(Device(CudaDriver(0)))
segments = TorchSegments.reserve(
    stream, shim=find_route(TorchMemory(0)).shim, ledger=Ledger(0, 2**37), owner="torch", line=LineKind.GRAPHS,
    tag="graphs", reserve_bytes=2**30, limit_bytes=2**28,
)
x = torch.ones(2**20, device="cuda")
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=segments.pool_id):
        y = x * 2
        y.sum().item()
except Exception as error:
    print("capture failed:", type(error).__name__)
y = None
try:
    segments.close()
    print("closed")
except (BufferInUse, RuntimeError):
    print("kept")
print("alive", float((torch.ones(4, device="cuda") * 2).sum()))
"""


def test_a_failed_capture_does_not_end_the_process() -> None:
    done = run(FAILED_CAPTURE)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("capture failed:")
    assert lines[1] in ("closed", "kept")
    assert lines[2] == "alive 8.0"
