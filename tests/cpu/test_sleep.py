"""An engine that sleeps: its memory is the device's again, its requests wait, and nothing is lost but time."""

from __future__ import annotations

import asyncio
import warnings

import pytest
from test_engine import MEMORY, ask, assert_idle, drain, options, reference, texts
from test_engine_cache import asked

from tonnage import LLM, AsyncLLM
from tonnage.device.fault import FaultDriver
from tonnage.device.host import HostDriver
from tonnage.engine import Finish, start
from tonnage.engine.stub import stub_engine
from tonnage.errors import CannotMaterialize, DriverError, InvalidSetting, RangePoisoned, UserError
from tonnage.sampling import SamplingParams
from tonnage.units import MiB

pytestmark = pytest.mark.usefixtures("light_collector")


@pytest.fixture(scope="module", params=[False, True], ids=["one at a time", "overlap"])
def engine(request, tiny_llama):
    with start(options(tiny_llama, overlap=request.param)) as engine:
        yield engine


def held(engine, owner):
    return sum(entry.physical_bytes for entry in engine.ledger.snapshot().entries if entry.owner == owner)


NAPS = [(), ("kv",), ("weights",), ("weights", "kv"), ("graphs",)]


@pytest.mark.parametrize("tags", NAPS, ids=" ".join)
def test_text_is_the_same_through_a_nap(engine, tags, tiny_llama):
    lengths = (5, 17, 40)
    requests = {f"{tags}{n}": ask(engine, f"{tags}{n}", length=n, max_tokens=20) for n in lengths}
    prompts = {name: list(request.token_ids) for name, request in requests.items()}
    for _ in range(7):
        engine.step()
    engine.sleep(*tags)
    late = ask(engine, f"{tags} late", length=9, max_tokens=5)
    prompts[late.id] = list(late.token_ids)
    engine.wake(*tags)
    done = drain(engine)
    wanted = {name: reference(tiny_llama, ids, 5 if name == late.id else 20) for name, ids in prompts.items()}
    assert texts(done) == wanted
    assert_idle(engine)
    assert engine.asleep == frozenset()


def test_memory_goes_and_comes_back_to_where_it_was(engine):
    before = {owner: held(engine, owner) for owner in ("weights", "kv cache", "attention scratch")}
    slept = engine.sleep()
    assert slept.freed_bytes["weights"] == before["weights"] > 0
    assert slept.freed_bytes["kv"] == before["kv cache"] + before["attention scratch"]
    assert not {owner for owner, _ in slept.left} & before.keys()
    assert engine.asleep == {"weights", "kv", "graphs"}
    engine.sleep("weights")  # again: nothing
    engine.wake("weights")
    assert (held(engine, "weights"), held(engine, "kv cache")) == (before["weights"], 0)
    with pytest.raises(UserError, match=r"asleep \(kv\)"):
        engine.step()
    with pytest.raises(UserError, match="would stay asleep"):
        engine.wake("graphs")
    engine.wake()
    assert {owner: held(engine, owner) for owner in before} == before


def test_what_was_cached_is_not_found_any_more(engine):
    first = ask(engine, "first", length=48, max_tokens=4)
    drain(engine)
    engine.sleep("kv")
    engine.wake()
    again = ask(engine, "again", length=48, max_tokens=4)
    (done,) = drain(engine)
    assert (done.num_cached_tokens, again.generated_ids) == (0, first.generated_ids)


def test_penalty_tables_go_too(engine):
    ask(engine, "r", length=8, max_tokens=12, repetition_penalty=1.3)
    for _ in range(4):
        engine.step()
    assert held(engine, "penalties") > 0
    engine.sleep("kv")
    assert held(engine, "penalties") == 0
    engine.wake()
    (done,) = drain(engine)
    ask(engine, "same", length=8, max_tokens=12, repetition_penalty=1.3)
    (same,) = drain(engine)
    assert done.token_ids == same.token_ids


