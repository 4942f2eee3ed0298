"""A step that fails in any phase leaves every manager as before, and the loop goes on serving (on the stub engine)."""

from __future__ import annotations

import pytest
from fake_kv import engine_on_fake

from tonnage.engine import Finish
from tonnage.engine.events import EventKind
from tonnage.engine.stub import stub_engine
from tonnage.errors import BufferOOM, DeclarationExceeded, InputError, TransferFailed
from tonnage.sampling import SamplingParams
from tonnage.step import Veto

PENALISED = {"repetition_penalty": 1.2}


def engine_with_work(**limits):
    """Decodes under way, a long prompt half computed, and more that wait; some have penalties."""
    engine = stub_engine(
        **{"kv_tokens": 800, "max_seq_len": 400, "max_batch_size": 4, "max_num_tokens": 64, "seed": 3, **limits}
    )
    for name, length, new in (("a", 20, 30), ("b", 30, 12), ("long", 150, 9), ("c", 10, 8), ("d", 12, 10)):
        params = SamplingParams(max_tokens=new, seed=length, **(PENALISED if name in "bd" else {}))
        engine.submit(engine.request(name, params, token_ids=[1 + i % 200 for i in range(length)]))
    for _ in range(3):
        assert engine.step() == []
    assert engine.progress().num_running >= 3
    return engine


def drain(engine):
    done = {}
    for _ in range(2000):
        if not engine.has_work:
            return done
        done.update({completion.request_id: completion for completion in engine.step()})
    raise AssertionError("it does not come to an end")


#: Of the KV manager's counts; the others say what was done and what lies in the cache.
RESTORED = {f"kv.{key}" for key in ("capacity", "available", "live", "allocated", "reserved", "sequences", "pins")}


def state(engine):
    """All that a rollback must restore: blocks, pages, slots, watermarks, the queue and the batch.

    Which blocks are cached may change: what a step that is rolled back evicted is gone.
    """
    managers, scheduler = engine._runtime.managers, engine._scheduler
    running = sorted(scheduler.running)
    turns = []
    while scheduler._waiting.peek() is not None:
        turns.append(scheduler._waiting.pop())
    for turn in reversed(turns):
        scheduler._waiting.undo(turn)
    return {
        "managers": {k: v for k, v in managers.dispatcher.stats().items() if k in RESTORED or not k.startswith("kv.")},
        "pages": [managers.kv.block_ids(name).tolist() for name in running],
        "watermarks": [managers.kv.watermarks(name) for name in running],
        "slots": [(name, scheduler.running[name].slot) for name in running],
        "computed": [int(scheduler.batch.computed[scheduler.running[name].slot]) for name in running],
        "tokens": [list(scheduler.running[name].token_ids) for name in running],
        "queue": [(turn.request.id, turn.request.num_overtaken) for turn in turns],
        "bytes": engine.ledger.accounted_bytes,
    }


class Broken:
    """Replaces a method; fails the first ``times`` calls, before or after the real one did its work."""

    def __init__(self, monkeypatch, owner, name, error, *, times=1, after=False):
        self.left = times
        real = getattr(owner, name)

        def broken(*arguments, **named):
            if self.left == 0:
                return real(*arguments, **named)
            self.left -= 1
            if after:
                real(*arguments, **named)
            raise error

        monkeypatch.setattr(owner, name, broken)


TRUTH = {name: completion.token_ids for name, completion in drain(engine_with_work(kv_tokens=4000)).items()}
PHASES = [(who, hook) for who in ("slots", "kv", "penalties") for hook in ("admit", "prepare")]


