"""Blocks on the move on a card: bit-equal, in order with the kernels around them, and the host waits for none of it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tonnage.buffers import Device, Stream, VaArena
from tonnage.ledger import Ledger
from tonnage.resources.host_pool import HostPool
from tonnage.resources.mover import DeviceMover, Ids
from tonnage.resources.transfers import measure_rate
from tonnage.terms import LineKind
from tonnage.units import GiB, MiB

pytestmark = pytest.mark.gpu

SLAB = 2 * MiB
NUM_SLOTS, NUM_HOST_SLOTS = 2304, 256
#: A fifth of a second or so of a stream that does nothing.
SLEEP_CYCLES = 400_000_000


class Card:
    """An arena of slabs under an execution stream of torch's, which ``torch.cuda.stream(card.torch_stream)`` uses."""

    def __init__(self) -> None:
        import torch

        from tonnage.buffers.torch_view import as_tensor
        from tonnage.device.cuda import CudaDriver

        torch.cuda.init()
        self.torch_stream = torch.cuda.Stream()
        self.driver = CudaDriver(0)
        self.stream = Stream(Device(self.driver), self.torch_stream.cuda_stream)
        self.arena = VaArena(
            self.stream,
            ledger=Ledger(0, 140 * GiB, host_is_device=False),
            owner="kv pool",
            line=LineKind.KV,
            reserve_bytes=NUM_SLOTS * SLAB,
        )
        self.arena.commit(NUM_SLOTS * SLAB)
        self.pool = HostPool(self.driver, asked_bytes=NUM_HOST_SLOTS * SLAB, slab_bytes=SLAB)
        self.mover = DeviceMover(self.arena, self.pool, slab_bytes=SLAB, stream=self.stream)
        self.slots = as_tensor(self.arena).view(torch.int32).view(NUM_SLOTS, SLAB // 4)
        with torch.cuda.stream(self.torch_stream):
            self.slots.random_()
        torch.cuda.synchronize()

    def host_slot(self, slot: int) -> np.ndarray:
        at = (ctypes.c_char * SLAB).from_address(self.pool.address + slot * SLAB)
        return np.frombuffer(at, np.int32)

    def close(self) -> None:
        import torch

        torch.cuda.synchronize()
        del self.slots
        for part in (self.mover, self.pool, self.arena):
            part.close()
        assert self.driver.close() == ()


@pytest.fixture(scope="module")
def card() -> Iterator[Card]:
    pytest.importorskip("torch")
    made = Card()
    yield made
    made.close()


def scattered(num_blocks: int, seed: int = 0) -> tuple[Ids, Ids]:
    """Sources and destinations all over the arena, none both."""
    order = np.random.default_rng(seed).permutation(NUM_SLOTS).astype(np.int32)
    return order[:num_blocks], order[num_blocks : 2 * num_blocks]


def on_card(slots: Ids):
    import torch

    return torch.from_numpy(slots.astype(np.int64)).cuda()


@pytest.mark.parametrize("num_blocks", [1, 16, 256, 1024])
def test_scattered_blocks_arrive_bit_equal_and_no_other_changes(card: Card, num_blocks: int) -> None:
    import torch

    before = card.slots.clone()
    torch.cuda.synchronize()
    src, dst = scattered(num_blocks)
    card.mover.move(src, dst)
    torch.cuda.synchronize()
    expected = before
    expected[on_card(dst)] = before[on_card(src)]
    assert torch.equal(card.slots, expected)


def test_the_driver_takes_a_batch_as_one_call(card: Card) -> None:
    """Runs over the border of two handles of the arena among them: 64 MiB are 32 slots."""
    src, dst = np.arange(20, 60, dtype=np.int32), np.arange(1000, 1040, dtype=np.int32)
    src, dst = np.append(src, 100).astype(np.int32), np.append(dst, 1100).astype(np.int32)
    card.mover.move(src, dst)
    card.stream.sync()
    assert card.driver.batch_refusal == ""
    assert (card.slots[on_card(dst)] == card.slots[on_card(src)]).all()


def test_a_head_is_taken_back_behind_queued_kernels_without_a_wait(card: Card) -> None:
    """Steps read blocks by a table; the head's blocks move, the table is rewritten, and scratch overwrites the head."""
    import torch

    head, body = np.arange(64, dtype=np.int32), np.random.default_rng(1).permutation(NUM_SLOTS - 64)[:64] + 64
    old, new = (torch.from_numpy(slots.astype(np.int64)).pin_memory() for slots in (head, body))
    with torch.cuda.stream(card.torch_stream):
        table = old.cuda()
        sums = [card.slots[table].sum(dim=0) for _ in range(6)]  # every kernel is loaded now, and the memory is there
        card.slots[1000:1064].fill_(7)
        del sums
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(SLEEP_CYCLES)
        sums = [card.slots[table].sum(dim=0) for _ in range(4)]
        card.mover.move(head, body.astype(np.int32))
        table.copy_(new, non_blocking=True)
        card.slots[:64].fill_(7)
        sums += [card.slots[table].sum(dim=0) for _ in range(2)]
        asked = time.perf_counter() - began
        was_done = card.torch_stream.query()
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    assert not was_done
    assert asked < took / 2
    assert all(torch.equal(sums[0], one) for one in sums[1:])
    assert (card.slots[:64] == 7).all()


def test_a_kernel_right_behind_the_launch_does_not_reach_the_copy_on_its_way_out(card: Card) -> None:
    import torch

    slots, host_slots = scattered(NUM_HOST_SLOTS, seed=2)[0], np.arange(NUM_HOST_SLOTS, dtype=np.int32)[::-1].copy()
    index = on_card(slots)
    values = torch.arange(NUM_HOST_SLOTS, device="cuda", dtype=torch.int32)[:, None] + 1000
    with torch.cuda.stream(card.torch_stream):
        card.slots[index] = values
        card.slots[index] = 0
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        card.slots[index] = values  # the copy comes after this
        card.mover.offload(slots, host_slots)
        card.mover.before_launch()
        card.slots[index] = 0  # and before this
        was_done = card.torch_stream.query()
    torch.cuda.synchronize()
    assert not was_done
    assert (card.slots[index] == 0).all()
    for number, host_slot in enumerate(host_slots.tolist()):
        assert (card.host_slot(host_slot) == 1000 + number).all(), number


def test_a_load_comes_after_the_old_readers_and_is_done_when_it_says_so(card: Card) -> None:
    import torch

    slots, host_slots = scattered(64, seed=3)[0], np.arange(64, dtype=np.int32)
    for slot in range(64):
        card.host_slot(slot)[:] = 5000 + slot
    index = on_card(slots)
    expected = torch.arange(64, device="cuda", dtype=torch.int32)[:, None] + 5000
    with torch.cuda.stream(card.torch_stream):
        old = card.slots[index]
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        read = card.slots[index]  # still the old contents
        load = card.mover.load(host_slots, slots)
        was_done = load.is_done
        while not load.is_done:
            time.sleep(0.001)
        seen = card.slots[index]  # asked for after it was seen to be done
    torch.cuda.synchronize()
    assert not was_done
    assert torch.equal(read, old)
    assert (seen == expected).all()
    card.mover.load(host_slots, slots).wait()


def test_an_offload_and_a_load_run_beside_the_execution_stream(card: Card) -> None:
    """Whoever reads other slots goes on meanwhile: a launch waits for what goes out, never for what comes in."""
    import torch

    slots, host_slots = scattered(NUM_HOST_SLOTS, seed=4)[0], np.arange(NUM_HOST_SLOTS, dtype=np.int32)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    load = card.mover.load(host_slots, slots)
    card.mover.before_launch()
    with torch.cuda.stream(card.torch_stream):
        torch.cuda._sleep(1000)
    card.stream.sync()
    assert not load.is_done  # 512 MiB take ten milliseconds
    load.wait()


def test_what_it_takes(card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    """A table for people: one call for a batch, beside a call for each block."""
    rows = []
    for num_blocks in (1, 16, 256, 1024):
        src, dst = scattered(num_blocks, seed=5)
        pairs = [
            (card.arena.address + d * SLAB, card.arena.address + s * SLAB)
            for s, d in zip(src.tolist(), dst.tolist(), strict=True)
        ]

        def loop(pairs=pairs) -> None:
            for to, of in pairs:
                card.driver.copy(to, of, SLAB, stream=card.stream.bare_handle)

        timed = [_timed(card, way) for way in (lambda src=src, dst=dst: card.mover.move(src, dst), loop)]
        cells = "".join(f" | {device:9,.1f} | {host:9,.1f}" for device, host in timed)
        rows.append(f"{num_blocks:6,}{cells} | {2 * num_blocks * SLAB / timed[0][0] / 1e3:8,.0f}")
    rate = measure_rate(card.mover)
    with capsys.disabled():
        print("\nmove of blocks of 2 MiB, scattered: microseconds on the device and of the host, median of 9")
        print("blocks | batch dev | batch host | loop dev | loop host | GB/s read and written by the batch")
        print("\n".join(rows))
        print(f"transfers: {rate.offload / 1e9:.1f} GB/s to the host, {rate.load / 1e9:.1f} GB/s from it")
        print(f"batches: {card.driver.batch_refusal or 'taken as one call'}")
    assert not card.driver.batch_refusal
    assert rate.least > 1e9


def _timed(card: Card, way) -> tuple[float, float]:
    """Median microseconds on the execution stream and of the host, each in rounds of its own.

    The device's are taken behind a sleep, so that the host is ahead of it; the host's without one, for behind it the
    stream's queue may be full, and then the host waits.
    """
    import torch

    device_us, host_us = [], []
    for number in range(20):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(card.torch_stream):
            if number % 2:
                torch.cuda._sleep(60_000_000)
            first.record()
            began = time.perf_counter()
            way()
            took = time.perf_counter() - began
            last.record()
        torch.cuda.synchronize()
        if number % 2:
            device_us.append(first.elapsed_time(last) * 1e3)
        else:
            host_us.append(took * 1e6)
    return float(np.median(device_us[1:])), float(np.median(host_us[1:]))
