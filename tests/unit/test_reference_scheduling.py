"""The reference's scheduling arithmetic: its published vectors as tables, and what must hold for any numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tonnage.resources.reference import (
    Active,
    Candidate,
    Chunk,
    attended_cap,
    attended_tokens,
    charged_tokens,
    equal_progress_chunks,
    estimated_charge,
    fcfs_chunks,
    first_step_blocks,
    fit_token_budget,
    generation_step_blocks,
    max_utilization_pass,
    no_evict_pass,
    num_within_cap,
    remaining_blocks,
    reusable_token_estimate,
    shifted_chunk,
    shrink_chunk,
    whole_life_blocks,
    worst_attended_tokens,
)

# -- blocks ------------------------------------------------------------------------------------------------------------

# prompt, new, allocated, reusable, beams -> remaining (native), whole life (Python); 32 tokens a block
BLOCK_VECTORS = [
    (100, 60, 0, 0, 1, 5, 5),
    (100, 60, 0, 2, 1, 3, 5),
    (100, 60, 4, 0, 1, 1, 5),
    (100, 60, 5, 0, 1, 0, 5),
    (128, 32, 0, 4, 1, 1, 5),
    (31, 1, 0, 0, 1, 1, 1),
    (100, 60, 0, 0, 4, 11, 11),
]


@pytest.mark.parametrize(("prompt", "new", "allocated", "reusable", "beams", "remaining", "whole"), BLOCK_VECTORS)
def test_block_vectors(prompt, new, allocated, reusable, beams, remaining, whole):
    shape = {"prompt_tokens": prompt, "new_tokens": new, "block_tokens": 32, "num_beams": beams}
    assert remaining_blocks(**shape, allocated_blocks=allocated, reusable_blocks=reusable) == remaining
    assert whole_life_blocks(**shape) == whole


# cached tokens -> blocks of one step: plain, with look-ahead, with 3 draft tokens; prompt 100, 60 new, 32 a block
STEP_VECTORS = [(126, 0, 0, 1), (127, 0, 1, 1), (128, 1, 1, 1), (160, 0, 0, 0)]


@pytest.mark.parametrize(("cached", "plain", "look_ahead", "drafts"), STEP_VECTORS)
def test_one_step_vectors(cached, plain, look_ahead, drafts):
    shape = {"cached_tokens": cached, "generated_tokens": cached - 100, "new_tokens": 60, "block_tokens": 32}
    assert generation_step_blocks(**shape) == plain
    assert generation_step_blocks(**shape, look_ahead=True) == look_ahead
    assert generation_step_blocks(**shape, draft_tokens=3) == drafts


def test_a_step_past_the_window_takes_nothing_and_beams_take_one_each():
    shape = {"cached_tokens": 128, "generated_tokens": 28, "new_tokens": 60, "block_tokens": 32}
    assert generation_step_blocks(**shape, window_tokens=129) == 1
    assert generation_step_blocks(**shape, window_tokens=128) == 0
    assert generation_step_blocks(**shape, num_beams=4) == 4


# prompt, drafts, reusable, window, beams -> blocks of the first chunk; 60 new, 32 a block
FIRST_VECTORS = [
    (100, 0, 0, None, 1, 4),
    (100, 29, 0, None, 1, 5),
    (100, 0, 2, None, 1, 2),
    (100, 0, 9, None, 1, 1),  # only whole prompt blocks are reusable
    (100, 0, 0, None, 4, 7),
    (96, 0, 0, None, 4, 3),
    (1000, 0, 0, 64, 1, 4),  # min(1000, 64 + 60)
]


@pytest.mark.parametrize(("prompt", "drafts", "reusable", "window", "beams", "blocks"), FIRST_VECTORS)
def test_the_first_chunk_takes_the_whole_prompt(prompt, drafts, reusable, window, beams, blocks):
    found = first_step_blocks(
        prompt_tokens=prompt,
        new_tokens=60,
        block_tokens=32,
        draft_tokens=drafts,
        reusable_blocks=reusable,
        window_tokens=window,
        num_beams=beams,
    )
    assert found == blocks


# cached tokens, allocated -> remaining with a window of 64 of 32 tokens a block, prompt 100 and 60 new: two blocks
# hold the window, and one more is needed as long as the cache still has to turn over.
WINDOW_VECTORS = [(0, 0, 3), (100, 2, 1), (100, 3, 0), (128, 2, 1), (129, 2, 0), (160, 2, 0)]


@pytest.mark.parametrize(("cached", "allocated", "remaining"), WINDOW_VECTORS)
def test_a_window_needs_one_block_more_until_it_has_turned_over(cached, allocated, remaining):
    found = remaining_blocks(
        prompt_tokens=100,
        new_tokens=60,
        block_tokens=32,
        cached_tokens=cached,
        allocated_blocks=allocated,
        window_tokens=64,
    )
    assert found == remaining


def test_a_window_that_ends_in_the_last_block_never_turns_over():
    shape = {"prompt_tokens": 100, "new_tokens": 60, "block_tokens": 32}
    assert remaining_blocks(**shape, window_tokens=129) == remaining_blocks(**shape, window_tokens=160) == 5
    assert remaining_blocks(**shape, window_tokens=128) == 5  # four, and one for the turn


@pytest.mark.parametrize("fields", [{"allocated_blocks": 1}, {"window_tokens": 1000}])
def test_reuse_counts_before_the_first_block_and_without_windows_only(fields):
    shape = {"prompt_tokens": 100, "new_tokens": 60, "block_tokens": 32} | fields
    assert remaining_blocks(**shape, reusable_blocks=2) == remaining_blocks(**shape)


def test_the_request_budget_counts_drafts_and_extras():
    shape = {"prompt_tokens": 100, "new_tokens": 60, "block_tokens": 32}
    assert [whole_life_blocks(**shape, extra_tokens=extra) for extra in (0, 1, 32, 33)] == [5, 6, 6, 7]


def test_the_token_estimate_is_in_whole_prompt_blocks():
    estimates = [
        reusable_token_estimate(prompt_tokens=100, block_tokens=32, reusable_blocks=blocks) for blocks in (0, 2, 9)
    ]
    assert estimates == [0, 64, 96]


SIZES = {"prompt": st.integers(1, 200), "new": st.integers(1, 200), "block": st.integers(1, 40)}


@given(**SIZES, reusable=st.integers(0, 60), beams=st.integers(1, 4))
def test_a_discount_never_raises_the_need(prompt, new, block, reusable, beams):
    """Invariant 20."""
    shape = {"prompt_tokens": prompt, "new_tokens": new, "block_tokens": block, "num_beams": beams}
    full = remaining_blocks(**shape)
    assert remaining_blocks(**shape, reusable_blocks=reusable) <= full
    assert remaining_blocks(**shape, reusable_blocks=0) == full


@given(**SIZES, reusable=st.integers(0, 60), beams=st.integers(1, 4), windows=st.one_of(st.none(), st.integers(1, 250)))
def test_the_need_only_falls_and_ends_at_nothing(prompt, new, block, reusable, beams, windows):
    """Invariant 19: the whole prompt's blocks are taken at its first chunk, then one by one as tokens are cached."""
    shape = {"prompt_tokens": prompt, "new_tokens": new, "block_tokens": block, "num_beams": beams}
    shape["window_tokens"] = windows
    end = prompt + new
    most = -(-min(end, windows or end) // block)
    needs = [remaining_blocks(**shape, reusable_blocks=reusable)]
    for cached in range(prompt, end + 1):
        held = min(-(-cached // block), most)
        needs.append(remaining_blocks(**shape, allocated_blocks=held, cached_tokens=cached))
    assert needs == sorted(needs, reverse=True)
    assert needs[-1] == 0


@given(**SIZES, reusable=st.integers(0, 9))
def test_first_step_and_the_steps_after_it_take_no_more_than_remained(prompt, new, block, reusable):
    shape = {"prompt_tokens": prompt, "new_tokens": new, "block_tokens": block}
    taken = first_step_blocks(**shape, reusable_blocks=reusable)
    for generated in range(new):
        taken += generation_step_blocks(
            cached_tokens=prompt + generated, generated_tokens=generated, new_tokens=new, block_tokens=block
        )
    assert taken == remaining_blocks(**shape, reusable_blocks=reusable)


# -- capacity ----------------------------------------------------------------------------------------------------------


def candidate(name: str, *needs: int, **fields) -> Candidate:
    return Candidate(id=name, needs=needs, **fields)


NO_EVICT_VECTORS = [
    # running, waiting, free, max requests, pages -> admitted
    pytest.param([], [candidate("a", 3), candidate("b", 3)], [5], 9, 0, ["a"], id="the head of the line stops"),
    pytest.param([], [candidate("a", 6), candidate("b", 1)], [5], 9, 0, [], id="no bypass"),
    pytest.param([candidate("r", 3)], [candidate("a", 3)], [5], 9, 0, [], id="running is reserved first"),
    pytest.param([candidate("r", 3)], [candidate("a", 2)], [5], 9, 0, ["a"], id="the rest is given out"),
    pytest.param([], [candidate("a", 1), candidate("b", 1)], [5], 1, 0, ["a"], id="cap on requests"),
    pytest.param([candidate("r", 9)], [candidate("a", 1)], [9], 1, 0, [], id="running fills the cap"),
    pytest.param([], [candidate("a", 1, 7)], [5, 5], 9, 0, [], id="every pool must have room"),
    pytest.param(
        [],
        [candidate("a", 1, adapter="x", adapter_pages=9), candidate("b", 1)],
        [5],
        9,
        4,
        ["b"],
        id="one whose adapter does not fit is passed over",
    ),
    pytest.param(
        [candidate("r", 1, adapter="x", adapter_pages=4)],
        [candidate("a", 1, adapter="x", adapter_pages=4), candidate("b", 1, adapter="y", adapter_pages=1)],
        [9],
        9,
        4,
        ["a"],
        id="an adapter that runs costs no more pages",
    ),
    pytest.param(
        [],
        [candidate("a", 1, adapter="x", adapter_pages=4), candidate("b", 1, adapter="x", adapter_pages=4)],
        [9],
        9,
        4,
        ["a", "b"],
        id="nor does one that was just admitted",
    ),
    pytest.param(
        [],
        [candidate("a", 1, produces="k"), candidate("b", 1, produces="k"), candidate("c", 1, produces="l")],
        [9],
        9,
        0,
        ["a", "c"],
        id="waiting turns computing again into reuse",
    ),
    pytest.param(
        [candidate("r", 1, produces="k")], [candidate("a", 1, produces="k")], [9], 9, 0, [], id="the same, of running"
    ),
]


@pytest.mark.parametrize(("running", "waiting", "free", "most", "pages", "admitted"), NO_EVICT_VECTORS)
def test_no_evict_vectors(running, waiting, free, most, pages, admitted):
    found = no_evict_pass(running, waiting, free_blocks=free, max_requests=most, adapter_pages=pages)
    assert found == admitted


def test_a_static_batch_waits_for_the_one_before():
    running, waiting = [candidate("r", 1)], [candidate("a", 1)]
    assert no_evict_pass(running, waiting, free_blocks=[9], max_requests=9, is_static=True) == []
    assert no_evict_pass([], waiting, free_blocks=[9], max_requests=9, is_static=True) == ["a"]


CANDIDATES = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.sampled_from([None, "x", "y"]), st.sampled_from([None, 1, 2])),
    max_size=6,
)
PAGES = {None: 0, "x": 2, "y": 3}


@given(CANDIDATES, CANDIDATES, st.integers(0, 12), st.integers(0, 7), st.integers(0, 6))
def test_what_runs_and_what_joins_fit_together(run, wait, extra, most, pages):
    """Invariants 16 (for the pass) and 27: whatever stops the pass, running and admitted find their blocks."""

    def made(prefix, rows):
        return [
            Candidate(id=f"{prefix}{i}", needs=(a, b), adapter=x, adapter_pages=PAGES[x], produces=key)
            for i, (a, b, x, key) in enumerate(rows)
        ]

    running, waiting = made("r", run), made("w", wait)
    free = [sum(r.needs[pool] for r in running) + extra for pool in (0, 1)]
    pages += sum(PAGES[x] for x in {r.adapter for r in running})
    names = no_evict_pass(running, waiting, free_blocks=free, max_requests=most, adapter_pages=pages)
    together = running + [request for request in waiting if request.id in names]
    assert names == [request.id for request in waiting if request.id in names]
    for pool in (0, 1):
        assert sum(request.needs[pool] for request in together) <= free[pool]
    assert sum(PAGES[x] for x in {request.adapter for request in together}) <= pages
    assert len(together) <= max(most, len(running))


@given(**SIZES, capacity=st.integers(1, 50), extra=st.integers(0, 8))
def test_a_request_beyond_the_budget_never_runs_and_any_other_does_alone(prompt, new, block, capacity, extra):
    """Invariant 28: what the budget refuses on arrival would wait for ever; what it lets in runs in an empty pool."""
    shape = {"prompt_tokens": prompt, "new_tokens": new, "block_tokens": block}
    fits = whole_life_blocks(**shape) <= capacity
    alone = [Candidate(id="a", needs=(remaining_blocks(**shape),))]
    assert no_evict_pass([], alone, free_blocks=[capacity], max_requests=1) == (["a"] if fits else [])
    assert whole_life_blocks(**shape, extra_tokens=extra) >= whole_life_blocks(**shape)


MAX_UTILIZATION_VECTORS = [
    # active, free -> scheduled, paused
    pytest.param([Active(id="a", step_blocks=1)], 1, ["a"], [], id="fits"),
    pytest.param(
        [Active(id="a", step_blocks=1, started=True), Active(id="b", step_blocks=0, started=True, blocks=(1, 2))],
        0,
        ["a"],
        ["b"],
        id="the tail pays",
    ),
    pytest.param(
        [Active(id="a", step_blocks=1), Active(id="b", step_blocks=1, started=True)], 1, ["a"], ["b"], id="or itself"
    ),
    pytest.param(
        [Active(id="a", step_blocks=2), Active(id="b", step_blocks=1), Active(id="c", step_blocks=1)],
        3,
        ["a", "b"],
        [],
        id="who has not started cannot be paused",
    ),
    pytest.param(
        [
            Active(id="a", step_blocks=1, blocks=(7,), started=True),
            Active(id="b", step_blocks=1, blocks=(7, 8), started=True),
            Active(id="c", step_blocks=1, blocks=(7,), started=True),
        ],
        0,
        ["a"],
        ["c", "b"],
        id="a shared block is not free until its last holder goes",
    ),
    pytest.param(
        [
            Active(id="a", step_blocks=1, started=True),
            Active(id="b", step_blocks=0, started=True, blocks=(1,)),
            Active(id="c", step_blocks=0),
        ],
        0,
        ["a"],
        ["b"],
        id="the end moves to the paused one",
    ),
]


@pytest.mark.parametrize(("active", "free", "scheduled", "paused"), MAX_UTILIZATION_VECTORS)
def test_max_utilization_vectors(active, free, scheduled, paused):
    assert max_utilization_pass(active, free_blocks=free, max_requests=9) == (scheduled, paused)


ACTIVE = st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(0, 9), max_size=4), st.booleans()), max_size=8)


