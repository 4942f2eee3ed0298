"""The engine on a tiny random model: requests wait in order, end for every reason, and failures stay contained."""

from __future__ import annotations

import signal
import sys

import pytest
import torch

from tonnage.caching import CacheParams
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import EngineOptions, Finish, start
from tonnage.engine.target import Target
from tonnage.errors import DoesNotFit, InputError, InvalidSetting, RequestRefused, UserError
from tonnage.sampling import SamplingParams
from tonnage.terms import LineKind
from tonnage.units import MiB

MEMORY = 320 * MiB


def options(model, *, kv_tokens=None, admission=None, max_seq_len=128, max_batch_size=8, max_num_tokens=64, **rest):
    knobs = Knobs(kv_tokens=Setting(kv_tokens), admission=Setting(admission))
    limits = LimitKnobs(
        max_seq_len=Setting(max_seq_len),
        max_batch_size=Setting(max_batch_size),
        max_num_tokens=Setting(max_num_tokens),
    )
    return EngineOptions(model=str(model), memory_bytes=MEMORY, knobs=knobs, limit_knobs=limits, fence=False, **rest)


@pytest.fixture(scope="module")
def engine(tiny_llama):
    with start(options(tiny_llama)) as engine:
        yield engine


@pytest.fixture(scope="module")
def narrow(tiny_llama):
    """Room for exactly one full-length sequence, reserved whole: nearly everybody waits."""
    with start(options(tiny_llama, kv_tokens=128, admission="reserve_all")) as engine:
        yield engine


def drain(engine):
    done = []
    while engine.has_work:
        done += engine.step()
    return done


def ask(engine, name, length=20, max_tokens=10, on_delta=None, **params):
    asked = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
    request = engine.request(name, asked, token_ids=[(7 * i + length) % 250 for i in range(length)], on_delta=on_delta)
    engine.submit(request)
    return request


def texts(completions):
    return {completion.request_id: completion.token_ids for completion in completions}


def assert_idle(engine):
    progress = engine.progress()
    assert (progress.num_running, progress.num_waiting, progress.kv_used_tokens) == (0, 0, 0)


def reference(folder, prompt, max_tokens):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens, do_sample=False, pad_token_id=0,
        )  # fmt: skip
    return tuple(out[0, len(prompt) :].tolist())


SHAPES = {
    "gqa, tied": {},
    "mha, untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "mqa, explicit head_dim": {"num_key_value_heads": 1, "head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("max_num_tokens", [8, 64], ids=["chunks of 8", "whole prompts"])
def test_text_equals_generate_for_every_shape_and_chunking(tmp_path, shape, max_num_tokens):
    from tiny import save_tiny_llama

    folder = save_tiny_llama(tmp_path, **SHAPES[shape])
    lengths = (1, 3, 15, 16, 17, 40)
    with start(options(folder, max_num_tokens=max_num_tokens)) as engine:
        requests = {f"r{n}": ask(engine, f"r{n}", length=n, max_tokens=12) for n in lengths}
        prompts = {name: list(request.token_ids) for name, request in requests.items()}
        ours = texts(drain(engine))
    assert ours == {name: reference(folder, prompt, 12) for name, prompt in prompts.items()}


def test_requests_that_do_not_fit_wait_in_order_and_all_finish(narrow):
    for i in range(6):
        ask(narrow, f"r{i}", length=40, max_tokens=20, cache=CacheParams(reuse=False))
    done = drain(narrow)
    assert [completion.request_id for completion in done] == [f"r{i}" for i in range(6)]
    assert all(completion.finish_reason is Finish.LENGTH for completion in done)
    assert [completion.waited for completion in done] == [False, False, True, True, True, True]
    assert_idle(narrow)


def test_waiting_changes_no_text(engine, narrow):
    answers = []
    for one in (engine, narrow):
        for i in range(5):
            ask(one, f"r{i}", length=10 + 7 * i, max_tokens=15)
        answers.append(texts(drain(one)))
    assert answers[0] == answers[1]


SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 11, "presence_penalty": 0.5, "repetition_penalty": 1.1}


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled with penalties"])
def test_suspension_changes_no_text(engine, tiny_llama, params):
    """The pool runs short, running requests are suspended and computed again: same tokens, same log-probabilities."""
    with start(options(tiny_llama, kv_tokens=128)) as crowded:
        for i in range(20):  # teach it to expect little
            ask(crowded, f"short{i}", length=3, max_tokens=2)
        drain(crowded)
        answers = []
        for one in (crowded, engine):
            for i in range(5):
                ask(one, f"r{i}", length=10 + 3 * i, max_tokens=40, logprobs=2, prompt_logprobs=1, **params)
            answers.append({completion.request_id: completion for completion in drain(one)})
        assert crowded.result().suspensions > 0
        assert_idle(crowded)
    short, roomy = answers
    assert any(completion.num_suspended for completion in short.values())
    for name, completion in short.items():
        assert completion.token_ids == roomy[name].token_ids
        assert completion.logprobs == pytest.approx(roomy[name].logprobs, abs=1e-4)
        told = [[entry.token for entry in c.prompt_logprobs] for c in (completion, roomy[name])]
        assert told[0] == told[1]
        assert len(told[0]) == completion.num_prompt_tokens - 1


