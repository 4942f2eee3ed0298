"""Soaks of the stub by the thousand and of the tiny model, and what the soak's own checks find in unsound engines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tonnage.bench import soak as soak_module
from tonnage.bench.mix import BAD_VALUES, Ask, Mix
from tonnage.bench.report import soak_document
from tonnage.bench.soak import RULES, Soak, make_mix
from tonnage.bench.witness import RULES as WITNESS_RULES
from tonnage.bench.witness import Heard, Witness
from tonnage.config import LimitKnobs, Setting
from tonnage.engine import Completion, EngineOptions, Finish, start
from tonnage.engine.outcome import TokenLogprobs
from tonnage.engine.queue import WaitingQueue
from tonnage.engine.request import Delta
from tonnage.engine.scheduler import Scheduler
from tonnage.engine.stub import stub_engine
from tonnage.errors import InvalidSetting
from tonnage.resources.kv import KVManager
from tonnage.sampling import SamplingParams
from tonnage.terms import LineKind, MemoryKind
from tonnage.units import GiB, MiB

#: A pool of two sequences of full length, where most end soon: many wait, and some are suspended.
TIGHT = {"kv_tokens": 512, "max_seq_len": 256, "max_batch_size": 48, "max_num_tokens": 256, "end_probability": 0.1}
STUB = {"kv_tokens": 2048, "max_seq_len": 256, "max_batch_size": 48, "max_num_tokens": 256, "end_probability": 0.02}


def soaked(engine, num_requests, *, seed=0, has_sampler=False):
    with engine:
        return Soak(
            engine, make_mix(engine, seed), is_over=lambda asked, _: asked >= num_requests, has_sampler=has_sampler
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


def test_a_soak_of_so_many_requests_repeats_itself():
    once, again = (soaked(stub_engine(**STUB), 300, seed=8) for _ in range(2))
    assert (once.outcomes, once.counts, once.num_tokens) == (again.outcomes, again.counts, again.num_tokens)
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
    monkeypatch.setattr(Scheduler, "_victims", lambda self: iter([self._oldest()]))


def bounds_no_step(monkeypatch):
    monkeypatch.setattr(Scheduler, "_prefill_tokens", lambda *args: 2 * args[-1])


def admits_one_request_at_a_time(monkeypatch):
    admitted = Scheduler._admitted
    monkeypatch.setattr(
        Scheduler, "_admitted", lambda self, request, txn: not self.num_running and admitted(self, request, txn)
    )


def keeps_a_block(monkeypatch):
    free = KVManager.free

    def forgets(self, request_id, *, keep_cached=True):
        free(self, request_id, keep_cached=keep_cached)
        if request_id.endswith("7.0"):
            self.pool.allocate(1)

    monkeypatch.setattr(KVManager, "free", forgets)


def starves(monkeypatch):
    by_rank = WaitingQueue.peek

    def forgets_who_was_passed(self):
        for request in self._live.values():
            request.num_overtaken = 0
        return by_rank(self)

    monkeypatch.setattr(WaitingQueue, "peek", forgets_who_was_passed)
    monkeypatch.setattr("tonnage.engine.queue.MAX_OVERTAKEN", 20)


UNSOUND = {
    last_in_first_out: "order",
    suspends_the_oldest: "suspension",
    bounds_no_step: "tokens",
    admits_one_request_at_a_time: "idleness",
    keeps_a_block: "held",
    starves: "starvation",
}


@pytest.mark.parametrize("unsound", UNSOUND, ids=lambda make: make.__name__)
def test_a_defect_put_into_the_engine_is_found(monkeypatch, unsound):
    unsound(monkeypatch)
    assert UNSOUND[unsound] in broken_by(stub_engine(**TIGHT), 200, seed=3)


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
    witness = Witness(has_sampler=has_sampler)
    ear = Heard()
    for text, tokens, finish in heard:
        told = tuple(TokenLogprobs(token, -1.0) for token in tokens)
        ear.take(Delta(request_id="a", text=text, tokens=told, finish_reason=finish))
    ear.has_raised = has_raised
    ask = Ask(id="a", token_ids=[3, 4], params=asked, listens=True)
    witness.check(ask, replace(GOOD, **fields), ear, was_cancelled=was_cancelled)
    return set(witness.broken)


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
    assert RULES.keys() == {"bad values", "completions", "held", "ledger", "defects"}


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
