"""The gate: what each reserve counts, and which rows a step keeps (spec/runtime.md 3.6 and invariants 21, 22, 24)."""

from __future__ import annotations

import numpy as np
import pytest
from fake_kv import engine_on_fake
from hypothesis import given
from hypothesis import strategies as st

from tonnage.resources.gate import (
    AttendedTokens,
    Chunk,
    Conditions,
    EncoderTokens,
    Gate,
    HostPages,
    LogitsRows,
    PrefillTokens,
    Rows,
    StepTokens,
    step_reserves,
)
from tonnage.resources.reference import num_within_cap

BLOCK = 16


def ints(values):
    return np.array(list(values), np.int64)


def rows_of(chunks):
    """Whole chunks as rows."""
    cut = [chunk.cut(chunk.rest) for chunk in chunks]
    fields = ("starts", "counts", "samples", "encoder_tokens")
    return Rows(*(ints(getattr(row, name) for row in cut) for name in fields))


NO_ROWS = rows_of([])


def decodes(num):
    return rows_of(Chunk(9, 1) for _ in range(num))


def gate_of(**limits):
    """Every reserve, each without a limit that anybody meets unless it is given."""
    return Gate(
        (
            StepTokens(limits.get("step", 10**6)),
            PrefillTokens(limits.get("beside_decodes")),
            AttendedTokens(limits.get("attended")),
            LogitsRows(limits.get("logits", 10**6)),
            EncoderTokens(limits.get("encoder", 10**6)),
            HostPages(lambda: limits.get("pages"), BLOCK),
        )
    )


# -- the cap on attended tokens: spec/runtime.md 3.6 ---------------------------------------------------------------


VECTORS = [
    ([50, 50, 50], 120, 2),
    ([50, 50, 50], 200, 3),
    ([200, 50], 120, 1),
    ([500], 1, 1),
    ([1, 1, 1], 0, 1),
    ([60, 60], 120, 2),
    ([50, 50, 50], None, 3),
    ([], None, 0),
    ([], 0, 0),
]


@pytest.mark.parametrize(("attended", "cap", "kept"), VECTORS)
@pytest.mark.parametrize("num_decodes", [0, 3])
@pytest.mark.parametrize("cached", [0, 0.5], ids=["from the start", "half is cached"])
def test_the_vectors_of_the_workspace_cap(attended, cap, kept, num_decodes, cached):
    """Chunks attend to what they start behind as well; decodes are not counted and always stay."""
    chunks = [Chunk(int(tokens * cached), tokens - int(tokens * cached)) for tokens in attended]
    rows = rows_of([*(Chunk(10**4, 1) for _ in range(num_decodes)), *chunks])
    assert gate_of(attended=cap).num_within(rows, num_decodes=num_decodes) == num_decodes + kept


@pytest.mark.parametrize(("attended", "cap", "kept"), VECTORS)
def test_the_vectors_of_the_workspace_cap_one_prompt_after_the_other(attended, cap, kept):
    """Prompts that may not be cut: in as long as all of one fits."""
    room = gate_of(attended=cap).room(NO_ROWS)
    taken = 0
    for tokens in attended:
        if room.tokens_for(Chunk(0, tokens)) < tokens:
            break
        room.take(Chunk(0, tokens), tokens)
        taken += 1
    assert taken == kept


@given(st.lists(st.integers(1, 100), max_size=12), st.one_of(st.none(), st.integers(0, 400)))
def test_the_cap_trims_to_a_prefix(attended, cap):
    """Invariant 24: a prefix, not empty if there is anything; within the cap or alone; no cap is the identity."""
    kept = gate_of(attended=cap).num_within(rows_of(Chunk(0, tokens) for tokens in attended))
    assert (kept > 0) == bool(attended)
    if cap is None:
        assert kept == len(attended)
    else:
        assert sum(attended[:kept]) <= cap or kept == 1
        assert kept == len(attended) or sum(attended[: kept + 1]) > cap
    assert kept == num_within_cap(attended, cap)  # the reference's arithmetic, restated on its own


