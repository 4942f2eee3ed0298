"""Recurrent states against a sequential reference: whatever is rolled back, retried or late, each text has its state.

The simulated model mixes a token into a state so that any order but the right one, a token twice, and any other
sequence's state give another result. It runs on a driver whose fills and kernels wait in a queue, as on a real stream,
and before a kernel reads anything it spoils all slots that it is to write. Each kernel has rows of padding.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tonnage.budget.pool import group_prices
from tonnage.buffers import BufferManager, Device, Stream
from tonnage.config import Limits
from tonnage.device.decorator import DriverDecorator
from tonnage.device.fault import FaultDriver
from tonnage.device.host import HostDriver
from tonnage.errors import BufferInUse, BufferOOM, DriverError, ResourceError
from tonnage.layout import KVGroup, KVGroupKind, KVLayout, KVOrder, Part
from tonnage.ledger import Ledger
from tonnage.resources.base import Deferral, Grant, ProbeRequest
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.slots import SlotManager
from tonnage.resources.states import SENTINEL, StateManager
from tonnage.sampling import SamplingParams
from tonnage.step import StepItem, StepPlan, Txn
from tonnage.terms import LineKind
from tonnage.units import MiB

NUM_SEATS = 3
#: Words of 8 bytes that each group keeps, as the model sees them.
WORDS = (3, 5)
NOISE = np.uint64(0xDEADBEEFDEADBEEF)


def group(name, *parts, kind=KVGroupKind.STATE, num_bytes=None):
    last = parts[-1] if parts else None
    return KVGroup(
        name=name, kind=kind, layers=(0,), window=None, block_tokens=16 if kind is KVGroupKind.FULL else 0,
        block_bytes=num_bytes or last.offset_bytes + last.num_bytes, parts=parts,
    )  # fmt: skip


def layout(*groups):
    return KVLayout(slab_bytes=max(one.block_bytes for one in groups), order=KVOrder.BLOCK_MAJOR, groups=groups)


LAYOUT = layout(
    group("full", kind=KVGroupKind.FULL, num_bytes=512),
    group(
        "state-1",
        Part(name="ssm", dtype="float32", shape=(1, 2, 2), offset_bytes=0),
        Part(name="conv", dtype="bfloat16", shape=(1, 4), offset_bytes=16),
    ),
    group("state-2", Part(name="ssm", dtype="float32", shape=(1, 10), offset_bytes=0)),
)


def mix(state, token):
    """One token into a hash over 8 words: neither commutative nor blind to how often."""
    return (state * np.uint64(6364136223846793005) + np.uint64(token) + np.uint64(1442695040888963407)) ^ (
        np.roll(state, 1) >> np.uint64(17)
    )


@dataclass(eq=False)
class Text:
    """A request with the tokens that it will ever have; ``known`` are those the next steps may compute."""

    id: str
    tokens: list[int]
    scheduled: int = 0
    states: list = field(default_factory=lambda: [np.zeros(sum(WORDS), np.uint64)])

    def state(self, num_tokens):
        """The reference: one token after the other, from zeros."""
        while len(self.states) <= num_tokens:
            self.states.append(mix(self.states[-1], self.tokens[len(self.states) - 1]))
        return self.states[num_tokens]


class QueueDriver(DriverDecorator):
    """Fills wait in ``queue`` until somebody runs it."""

    queue: deque

    def __init__(self, driver):
        super().__init__(driver)
        self.queue = deque()

    def _around(self, call):
        if call == "fill":
            return lambda *args, **kw: self.queue.append(lambda: self.wrapped.fill(*args, **kw))
        return None


class Memory:
    """The manager's bytes, as the model sees them."""

    def __init__(self, states):
        size = states.num_slots * states.slot_bytes
        raw = np.frombuffer((ctypes.c_uint8 * size).from_address(states.buffer.address), np.uint8)
        self.words = raw.view(np.uint64).reshape(states.num_slots, -1)
        self.columns = np.concatenate([np.arange(WORDS[0]), states._groups["state-2"][1] // 8 + np.arange(WORDS[1])])

    def read(self, slot):
        return self.words[slot, self.columns]

    def write(self, slot, state):
        self.words[slot, self.columns] = state


def make(driver=None, *, num_seats=NUM_SEATS, of=LAYOUT):
    driver = driver or HostDriver(4 * MiB)
    ledger = Ledger(0, 4 * MiB)
    slots = SlotManager(num_seats)
    states = StateManager(slots, of, buffers=BufferManager(Stream(Device(driver)), ledger=ledger, owner="states"))
    return SimpleNamespace(slots=slots, states=states, dispatcher=Dispatcher([states, slots]), ledger=ledger)


@dataclass(eq=False)
class Ask:
    """A request of an engine, which is no stand-in."""

    id: str
    token_ids: list[int]
    num_prompt_tokens: int = 1
    num_computed_tokens: int = 0
    max_total_tokens: int = 100
    params: SamplingParams = field(default_factory=SamplingParams)
    adapter_id: int | None = None


def item(name, start, count):
    return StepItem(request_id=name, start=start, count=count, samples=False)


class World:
    """An engine in small: requests come and go, steps are launched, and land later or never."""

    def __init__(self, num_seats=NUM_SEATS):
        self.host = HostDriver(4 * MiB)
        self.driver = QueueDriver(self.host)
        made = make(self.driver, num_seats=num_seats)
        self.states, self.dispatcher, self.slots, self.ledger = made.states, made.dispatcher, made.slots, made.ledger
        self.memory = Memory(self.states)
        self.memory.words[:] = NOISE
        self.live: list[Text] = []
        self.launched: deque[StepPlan] = deque()
        self.number = 0

    def arrive(self, tokens):
        self.number += 1
        self.admit(Text(f"t{self.number}", list(tokens)))

    def admit(self, text, txn=None):
        answer = self.dispatcher.admit(Ask(text.id, text.tokens), txn)
        assert isinstance(answer, Deferral) == (len(self.live) == self.slots.capacity())
        if isinstance(answer, dict):
            text.scheduled = 0
            self.live.append(text)
        return answer

    def rows(self, counts):
        wanted = ((text, min(count, len(text.tokens) - text.scheduled)) for text, count in zip(self.live, counts))  # noqa: B905
        return [(text, count) for text, count in wanted if count > 0]

    def prepare(self, rows, txn):
        self.number += 1
        plan = StepPlan.of(self.number, [item(text.id, text.scheduled, count) for text, count in rows])
        self.dispatcher.prepare(plan, txn)
        return plan

    def step(self, counts, *, num_pads=1, announce=True):
        """Prepared, launched and committed. Not ``announce``: nobody calls ``committed``."""
        rows, txn = self.rows(counts), Txn()
        plan = self.prepare(rows, txn)
        self.launch(plan, rows, num_pads)
        txn.commit()
        if announce:
            self.dispatcher.committed()
        for text, count in rows:
            text.scheduled += count
        self.launched.append(plan)

    def failing_step(self, counts, *, num_rows):
        """The launch fails after so many rows, with what it did left behind; a smaller step is not tried here."""
        rows, txn = self.rows(counts), Txn()
        plan = self.prepare(rows, txn)
        self.launch(plan, rows, 1, num_rows=num_rows)
        txn.rollback()

    def launch(self, plan, rows, num_pads, num_rows=None):
        slots = self.states.slots(plan, len(rows) + num_pads)
        spans = [(text, text.scheduled, text.scheduled + count) for text, count in rows]
        self.driver.queue.append(lambda: self.kernel(slots, spans, num_rows))

    def kernel(self, slots, spans, num_rows):
        """``num_rows`` of them are computed, all by default."""
        reads, writes = slots.reads.tolist(), slots.writes.tolist()
        mine = writes[: len(spans)]
        assert len(set(mine)) == len(mine), "two rows write one slot"
        assert SENTINEL not in {*mine, *reads[: len(spans)]}
        assert {*reads[len(spans) :], *writes[len(spans) :]} <= {SENTINEL}
        before = self.memory.words.copy()
        self.memory.words[writes] = NOISE
        for row, (text, start, end) in list(enumerate(spans))[:num_rows]:
            state = self.memory.read(reads[row])
            assert state.tolist() == text.state(start).tolist(), (text.id, start)
            for token in text.tokens[start:end]:
                state = mix(state, token)
            self.memory.write(writes[row], state)
        others = np.setdiff1d(np.arange(self.states.num_slots), writes)
        assert (self.memory.words[others] == before[others]).all()

    def drain(self):
        while self.driver.queue:
            self.driver.queue.popleft()()

    def land(self, *, is_told=True):
        """The oldest launched step; its work is done by then. Not ``is_told``: nobody calls ``update``."""
        plan = self.launched.popleft()
        if is_told:
            self.dispatcher.update(plan, None)

    def leave(self, which):
        text = self.live.pop(which)
        self.dispatcher.free(text.id)
        self.dispatcher.free(text.id)  # 15: twice is once
        return text

    def check(self):
        """The stream has come to its end: fronts hold what the sequential reference has."""
        self.drain()
        for text in self.live:
            found = self.memory.read(self.states.front(text.id))
            assert found.tolist() == text.state(text.scheduled).tolist(), text.id

    def close(self):
        """15: every count is what it was, and the memory is given back."""
        while self.live:
            self.leave(-1)
        while self.launched:
            self.land()
        self.drain()
        stats = self.states.stats()
        assert stats["available"] == stats["capacity"] == self.slots.available()
        assert (stats["used"], stats["open_steps"]) == (0, 0)
        del self.memory
        self.dispatcher.close()
        self.dispatcher.close()
        assert self.ledger.accounted_bytes == 0
        assert self.host.close() == ()


TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=12)
COUNTS = st.lists(st.integers(0, 4), min_size=NUM_SEATS, max_size=NUM_SEATS)


class StatesMachine(RuleBasedStateMachine):
    """13, 15, 36, 45: any interleaving of arrivals, chunks, failures, suspensions and steps that land late."""

    def __init__(self):
        super().__init__()
        self.world = World()

    @rule(tokens=TOKENS)
    def arrives(self, tokens):
        self.world.arrive(tokens)

    @rule(tokens=TOKENS)
    def arrives_in_a_step_that_is_taken_back(self, tokens):
        txn, world = Txn(), self.world
        if isinstance(world.admit(Text("taken back", tokens), txn), dict):
            world.prepare([(world.live[-1], 1)], txn)
            txn.rollback()
            world.live.pop()

    @precondition(lambda self: len(self.world.launched) < 2)
    @rule(counts=COUNTS, num_pads=st.integers(0, 3), announce=st.booleans())
    def step(self, counts, num_pads, announce):
        self.world.step(counts, num_pads=num_pads, announce=announce)

    @rule(counts=COUNTS)
    def prepared_and_taken_back(self, counts):
        txn = Txn()
        self.world.prepare(self.world.rows(counts), txn)
        txn.rollback()

    @rule(counts=COUNTS, num_rows=st.integers(0, NUM_SEATS))
    def launch_fails(self, counts, num_rows):
        self.world.failing_step(counts, num_rows=num_rows)

    @precondition(lambda self: self.world.launched)
    @rule(is_told=st.booleans())
    def lands(self, is_told):
        self.world.land(is_told=is_told)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), returns=st.booleans())
    def leaves(self, data, returns):
        """Cancelled or suspended, perhaps with a step in flight; who returns computes its text from the start."""
        text = self.world.leave(data.draw(st.integers(0, len(self.world.live) - 1)))
        if returns:
            self.world.admit(text)

    @rule()
    def the_stream_comes_to_its_end(self):
        self.world.check()

    @invariant()
    def books_balance(self):
        states = self.world.states
        assert states.available() + len(self.world.live) == states.capacity() == NUM_SEATS
        fronts = [states.front(text.id) for text in self.world.live]
        assert len(set(fronts)) == len(fronts)
        assert SENTINEL not in fronts

    def teardown(self):
        self.world.check()
        self.world.close()


StatesMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50)
TestEveryTextHasItsState = StatesMachine.TestCase


def test_ten_thousand_steps_leave_nothing_behind():
    """14, 15: seats and steps are what they were at the start, whoever came and went; most steps land one behind."""
    world, rng = World(), np.random.default_rng(1)
    for _ in range(10_000):
        draw = rng.random()
        if draw < 0.15:
            world.arrive(rng.integers(0, 9, rng.integers(1, 30)).tolist())
        elif draw < 0.2:
            world.failing_step(rng.integers(0, 4, NUM_SEATS).tolist(), num_rows=int(rng.integers(NUM_SEATS)))
        world.step(rng.integers(0, 4, NUM_SEATS).tolist())
        if len(world.launched) > 1:
            world.land(is_told=rng.random() < 0.95)
        if world.live and rng.random() < 0.1:
            text = world.leave(int(rng.integers(len(world.live))))
            if rng.random() < 0.3:
                world.admit(text)
        if rng.random() < 0.5:
            world.check()
        assert len(world.states._open) <= 1
    world.close()


def test_a_step_ahead_reads_what_the_one_in_flight_writes():
    world = World()
    world.arrive(range(9))
    seen = []
    for _ in range(3):
        txn, rows = Txn(), world.rows([2])
        plan = world.prepare(rows, txn)
        slots = world.states.slots(plan)
        seen.append((int(slots.reads[0]), int(slots.writes[0])))
        world.launch(plan, rows, 0)
        txn.commit()
        rows[0][0].scheduled += 2
        world.launched.append(plan)
    (first, second), *later = seen
    assert later == [(second, first), (first, second)]
    world.check()
    world.close()


