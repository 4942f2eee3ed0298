"""The slab for layers that differ, against every slab and every number of groups there could be."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import shapes
from hypothesis import given
from hypothesis import strategies as st

from tonnage.costs import kv
from tonnage.costs.grouping import GROUP_SHARE, TYPICAL_TOKENS, Share, Slabs, Stack, choose_slabs, cut, loss, splits
from tonnage.costs.kv import bytes_per_token, kv_layout
from tonnage.layout import group_blocks, sequence_bytes, state_bytes_per_sequence
from tonnage.terms import Rank
from tonnage.units import ceil_div

LAYERS = st.integers(1, 5)
TEXT = st.builds(Stack, LAYERS, st.integers(1, 40), st.just(16))
WINDOW = st.builds(Stack, LAYERS, st.integers(1, 40), st.just(16), st.sampled_from([16, 100, 1024]))
STATE = st.builds(Stack, LAYERS, st.integers(1, 300), st.just(0))
ALIKE = st.builds(replace, TEXT, most_units=st.just(1)), st.builds(replace, WINDOW, most_units=st.just(1))
STACKS = st.tuples(TEXT, WINDOW) | st.tuples(*ALIKE) | st.tuples(TEXT, STATE) | st.tuples(TEXT, WINDOW, STATE)


def twice_lost(stack: Stack, sizes: list[int], slab: int, table: int) -> int | None:
    """The rule once more, one group after the other: layers of each group are counted out."""
    total = 0
    for layers in sizes:
        units = min(slab // (layers * stack.unit_bytes), stack.most_units or slab)
        if not units:
            return None
        if stack.unit_tokens == 0:
            total += 2 * (slab - layers * stack.unit_bytes)
            continue
        live = min(stack.window or TYPICAL_TOKENS, TYPICAL_TOKENS)
        block = units * layers * stack.unit_bytes
        num_blocks = ceil_div(live, units * stack.unit_tokens)
        total += 2 * num_blocks * (slab - block) + block + table
        total += block if stack.window is not None else 0
    return total


def sizes(num_layers: int, num_groups: int) -> list[int]:
    return [num_layers // num_groups + (i < num_layers % num_groups) for i in range(num_groups)]


def price_of_a_table(stacks: tuple[Stack, ...]) -> int:
    whole = 0
    for stack in stacks:
        live = min(stack.window or TYPICAL_TOKENS, TYPICAL_TOKENS)
        whole += stack.num_layers * (
            stack.unit_bytes * live // stack.unit_tokens if stack.unit_tokens else stack.unit_bytes
        )
    return 2 * whole // GROUP_SHARE


def least(stacks: tuple[Stack, ...], slab: int, table: int) -> int | None:
    found = [
        [twice_lost(stack, sizes(stack.num_layers, n), slab, table) for n, _ in splits(stack.num_layers)]
        for stack in stacks
    ]
    best = [min((each for each in losses if each is not None), default=None) for losses in found]
    return None if None in best else sum(best)


def lost(stacks: tuple[Stack, ...], slabs: Slabs, table: int) -> int:
    return sum(
        twice_lost(stack, [share.num_layers for share in shares], slabs.slab_bytes, table)
        for stack, shares in zip(stacks, slabs.shares, strict=True)
    )


def stacks_of(key: str, tp: int) -> tuple[Stack, ...]:
    """What a published model asks the rule: layers of each kind with their smallest blocks."""
    asked: list[tuple[Stack, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tonnage.costs.kv.choose_slabs", lambda stacks: asked.append(stacks) or choose_slabs(stacks))
        patch.setattr("tonnage.costs.kv._layout", kv._layout.__wrapped__)
        kv_layout(shapes.config(key), rank=Rank(size=tp, tp=tp))
    return asked[0]


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(
    "key", ["gemma-3-27b", "gemma-4-31b", "mimo-v2-flash", "qwen3.6-27b", "kimi-linear-48b", "lfm2-700m"]
)
def test_no_slab_at_all_loses_less(key, tp):
    """Any slab can shrink to the largest block in it, so that the best of all is a multiple of some group's block:
    every multiple is tried, up to slabs so large that half of one is more than what is lost."""
    stacks = stacks_of(key, tp)
    table = price_of_a_table(stacks)
    chosen = lost(stacks, choose_slabs(stacks), table)
    floor = max(stack.unit_bytes for stack in stacks)
    blocks = {ceil_div(s.num_layers, n) * s.unit_bytes for s in stacks for n in range(1, s.num_layers + 1)}
    every = {slab for block in blocks for slab in range(block, chosen + 1, block) if slab >= floor}
    ends = sum(0 if not stack.unit_tokens else 1 if stack.window is None else 2 for stack in stacks)
    found = [least(stacks, slab, table) for slab in every if slab * ends <= chosen]
    assert chosen == min(each for each in found if each is not None)


@given(stacks=STACKS)
def test_of_the_candidates_the_best_is_taken(stacks):
    table = price_of_a_table(stacks)
    blocks = {max(sizes(s.num_layers, n)) * s.unit_bytes for s in stacks for n in range(1, s.num_layers + 1)}
    floor = max(stack.unit_bytes for stack in stacks)
    candidates = blocks | {ceil_div(max(low, floor), block) * block for low in blocks for block in blocks}
    found = [least(stacks, slab, table) for slab in candidates]
    assert lost(stacks, choose_slabs(stacks), table) <= min(each for each in found if each is not None)


@given(stack=TEXT | WINDOW | STATE, num_groups=st.integers(1, 5), slab=st.integers(1, 2000), table=st.integers(0, 50))
def test_the_loss_of_one_stack(stack, num_groups, slab, table):
    groups = min(num_groups, stack.num_layers)
    assert loss(stack, cut(stack.num_layers, groups), slab, table) == twice_lost(
        stack, sizes(stack.num_layers, groups), slab, table
    )


@given(stacks=STACKS)
def test_every_layer_is_in_one_group_and_fits(stacks):
    slabs = choose_slabs(stacks)
    for stack, shares in zip(stacks, slabs.shares, strict=True):
        assert sum(share.num_layers for share in shares) == stack.num_layers
        assert all(share.num_units * share.num_layers * stack.unit_bytes <= slabs.slab_bytes for share in shares)
        assert all(first.num_layers >= second.num_layers for first, second in pairwise(shares))


@pytest.mark.parametrize("key", ["gemma-3-4b", "gemma-3-12b", "gemma-3-27b", "llama-4-scout", "mimo-v2-flash"])
@pytest.mark.parametrize("block_tokens", [16, 48])
def test_blocks_of_text_alone_hold_as_many_tokens_in_every_group(key, block_tokens):
    """One position of the prefix tree is a block of each group."""
    groups = kv_layout(shapes.config(key), block_tokens=block_tokens).groups
    assert len(groups) > 1
    assert {group.block_tokens for group in groups} == {block_tokens}


def test_one_kind_alone_is_one_group():
    assert choose_slabs((Stack(80, 4096, 16),)) == Slabs(80 * 4096, ((Share(80, 1),),))
    assert choose_slabs((Stack(7, 999, 0),)) == Slabs(7 * 999, ((Share(7, 1),),))


def test_equal_kinds_share_a_slab_at_once():
    """As many window layers as full ones: one group each, nothing padded."""
    slabs = choose_slabs((Stack(18, 100, 16), Stack(18, 100, 16, 128)))
    assert slabs == Slabs(1800, ((Share(18, 1),), (Share(18, 1),)))


def test_splits_try_every_size_once():
    assert [groups for groups, _ in splits(6)] == [1, 2, 3, 6]
    assert splits(1) == ((1, ((1, 1),)),)
    assert cut(7, 3) == ((3, 1), (2, 2))


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("key", shapes.complete())
def test_published_shapes_lose_little(key, tp):
    """Of a sequence of 4,096 tokens: less than 4 % of its slabs is padding, and all in all it takes less than 8 %
    more than its bare tokens, window and state, begun blocks included."""
    layout = kv_layout(shapes.config(key), rank=Rank(size=tp, tp=tp, attention_dp=tp > 1 and key in CUT_HEADS))
    padding = sum(
        (layout.slab_bytes - group.block_bytes) * group_blocks(group, TYPICAL_TOKENS) for group in layout.groups
    )
    taken = sequence_bytes(layout, TYPICAL_TOKENS)
    assert padding * 25 < taken
    bare = bytes_per_token(layout) * TYPICAL_TOKENS + state_bytes_per_sequence(layout)
    bare += sum(
        ceil_div(min(TYPICAL_TOKENS, group.window) * group.block_bytes, group.block_tokens)
        for group in layout.groups
        if group.window is not None
    )
    assert taken * 100 < bare * 108


#: Their heads do not divide by four.
CUT_HEADS = ("qwen2.5-0.5b",)