def test_nobody_overtakes_the_head_of_the_queue(narrow):
    ask(narrow, "long", length=60, max_tokens=60)
    ask(narrow, "second", length=60, max_tokens=60)
    ask(narrow, "tiny", length=1, max_tokens=1)
    assert [completion.request_id for completion in drain(narrow)] == ["long", "second", "tiny"]


def test_tokens_and_text_stream_as_they_come(engine):
    told = []
    ask(engine, "s", max_tokens=9, on_delta=told.append)
    (completion,) = drain(engine)
    assert [token.token for delta in told for token in delta.tokens] == list(completion.token_ids)
    assert [token.logprob for delta in told for token in delta.tokens] == list(completion.logprobs)
    assert "".join(delta.text for delta in told) == completion.text
    assert [delta.finish_reason for delta in told] == [None] * 8 + [Finish.LENGTH]
    assert len(completion.logprobs) == 9
    assert all(logprob <= 0 for logprob in completion.logprobs)


def test_the_end_token_stops(engine, monkeypatch):
    ask(engine, "free", max_tokens=8)
    (free,) = drain(engine)
    monkeypatch.setattr(engine.text, "stop_ids", frozenset({free.token_ids[3]}))
    request = engine.request("stop", SamplingParams(max_tokens=8), token_ids=[(7 * i + 20) % 250 for i in range(20)])
    engine.submit(request)
    (completion,) = drain(engine)
    first = free.token_ids.index(free.token_ids[3])
    assert completion.finish_reason is Finish.STOP
    assert completion.token_ids == free.token_ids[: first + 1]


@pytest.mark.parametrize("when", ["waiting", "after one step", "in its own callback", "in another's callback"])
def test_cancel_at_any_time_gives_everything_back(narrow, when):
    def callback(delta):
        narrow.cancel("victim")

    ask(narrow, "victim", length=30, max_tokens=40, on_delta=callback if when == "in its own callback" else None)
    ask(narrow, "other", length=30, max_tokens=10, on_delta=callback if when == "in another's callback" else None)
    done = []
    if when == "waiting":
        narrow.cancel("victim")
    elif when == "after one step":
        done += narrow.step()
        narrow.cancel("victim")
    narrow.cancel("nobody")
    done += drain(narrow)
    reasons = {completion.request_id: completion.finish_reason for completion in done}
    assert reasons == {"victim": Finish.CANCELLED, "other": Finish.LENGTH}
    assert_idle(narrow)


def test_a_failing_forward_fails_its_requests_and_nobody_else(narrow, monkeypatch):
    ask(narrow, "hit", length=60, max_tokens=60)
    ask(narrow, "later", length=60, max_tokens=5)
    narrow.step()
    executor = narrow._runtime.executor
    launch = type(executor).launch
    monkeypatch.setattr(type(executor), "launch", lambda *_: (_ for _ in ()).throw(RuntimeError("kernel fell over")))
    (failed,) = narrow.step()
    monkeypatch.setattr(type(executor), "launch", launch)
    assert failed.request_id == "hit"
    assert failed.finish_reason is Finish.ERROR
    assert "kernel fell over" in failed.error
    assert narrow.result().retried_steps == ()
    (later,) = drain(narrow)
    assert later.finish_reason is Finish.LENGTH
    assert_idle(narrow)


