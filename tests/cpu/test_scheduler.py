"""Scheduling on the stub engine: chunks, mixing, priorities, suspension, and that every step keeps its bounds."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from fake_kv import engine_on_fake
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.engine import Finish
from tonnage.engine.events import EventKind
from tonnage.engine.refusals import refuse_impossible
from tonnage.engine.stub import stub_engine
from tonnage.errors import InvalidSetting, RequestRefused
from tonnage.resources.gate import Gate, LogitsRows, StepTokens
from tonnage.sampling import SamplingParams

BLOCK = 16


class Log:
    """A stub engine with everything it tells, over a KV manager of the test's own if it ``fakes`` one."""

    def __init__(self, *, fakes=False, **limits):
        limits = {"kv_tokens": 4096, "max_seq_len": 1024, "max_batch_size": 32, **limits}
        self.engine, self.kv = engine_on_fake(**limits) if fakes else (stub_engine(**limits), None)
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


# -- exact admission: first the claim, then the tokens ----------------------------------------------------------------


def finds(log, **tokens):
    """The cache holds so many tokens of each of these requests."""
    log.kv.cached = lambda request: tokens.get(request.id, 0)


def admissions(log):
    return [(event.request_id, event.num_cached_tokens) for event in log.events if event.kind is EventKind.ADMITTED]


def test_rows_start_behind_what_is_cached():
    log = Log(fakes=True, max_num_tokens=64)
    finds(log, a=64, b=99)
    log.ask("a", 100, 3)
    log.ask("b", 100, 3)
    log.ask("c", 20, 3)
    done = log.drain()
    assert log.steps()[0] == [("a", 64, 36), ("b", 99, 1), ("c", 0, 20)]
    assert admissions(log) == [("a", 64), ("b", 99), ("c", 0)]
    assert {name: one.num_cached_tokens for name, one in done.items()} == {"a": 64, "b": 99, "c": 0}
    assert log.engine.progress().cached_prompt_tokens == 163
    cold = Log(max_num_tokens=64)
    for name, length in (("a", 100), ("b", 100), ("c", 20)):
        cold.ask(name, length, 3)
    assert tokens(done) == tokens(cold.drain())


def test_who_finds_no_tokens_gives_its_claim_back_and_stays_at_the_head():
    log = Log(fakes=True, max_num_tokens=64)
    finds(log, second=16)
    for name, length in (("first", 60), ("second", 40), ("third", 4)):
        log.ask(name, length, 2)
    log.engine.step()
    assert log.steps() == [[("first", 0, 60)]]
    assert log.kv.calls[:4] == [("loading",), ("admit", "first"), ("admit", "second"), ("return", "second")]
    assert list(log.kv.held) == ["first"]
    assert log.engine.stats()["slots.used"] == 1
    assert log.engine._scheduler.head().id == "second"
    assert log.engine._scheduler.head().num_computed_tokens == 0
    log.engine.step()
    assert log.steps()[1] == [("first", 60, 1), ("second", 16, 24), ("third", 0, 4)]
    assert not any(one.waited for one in log.drain().values())


def test_what_is_cached_may_make_the_rest_fit():
    log = Log(fakes=True, max_num_tokens=64)
    finds(log, second=36)
    for name, length in (("first", 60), ("second", 40)):
        log.ask(name, length, 2)
    log.engine.step()
    assert log.steps() == [[("first", 0, 60), ("second", 36, 4)]]


def test_nobody_is_asked_in_while_the_step_has_no_token_left():
    log = Log(fakes=True, max_num_tokens=64)
    log.ask("long", 500, 2)
    log.ask("next", 10, 2)
    for _ in range(4):
        log.engine.step()
    assert [call for call in log.kv.calls if call[0] == "admit"] == [("admit", "long")]


def test_without_chunks_what_is_cached_is_no_part_of_the_whole():
    log = Log(fakes=True, max_num_tokens=200, chunk_tokens="none")
    finds(log, second=96)
    for name in ("first", "second", "third"):
        log.ask(name, 150, 2)
    log.drain()
    assert log.steps()[0] == [("first", 0, 150)]
    assert log.steps()[1] == [("first", 150, 1), ("second", 96, 54)]
    assert log.steps()[2][-1] == ("third", 0, 150)


def test_a_suspended_request_starts_behind_what_is_cached_when_it_returns():
    log = Log(fakes=True)
    finds(log, a=16)
    log.ask("a", 40, 30)
    for _ in range(10):
        log.engine.step()
    finds(log, a=48)
    log.engine._scheduler.suspend("a")
    done = log.drain()["a"]
    assert admissions(log) == [("a", 16), ("a", 48)]
    assert (done.num_cached_tokens, done.num_suspended) == (16, 1)