# -- the others ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "num_decodes", "chunk", "fits"),
    [
        ({"step": 100}, 0, Chunk(0, 300), 100),
        ({"step": 100}, 30, Chunk(0, 300), 70),
        ({"step": 100}, 100, Chunk(0, 300), 0),
        ({"beside_decodes": 64}, 0, Chunk(0, 300), 300),
        ({"beside_decodes": 64}, 1, Chunk(0, 300), 64),
        ({"beside_decodes": 64, "step": 80}, 40, Chunk(0, 300), 40),
        ({"logits": 4}, 3, Chunk(0, 300), 300),
        ({"logits": 4}, 4, Chunk(0, 300), 299),  # the token that would draw waits for a row of logits
        ({"logits": 4}, 4, Chunk(299, 1), 0),
        ({"encoder": 500}, 1, Chunk(0, 300, encoder_tokens=500), 300),
        ({"encoder": 499}, 1, Chunk(0, 300, encoder_tokens=500), 0),
        ({"encoder": 0}, 1, Chunk(0, 300), 300),
        ({"pages": 2, "attended": 10}, 5, Chunk(0, 300), 300),  # the first chunk is kept whole
    ],
)
def test_what_fits_beside_decodes(limits, num_decodes, chunk, fits):
    assert gate_of(**limits).room(decodes(num_decodes)).tokens_for(chunk) == fits


@pytest.mark.parametrize(
    ("limits", "chunk", "fits"),
    [
        ({"attended": 120}, Chunk(0, 300), 70),
        ({"attended": 120}, Chunk(60, 300), 10),
        ({"attended": 120}, Chunk(70, 300), 0),
        ({"attended": 120}, Chunk(500, 300), 0),
        ({"attended": 0}, Chunk(0, 1), 0),
        ({"pages": 6}, Chunk(0, 300), 2 * BLOCK),  # the first took four
        ({"pages": 4}, Chunk(0, 300), 0),
        ({"pages": 4}, Chunk(5, 300), 11),  # the rest of a block that it has
        ({"pages": 3}, Chunk(BLOCK, 1), 0),
        ({"encoder": 10}, Chunk(0, 30, encoder_tokens=11), 0),
        ({"logits": 1}, Chunk(0, 30), 29),
    ],
)
def test_what_fits_beside_a_prompt(limits, chunk, fits):
    """After a chunk of 50 tokens that draws one."""
    room = gate_of(**limits).room(NO_ROWS)
    room.take(Chunk(0, 50), 50)
    assert room.tokens_for(chunk) == fits


@pytest.mark.parametrize("name", ["step", "attended", "logits", "encoder", "pages"])
def test_zero_is_a_limit_and_still_the_first_row_moves(name):
    gate = gate_of(**{name: 0})
    needy = Chunk(0, 40, encoder_tokens=40)
    room = gate.room(NO_ROWS)
    count = room.tokens_for(needy)
    assert count >= 1
    room.take(needy, needy.rest)
    assert room.tokens_for(needy) <= needy.rest - 1
    assert gate.num_within(rows_of([needy, needy])) == 1


def test_a_step_that_is_tried_again_has_fewer_tokens():
    gate = gate_of(step=100)
    assert gate.room(decodes(20), max_tokens=30).tokens_for(Chunk(0, 50)) == 10
    assert gate.num_within(decodes(90), num_decodes=90, max_tokens=30) == 30
    assert gate.num_within(decodes(90), num_decodes=90) == 90
    assert gate.num_within(decodes(101), num_decodes=101) == 100
    assert gate_of(logits=7).num_within(decodes(9), num_decodes=9) == 7


def test_a_room_is_full_when_no_token_fits():
    room = gate_of(step=50).room(decodes(20))
    assert not room.is_full
    room.take(Chunk(0, 30), 30)
    assert room.is_full
    assert gate_of(step=50).room(decodes(50)).is_full


