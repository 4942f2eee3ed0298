"""Random numbers without a state: each is a function of (seed, position) and of nothing else.

SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA): word i of the
stream of a state s is mix(s + (i + 1) * GAMMA), so any word can be had without those before it. The state of a
seed's stream is itself a mixed word: seeds that lie a multiple of GAMMA apart would otherwise share their words.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tonnage.step import Ints

Words: TypeAlias = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def splitmix64(states: Words, indices: Words) -> Words:
    """Word ``indices[i]``, from 0, of the SplitMix64 stream that starts at ``states[i]``."""
    words = states + (indices + np.uint64(1)) * _GAMMA
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def uniform(seeds: Words, positions: Ints) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), a multiple of 2**-53."""
    states = splitmix64(seeds, np.zeros_like(seeds))
    words = splitmix64(states, positions.astype(np.uint64))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