def test_the_same_step_is_run_again_after_a_failure():
    """45: the second try finds what the first one found, at the same places."""
    world = World()
    world.arrive([1, 2, 3])
    world.arrive([4, 5, 6])
    world.step([2, 1])
    for num_rows in (0, 1, 2):
        world.failing_step([1, 2], num_rows=num_rows)
    world.step([1, 2])
    world.check()
    world.close()


def test_whoever_sits_down_while_a_step_is_in_flight_starts_from_zeros():
    """The cancelled sequence's kernel still writes its slots, before the zeros of the next; landing changes nobody."""
    for num_before in (0, 1):  # the kernel writes either slot of the seat
        world = World(num_seats=1)
        world.arrive([1, 2, 3])
        for _ in range(num_before + 1):
            world.step([1])
        world.leave(0)
        world.arrive([7, 8])
        world.land()
        world.step([1])
        world.check()
        world.close()


def test_an_open_step_of_the_last_owner_spares_the_next():
    """Cancelled between ``prepare`` and the launch: what is written late goes where the new front is not."""
    for num_before in (0, 1):
        world = World(num_seats=1)
        world.arrive([1, 2, 3])
        for _ in range(num_before):
            world.step([1])
        txn, rows = Txn(), world.rows([1])
        plan = world.prepare(rows, txn)
        slots = world.states.slots(plan)
        world.leave(0)
        world.arrive([7, 8])
        world.drain()
        world.memory.words[slots.writes] = NOISE
        txn.commit()
        world.dispatcher.update(plan, None)
        world.check()
        world.step([1])
        world.check()
        world.close()


