"""Lists of graph sizes: the reference's generators, its two cuts, and the size that a batch is padded to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.planner.buckets import GENERATORS, MOST_SIZES, default_sizes, every, filter_sizes, resolve_sizes, round_up

BIG = 10**6
HEAD = (1, 2, 4, *range(8, 129, 8))
SIZES = st.sets(st.integers(1, 300), max_size=20).map(sorted)


@pytest.mark.parametrize(
    ("name", "num", "tail"),
    [
        ("x2", 23, (256, 512, 1024, 2048)),
        ("+64", 49, tuple(range(192, 2049, 64))),
        ("+8", 259, tuple(range(136, 2049, 8))),
    ],
)
def test_the_generators_at_2048(name, num, tail):
    made = GENERATORS[name](2048)
    assert made == HEAD + tail
    assert len(made) == num


def test_the_common_list():
    assert default_sizes(256) == (1, 2, 4, *range(8, 257, 8))
    assert len(default_sizes(256)) == 35
    assert default_sizes(3) == (1, 2, 3)
    assert default_sizes(300)[-3:] == (272, 288, 300)


@pytest.mark.parametrize(
    ("name", "most", "made"),
    [
        ("x2", 1, (1,)),
        ("x2", 3, (1, 2, 3)),
        ("+64", 20, (1, 2, 4, 8, 16, 20)),
        ("x2", 300, (*HEAD, 256, 300)),
        ("+64", 256, (*HEAD, 192, 256)),
        ("+64", 200, (*HEAD, 192, 200)),
        ("+8", 140, (*HEAD, 136, 140)),
    ],
)
def test_the_largest_batch_has_a_graph_itself(name, most, made):
    assert GENERATORS[name](most) == made


@pytest.mark.parametrize(
    ("sizes", "most", "tokens", "each", "is_padded", "kept"),
    [
        ([1, 2, 4, 8], 8, 3000, 1500, False, [1, 2]),
        ([1, 2, 4, 8], 8, 1499, 1500, True, []),
        ([1, 2, 4, 8], 6, BIG, 1, True, [1, 2, 4, 6]),
        ([1, 2, 4, 8], 4, BIG, 1, True, [1, 2, 4]),
        ([1, 2, 4], 16, BIG, 1, True, [1, 2, 4]),
        ([8, 4, 2], 4, BIG, 1, True, [4]),
        ([8], 4, BIG, 1, False, []),
        ([], 4, BIG, 1, True, []),
    ],
)
def test_the_vectors_of_the_filter(sizes, most, tokens, each, is_padded, kept):
    made = filter_sizes(sizes, max_batch_size=most, max_num_tokens=tokens, tokens_per_request=each, is_padded=is_padded)
    assert made == tuple(kept)


@pytest.mark.parametrize(
    ("sizes", "limit", "pads", "kept"),
    [
        ((1, 2, 4, 8), 6, True, (1, 2, 4, 6)),
        ((1, 2, 4, 8), 6, False, (1, 2, 4)),
        ((1, 2, 4, 8), 0, True, ()),
        ((1, 2, 4, 8), 4, True, (1, 2, 4)),
        ((1, 2, 4), 16, True, (1, 2, 4)),
        ((), 3, True, ()),
    ],
)
def test_the_vectors_of_the_run_time_limit(sizes, limit, pads, kept):
    assert resolve_sizes(sizes, limit=limit, pads_to_limit=pads) == kept


@given(SIZES, st.integers(0, 300), st.booleans())
def test_cuts_keep_a_sorted_unique_subset_and_cut_once(sizes, limit, is_padded):
    """Invariant 42."""

    def cut(given: list[int]) -> list[int]:
        kept = filter_sizes(given, max_batch_size=limit, max_num_tokens=BIG, tokens_per_request=1, is_padded=is_padded)
        return list(kept)

    def resolve(given: list[int]) -> list[int]:
        return list(resolve_sizes(given, limit=limit, pads_to_limit=is_padded))

    for rule in (cut, resolve):
        kept = rule(sizes)
        assert kept == sorted(set(kept))
        assert all(1 <= size <= limit for size in kept)
        assert set(kept) - set(sizes) <= ({limit} if is_padded else set())
        assert rule(kept) == kept


@given(SIZES, st.integers(1, 300))
def test_rounding_up_finds_the_smallest_that_holds_a_batch(sizes, batch):
    found = round_up(sizes, batch)
    assert found == min((size for size in sizes if size >= batch), default=None)


@given(st.sampled_from(sorted(GENERATORS)), st.integers(1, 3000))
def test_every_batch_up_to_the_largest_is_held(name, most):
    made = GENERATORS[name](most)
    assert made == tuple(sorted(set(made)))
    assert made[-1] == most
    assert made[0] == 1


def test_a_list_has_an_end():
    """What is typed by a slip of the finger has its own size, and a tail that stops."""
    for sizes in (default_sizes(10**18), every(8, 10**18), every(64, 10**18)):
        assert sizes[-1] == 10**18
        assert MOST_SIZES < len(sizes) < MOST_SIZES + 40
