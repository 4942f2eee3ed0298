"""Parameters by slot: each row gets what its request asked for, and features nobody asked for leave no trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.engine.sampling import SamplingTable
from tonnage.engine.sampling.random import uniform
from tonnage.engine.sampling.rows import SamplingRows
from tonnage.sampling import SamplingParams

PENALISED = {"repetition_penalty": 1.3, "presence_penalty": -0.5, "frequency_penalty": 0.25}


def table(*params: dict, stop_ids=(2,), num_prompt_tokens: int = 10) -> SamplingTable:
    made = SamplingTable(len(params) + 1)
    for slot, one in enumerate(params):
        made.set(slot, SamplingParams(**one), seed=100 + slot, stop_ids=stop_ids, num_prompt_tokens=num_prompt_tokens)
    return made


def gathered(made: SamplingTable, slots, positions) -> SamplingRows:
    return made.rows(np.array(slots, np.int64), np.array(positions, np.int64))


def is_plain(rows: SamplingRows) -> bool:
    return rows.draws is rows.penalties is rows.edits is rows.tops is None


def test_greedy_rows_ask_for_nothing_whatever_their_filters():
    made = table({}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 4})
    rows = gathered(made, [1, 0, 1], [11, 11, 12])
    assert rows.num_rows == 3
    assert is_plain(rows)
    assert gathered(made, [], []).num_rows == 0


def test_each_row_gets_its_own():
    made = table(
        {"temperature": 0.7, "top_k": 5},
        {},
        {"temperature": 1.5, "top_p": 0.9, **PENALISED, "logprobs": 3},
        {"min_p": 0.25, "temperature": 0.5},
    )
    rows = gathered(made, [2, 1, 0], [40, 41, 42])
    assert rows.draws.rows.tolist() == [0, 2]
    assert rows.draws.temperature.tolist() == [1.5, 0.7]
    assert rows.draws.top_k.tolist() == [0, 5]
    assert rows.draws.top_p.tolist() == [0.9, 1]
    assert rows.draws.min_p is None
    expected = uniform(np.array([[102], [100]], np.uint64), np.array([[40], [42]]) * 8 + np.arange(8))
    np.testing.assert_array_equal(rows.draws.uniform, expected)
    penalties = rows.penalties
    assert (penalties.rows.tolist(), penalties.slots.tolist()) == ([0], [2])
    assert [penalties.repetition[0], penalties.presence[0], penalties.frequency[0]] == [1.3, -0.5, 0.25]
    assert (rows.tops.rows.tolist(), rows.tops.counts.tolist()) == ([0], [3])
    assert gathered(made, [3], [0]).draws.min_p.tolist() == [0.25]


@pytest.mark.parametrize("one", [{"repetition_penalty": 0.9}, {"presence_penalty": 0.1}, {"frequency_penalty": -1.0}])
def test_one_penalty_is_enough(one):
    assert gathered(table(one), [0], [10]).penalties.rows.tolist() == [0]


def edits(rows: SamplingRows) -> dict[int, dict[int, float]]:
    found: dict[int, dict[int, float]] = {}
    if rows.edits is not None:
        assert (np.diff(rows.edits.rows) >= 0).all()
        for row, token, value in zip(rows.edits.rows, rows.edits.tokens, rows.edits.values, strict=True):
            found.setdefault(int(row), {})[int(token)] = float(value)
    return found


def test_stops_are_masked_until_enough_tokens_were_generated():
    """10 prompt tokens: the token at position 12 is the third generated one."""
    made = table({"min_tokens": 3, "logit_bias": {7: 1.5, 8: -2.0}}, {"min_tokens": 3}, stop_ids=(2, 30))
    masked = {2: -np.inf, 30: -np.inf}
    assert edits(gathered(made, [1, 0], [12, 12])) == {0: masked, 1: {7: 1.5, 8: -2.0, **masked}}
    assert edits(gathered(made, [1, 0], [13, 13])) == {1: {7: 1.5, 8: -2.0}}
    assert edits(gathered(made, [1, 1], [10, 13])) == {0: masked}
    assert is_plain(gathered(made, [1], [13]))


def test_a_request_that_cannot_stop_has_nothing_to_mask():
    assert is_plain(gathered(table({"min_tokens": 3}, stop_ids=()), [0], [10]))


def test_a_slot_set_again_has_nothing_of_its_last_owner():
    everything = {**PENALISED, "temperature": 1.0, "logit_bias": {1: 1.0}, "min_tokens": 50, "logprobs": 2}
    made = table(everything, everything)
    made.clear(0)
    made.clear(0)
    made.set(1, SamplingParams(), seed=1, stop_ids=(2,), num_prompt_tokens=1)
    assert is_plain(gathered(made, [0, 1, 2], [10, 10, 10]))


def test_numbers_beyond_any_vocabulary_are_taken():
    made = table({"temperature": 1.0, "top_k": 2**63 - 1, "min_tokens": 2**63 - 1})
    rows = gathered(made, [0], [10**6])
    assert rows.draws.top_k[0] > 2**40
    assert edits(rows) == {0: {2: -np.inf}}


def test_seeds_count_modulo_2_to_the_64():
    made = SamplingTable(2)
    for slot, seed in enumerate((-5, 2**64 - 5)):
        made.set(slot, SamplingParams(temperature=1.0), seed=seed, stop_ids=(), num_prompt_tokens=1)
    drawn = gathered(made, [0, 1], [3, 3]).draws.uniform
    np.testing.assert_array_equal(drawn[0], drawn[1])


KINDS = [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 3}, PENALISED, {"logit_bias": {1: 1.0, 4: 2.0}},
         {"logprobs": 4}, {"min_tokens": 2}]  # fmt: skip


@given(st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=12), st.data())
def test_a_part_of_the_rows_is_what_they_are_alone(slots, data):
    made = table(*KINDS)
    positions = np.arange(len(slots)) % 4 + 10
    start = data.draw(st.integers(0, len(slots)))
    stop = data.draw(st.integers(start, len(slots)))
    part = gathered(made, slots, positions).between(start, stop)
    assert told(part) == told(gathered(made, slots[start:stop], positions[start:stop]))


def told(rows: SamplingRows) -> object:
    """All that the rows ask for, as plain values; filters that keep everything count as none."""
    parts = []
    for name in ("draws", "penalties", "edits", "tops"):
        part = getattr(rows, name)
        if part is not None:
            keep_all = {"top_k": 0, "top_p": 1, "min_p": 0}
            fields = {key: getattr(part, key) for key in part.__slots__}
            parts.append(
                {k: v.tolist() for k, v in fields.items() if v is not None and (v != keep_all.get(k, np.nan)).any()}
            )
        else:
            parts.append(None)
    return rows.num_rows, parts
