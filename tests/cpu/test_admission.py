"""Admission policies: what they expect, how they learn, and what follows for who is admitted."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_cases import group

from tonnage.resources.admission import ADMISSIONS, FINISH_DECAY, SUSPENSION_STEP, Optimistic, ReserveAll
from tonnage.resources.base import Deferral
from tonnage.resources.cache import BlockCache
from tonnage.resources.dispatcher import Dispatcher
from tonnage.resources.kv import KVManager
from tonnage.resources.reference import Candidate, no_evict_pass, remaining_blocks
from tonnage.resources.slots import SlotManager
from tonnage.sampling import SamplingParams
from tonnage.step import StepItem, StepPlan, Txn


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def after(lengths, *, suspensions: int = 0, **fields) -> Optimistic:
    policy = Optimistic(**fields)
    for length in lengths:
        policy.finished(length)
    for _ in range(suspensions):
        policy.suspended()
    return policy


def expects(policy, generated: int, most: int) -> int:
    return int(policy.expected_new_tokens(ints(generated), ints(most))[0])


LENGTHS = st.lists(st.integers(0, 120), max_size=40)
MOST = st.integers(0, 100)


# -- what they expect --------------------------------------------------------------------------------------------------


def test_the_policies_by_name():
    assert {name: make().may_suspend for name, make in ADMISSIONS.items()} == {"optimistic": True, "reserve_all": False}
    assert all(make().name == name for name, make in ADMISSIONS.items())


# Finished: 10, 20, 30, 100. The imagined one goes on to the limit, and everybody is cut there.
BY_HAND = [
    (0, 200, (10 + 20 + 30 + 100 + 200) // 5),
    (10, 200, -(-(20 + 30 + 100 + 200) // 4)),  # 87.5
    (29, 200, (30 + 100 + 200) // 3),
    (30, 200, (100 + 200) // 2),
    (100, 200, 200),  # nobody got further
    (0, 40, (10 + 20 + 30 + 40 + 40) // 5),
    (0, 15, -(-(10 + 15 * 4) // 5)),
    (30, 31, 31),
    (5, 5, 5),
]


@pytest.mark.parametrize(("generated", "most", "expected"), BY_HAND)
def test_the_mean_of_those_that_got_further(generated, most, expected):
    assert expects(after([30, 10, 100, 20]), generated, most) == expected


def test_with_nothing_to_compare_with_the_most_is_expected():
    assert expects(Optimistic(), 0, 70) == 70
    assert expects(ReserveAll(), 0, 70) == 70


def test_a_single_short_answer_does_not_make_it_reckless():
    assert expects(after([1]), 0, 1000) == 501
    assert expects(after([1] * 99), 0, 1000) == 11


@given(LENGTHS, st.integers(0, 5), st.lists(st.tuples(MOST, MOST), min_size=1, max_size=10))
def test_equals_the_definition_written_out(lengths, suspensions, pairs):
    """One sequence at a time, in fractions."""
    pairs = [(min(pair), max(pair)) for pair in pairs]
    policy = after(lengths, suspensions=suspensions)
    found = policy.expected_new_tokens(ints(*(g for g, _ in pairs)), ints(*(m for _, m in pairs)))
    for (generated, most), value in zip(pairs, found.tolist(), strict=True):
        longer = [min(length, most) for length in lengths if length > generated] if generated < most else []
        mean = -(-Fraction(sum(longer) + most) // (len(longer) + 1))
        assert value == mean + int(policy.pessimism * (most - mean))


@given(LENGTHS, st.integers(0, 5), MOST, MOST, MOST)
def test_between_one_more_and_the_most_and_never_less_for_a_higher_limit(lengths, suspensions, a, b, c):
    generated, low, high = sorted((a, b, c))
    policy = after(lengths, suspensions=suspensions)
    for most in (low, high):
        assert min(generated + 1, most) <= expects(policy, generated, most) <= most
    assert expects(policy, generated, low) <= expects(policy, generated, high)
    assert expects(policy, generated, high) <= expects(policy, low, high)


def test_only_the_last_finished_count():
    policy = after([100] * 50 + [10, 20, 30], window=3)
    assert expects(policy, 0, 100) == 40
    policy.finished(60)
    assert expects(policy, 0, 100) == -(-(20 + 30 + 60 + 100) // 4)


# -- how they learn ----------------------------------------------------------------------------------------------------


@given(LENGTHS, MOST, MOST)
def test_enough_suspensions_reserve_everything(lengths, a, b):
    generated, most = sorted((a, b))
    policy = after(lengths, suspensions=int(1 / SUSPENSION_STEP))
    assert policy.pessimism == 1
    assert expects(policy, generated, most) == expects(ReserveAll(), generated, most) == most


def test_pessimism_is_raised_by_suspensions_and_fades_with_what_finishes():
    policy = after([10] * 100)
    told = [expects(policy, 0, 1000)]
    for _ in range(3):
        policy.suspended()
        told.append(expects(policy, 0, 1000))
    assert told == sorted(set(told))
    for _ in range(100):
        policy.finished(10)
        told.append(expects(policy, 0, 1000))
    assert told[3:] == sorted(told[3:], reverse=True)
    assert policy.pessimism == pytest.approx(3 * SUSPENSION_STEP * FINISH_DECAY**100)


def test_one_suspension_in_eight_finishes_is_where_optimism_ends():
    policy = Optimistic()
    for _ in range(100):
        policy.suspended()
        for _ in range(8):
            policy.finished(10)
    assert 0.75 < policy.pessimism < 1
    for _ in range(100):
        policy.suspended()
        for _ in range(80):
            policy.finished(10)
    assert policy.pessimism < 0.05


# -- who is admitted ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """A request of the loop below: it ends after ``length`` tokens, of the ``max_tokens`` it might generate."""

    id: str
    num_prompt_tokens: int
    length: int
    max_tokens: int
    num_computed_tokens: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    adapter_id: int | None = None

    def __post_init__(self):
        self.token_ids = [0] * self.num_prompt_tokens

    @property
    def max_total_tokens(self):
        return self.num_prompt_tokens + self.max_tokens

    @property
    def num_generated(self):
        return len(self.token_ids) - self.num_prompt_tokens


def pool_of(num_blocks: int, policy, *, num_slots: int = 8, reuse: bool = False) -> tuple[Dispatcher, KVManager]:
    slots = SlotManager(num_slots)
    kv = KVManager(
        BlockCache([group()], num_slots=num_blocks, reuse=reuse),
        block_tokens=4,
        max_seq_len=400,
        max_batch_size=num_slots,
        slots=slots,
        admission=policy,
    )
    return Dispatcher([slots, kv]), kv


@dataclass
class Served:
    num_steps: int = 0
    num_suspensions: int = 0
    num_rows: int = 0
    finished: list[str] = field(default_factory=list)


def serve(dispatcher: Dispatcher, policy, jobs: list[Job]) -> Served:
    """A scheduler in few lines: admit in order, suspend the youngest where blocks are missing, compute all there is."""
    waiting, running, told = list(jobs), [], Served()
    order = {job.id: i for i, job in enumerate(jobs)}
    while waiting or running:
        while running and dispatcher.short_of([j.id for j in running], ints(*(len(j.token_ids) for j in running))):
            assert policy.may_suspend, "a running request lacks a block"
            youngest = max(running, key=lambda job: order[job.id])
            running.remove(youngest)
            dispatcher.free(youngest.id)
            policy.suspended()
            youngest.num_computed_tokens = 0
            waiting = sorted([youngest, *waiting], key=lambda job: order[job.id])
            told.num_suspensions += 1
        while waiting and not isinstance(answer := dispatcher.admit(waiting[0]), Deferral):
            waiting[0].num_computed_tokens = answer["kv"].cached_tokens
            running.append(waiting.pop(0))
        items = [
            StepItem(
                request_id=job.id,
                start=job.num_computed_tokens,
                count=len(job.token_ids) - job.num_computed_tokens,
                samples=True,
            )
            for job in running
        ]
        plan, txn = StepPlan.of(told.num_steps, items), Txn()
        dispatcher.prepare(plan, txn)
        txn.commit()
        dispatcher.committed()
        dispatcher.update(plan, None)
        told.num_steps += 1
        told.num_rows += len(items)
        for job in list(running):
            job.num_computed_tokens = len(job.token_ids)
            job.token_ids.append(0)
            if job.num_generated == job.length:
                running.remove(job)
                dispatcher.free(job.id)
                policy.finished(job.length)
                told.finished.append(job.id)
    return told


JOBS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=15)


@given(JOBS, st.integers(15, 40), st.sampled_from([Optimistic, ReserveAll]), st.booleans())
def test_everybody_finishes_and_under_reservation_nobody_is_ever_short(rows, num_blocks, make, reuse):
    """Invariant 16, for any order of arrivals and any lengths; and no policy leaves anybody behind.

    With ``reuse`` all texts begin alike, so blocks are shared and their claims must not be counted on twice.
    """
    jobs = [Job(str(i), prompt, min(length, most), most) for i, (prompt, length, most) in enumerate(rows)]
    policy = make()
    dispatcher, kv = pool_of(num_blocks, policy, reuse=reuse)
    told = serve(dispatcher, policy, jobs)
    assert sorted(told.finished) == sorted(job.id for job in jobs)
    assert kv.available() == num_blocks
    assert told.num_suspensions == 0 or make is Optimistic


@given(JOBS, st.integers(15, 40), st.data())
def test_reserving_admits_at_least_where_the_reference_does(rows, num_blocks, data):
    """The reference's no-evict rule over prompt + new tokens, over the same running requests and free blocks."""
    dispatcher, kv = pool_of(num_blocks, ReserveAll())
    running: list[Job] = []
    for i, (prompt, _, most) in enumerate(rows):
        job = Job(str(i), prompt, most, most)
        needs = [
            remaining_blocks(
                prompt_tokens=other.num_prompt_tokens,
                new_tokens=other.max_tokens,
                block_tokens=4,
                allocated_blocks=kv.block_ids(other.id).size,
            )
            for other in running
        ]
        theirs = no_evict_pass(
            [Candidate(id=other.id, needs=(need,)) for other, need in zip(running, needs, strict=True)],
            [Candidate(id="new", needs=(remaining_blocks(prompt_tokens=prompt, new_tokens=most, block_tokens=4),))],
            free_blocks=[kv.cache.num_free],
            max_requests=8,
        )
        admitted = not isinstance(dispatcher.admit(job), Deferral)
        assert admitted or not theirs
        if not admitted:
            continue
        running.append(job)
        count = data.draw(st.integers(0, kv.kv_tokens(job)))
        if count:
            plan = StepPlan.of(i, [StepItem(request_id=job.id, start=0, count=count, samples=False)])
            dispatcher.prepare(plan, Txn())


