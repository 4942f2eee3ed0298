"""Recurrent states against a sequential reference: whatever is rolled back, retried or late, each text has its state.

The simulated model mixes a token into a state so that any order but the right one, any token twice and any other
sequence's state gives another result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.buffers import BufferManager, Device, Stream
from tonnage.config import Limits
from tonnage.device.host import HostDriver
from tonnage.errors import ResourceError
from tonnage.layout import KVGroup, KVGroupKind, KVLayout, KVOrder
from tonnage.ledger import Ledger
from tonnage.resources.base import Deferral, Grant, ProbeRequest
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.slots import SlotManager
from tonnage.resources.states import SENTINEL, StateManager
from tonnage.step import StepItem, StepPlan, Txn
from tonnage.units import MiB

LAYOUT = KVLayout(
    slab_bytes=4096,
    order=KVOrder.BLOCK_MAJOR,
    groups=tuple(
        KVGroup(name=f"state-{i}", kind=KVGroupKind.STATE, layers=(i,), window=None, block_tokens=0, block_bytes=24,
                parts=())
        for i in range(2)
    ),
)  # fmt: skip
NUM_SEATS = 3


def mix(state, token):
    """A step of a hash over 48 bytes: neither commutative nor blind to how often."""
    return (state * np.uint64(6364136223846793005) + np.uint64(token) + np.uint64(1442695040888963407)) ^ (
        np.roll(state, 1) >> np.uint64(17)
    )


def reference(tokens):
    state = np.zeros(6, np.uint64)
    for token in tokens:
        state = mix(state, token)
    return state.tolist()


class Model:
    """Reads and writes slots as a kernel would: ``view`` is the manager's memory as numbers."""

    def __init__(self, states):
        self.states = states
        raw = np.frombuffer(memory(states), np.uint8)
        self.view = raw.reshape(states.num_slots, states.slot_bytes)

    def run(self, plan, tokens, *, stop_after=None):
        """``stop_after`` rows it fails, with what it has written left behind. A row of padding comes with each step."""
        slots = self.states.slots(plan)
        reads, writes = [*slots.reads.tolist(), SENTINEL], [*slots.writes.tolist(), SENTINEL]
        for row, (read, write) in enumerate(zip(reads, writes, strict=True)):
            if row == stop_after:
                raise RuntimeError("the launch fails")
            state = self.at(read).copy()
            for token in tokens[row] if row < len(tokens) else [99]:
                state = mix(state, token)
            self.at(write)[:] = state

    def at(self, slot):
        return self.view[slot, :48].view(np.uint64)


def memory(states):
    import ctypes

    size = states.num_slots * states.slot_bytes
    return (ctypes.c_uint8 * size).from_address(states.buffer.address)


def make(*, lookahead_steps=0, num_seats=NUM_SEATS):
    device = Device(HostDriver(4 * MiB))
    buffers = BufferManager(Stream(device), ledger=Ledger(0, 4 * MiB), owner="states")
    slots = SlotManager(num_seats)
    states = StateManager(slots, LAYOUT, buffers=buffers, lookahead_steps=lookahead_steps)
    return states, Dispatcher([slots, states])


@dataclass
class Text:
    id: str
    tokens: list[int]
    scheduled: int = 0
    committed: int = 0
    steps: list[int] = field(default_factory=list)


def plan_of(number, rows):
    items = [StepItem(request_id=text.id, start=text.scheduled, count=count, samples=False) for text, count in rows]
    return StepPlan.of(number, items)


COUNTS = st.lists(st.integers(0, 3), min_size=3, max_size=3)
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.lists(st.integers(0, 9), min_size=1, max_size=12)),
        st.tuples(st.just("step"), COUNTS, st.sampled_from([None, 0, 1, 2])),
        st.tuples(st.just("take back"), COUNTS),
        st.tuples(st.just("commit")),
        st.tuples(st.just("leave"), st.integers(0, 2)),
        st.tuples(st.just("return"), st.integers(0, 2)),
    ),
    max_size=60,
)  # fmt: skip


