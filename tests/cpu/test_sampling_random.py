"""Counter random numbers: the published stream, uniform, and without a trace of seed or position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tonnage.engine.sampling.random import splitmix64, uniform
from tonnage.sampling import child_seed

#: No test here is decided by chance: the seeds are fixed, and a wrong generator lies far beyond this.
SIGNIFICANCE = 1e-4
GAMMA = 0x9E3779B97F4A7C15


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of Pearson's test. Cells where fewer than 5 are expected count as one, and as they are if alone."""
    observed, expected = np.asarray(observed, np.float64), np.asarray(expected, np.float64)
    assert observed.sum() == pytest.approx(expected.sum())
    if observed[expected == 0].any():
        return 0.0
    small = expected < 5
    cells = [(observed[~small], expected[~small]), (observed[small].sum()[None], expected[small].sum()[None])]
    seen, told = (np.concatenate([cell[i] for cell in cells if cell[1].sum() > 0]) for i in range(2))
    if len(told) == 1:
        return 1.0
    statistic = float(((seen - told) ** 2 / told).sum())
    return float(torch.special.gammaincc(torch.tensor((len(told) - 1) / 2).double(), torch.tensor(statistic / 2)))


@pytest.mark.parametrize(("freedom", "statistic"), [(1, 3.841), (10, 18.307), (30, 43.773), (100, 124.342)])
def test_the_chi_square_of_these_tests_is_the_one_in_the_tables(freedom, statistic):
    """Critical values at 5 %: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.4."""
    expected = np.full(freedom + 1, 1000.0)
    step = np.sqrt(statistic * 1000 / 2)
    observed = expected + step * np.eye(freedom + 1)[0] - step * np.eye(freedom + 1)[1]
    assert chi_square(observed, expected) == pytest.approx(0.05, abs=2e-5)


def words(seed: int, count: int) -> list[int]:
    return splitmix64(np.full(count, seed, np.uint64), np.arange(count, dtype=np.uint64)).tolist()


def test_the_published_stream():
    """Word 0 of seed 0 as ports of the reference code test it, and the stream that Rosetta Code prints for 1234567."""
    assert words(0, 1) == [0xE220A8397B1DCDAF]
    assert words(1234567, 5) == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


def draws(seeds: object, positions: object) -> np.ndarray:
    pairs = np.broadcast_arrays(np.asarray(seeds, np.uint64), np.asarray(positions, np.int64))
    return uniform(*(part.ravel() for part in pairs)).reshape(pairs[0].shape)


NEIGHBOURS = {
    "positions of one seed": draws(7, np.arange(65536)),
    "seeds at one position": draws(np.arange(65536), 12),
    "seeds that differ in high bits": draws(np.arange(65536, dtype=np.uint64) << np.uint64(48), 12),
    "seeds a multiple of gamma apart": draws(np.arange(65536, dtype=np.uint64) * np.uint64(GAMMA), 12),
    "samples of one request": draws([child_seed(5, i) for i in range(65536)], 12),
}


@pytest.mark.parametrize("drawn", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
def test_they_are_uniform_and_neighbours_know_nothing_of_each_other(drawn):
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert np.unique(drawn).size == drawn.size
    cells = (drawn * 256).astype(np.int64)
    assert chi_square(np.bincount(cells, minlength=256), np.full(256, drawn.size / 256)) > SIGNIFICANCE
    pairs = (drawn[:-1] * 16).astype(np.int64) * 16 + (drawn[1:] * 16).astype(np.int64)
    assert chi_square(np.bincount(pairs, minlength=256), np.full(256, pairs.size / 256)) > SIGNIFICANCE
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4 / np.sqrt(drawn.size)


@pytest.mark.parametrize("shift", [1, 5])
def test_streams_of_seeds_a_gamma_apart_are_not_one_stream_shifted(shift):
    """Which they would be without mixing the seed first."""
    far = draws((3 + shift * GAMMA) % 2**64, np.arange(1000))
    assert not np.isin(far, draws(3, np.arange(2000))).any()


@given(st.permutations(range(40)))
def test_a_draw_does_not_depend_on_those_made_with_it(order):
    seeds, positions = np.arange(40, dtype=np.uint64) ** 3, np.arange(40) * 7
    together = uniform(seeds[order], positions[order])
    alone = np.concatenate([uniform(seeds[i : i + 1], positions[i : i + 1]) for i in order])
    np.testing.assert_array_equal(together, alone)


def test_samples_have_seeds_of_their_own():
    """The first is the request itself, so that asking for one sample or for several gives the same first one."""
    children = {child_seed(seed, i) for seed in (0, 1, -1, 2**64 - 2, 1 << 63) for i in range(128)}
    assert len(children) == 5 * 128
    assert all(0 <= seed < 2**64 for seed in children)
    assert child_seed(12, 0) == 12
    assert child_seed(-1, 3) == child_seed(2**64 - 1, 3)
    own = draws(12, np.arange(4000))
    assert not np.isin(draws([child_seed(12, i) for i in range(1, 9)], np.arange(500)[:, None]), own).any()