@given(ACTIVE, st.integers(0, 8), st.integers(1, 9))
def test_a_max_utilization_pass_fits_and_pauses_each_once(rows, free, most):
    """Invariants 17 and 18. The blocks freed are counted here from scratch: those that no survivor holds."""
    active = [
        Active(id=str(i), step_blocks=need, blocks=tuple(sorted(blocks)) if started else (), started=started)
        for i, (need, blocks, started) in enumerate(rows)
    ]
    scheduled, paused = max_utilization_pass(active, free_blocks=free, max_requests=most)
    assert len(set(paused)) == len(paused)
    assert not set(scheduled) & set(paused)
    assert scheduled == [request.id for request in active][: len(scheduled)]
    assert len(scheduled) <= most
    held = {block for request in active for block in request.blocks}
    kept = {block for request in active if request.id not in paused for block in request.blocks}
    assert sum(request.step_blocks for request in active if request.id in scheduled) <= free + len(held - kept)


@given(ACTIVE, st.integers(0, 8))
def test_pausing_again_what_is_paused_changes_nothing(rows, free):
    """A paused request holds nothing and has not started; the next pass does not find it again."""
    active = [
        Active(id=str(i), step_blocks=need, blocks=tuple(sorted(blocks)) if started else (), started=started)
        for i, (need, blocks, started) in enumerate(rows)
    ]
    _, paused = max_utilization_pass(active, free_blocks=free, max_requests=9)
    after = [
        Active(id=request.id, step_blocks=request.step_blocks) if request.id in paused else request
        for request in active
    ]
    held = {block for request in active for block in request.blocks}
    kept = {block for request in after for block in request.blocks}
    _, again = max_utilization_pass(after, free_blocks=free + len(held - kept), max_requests=9)
    assert not set(paused) & set(again)