@pytest.mark.parametrize("wrong", [40, 41])
def test_a_cache_that_knows_more_than_may_be_reused_fails_its_request_alone(wrong):
    """Invariant 5: the last token is always computed."""
    log = Log(fakes=True)
    finds(log, bad=wrong)
    log.ask("bad", 40, 2)
    log.ask("good", 40, 2)
    done = log.drain()
    assert "are cached" in done["bad"].error
    assert done["good"].finish_reason is Finish.LENGTH
    assert log.kv.held == {}


# -- loading -------------------------------------------------------------------------------------------------------


def slow(log, *names, cached=32):
    """What is cached of these requests lies on the host, and comes when a test says so or waits for it."""
    finds(log, **dict.fromkeys(names, cached))
    log.kv.loads = lambda request: request.id in names


def test_who_loads_is_admitted_and_takes_part_in_no_step():
    log = Log(fakes=True)
    slow(log, "a")
    log.ask("other", 10, 8)
    log.engine.step()
    log.ask("a", 40, 3)
    for _ in range(3):
        log.engine.step()
    progress = log.engine.progress()
    assert (progress.num_running, progress.num_loading, progress.num_waiting) == (2, 1, 0)
    assert admissions(log) == [("other", 0), ("a", 32)]
    assert {name for rows in log.steps() for name, _, _ in rows} == {"other"}
    assert log.kv.count("wait_loaded") == 0, "there was something else to do"
    log.kv.begun.clear()
    log.engine.step()
    assert log.steps()[-1] == [("other", 13, 1), ("a", 32, 8)]
    assert log.drain()["a"].num_cached_tokens == 32


def test_with_nothing_else_to_do_the_engine_waits_for_a_load():
    log = Log(fakes=True)
    slow(log, "a", "b")
    log.ask("a", 40, 3)
    log.ask("b", 40, 3)
    assert log.engine.step() == []
    assert log.kv.calls == [("loading",), ("admit", "a"), ("admit", "b"), ("committed",), ("wait_loaded",)]
    assert log.kv.begun == ["b"]
    assert log.steps() == []
    done = log.drain()
    assert log.steps()[0] == [("a", 32, 8)]
    assert log.kv.count("wait_loaded") == 2, "while a ran b was not waited for; then it was"
    truth = Log()
    truth.ask("a", 40, 3)
    truth.ask("b", 40, 3)
    assert tokens(done) == tokens(truth.drain())


def test_who_is_done_is_told_before_a_load_is_waited_for():
    log = Log(fakes=True)
    slow(log, "a")
    log.ask("gone", 10, 3)
    log.ask("a", 40, 3)
    log.engine.cancel("gone")
    assert [one.request_id for one in log.engine.step()] == ["gone"]
    assert log.kv.count("wait_loaded") == 0


def test_a_loading_request_can_be_cancelled():
    log = Log(fakes=True)
    slow(log, "a")
    log.ask("a", 40, 3)
    log.ask("other", 10, 3)
    log.engine.step()
    log.engine.cancel("a")
    done = log.drain()
    assert done["a"].finish_reason is Finish.CANCELLED
    assert done["other"].finish_reason is Finish.LENGTH
    assert (log.kv.held, log.kv.begun, log.engine.progress().num_loading) == ({}, [], 0)


def test_a_loading_request_can_be_suspended():
    log = Log(fakes=True)
    slow(log, "a")
    log.ask("a", 40, 3)
    log.ask("other", 10, 3)
    log.engine.step()
    log.engine._scheduler.suspend("a")
    assert (log.kv.begun, log.engine.progress().num_loading, log.engine.progress().num_waiting) == ([], 0, 1)
    slow(log)
    done = log.drain()
    assert done["a"].num_suspended == 1
    assert admissions(log) == [("a", 32), ("other", 0), ("a", 0)]


def test_a_prompt_that_is_cached_but_for_its_last_token_decodes_when_it_has_come():
    log = Log(fakes=True)
    slow(log, "a", cached=39)
    log.ask("a", 40, 3)
    log.drain()
    assert log.steps()[0] == [("a", 39, 1)]


# -- to wait a step for a neighbour ----------------------------------------------------------------------------------


