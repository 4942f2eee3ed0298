"""Steps that overlap: the next one is launched before anybody has seen what the one before it drew."""

from __future__ import annotations

import pytest
from test_engine import ask, assert_idle, drain, options, texts
from test_engine_sampling import EVERYTHING
from test_soak import CACHES, SETTINGS, STUB, TIERED, TIGHT, soaked

from tonnage.caching import CacheParams
from tonnage.engine import Finish, start
from tonnage.engine.mishaps import Mishaps
from tonnage.engine.runtime import DeviceRuntime
from tonnage.engine.stub import stub_engine
from tonnage.errors import UserError
from tonnage.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("light_collector")


@pytest.fixture(scope="module")
def ahead(tiny_llama):
    with start(options(tiny_llama, overlap=True)) as engine:
        yield engine


@pytest.fixture(scope="module")
def behind(tiny_llama):
    with start(options(tiny_llama, overlap=False)) as engine:
        yield engine


#: Every feature that looks at tokens, beside plain rows.
ASKS = {
    "plain": {},
    "everything": {"seed": 5, **EVERYTHING},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.7},
    "told": {"logprobs": 4, "prompt_logprobs": 2},
    "early stop": {"min_tokens": 6, "stop_token_ids": tuple(range(0, 250, 2))},
    "string": {"stop": ("a", "e", "i")},
    "one": {"max_tokens": 1},
}


def asked(engine):
    done = {}
    for round_ in range(2):  # the second finds the first one's blocks
        for i, (name, params) in enumerate(ASKS.items()):
            ask(engine, f"{round_} {name}", length=17 + 3 * i, **{"max_tokens": 24, **params})
        done |= {one.request_id: one for one in drain(engine)}
    return done


def test_everything_told_is_the_same(ahead, behind):
    ours, theirs = asked(ahead), asked(behind)
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        other = theirs[name]
        assert (one.token_ids, one.text, one.finish_reason, one.stop_reason) == (
            other.token_ids, other.text, other.finish_reason, other.stop_reason
        )  # fmt: skip
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert [[token for token, _ in top] for top in one.top_logprobs] == [
            [token for token, _ in top] for top in other.top_logprobs
        ]
        assert [entry.token for entry in one.prompt_logprobs] == [entry.token for entry in other.prompt_logprobs]
    assert {one.finish_reason for one in ours.values()} == {Finish.STOP, Finish.LENGTH}
    assert_idle(ahead)
    assert ahead.stats()["kv.allocated"] == 0


def test_tokens_come_a_step_later(ahead):
    heard = []
    ask(ahead, "r", length=5, max_tokens=3, on_delta=heard.append)
    counts = []
    while ahead.has_work:
        ahead.step()
        counts.append(len(heard))
    assert counts == [0, 1, 2, 3]


def test_the_last_token_that_may_come_is_followed_by_no_row(ahead):
    """That the end by length comes is known when the row is launched."""
    events = []
    ahead.observe = events.append
    ask(ahead, "r", length=5, max_tokens=4, cache=CacheParams(reuse=False))
    drain(ahead)
    ahead.observe = None
    assert sum(event.count for event in events if event.kind == "computed") == 5 + 4 - 1


def test_an_end_that_only_the_token_tells_costs_one_row_that_nobody_hears_of(ahead):
    first = ask(ahead, "first", length=9, max_tokens=12)
    drain(ahead)
    stop = first.generated_ids[5]
    at = first.generated_ids.index(stop)
    heard, events = [], []
    ahead.observe = events.append
    ask(ahead, "second", length=9, max_tokens=12, stop_token_ids=(stop,), on_delta=heard.append)
    (done,) = drain(ahead)
    ahead.observe = None
    assert done.token_ids == tuple(first.generated_ids[: at + 1])
    assert sum(len(delta.tokens) for delta in heard) == at + 1
    ended = next(i for i, event in enumerate(events) if event.kind == "ended")
    assert all(event.kind != "computed" for event in events[ended:])
    assert_idle(ahead)


def test_who_leaves_while_its_step_is_under_way_is_not_written_to(ahead):
    ask(ahead, "r", length=5, max_tokens=40)
    for _ in range(4):
        ahead.step()
    ahead.cancel("r")
    (gone,) = ahead.step()
    # The same id, and the same slot: what the step under way draws is none of its tokens.
    again = ask(ahead, "r", length=5, max_tokens=40)
    done = drain(ahead)
    assert (gone.finish_reason, len(gone.token_ids)) == (Finish.CANCELLED, 3)
    assert [one.finish_reason for one in done] == [Finish.LENGTH]
    assert done[0].token_ids[:3] == gone.token_ids
    assert again.num_generated_tokens == 40


def most_at_once(events, last):
    """Requests between ``admitted`` and ``last``."""
    running, most = set(), 0
    for event in events:
        if event.kind == "admitted":
            running.add(event.request_id)
            most = max(most, len(running))
        elif event.kind in (last, "suspended"):
            running.discard(event.request_id)
    return most


