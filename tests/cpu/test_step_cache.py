"""What torch keeps for steps, played by its allocator's rules: the order of steps after a sleep must not matter."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.engine.exact.segments import CachingAllocator
from tonnage.engine.step_cache import StepCache
from tonnage.units import KiB, MiB

STREAM, POOL = 0xABC, (0, 0)
MOST = 8192


class Memory:
    """Torch's allocator on one stream, beside segments of others. ``room_bytes``: what the device has for it."""

    def __init__(self, room_bytes=None):
        self.empty()
        self.room_bytes, self.keys = room_bytes, itertools.count()

    def empty(self):
        """As ``torch.cuda.empty_cache`` does where nothing is alive."""
        self.allocator = CachingAllocator()

    def backend(self):
        return "native"

    def segments(self):
        def told(size, *, stream=STREAM, pool=POOL):
            return {"total_size": size, "stream": stream, "segment_pool_id": pool, "allocated_size": 0}

        others = [told(64 * MiB, stream=0), told(96 * MiB, pool=(0, 1))]
        return [*others, *(told(segment.size) for segment in self.allocator.segments)]

    def take(self, num_bytes):
        if self.room_bytes is not None and self.allocator.reserved_bytes + num_bytes > self.room_bytes:
            raise MemoryError
        return Tensor(self.allocator, next(self.keys), num_bytes)

    def step(self, num_tokens):
        """Two layers as they are compiled: hidden states, q, k and v, what attention makes, gate and up, logits."""
        with Alive(self) as alive:
            rest = alive(num_tokens * 8 * KiB)
            alive(num_tokens * 256)
            for _ in range(2):
                qkv = alive(num_tokens * 12 * KiB)
                out = alive(num_tokens * 8 * KiB)
                alive.drop(qkv)
                gate = alive(num_tokens * 56 * KiB)
                alive.drop(out)
                half = alive(num_tokens * 28 * KiB)
                alive.drop(gate)
                alive.drop(rest)
                rest = alive(num_tokens * 8 * KiB)
                alive.drop(half)
            alive(256 * 250 * KiB)


class Tensor:
    def __init__(self, allocator, key, num_bytes):
        self.allocator, self.key = allocator, key
        allocator.allocate(key, num_bytes)

    def __del__(self):
        self.allocator.free(self.key)


class Alive:
    """Tensors of a step, all gone with it."""

    def __init__(self, memory):
        self.memory, self.there = memory, []

    def __enter__(self):
        return self

    def __call__(self, num_bytes):
        self.there.append(self.memory.take(num_bytes))
        return len(self.there) - 1

    def drop(self, number):
        self.there[number] = None

    def __exit__(self, *_):
        self.there.clear()


def started():
    """As start-up leaves it: full steps first."""
    memory = Memory()
    cache = StepCache(memory, stream=STREAM, take=memory.take)
    for tokens in (MOST, 256, MOST, 256):
        memory.step(tokens)
    cache.remember()
    return memory, cache


def sizes(memory):
    return sorted(segment.size for segment in memory.allocator.segments)


RISING = (300, 512, 1000, 1500, 2048, 3000, 4096, 5000, 6144, 7000, MOST)


def test_an_empty_cache_takes_far_more_in_another_order():
    memory, _ = started()
    planned = memory.allocator.reserved_bytes
    memory.empty()
    for tokens in RISING:
        memory.step(tokens)
    assert memory.allocator.reserved_bytes > 1.5 * planned


@given(st.lists(st.integers(1, MOST), max_size=20))
def test_refilled_it_takes_no_more_than_was_planned(steps):
    memory, cache = started()
    planned, before = memory.allocator.reserved_bytes, sizes(memory)
    for tokens in steps:
        memory.step(tokens)
    most = memory.allocator.reserved_bytes  # what these steps add to a cache that nobody emptied
    memory.empty()
    cache.refill()
    assert sizes(memory) == before
    assert memory.allocator.allocated_bytes == 0
    for tokens in (*RISING, *steps):
        memory.step(tokens)
    assert memory.allocator.reserved_bytes <= max(most, planned) + 4 * MiB
    assert cache.num_bytes == planned


def test_what_is_there_is_not_taken_again():
    memory, cache = started()
    planned = memory.allocator.reserved_bytes
    cache.refill()
    assert memory.allocator.reserved_bytes == planned
    memory.empty()
    kept = memory.take(max(sizes(started()[0])))  # a tensor that outlived the emptying fills a segment
    cache.refill()
    assert memory.allocator.reserved_bytes == planned
    del kept


def test_without_room_it_raises_and_holds_nothing():
    memory, cache = started()
    memory.empty()
    memory.room_bytes = memory.allocator.reserved_bytes + 100 * MiB
    with pytest.raises(MemoryError):
        cache.refill()
    assert memory.allocator.allocated_bytes == 0


def test_whoever_catches_that_error_can_give_all_of_it_back():
    """Inside ``except`` the error's frames are alive, and with them what they name."""
    memory, cache = started()
    planned = memory.allocator.reserved_bytes
    memory.empty()
    memory.room_bytes = planned - 20 * MiB
    try:
        cache.refill()
    except MemoryError:
        assert 0 < memory.allocator.reserved_bytes < planned
        assert memory.allocator.allocated_bytes == 0
    else:
        pytest.fail("there was no room")


class Unsegmented(Memory):
    """Torch on another backend."""

    def backend(self):
        return "cudaMallocAsync"

    def segments(self):
        raise RuntimeError("snapshot with backend:cudaMallocAsync is not meaningful")


def test_a_backend_without_segments_is_not_asked_for_them():
    memory = Unsegmented()
    cache = StepCache(memory, stream=STREAM, take=memory.take)
    cache.remember()
    cache.refill()
    assert (cache.num_bytes, memory.allocator.reserved_bytes) == (0, 0)


def test_nothing_remembered_is_nothing_taken():
    memory = Memory()
    StepCache(memory, stream=STREAM, take=memory.take).refill()
    assert memory.allocator.reserved_bytes == 0