def test_who_is_asleep_takes_requests_and_gives_them_up(engine):
    ask(engine, "runs", length=8, max_tokens=30)
    for _ in range(3):
        engine.step()
    engine.sleep()
    ask(engine, "waits", length=8, max_tokens=3)
    engine.cancel("runs")
    (cancelled,) = engine.step()  # an end is told, asleep or not
    assert (cancelled.request_id, cancelled.finish_reason) == ("runs", Finish.CANCELLED)
    with pytest.raises(UserError, match="call wake"):
        engine.step()
    engine.wake()
    assert {one.request_id: one.finish_reason for one in drain(engine)} == {"waits": Finish.LENGTH}


def test_pins_keep_the_cache_awake(engine):
    ask(engine, "r", length=40, max_tokens=20)
    for _ in range(5):
        engine.step()
    with engine.pin("r"):
        with pytest.raises(UserError, match="pins hold blocks"):
            engine.sleep()
        assert engine.asleep == frozenset()
        assert engine.progress().num_running == 1
    engine.sleep()
    engine.wake()
    drain(engine)
    assert_idle(engine)


def test_an_unknown_tag_is_refused(engine):
    with pytest.raises(InvalidSetting, match="weights, kv and graphs"):
        engine.sleep("kv", "coffee")
    assert engine.asleep == frozenset()


def test_a_wake_without_memory_changes_nothing_and_may_be_repeated(tiny_llama):
    drivers = []

    def faulty(capacity):
        drivers.append(FaultDriver(HostDriver(capacity)))
        return drivers[0]

    with start(options(tiny_llama), make_driver=faulty) as engine:
        ask(engine, "r", length=20, max_tokens=10)
        for _ in range(4):
            engine.step()
        engine.sleep()
        drivers[0].arm(2, forever=True, calls=frozenset({"phys_create"}))
        with pytest.raises(CannotMaterialize):
            engine.wake()
        drivers[0].arm(None)
        assert engine.asleep == {"weights", "kv", "graphs"}
        engine.wake()
        (done,) = drain(engine)
        assert done.finish_reason is Finish.LENGTH


def test_a_release_that_fails_half_way_leaves_nothing_that_anybody_touches(tiny_llama):
    drivers = []

    def faulty(capacity):
        drivers.append(FaultDriver(HostDriver(capacity)))
        return drivers[0]

    engine = start(options(tiny_llama), make_driver=faulty)
    ask(engine, "r", length=20, max_tokens=10)
    for _ in range(4):
        engine.step()
    drivers[0].arm(1, forever=True, calls=frozenset({"unmap"}))
    with pytest.raises(DriverError):
        engine.sleep("weights", "kv")
    drivers[0].arm(None)
    assert engine.asleep == {"weights", "kv"}
    with pytest.raises(UserError, match="asleep"):
        engine.step()
    with pytest.raises(RangePoisoned):
        engine.wake()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # what could not be unmapped stays
        engine.close()


def test_a_device_without_virtual_memory_keeps_its_cache_when_it_is_refused(tiny_llama):
    with start(options(tiny_llama, static_pool=True)) as engine:
        ask(engine, "r", length=40, max_tokens=20)
        for _ in range(4):
            engine.step()
        before = engine.stats()
        with pytest.raises(UserError, match="no virtual memory"):
            engine.sleep()
        assert (engine.stats(), engine.asleep, engine.progress().num_running) == (before, frozenset(), 1)


def test_who_ends_when_it_falls_asleep_is_told_before_it_wakes(tiny_llama):
    with start(options(tiny_llama, overlap=True)) as engine:
        ask(engine, "r", length=8, max_tokens=2)
        for _ in range(2):
            engine.step()
        engine.sleep()
        assert engine.has_ended
        (done,) = engine.step()
        assert done.finish_reason is Finish.LENGTH
        with pytest.raises(UserError, match="asleep"):
            engine.step()
        engine.wake()
        assert not engine.has_work