def test_the_reserves_come_from_the_plan():
    engine, _ = engine_on_fake(max_batch_size=5, max_num_tokens=300, plan={"attended_cap": 0})
    reserves = step_reserves(engine.plan, beside_decodes=64, block_tokens=BLOCK, host_allowance=lambda: 3)
    told = {reserve.name: reserve.limit(Conditions(num_decodes=1)) for reserve in reserves}
    assert told == {
        "step tokens": 300,
        "prefill tokens": 64,
        "attended tokens": 0,
        "logits rows": 5,
        "encoder tokens": 0,
        "host pages": 3,
    }
    assert len({reserve.name for reserve in reserves}) == len(reserves)
    assert all(reserve.unit for reserve in reserves)


# -- properties over every reserve ---------------------------------------------------------------------------------


RESERVES = gate_of(beside_decodes=1, attended=1, pages=1).reserves
CHUNKS = st.builds(Chunk, start=st.integers(0, 100), rest=st.integers(1, 100), encoder_tokens=st.integers(0, 50))


@pytest.mark.parametrize("reserve", RESERVES, ids=lambda reserve: reserve.name)
@given(chunk=CHUNKS, units=st.integers(0, 220))
def test_the_tokens_within_are_the_most_whose_units_fit(reserve, chunk, units):
    costs = [reserve.units(chunk.cut(count)) for count in range(1, chunk.rest + 1)]
    assert costs == sorted(costs)
    assert reserve.tokens_within(units, chunk) == sum(cost <= units for cost in costs)


@pytest.mark.parametrize("reserve", RESERVES, ids=lambda reserve: reserve.name)
@given(chunks=st.lists(CHUNKS, min_size=1, max_size=8))
def test_arrays_cost_what_their_rows_cost(reserve, chunks):
    assert reserve.units(rows_of(chunks)).tolist() == [reserve.units(chunk.cut(chunk.rest)) for chunk in chunks]


LIMITS = st.fixed_dictionaries(
    {"step": st.integers(1, 200), "logits": st.integers(1, 8), "encoder": st.integers(0, 100)},
    optional={"beside_decodes": st.integers(1, 60), "attended": st.integers(0, 300), "pages": st.integers(0, 12)},
)


@given(limits=LIMITS, num_decodes=st.integers(0, 6), chunks=st.lists(CHUNKS, max_size=8))
def test_what_is_taken_within_the_room_keeps_every_limit(limits, num_decodes, chunks):
    """But for the first chunk where that is kept whole; and in an empty step somebody always moves."""
    gate = gate_of(**limits)
    kept = gate.num_within(decodes(num_decodes), num_decodes=num_decodes)
    assert kept == min(num_decodes, limits["step"], limits["logits"])
    room, taken = gate.room(decodes(kept)), []
    for chunk in chunks:
        if count := room.tokens_for(chunk):
            assert count <= chunk.rest
            taken.append(chunk.cut(count))
            room.take(chunk, count)
    assert taken or kept or not chunks
    for reserve in gate.reserves:
        limit = reserve.limit(Conditions(num_decodes=kept))
        costs = [reserve.units(row) for row in taken]
        used = sum(costs) + (0 if reserve.chunks_only else kept)
        alone = len([cost for cost in costs if cost]) <= 1 and not kept
        assert limit is None or used <= limit or alone or (reserve.keeps_first and not any(costs[1:]))


@given(limits=LIMITS, num_decodes=st.integers(0, 4), chunks=st.lists(CHUNKS, max_size=8))
def test_the_rows_within_are_the_longest_prefix(limits, num_decodes, chunks):
    """Against the definition, one prefix after the other."""
    gate = gate_of(**limits)
    rows = [Chunk(9, 1).cut(1)] * num_decodes + [chunk.cut(chunk.rest) for chunk in chunks]
    step = Conditions(num_decodes=num_decodes)

    def fits(reserve, kept):
        costs = [reserve.units(row) for row in rows[:kept]]
        if reserve.chunks_only:
            costs = costs[num_decodes:]
        first = reserve.keeps_first and len(costs) <= 1
        return (limit := reserve.limit(step)) is None or sum(costs) <= limit or first

    kept = 0
    while kept < len(rows) and all(fits(reserve, kept + 1) for reserve in gate.reserves):
        kept += 1
    whole = rows_of([*(Chunk(9, 1) for _ in range(num_decodes)), *chunks])
    assert gate.num_within(whole, num_decodes=num_decodes) == max(kept, min(1, len(rows)))
