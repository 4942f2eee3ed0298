"""Sampling parameters of the running sequences, one entry a slot, so that a step gathers instead of looping."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tonnage.engine.sampling.random import Words, uniform
from tonnage.engine.sampling.rows import NUM_UNIFORM, Draws, Edits, Floats, Penalties, SamplingRows, Tops
from tonnage.sampling import SamplingParams
from tonnage.step import Ints

Asks: TypeAlias = npt.NDArray[np.uint8]

# What a slot asks for, as bits: one look at them tells which arrays a step needs.
_RANDOM, _TOP_K, _TOP_P, _MIN_P, _PENALTIES, _BIAS, _MIN_TOKENS, _TOPS = (1 << bit for bit in range(8))
_SEED_MASK, _LARGEST = 2**64 - 1, 2**63 - 1


class SamplingTable:
    """Parameters of slots ``[0, num_slots)``. A slot is set when its sequence is admitted; until then it is greedy."""

    def __init__(self, num_slots: int) -> None:
        self._asks = np.zeros(num_slots, np.uint8)
        self._seed = np.zeros(num_slots, np.uint64)
        self._temperature, self._top_p, self._min_p, self._repetition, self._presence, self._frequency = (
            np.zeros(num_slots) for _ in range(6)
        )
        self._top_k, self._num_tops, self._num_prompt_tokens, self._min_tokens = (
            np.zeros(num_slots, np.int64) for _ in range(4)
        )
        self._bias: dict[int, tuple[Ints, Floats]] = {}
        self._stops: dict[int, tuple[Ints, Floats]] = {}

    def set(
        self, slot: int, params: SamplingParams, *, seed: int, stop_ids: Collection[int], num_prompt_tokens: int
    ) -> None:
        """``slot`` belongs to a sequence with ``params`` from now on, whatever was there.

        ``seed`` counts modulo 2**64. ``stop_ids`` are masked until ``params.min_tokens`` tokens were generated.
        """
        self.clear(slot)
        self._asks[slot] = _asks(params, has_stops=bool(stop_ids))
        self._seed[slot] = seed & _SEED_MASK
        self._temperature[slot], self._top_k[slot] = params.temperature, min(params.top_k, _LARGEST)
        self._top_p[slot], self._min_p[slot] = params.top_p, params.min_p
        self._repetition[slot], self._presence[slot] = params.repetition_penalty, params.presence_penalty
        self._frequency[slot], self._num_tops[slot] = params.frequency_penalty, params.logprobs or 0
        self._num_prompt_tokens[slot], self._min_tokens[slot] = num_prompt_tokens, min(params.min_tokens, _LARGEST)
        if params.logit_bias:
            self._bias[slot] = _edits(params.logit_bias)
        if params.min_tokens and stop_ids:
            self._stops[slot] = _edits(dict.fromkeys(stop_ids, -np.inf))

    def seeds(self, slots: Ints) -> Words:
        """The key of each slot's random numbers."""
        return self._seed[slots]

    def clear(self, slot: int) -> None:
        """The sequence is gone; clearing again does nothing."""
        self._asks[slot] = 0
        self._bias.pop(slot, None)
        self._stops.pop(slot, None)

    def rows(self, slots: Ints, positions: Ints) -> SamplingRows:
        """What the sampling rows of a step ask for: row i belongs to ``slots[i]`` and draws token ``positions[i]``.

        Positions count from the start of the prompt, so they are the numbers of tokens known so far.
        """
        asks = self._asks[slots]
        anything = int(np.bitwise_or.reduce(asks, initial=0))
        if not anything:
            return SamplingRows(num_rows=len(slots))
        return SamplingRows(
            num_rows=len(slots),
            draws=self._draws(asks, slots, positions, anything) if anything & _RANDOM else None,
            penalties=self._penalties(asks, slots) if anything & _PENALTIES else None,
            edits=self._all_edits(asks, slots, positions) if anything & (_BIAS | _MIN_TOKENS) else None,
            tops=self._tops(asks, slots) if anything & _TOPS else None,
        )

    def _draws(self, asks: Asks, slots: Ints, positions: Ints, anything: int) -> Draws:
        rows = np.flatnonzero(asks & _RANDOM)
        of = slots[rows]
        return Draws(
            rows=rows,
            uniform=uniform(self._seed[of, None], positions[rows, None] * NUM_UNIFORM + np.arange(NUM_UNIFORM)),
            temperature=self._temperature[of],
            top_k=self._top_k[of] if anything & _TOP_K else None,
            top_p=self._top_p[of] if anything & _TOP_P else None,
            min_p=self._min_p[of] if anything & _MIN_P else None,
        )

    def _penalties(self, asks: Asks, slots: Ints) -> Penalties:
        rows = np.flatnonzero(asks & _PENALTIES)
        of = slots[rows]
        return Penalties(
            rows=rows,
            slots=of,
            repetition=self._repetition[of],
            presence=self._presence[of],
            frequency=self._frequency[of],
        )

    def _all_edits(self, asks: Asks, slots: Ints, positions: Ints) -> Edits | None:
        is_early = (asks & _MIN_TOKENS).astype(np.bool_)
        is_early &= positions - self._num_prompt_tokens[slots] < self._min_tokens[slots]
        found = [(row, *self._bias[int(slots[row])]) for row in np.flatnonzero(asks & _BIAS)]
        found += [(row, *self._stops[int(slots[row])]) for row in np.flatnonzero(is_early)]
        if not found:
            return None
        found.sort(key=lambda edit: edit[0])
        rows, tokens, values = zip(*found, strict=True)
        return Edits(
            rows=np.repeat(rows, [ids.size for ids in tokens]),
            tokens=np.concatenate(tokens),
            values=np.concatenate(values),
        )

    def _tops(self, asks: Asks, slots: Ints) -> Tops:
        rows = np.flatnonzero(asks & _TOPS)
        return Tops(rows=rows, counts=self._num_tops[slots[rows]])


def _asks(params: SamplingParams, *, has_stops: bool) -> int:
    """The bits of ``params``. Filters without a draw change nothing: the most probable token passes all of them."""
    found = (
        (_PENALTIES, params.has_penalties),
        (_BIAS, bool(params.logit_bias)),
        (_MIN_TOKENS, params.min_tokens > 0 and has_stops),
        (_TOPS, bool(params.logprobs)),
        (_RANDOM, not params.is_greedy),
        (_TOP_K, not params.is_greedy and params.top_k > 0),
        (_TOP_P, not params.is_greedy and params.top_p < 1),
        (_MIN_P, not params.is_greedy and params.min_p > 0),
    )
    return sum(bit for bit, is_asked in found if is_asked)


def _edits(values: Mapping[int, float]) -> tuple[Ints, Floats]:
    return np.fromiter(values.keys(), np.int64), np.fromiter(values.values(), np.float64)
