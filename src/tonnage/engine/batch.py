"""The running sequences as arrays by slot, changed in place, so that a step costs no Python per sequence and token."""

from __future__ import annotations

import numpy as np

from tonnage.engine.request import Request
from tonnage.engine.sampling import SamplingTable
from tonnage.graphs.token_feed import pending
from tonnage.step import Flags, Ints, StepPlan


class Batch:
    """Slot s runs ``requests[s]``: ``known[s]`` of at most ``limit[s]`` tokens, ``computed[s]`` in the KV cache.

    Both count what has been launched: a token that a step still draws is known, and has no id yet.
    ``last_token[s]`` is the newest token, all that a decode reads; one that is still drawn is ``pending``.
    ``epoch[s]`` counts sequences that have left the slot. ``sampling`` holds the sampler's parameters.
    """

    def __init__(self, num_slots: int) -> None:
        self.requests: list[Request | None] = [None] * num_slots
        self.known = np.zeros(num_slots, np.int64)
        self.computed = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        self.last_token = np.zeros(num_slots, np.int64)
        self.epoch = np.zeros(num_slots, np.int64)
        self.sampling = SamplingTable(num_slots)
        self._is_live = np.zeros(num_slots, np.bool_)
        self._ids = np.full(num_slots, "", np.object_)

    def due_slots(self) -> Ints:
        """Who runs and has something to compute, ascending: not who has its last token, but for the id."""
        return np.flatnonzero(self._is_live & (self.known < self.limit))

    def add(self, request: Request, *, is_loading: bool = False) -> None:
        """``request.slot`` starts to run, from its first token that is not computed; one that loads once it has been
        told to ``start``."""
        slot = request.slot
        self.requests[slot], self._ids[slot] = request, request.id
        self.known[slot] = len(request.token_ids)
        self.computed[slot] = request.num_computed_tokens
        self.limit[slot] = request.max_total_tokens
        self.last_token[slot] = request.token_ids[-1]
        self.sampling.set(
            slot,
            request.params,
            seed=request.seed,
            stop_ids=request.stop_ids,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        self._is_live[slot] = not is_loading

    def start(self, slot: int) -> None:
        self._is_live[slot] = True

    def remove(self, request: Request) -> None:
        slot = request.slot
        request.num_computed_tokens = int(self.computed[slot])
        self._is_live[slot] = False
        self.requests[slot] = None
        self.epoch[slot] += 1
        self.sampling.clear(slot)

    def ids(self, slots: Ints) -> list[str]:
        """Request ids of live slots."""
        found: list[str] = self._ids[slots].tolist()
        return found

    def decoding(self, slots: Ints) -> Flags:
        """Which of them have everything computed but their newest token."""
        computed = self.computed[slots]
        return (self.known[slots] - computed == 1) & (computed > 0)

    def token_ids(self, plan: StepPlan, slots: Ints) -> Ints:
        """The tokens that the step computes, row after row, int64 [num_tokens]."""
        ids = np.empty(plan.shape.num_tokens, np.int64)
        offsets = np.cumsum(plan.counts) - plan.counts
        is_one = plan.counts == 1
        newest = is_one & (plan.ends == self.known[slots])
        ids[offsets[newest]] = self.last_token[slots[newest]]
        for row in np.flatnonzero(~newest).tolist():
            request = self.requests[int(slots[row])]
            assert request is not None
            start, count, offset = int(plan.starts[row]), int(plan.counts[row]), int(offsets[row])
            ids[offset : offset + count] = request.token_ids[start : start + count]
        return ids

    def advance(self, plan: StepPlan, slots: Ints) -> None:
        """The step is launched: its rows are computed, and the sampling ones have a token more, one each."""
        self.computed[slots] = plan.ends
        sampling = slots[plan.samples]
        self.known[sampling] += 1
        self.last_token[sampling] = pending(sampling)

    def land(self, plan: StepPlan, slots: Ints, tokens: Ints, is_here: Flags) -> None:
        """The sampling rows of a launched step drew ``tokens``; ``is_here``: rows whose sequences still run. Of one
        that has launched again since, the newest is still drawn."""
        sampling = slots[plan.samples]
        is_newest = is_here[plan.samples] & (self.known[sampling] == plan.ends[plan.samples] + 1)
        self.last_token[sampling[is_newest]] = tokens[is_newest]