def test_an_undo_does_not_touch_one_of_the_same_name():
    world, txn = World(), Txn()
    world.admit(Text("a", [1, 2]), txn)
    world.leave(0)
    world.admit(Text("a", [3, 4]))
    txn.rollback()
    world.step([1])
    world.check()
    world.close()


def test_padding_is_of_the_sentinel_and_never_fewer_rows():
    """36: a step of padding alone writes nothing but the sentinel."""
    world = World()
    world.arrive([1])
    txn = Txn()
    plan = world.prepare([], txn)
    slots = world.states.slots(plan, 4)
    assert slots.reads.tolist() == slots.writes.tolist() == [SENTINEL] * 4
    assert slots.reads.dtype == slots.writes.dtype == np.int32
    plan = world.prepare(world.rows([1]), txn)
    assert len(world.states.slots(plan, 1).reads) == 1
    with pytest.raises(ResourceError, match="has 1 rows, more than 0"):
        world.states.slots(plan, 0)
    txn.rollback()
    world.close()


def refused(made, told, *items, drafts=None):
    plan = StepPlan.of(0, items)
    if drafts is not None:
        arrays = {"starts": plan.starts, "counts": plan.counts, "samples": plan.samples}
        plan = StepPlan.build(0, plan.request_ids, **arrays, drafts=np.array(drafts, np.int64))
    before = made.states.stats()
    with pytest.raises(ResourceError, match=told):
        made.states.prepare(plan, Txn())
    assert made.states.stats() == before