def test_the_queue_waits_a_step_for_the_neighbour_of_its_head():
    log = Log(fakes=True, max_num_tokens=32)
    log.ask("first", 64, 4)
    log.ask("same", 64, 4)
    log.ask("third", 8, 4)
    computed = lambda: log.kv.scheduled.get("first", 0)  # noqa: E731
    log.kv.neighbour = lambda request: "first" if request.id == "same" and computed() < 64 else None
    log.kv.cached = lambda request: 48 if request.id == "same" else 0
    done = log.drain()
    assert log.steps()[:3] == [
        [("first", 0, 32)],
        [("first", 32, 32)],
        [("first", 64, 1), ("same", 48, 16), ("third", 0, 8)],
    ]
    assert not any(one.waited for one in done.values()), "it was not memory that they waited for"


def test_nobody_is_asked_twice_in_a_step():
    """A waiting request of a higher priority is asked before the running prompts, and not again behind them."""
    log = Log(fakes=True, max_num_tokens=64)
    log.ask("long", 500, 2)
    log.engine.step()
    log.ask("urgent", 64, 2, priority=5)
    log.kv.neighbour = lambda _: "long"
    log.kv.calls.clear()
    log.engine.step()
    assert log.kv.count("admit") == 1


def test_a_manager_that_always_waits_for_somebody_who_runs_starves_nobody():
    """The one that is waited for comes to an end, and nobody else is let in before the head."""
    log = Log(fakes=True)
    log.kv.neighbour = lambda request: next((name for name in log.kv.held if name != request.id), None)
    for i in range(6):
        log.ask(f"r{i}", 20, 5)
    done = log.drain()
    assert {one.finish_reason for one in done.values()} == {Finish.LENGTH}
    assert log.of_kind(EventKind.ENDED) == [f"r{i}" for i in range(6)]


def test_to_wait_for_nobody_is_an_error_and_not_a_stop():
    log = Log(fakes=True)
    log.kv.neighbour = lambda request: "nobody" if request.id == "bad" else None
    log.ask("bad", 20, 5)
    log.ask("good", 20, 5)
    done = log.drain()
    assert "'nobody', which does not run" in done["bad"].error
    assert done["good"].finish_reason is Finish.LENGTH


# -- the reserves of a step ------------------------------------------------------------------------------------------


def test_prompts_wait_for_the_cap_on_attended_tokens():
    """Three prompts of 50 under a cap of 120: two, and what fits of the third in whole blocks; it goes on later."""
    log = Log(fakes=True, plan={"attended_cap": 120})
    for i in range(3):
        log.ask(f"r{i}", 50, 2)
    log.drain()
    assert log.steps()[0] == [("r0", 0, 50), ("r1", 0, 50), ("r2", 0, 16)]


def test_a_cap_of_zero_lets_one_prompt_after_the_other_in():
    log = Log(fakes=True, plan={"attended_cap": 0})
    for i in range(3):
        log.ask(f"r{i}", 50, 2)
    log.drain()
    assert [[row for row in rows if row[2] > 1] for rows in log.steps()[:3]] == [[(f"r{i}", 0, 50)] for i in range(3)]


def test_no_more_rows_draw_a_token_than_the_projection_has():
    log = Log(fakes=True)
    log.engine._scheduler._gate = Gate([StepTokens(2048), LogitsRows(2)])
    for i in range(5):
        log.ask(f"r{i}", 40, 6)
    done = log.drain()
    assert {one.finish_reason for one in done.values()} == {Finish.LENGTH}
    for rows in log.steps():
        assert sum(start + count >= 40 for _, start, count in rows) <= 2


def test_a_prompt_that_needs_more_of_the_encoder_than_there_is_is_refused():
    log = Log(fakes=True)
    request = log.engine.request("a", SamplingParams(max_tokens=2), token_ids=[1] * 40)
    request.num_encoder_tokens = 1
    engine = log.engine
    with pytest.raises(RequestRefused, match="encoder"):
        refuse_impossible(
            request,
            limits=engine.plan.limits,
            chunking=engine._runtime.chunking,
            vocab_size=engine.vocab_size,
            dispatcher=engine._runtime.managers.dispatcher,
        )


# -- properties ----------------------------------------------------------------------------------------------------


@st.composite
def finders(draw):
    """A cache that holds any part of any request, on the device or on the host, and neighbours for some."""
    share = st.sampled_from([0, 0, 0.3, 0.5, 0.9, 1.0])
    return draw(st.lists(st.tuples(share, st.booleans(), st.integers(0, 3)), min_size=1, max_size=8))


def apply_finders(log, found):
    """What is found changes from one admission to the next; ``waits`` times each asks to wait for who runs."""
    asked, waits = Counter(), Counter()

    def of(request):
        return found[(request.arrival + asked[request.id]) % len(found)]

    def cached(request):
        asked[request.id] += 1
        return min(int(of(request)[0] * len(request.token_ids)), len(request.token_ids) - 1)

    def neighbour(request):
        waits[request.id] += 1
        runs = next(iter(log.kv.held), None)
        return runs if waits[request.id] <= of(request)[2] else None

    log.kv.cached, log.kv.neighbour = cached, neighbour
    log.kv.loads = lambda request: of(request)[1]