@pytest.mark.parametrize("after", [False, True], ids=["before its work", "after its work"])
@pytest.mark.parametrize(("who", "hook"), PHASES)
@pytest.mark.parametrize("error", [RuntimeError("broken"), Veto("somebody", "not now")], ids=["exception", "veto"])
def test_a_failure_before_launch_leaves_every_manager_as_before(monkeypatch, who, hook, after, error):
    engine = engine_with_work()
    if hook == "admit":
        engine.cancel("a")  # so that somebody may be admitted
        assert [completion.request_id for completion in engine.step()] == ["a"]
        engine.cancel("b")
    before = state(engine)
    # Nothing may be failed by the step itself, or the managers would give up what those requests hold.
    failed = []
    monkeypatch.setattr(engine._steps, "_fail_step", lambda _, error: failed.append(error))
    times = 2 if isinstance(error, Veto) else 1  # a veto alone costs nothing: it is asked again
    broken = Broken(monkeypatch, getattr(engine._runtime.managers, who), hook, error, after=after, times=times)
    engine._steps.step()
    assert broken.left == 0, "the hook was never called"
    assert failed == [error]
    assert state(engine) == before
    done = drain(engine)
    assert {name: done[name].token_ids for name in ("long", "c", "d")} == {n: TRUTH[n] for n in ("long", "c", "d")}
    assert state(engine)["managers"]["slots.used"] == 0


@pytest.mark.parametrize(("who", "hook"), PHASES)
def test_a_veto_that_is_not_repeated_costs_nobody_anything(monkeypatch, who, hook):
    engine = engine_with_work()
    Broken(monkeypatch, getattr(engine._runtime.managers, who), hook, Veto("somebody", "not now"))
    assert {name: completion.token_ids for name, completion in drain(engine).items()} == TRUTH
    assert engine.result().retried_steps == ()


def test_a_veto_against_one_request_ends_that_one_alone(monkeypatch):
    engine = engine_with_work()
    prepare = engine._runtime.managers.kv.prepare

    def picky(plan, txn):
        if "d" in plan.request_ids:
            raise Veto("kv", "not this one")
        prepare(plan, txn)

    monkeypatch.setattr(engine._runtime.managers.kv, "prepare", picky)
    done = drain(engine)
    assert done["d"].finish_reason is Finish.ERROR
    assert {name: done[name].token_ids for name in TRUTH if name != "d"} == {n: TRUTH[n] for n in TRUTH if n != "d"}


def test_a_failure_in_launch_leaves_every_manager_as_before(monkeypatch):
    engine = engine_with_work()
    before = state(engine)
    monkeypatch.setattr(engine._steps, "_fail_step", lambda *_: None)
    Broken(monkeypatch, type(engine._runtime), "launch", RuntimeError("kernel fell over"))
    engine._steps.step()
    assert state(engine) == before
    assert {name: completion.token_ids for name, completion in drain(engine).items()} == TRUTH


@pytest.mark.parametrize("phase", ["prepare", "launch", "update"])
def test_the_failed_step_ends_its_requests_and_nobody_else(monkeypatch, phase):
    engine = engine_with_work()
    owner = type(engine._runtime) if phase == "launch" else engine._runtime.managers.kv
    Broken(monkeypatch, owner, phase, RuntimeError("broken"))
    done = drain(engine)
    failed = {name for name, completion in done.items() if completion.finish_reason is Finish.ERROR}
    assert "a" in failed
    assert "d" not in failed, "it was still waiting"
    assert all("broken" in done[name].error for name in failed)
    assert {name: done[name].token_ids for name in done.keys() - failed} == {
        name: TRUTH[name] for name in done.keys() - failed
    }
    assert sorted(done) == sorted(TRUTH)
    assert engine.progress().kv_used_tokens == 0


def test_who_cannot_be_admitted_fails_alone(monkeypatch):
    """The request whose admission raises is to blame, not the one at the head of the queue."""
    engine = stub_engine(kv_tokens=800, max_seq_len=400, max_batch_size=4, max_num_tokens=64)
    for name in ("first", "bad", "last"):
        engine.submit(engine.request(name, SamplingParams(max_tokens=4), token_ids=[1, 2, 3]))
    kv = engine._runtime.managers.kv
    admit = kv.admit

    def picky(request, txn):
        if request.id == "bad":
            raise RuntimeError("I do not like it")
        return admit(request, txn)

    monkeypatch.setattr(kv, "admit", picky)
    done = drain(engine)
    assert {name: completion.finish_reason for name, completion in done.items()} == {
        "first": Finish.LENGTH,
        "bad": Finish.ERROR,
        "last": Finish.LENGTH,
    }