def test_a_step_that_lands_in_sleep_gives_its_slots_on_before_its_ends_are_told(ahead):
    events = []
    ahead.observe = events.append
    for i in range(16):
        ask(ahead, f"r{i}", length=7, max_tokens=4, cache=CacheParams(reuse=False))
    done = []
    while ahead.has_work:
        done += ahead.step()
        ahead.sleep("weights")
        ahead.wake()
    ahead.observe = None
    assert len(done) == 16
    assert most_at_once(events, "left") == 8
    assert most_at_once(events, "ended") == 16
    assert_idle(ahead)


def test_a_step_that_must_land_first_lets_others_in_for_those_who_left():
    """The pool runs short while a step is under way, and all four rows are taken."""
    engine = stub_engine(kv_tokens=320, max_seq_len=256, max_batch_size=4, max_num_tokens=64, overlap=True)
    events, done = [], []
    engine.observe = events.append
    for i in range(60):
        params = SamplingParams(max_tokens=20 + 7 * i % 90, ignore_eos=True, seed=i)
        engine.submit(engine.request(f"r{i}", params, token_ids=[i + 1] * (1 + 11 * i % 60)))
    while engine.has_work:
        done += engine.step()
    engine.close()
    assert len(done) == 60
    assert any(event.kind == "suspended" for event in events)
    assert most_at_once(events, "left") == 4


def test_a_cancelled_last_request_leaves_a_step_to_land(ahead):
    ask(ahead, "r", length=5, max_tokens=40)
    ahead.step()
    ahead.cancel("r")
    assert ahead.has_work
    drain(ahead)
    assert_idle(ahead)
    assert not ahead._steps.flights


def test_an_engine_closes_in_the_middle(tiny_llama):
    engine = start(options(tiny_llama, overlap=True))
    ask(engine, "r", length=5, max_tokens=40)
    engine.step()
    engine.close()
    assert not engine.has_work
    with pytest.raises(UserError):
        engine.step()


def test_a_launch_that_fails_takes_nothing_of_the_step_before_it(tiny_llama, monkeypatch):
    with start(options(tiny_llama, overlap=True)) as engine:
        ask(engine, "whole", length=9, max_tokens=6)
        (whole,) = drain(engine)
        heard = []
        ask(engine, "r", length=9, max_tokens=20, stop_token_ids=(whole.token_ids[3],), on_delta=heard.append)
        for _ in range(4):
            engine.step()  # the token that ends it is drawn, and nobody has looked
        monkeypatch.setattr(DeviceRuntime, "launch", lambda *_: 1 / 0)
        (done,) = engine.step()
        assert (done.finish_reason, done.token_ids) == (Finish.STOP, whole.token_ids[:4])
        assert sum(len(delta.tokens) for delta in heard) == 4


def test_who_must_land_first_is_still_a_step_ahead():
    with stub_engine(kv_tokens=512, max_seq_len=256, max_batch_size=32, overlap=True) as engine:
        for i in range(40):
            params = SamplingParams(max_tokens=5 + 15 * (i % 12), ignore_eos=True, seed=i)
            engine.submit(engine.request(f"r{i}", params, token_ids=[1 + i] * (10 + i)))
        for _ in range(50):
            engine._runtime.managers.admission.finished(1)
        ahead = []
        while engine.has_work:
            before = engine.progress().num_suspensions
            engine.step()
            if engine.progress().num_suspensions > before:
                ahead.append(len(engine._steps.flights))
        assert ahead
        assert set(ahead) == {1}


# -- under load, judged by the oracle and by the contents of every block


LOADS = {
    "roomy": SETTINGS["roomy"][0],
    "reserve_all": SETTINGS["reserve_all"][0],
    "tight": TIGHT,
    "uncut": {**TIGHT, "chunk_tokens": "none"},
    **{f"{name}, cached": row[0] for name, row in CACHES.items()},
}


@pytest.mark.parametrize("setting", LOADS.values(), ids=LOADS)
def test_the_stub_holds(setting):
    report = soaked(stub_engine(**setting, overlap=True), 250, seed=11)
    assert report.is_good, "\n".join(report.told)
    assert sum(report.outcomes.values()) == 250


@pytest.mark.parametrize("seed", range(4))
def test_the_stub_holds_though_steps_and_copies_fail(seed):
    mishaps = Mishaps(probability=0.03, seed=seed)
    setting = {**(STUB if seed % 2 else TIGHT), **TIERED}
    report = soaked(stub_engine(**setting, overlap=True, mishaps=mishaps), 250, seed=seed, mishaps=mishaps)
    assert report.is_good, "\n".join(report.told)
    assert sum(mishaps.counts.values()) > 5


@pytest.mark.parametrize("kv_tokens", [4096, 512])
def test_who_gives_memory_up_loses_no_token(kv_tokens):
    found = []
    for overlap in (False, True):
        with stub_engine(kv_tokens=kv_tokens, max_seq_len=256, max_batch_size=32, overlap=overlap) as engine:
            for i in range(40):
                params = SamplingParams(max_tokens=5 + 15 * (i % 12), ignore_eos=True, seed=i)
                engine.submit(engine.request(f"r{i}", params, token_ids=[1 + i] * (10 + i)))
            # As if all had ended soon so far: too many are let in.
            for _ in range(50):
                engine._runtime.managers.admission.finished(1)
            found.append(texts(drain(engine)))
            assert (engine.progress().num_suspensions > 0) == (kv_tokens == 512)
    assert found[0] == found[1]