# -- tokens ------------------------------------------------------------------------------------------------------------

# chunk, reusable, remaining -> charge, charge in the estimator
CHARGE_VECTORS = [(100, 0, 100, 100, 100), (100, 60, 100, 40, 40), (25, 30, 100, 25, 25), (70, 30, 100, 70, 70)]
CHARGE_VECTORS += [(10, 15, 10, 0, 1)]


@pytest.mark.parametrize(("chunk", "reusable", "remaining", "charge", "estimated"), CHARGE_VECTORS)
def test_charge_vectors(chunk, reusable, remaining, charge, estimated):
    shape = {"chunk": chunk, "reusable": reusable, "remaining": remaining}
    assert charged_tokens(**shape) == charge
    assert estimated_charge(**shape) == estimated


def test_the_estimator_gives_no_credit_for_what_is_already_passed():
    assert estimated_charge(chunk=40, reusable=60, remaining=40, position=60) == 40
    assert estimated_charge(chunk=60, reusable=60, remaining=60, position=20) == 20


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 400), st.data())
def test_reuse_above_the_estimate_needs_no_repair(block, units, prompt, data):
    """Invariant 23: chunks are whole blocks or end the prompt; what is then computed is at most what was charged."""
    chunk = min(block * units, prompt)
    estimate = data.draw(st.integers(0, prompt - 1))
    reused = data.draw(st.integers(estimate, prompt - 1))
    charge = charged_tokens(chunk=chunk, reusable=estimate, remaining=prompt)
    computed = shifted_chunk(chunk=chunk, reused=reused, prompt_tokens=prompt, block_tokens=block)
    assert 0 < computed <= charge