@given(JOBS, LENGTHS, st.integers(0, 4))
def test_an_optimist_admits_whoever_reservation_does(rows, lengths, suspensions):
    (careful, _), (hopeful, _) = pool_of(20, ReserveAll()), pool_of(20, after(lengths, suspensions=suspensions))
    for i, (prompt, length, most) in enumerate(rows):
        job = Job(str(i), prompt, length, most)
        if isinstance(careful.admit(job), Deferral):
            break
        assert not isinstance(hopeful.admit(job), Deferral)


def test_short_answers_let_more_run_at_once():
    """200 requests that may generate 100 tokens and stop after 5."""
    told = {}
    for make in (ReserveAll, Optimistic):
        policy = make()
        dispatcher, _ = pool_of(100, policy, num_slots=64)
        told[make] = serve(dispatcher, policy, [Job(str(i), 8, 5, 100) for i in range(200)])
    assert told[Optimistic].num_suspensions == 0
    assert told[Optimistic].num_steps < told[ReserveAll].num_steps / 3


class Refill(ReserveAll):
    """The reference's maximum utilization: whoever fits for one step runs."""

    may_suspend = True

    def expected_new_tokens(self, generated, most):
        return np.minimum(generated + 1, most)


def test_when_lengths_change_for_the_worse_it_stops_suspending():
    """100 short answers, then 60 that go on to the limit of 100 tokens: each of those may be misjudged about once,
    where always filling the pool computes most of them again and again."""
    told = {}
    for make in (Optimistic, Refill):
        policy = make()
        dispatcher, _ = pool_of(150, policy, num_slots=64)
        jobs = [Job(f"short{i}", 8, 5, 100) for i in range(100)] + [Job(f"long{i}", 8, 100, 100) for i in range(60)]
        told[make] = serve(dispatcher, policy, jobs)
    assert 0 < told[Optimistic].num_suspensions <= 60
    assert told[Refill].num_suspensions > 4 * told[Optimistic].num_suspensions