def test_an_interrupt_inside_a_forward_loses_nothing(narrow, monkeypatch):
    ask(narrow, "a", length=20, max_tokens=6)
    executor = narrow._runtime.executor
    launch = type(executor).launch

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(executor), "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        narrow.step()
    monkeypatch.setattr(type(executor), "launch", launch)
    (completion,) = drain(narrow)
    assert len(completion.token_ids) == 6
    assert_idle(narrow)


def test_a_callback_that_raises_fails_only_its_own_request(engine):
    def callback(delta):
        raise ValueError("caller's mistake")

    ask(engine, "bad", on_delta=callback)
    ask(engine, "good")
    done = {completion.request_id: completion for completion in drain(engine)}
    assert done["bad"].finish_reason is Finish.ERROR
    assert "caller's mistake" in done["bad"].error
    assert done["good"].finish_reason is Finish.LENGTH
    assert_idle(engine)


def test_logits_that_are_no_numbers_fail_the_row_and_leave_no_trace(engine):
    ask(engine, "before")
    before = texts(drain(engine))["before"]
    # An infinite key or value reaches the logits of this row alone, and its blocks are handed on afterwards.
    original = type(engine._runtime.executor._backend).forward

    def poisoned(self, step, layer, query, key, value, **asked):
        value = value.clone()
        value[:] = float("nan")
        return original(self, step, layer, query, key, value, **asked)

    type(engine._runtime.executor._backend).forward = poisoned
    try:
        ask(engine, "nan", length=33)
        (failed,) = drain(engine)
    finally:
        type(engine._runtime.executor._backend).forward = original
    assert failed.finish_reason is Finish.ERROR
    assert "finite" in failed.error
    for i in range(4):
        ask(engine, f"after{i}")
    assert set(texts(drain(engine)).values()) == {before}