def test_what_makes_no_sense_is_refused_before_anything_changes():
    made = make()
    made.dispatcher.admit(Ask("a", [1, 2, 3]))
    refused(made, "twice", item("a", 0, 1), item("a", 0, 1))
    refused(made, "taken in 0", item("a", 1, 1))  # as if a prefix had been found for it
    refused(made, "taken in 0", item("a", 0, 0))
    refused(made, "states of drafts are not kept", item("a", 0, 3), drafts=[2])
    refused(made, "has no state", item("?", 0, 1))
    txn, plan = Txn(), StepPlan.of(1, [item("a", 0, 1)])
    made.states.prepare(plan, txn)
    refused(made, "whose transaction is open", item("a", 1, 1))
    txn.commit()
    refused(made, "taken in 1", item("a", 0, 1))
    with pytest.raises(ResourceError, match="not prepared"):
        made.states.slots(plan)
    with pytest.raises(ResourceError, match="admitted twice"):
        made.states.admit(Ask("a", [1]), Txn())
    with pytest.raises(ResourceError, match="without any"):
        make(of=layout(group("full", kind=KVGroupKind.FULL, num_bytes=512)))


def test_a_plan_whose_rows_have_no_drafts_is_prepared():
    made = make()
    made.dispatcher.admit(Ask("a", [1, 2, 3]))
    plan = StepPlan.of(0, [item("a", 0, 2)])
    arrays = {"starts": plan.starts, "counts": plan.counts, "samples": plan.samples}
    made.states.prepare(StepPlan.build(0, ["a"], **arrays, drafts=np.zeros(1, np.int64)), Txn())


def test_nobody_starts_in_the_middle_but_the_stand_ins_of_a_probe():
    """41: what the stand-in held is given back."""
    made = make()
    with pytest.raises(ResourceError, match="start at token 2, and its state is not kept"):
        made.dispatcher.admit(Ask("a", [1, 2, 3], num_computed_tokens=2))
    assert made.states.available() == made.slots.available() == NUM_SEATS
    probe = ProbeRequest(id="probe", num_prompt_tokens=1, num_computed_tokens=1, max_total_tokens=3)
    with made.dispatcher.holding([probe]):
        txn = Txn()
        made.dispatcher.prepare(StepPlan.of(0, [item("probe", 1, 1)]), txn)
        txn.rollback()
    assert made.states.available() == NUM_SEATS