# remaining, budget, most in one chunk -> chunks, 32 tokens a unit
FCFS_VECTORS = [
    ([100, 100], 200, None, [100, 100]),
    ([100, 100], 150, None, [100, 32]),
    ([100, 100, 40], 150, None, [100, 32, 0]),
    ([100, 100, 10], 150, None, [100, 32, 10]),
    ([100], 99, None, [96]),
    ([100], 31, None, [0]),
    ([20], 31, None, [20]),
    ([100, 100], 400, 70, [64, 64]),
]


@pytest.mark.parametrize(("remaining", "budget", "longest", "chunks"), FCFS_VECTORS)
def test_first_come_first_served_chunks(remaining, budget, longest, chunks):
    assert fcfs_chunks(remaining, max_tokens=budget, unit_tokens=32, max_chunk_tokens=longest) == chunks


EQUAL_VECTORS = [
    ([100, 100], 200, None, [100, 100]),
    ([100, 100], 150, None, [64, 64]),
    ([100, 100, 40], 150, None, [64, 32, 40]),
    ([100, 10], 80, None, [64, 10]),
    ([100, 100], 400, 70, [64, 64]),
    ([100], 31, None, [0]),
]


@pytest.mark.parametrize(("remaining", "budget", "longest", "chunks"), EQUAL_VECTORS)
def test_equal_progress_chunks(remaining, budget, longest, chunks):
    assert equal_progress_chunks(remaining, max_tokens=budget, unit_tokens=32, max_chunk_tokens=longest) == chunks


