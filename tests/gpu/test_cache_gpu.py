"""The cache of blocks over a card's memory: the same acts and the same checks as on a simulated device.

Each block begins with the number of its tokens and then the tokens themselves, in real slabs that the real mover
copies, offloads and loads.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from cache_bench import ACTS, B, Bench, act, every_kind_of_copy
from tonnage.buffers import Device, Stream, VaArena
from tonnage.ledger import Ledger
from tonnage.resources.blocks import Level
from tonnage.resources.host_pool import HostPool
from tonnage.resources.mover import DeviceMover
from tonnage.terms import LineKind
from tonnage.units import GiB, KiB, MiB

pytestmark = pytest.mark.gpu

SLAB, NUM_SLOTS, NUM_HOST_SLOTS = 64 * KiB, 12, 5
_FORMAT = f"<{B + 1}i"
_SIZE = struct.calcsize(_FORMAT)


class Card:
    def __init__(self) -> None:
        from tonnage.device.cuda import CudaDriver

        self.driver = CudaDriver(0)
        self.stream = Stream.create(Device(self.driver))
        ledger = Ledger(0, 140 * GiB, host_is_device=False)
        self.arena = VaArena(self.stream, ledger=ledger, owner="kv", line=LineKind.KV, reserve_bytes=2 * MiB)
        self.arena.commit(NUM_SLOTS * SLAB)
        self.pool = HostPool(self.driver, asked_bytes=NUM_HOST_SLOTS * SLAB, slab_bytes=SLAB)
        self.staging = self.driver.host_alloc(_SIZE, flags=0)

    def close(self) -> None:
        self.driver.host_free(self.staging)
        self.pool.close()
        self.arena.close()
        self.stream.close()

    def read(self, address: int) -> tuple[int, ...]:
        """In stream order, behind every move; the mover's own stream has to be waited for by whoever reads."""
        self.driver.copy(self.staging, address, _SIZE, stream=self.stream.bare_handle)
        self.stream.sync()
        num, *tokens = struct.unpack(_FORMAT, ctypes.string_at(self.staging, _SIZE))
        return tuple(tokens[:num])

    def write(self, address: int, tokens: tuple[int, ...]) -> None:
        data = struct.pack(_FORMAT, len(tokens), *tokens, *[-1] * (B - len(tokens)))
        ctypes.memmove(self.staging, data, _SIZE)
        self.driver.copy(address, self.staging, _SIZE, stream=self.stream.bare_handle)
        self.stream.sync()


class CardBench(Bench):
    """What a sequence writes into a block it writes as a kernel would: in stream order, after ``flush``."""

    def __init__(self, card: Card) -> None:
        self.card = card
        super().__init__(num_slots=NUM_SLOTS, num_host_slots=NUM_HOST_SLOTS)

    def make_mover(self, num_slots, num_host_slots):
        return DeviceMover(self.card.arena, self.card.pool, slab_bytes=SLAB, stream=self.card.stream)

    def write(self, seq, index):
        self.cache.flush()
        address = self.card.arena.address + int(self.cache.slots[seq.ids[index]]) * SLAB
        self.card.write(address, tuple(seq.tokens[index * B : index * B + B]))

    def carried(self, block):
        slot = int(self.cache.slots[block])
        if self.cache.blocks.levels[block] == Level.HOST:
            self.cache.flush()
            return self.card.read(self.card.pool.address + slot * SLAB)
        return self.card.read(self.card.arena.address + slot * SLAB)


@pytest.fixture(scope="module")
def card() -> Iterator[Card]:
    made = Card()
    yield made
    made.close()


@settings(max_examples=60)
@given(ACTS)
def test_any_order_of_calls_keeps_the_books_and_the_bytes(card, acts):
    bench = CardBench(card)
    try:
        for one in acts:
            act(bench, one)
            bench.check()
        for seq in list(bench.seqs):
            bench.finish(seq)
        while bench.pins:
            bench.cache.release(bench.pins.pop())
        bench.cache.lend()
        bench.cache.clear()
        assert bench.cache.num_free == bench.cache.num_slots
    finally:
        bench.cache.close()


def test_acts_on_the_card_reach_every_kind_of_copy(card):
    """The property above says nothing if nothing moves: here everything does, and the bytes are right."""
    bench = CardBench(card)
    assert every_kind_of_copy(bench) > 0
    bench.cache.close()
