"""A stateful machine over slots, KV blocks, their dispatcher and both policies: any order of calls keeps the books.

The model is a few numbers per request and says by itself what must be reserved, what is missing, and what a rollback
restores. Numbers in comments are those of docs/invariants.md.

The calls are drawn from a list and not by Hypothesis's rules, which leave out half of the kinds of calls in each
example: here nothing happens unless requests arrive, run and leave together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.resources.admission import FINISH_DECAY, SUSPENSION_STEP, Optimistic, ReserveAll
from tonnage.resources.base import Deferral, ProbeRequest
from tonnage.resources.block_pool import BlockPool
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.kv import KVManager
from tonnage.resources.slots import SlotManager
from tonnage.step import StepItem, StepPlan, Txn, Veto

NUM_BLOCKS, NUM_SLOTS, MAX_SEQ_LEN = 10, 4, 24


class Saboteur(SlotManager):
    """The last manager in line; it raises ``error`` when it is asked for anything."""

    name = "saboteur"
    after = frozenset({"kv"})
    error: Exception | None = None

    def admit(self, request, txn):
        self._fail()
        return super().admit(request, txn)

    def prepare(self, plan, txn):
        self._fail()
        super().prepare(plan, txn)

    def _fail(self):
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence(ProbeRequest):
    """One that may come back with ``num_generated`` tokens of output."""

    num_generated: int = 0

    @property
    def token_ids(self):
        return (0,) * (self.num_prompt_tokens + self.num_generated)

    @property
    def most(self):
        return self.max_total_tokens - self.num_prompt_tokens


@dataclass
class Life:
    """What the model knows of a live request: how far it is scheduled and computed, and the least still to come."""

    request: Sequence
    scheduled: int = 0
    computed: int = 0
    remaining: list[int] = field(default_factory=list)

    @property
    def generated(self):
        drawn = max(self.request.num_generated, self.scheduled + 1 - self.request.num_prompt_tokens)
        return min(drawn, self.request.most)


class Books:
    """``live``: each admitted request; ``suspended``: those that wait to come back; ``launched``: steps in flight."""

    def __init__(self, *, block_tokens, extra, history):
        """``history``: lengths of requests that finished before, for the optimistic policy; None: whole lives."""
        self.slots, self.pool, self.saboteur = SlotManager(NUM_SLOTS), BlockPool(NUM_BLOCKS), Saboteur(NUM_SLOTS)
        self.policy = ReserveAll() if history is None else Optimistic()
        self.kv = KVManager(
            self.pool,
            block_tokens=block_tokens,
            max_seq_len=MAX_SEQ_LEN,
            max_batch_size=NUM_SLOTS,
            slots=self.slots,
            admission=self.policy,
            extra_tokens=extra,
        )
        self.dispatcher = Dispatcher([self.saboteur, self.kv, self.slots])
        self.live: dict[str, Life] = {}
        self.suspended: list[Sequence] = []
        self.launched: list[tuple[StepPlan, dict[str, Life]]] = []
        self.lengths: list[int] = []
        self.pessimism = 0.0
        for length in history or ():
            self.learn(length)
        self.num_seen = 0

    # The model.

    def blocks(self, tokens):
        return -(-tokens // self.kv.block_tokens)

    def expected(self, request, generated):
        """Blocks in the end, by the definition of the policies, one request at a time."""
        new = most = request.most
        if isinstance(self.policy, Optimistic) and generated < most:
            longer = [min(length, most) for length in self.lengths if length > generated]
            mean = -(-Fraction(sum(longer) + most) // (len(longer) + 1))
            new = int(mean) + int(self.pessimism * (most - mean))
        tokens = max(request.num_prompt_tokens, request.num_prompt_tokens + new - 1)
        return self.blocks(tokens + self.kv.extra_tokens)

    def num_reserved(self):
        held = {name: self.blocks(life.scheduled) for name, life in self.live.items()}
        return sum(max(0, self.expected(life.request, life.generated) - held[n]) for n, life in self.live.items())

    def snapshot(self):
        """Everything that a rollback must restore, the order of the free blocks included."""
        sequences = {
            name: (self.kv.watermarks(name), self.kv.block_ids(name).tolist(), self.slots.slot_of(name))
            for name in self.live
        }
        stats = {key: value for key, value in self.dispatcher.stats().items() if key != "kv.high_water"}
        counts = self.pool.ref_counts(np.arange(NUM_BLOCKS)).tolist()
        return self.pool.free_ids().tolist(), counts, self.kv.table.tolist(), sequences, stats

    def draw_step(self, data):
        """Some live requests, each with 1 to all of its tokens still to come."""
        items = []
        for name, life in self.live.items():
            left = self.kv.kv_tokens(life.request) - life.scheduled
            count = data.draw(st.one_of(st.just(min(1, left)), st.integers(0, left)), label=name)
            if count:
                items.append(StepItem(request_id=name, start=life.scheduled, count=count, samples=count == left))
        return StepPlan.of(self.num_seen, tuple(items))

    def num_missing(self, plan):
        new = sum(self.blocks(item.end) - self.blocks(item.start) for item in plan.items)
        return max(0, new - self.pool.num_free)

    def leave(self, name):
        """Out of everything, twice: the second time changes nothing (15)."""
        self.dispatcher.free(name)
        life = self.live.pop(name)
        after = self.snapshot()
        self.dispatcher.free(name)
        assert self.snapshot() == after
        return life

    # Admission.

    def admitted(self, request, txn):
        """Try; a deferral must be true and leave no trace (13)."""
        before, have = self.snapshot(), max(0, self.pool.num_free - self.num_reserved())
        need = self.expected(request, min(request.num_generated, request.most))
        answer = self.dispatcher.admit(request, txn)
        no_slot = len(self.live) == NUM_SLOTS
        if not isinstance(answer, Deferral):
            assert not no_slot
            assert need <= have
            self.live[request.id] = Life(request)
            return True
        if not no_slot:
            assert (answer.manager, answer.need, answer.have) == ("kv", need, have)
        assert answer.need > answer.have
        assert self.snapshot() == before
        assert self.live, "the first request in an empty pool gets in"
        return False

    def arrive(self, data):
        self.num_seen += 1
        prompt, new = data.draw(st.integers(1, 6), label="prompt"), data.draw(st.integers(1, 12), label="new")
        request = Sequence(id=f"r{self.num_seen}", num_prompt_tokens=prompt, max_total_tokens=prompt + new)
        refused = self.blocks(self.kv.kv_tokens(request)) > NUM_BLOCKS
        assert bool(self.dispatcher.refusals(request)) == refused  # 28
        if not refused and self.admitted(request, Txn()):
            self.what_is_known_can_be_computed()

    def come_back(self, data):
        if self.suspended and self.admitted(self.suspended[0], Txn()):
            del self.suspended[0]
            self.what_is_known_can_be_computed()

    def what_is_known_can_be_computed(self):
        """Right after an admission, the step that brings every sequence to its last known token is never short."""
        known = [life.request.num_prompt_tokens + life.generated for life in self.live.values()]
        most = [self.kv.kv_tokens(life.request) for life in self.live.values()]
        assert self.dispatcher.short_of(tuple(self.live), np.minimum(known, most)) is None

    # Steps.

    def launch(self, data):
        """A step goes out if and only if its blocks are there; a veto leaves no trace."""
        plan, txn = self.draw_step(data), Txn()
        missing, before = self.num_missing(plan), self.snapshot()
        short = self.dispatcher.short_of(plan.request_ids, plan.ends)
        assert (short.need if short else 0) == missing
        if missing:
            with pytest.raises(Veto):
                self.dispatcher.prepare(plan, txn)
            txn.rollback()
            assert self.snapshot() == before
            return
        self.dispatcher.prepare(plan, txn)
        txn.commit()
        self.launched.append((plan, {item.request_id: self.live[item.request_id] for item in plan.items}))
        for item in plan.items:
            self.live[item.request_id].scheduled = item.end

    def take_back(self, data):
        """An admission and a step in one transaction; whatever ends it, everything is as it was (13)."""
        fails = data.draw(st.sampled_from([None, RuntimeError("defect"), Veto("saboteur", "no"), MemoryError()]))
        before, txn = self.snapshot(), Txn()
        self.num_seen += 1
        request = Sequence(id=f"r{self.num_seen}", num_prompt_tokens=2, max_total_tokens=4)
        try:
            if not isinstance(self.dispatcher.admit(request, txn), Deferral):
                self.live[request.id] = Life(request)
            plan = self.draw_step(data)
            self.saboteur.error = fails
            self.dispatcher.prepare(plan, txn)
        except (RuntimeError, Veto, MemoryError):
            assert fails is not None or self.num_missing(plan)
        finally:
            self.saboteur.error = None
            self.live.pop(request.id, None)
            txn.rollback()
        assert self.snapshot() == before

    def fail_to_admit(self, data):
        before, fails = self.snapshot(), data.draw(st.sampled_from([RuntimeError("defect"), MemoryError()]))
        self.saboteur.error = fails
        request = Sequence(id="never", num_prompt_tokens=2, max_total_tokens=4)
        try:
            answer = self.dispatcher.admit(request)
        except type(fails):
            answer = None
        self.saboteur.error = None
        assert answer is None or isinstance(answer, Deferral)
        assert self.snapshot() == before

    def cancel_in_the_middle(self, data):
        """What is cancelled is gone, everybody else is as before the step."""
        plan, txn = self.draw_step(data), Txn()
        if not self.live or self.num_missing(plan):
            return
        others = self.snapshot()[3]
        self.dispatcher.prepare(plan, txn)
        name = data.draw(st.sampled_from(sorted(self.live)))
        del others[name]
        self.leave(name)
        txn.rollback()
        assert self.snapshot()[3] == others

    def land(self, data):
        """Of whoever left since, and may be back under its name, nothing changes."""
        if not self.launched:
            return
        plan, lives = self.launched.pop(0)
        self.dispatcher.update(plan, None)
        for item in plan.items:
            lives[item.request_id].computed = item.end

    # The end of a life.

    def finish(self, data):
        if self.live:
            self.learn(self.leave(data.draw(st.sampled_from(sorted(self.live)))).generated)

    def learn(self, length):
        self.policy.finished(length)
        self.lengths.append(length)
        self.pessimism *= FINISH_DECAY

    def suspend(self, data):
        if not self.live:
            return
        life = self.leave(data.draw(st.sampled_from(sorted(self.live))))
        self.policy.suspended()
        self.pessimism = min(1.0, self.pessimism + SUSPENSION_STEP)
        request = life.request
        back = Sequence(
            id=request.id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_total_tokens=request.max_total_tokens,
            num_generated=min(life.generated, request.most - 1),
        )
        self.suspended.append(back)

    # What always holds.

    def check(self):
        self.free_and_referenced_are_all()
        self.no_block_has_two_owners()
        self.reservations_add_up()
        self.whole_lives_fit_where_they_are_reserved()
        self.what_is_to_come_only_falls()
        self.sequences_are_where_the_model_says()

    def free_and_referenced_are_all(self):
        """1."""
        counts = self.pool.ref_counts(np.arange(NUM_BLOCKS))
        assert self.pool.num_free + np.count_nonzero(counts) == NUM_BLOCKS
        assert sorted(self.pool.free_ids().tolist()) == np.flatnonzero(counts == 0).tolist()

    def no_block_has_two_owners(self):
        owned = [block for name in self.live for block in self.kv.block_ids(name).tolist()]
        assert len(owned) == len(set(owned)) == self.pool.num_used

    def reservations_add_up(self):
        assert self.kv.stats()["reserved"] == self.num_reserved()
        assert self.kv.available() == max(0, self.pool.num_free - self.num_reserved())

    def whole_lives_fit_where_they_are_reserved(self):
        """16: computed to their very ends, extra tokens included, running sequences together find their blocks."""
        if not self.policy.may_suspend:
            ends = np.array([self.kv.kv_tokens(life.request) for life in self.live.values()], np.int64)
            assert self.dispatcher.short_of(tuple(self.live), ends) is None

    def what_is_to_come_only_falls(self):
        """19."""
        for life in self.live.values():
            life.remaining.append(self.kv.remaining(life.request))
            assert life.remaining[-2:] == sorted(life.remaining[-2:], reverse=True)
            assert (life.remaining[-1] == 0) == (
                self.blocks(life.scheduled) == self.blocks(self.kv.kv_tokens(life.request))
            )

    def sequences_are_where_the_model_says(self):
        assert (
            len({self.kv.row_index(name) for name in self.live}) == len(self.live) == NUM_SLOTS - self.slots.available()
        )
        for name, life in self.live.items():
            marks = self.kv.watermarks(name)
            assert (marks.scheduled, marks.computed) == (life.scheduled, life.computed)
            assert marks.scheduled >= marks.computed >= marks.committed
            num_blocks = self.kv.block_ids(name).size
            assert num_blocks == self.blocks(life.scheduled)
            assert not self.kv.row(name)[num_blocks:].any()

    def end(self):
        """15."""
        for name in self.live:
            self.dispatcher.free(name)
        assert (self.pool.num_free, self.slots.available()) == (NUM_BLOCKS, NUM_SLOTS)
        assert not self.kv.table.any()


#: What is called, as often as its share of the list.
CALLS = (
    *[Books.arrive] * 4,
    *[Books.launch] * 6,
    *[Books.land] * 2,
    Books.finish,
    Books.suspend,
    Books.come_back,
    Books.take_back,
    Books.fail_to_admit,
    Books.cancel_in_the_middle,
)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    block_tokens=st.sampled_from([1, 3, 4]),
    extra=st.sampled_from([0, 0, 2]),
    history=st.one_of(st.none(), st.lists(st.integers(1, 3), min_size=8, max_size=20)),
    calls=st.lists(st.sampled_from(CALLS), min_size=20, max_size=40),
)
def test_the_books_balance(data, block_tokens, extra, history, calls):
    books = Books(block_tokens=block_tokens, extra=extra, history=history)
    for call in calls:
        call(books, data)
        books.check()
    books.end()
