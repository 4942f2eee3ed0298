"""The price of a pool whose layers keep different things, against counting block by block."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tonnage.budget.charges import Charges, charges
from tonnage.budget.pool import SPARE_STATES, PoolPrice
from tonnage.budget.split import Demand
from tonnage.config import Limits
from tonnage.layout import KVGroup, KVGroupKind, KVLayout, KVOrder
from tonnage.terms import Chip, Measured, Quantity, Rank, Source

CHIP = Chip(name="test", sm=90, num_sms=132, total_bytes=0)
NOTHING = Quantity.exact(0, Source.ASSUMED, "test")


def limits(*, rows=2, length=64, step=16, encoder=0) -> Limits:
    return Limits(
        max_seq_len=length, max_batch_size=rows, max_num_tokens=step, max_logits_rows=rows, max_encoder_tokens=encoder
    )


def group(kind: KVGroupKind, *, block_tokens: int, block_bytes: int, window: int | None = None) -> KVGroup:
    return KVGroup(
        name=kind.value,
        kind=kind,
        layers=(0,),
        window=window,
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        parts=(),
    )


def layout(*groups: KVGroup) -> KVLayout:
    return KVLayout(
        slab_bytes=max(each.block_bytes for each in groups), order=KVOrder.BLOCK_MAJOR, groups=tuple(groups)
    )


def free_charges() -> Charges:
    measured = Measured(
        rank=Rank(), device_bytes=0, weights=NOTHING, context=NOTHING, libraries=NOTHING, stages=(), graphs=None,
        foreign_bytes=NOTHING,
    )  # fmt: skip
    return charges(measured, (), limits=limits(), chip=CHIP)


def price(*groups: KVGroup, at: Limits | None = None, page_bytes: int = 1) -> PoolPrice:
    return PoolPrice.of(layout(*groups), free_charges(), limits=at or limits(), page_bytes=page_bytes)


FULL = group(KVGroupKind.FULL, block_tokens=16, block_bytes=160)
WINDOW = group(KVGroupKind.WINDOW, block_tokens=16, block_bytes=160, window=20)
STATE = group(KVGroupKind.STATE, block_tokens=0, block_bytes=150)
CROSS = group(KVGroupKind.CROSS, block_tokens=8, block_bytes=100)


def test_a_dense_pool_is_its_blocks():
    dense = price(FULL)
    assert (dense.block_tokens, dense.num_slabs(10), dense.kv_bytes(10), dense.padding_bytes(10)) == (16, 10, 1600, 0)
    assert (dense.fixed_bytes, dense.grows, dense.blocks_within(1599)) == (0, True, 9)


def test_a_window_takes_what_it_shows_of_each_sequence():
    """Sequences of 4 blocks, of which the window shows ceil(19 / 16) + 1 = 3, and one block for a step's 16 tokens.

    Up to one sequence and a little it sees everything; 8 units are two sequences, 100 units 25 of them.
    """
    both = price(FULL, WINDOW)
    assert [both.num_slabs(units) - units for units in (0, 1, 4, 8, 100)] == [0, 1, 4, 7, 76]


def test_how_many_may_run_does_not_move_the_price_of_a_token():
    few, many = (price(FULL, WINDOW, at=limits(rows=rows)) for rows in (1, 256))
    assert [few.total_bytes(units) for units in range(50)] == [many.total_bytes(units) for units in range(50)]


def test_states_and_encoders_are_there_from_the_start():
    hybrid = price(FULL, STATE, CROSS, at=limits(rows=3, encoder=20))
    assert hybrid.fixed_slabs == 3 + SPARE_STATES + 3 * 3
    assert hybrid.num_slabs(0) == hybrid.fixed_slabs
    assert hybrid.total_bytes(0) == 0
    assert hybrid.padding_bytes(5) == 4 * 10 + 9 * 60


def test_a_model_of_states_alone_holds_what_the_limits_ask_for():
    """Nothing grows, so memory is no limit: every sequence at its full length is the most there is use for."""
    recurrent = price(STATE)
    assert not recurrent.grows
    assert (recurrent.block_tokens, recurrent.most_units) == (64, 2)
    assert recurrent.blocks_within(1) == 2
    assert recurrent.blocks_within(0) == 0


def test_the_unit_is_the_finest_group_that_grows():
    coarse = group(KVGroupKind.LATENT, block_tokens=64, block_bytes=160)
    mixed = price(FULL, coarse)
    assert mixed.block_tokens == 16
    assert [mixed.num_slabs(units) for units in (1, 4, 5)] == [2, 5, 7]


def test_a_rank_of_context_parallelism_holds_every_second_block():
    """One block here stands for two of a sequence, so the same bytes hold twice the tokens."""
    local = PoolPrice.of(layout(FULL), free_charges(), limits=limits(), page_bytes=1, cp=2)
    assert (local.block_tokens, local.local_tokens, local.num_slabs(5), local.most_units) == (32, 16, 5, 2 * 2)


kinds = st.sampled_from(
    [KVGroupKind.FULL, KVGroupKind.WINDOW, KVGroupKind.LATENT, KVGroupKind.STATE, KVGroupKind.CROSS]
)


@st.composite
def groups(draw):
    kind = draw(kinds)
    return group(
        kind,
        block_tokens=0 if kind == KVGroupKind.STATE else draw(st.sampled_from([4, 8, 12, 16])),
        block_bytes=draw(st.integers(50, 100)),
        window=draw(st.integers(1, 40)) if kind == KVGroupKind.WINDOW else None,
    )


prices = st.builds(
    lambda found, rows, page: price(*found, at=limits(rows=rows, encoder=10), page_bytes=page),
    st.lists(groups(), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([1, 64, 1000]),
)
demands = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), max_size=2)


def with_scratch(pool: PoolPrice, asked) -> PoolPrice:
    """``asked``: bytes a token, and tokens up to which they grow."""
    found = tuple(
        Demand(name=str(i), rate_bytes=rate * pool.local_tokens, ceiling_bytes=rate * most)
        for i, (rate, most) in enumerate(asked)
    )
    return replace(pool, demands=found)


@given(prices, demands, st.integers(0, 20_000))
def test_the_most_units_a_budget_pays_for(pool, asked, budget):
    """One unit more is above the budget, by counting up from nothing."""
    pool = with_scratch(pool, asked)
    found = pool.blocks_within(budget)
    counted = 0
    while counted < (10_000 if pool.grows else pool.most_units) and pool.total_bytes(counted + 1) <= budget:
        counted += 1
    assert found == (counted if budget > 0 else 0)


@given(prices, st.integers(0, 20_000))
def test_the_most_units_a_cap_on_the_cache_allows(pool, cap):
    found, counted = pool.kv_blocks_within(cap), 0
    while counted < (10_000 if pool.grows else pool.most_units) and pool.kv_bytes(counted + 1) <= cap:
        counted += 1
    assert found == counted


@given(prices, st.integers(0, 500))
def test_more_units_never_cost_less(pool, units):
    assert pool.total_bytes(units) <= pool.total_bytes(units + 1)
    assert pool.num_slabs(units) <= pool.num_slabs(units + 1)
    assert 0 <= pool.padding_bytes(units) <= pool.kv_bytes(units)


@given(st.integers(1, 4), st.integers(1, 60), st.integers(1, 64), st.integers(0, 300))
def test_a_window_never_costs_more_than_full_attention(rows, window, step, units):
    at = limits(rows=rows, step=step)
    windowed = price(FULL, replace(WINDOW, window=window), at=at)
    full = price(FULL, replace(FULL, name="more"), at=at)
    assert windowed.total_bytes(units) <= full.total_bytes(units)


BLOCKS = st.sampled_from([4, 8, 16, 40, 96])


@given(st.integers(1, 6), st.integers(1, 80), st.integers(1, 64), st.integers(1, 24), BLOCKS, BLOCKS, st.data())
def test_a_pool_holds_the_sequences_that_it_is_named_after(count, length, window, step, full_block, window_block, data):
    """So many of full length, one prefilling a step's tokens and the others decoding: counted block by block."""
    full, windowed = replace(FULL, block_tokens=full_block), replace(WINDOW, block_tokens=window_block, window=window)
    pool = price(full, windowed, at=limits(rows=count, length=length, step=step))
    computed = [1] * count
    computed[data.draw(st.integers(0, count - 1))] = min(length, step)

    def held(tokens: int, block: int, oldest: int) -> int:
        return -(-tokens // block) - oldest // block

    needed = sum(held(length, full_block, 0) for _ in range(count))
    for new in computed:  # from the oldest token that the first of the new ones can still see
        needed += held(length, window_block, max(0, length - new - (window - 1)))
    priced = sum(group.blocks_of_sequences(count) for group in pool.groups)
    units = count * -(-length // pool.block_tokens)
    assert needed <= priced == pool.num_slabs(units)


@given(st.integers(1, 4), st.integers(1, 80), st.lists(groups(), min_size=1, max_size=4))
def test_so_many_sequences_are_so_many_units(count, length, found):
    """However the groups' blocks differ: the fit, which counts sequences, and the plan, which counts units, agree."""
    pool = price(*found, at=limits(rows=4, length=length, encoder=10))
    units = count * -(-length // pool.block_tokens)
    if pool.grows:
        assert pool.num_slabs(units) == sum(group.blocks_of_sequences(count) for group in pool.groups)