@settings(max_examples=30, deadline=None)
@given(
    asks=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 20), st.integers(-1, 1)), min_size=1, max_size=15),
    found=finders(),
    batch=st.integers(1, 6),
    extra_tokens=st.integers(0, 150),
    cap=st.one_of(st.none(), st.integers(0, 400)),
    chunk_tokens=st.sampled_from([None, 16, 48, "none"]),
    suspends=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 14)), max_size=4),
)
def test_with_any_cache_every_step_keeps_every_limit_and_nobody_starves(
    asks, found, batch, extra_tokens, cap, chunk_tokens, suspends
):
    """Invariants 21, 22, 24 and 26, whatever is cached, loads or waits; and the tokens are those of no cache at all."""
    most = batch + extra_tokens
    limits = {"max_batch_size": batch, "max_num_tokens": most, "chunk_tokens": chunk_tokens}
    log = Log(fakes=True, plan={"attended_cap": cap}, **limits)
    cold = Log(**limits)
    apply_finders(log, found)
    lengths = {}
    for index, (length, max_tokens, priority) in enumerate(asks):
        for one in (log, cold):
            try:
                one.ask(f"r{index}", length, max_tokens, priority=priority)
                lengths[f"r{index}"] = length
            except RequestRefused:
                assert chunk_tokens == "none"
    done, step = [], 0
    while log.engine.has_work:
        for when, whom in suspends:
            if when == step:
                log.engine._scheduler.suspend(f"r{whom}")
        done += log.engine.step()
        step += 1
        assert step < 5000  # 26: everybody has its turn
    assert {one.request_id: one.token_ids for one in done} == tokens(cold.drain())
    assert sorted(lengths) == sorted(one.request_id for one in done)
    known = dict(lengths)
    for rows in log.steps():
        assert sum(count for _, _, count in rows) <= most  # 21
        assert all(count >= 1 for _, _, count in rows)  # 22: no chunk of 0
        assert len({name for name, _, _ in rows}) == len(rows)
        chunks = [row for row in rows if row[2] > 1]
        attended = [start + count for _, start, count in chunks]
        assert cap is None or len(attended) <= 1 or sum(attended) <= cap  # 24
        # 22: who does not reach its end ends on a boundary, but for one that would not move otherwise.
        cut = [(start + count) % BLOCK for name, start, count in rows if start + count < known[name]]
        assert sum(end != 0 for end in cut) <= 2
        for name, start, count in rows:
            known[name] += start + count == known[name]
    assert (log.kv.held, log.engine.progress().num_running) == ({}, 0)
    assert log.engine.stats()["slots.used"] == 0


@st.composite
def traffic(draw):
    asks = st.tuples(st.integers(1, 200), st.integers(1, 60), st.integers(-1, 1), st.integers(0, 30))
    return draw(st.lists(asks, min_size=1, max_size=25))


@settings(max_examples=30, deadline=None)
@given(
    asks=traffic(),
    kv_blocks=st.integers(17, 80),
    batch=st.integers(1, 9),
    extra_tokens=st.integers(0, 120),
    chunk_tokens=st.sampled_from([None, 16, 48, "none"]),
    admission=st.sampled_from(["optimistic", "reserve_all"]),
    end_probability=st.sampled_from([0.0, 0.1]),
    prefix_caching=st.booleans(),
    cancels=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 24)), max_size=5),
)
def test_every_step_keeps_its_bounds_and_every_request_ends(
    asks, kv_blocks, batch, extra_tokens, chunk_tokens, admission, end_probability, prefix_caching, cancels
):
    log = Log(
        kv_tokens=kv_blocks * BLOCK,
        max_seq_len=272,
        max_batch_size=batch,
        max_num_tokens=batch + extra_tokens,
        chunk_tokens=chunk_tokens,
        admission=admission,
        end_probability=end_probability,
        prefix_caching=prefix_caching,
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
        # Prompts begin alike: with a cache they share blocks.
        assert prefix_caching or sum(-(-(start + count) // BLOCK) for _, start, count in rows) <= kv_blocks
    progress = log.engine.progress()
    assert (progress.num_running, progress.num_waiting, progress.kv_used_tokens) == (0, 0, 0)
    stats = log.engine._runtime.managers.dispatcher.stats()
    assert stats["slots.used"] == 0
    log.engine.close()
