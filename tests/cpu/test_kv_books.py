"""What the bookkeeping of blocks really takes, against the formulas by which it is planned and claimed."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
from kv_cases import group

from tonnage.config import Limits
from tonnage.layout import metadata_bytes_per_block, table_bytes
from tonnage.resources.blocks import NONE
from tonnage.resources.cache import BlockCache
from tonnage.resources.chain import Chain, scope_digest
from tonnage.resources.kv import KVManager
from tonnage.terms import Fixed, PerBlock

NUM_BLOCKS, NUM_IN_TEXT = 3_000, 10
SCOPE = scope_digest()
LIMITS = Limits(
    max_seq_len=256, max_batch_size=4, max_num_tokens=64, max_logits_rows=4, prefix_caching=True,
)  # fmt: skip


def manager(block_tokens, *, num_slots, head_slots=0, num_host_slots=0):
    cache = BlockCache(
        [group(block_tokens=block_tokens)], num_slots=num_slots, head_slots=head_slots, num_host_slots=num_host_slots
    )
    return KVManager(
        cache, block_tokens=block_tokens, max_seq_len=LIMITS.max_seq_len, max_batch_size=LIMITS.max_batch_size
    )


@pytest.mark.parametrize("block_tokens", [1, 16, 64])
@pytest.mark.parametrize("slots", [(40, 0, 0), (40, 7, 0), (40, 0, 500), (1, 0, 3)], ids=str)
def test_arrays_are_what_the_layout_says(block_tokens, slots):
    """Blocks of the host take as much; one entry of the slots stands for no block."""
    num_slots, head_slots, num_host_slots = slots
    kv = manager(block_tokens, num_slots=num_slots, head_slots=head_slots, num_host_slots=num_host_slots)
    tables = 2 * table_bytes(
        max_batch_size=LIMITS.max_batch_size, max_seq_len=LIMITS.max_seq_len, block_tokens=block_tokens
    )
    books = metadata_bytes_per_block(block_tokens=block_tokens) * (num_slots + num_host_slots)
    assert kv.num_bytes == tables + books + 4


def test_the_manager_claims_by_the_same_formulas():
    kv = manager(16, num_slots=40)
    claims = {claim.name: claim.cost for claim in kv.claims(LIMITS)}
    assert claims == {
        "page table": Fixed(bytes=2 * table_bytes(max_batch_size=4, max_seq_len=256, block_tokens=16)),
        "block metadata": PerBlock(bytes_per_block=metadata_bytes_per_block(block_tokens=16, prefix_caching=True)),
    }


def serve(cache, tokens):
    """A sequence of ``NUM_IN_TEXT`` full blocks: what is cached of it is claimed, the rest computed, all let go."""
    chain = Chain(SCOPE, tokens, cache.block_tokens)
    match = cache.match(chain, max_tokens=len(tokens))
    cache.claim(match)
    parent, held = (match.nodes or [NONE])[-1], list(match.blocks[0])
    if match.partial is not None:
        cache.release([source for source in match.partial.sources if source != NONE])
    for index in range(len(held), NUM_IN_TEXT):
        (block,) = cache.allocate(1).tolist()
        parent, ids = cache.store(chain, index, cache.block_tokens, parent, [block])
        held += ids
    cache.release(held)


def busy(block_tokens, *, num_rounds):
    """The manager, after each text. It is full after one round; in further ones a third of the texts are new, and the
    others are some of the first ten again."""
    kv, draw = manager(block_tokens, num_slots=NUM_BLOCKS), random.Random(1)
    for number in range(num_rounds * NUM_BLOCKS // NUM_IN_TEXT):
        is_new = number * NUM_IN_TEXT < NUM_BLOCKS or draw.random() < 1 / 3
        words = random.Random(number if is_new else draw.randrange(10))
        serve(kv.cache, [words.randrange(150_000) for _ in range(NUM_IN_TEXT * block_tokens)])
        yield kv
    assert kv.cache.num_cached == NUM_BLOCKS


def most_bytes(block_tokens, *, num_rounds):
    """The most that it has on the heap after a text, a block; its page tables are no books of blocks."""
    gc.collect()
    tracemalloc.start()
    try:
        held = (
            tracemalloc.get_traced_memory()[0] - (kv.num_bytes - kv.cache.num_bytes)
            for kv in busy(block_tokens, num_rounds=num_rounds)
        )
        return max(held) / NUM_BLOCKS
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_a_full_cache_in_use_takes_what_is_planned_for_its_blocks(block_tokens):
    """Queues then hold entries that no longer count, and dictionaries the room that they have once grown to."""
    planned = metadata_bytes_per_block(block_tokens=block_tokens, prefix_caching=True)
    taken = most_bytes(block_tokens, num_rounds=3)
    assert 0.9 * planned <= taken <= 1.1 * planned, (taken, planned)


def test_one_that_was_just_filled_takes_less():
    assert most_bytes(16, num_rounds=1) <= metadata_bytes_per_block(block_tokens=16, prefix_caching=True)