@pytest.mark.parametrize("chunked", [fcfs_chunks, equal_progress_chunks])
@given(
    remaining=st.lists(st.integers(1, 300), max_size=6),
    budget=st.integers(0, 600),
    unit=st.integers(1, 64),
    longest=st.one_of(st.none(), st.integers(1, 200)),
)
def test_chunks_fit_and_end_on_units(chunked, remaining, budget, unit, longest):
    """Invariant 21 before any repair: no step is given more tokens than it may have."""
    chunks = chunked(remaining, max_tokens=budget, unit_tokens=unit, max_chunk_tokens=longest)
    assert sum(chunks) <= budget
    for chunk, rest in zip(chunks, remaining, strict=True):
        assert 0 <= chunk <= min(rest, longest or rest)
        assert chunk == rest or chunk % unit == 0
    short = [rest - chunk for chunk, rest in zip(chunks, remaining, strict=True) if chunk < min(rest, longest or rest)]
    if longest is None and short:
        assert budget - sum(chunks) < max(unit, min(short))


@given(st.lists(st.integers(1, 300), max_size=6), st.integers(0, 600), st.integers(1, 64))
def test_equal_progress_means_one_unit_apart(remaining, budget, unit):
    chunks = equal_progress_chunks(remaining, max_tokens=budget, unit_tokens=unit)
    unfinished = [chunk for chunk, rest in zip(chunks, remaining, strict=True) if chunk < rest]
    assert not unfinished or max(unfinished) - min(unfinished) <= unit