class Bench:
    def __init__(self, lookahead_steps):
        self.states, self.dispatcher = make(lookahead_steps=lookahead_steps)
        self.model = Model(self.states)
        self.depth = 1 + lookahead_steps
        self.live: list[Text] = []
        self.launched: list = []
        self.number = 0

    def arrive(self, tokens):
        text = Text(f"t{self.number}", list(tokens))
        self.number += 1
        self.admit(text)

    def admit(self, text):
        view = ProbeRequest(id=text.id, num_prompt_tokens=len(text.tokens), max_total_tokens=len(text.tokens) + 1)
        answer = self.dispatcher.admit(view)
        if isinstance(answer, Deferral):
            assert len(self.live) == NUM_SEATS
            return
        self.live.append(text)

    def rows(self, counts):
        rows = [
            (text, min(count, len(text.tokens) - text.scheduled))
            for text, count in zip(self.live, counts, strict=False)
        ]
        return [(text, count) for text, count in rows if count > 0]

    def step(self, counts, stop_after):
        rows = self.rows(counts)
        if not rows or len(self.launched) >= self.depth:
            return
        tokens = [text.tokens[text.scheduled : text.scheduled + count] for text, count in rows]
        if stop_after is not None and stop_after < len(rows):
            # A launch that fails half way is taken back and the same step runs again.
            txn, plan = Txn(), plan_of(self.number, rows)
            self.dispatcher.prepare(plan, txn)
            with pytest.raises(RuntimeError):
                self.model.run(plan, tokens, stop_after=stop_after)
            txn.rollback()
        txn, plan = Txn(), plan_of(self.number, rows)
        self.number += 1
        self.dispatcher.prepare(plan, txn)
        self.model.run(plan, tokens)
        txn.commit()
        for text, count in rows:
            text.scheduled += count
        self.launched.append((plan, rows))

    def take_back(self, counts):
        rows = self.rows(counts)
        if rows and len(self.launched) < self.depth:
            txn = Txn()
            self.dispatcher.prepare(plan_of(self.number, rows), txn)
            txn.rollback()

    def commit(self):
        if self.launched:
            plan, rows = self.launched.pop(0)
            self.dispatcher.update(plan, None)
            for text, count in rows:
                text.committed += count

    def leave(self, which, *, returns=False):
        if which < len(self.live):
            text = self.live.pop(which)
            self.dispatcher.free(text.id)
            self.dispatcher.free(text.id)  # twice is once
            if returns:
                self.admit(Text(text.id, text.tokens))

    def check(self):
        """The state that the newest launched step left is that of the tokens so far."""
        states = self.states
        assert states.available() == NUM_SEATS - len(self.live)
        newest = {}
        for plan, rows in self.launched:
            slots = states.slots(plan) if plan in states._in_flight else None
            for row, (text, _) in enumerate(rows):
                if slots is not None and text in self.live:
                    newest[text.id] = int(slots.writes[row])
        for text in self.live:
            if text.id in newest:
                assert self.model.at(newest[text.id]).tolist() == reference(text.tokens[: text.scheduled])

    def finish(self):
        """Run everybody to the end, one step after the other, and compare."""
        while self.launched:
            self.commit()
        while any(text.scheduled < len(text.tokens) for text in self.live):
            self.step([3] * NUM_SEATS, None)
            self.check()
            self.commit()
        ends = {}
        for text in self.live:
            plan = plan_of(self.number, [(text, 1)])
            self.number += 1
            txn = Txn()
            self.dispatcher.prepare(plan, txn)
            ends[text.id] = self.model.at(int(self.states.slots(plan).reads[0])).tolist()
            txn.rollback()
            assert ends[text.id] == reference(text.tokens)


@settings(max_examples=200)
@given(ACTS, st.integers(0, 2))
def test_every_text_ends_in_the_state_of_its_tokens(acts, lookahead_steps):
    bench = Bench(lookahead_steps)
    for name, *given_ in acts:
        match name:
            case "arrive":
                bench.arrive(*given_)
            case "step":
                bench.step(*given_)
            case "take back":
                bench.take_back(*given_)
            case "commit":
                bench.commit()
            case "leave":
                bench.leave(*given_)
            case "return":
                bench.leave(*given_, returns=True)
        bench.check()
    bench.finish()
    for text in list(bench.live):
        bench.leave(0)
        assert text not in bench.live
    assert bench.states.available() == bench.states.capacity() == NUM_SEATS


