"""Which dead buffers a compiled function gives to later ones."""

from __future__ import annotations

import torch

from tonnage.engine.exact.reuse import Dead, Life, Pool

BF16, F32 = torch.bfloat16, torch.float32


def pool(*lives):
    return Pool([Life(*life) for life in lives], 1 + max(last or first for _, first, last in lives))


def test_the_last_that_died_is_taken_first_and_once():
    waiting = pool((100, 0, 9))
    waiting.give((8, BF16), Dead(1, 2, 0))
    waiting.give((8, BF16), Dead(2, 3, 1))
    assert waiting.take((8, BF16), 4).slot == 2
    assert waiting.take((8, BF16), 3).slot == 1
    assert waiting.take((8, BF16), 4) is None


def test_size_and_dtype_must_be_equal():
    waiting = pool((100, 0, 9))
    waiting.give((8, BF16), Dead(1, 2, 0))
    assert waiting.take((8, F32), 3) is None
    assert waiting.take((16, BF16), 3) is None
    assert waiting.take((8, BF16), 3) is not None


def test_what_waits_must_not_raise_the_peak_but_for_a_neighbour():
    """Kernels 1 to 5 hold 10, 20, 90, 20 and 10 bytes: 8 more are no matter between 3 and 5, and too many over 3."""
    lives = [(10, 0, 6), (10, 2, 4), (70, 3, 3)]
    over_the_peak, behind_it, beside_it = pool(*lives), pool(*lives), pool(*lives)
    over_the_peak.give((8, BF16), Dead(1, 2, 0))
    assert over_the_peak.take((8, BF16), 4) is None
    behind_it.give((8, BF16), Dead(1, 3, 0))
    assert behind_it.take((8, BF16), 5) is not None
    beside_it.give((8, BF16), Dead(1, 2, 0))
    assert beside_it.take((8, BF16), 3) is not None


def test_what_waits_counts_for_the_next():
    """Between 2 and 5 there is room for one of 30 beside the 50 that are there, with a peak of 90, not for two."""
    waiting = pool((50, 0, 6), (40, 1, 1))
    for slot in (1, 2):
        waiting.give((30, BF16), Dead(slot, 2, 0))
    assert waiting.take((30, BF16), 5).slot == 2
    assert waiting.take((30, BF16), 5) is None


def test_what_stays_for_good_counts_to_the_end():
    waiting = pool((50, 0, None), (60, 4, 4))
    waiting.give((20, BF16), Dead(1, 1, 0))
    assert waiting.take((20, BF16), 3) is not None
    assert Pool([Life(5, 0, None)], 3).take((1, BF16), 2) is None