# -- attended tokens ---------------------------------------------------------------------------------------------------

CAP_VECTORS = [
    ([50, 50, 50], 120, 2),
    ([50, 50, 50], 200, 3),
    ([200, 50], 120, 1),
    ([500], 1, 1),
    ([1, 1, 1], 0, 1),
    ([60, 60], 120, 2),
    ([9, 9, 9, 9], None, 4),
    ([], 0, 0),
    ([50, 200, 50], 120, 1),  # stops at the first that does not fit
]


@pytest.mark.parametrize(("attended", "cap", "kept"), CAP_VECTORS)
def test_cap_vectors(attended, cap, kept):
    assert num_within_cap(attended, cap) == kept


@given(st.lists(st.integers(1, 100), max_size=8), st.one_of(st.none(), st.integers(0, 400)))
def test_the_cap_keeps_the_longest_prefix(attended, cap):
    """Invariant 24."""
    kept = num_within_cap(attended, cap)
    if cap is None:
        assert kept == len(attended)
        return
    fitting = [length for length in range(len(attended) + 1) if sum(attended[:length]) <= cap]
    assert kept == max(fitting[-1], min(1, len(attended)))


# budget, KV and attended bytes a token, worst case in tokens -> reserve, cap
RESERVE_VECTORS = [
    (1000, 1000, 100, 10**6, Fraction(1000, 11), 0),
    (1100, 1000, 100, 10**6, Fraction(100), 1),
    (10**9, 1000, 100, 4096, Fraction(409_600), 4096),
    (0, 1000, 100, 4096, Fraction(0), None),
    (1000, 1000, 0, 4096, Fraction(0), None),
    (1000, -1, 100, 4096, Fraction(0), None),
]


@pytest.mark.parametrize(("budget", "kv", "attended", "worst", "reserve", "cap"), RESERVE_VECTORS)
def test_reserve_vectors(budget, kv, attended, worst, reserve, cap):
    found = attended_cap(
        budget_bytes=budget, kv_token_bytes=kv, attended_token_bytes=attended, max_attended_tokens=worst
    )
    assert found == (reserve, cap)


@given(st.integers(1, 10**12), st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**7))
def test_the_cap_is_paid_for(budget, kv, attended, worst):
    """Invariant 25, exactly: no tolerance is needed with fractions."""
    reserve, cap = attended_cap(
        budget_bytes=budget, kv_token_bytes=kv, attended_token_bytes=attended, max_attended_tokens=worst
    )
    assert cap is not None
    assert 0 <= cap <= worst
    assert cap * attended <= reserve < (cap + 1) * attended
    assert reserve + kv * cap <= budget


@pytest.mark.parametrize(("asked", "tokens"), [(None, 64 * 4096), (1, 4096), (10**9, 64 * 4096), (8192, 8192)])
def test_the_asked_cap_stays_between_one_sequence_and_the_worst_step(asked, tokens):
    found = worst_attended_tokens(max_batch_size=64, max_num_tokens=8192, max_seq_len=4096, asked_tokens=asked)
    assert found == tokens