OUT_OF_MEMORY = {
    "torch's allocator": (
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
        "4,096 bytes of tensors, in ",
    ),
    "scratch": (DeclarationExceeded(backend="sdpa", asked_bytes=9000, declared_bytes=8000), "'sdpa': 9,000 bytes"),
    "a buffer": (BufferOOM(size_bytes=7, used_bytes=5, capacity_bytes=6, owner="penalties"), "penalties: 7 bytes"),
    "the host": (MemoryError(), "host memory, in "),
}


@pytest.mark.parametrize("what", OUT_OF_MEMORY)
def test_out_of_memory_in_a_step_is_tried_again_smaller_and_told(monkeypatch, what):
    error, culprit = OUT_OF_MEMORY[what]
    engine = engine_with_work()
    events = []
    engine.observe = events.append
    drained = []
    monkeypatch.setattr(type(engine._runtime), "drain", lambda _: drained.append(True))
    sizes = []
    real = type(engine._runtime).launch

    def launch(self, scheduled, batch):
        sizes.append(scheduled.plan.shape.num_tokens)
        if len(sizes) == 1:
            raise error
        return real(self, scheduled, batch)

    monkeypatch.setattr(type(engine._runtime), "launch", launch)
    done = drain(engine)
    assert {name: completion.token_ids for name, completion in done.items()} == TRUTH
    assert drained == [True]
    assert 0 < sizes[1] <= sizes[0] // 2
    (told,) = engine.result().retried_steps
    assert culprit in told
    assert [event.kind for event in events].count(EventKind.RETRIED) == 1


def test_a_second_out_of_memory_fails_the_smaller_step_only(monkeypatch):
    """Of four decodes the oldest two are tried again, and fail; the others go on."""
    engine = stub_engine(kv_tokens=800, max_seq_len=400, max_batch_size=4, max_num_tokens=64)
    for i in range(4):
        engine.submit(engine.request(f"r{i}", SamplingParams(max_tokens=9), token_ids=[1, 2, 3]))
    engine.step()
    Broken(monkeypatch, type(engine._runtime), "launch", MemoryError("no"), times=2)
    done = drain(engine)
    reasons = {name: completion.finish_reason for name, completion in done.items()}
    assert reasons == {"r0": Finish.ERROR, "r1": Finish.ERROR, "r2": Finish.LENGTH, "r3": Finish.LENGTH}
    assert len(engine.result().retried_steps) == 1


def test_a_prompt_that_may_not_be_cut_and_finds_no_memory_fails_and_blocks_nobody(monkeypatch):
    engine = stub_engine(kv_tokens=2000, max_seq_len=400, max_batch_size=4, max_num_tokens=200, chunk_tokens="none")
    real = type(engine._runtime).launch

    def launch(self, scheduled, batch):
        if scheduled.plan.shape.num_tokens > 100:
            raise MemoryError("no")
        return real(self, scheduled, batch)

    monkeypatch.setattr(type(engine._runtime), "launch", launch)
    for name, length in (("small", 20), ("large", 150), ("after", 30)):
        engine.submit(engine.request(name, SamplingParams(max_tokens=40), token_ids=[1] * length))
    done = drain(engine)
    assert {name: completion.finish_reason for name, completion in done.items()} == {
        "small": Finish.LENGTH,
        "large": Finish.ERROR,
        "after": Finish.LENGTH,
    }


