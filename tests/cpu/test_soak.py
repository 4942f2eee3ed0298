"""Soaks of the stub by the thousand and of the tiny model, and what the soak's own checks find in unsound engines."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from small_models import library_model, save

from tonnage.bench import soak as soak_module
from tonnage.bench.mix import BAD_VALUES, SALTS, Mix
from tonnage.bench.moves import Ask
from tonnage.bench.rules import Limits
from tonnage.bench.soak import RULES, Soak, make_mix
from tonnage.bench.soak_report import soak_document
from tonnage.bench.witness import RULES as WITNESS_RULES
from tonnage.bench.witness import Heard, Witness
from tonnage.caching import CacheParams
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import Completion, EngineOptions, Finish, start
from tonnage.engine.mishaps import Mishaps
from tonnage.engine.outcome import TokenLogprobs
from tonnage.engine.queue import WaitingQueue
from tonnage.engine.request import Delta
from tonnage.engine.scheduler import Scheduler
from tonnage.engine.shadow import EMPTY, Shadow, ShadowMover
from tonnage.engine.stub import stub_engine
from tonnage.errors import DriverError, InvalidSetting
from tonnage.layout import window_blocks
from tonnage.resources import prefixes
from tonnage.resources.cache import BlockCache
from tonnage.resources.gate import PrefillTokens
from tonnage.resources.holdings import _sources
from tonnage.resources.incoming import Incoming
from tonnage.resources.kv import KVManager
from tonnage.resources.loads import Loads
from tonnage.resources.prefixes import Prefixes
from tonnage.resources.room import Room
from tonnage.resources.tables import PageTables
from tonnage.sampling import SamplingParams
from tonnage.terms import LineKind, MemoryKind
from tonnage.units import GiB, MiB, ceil_div

#: A pool of two sequences of full length, where most end soon: many wait, and some are suspended.
TIGHT = {"kv_tokens": 512, "max_seq_len": 256, "max_batch_size": 48, "max_num_tokens": 256, "end_probability": 0.1}
STUB = {"kv_tokens": 2048, "max_seq_len": 256, "max_batch_size": 48, "max_num_tokens": 256, "end_probability": 0.02}
#: Prefixes are shared, evicted blocks go to the host and come back slowly, and the head is lent and taken back.
SHARED = {"prefix_caching": True, "checks_contents": True}
TIERED = {**SHARED, "head_tokens": 512, "host_kv_tokens": 4096, "load_steps": 4}
SMALL_TIERS = {**SHARED, "head_tokens": 256, "host_kv_tokens": 1024, "load_steps": 6}


def soaked(engine, num_requests, *, seed=0, has_sampler=False, mishaps=None):
    with engine:
        return Soak(
            engine,
            make_mix(engine, seed),
            is_over=lambda asked, _: asked >= num_requests,
            has_sampler=has_sampler,
            mishaps=mishaps,
        ).run()


def broken_by(engine, num_requests=300, *, seed=0):
    return {verdict.rule for verdict in soaked(engine, num_requests, seed=seed).verdicts if verdict.num_broken}


#: Sizes, requests, and suspensions that there must be at least.
SETTINGS = {
    "roomy": (STUB, 2000, 0),
    "reserve_all": ({**STUB, "admission": "reserve_all"}, 600, 0),
    "tight": (TIGHT, 800, 3),
    "uncut": ({**TIGHT, "chunk_tokens": "none"}, 400, 1),
    "small blocks": ({**TIGHT, "chunk_tokens": 32, "block_tokens": 8, "max_num_tokens": 64}, 400, 1),
}


@pytest.mark.parametrize(("setting", "num_requests", "num_suspended"), SETTINGS.values(), ids=SETTINGS)
def test_the_stub_holds(setting, num_requests, num_suspended):
    report = soaked(stub_engine(**setting), num_requests, seed=3)
    assert report.is_good, "\n".join(report.told)
    assert sum(report.outcomes.values()) == num_requests
    # It is no soak if the hard cases did not come up.
    assert all(report.outcomes[how] >= num_requests // 100 for how in ("stop", "length", "cancelled", "refused"))
    assert report.outcomes["error"] >= 3
    assert report.longest_wait_steps > 100
    assert report.most_overtaken > 10
    assert report.counts.get("suspended", 0) >= num_suspended


#: Sizes with a cache, requests, and how many suspensions, loads, copies of partial blocks there must be at least.
CACHES = {
    "shared": ({**STUB, **SHARED}, 400, 0, 0, 20),
    "tiers": ({**STUB, **TIERED}, 400, 0, 50, 20),
    "slow link": ({**STUB, **TIERED, "link_blocks": 4}, 300, 0, 20, 10),
    "tight": ({**TIGHT, **SMALL_TIERS}, 300, 1, 50, 5),
    "one sequence fills the pool": ({**TIGHT, **SMALL_TIERS, "kv_tokens": 256}, 200, 1, 50, 5),
    "uncut": ({**TIGHT, **SMALL_TIERS, "chunk_tokens": "none"}, 200, 1, 30, 3),
    "reserve_all": ({**STUB, **TIERED, "admission": "reserve_all", "block_tokens": 8}, 300, 0, 50, 20),
}


@pytest.mark.parametrize("setting", CACHES.values(), ids=CACHES)
def test_the_stub_holds_with_a_cache(setting):
    sizes, num_requests, num_suspended, num_loaded, num_copied = setting
    report = soaked(stub_engine(**sizes), num_requests, seed=5)
    assert report.is_good, "\n".join(report.told)
    assert report.cache["hit_tokens"] > report.cache["queried_tokens"] // 3
    assert report.cache["evicted"] > 100
    if sizes["kv_tokens"] > sizes["max_seq_len"]:  # else nothing may be pinned
        assert report.cache["pins"] > 0
    assert report.cache["loaded"] >= num_loaded
    assert report.cache["partial_copies"] >= num_copied
    assert report.counts.get("suspended", 0) >= num_suspended
    if "head_tokens" in sizes:
        assert report.cache["taken_back"] > 10
        assert report.cache["moved"] > 100


@pytest.mark.parametrize("name", [name for name in CACHES if name != "shared"])
def test_the_stub_holds_though_steps_and_copies_fail(name):
    sizes, num_requests, *_ = CACHES[name]
    mishaps = Mishaps(probability=0.015, seed=3)
    report = soaked(stub_engine(**sizes, mishaps=mishaps), num_requests, seed=6, mishaps=mishaps)
    assert report.is_good, "\n".join(report.told)
    assert {"veto", "out of memory", "not finite"} <= report.faults.keys()
    assert report.outcomes["length"] + report.outcomes["stop"] > num_requests // 3
    assert len(report.result.retried_steps) > 1
    assert report.counts["fault"] > 3


def test_a_soak_of_so_many_requests_repeats_itself():
    once, again = (soaked(stub_engine(**STUB, **TIERED), 300, seed=8) for _ in range(2))
    assert (once.outcomes, once.counts, once.num_tokens) == (again.outcomes, again.counts, again.num_tokens)
    assert once.cache == again.cache
    assert soaked(stub_engine(**STUB), 300, seed=9).counts != once.counts


def test_a_real_engine_holds(tiny_llama):
    limits = LimitKnobs(max_seq_len=Setting(96), max_batch_size=Setting(8), max_num_tokens=Setting(64))
    options = EngineOptions(model=str(tiny_llama), memory_bytes=GiB, limit_knobs=limits, fence=False)
    report = soaked(start(options), 150, seed=2, has_sampler=True)
    assert report.is_good, "\n".join(report.told)
    assert report.outcomes["length"] > 50
    document = json.loads(json.dumps(soak_document(report, seed=2, command=["tonnage", "soak"])))
    assert document["is_good"]
    assert document["rules"]["blocks"]["broken"] == 0
    assert document["memory"]["unattributed_bytes"] is not None


#: Windows alone, as many layers with one as without, few without: groups of layers share the pool.
WINDOWED = {
    "mistral, a window": {"sliding_window": 18},
    "gemma2": {"sliding_window": 18},
    "gemma3": {"sliding_window": 18, "num_hidden_layers": 5, "sliding_window_pattern": 5},
}


@pytest.mark.parametrize("name", WINDOWED)
def test_an_engine_with_windows_holds_and_is_judged_by_what_its_groups_take(name, tmp_path, light_collector):
    """In a pool for less than two of the longest."""
    folder = save(library_model(name, **WINDOWED[name]), tmp_path)
    limits = LimitKnobs(max_seq_len=Setting(96), max_batch_size=Setting(8), max_num_tokens=Setting(64))
    knobs = Knobs(kv_tokens=Setting(170), block_tokens=Setting(4))
    options = EngineOptions(model=str(folder), memory_bytes=GiB, knobs=knobs, limit_knobs=limits, fence=False)
    report = soaked(start(options), 60, seed=3, has_sampler=True)
    assert report.is_good, "\n".join(report.told)
    assert report.outcomes["length"] > 20


@pytest.mark.parametrize("windows", [(None,), (18,), (None, 18), (None, 18, 5)], ids=str)
def test_the_most_that_a_sequence_holds_is_no_less_than_its_layers_need(windows):
    limits = Limits(
        num_blocks=99, block_tokens=4, max_seq_len=400, max_batch_size=1, max_num_tokens=1, max_overtaken=1,
        windows=windows,
    )  # fmt: skip
    for num_tokens in range(1, 200):
        needed = sum(
            ceil_div(num_tokens, 4) if window is None else min(ceil_div(num_tokens, 4), window_blocks(window, 4))
            for window in windows
        )
        assert needed <= limits.most_blocks(num_tokens) <= needed + sum(window is not None for window in windows)


def test_time_ends_a_soak():
    now = iter(range(10**6))
    with stub_engine(**STUB) as engine:
        soak = Soak(engine, make_mix(engine, 0), is_over=lambda _, passed: passed >= 40, has_sampler=False,
                    clock=lambda: next(now))  # fmt: skip
        assert sum(soak.run().outcomes.values()) <= 41


# -- engines that are not sound ------------------------------------------------------------------------------------


def last_in_first_out(monkeypatch):
    monkeypatch.setattr(
        WaitingQueue, "peek", lambda self: max(self._live.values(), key=lambda r: r.arrival, default=None)
    )


def suspends_the_oldest(monkeypatch):
    monkeypatch.setattr(Scheduler, "_victim", lambda self: self._oldest())


def bounds_no_step(monkeypatch):
    monkeypatch.setattr(PrefillTokens, "limit", lambda *_: None)


def admits_one_request_at_a_time(monkeypatch):
    admitted = Scheduler._admitted
    monkeypatch.setattr(
        Scheduler,
        "_admitted",
        lambda self, request, room, txn: None if self.num_running else admitted(self, request, room, txn),
    )


def keeps_a_block(monkeypatch):
    free = KVManager.free

    def forgets(self, request_id, **how):
        free(self, request_id, **how)
        if request_id.endswith("7.0"):
            self.cache.allocate(1)

    monkeypatch.setattr(KVManager, "free", forgets)


def starves(monkeypatch):
    by_rank = WaitingQueue.peek

    def forgets_who_was_passed(self):
        for request in self._live.values():
            request.num_overtaken = 0
        return by_rank(self)

    monkeypatch.setattr(WaitingQueue, "peek", forgets_who_was_passed)
    monkeypatch.setattr("tonnage.engine.queue.MAX_OVERTAKEN", 20)


def matches_the_last_token_too(monkeypatch):
    monkeypatch.setattr(
        Prefixes, "match", lambda self, text: self._cache.match(text.chain, max_tokens=len(text.tokens) - 1)
    )


def ignores_the_salt(monkeypatch):
    monkeypatch.setattr(prefixes, "scope_digest", lambda **_: b"0" * 32)


def finds_nothing(monkeypatch):
    monkeypatch.setattr(Prefixes, "match", lambda self, text: self._cache.match(text.chain, max_tokens=0))


def sees_late_that_loads_have_ended(monkeypatch):
    waiting, calls = Loads.waiting, itertools.count(1)

    def slow(self):
        return waiting(self) if next(calls) % 60 == 0 else [*self._asked, *self._begun]

    monkeypatch.setattr(Loads, "waiting", slow)


def looks_at_old_slots(monkeypatch):
    monkeypatch.setattr(PageTables, "refresh", lambda *_: None)


def launches_before_blocks_are_out(monkeypatch):
    monkeypatch.setattr(BlockCache, "flush", lambda _: None)


def runs_while_it_loads(monkeypatch):
    monkeypatch.setattr(BlockCache, "is_loaded", lambda *_: True)


def frees_slots_of_loads_at_once(monkeypatch):
    load = Incoming.load

    def hasty(self, ids):
        before = len(self._loading)
        load(self, ids)
        for one in self._loading[before:]:
            self._blocks.free_host.push(one.host_slots)
            one.host_slots = one.host_slots[:0]

    monkeypatch.setattr(Incoming, "load", hasty)


def forgets_to_copy(monkeypatch):
    monkeypatch.setattr(BlockCache, "copy_partial", lambda self, partial, _: self.release(_sources(partial)))


def leaves_blocks_in_the_scratch(monkeypatch):
    def lazy(self, num_slots, **_):
        self.lent = num_slots

    monkeypatch.setattr(Room, "take_back", lazy)


UNSOUND = {
    last_in_first_out: "order",
    suspends_the_oldest: "suspension",
    bounds_no_step: "tokens",
    admits_one_request_at_a_time: "idleness",
    keeps_a_block: "held",
    starves: "starvation",
}
UNSOUND_CACHES = {
    matches_the_last_token_too: "reuse",
    ignores_the_salt: "reuse",
    finds_nothing: "reuse",
    sees_late_that_loads_have_ended: "waiting",
    looks_at_old_slots: "contents",
    launches_before_blocks_are_out: "contents",
    runs_while_it_loads: "contents",
    frees_slots_of_loads_at_once: "contents",
    forgets_to_copy: "contents",
    leaves_blocks_in_the_scratch: "scratch",
    keeps_a_block: "held",
}


@pytest.mark.parametrize("unsound", UNSOUND, ids=lambda make: make.__name__)
def test_a_defect_put_into_the_engine_is_found(monkeypatch, unsound):
    unsound(monkeypatch)
    assert UNSOUND[unsound] in broken_by(stub_engine(**TIGHT), 200, seed=3)


@pytest.mark.parametrize("unsound", UNSOUND_CACHES, ids=lambda make: make.__name__)
def test_a_defect_put_into_the_cache_is_found(monkeypatch, unsound):
    unsound(monkeypatch)
    assert UNSOUND_CACHES[unsound] in broken_by(stub_engine(**STUB, **SMALL_TIERS), 300, seed=3)


def test_a_completion_that_never_comes_and_one_that_nobody_asked_for(monkeypatch):
    engine = stub_engine(**STUB)
    step = engine.step

    def mixed_up():
        return [replace(each, request_id="nobody") if each.request_id == "r2.0" else each for each in step()]

    monkeypatch.setattr(engine, "step", mixed_up)
    report = soaked(engine, 30)
    assert {v.rule: v.num_broken for v in report.verdicts if v.num_broken} == {"completions": 2}


def test_a_bad_value_that_is_accepted(monkeypatch):
    monkeypatch.setattr(soak_module, "BAD_VALUES", ({"top_p": 0.5},))
    assert broken_by(stub_engine(**STUB), 1) == {"bad values"}


def test_lines_that_moved_bytes_that_nobody_explains_and_steps_that_ran_out(monkeypatch):
    engine = stub_engine(**STUB)
    result, calls = engine.result, []

    def spoiled():
        calls.append(1)
        if len(calls) == 1:
            return result()  # at the start
        account = engine.ledger.open(owner="leak", line=LineKind.KV, memory=MemoryKind.CPU)
        account.add(4096, 4096)
        found = result()
        return replace(found, snapshot=replace(found.snapshot, unattributed=4 * GiB), retried_steps=("kv", "kv"))

    monkeypatch.setattr(engine, "result", spoiled)
    report = soaked(engine, 1)
    assert {v.rule: v.num_broken for v in report.verdicts if v.num_broken} == {"ledger": 2, "defects": 2}
    assert not report.is_good


def test_what_no_line_explains_has_a_bar(monkeypatch):
    engine = stub_engine(**STUB)
    result, device = engine.result, engine.plan.device_bytes
    for unexplained, rules in ((max(32 * MiB, device * 3 // 100), set()), (device * 3 // 100 + 1, {"ledger"})):
        monkeypatch.setattr(
            engine, "result", lambda n=unexplained: replace(r := result(), snapshot=replace(r.snapshot, unattributed=n))
        )
        soak = Soak(engine, make_mix(engine, 0), is_over=lambda asked, _: asked >= 1, has_sampler=False)
        assert {v.rule for v in soak.run().verdicts if v.num_broken} == rules
    engine.close()


# -- the shadow --------------------------------------------------------------------------------------------------


def shadow_mover(**how):
    shadow = Shadow(num_slots=4, num_host_slots=3, block_tokens=2, max_batch_size=1, max_seq_len=4)
    shadow.device[:] = np.arange(8).reshape(4, 2)
    return shadow, ShadowMover(64, shadow, **{"load_steps": lambda: 0, **how})


def ids(*numbers):
    return np.array(numbers, np.int32)


def test_an_offload_reads_its_slots_as_late_as_it_may():
    shadow, mover = shadow_mover()
    mover.offload(ids(1, 2), ids(2, 0))
    assert (shadow.host == EMPTY).all()
    shadow.device[1] = 70  # too early: nobody has waited
    mover.before_launch()
    assert shadow.host.tolist() == [[4, 5], [EMPTY] * 2, [70, 70]]


@pytest.mark.parametrize("late", [lambda m: m.move(ids(3), ids(1)), lambda m: m.load(ids(0), ids(1))])
def test_copies_that_come_later_wait_for_an_offload(late):
    shadow, mover = shadow_mover()
    mover.offload(ids(1), ids(2))
    late(mover)
    assert shadow.host[2].tolist() == [2, 3]


def test_loads_come_after_their_steps_and_in_order():
    steps = iter((2, 0, 5))
    shadow, mover = shadow_mover(load_steps=lambda: next(steps))
    mover.offload(ids(0, 1, 2), ids(0, 1, 2))
    loads = [mover.load(ids(slot), ids(3 - slot)) for slot in range(3)]
    assert [load.is_done for load in loads] == [False, False, False]
    mover.step()
    assert not loads[1].is_done
    mover.step()
    assert [load.is_done for load in loads] == [True, True, False]
    assert shadow.device.tolist() == [[0, 1], [2, 3], [2, 3], [0, 1]]
    loads[2].wait()
    assert shadow.device[1].tolist() == [4, 5]


def test_a_copy_that_fails_leaves_its_destinations_undefined():
    def fails(call):
        raise DriverError(call, "no")

    shadow, mover = shadow_mover(before_copy=fails)
    with pytest.raises(DriverError, match="move"):
        mover.move(ids(0), ids(3))
    assert shadow.device.tolist() == [[0, 1], [2, 3], [4, 5], [EMPTY] * 2]
    with pytest.raises(DriverError, match="offload"):
        mover.offload(ids(0), ids(1))
    with pytest.raises(DriverError, match="load"):
        mover.load(ids(0), ids(0))
    assert shadow.device[0].tolist() == [EMPTY] * 2
    assert mover.stats()["num_batches"] == 0


def test_scratch_that_somebody_wrote_to_is_noticed():
    shadow, _ = shadow_mover()
    shadow.take_scratch(2)
    shadow.give_scratch()
    assert shadow.num_wrong == 0
    shadow.take_scratch(2)
    shadow.device[1, 0] = 7
    shadow.give_scratch()
    assert shadow.num_wrong == 1


# -- the witness ---------------------------------------------------------------------------------------------------


ASKED = SamplingParams(max_tokens=3, stop=["xy"], stop_token_ids=[9], logprobs=1, prompt_logprobs=0, ignore_eos=True)
TOP = ((5, -0.1),)
GOOD = Completion(
    request_id="a", text="abc", token_ids=(1, 2, 3), logprobs=(-1.0, -1.0, -1.0), num_prompt_tokens=2,
    finish_reason=Finish.LENGTH, error=None, waited=False, top_logprobs=(TOP, TOP, TOP),
    prompt_logprobs=(TokenLogprobs(4, -2.0),),
)  # fmt: skip
HEARD = [("ab", (1, 2), None), ("c", (3,), Finish.LENGTH)]


def witnessed(*, heard=HEARD, has_raised=False, was_cancelled=False, has_sampler=True, asked=ASKED, **fields):
    explains = fields.pop("explains", lambda _: False)
    witness = Witness(has_sampler=has_sampler, explains=explains)
    ear = Heard()
    for text, tokens, finish in heard:
        told = tuple(TokenLogprobs(token, -1.0) for token in tokens)
        ear.take(Delta(request_id="a", text=text, tokens=told, finish_reason=finish))
    ear.has_raised = has_raised
    ask = Ask(id="a", token_ids=[3, 4], params=asked, listens=True)
    witness.check(ask, replace(GOOD, **fields), ear, was_cancelled=was_cancelled)
    return set(witness.broken)


NOT_SHARED = replace(ASKED, prompt_logprobs=None, cache=CacheParams(reuse=False))
STOPPED = {"finish_reason": Finish.STOP, "heard": [("ab", (1, 2), None), ("c", (3,), Finish.STOP)]}
#: What is wrong with the completion, or with what was heard -> the rule that must find it.
WRONG = [
    ({"finish_reason": Finish.ERROR, "error": "no", "has_raised": False}, "outcomes"),
    ({"error": "no"}, "outcomes"),
    ({"has_raised": True}, "outcomes"),
    ({"finish_reason": Finish.CANCELLED}, "outcomes"),
    ({"token_ids": (1, 2)}, "lengths"),
    ({"token_ids": (1, 2, 3, 4)}, "lengths"),
    ({"num_prompt_tokens": 3}, "lengths"),
    ({"num_cached_tokens": 2, "asked": replace(ASKED, prompt_logprobs=None), "prompt_logprobs": ()}, "lengths"),
    ({"num_cached_tokens": 1}, "lengths"),  # it wants log-probabilities of its prompt
    ({"num_cached_tokens": 1, "asked": NOT_SHARED, "prompt_logprobs": ()}, "lengths"),
    ({**STOPPED, "stop_reason": "xy", "asked": replace(ASKED, min_tokens=3), "token_ids": (1, 2)}, "lengths"),
    ({**STOPPED, "stop_reason": "zz"}, "stops"),
    ({**STOPPED, "stop_reason": "xy", "text": "axyb"}, "stops"),
    ({**STOPPED, "stop_reason": "xy", "asked": replace(ASKED, include_stop=True)}, "stops"),
    ({**STOPPED, "stop_reason": None}, "stops"),
    ({**STOPPED, "stop_reason": 9}, "stops"),
    ({**STOPPED, "stop_reason": 3}, "stops"),
    ({"text": "abcd"}, "texts"),
    ({"heard": HEARD[:1]}, "texts"),
    ({"heard": [*HEARD, ("", (), Finish.STOP)]}, "texts"),
    ({"heard": [("ab", (1,), None), ("c", (3,), Finish.LENGTH)]}, "texts"),
    ({"logprobs": (-1.0,)}, "log-probabilities"),
    ({"top_logprobs": ()}, "log-probabilities"),
    ({"top_logprobs": (TOP, (), TOP)}, "log-probabilities"),
    ({"prompt_logprobs": ()}, "log-probabilities"),
    ({"prompt_logprobs": (TokenLogprobs(3, -1.0),)}, "log-probabilities"),
]


@pytest.mark.parametrize(("wrong", "rule"), WRONG)
def test_the_witness_sees_what_is_wrong(wrong, rule):
    assert rule in witnessed(**wrong)


def test_every_rule_of_the_witness_is_tried():
    assert {rule for _, rule in WRONG} == WITNESS_RULES.keys()
    assert RULES.keys() == {"bad values", "completions", "held", "contents", "scratch", "ledger", "defects", "crashes"}


@pytest.mark.parametrize(
    "right",
    [
        {},
        {**STOPPED, "stop_reason": "xy"},
        {**STOPPED, "stop_reason": 9, "token_ids": (1, 2, 9),
         "heard": [("ab", (1, 2), None), ("c", (9,), Finish.STOP)]},
        {**STOPPED, "stop_reason": None, "asked": replace(ASKED, ignore_eos=False)},
        {"finish_reason": Finish.CANCELLED, "was_cancelled": True, "heard": [*HEARD, ("", (), Finish.CANCELLED)]},
        {"finish_reason": Finish.ERROR, "error": "Raised: a", "has_raised": True, "heard": HEARD[:1]},
        {"has_sampler": False, "top_logprobs": ((), (), ())},
        {"num_cached_tokens": 1, "asked": replace(ASKED, prompt_logprobs=None), "prompt_logprobs": ()},
        {"finish_reason": Finish.ERROR, "error": "a copy failed", "explains": lambda error: "copy" in error,
         "heard": [*HEARD, ("", (), Finish.ERROR)]},
    ],
)  # fmt: skip
def test_the_witness_is_content_with_what_is_right(right):
    assert witnessed(**right) == set()


# -- the mix -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", BAD_VALUES, ids=str)
def test_bad_values_are_bad(values):
    with pytest.raises(InvalidSetting):
        SamplingParams(**values)


def test_the_mix_has_everything_in_it():
    mix = Mix(seed=1, vocab_size=300, max_seq_len=256, max_batch_size=16)
    asks = [ask for _ in range(150) for ask in mix.burst()]
    default = SamplingParams()
    for name in SamplingParams.__dataclass_fields__:
        if name != "n":
            assert any(getattr(ask.params, name) != getattr(default, name) for ask in asks), name
    assert any(ask.id.endswith(".2") for ask in asks)
    assert len({ask.id for ask in asks}) == len(asks)
    assert any(ask.is_malformed for ask in asks)
    assert any(len(ask.token_ids) >= 256 for ask in asks)
    for name in ("cancel_after_steps", "cancels_at_delta", "raises_at_delta"):
        assert len({getattr(ask, name) for ask in asks}) > 3, name
    assert len({mix.quiet_steps() for _ in range(200)}) > 5


def test_the_mix_repeats_beginnings_and_goes_on_with_what_was_answered():
    mix = Mix(seed=2, vocab_size=300, max_seq_len=256, max_batch_size=16)
    asks = []
    for _ in range(100):
        for ask in mix.burst():
            asks.append(ask)
            mix.heard(ask, [299] * 20)
    whole = [ask for ask in asks if not ask.is_malformed and len(ask.token_ids) < 256]
    begins = Counter(tuple(ask.token_ids[:16]) for ask in whole if len(ask.token_ids) >= 16)
    assert sum(count for count in begins.values() if count > 10) > len(whole) // 3
    assert sum(299 in ask.token_ids and ask.token_ids[-20:] != [299] * 20 for ask in whole) > len(whole) // 10
    assert {ask.params.cache.salt for ask in asks} == {None, *SALTS}
    for name in ("reuse", "priority", "retain_seconds", "retain_tokens"):
        assert len({getattr(ask.params.cache, name) for ask in asks}) > 1, name


@pytest.mark.parametrize("most_steps", [0, 7, 150])
def test_a_soak_that_is_stopped_judges_what_there_was(most_steps):
    steps = []
    with stub_engine(**TIGHT) as engine:
        report = Soak(
            engine, make_mix(engine, 1), is_over=lambda *_: False, has_sampler=False,
            on_step=lambda _: steps.append(1), is_stopped=lambda: len(steps) >= most_steps,
        ).run()  # fmt: skip
        assert engine.progress().kv_used_tokens == 0
    assert report.is_good, "\n".join(report.told)
    assert most_steps <= len(steps) < most_steps + 10