def test_a_sleeper_closes(tiny_llama):
    engine = start(options(tiny_llama))
    engine.sleep()
    engine.close()
    with pytest.raises(UserError, match="closed"):
        engine.wake()


# -- the Python API


def test_who_generates_in_its_sleep_is_told_to_wake_it_and_loses_nothing(tiny_llama):
    limits = {"memory": MEMORY, "max_batch_size": 4, "max_seq_len": 64, "fence": False}
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(str(tiny_llama), **limits) as llm:
        (wanted,) = llm.generate([[1, 2, 3, 4]], params)
        stream = llm.stream([1, 2, 3, 4], params)
        first = next(stream)
        assert llm.sleep("kv").freed_bytes["kv"] > 0
        with pytest.raises(UserError, match="call wake"):
            llm.generate([[1, 2, 3, 4]], params)
        llm.wake()
        rest = list(stream)
        assert first.tokens[0].token == wanted.samples[0].token_ids[0]
        assert stream.output.samples[0].token_ids == wanted.samples[0].token_ids
        assert sum(len(delta.tokens) for delta in rest) == 11
        (again,) = llm.generate([[1, 2, 3, 4]], params)
        assert again.samples[0].token_ids == wanted.samples[0].token_ids


def test_who_waits_for_a_sleeper_is_answered_when_it_wakes(tiny_llama):
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    async def main():
        limits = {"memory": MEMORY, "max_batch_size": 4, "max_seq_len": 64, "fence": False}
        async with AsyncLLM(str(tiny_llama), **limits) as llm:
            (wanted,) = await llm.generate([[1, 2, 3, 4]], params)
            await llm.sleep()
            asked = asyncio.ensure_future(llm.generate([[1, 2, 3, 4]], params))
            await asyncio.sleep(0.2)
            assert not asked.done()
            await llm.wake()
            (found,) = await asked
            return wanted, found

    wanted, found = asyncio.run(main())
    assert found.samples[0].token_ids == wanted.samples[0].token_ids


# -- the host tier


def test_what_the_host_keeps_is_found_after_the_nap(tiny_llama):
    with start(asked(tiny_llama, host_kv_bytes=2 * MiB)) as engine:
        first = ask(engine, "first", length=64, max_tokens=4)
        drain(engine)
        offloaded = engine.stats()["kv.offloaded"]
        engine.sleep("kv")
        assert engine.stats()["kv.offloaded"] > offloaded
        assert engine.stats()["kv.cached"] == 0
        engine.wake()
        again = ask(engine, "again", length=64, max_tokens=4)
        (done,) = drain(engine)
        assert (done.num_cached_tokens, again.generated_ids) == (48, first.generated_ids)  # whole blocks


@pytest.mark.parametrize("overlap", [False, True], ids=["one at a time", "overlap"])
@pytest.mark.parametrize("host_kv_tokens", [0, 256, 4096])
def test_blocks_never_lead_to_what_has_gone(overlap, host_kv_tokens):
    """The contents of every block that a step reads are looked at."""
    engine = stub_engine(
        kv_tokens=1024, max_seq_len=256, max_batch_size=16, max_num_tokens=128, prefix_caching=True, head_tokens=128,
        host_kv_tokens=host_kv_tokens, load_steps=3, checks_contents=True, overlap=overlap,
    )  # fmt: skip
    with engine:
        for round_ in range(6):
            for i in range(24):
                params = SamplingParams(max_tokens=3 + i, ignore_eos=True, seed=i)
                ids = [1 + j % 200 for j in range(20 + 7 * (i % 8))]
                engine.submit(engine.request(f"{round_}.{i}", params, token_ids=ids))
            for _ in range(9):
                engine.step()
            engine.sleep("kv")
            engine.wake()
            drain(engine)
        assert engine._runtime.shadow.told == []
        assert_idle(engine)
        assert (engine.stats()["kv.loaded"] > 0) == (host_kv_tokens > 0)