def test_a_prompt_that_may_not_be_cut_is_not_forgotten_while_steps_are_small(monkeypatch):
    """Nothing else runs, and for some steps it is too long for what a step may take: its turn comes all the same."""
    engine = stub_engine(kv_tokens=2000, max_seq_len=400, max_batch_size=4, max_num_tokens=200, chunk_tokens="none")
    engine.submit(engine.request("first", SamplingParams(max_tokens=1), token_ids=[1] * 60))
    Broken(monkeypatch, type(engine._runtime), "launch", MemoryError("no"))
    engine.submit(engine.request("second", SamplingParams(max_tokens=2), token_ids=[1] * 120))
    done = drain(engine)
    assert done["second"].finish_reason in (Finish.LENGTH, Finish.ERROR)
    engine.submit(engine.request("small", SamplingParams(max_tokens=1), token_ids=[1] * 10))
    drain(engine)
    Broken(monkeypatch, type(engine._runtime), "launch", MemoryError("no"))
    engine.submit(engine.request("tiny", SamplingParams(max_tokens=1), token_ids=[1] * 8))
    drain(engine)
    engine.submit(engine.request("whole", SamplingParams(max_tokens=2), token_ids=[1] * 190))
    assert drain(engine)["whole"].finish_reason is Finish.LENGTH


def test_a_step_inside_a_step_is_refused():
    """From a callback as from another thread; the request whose callback tries it fails, and nobody else."""
    engine = stub_engine(kv_tokens=800, max_seq_len=400, max_batch_size=4, max_num_tokens=64)
    params = SamplingParams(max_tokens=3)
    engine.submit(engine.request("bad", params, token_ids=[1, 2], on_delta=lambda _: engine.step()))
    engine.submit(engine.request("good", params, token_ids=[1, 2]))
    done = drain(engine)
    assert "in the middle of a step" in done["bad"].error
    assert done["good"].finish_reason is Finish.LENGTH


def test_after_running_out_of_memory_steps_stay_small_for_a_while(monkeypatch):
    """Or every step of a long prompt would be computed twice, and counted as one more defect."""
    engine = stub_engine(kv_tokens=20000, max_seq_len=8192, max_batch_size=4, max_num_tokens=200)
    real = type(engine._runtime).launch
    sizes = []

    def launch(self, scheduled, batch):
        sizes.append(scheduled.plan.shape.num_tokens)
        if sizes[-1] > 120:
            raise MemoryError("no")
        return real(self, scheduled, batch)

    monkeypatch.setattr(type(engine._runtime), "launch", launch)
    engine.submit(engine.request("long", SamplingParams(max_tokens=2), token_ids=[1] * 6000))
    assert drain(engine)["long"].finish_reason is Finish.LENGTH
    assert len(engine.result().retried_steps) == sum(size > 120 for size in sizes) == 2
    assert len(sizes) < 70


def test_the_failed_steps_tensors_are_gone_before_the_second_try(monkeypatch):
    """The traceback holds the frames of the failed launch, and in a cycle they outlive the handler."""
    import weakref

    class Tensor:
        pass

    engine = engine_with_work()
    seen = []

    def launch(self, scheduled, batch):
        held = Tensor()
        seen.append(weakref.ref(held))
        error = MemoryError("no")
        error.kept_by = error  # a cycle, as libraries make them
        raise error

    monkeypatch.setattr(type(engine._runtime), "launch", launch)
    monkeypatch.setattr(type(engine._runtime), "drain", lambda _: seen.append(seen[0]() is None))
    engine.step()
    assert seen[1] is True


# -- loads from the host -------------------------------------------------------------------------------------------


def loading_engine(**limits):
    """ "a" and "b" load 32 cached tokens; "other" does not, and decodes."""
    engine, kv = engine_on_fake(max_batch_size=4, max_num_tokens=64, **limits)
    kv.cached = lambda request: 0 if request.id == "other" else 32
    kv.loads = lambda _: True
    for name in ("other", "a", "b"):
        engine.submit(engine.request(name, SamplingParams(max_tokens=9, seed=7), token_ids=[3] * 40))
    return engine, kv


class Once(dict):
    """``FakeKV.fails`` with one error for one call of a hook, the ``nth`` from now."""

    def __init__(self, hook, error, nth=1):
        super().__init__({hook: error})
        self.hook, self.left = hook, nth

    def __contains__(self, hook):
        self.left -= hook == self.hook
        return hook == self.hook and self.left == 0