@pytest.mark.parametrize(
    ("length", "max_tokens", "words"),
    [
        (128, 1, ["too long", "129 tokens", "max_seq_len = 128", "127"]),
        (100, 29, ["never fit", "100 prompt tokens + 29", "at most 28"]),
        (0, 5, ["empty"]),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_on_arrival(engine, length, max_tokens, words):
    with pytest.raises(RequestRefused) as refused:
        ask(engine, "no", length=length, max_tokens=max_tokens)
    for word in words:
        assert word in str(refused.value)
    assert not engine.has_work


def test_the_longest_possible_request_is_served(narrow):
    ask(narrow, "whole", length=1, max_tokens=127)
    ask(narrow, "prompt", length=127, max_tokens=1)
    assert [len(completion.token_ids) for completion in drain(narrow)] == [127, 1]


def test_two_live_requests_cannot_share_an_id(engine):
    ask(engine, "twin")
    with pytest.raises(InputError, match="twin"):
        ask(engine, "twin")
    drain(engine)
    ask(engine, "twin")
    drain(engine)


def test_ids_outside_the_vocabulary_are_refused(engine):
    with pytest.raises(RequestRefused, match="vocabulary"):
        engine.request("v", token_ids=[5, 300])


def test_a_chat_uses_the_template(engine):
    request = engine.request("c", messages=[{"role": "user", "content": "hi"}])
    assert engine.text.decode(request.token_ids) == "<user>hi<a>"


def test_plan_and_ledger_agree_line_by_line(engine):
    result = engine.result()
    assert sum(line.bytes for line in result.plan.lines) == result.plan.device_bytes == MEMORY
    rows = {row.line: row for row in result.audit}
    for kind in (LineKind.WEIGHTS, LineKind.KV, LineKind.SCRATCH):
        assert rows[kind].actual_bytes == rows[kind].planned_bytes, kind
    assert 0 < rows[LineKind.TABLES].actual_bytes <= rows[LineKind.TABLES].planned_bytes
    assert not result.snapshot.first_uses
    assert abs(result.snapshot.unattributed) <= max(32 * MiB, MEMORY * 3 // 100)


def test_after_close_nothing_is_held_and_steps_are_refused(tiny_llama):
    import gc

    from tonnage.device.process import process_memory, trim_heap

    gc.collect()
    trim_heap()
    before = process_memory().shmem_bytes
    engine = start(options(tiny_llama))
    assert process_memory().shmem_bytes > before
    engine.close()
    engine.close()
    assert process_memory().shmem_bytes == before


def test_waiting_for_a_slot_is_not_waiting_for_memory(tiny_llama):
    with start(options(tiny_llama, max_batch_size=1)) as engine:
        for i in range(3):
            ask(engine, f"r{i}", length=5, max_tokens=4)
        assert [completion.waited for completion in drain(engine)] == [False, False, False]


def test_an_interrupt_at_any_line_of_a_step_loses_nothing(narrow):
    """Ctrl-C at one line after another of our own code, in the middle of admitting, preparing, moving on, finishing."""

    def scenario(interrupt_at):
        seen, interrupted, done = 0, False, []

        def trace(frame, event, argument):
            nonlocal seen, interrupted
            if "tonnage" not in frame.f_code.co_filename:
                return None
            if event == "line":
                seen += 1
                if seen == interrupt_at:
                    interrupted = True
                    signal.raise_signal(signal.SIGINT)
            return trace

        for i in range(3):
            ask(narrow, f"r{i}", length=40, max_tokens=3)
        while narrow.has_work:
            sys.settrace(trace if not interrupted else None)
            try:
                done += narrow.step()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
        return seen, interrupted, texts(done)

    total, _, truth = scenario(0)
    assert len(truth) == 3
    reached = 0
    for line in range(1, total, 7):
        _, interrupted, done = scenario(line)
        # Handing the completions over is the one moment after which they are the caller's.
        assert done == truth, f"line {line}"
        assert_idle(narrow)
        reached += interrupted
    print(f"\ninterrupted at {reached} of {total} lines")
    assert reached > 50


def test_the_default_of_max_tokens_stops_at_the_end_of_the_sequence(engine):
    request = engine.request("d", token_ids=[7] * 100)
    assert request.max_tokens == 28
    with pytest.raises(RequestRefused, match="too long"):
        engine.request("d", token_ids=[7] * 128)


def test_the_cap_holds_for_the_probes_too(tiny_llama):
    """A device too small to try a full step on is refused before the step is tried, with what it would take."""
    from dataclasses import replace

    asked = options(tiny_llama, max_batch_size=64, max_num_tokens=4096, max_seq_len=256)
    with pytest.raises(DoesNotFit) as refused:
        start(replace(asked, memory_bytes=24 * MiB, knobs=Knobs(keep_free_bytes=Setting(0))))
    assert refused.value.need_bytes > refused.value.have_bytes
    assert refused.value.remedies


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"device": 5}, "not a text"),
        ({"device": None}, "not a text"),
        ({"attention": 7}, "not a text"),
        ({"attention": "triton2"}, "no such backend"),
    ],
)
def test_a_device_or_backend_that_is_none_is_refused_before_the_model_is_read(given, says):
    with pytest.raises(InvalidSetting, match=says):
        Target.read(EngineOptions(model="no/such-model", **given))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "runs on a CUDA device, not on cpu"),
        ({"device": "cuda"}, "has no heads of 16 elements in float32"),
    ],
)
def test_a_backend_that_cannot_run_the_model_is_refused_before_anything_is_allocated(tiny_llama, given, says):
    with pytest.raises(InvalidSetting, match=says):
        Target.read(EngineOptions(model=str(tiny_llama), attention="flashinfer", **given))


def test_auto_is_resolved_for_the_model(tiny_llama):
    assert Target.read(EngineOptions(model=str(tiny_llama))).options.attention == "sdpa"


def test_cancel_on_a_closed_engine_does_nothing(tiny_llama):
    with start(options(tiny_llama)) as engine:
        pass
    engine.cancel("whoever")
    with pytest.raises(UserError, match="closed"):
        engine.step()


def test_triton_on_the_host_is_refused_before_the_model_is_read(tiny_llama, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    stages = []
    with pytest.raises(InvalidSetting, match=r"attention = 'triton'.*use sdpa"):
        start(options(tiny_llama, attention="triton"), on_stage=stages.append)
    assert "weights" not in stages
