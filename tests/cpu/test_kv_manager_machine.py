"""A stateful machine over slots, KV blocks and their dispatcher: any order of calls keeps the books."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tonnage.resources.base import Deferral, ProbeRequest
from tonnage.resources.block_pool import BlockPool
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.kv import KVManager
from tonnage.resources.slots import SlotManager
from tonnage.step import StepItem, StepPlan, Txn

NUM_BLOCKS, NUM_SLOTS, MAX_SEQ_LEN = 10, 4, 24


class Books(RuleBasedStateMachine):
    """``live`` is the model: each admitted request and how many of its tokens are scheduled."""

    @initialize(block_tokens=st.sampled_from([1, 3, 4]))
    def build(self, block_tokens):
        self.slots = SlotManager(NUM_SLOTS)
        self.pool = BlockPool(NUM_BLOCKS)
        self.kv = KVManager(
            self.pool,
            block_tokens=block_tokens,
            max_seq_len=MAX_SEQ_LEN,
            max_batch_size=NUM_SLOTS,
            slots=self.slots,
        )
        self.dispatcher = Dispatcher([self.kv, self.slots])
        self.live: dict[str, tuple[ProbeRequest, int]] = {}
        self.launched: list[StepPlan] = []
        self.num_seen = 0

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
        for name, (request, scheduled) in self.live.items():
            left = self.kv.kv_tokens(request) - scheduled
            count = data.draw(st.integers(0, left), label=name)
            if count:
                items.append(StepItem(request_id=name, start=scheduled, count=count, samples=count == left))
        return StepPlan.of(len(self.launched), tuple(items))

    @rule(prompt=st.integers(1, 14), new=st.integers(1, 10), final=st.booleans())
    def admit(self, prompt, new, final):
        self.num_seen += 1
        request = ProbeRequest(id=f"r{self.num_seen}", num_prompt_tokens=prompt, max_total_tokens=prompt + new)
        if self.dispatcher.refusals(request):
            return
        before, txn = self.snapshot(), Txn()
        answer = self.dispatcher.admit(request, txn)
        deferred = isinstance(answer, Deferral)
        if final and not deferred:
            txn.commit()
            self.live[request.id] = (request, 0)
            return
        if deferred:
            assert answer.need > answer.have
            assert self.snapshot() == before
        txn.rollback()
        assert self.snapshot() == before

    @rule(data=st.data())
    def launch(self, data):
        """A running request never fails to get its blocks: this must not raise, whatever else was admitted."""
        plan, txn = self.draw_step(data), Txn()
        self.dispatcher.prepare(plan, txn)
        txn.commit()
        self.launched.append(plan)
        for item in plan.items:
            self.live[item.request_id] = (self.live[item.request_id][0], item.end)

    @rule(data=st.data())
    def launch_and_take_back(self, data):
        before, txn = self.snapshot(), Txn()
        self.dispatcher.prepare(self.draw_step(data), txn)
        txn.rollback()
        assert self.snapshot() == before

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel_between_prepare_and_rollback(self, data):
        plan, txn = self.draw_step(data), Txn()
        self.dispatcher.prepare(plan, txn)
        self.finish(data)
        txn.rollback()

    @precondition(lambda self: self.launched)
    @rule()
    def land(self):
        self.dispatcher.update(self.launched.pop(0), None)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.dispatcher.free(name)
        del self.live[name]
        after = self.snapshot()
        self.dispatcher.free(name)
        assert self.snapshot() == after

    @invariant()
    def free_and_referenced_are_all(self):
        counts = self.pool.ref_counts(np.arange(NUM_BLOCKS))
        assert self.pool.num_free + np.count_nonzero(counts) == NUM_BLOCKS
        assert sorted(self.pool.free_ids().tolist()) == np.flatnonzero(counts == 0).tolist()

    @invariant()
    def no_block_has_two_owners(self):
        owned = [block for name in self.live for block in self.kv.block_ids(name).tolist()]
        assert len(owned) == len(set(owned)) == self.pool.num_used

    @invariant()
    def reservations_add_up(self):
        lives = sum(self.kv.lifetime_need(request) for request, _ in self.live.values())
        assert self.kv.available() == NUM_BLOCKS - lives >= 0
        assert self.kv.stats()["reserved"] == sum(self.kv.remaining(request) for request, _ in self.live.values())

    @invariant()
    def sequences_are_where_the_model_says(self):
        assert (
            len({self.kv.row_index(name) for name in self.live}) == len(self.live) == NUM_SLOTS - self.slots.available()
        )
        for name, (_, scheduled) in self.live.items():
            marks = self.kv.watermarks(name)
            assert scheduled == marks.scheduled >= marks.computed >= marks.committed
            num_blocks = self.kv.block_ids(name).size
            assert num_blocks == -(-scheduled // self.kv.block_tokens)
            assert not self.kv.row(name)[num_blocks:].any()

    def teardown(self):
        if hasattr(self, "live"):
            for name in self.live:
                self.dispatcher.free(name)
            assert (self.pool.num_free, self.slots.available()) == (NUM_BLOCKS, NUM_SLOTS)
            assert not self.kv.table.any()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
