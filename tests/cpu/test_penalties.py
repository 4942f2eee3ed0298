"""Penalty tables: what they count, when they are allocated, and that nothing is half done where there is no memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.buffers import BufferManager, Device, Stream
from tonnage.config import LimitKnobs, Limits
from tonnage.costs.models import find_config
from tonnage.device.fault import FaultDriver
from tonnage.device.host import HostDriver
from tonnage.engine.sampling import count
from tonnage.engine.sampling.rows import Penalties
from tonnage.errors import BufferInUse, BufferOOM, ResourceError
from tonnage.layout import penalty_table_bytes
from tonnage.ledger import Ledger
from tonnage.planner import claims_for, resolve_limits
from tonnage.planner.claims import unlisted
from tonnage.resources.base import Deferral, Grant, Refusal
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.penalties import PenaltyTables
from tonnage.resources.slots import SlotManager
from tonnage.sampling import SamplingParams
from tonnage.step import StepPlan, Txn
from tonnage.terms import Fixed, Lifetime, LineKind

MIB, SLOTS, VOCAB = 2**20, 3, 50
PENALISED = SamplingParams(presence_penalty=0.5)


@dataclass
class Request:
    id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams = PENALISED
    num_computed_tokens: int = 0
    max_total_tokens: int = 1000


@dataclass
class Bench:
    enabled: bool = True
    capacity: int = 4 * MIB
    fault: FaultDriver = field(init=False)

    def __post_init__(self) -> None:
        self.host = HostDriver(self.capacity, page_bytes=4096)
        self.fault = FaultDriver(self.host)
        self.ledger = Ledger(0, self.capacity)
        buffers = BufferManager(Stream(Device(self.fault)), ledger=self.ledger, owner="penalties")
        self.slots = SlotManager(SLOTS)
        self.tables = PenaltyTables(
            self.slots, vocab_size=VOCAB, num_slots=SLOTS, buffers=buffers, enabled=self.enabled
        )
        self.dispatcher = Dispatcher([self.tables, self.slots])

    def admit(self, request: Request) -> object:
        answer = self.dispatcher.admit(request)
        return answer if isinstance(answer, Deferral) else answer["penalties"]

    def update(self, **drawn: int) -> None:
        """A step drew these: as the sampler counts them, for the rows whose requests have penalties."""
        rows = np.array([row for row, name in enumerate(drawn) if name in self.tables._rows], np.int64)
        if rows.size:
            slots = np.array([self.slots.slot_of(name) for name in drawn if name in self.tables._rows], np.int64)
            none = np.zeros(rows.size)
            asked = Penalties(rows=rows, slots=slots, repetition=none, presence=none, frequency=none)
            count(torch.tensor(list(drawn.values())), asked, self.tables.tables())

    def row(self, name: str) -> tuple[dict[int, int], set[int]]:
        """(how often each token was generated, which tokens the prompt has) as the tables have it."""
        counts, seen = (table[self.slots.slot_of(name)] for table in self.tables.tables())
        return {t: int(counts[t]) for t in counts.nonzero().flatten().tolist()}, set(seen.nonzero().flatten().tolist())

    def close(self) -> None:
        self.dispatcher.close()
        self.dispatcher.close()
        assert self.ledger.accounted_bytes == 0
        assert self.host.close() == ()


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


def request(name: str = "a", *, prompt=(1, 2, 2), output=(), params: SamplingParams = PENALISED) -> Request:
    return Request(id=name, token_ids=[*prompt, *output], num_prompt_tokens=len(prompt), params=params)


def test_a_row_holds_prompt_and_output_apart(bench):
    assert bench.admit(request(prompt=(1, 2, 2, 7), output=(7, 9, 9))) == Grant(units=1)
    assert bench.row("a") == ({7: 1, 9: 2}, {1, 2, 7})
    bench.update(a=9)
    bench.update(a=1)
    assert bench.row("a") == ({1: 1, 7: 1, 9: 3}, {1, 2, 7})


def test_ids_outside_the_vocabulary_are_dropped(bench):
    bench.admit(request(prompt=(VOCAB, -1, 10**9, 3), output=(VOCAB, -7, 3)))
    assert bench.row("a") == ({3: 1}, {3})


def test_a_slot_taken_again_has_nothing_of_its_last_owner(bench):
    bench.admit(request("a", prompt=(1, 2), output=(3,)))
    bench.update(a=4)
    slot = bench.slots.slot_of("a")
    bench.dispatcher.free("a")
    bench.admit(request("b", prompt=(5,)))
    assert bench.slots.slot_of("b") == slot
    assert bench.row("b") == ({}, {5})


def test_the_first_request_with_penalties_allocates_and_the_others_nothing(bench):
    assert bench.admit(request("plain", params=SamplingParams(temperature=1.0))) == Grant(units=0)
    bench.update(plain=3)
    assert (bench.tables.tables(), bench.ledger.accounted_bytes, bench.fault.num_calls) == (None, 0, 0)
    for name in ("a", "b"):
        bench.admit(request(name))
    need = penalty_table_bytes(max_batch_size=SLOTS, vocab_size=VOCAB)
    (entry,) = bench.ledger.snapshot().entries
    assert (entry.owner, entry.line, entry.tag) == ("penalties", LineKind.TABLES, "penalties")
    assert bench.ledger.accounted_bytes == bench.tables.stats()["num_bytes"] == need == SLOTS * VOCAB * 5
    assert sum(table.nbytes for table in bench.tables.tables()) == need
    assert bench.fault.by_call["mem_alloc"] == 1
    bench.dispatcher.reset()
    assert bench.ledger.accounted_bytes == need
    assert bench.tables.stats() == {"capacity": 3, "available": 3, "used": 0, "num_bytes": need}


def test_what_it_claims_is_what_it_allocates_and_what_the_planner_lists(bench):
    limits = Limits(max_seq_len=8, max_batch_size=SLOTS, max_num_tokens=8, max_logits_rows=SLOTS)
    (claim,) = bench.tables.claims(limits)
    bench.admit(request())
    assert claim.cost == Fixed(bytes=bench.ledger.accounted_bytes)
    assert (claim.lifetime, claim.line, claim.can_disable, claim.applies) == (
        Lifetime.LAZY,
        LineKind.TABLES,
        True,
        True,
    )


@pytest.mark.parametrize("device_kind", ["cuda", "host"])
def test_the_planner_lists_the_same_claim(device_kind):
    config = find_config("smollm2")
    limits, _ = resolve_limits(config, LimitKnobs(), device_kind=device_kind)
    slots = SlotManager(limits.max_batch_size)
    tables = PenaltyTables(slots, vocab_size=config.vocab_size, num_slots=limits.max_batch_size, buffers=None)
    listed = claims_for(config, limits, device_kind=device_kind)
    assert unlisted(listed, tables.claims(limits)) == ()  # and of one cost, or it would raise


def test_switched_off_they_refuse_on_arrival():
    bench = Bench(enabled=False)
    assert (bench.tables.capacity(), bench.tables.available()) == (0, 0)
    assert bench.dispatcher.refusals(request()) == (Refusal(manager="penalties", unit="row", need=1, have=0),)
    assert bench.dispatcher.refusals(request(params=SamplingParams())) == ()
    assert bench.admit(request()) == Deferral(manager="penalties", need=1, have=0)
    assert bench.admit(request(params=SamplingParams())) == Grant(units=0)
    bench.close()


@pytest.mark.parametrize("params", [SamplingParams(repetition_penalty=1.1), SamplingParams(frequency_penalty=-1)])
def test_each_penalty_needs_a_row(bench, params):
    asked = request(params=params)
    assert bench.tables.lifetime_need(asked) == bench.tables.remaining(asked) == 1
    bench.admit(asked)
    assert (bench.tables.remaining(asked), bench.tables.available()) == (0, 2)


def test_no_memory_passes_through_and_leaves_everything_as_it_was(bench):
    bench.fault.arm(1, forever=True)  # a single failure is made good by asking again
    with pytest.raises(BufferOOM) as caught:
        bench.dispatcher.admit(request())
    bench.fault.arm(None)
    assert caught.value.size_bytes == SLOTS * VOCAB * 5
    assert (bench.tables.tables(), bench.ledger.accounted_bytes, bench.slots.available()) == (None, 0, SLOTS)
    assert bench.tables.stats() == {"capacity": 3, "available": 3, "used": 0, "num_bytes": 0}
    assert bench.admit(request()) == Grant(units=1)
    assert bench.row("a") == ({}, {1, 2})


def test_an_admission_rolled_back_leaves_no_row(bench):
    txn = Txn()
    bench.dispatcher.admit(request(), txn)
    txn.rollback()
    assert (bench.tables.available(), bench.slots.available()) == (SLOTS, SLOTS)
    bench.update(a=3)
    assert bench.admit(request()) == Grant(units=1)
    assert bench.row("a") == ({}, {1, 2})


def test_misuse_is_refused():
    bench = Bench()
    bench.admit(request())
    with pytest.raises(ResourceError, match="admitted twice"):
        bench.tables.admit(request(), Txn())
    with pytest.raises(ResourceError, match="4 slots for penalty tables of 3 rows"):
        PenaltyTables(SlotManager(4), vocab_size=VOCAB, num_slots=3, buffers=None)
    kept = bench.tables.tables()
    with pytest.raises(BufferInUse):
        bench.tables.close()
    del kept
    bench.tables.close()
    with pytest.raises(ResourceError, match="closed"):
        bench.tables.admit(request("b", params=SamplingParams()), Txn())
    with pytest.raises(ResourceError, match="closed"):
        bench.tables.prepare(StepPlan.of(0, ()), Txn())
    bench.close()


def test_tables_made_inside_a_forward_can_be_changed_outside(bench):
    with torch.inference_mode():
        bench.admit(request())
    bench.update(a=2)
    bench.admit(request("b"))
    assert bench.row("a") == ({2: 1}, {1, 2})


def test_given_back_they_are_made_anew_by_the_next_request(bench):
    bench.admit(request())
    with pytest.raises(ResourceError, match="1 requests have rows"):
        bench.tables.give_back()
    bench.update(a=2)
    bench.dispatcher.free("a")
    bench.tables.give_back()
    bench.tables.give_back()
    assert (bench.tables.tables(), bench.ledger.accounted_bytes) == (None, 0)
    assert bench.admit(request()) == Grant(units=1)
    assert bench.row("a") == ({}, {1, 2})


TOKENS = st.integers(-2, VOCAB + 2)
#: A request arrives, draws, is suspended, comes back, or ends: (which, what, token).
EVENTS = st.tuples(st.integers(0, 4), st.sampled_from(["draw", "draw", "toggle", "end"]), st.integers(0, VOCAB - 1))


@given(st.lists(st.lists(TOKENS, min_size=1, max_size=8), min_size=5, max_size=5), st.lists(EVENTS, max_size=60))
@settings(max_examples=60)
def test_tables_are_what_counting_the_tokens_gives_however_often_a_request_is_suspended(prompts, events):
    bench = Bench()
    known = {str(i): request(str(i), prompt=prompt, params=_params(i)) for i, prompt in enumerate(prompts)}
    running: set[str] = set()
    for which, what, token in events:
        name = str(which)
        one = known[name]
        if what == "draw" and name in running:
            drawn = {other: (token + 7 * int(other)) % VOCAB for other in sorted(running)}
            bench.update(**drawn)
            for other, its in drawn.items():
                known[other].token_ids.append(its)
        elif what == "toggle" and name not in running:
            if not isinstance(bench.admit(one), Deferral):
                running.add(name)
        elif what != "draw":
            bench.dispatcher.free(name)
            running.discard(name)
            if what == "end":
                known[name] = request(name, prompt=prompts[which], params=_params(which))
        for other in sorted(running):
            if known[other].params.has_penalties:
                assert bench.row(other) == _by_counting(known[other])
    bench.close()


def _params(which: int) -> SamplingParams:
    return SamplingParams() if which == 2 else SamplingParams(frequency_penalty=0.5)


def _by_counting(one: Request) -> tuple[dict[int, int], set[int]]:
    prompt, output = one.token_ids[: one.num_prompt_tokens], one.token_ids[one.num_prompt_tokens :]
    counts = Counter(token for token in output if 0 <= token < VOCAB)
    return dict(counts), {token for token in prompt if 0 <= token < VOCAB}