def test_ten_thousand_steps_leave_nothing_behind():
    """14, 15: seats and steps in flight are what they were, whoever came and went."""
    bench = Bench(1)
    rng = np.random.default_rng(1)
    for _ in range(10_000):
        if rng.random() < 0.1:
            bench.arrive(rng.integers(0, 9, rng.integers(1, 30)).tolist())
        bench.step(rng.integers(0, 4, NUM_SEATS).tolist(), None)
        if rng.random() < 0.7:
            bench.commit()
        if bench.live and rng.random() < 0.08:
            bench.leave(int(rng.integers(len(bench.live))))
        bench.check()
    while bench.live:
        bench.leave(0)
    assert bench.states.stats()["available"] == NUM_SEATS
    assert not bench.states._in_flight


def test_padding_touches_nobody():
    """36: slots of sequences are never the sentinel, whatever runs."""
    bench = Bench(0)
    for tokens in ([1], [2], [3]):
        bench.arrive(tokens)
    before = bench.model.view[1:].copy()
    plan = StepPlan.of(0, [])
    bench.dispatcher.prepare(plan, Txn())
    bench.model.run(plan, [])
    assert (bench.model.view[1:] == before).all()
    bench.step([1, 1, 1], None)
    slots = bench.states.slots(bench.launched[0][0])
    assert SENTINEL not in {*slots.reads.tolist(), *slots.writes.tolist()}


def test_a_seat_starts_from_zeros_whatever_it_held():
    bench = Bench(0)
    bench.model.view[:] = 0xAA
    bench.arrive([1, 2])
    bench.step([1, 0, 0], None)
    bench.check()
    bench.commit()
    bench.leave(0)
    bench.arrive([5, 6, 7])
    bench.finish()


def test_what_makes_no_sense_is_refused_before_anything_changes():
    bench = Bench(0)
    bench.arrive([1, 2, 3])
    text, states = bench.live[0], bench.states

    def refused(plan, told):
        with pytest.raises(ResourceError, match=told):
            bench.dispatcher.prepare(plan, Txn())

    item = StepItem(request_id=text.id, start=0, count=1, samples=False)
    refused(StepPlan.of(0, [item, item]), "twice")
    refused(StepPlan.of(0, [StepItem(request_id=text.id, start=1, count=1, samples=False)]), "taken in 0")
    arrays = {"starts": np.zeros(1, np.int64), "counts": np.ones(1, np.int64), "samples": np.zeros(1, np.bool_)}
    refused(StepPlan.build(0, [text.id], **arrays, drafts=np.ones(1, np.int64)), "drafts")
    bench.step([1, 0, 0], None)
    refused(plan_of(9, [(text, 1)]), "more than 1 steps")
    with pytest.raises(ResourceError, match="no state"):
        states.prepare(StepPlan.of(0, [StepItem(request_id="?", start=0, count=1, samples=False)]), Txn())
    view = ProbeRequest(id="late", num_prompt_tokens=3, num_computed_tokens=2, max_total_tokens=4)
    with pytest.raises(ResourceError, match="its state is not kept"):
        bench.dispatcher.admit(view)
    assert states.available() == NUM_SEATS - 1
    bench.check()


def test_the_second_slots_are_claimed_and_the_whole_is_booked():
    states, _ = make(num_seats=4, lookahead_steps=1)
    limits = Limits(max_seq_len=8, max_batch_size=4, max_num_tokens=8, max_logits_rows=4, lookahead_steps=1)
    (claim,) = states.claims(limits)
    assert claim.cost.bytes + 4 * states.slot_bytes == states.num_slots * states.slot_bytes == states.buffer.size_bytes
    states.close()
    states.close()
    with pytest.raises(ResourceError, match="closed"):
        states.prepare(StepPlan.of(0, []), Txn())


def test_a_grant_is_one_state():
    states, dispatcher = make()
    view = ProbeRequest(id="a", num_prompt_tokens=2, max_total_tokens=3)
    assert states.remaining(view) == states.lifetime_need(view) == 1
    assert dispatcher.admit(view)["states"] == Grant(units=1)
    assert states.remaining(view) == 0
