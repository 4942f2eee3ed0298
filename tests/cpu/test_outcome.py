"""Log-probabilities kept as numbers: what goes in comes out, at a fraction of the memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.engine.outcome import Logprobs, TokenLogprobs

FLOAT32 = st.floats(min_value=-200, max_value=0, width=32)


@given(st.integers(0, 5).flatmap(lambda k: st.lists(
    st.builds(
        TokenLogprobs,
        st.integers(0, 2**31 - 1),
        FLOAT32,
        st.lists(st.tuples(st.integers(0, 2**31 - 1), FLOAT32), min_size=k, max_size=k).map(tuple),
    ),
    max_size=8,
)))  # fmt: skip
def test_entries_come_back_as_they_were(entries):
    kept = Logprobs(entries[:3])
    kept.extend(entries[3:])
    assert kept == entries
    assert list(kept) == entries
    assert kept[1:] == entries[1:]
    assert kept.tops == [entry.top for entry in entries]
    assert kept.tops[::2] == [entry.top for entry in entries[::2]]
    if entries:
        assert kept[-1] == entries[-1]
    with pytest.raises(IndexError):
        kept[len(entries)]


def test_they_take_the_bytes_of_their_numbers():
    rng = np.random.default_rng(1)
    tops = rng.integers(0, 50_000, (20_000, 20)).tolist()
    tracemalloc.start()
    kept = Logprobs()
    for top in tops:
        kept.append(TokenLogprobs(top[0], -1.5, tuple((token, -0.1 * token) for token in top)))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept.num_bytes == 20_000 * (8 + 20 * 8)
    assert held < 1.25 * kept.num_bytes  # arrays grow ahead of what they hold; as tuples it would be 14 times as much