def test_a_grant_is_one_state_and_the_next_waits():
    made = make(num_seats=1)
    request = Ask("a", [1])
    assert made.states.remaining(request) == made.states.lifetime_need(request) == 1
    assert made.dispatcher.admit(request)["states"] == Grant(units=1)
    assert made.states.remaining(request) == 0
    assert isinstance(made.dispatcher.admit(Ask("b", [1])), Deferral)
    assert made.dispatcher.refusals(Ask("b", [1])) == ()


def test_what_the_layout_prices_and_what_is_claimed_is_all_that_is_taken():
    made = make(num_seats=4)
    limits = Limits(max_seq_len=8, max_batch_size=4, max_num_tokens=8, max_logits_rows=4)
    (claim,) = made.states.claims(limits)
    prices = [one for one in group_prices(LAYOUT, limits=limits, unit=16) if one.kind is KVGroupKind.STATE]
    assert claim.cost.bytes + sum(price.used_bytes(0) for price in prices) == made.states.buffer.size_bytes
    (entry,) = made.ledger.snapshot().entries
    assert (entry.line, entry.requested_bytes) == (LineKind.KV, made.states.stats()["num_bytes"])


def test_arrays_are_seen_by_the_names_of_the_layout():
    made = make()
    made.dispatcher.admit(Ask("a", [1]))
    slot, memory = made.states.front("a"), Memory(made.states)
    ssm, conv = (made.states.tensor("state-1", name) for name in ("ssm", "conv"))
    other = made.states.tensor("state-2", "ssm")
    assert (ssm.shape, conv.shape, other.shape) == ((7, 1, 2, 2), (7, 1, 4), (7, 1, 10))
    ssm[slot], conv[slot], other[slot] = 1.0, 2.0, 3.0
    raw = memory.words[slot].tobytes()
    assert np.frombuffer(raw, np.float32, 4).tolist() == [1.0] * 4
    assert np.frombuffer(raw, np.uint16, 4, offset=16).tolist() == [0x4000] * 4  # 2.0 in bfloat16
    assert np.frombuffer(raw, np.float32, 10, offset=256).tolist() == [3.0] * 10
    assert not memory.words[np.arange(7) != slot].any()
    for names in (("state-1", "k"), ("full", "ssm")):
        with pytest.raises(ResourceError, match="no group"):
            made.states.tensor(*names)
    with pytest.raises(BufferInUse):
        made.states.close()
    del ssm, conv, other
    made.states.close()


def test_closed_means_closed():
    made = make()
    made.dispatcher.admit(Ask("a", [1]))
    made.dispatcher.close()
    made.dispatcher.close()
    assert made.ledger.accounted_bytes == 0
    made.states.free("a")
    for call in (
        lambda: made.states.admit(Ask("b", [1]), Txn()),
        lambda: made.states.prepare(StepPlan.of(0, []), Txn()),
        lambda: made.states.buffer,
    ):
        with pytest.raises(ResourceError, match="closed"):
            call()


def test_without_memory_there_is_no_manager_and_nothing_is_left():
    host = HostDriver(4 * MiB)
    fault = FaultDriver(host)
    for calls, error in ((frozenset({"mem_alloc"}), BufferOOM), (frozenset({"fill"}), DriverError)):
        fault.arm(1, calls=calls, forever=True)
        with pytest.raises(error):
            make(fault)
    fault.arm(None)
    assert host.close() == ()


def test_an_admission_whose_zeros_fail_takes_nothing():
    """13: the seat is free again, and the next one gets it clean."""
    fault = FaultDriver(HostDriver(4 * MiB))
    made = make(fault)
    before = made.states.stats()
    fault.arm(1, calls=frozenset({"fill"}))
    with pytest.raises(DriverError):
        made.dispatcher.admit(Ask("a", [1]))
    assert made.states.stats() == before
    assert made.slots.available() == NUM_SEATS
    assert isinstance(made.dispatcher.admit(Ask("a", [1])), dict)