COLD = {name: one.token_ids for name, one in drain(loading_engine()[0]).items()}


@pytest.mark.parametrize("hook", ["committed", "loading", "wait_loaded"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_load_that_fails_is_computed_instead(hook, nth):
    """Nobody fails, the text is the same, and what failed is not tried again."""
    first = 1 + (hook == "loading")  # every step asks who loads before it lets anybody in
    engine, kv = loading_engine()
    events = []
    engine.observe = events.append
    kv.fails = Once(hook, TransferFailed("the link is down"), nth + first - 1)
    done = drain(engine)
    assert {name: one.token_ids for name, one in done.items()} == COLD
    assert kv.fails.left <= 0, "it never failed"
    anew = [event.request_id for event in events if event.kind is EventKind.SUSPENDED]
    assert set(anew) <= {"a", "b"}
    if nth == 1:
        assert anew
    assert all(done[name].num_cached_tokens == (0 if name in anew else 32) for name in ("a", "b"))
    assert all(done[name].num_suspended == (name in anew) for name in done)
    assert (kv.held, kv.begun, engine.progress().num_loading) == ({}, [], 0)


def test_a_manager_that_loads_again_after_a_failure_fails_that_request():
    """It was told to compute all by itself: the error is told, and the loop ends."""
    engine, kv = loading_engine()
    admit = kv.admit

    def stubborn(request, txn):
        asked, request.params = request.params, SamplingParams(max_tokens=9)
        answer = admit(request, txn)
        request.params = asked
        return answer

    kv.admit = stubborn
    kv.fails = {"loading": TransferFailed("the link is down")}
    done = drain(engine)
    assert done["other"].token_ids == COLD["other"]
    for name in ("a", "b"):
        assert done[name].finish_reason is Finish.ERROR
        assert "could not be loaded: the link is down" in done[name].error


def test_a_manager_that_cannot_begin_what_is_final_takes_its_step_with_it():
    """With no load to blame: the rows of the step fail, and the next one is served."""
    engine, kv = engine_on_fake(max_batch_size=4, max_num_tokens=64)
    engine.submit(engine.request("bad", SamplingParams(max_tokens=9), token_ids=[3] * 40))
    kv.fails = Once("committed", RuntimeError("broken"))
    (bad,) = engine.step()
    assert "broken" in bad.error
    engine.submit(engine.request("good", SamplingParams(max_tokens=9), token_ids=[3] * 40))
    assert drain(engine)["good"].finish_reason is Finish.LENGTH
    assert kv.held == {}


@pytest.mark.parametrize("hook", ["prepare", "launch"])
def test_a_step_that_is_rolled_back_takes_what_it_let_in_with_it(monkeypatch, hook):
    """Also who was to load; the second try lets all of them in again, from where the cache then ends."""
    engine, kv = loading_engine()
    if hook == "prepare":
        kv.fails = Once("prepare", Veto("kv", "not now"))
    else:
        Broken(monkeypatch, type(engine._runtime), "launch", MemoryError("no"))
    engine.step()
    assert [call for call in kv.calls if call[0] == "return"] == [("return", name) for name in ("b", "a", "other")]
    assert sorted(kv.held) == ["a", "b", "other"]
    assert kv.count("committed") == 1
    assert {name: one.token_ids for name, one in drain(engine).items()} == COLD


# -- the cache's own events, and pins --------------------------------------------------------------------------------


def test_cache_events_are_told_after_the_step_and_never_inside():
    engine = stub_engine(kv_tokens=800, max_seq_len=400, max_batch_size=4, max_num_tokens=64, prefix_caching=True)
    heard = []

    def callback(events):
        # All is consistent: the step's tokens are there, and what ended has left.
        assert engine._runtime.managers.kv.cache.events.has_subscribers
        heard.append((engine.progress().num_running, [event.kind for event in events]))

    end = engine.subscribe_cache(callback)
    engine.submit(engine.request("a", SamplingParams(max_tokens=3), token_ids=[1] * 40))
    engine.step()
    assert heard == [(1, ["stored", "stored"])]
    drain(engine)
    told = len(heard)
    end()
    engine.submit(engine.request("b", SamplingParams(max_tokens=3), token_ids=[2] * 40))
    drain(engine)
    assert len(heard) == told


def test_a_cache_callback_that_raises_is_dropped_and_harms_nobody():
    engine = stub_engine(kv_tokens=800, max_seq_len=400, max_batch_size=4, max_num_tokens=64, prefix_caching=True)
    engine.subscribe_cache(lambda _: 1 / 0)
    engine.submit(engine.request("a", SamplingParams(max_tokens=3), token_ids=[1] * 40))
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        done = drain(engine)
    assert done["a"].finish_reason is Finish.LENGTH


def test_what_is_pinned_outlives_its_request():
    engine = stub_engine(kv_tokens=160, max_seq_len=96, max_batch_size=4, max_num_tokens=96, prefix_caching=True)
    engine.submit(engine.request("a", SamplingParams(max_tokens=3), token_ids=[1] * 64))
    with pytest.raises(InputError, match="running"):
        engine.pin("a")  # it waits
    engine.step()
    pin = engine.pin("a")
    drain(engine)
    for i in range(4):  # more than the pool holds beside the pinned blocks
        engine.submit(engine.request(f"b{i}", SamplingParams(max_tokens=3), token_ids=[2 + i] * 64))
    drain(engine)
    assert engine.progress().kv_used_tokens == 64
    engine.submit(engine.request("again", SamplingParams(max_tokens=3), token_ids=[1] * 64))
    assert drain(engine)["again"].num_cached_tokens >= 48
    pin.close()
    assert engine.progress().kv_used_tokens == 0
    with pytest.raises(InputError, match="running"):
        engine.pin("a")


# -- callbacks and observers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), ValueError("caller's mistake")], ids=repr)
@pytest.mark.parametrize("when", ["in the middle", "at the end", "when cancelled"])
def test_whatever_a_callback_raises_loses_and_harms_nobody_else(error, when):
    engine = stub_engine(kv_tokens=800, max_seq_len=400, max_batch_size=4, max_num_tokens=64)

    def callback(delta):
        if when == "in the middle" or delta.finish_reason is not None:
            raise error

    for name, new in (("a", 3), ("b", 1), ("c", 3)):
        params = SamplingParams(max_tokens=new, seed=1)
        listens = callback if name == "a" else None
        engine.submit(engine.request(name, params, token_ids=[1, 2, 3], on_delta=listens))
    if when == "when cancelled":
        engine.cancel("a")
    done, raised = {}, []
    while engine.has_work:
        try:
            done.update({completion.request_id: completion for completion in engine.step()})
        except BaseException as caught:  # noqa: BLE001 - the test looks at what comes out
            raised.append(caught)
    assert raised == ([] if isinstance(error, Exception) else [error])
    assert done["a"].finish_reason is Finish.ERROR
    assert type(error).__name__ in done["a"].error
    assert (done["b"].finish_reason, len(done["b"].token_ids)) == (Finish.LENGTH, 1)
    assert (done["c"].finish_reason, len(done["c"].token_ids)) == (Finish.LENGTH, 3)
    assert engine.progress().kv_used_tokens == 0


def test_an_observer_that_raises_is_dropped_and_harms_nobody():
    engine = stub_engine(kv_tokens=800, max_seq_len=400, max_batch_size=4, max_num_tokens=64)

    def broken(event):
        if event.kind is EventKind.ENDED:
            raise ValueError("I cannot write my log")

    engine.observe = broken
    for name in ("a", "b"):
        engine.submit(engine.request(name, SamplingParams(max_tokens=3), token_ids=[1, 2, 3]))
    with pytest.warns(RuntimeWarning, match="cannot write my log"):
        done = drain(engine)
    assert {completion.finish_reason for completion in done.values()} == {Finish.LENGTH}
    assert engine.observe is None


def test_an_error_long_ago_blames_nobody_now(monkeypatch):
    engine = engine_with_work()
    kv = engine._runtime.managers.kv
    admit = kv.admit
    monkeypatch.setattr(kv, "admit", lambda request, txn: 1 / 0 if request.id == "bad" else admit(request, txn))
    for name in ("long", "c", "d"):
        engine.cancel(name)
    engine.submit(engine.request("bad", SamplingParams(max_tokens=4), token_ids=[1, 2, 3]))
    assert "bad" in {completion.request_id for _ in range(3) for completion in engine.step()}
    monkeypatch.setattr(kv, "short_of", lambda *_: 1 / 0)
    done = drain(engine)
    assert {done[name].finish_reason for name in ("a", "b")} == {Finish.ERROR}


def test_a_manager_that_cannot_run_again_is_not_retried(monkeypatch):
    engine = engine_with_work()
    monkeypatch.setattr(engine._steps, "_may_retry", False)
    Broken(monkeypatch, type(engine._runtime), "launch", MemoryError("no"))
    done = drain(engine)
    assert any(completion.finish_reason is Finish.ERROR for completion in done.values())
    assert engine.result().retried_steps == ()


def test_an_observer_hears_of_every_request_from_arrival_to_end():
    engine = stub_engine(kv_tokens=800, max_seq_len=400, max_batch_size=4, max_num_tokens=64)
    events = []
    engine.observe = events.append
    for i in range(6):
        engine.submit(engine.request(f"r{i}", SamplingParams(max_tokens=5), token_ids=[1] * 20))
    engine.cancel("r5")
    drain(engine)
    for i in range(6):
        kinds = [event.kind for event in events if event.request_id == f"r{i}"]
        assert kinds[0] is EventKind.ARRIVED
        assert kinds[-1] is EventKind.ENDED
        assert kinds.count(EventKind.ENDED) == 1


# -- pins --------------------------------------------------------------------------------------------------------------


def pinned_engine():
    return stub_engine(kv_tokens=256, max_seq_len=256, max_batch_size=4, prefix_caching=True)


def run(engine, *, most=300):
    done = {}
    for _ in range(most):
        done |= {one.request_id: one for one in engine.step()}
        if not engine.has_work:
            return done
    raise AssertionError(f"still at work after {most} steps: {engine.progress()}")


def long_request(engine, name, *, prompt, most):
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    engine.submit(engine.request(name, params, token_ids=[sum(map(ord, name)) % 200] * prompt))


def test_who_cannot_begin_because_of_a_pin_is_told_and_the_next_one_runs():
    """Alone in the engine it would wait for ever for what only the caller can give back."""
    engine = pinned_engine()
    long_request(engine, "a", prompt=128, most=10)
    engine.step()
    engine.step()
    pin = engine.pin("a")
    run(engine)
    long_request(engine, "b", prompt=100, most=100)
    long_request(engine, "c", prompt=10, most=10)
    done = run(engine)
    assert done["b"].finish_reason is Finish.ERROR
    assert "1 open pin with 8 blocks cannot be taken back. To change: close pins" in done["b"].error
    assert done["c"].finish_reason is Finish.LENGTH
    pin.close()
    long_request(engine, "d", prompt=100, most=100)
    assert run(engine)["d"].finish_reason is Finish.LENGTH


def test_who_runs_short_because_of_a_pin_fails_itself_and_nobody_else():
    """Under the optimistic policy: the blocks it was expected not to need are pinned meanwhile."""
    engine = pinned_engine()
    for number in range(40):
        long_request(engine, f"s{number}", prompt=1, most=2)
    run(engine)
    long_request(engine, "b", prompt=20, most=200)
    long_request(engine, "a", prompt=128, most=4)
    for _ in range(3):
        engine.step()
    engine.pin("a")
    long_request(engine, "c", prompt=10, most=10)
    done = run(engine)
    assert {name: one.finish_reason for name, one in done.items() if name in "bc"} == {
        "b": Finish.ERROR,
        "c": Finish.LENGTH,
    }
    assert "'b' runs alone" in done["b"].error
