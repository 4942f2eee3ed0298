"""Scheduling on the stub engine: chunks, mixing, priorities, suspension, and that every step keeps its bounds."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.engine import Finish
from tonnage.engine.events import EventKind
from tonnage.engine.stub import stub_engine
from tonnage.errors import InvalidSetting, RequestRefused
from tonnage.sampling import SamplingParams

BLOCK = 16


class Log:
    """A stub engine with everything it tells."""

    def __init__(self, **limits):
        self.engine = stub_engine(**{"kv_tokens": 4096, "max_seq_len": 1024, "max_batch_size": 32, **limits})
        self.events = []
        self.engine.observe = self.events.append

    def ask(self, name, length, max_tokens, **params):
        asked = SamplingParams(max_tokens=max_tokens, seed=params.pop("seed", len(name) + length), **params)
        self.engine.submit(self.engine.request(name, asked, token_ids=[1 + i % 200 for i in range(length)]))

    def drain(self, most=100_000):
        done = []
        for _ in range(most):
            if not self.engine.has_work:
                return {completion.request_id: completion for completion in done}
            done += self.engine.step()
        raise AssertionError("it does not come to an end")

    def steps(self):
        """Rows of each step, as (request, start, count)."""
        found = defaultdict(list)
        for event in self.events:
            if event.kind is EventKind.COMPUTED:
                found[event.step].append((event.request_id, event.start, event.count))
        return [found[step] for step in sorted(found)]

    def of_kind(self, kind):
        return [event.request_id for event in self.events if event.kind is kind]


def tokens(done):
    return {name: completion.token_ids for name, completion in done.items()}


@pytest.mark.parametrize("chunk_tokens", [None, 16, 64, 100, 512])
def test_chunks_end_on_block_boundaries(chunk_tokens):
    log = Log(chunk_tokens=chunk_tokens, max_num_tokens=200)
    for i in range(6):
        log.ask(f"r{i}", 130 + 71 * i, 20)
    log.drain()
    for rows in log.steps():
        for name, start, count in rows:
            prompt = 130 + 71 * int(name[1:])
            assert (start + count) % BLOCK == 0 or start + count >= prompt


def test_a_long_prompt_never_keeps_a_decode_from_its_next_token():
    log = Log(max_num_tokens=256)
    for i in range(4):
        log.ask(f"d{i}", 10, 60)
    log.engine.step()
    for i in range(3):
        log.ask(f"long{i}", 900, 4)
    log.drain()
    for rows in log.steps()[1:60]:
        decodes = [row for row in rows if row[0].startswith("d")]
        prefill = sum(count for name, start, count in rows if name.startswith("long") and start < 900)
        assert len(decodes) == 4
        assert prefill <= 64


def test_alone_a_prompt_takes_the_whole_step():
    log = Log(max_num_tokens=256)
    log.ask("long", 900, 2)
    log.drain()
    assert [count for ((_, _, count),) in log.steps()] == [256, 256, 256, 132, 1]


def test_without_chunks_prompts_are_computed_whole():
    log = Log(chunk_tokens="none", max_num_tokens=300)
    for i in range(5):
        log.ask(f"r{i}", 200 + i, 8)
    log.drain()
    first = {name: count for rows in log.steps() for name, start, count in rows if start == 0}
    assert first == {f"r{i}": 200 + i for i in range(5)}
    with pytest.raises(RequestRefused, match="chunked prefill is off"):
        log.ask("no", 301, 1)


def test_a_chunk_size_that_makes_no_sense_is_refused():
    for wrong in (0, -3, True, "all"):
        with pytest.raises(InvalidSetting, match="chunk_tokens"):
            Log(chunk_tokens=wrong)


def test_prefill_moves_even_where_decodes_leave_less_than_a_block():
    log = Log(max_batch_size=4, max_num_tokens=4)
    for i in range(3):
        log.ask(f"d{i}", 1, 200)
    log.ask("p", 40, 2)
    done = log.drain()
    assert {completion.finish_reason for completion in done.values()} == {Finish.LENGTH}
    assert log.of_kind(EventKind.ENDED)[0] == "p"


def test_larger_priorities_start_first():
    log = Log(max_batch_size=1)
    log.ask("running", 10, 5)
    log.engine.step()
    for name, priority in (("low", -1), ("middle", 0), ("high", 5), ("middle too", 0)):
        log.ask(name, 10, 5, priority=priority)
    log.drain()
    assert log.of_kind(EventKind.ADMITTED) == ["running", "high", "middle", "middle too", "low"]


def test_a_waiting_request_goes_before_a_running_prompt_of_lower_priority():
    log = Log(max_num_tokens=256, kv_tokens=16384, max_seq_len=8192)
    log.ask("decodes", 10, 200)
    log.engine.step()
    log.ask("long", 6000, 4, priority=-5)
    for _ in range(3):
        log.engine.step()
    log.ask("equal", 10, 4, priority=-5)
    log.ask("urgent", 10, 4, priority=100)
    before = len(log.steps())
    log.drain()
    first = {}
    for number, rows in enumerate(log.steps()):
        for name, _, _ in rows:
            first.setdefault(name, number)
    assert first["urgent"] == before
    assert first["equal"] > before + 50


def test_running_prompts_are_computed_in_the_order_of_their_priorities():
    log = Log(max_batch_size=8, max_num_tokens=32)
    for name, priority in (("low", 0), ("high", 1)):
        log.ask(name, 200, 4, priority=priority)
        log.engine.step()
    log.drain()
    ended = {
        name: number
        for number, rows in enumerate(log.steps())
        for name, start, count in rows
        if start < 200 <= start + count
    }
    assert ended["high"] < ended["low"]


def test_a_running_prompt_is_passed_a_bounded_number_of_times():
    """Urgent prompts without end, each as large as a step: the patient one is computed all the same."""
    log = Log(max_batch_size=4, max_num_tokens=64, kv_tokens=16384, max_seq_len=512)
    log.ask("patient", 300, 2, priority=-1)
    log.engine.step()
    for i in range(1200):
        log.ask(f"urgent{i}", 64, 1, priority=5)
        log.engine.step()
        if "patient" in log.of_kind(EventKind.ENDED):
            break
    assert i < 300


# -- suspension ----------------------------------------------------------------------------------------------------


def crowded(**limits):
    """Requests that ended early teach the policy to expect little; then come longer ones than the pool holds."""
    log = Log(kv_tokens=640, max_seq_len=256, max_num_tokens=512, **limits)
    for i in range(40):
        log.ask(f"short{i}", 8, 4)
    log.drain()
    for i in range(12):
        log.ask(f"long{i:02}", 40, 150)
    return log


def test_a_pool_that_runs_short_suspends_and_every_token_stays_the_same():
    log = crowded()
    roomy = Log(kv_tokens=16384, max_num_tokens=512)
    for i in range(12):
        roomy.ask(f"long{i:02}", 40, 150)
    done, truth = log.drain(), roomy.drain()
    assert log.of_kind(EventKind.SUSPENDED)
    assert not roomy.of_kind(EventKind.SUSPENDED)
    assert tokens(done) == tokens(truth)
    assert sum(completion.num_suspended for completion in done.values()) == len(log.of_kind(EventKind.SUSPENDED))
    assert log.engine.result().suspensions == len(log.of_kind(EventKind.SUSPENDED))
    assert all(done[name].waited for name in set(log.of_kind(EventKind.SUSPENDED)))


def test_the_youngest_is_suspended_and_the_oldest_never():
    log = crowded()
    log.drain()
    running, age = [], {}
    for event in log.events:
        match event.kind:
            case EventKind.ARRIVED:
                age[event.request_id] = len(age)
            case EventKind.ADMITTED:
                running.append(event.request_id)
            case EventKind.SUSPENDED:
                assert event.request_id == max(running, key=age.__getitem__)
                assert event.request_id != min(running, key=age.__getitem__)
                running.remove(event.request_id)
            case EventKind.ENDED:
                running.remove(event.request_id)


def test_the_lower_priority_is_suspended_first():
    log = Log(kv_tokens=256, max_seq_len=256, max_num_tokens=512)
    for i in range(40):
        log.ask(f"short{i}", 8, 4)
    log.drain()
    log.ask("oldest", 16, 120)
    log.ask("low", 16, 120, priority=-1)
    log.ask("high", 16, 120, priority=1)
    log.drain()
    assert log.of_kind(EventKind.SUSPENDED)[0] == "low"


def test_a_suspension_makes_the_policy_careful():
    log = crowded()
    admission = log.engine._runtime.managers.admission
    pessimism = []
    while not log.of_kind(EventKind.SUSPENDED):
        pessimism.append(admission.pessimism)
        log.engine.step()
    assert admission.pessimism > pessimism[-1]


def test_reserve_all_never_suspends():
    log = crowded(admission="reserve_all")
    done = log.drain()
    assert not log.of_kind(EventKind.SUSPENDED)
    assert all(completion.finish_reason is Finish.LENGTH for completion in done.values())


def test_suspending_again_or_somebody_unknown_changes_nothing():
    log = crowded()
    scheduler = log.engine._scheduler
    log.engine.step()
    before = log.engine.progress()
    scheduler.suspend("long01")
    after = log.engine.progress()
    assert (after.num_running, after.num_waiting) == (before.num_running - 1, before.num_waiting + 1)
    scheduler.suspend("long01")
    scheduler.suspend("nobody")
    assert log.engine.progress() == after
    done = log.drain()
    assert done["long01"].num_suspended >= 1
    assert len(done) == 12


def test_a_suspended_prompt_is_not_told_twice():
    """Log-probabilities of a prompt that was computed twice are those of one prompt."""
    log = crowded()
    for i in range(4):
        log.ask(f"told{i}", 60, 100, prompt_logprobs=0)
    log.engine.step()
    for i in range(4):
        log.engine._scheduler.suspend(f"told{i}")
    done = log.drain()
    for i in range(4):
        told = [entry.token for entry in done[f"told{i}"].prompt_logprobs]
        assert told == [1 + j % 200 for j in range(1, 60)]


# -- properties ----------------------------------------------------------------------------------------------------


@st.composite
def traffic(draw):
    asks = st.tuples(st.integers(1, 200), st.integers(1, 60), st.integers(-1, 1), st.integers(0, 30))
    return draw(st.lists(asks, min_size=1, max_size=25))


@settings(max_examples=60, deadline=None)
@given(
    asks=traffic(),
    kv_blocks=st.integers(17, 80),
    batch=st.integers(1, 9),
    extra_tokens=st.integers(0, 120),
    chunk_tokens=st.sampled_from([None, 16, 48, "none"]),
    admission=st.sampled_from(["optimistic", "reserve_all"]),
    end_probability=st.sampled_from([0.0, 0.1]),
    cancels=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 24)), max_size=5),
)
def test_every_step_keeps_its_bounds_and_every_request_ends(
    asks, kv_blocks, batch, extra_tokens, chunk_tokens, admission, end_probability, cancels
):
    log = Log(
        kv_tokens=kv_blocks * BLOCK,
        max_seq_len=272,
        max_batch_size=batch,
        max_num_tokens=batch + extra_tokens,
        chunk_tokens=chunk_tokens,
        admission=admission,
        end_probability=end_probability,
    )
    due = sorted(enumerate(asks), key=lambda one: one[1][3])
    accepted, done, step = {}, [], 0
    while due or log.engine.has_work:
        while due and due[0][1][3] <= step:
            index, (length, max_tokens, priority, _) = due.pop(0)
            try:
                log.ask(f"r{index}", length, max_tokens, priority=priority)
                accepted[f"r{index}"] = length
            except RequestRefused:
                assert chunk_tokens == "none"
                assert length > batch + extra_tokens
        for when, whom in cancels:
            if when == step:
                log.engine.cancel(f"r{whom}")
        done += log.engine.step()
        step += 1
        assert step < 20_000
    assert sorted(completion.request_id for completion in done) == sorted(accepted)
    assert all(completion.finish_reason is not Finish.ERROR for completion in done)
    for rows in log.steps():
        assert sum(count for _, _, count in rows) <= batch + extra_tokens
        assert len(rows) <= batch
        assert len({name for name, _, _ in rows}) == len(rows)
        assert sum(-(-(start + count) // BLOCK) for _, start, count in rows) <= kv_blocks
    progress = log.engine.progress()
    assert (progress.num_running, progress.num_waiting, progress.kv_used_tokens) == (0, 0, 0)
    stats = log.engine._runtime.managers.dispatcher.stats()
    assert stats["slots.used"] == 0
    log.engine.close()
