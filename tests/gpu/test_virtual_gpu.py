"""Virtual memory on a card: really free while it sleeps, the old graphs right after it woke, and refusals that lose
nothing. What is measured is printed; the bars hold for an H200 and are asserted there alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

GiB, MiB = 2**30, 2**20
#: A process of its own that takes all but so many free bytes, says so, and keeps them until its input ends.
TAKER = """
import sys
from tonnage.device.cuda import CudaDriver
driver = CudaDriver(0)
page = driver.capabilities().page_bytes
handle = driver.phys_create((driver.mem_info()[0] - int(sys.argv[1])) // page * page)
print("taken", flush=True)
sys.stdin.read()
driver.phys_release(handle)
"""


class Card:
    def __init__(self) -> None:
        from tonnage.buffers import Device, Stream
        from tonnage.device.cuda import CudaDriver

        self.driver = CudaDriver(0)
        self.device = Device(self.driver)
        self.stream = Stream.create(self.device)
        self.memory = self.device.virtual
        self.made: list = []

    @property
    def free_bytes(self) -> int:
        return self.driver.mem_info()[0]

    def allocate(self, size_bytes: int, restore: str, tag: str = "kv"):
        from tonnage.buffers.restore import Restore
        from tonnage.buffers.scopes import ScopeConfig

        config = ScopeConfig(tag=tag, restore=Restore(restore))
        made = self.memory.allocate(size_bytes, config=config, account=None, owner=tag, stream=self.stream)
        self.made.append(made)
        return made

    def close(self) -> None:
        for one in self.made:
            one.free(sync=True)
        assert self.memory.leftovers() == ()
        assert self.memory.backings.held_bytes == 0
        self.stream.close()


@pytest.fixture
def card():
    import torch

    torch.zeros(1, device="cuda")  # the context is there before anything is measured
    card = Card()
    yield card
    card.close()


def tensor(made):
    """A uint8 tensor of torch over the allocation, without a copy."""
    import torch

    class View:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (made.size_bytes,), "typestr": "|u1", "data": (made.address, False), "version": 3,
        }  # fmt: skip

    found = torch.as_tensor(View(), device="cuda")
    assert found.data_ptr() == made.address
    return found


def random_bytes(made, seed: int):
    """Fill it with random bytes; a copy of them on the host, made by torch."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    view = tensor(made)
    view.random_(generator=generator)
    torch.cuda.synchronize()
    return view.cpu()


def test_memory_is_really_free_while_it_sleeps(card: Card) -> None:
    size = 4 * GiB
    own = card.driver.own_bytes()
    made = card.allocate(size, "none")
    awake = card.free_bytes
    card.memory.release("kv")
    assert card.free_bytes - awake >= size - 64 * MiB
    if own is not None:
        now = card.driver.own_bytes()
        print(f"\nown bytes by NVML: {own:,} before the allocation, {now:,} asleep")
        assert abs(now - own) <= 64 * MiB
    card.memory.materialize("kv").sync()
    assert awake - 64 * MiB <= card.free_bytes <= awake + 64 * MiB
    made.require_materialized()


@pytest.mark.parametrize("restore", ["cpu", "pinned"])
def test_contents_come_back_to_the_byte(card: Card, restore: str) -> None:
    import torch

    made = [card.allocate(size, restore) for size in (700 * MiB + 12345, 3 * MiB - 1, 1)]
    contents = [random_bytes(one, seed) for seed, one in enumerate(made)]
    for _ in range(3):
        card.memory.release("kv")
        card.memory.materialize("kv").wait(torch.cuda.current_stream().cuda_stream)
        assert all(torch.equal(tensor(one).cpu(), expected) for one, expected in zip(made, contents, strict=True))
    card.memory.verify = True
    card.memory.release("kv")
    card.memory.materialize("kv").sync()
    assert all(torch.equal(tensor(one).cpu(), expected) for one, expected in zip(made, contents, strict=True))


def test_zeros_come_back(card: Card) -> None:
    made = card.allocate(300 * MiB, "memset")
    view = tensor(made)
    view.fill_(7)
    card.memory.release("kv")
    card.memory.materialize("kv").sync()
    assert int(view.max()) == 0


def test_an_old_graph_is_right_after_a_sleep(card: Card) -> None:
    """Weights keep their bytes, scratch does not; both come back where the graph expects them."""
    import torch

    weights = tensor(card.allocate(64 * MiB, "pinned", "weights")).view(torch.float32)
    scratch = tensor(card.allocate(64 * MiB, "none", "scratch")).view(torch.float32)
    weights.copy_(torch.arange(weights.numel(), device="cuda") % 1000)
    source, out = torch.zeros((), device="cuda"), torch.zeros_like(weights)

    def step() -> None:
        scratch.copy_(weights).add_(source)
        out.copy_(scratch)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(1, 4):
        out.zero_()
        source.fill_(number)
        card.memory.release("weights", "scratch")
        blocker = torch.empty(128 * MiB, dtype=torch.uint8, device="cuda").fill_(255)  # takes the pages meanwhile
        del blocker
        torch.cuda.empty_cache()
        card.memory.materialize("weights", "scratch").wait(torch.cuda.current_stream().cuda_stream)
        graph.replay()
        expected = torch.arange(weights.numel(), device="cuda") % 1000 + float(number)
        assert torch.equal(out, expected)
    torch.cuda.synchronize()
    del graph


def test_nothing_is_edited_during_a_capture(card: Card) -> None:
    import torch

    from tonnage.buffers.chunk import State
    from tonnage.errors import CaptureError

    made = card.allocate(8 * MiB, "none")
    side = torch.cuda.Stream()
    card.device.fences.register(side.cuda_stream)
    view, graph = tensor(made), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        view.add_(1)
        for call in (lambda: card.memory.release("kv"), lambda: card.allocate(1, "none"), made.free):
            with pytest.raises(CaptureError):
                call()
    assert made.state is State.MATERIALIZED
    view.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert int(view.max()) == int(view.min()) == 1
    card.device.fences.forget(side.cuda_stream)
    del graph


def test_a_free_waits_for_the_kernels_that_use_it(card: Card) -> None:
    """Unmapping does not wait for kernels, so the fences have to: a kernel of a second is still right."""
    import torch

    made = card.allocate(256 * MiB, "none")
    side = torch.cuda.Stream()
    card.device.fences.register(side.cuda_stream)
    view = tensor(made)
    view.fill_(3)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        view.sum(dtype=torch.int64)  # loads the kernel and takes its memory, both of which may wait for the device
        side.synchronize()
        torch.cuda._sleep(1_000_000_000)
        total = view.sum(dtype=torch.int64)
    before = card.free_bytes
    made.free()
    card.device.fences.reap()
    assert not side.query(), "the kernel was over too soon to show anything"
    assert card.free_bytes <= before + 64 * MiB
    side.synchronize()
    card.device.fences.reap()
    assert card.free_bytes - before >= 256 * MiB - 64 * MiB
    assert int(total) == 3 * made.size_bytes
    card.device.fences.forget(side.cuda_stream)


def test_a_wake_beside_a_process_that_took_the_memory(card: Card) -> None:
    """Refused cleanly, nothing lost; what fits comes back; and all of it once the other process is gone."""
    import torch

    from tonnage.buffers.chunk import State
    from tonnage.errors import CannotMaterialize

    small, large = card.allocate(512 * MiB, "pinned", "small"), card.allocate(4 * GiB, "pinned", "large")
    contents = random_bytes(small, 1), random_bytes(large, 2)
    torch.cuda.empty_cache()
    card.memory.release("small", "large")
    taker = subprocess.Popen(
        [sys.executable, "-c", TAKER, str(2 * GiB)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    try:
        assert taker.stdout.readline() == "taken\n"
        free = card.free_bytes
        for _ in range(3):
            with pytest.raises(CannotMaterialize, match="nothing was lost"):
                card.memory.materialize("small", "large")
            assert (small.state, large.state) == (State.RELEASED, State.RELEASED)
            assert abs(card.free_bytes - free) <= 32 * MiB
        card.memory.materialize("small").sync()
    finally:
        taker.communicate()
    card.memory.materialize("small", "large").sync()
    for one, expected in zip((small, large), contents, strict=True):
        assert torch.equal(tensor(one).cpu(), expected)


def test_the_driver_running_out_half_way_is_rolled_back(card: Card) -> None:
    """The preflight sees enough and another process is quicker: the create fails in the middle, and nothing is lost."""
    import torch

    from tonnage.errors import CannotMaterialize

    made = [card.allocate(GiB, "pinned") for _ in range(3)]
    contents = [random_bytes(one, seed) for seed, one in enumerate(made)]
    torch.cuda.empty_cache()
    card.memory.release("kv")
    page = card.driver.capabilities().page_bytes
    held = card.driver.phys_create((card.free_bytes - 2 * GiB) // page * page)
    real = card.driver.mem_info
    card.driver.mem_info = lambda: (real()[1], real()[1])
    with pytest.raises(CannotMaterialize):
        card.memory.materialize("kv")
    card.driver.mem_info = real
    card.driver.phys_release(held)
    card.memory.materialize("kv").sync()
    for one, expected in zip(made, contents, strict=True):
        assert torch.equal(tensor(one).cpu(), expected)


def test_a_hundred_cycles_leak_nothing(card: Card) -> None:
    import torch

    made = [card.allocate(100 * MiB + number, restore) for number, restore in enumerate(["none", "memset", "pinned"])]
    contents = random_bytes(made[2], 3)
    card.memory.release("kv")
    free, own = card.free_bytes, card.driver.own_bytes()
    for _ in range(100):
        card.memory.materialize("kv")
        card.memory.release("kv")
    assert card.free_bytes >= free - 32 * MiB
    if own is not None:
        assert card.driver.own_bytes() <= own + 8 * MiB
    card.memory.materialize("kv").sync()
    assert torch.equal(tensor(made[2]).cpu(), contents)
