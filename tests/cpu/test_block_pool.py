"""The block pool keeps free + used = total, hands out warm blocks first, and refuses misuse without a trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.errors import ResourceError
from tonnage.layout import metadata_bytes_per_block
from tonnage.resources.block_pool import BlockPool


def snapshot(pool: BlockPool) -> tuple[list[int], list[int]]:
    return pool.free_ids().tolist(), pool.ref_counts(np.arange(pool.num_blocks)).tolist()


def test_blocks_come_in_order_and_the_warm_one_first():
    pool = BlockPool(8)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    pool.free([1])
    assert pool.allocate(2).tolist() == [1, 3]
    assert (pool.num_free, pool.num_used) == (4, 4)


def test_free_after_allocate_restores_the_stack():
    pool = BlockPool(8)
    pool.free(pool.allocate(5)[[3, 0]])
    before = snapshot(pool)
    pool.free(pool.allocate(4))
    assert snapshot(pool) == before


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    pool.allocate(3)
    before = snapshot(pool)
    with pytest.raises(ResourceError, match="asked for 2 blocks with 1 of 4 free"):
        pool.allocate(2)
    assert snapshot(pool) == before


def test_a_shared_block_is_free_after_its_last_reference():
    pool = BlockPool(4)
    ids = pool.allocate(2)
    pool.share(ids[:1])
    pool.free(ids)
    assert (pool.num_used, pool.ref_counts(ids).tolist()) == (1, [1, 0])
    pool.free(ids[:1])
    assert pool.num_used == 0


@pytest.mark.parametrize("ids", [[1], [0, 1], [0, 0], [4], [-1], [-4], [0, 99]])
@pytest.mark.parametrize("call", ["free", "share"])
def test_misuse_is_refused_and_changes_nothing(call, ids):
    """Block 0 is held; 1 is free, 4, -1 and -4 are foreign, [0, 0] is twice in one call."""
    pool = BlockPool(4)
    pool.allocate(1)
    before = snapshot(pool)
    with pytest.raises(ResourceError):
        getattr(pool, call)(ids)
    assert snapshot(pool) == before


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([0, 1], "block 1 is freed but nothing holds it"),
        ([0, 0], "freed twice in one call"),
        ([0, 99], "block 99 is not one of the pool's 4"),
        ([99, -7], "block -7 is not one of the pool's 4"),
    ],
)
def test_misuse_names_the_block(ids, told):
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(ResourceError, match=told):
        pool.free(ids)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_an_empty_pool_is_refused(num_blocks):
    with pytest.raises(ResourceError):
        BlockPool(num_blocks)


def test_nothing_asked_is_nothing_taken():
    pool = BlockPool(2)
    assert pool.allocate(0).size == 0
    pool.free([])
    assert pool.num_free == 2
    with pytest.raises(ResourceError):
        pool.allocate(-1)


@pytest.mark.parametrize("num_blocks", [1, 7, 1000])
def test_its_arrays_cost_what_the_layout_says(num_blocks):
    assert BlockPool(num_blocks).num_bytes == num_blocks * metadata_bytes_per_block()


@given(st.data())
def test_against_a_dictionary_of_counts(data):
    pool, model = BlockPool(12), dict.fromkeys(range(12), 0)
    for _ in range(data.draw(st.integers(0, 25))):
        held = [block for block, count in model.items() if count]
        call = data.draw(st.sampled_from(["allocate", "free", "share"]))
        if call == "allocate":
            ids = pool.allocate(data.draw(st.integers(0, pool.num_free))).tolist()
            assert not set(ids) & set(held)
        else:
            ids = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
            getattr(pool, call)(ids)
        for block in ids:
            model[block] += -1 if call == "free" else 1
        assert pool.ref_counts(np.arange(12)).tolist() == list(model.values())
        assert sorted(pool.free_ids().tolist()) == [block for block, count in model.items() if not count]
        assert pool.num_free + pool.num_used == 12
    pool.reset()
    assert snapshot(pool) == snapshot(BlockPool(12))
