"""What a pool of KV blocks would hold, as one number a token: written, moved and read where kernels would.

A stub computes nothing, so a page table that leads to the wrong slots would never show. Here it does: the entry of a
token is a number made of that token, of all before it and of who may share it, each step looks at every entry that it
would attend to, and copies happen as late as a stream may run them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tonnage.engine.batch import Batch
from tonnage.engine.inputs import StepInputs
from tonnage.engine.request import Request
from tonnage.engine.sampling.random import splitmix64
from tonnage.resources.mover import CountingMover, Ids, Load
from tonnage.step import Ints

Words: TypeAlias = npt.NDArray[np.uint64]

#: An odd factor and its inverse modulo 2**64: an entry is the one before it times the factor, plus the token's word.
_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 2**64)
#: Stands where nobody wrote, and in the scratch: no token's entry but by a chance of one in 2**64.
EMPTY, SCRATCH = np.uint64(0xEEEE_EEEE_EEEE_EEEE), np.uint64(0x5C5C_5C5C_5C5C_5C5C)


class Shadow:
    """``device`` and ``host``: uint64 ``[slots, block_tokens]``. ``num_wrong`` counts steps' rows that did not find
    their own entries, and scratch that was written to; ``told`` describes the first few."""

    MAX_TOLD = 5

    def __init__(
        self, *, num_slots: int, num_host_slots: int, block_tokens: int, max_batch_size: int, max_seq_len: int
    ) -> None:
        self.block_tokens = block_tokens
        self.device: Words = np.full((num_slots, block_tokens), EMPTY, np.uint64)
        self.host: Words = np.full((num_host_slots, block_tokens), EMPTY, np.uint64)
        self.num_wrong = 0
        self.told: list[str] = []
        width = -(-max_seq_len // block_tokens) * block_tokens
        self._positions = np.arange(width)
        self._up, self._down = _powers(_FACTOR, width), _powers(_INVERSE, width)
        # Of each slot of the batch: its sequence's entries, so many of them, whose they are.
        self._entries: Words = np.zeros((max_batch_size, width), np.uint64)
        self._known = np.zeros(max_batch_size, np.int64)
        self._owners: list[Request | None] = [None] * max_batch_size
        self._spoiled: set[Request | None] = set()
        self._num_scratch = 0

    def compute(self, inputs: StepInputs, batch: Batch) -> None:
        """Every row reads the entries before it and writes its own."""
        self._extend(inputs, batch)
        self._read(inputs)
        self._write(inputs)

    def spoil(self, inputs: StepInputs, row: int) -> None:
        """What that row of the step wrote are no entries. Where steps overlap its sequence is in one more, which reads
        them."""
        self._spoiled.add(self._owners[int(inputs.slots[row])])
        positions = np.arange(inputs.plan.starts[row], inputs.plan.ends[row])
        slots = inputs.table[inputs.slots[row], positions // self.block_tokens]
        self.device[slots, positions % self.block_tokens] = EMPTY

    def forget(self) -> None:
        """The device's memory has gone, and comes back with nothing in it."""
        self.device[:] = EMPTY
        self.device[: self._num_scratch] = SCRATCH  # whoever works there writes it anew

    def take_scratch(self, num_slots: int) -> None:
        """Somebody works in the first so many slots now: they hold nothing of the cache's."""
        self._num_scratch = num_slots
        self.device[:num_slots] = SCRATCH

    def give_scratch(self) -> None:
        """The work there is done: nobody else may have written meanwhile."""
        if (self.device[: self._num_scratch] != SCRATCH).any():
            self._tell("somebody wrote where the scratch was")
        self._num_scratch = 0

    def _extend(self, inputs: StepInputs, batch: Batch) -> None:
        """Entries of the sequences up to the ends of their rows."""
        plan, slots = inputs.plan, inputs.slots
        firsts = np.cumsum(plan.counts) - plan.counts
        is_next = (plan.counts == 1) & (plan.starts == self._known[slots]) & (plan.starts > 0)
        for row, slot in enumerate(slots.tolist()):
            request = batch.requests[slot]
            assert request is not None
            if self._owners[slot] is not request:
                self._owners[slot], is_next[row] = request, False
                self._known[slot] = 0
            if not is_next[row]:
                self._fill(slot, request, int(plan.ends[row]))
        slots, ends = slots[is_next], plan.ends[is_next]
        before = self._entries[slots, ends - 2]
        self._entries[slots, ends - 1] = before * np.uint64(_FACTOR) + _words(inputs.ids[firsts[is_next]])
        self._known[slots] = np.maximum(self._known[slots], ends)

    def _fill(self, slot: int, request: Request, end: int) -> None:
        if self._known[slot] >= end:
            return
        words = _words(np.array(request.token_ids[:end], np.int64))
        self._entries[slot, :end] = self._up[:end] * (_scope(request) + np.cumsum(words * self._down[:end]))
        self._known[slot] = end

    def _read(self, inputs: StepInputs) -> None:
        starts, slots = inputs.plan.starts, inputs.slots
        width = -(-int(starts.max(initial=0)) // self.block_tokens)
        found = self.device[inputs.table[slots, :width]].reshape(slots.size, -1)
        num_tokens = width * self.block_tokens
        is_wrong = found != self._entries[slots, :num_tokens]
        is_wrong &= self._positions[:num_tokens] < starts[:, None]
        if is_wrong.any():
            for row in np.flatnonzero(is_wrong.any(axis=1)).tolist():
                at = np.flatnonzero(is_wrong[row])
                name = inputs.plan.request_ids[row]
                if self._owners[int(slots[row])] in self._spoiled:
                    continue
                self._tell(f"{name} finds {at.size} of {starts[row]} entries wrong, the first at token {at[0]}")

    def _write(self, inputs: StepInputs) -> None:
        plan, bt = inputs.plan, self.block_tokens
        firsts = np.cumsum(plan.counts) - plan.counts
        rows = np.repeat(inputs.slots, plan.counts)
        positions = np.repeat(plan.starts - firsts, plan.counts) + np.arange(plan.shape.num_tokens)
        slots, places = inputs.table[rows, positions // bt], positions % bt
        if np.unique(slots.astype(np.int64) * bt + places).size < positions.size:
            self._tell("two tokens of one step are written to one place")
        if (slots < self._num_scratch).any():
            self._tell("a step writes where the scratch is")
        self.device[slots, places] = self._entries[rows, positions]

    def _tell(self, told: str) -> None:
        self.num_wrong += 1
        if len(self.told) < self.MAX_TOLD:
            self.told.append(told)


class ShadowMover(CountingMover):
    """Moves the entries of ``shadow``. An offload reads its slots at the last moment at which it may, and a load
    writes its slots when it is done: after the steps that ``load_steps`` gives it, in the order of the stream.

    ``before_copy`` is called with "move", "offload" or "load" and may raise: the destinations then hold nothing.
    """

    def __init__(
        self,
        slab_bytes: int,
        shadow: Shadow,
        *,
        load_steps: Callable[[], int],
        before_copy: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(slab_bytes, num_slots=len(shadow.device), num_host_slots=len(shadow.host))
        self._shadow, self._load_steps, self._before_copy = shadow, load_steps, before_copy
        self._offloads: list[tuple[Ids, Ids]] = []
        self._under_way: deque[_ShadowLoad] = deque()

    def move(self, src: Ids, dst: Ids) -> None:
        self._try("move", self._shadow.device, dst)
        super().move(src, dst)
        self._offload_now()
        self._shadow.device[dst] = self._shadow.device[src]

    def offload(self, slots: Ids, host_slots: Ids) -> None:
        self._try("offload", self._shadow.host, host_slots)
        super().offload(slots, host_slots)
        self._offloads.append((slots.copy(), host_slots.copy()))

    def load(self, host_slots: Ids, slots: Ids) -> Load:
        self._offload_now()
        self._try("load", self._shadow.device, slots)
        super().load(host_slots, slots)
        made = _ShadowLoad(self, host_slots.copy(), slots.copy(), self._load_steps())
        self._under_way.append(made)
        self._finish_due()
        return made

    def before_launch(self) -> None:
        super().before_launch()
        self._offload_now()

    def step(self) -> None:
        """A step has passed."""
        for load in self._under_way:
            load.steps_left -= 1
        self._finish_due()

    def finish_loads(self, num_loads: int | None = None) -> None:
        for load in list(self._under_way)[:num_loads]:
            load.wait()

    def finish(self, last: _ShadowLoad) -> None:
        """That load and all before it."""
        while not last.is_done:
            load = self._under_way.popleft()
            self._shadow.device[load.slots] = self._shadow.host[load.host_slots]
            load.is_done = True

    def _finish_due(self) -> None:
        while self._under_way and self._under_way[0].steps_left <= 0:
            self.finish(self._under_way[0])

    def _offload_now(self) -> None:
        for slots, host_slots in self._offloads:
            self._shadow.host[host_slots] = self._shadow.device[slots]
        self._offloads.clear()

    def _try(self, call: str, pool: Words, destinations: Ids) -> None:
        try:
            self._before_copy(call)
        except BaseException:
            self._offload_now()
            pool[destinations] = EMPTY
            raise


class _ShadowLoad:
    def __init__(self, mover: ShadowMover, host_slots: Ids, slots: Ids, steps_left: int) -> None:
        self._mover, self.host_slots, self.slots, self.steps_left = mover, host_slots, slots, steps_left
        self.is_done = False

    def wait(self) -> None:
        self._mover.finish(self)


def _scope(request: Request) -> np.uint64:
    """Who may share entries with it: nobody, or all of one adapter and salt."""
    cache = request.params.cache
    shared = ("shared", request.adapter_id, cache.salt) if cache.reuse else ("private", request.id, request.arrival)
    return np.uint64(hash(shared) % 2**64)


def _words(tokens: Ints) -> Words:
    return splitmix64(tokens.astype(np.uint64), np.zeros(tokens.size, np.uint64))


def _powers(factor: int, num: int) -> Words:
    """factor**1 to factor**num, modulo 2**64."""
    return np.cumprod(np.full(num, factor, np.uint64), dtype=np.uint64)