@pytest.mark.parametrize(
    ("position", "chunk", "estimate", "attended"), [(0, 64, 0, 64), (0, 64, 32, 96), (64, 64, 32, 100), (32, 10, 0, 42)]
)
def test_a_chunk_attends_to_what_is_before_it(position, chunk, estimate, attended):
    assert attended_tokens(position=position, chunk=chunk, prompt_tokens=100, estimate=estimate) == attended


# -- repair ------------------------------------------------------------------------------------------------------------

# position, chunk, excess -> new chunk, shed; the chunk is all that remains, 32 tokens a block
SHRINK_VECTORS = [(0, 1000, 10, 960, 40), (320, 680, 700, 32, 648), (0, 32, 5, 32, 0), (0, 33, 1, 32, 1)]


@pytest.mark.parametrize(("position", "chunk", "excess", "shrunk", "shed"), SHRINK_VECTORS)
def test_shrink_vectors(position, chunk, excess, shrunk, shed):
    assert shrink_chunk(position=position, count=chunk, excess=excess, block_tokens=32) == shrunk
    before = Chunk(position=position, count=chunk, remaining=chunk)
    (after,) = fit_token_budget([before], max_num_tokens=chunk - excess, block_tokens=32)
    assert (after.count, before.num_tokens - after.num_tokens) == (shrunk, shed)
    assert after.is_last == (shed == 0)


def test_the_last_chunks_shrink_first_and_lose_their_drafts():
    first = Chunk(position=0, count=64, remaining=500)
    last = Chunk(position=0, count=100, remaining=100, draft_tokens=3)
    fitted = fit_token_budget([last, first], max_num_tokens=166, block_tokens=32, decode_tokens=1)
    assert [chunk.count for chunk in fitted] == [96, 64]
    assert (fitted[0].num_tokens, fitted[0].is_last) == (96, False)


def test_what_must_not_be_cut_is_not():
    fixed = Chunk(position=0, count=100, remaining=100, is_fixed=True)
    free = Chunk(position=0, count=100, remaining=200)
    fitted = fit_token_budget([free, fixed], max_num_tokens=120, block_tokens=32)
    assert [chunk.count for chunk in fitted] == [32, 100]


CHUNKS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 200), st.integers(0, 200), st.integers(0, 4), st.booleans()),
    max_size=6,
)


@given(CHUNKS, st.integers(0, 50), st.integers(0, 900), st.integers(1, 48))
def test_repair_keeps_the_batch_and_does_what_it_can(rows, decodes, most, block):
    """Invariants 21 and 22."""
    chunks = [
        Chunk(position=p, count=c, remaining=c + rest, draft_tokens=drafts, is_fixed=fixed)
        for p, c, rest, drafts, fixed in rows
    ]
    fitted = fit_token_budget(chunks, max_num_tokens=most, block_tokens=block, decode_tokens=decodes)
    assert len(fitted) == len(chunks)
    for before, after in zip(chunks, fitted, strict=True):
        assert (after.position, after.remaining) == (before.position, before.remaining)
        assert 1 <= after.count <= before.count
        assert after == before or (after.position + after.count) % block == 0
    total = decodes + sum(chunk.num_tokens for chunk in fitted)
    if total > most:
        assert all(chunk.is_fixed or chunk.count <= block - chunk.position % block for chunk in fitted)
    assert fit_token_budget(fitted, max_num_tokens=most, block_tokens=block, decode_tokens=decodes) == fitted


@given(CHUNKS, st.integers(1, 48))
def test_a_step_that_fits_is_left_alone(rows, block):
    chunks = [Chunk(position=p, count=c, remaining=c + rest, draft_tokens=drafts) for p, c, rest, drafts, _ in rows]
    total = sum(chunk.num_tokens for chunk in chunks)
    assert fit_token_budget(chunks, max_num_tokens=total, block_tokens=block) == chunks
    assume(total)
    assert fit_token_budget(chunks, max_num_tokens=0, block_tokens=10**6) == chunks
