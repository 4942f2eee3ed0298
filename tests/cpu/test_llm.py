"""``LLM`` on the tiny random model: outputs, samples, streams, refusals, and memory that comes back."""

from __future__ import annotations

import copy
import math
import signal
import string
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from tiny import byte_tokenizer

import tonnage
from tonnage import LLM, SamplingParams
from tonnage.config import Origin
from tonnage.engine import EngineOptions
from tonnage.engine.executor import Executor
from tonnage.engine.settings import Options, engine_options
from tonnage.engine.stub import stub_engine
from tonnage.errors import InputError, InvalidSetting, RequestRefused, TonnageError, UserError
from tonnage.sampling import child_seed
from tonnage.units import GiB, MiB

OPTIONS = {"memory": "320MiB", "max_seq_len": 128, "max_batch_size": 8, "max_num_tokens": 64, "fence": False}
IDS = byte_tokenizer()
#: One letter a token, so that a stop string of several letters always lies over several tokens.
LETTERS = SamplingParams(
    max_tokens=40, temperature=1.0, seed=7, logit_bias=dict.fromkeys(IDS.encode(string.ascii_lowercase), 100.0)
)


@pytest.fixture(scope="module")
def llm(tiny_llama):
    with LLM(tiny_llama, **OPTIONS) as llm:
        yield llm


def assert_idle(llm):
    progress = llm.progress()
    assert (progress.num_running, progress.num_waiting, progress.kv_used_tokens) == (0, 0, 0)


def first_samples(outputs):
    return [output.samples[0].token_ids for output in outputs]


@pytest.fixture
def failing_steps(monkeypatch):
    """Every forward raises until ``undo`` is called."""
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "launch", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("kernel fell over")))
        yield patch


# -- generate and chat -------------------------------------------------------------------------------------------


def test_greedy_text_is_that_of_transformers(llm, tiny_llama):
    import torch
    from transformers import AutoModelForCausalLM

    prompts = ["Hello", "a much longer prompt, in more than one block", IDS.encode("token ids")]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    truth = []
    for prompt in prompts:
        ids = torch.tensor([IDS.encode(prompt) if isinstance(prompt, str) else prompt])
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
        truth.append(out[0, ids.shape[1] :].tolist())
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12))
    assert [list(ids) for ids in first_samples(outputs)] == truth
    assert [output.text for output in outputs] == [IDS.decode(ids, skip_special_tokens=True) for ids in truth]
    assert [output.num_prompt_tokens for output in outputs] == [5, 44, 9]


def test_one_prompt_is_a_list_of_one(llm):
    params = SamplingParams(max_tokens=4)
    (text,) = llm.generate("Hello", params)
    (ids,) = llm.generate(IDS.encode("Hello"), params)
    (listed,) = llm.generate(["Hello"], params)
    assert first_samples([text]) == first_samples([ids]) == first_samples([listed])
    assert llm.generate([]) == []


def test_params_for_each_prompt(llm):
    outputs = llm.generate(["a", "b", "c"], [SamplingParams(max_tokens=n) for n in (3, 1, 2)])
    assert [len(ids) for ids in first_samples(outputs)] == [3, 1, 2]


def test_a_chat_is_the_prompt_that_the_template_makes(llm):
    conversation = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=6)
    (plain,) = llm.generate("<user>hi<a>", params)
    (one,) = llm.chat(conversation, params)
    several = llm.chat([conversation, [*conversation, {"role": "a", "content": "ho"}]], params)
    assert first_samples([one]) == first_samples(several[:1]) == first_samples([plain])
    assert several[1].num_prompt_tokens == len("<user>hi<a>ho<a>")
    assert llm.chat([]) == []


def test_samples_differ_and_come_again_with_the_seed(llm):
    params = replace(LETTERS, n=4)
    (first,), (again,) = llm.generate("Once", params), llm.generate("Once", params)
    texts = [sample.text for sample in first.samples]
    assert texts == [sample.text for sample in again.samples]
    assert len(set(texts)) == 4
    alone = llm.generate(["Once"] * 4, [replace(LETTERS, seed=child_seed(7, i)) for i in range(4)])
    assert texts == [output.text for output in alone]
    assert first.text == llm.generate("Once", LETTERS)[0].text


def test_each_sample_says_what_of_the_prompt_it_found(llm):
    """The others find what the first computes, which nobody had asked before; a second time all of them find it."""
    prompt = "found by whoever comes later. " * 3
    (first,), (again,) = (llm.generate(prompt, replace(LETTERS, n=3, max_tokens=2)) for _ in range(2))
    cached = [sample.num_cached_tokens for sample in first.samples]
    assert (first.num_cached_tokens, cached[0]) == (0, 0)
    assert min(cached[1:]) > 0
    assert again.num_cached_tokens == again.samples[0].num_cached_tokens > 0
    assert llm.generate("?! nowhere", replace(LETTERS, max_tokens=1))[0].samples[0].num_cached_tokens == 0


def test_samples_without_a_seed_differ(llm):
    (output,) = llm.generate("Once", replace(LETTERS, n=3, seed=None))
    assert len({sample.text for sample in output.samples}) == 3


def test_log_probabilities_of_prompt_and_text(llm):
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1, n=2))
    assert [one.token for one in output.prompt_logprobs] == IDS.encode("Hello")[1:]
    for sample in output.samples:
        assert len(sample.logprobs) == len(sample.top_logprobs) == 3
        # Greedy: the chosen token is the most probable one.
        assert [top[0] for top in sample.top_logprobs] == list(zip(sample.token_ids, sample.logprobs, strict=True))


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_ends_the_text_over_the_borders_of_tokens(llm, include_stop):
    (free,) = llm.generate("Once", LETTERS)
    assert len(free.text) == 40
    stop = free.text[10:14]
    end = free.text.find(stop) + len(stop)
    (stopped,) = llm.generate("Once", replace(LETTERS, stop=[stop, "0"], include_stop=include_stop))
    (sample,) = stopped.samples
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert sample.text == free.text[: end if include_stop else end - len(stop)]
    assert sample.token_ids == free.samples[0].token_ids[:end]


@pytest.mark.parametrize("min_tokens", [1, 15, 30])
def test_a_stop_string_waits_for_min_tokens(llm, min_tokens):
    (free,) = llm.generate("Once", LETTERS)
    stop = free.text[0]
    ends = [number for number, letter in enumerate(free.text, 1) if letter == stop and number >= min_tokens]
    (stopped,) = llm.generate("Once", replace(LETTERS, stop=stop, min_tokens=min_tokens))
    assert stopped.text == free.text[: ends[0] - 1 if ends else None]
    assert stopped.samples[0].finish_reason == ("stop" if ends else "length")


def test_progress_is_told_after_every_step(llm):
    told = []
    llm.generate(
        ["a", "b"],
        [SamplingParams(max_tokens=n, ignore_eos=True, n=2) for n in (2, 4)],
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(0, 4), (2, 4), (2, 4), (4, 4)]


def test_more_prompts_than_fit_at_once_come_back_in_order(llm):
    prompts = [letter * length for letter, length in zip(string.ascii_letters, [90, 3] * 15, strict=False)]
    params = SamplingParams(max_tokens=5)
    assert first_samples(llm.generate(prompts, params)) == [first_samples(llm.generate(p, params))[0] for p in prompts]


# -- refusals and failures ---------------------------------------------------------------------------------------


def test_the_first_refused_prompt_is_named_and_nothing_is_submitted(llm):
    before = llm.result()
    with pytest.raises(RequestRefused, match=r"^prompts\[1\]: .*too long.*max_seq_len = 128") as refused:
        llm.generate(["fine", "x" * 300, "y" * 300])
    assert refused.value.request_id.endswith("[1]")
    assert llm.result().prompt_tokens == before.prompt_tokens
    assert_idle(llm)
    with pytest.raises(RequestRefused, match=r"^The prompt of request 'stream-\d+' is too long"):
        llm.stream("x" * 300)


def test_a_refused_conversation_is_named(llm):
    with pytest.raises(RequestRefused, match=r"^messages\[1\]: "):
        llm.chat([[{"role": "user", "content": text}] for text in ("short", "x" * 300)])


NO_CALLS = {
    "no text": (lambda llm: llm.generate(5), "prompts is int"),
    "one is no text": (lambda llm: llm.generate(["a", 5.0]), r"prompts\[1\] is neither"),
    "yes is no token": (lambda llm: llm.generate([[1, True]]), r"prompts\[0\] is neither"),
    "bytes": (lambda llm: llm.generate(b"abc"), "prompts is bytes"),
    "params for others": (lambda llm: llm.generate(["a", "b"], [SamplingParams()]), "1 params for 2 prompts"),
    "params that are none": (lambda llm: llm.generate("a", {"max_tokens": 3}), "params is dict"),
    "a list of params that are none": (lambda llm: llm.generate("a", [{"max_tokens": 3}]), "no SamplingParams"),
    "a text for messages": (lambda llm: llm.chat("hello"), "messages is str"),
    "a text among messages": (lambda llm: llm.chat([{"role": "user", "content": "a"}, "b"]), "is no message"),
    "a text among conversations": (lambda llm: llm.chat([["a"]]), r"messages\[0\] holds"),
    "two sources": (lambda llm: llm.stream("a", messages=[{"role": "user", "content": "b"}]), "either"),
    "no source": (lambda llm: llm.stream(), "either"),
    "several samples": (lambda llm: llm.stream("a", SamplingParams(n=2)), "n = 2"),
}


@pytest.mark.parametrize("case", NO_CALLS)
def test_what_makes_no_sense_is_refused(llm, case):
    call, words = NO_CALLS[case]
    with pytest.raises((InputError, InvalidSetting), match=words):
        call(llm)
    assert_idle(llm)


def test_an_empty_prompt_is_refused(llm):
    with pytest.raises(RequestRefused, match=r"prompts\[1\]: .*empty"):
        llm.generate(["a", []])


def test_refusals_can_be_copied_with_their_place(llm):
    with pytest.raises(RequestRefused) as refused:
        llm.generate(["x" * 300])
    assert str(copy.copy(refused.value)) == str(refused.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_inside_generate_cancels_what_it_asked_for_and_nothing_else(llm, error):
    def interrupt(done, total):
        if llm.progress().generated_tokens > before + 6:
            raise error

    stream = llm.stream("other", LETTERS)
    pieces = [next(stream).text]
    before = llm.progress().generated_tokens
    with pytest.raises(error):
        llm.generate(["a", "b", "c"], SamplingParams(max_tokens=60, ignore_eos=True, n=3), on_progress=interrupt)
    assert llm.progress().num_running == 1
    pieces += [delta.text for delta in stream]
    assert "".join(pieces) == llm.generate("other", LETTERS)[0].text
    assert_idle(llm)


def test_ctrl_c_in_a_step_cancels_what_generate_asked_for(llm, monkeypatch):
    launch = Executor.launch

    def interrupted(*args, **rest):
        signal.raise_signal(signal.SIGINT)
        return launch(*args, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], SamplingParams(max_tokens=5))
    assert_idle(llm)
    assert llm.generate("a", SamplingParams(max_tokens=5, ignore_eos=True))[0].samples[0].finish_reason == "length"


@pytest.fixture
def stub_llm(monkeypatch):
    """An ``LLM`` without a model: the real loop, and tokens from nowhere."""
    monkeypatch.setattr("tonnage.engine.llm.start", lambda _: stub_engine(kv_tokens=4096))
    with LLM("no model") as llm:
        yield llm


def generate_two(llm):
    llm.generate([[5] * 10, [6] * 4], SamplingParams(max_tokens=2, n=2), on_progress=lambda *_: None)


def leave_a_stream(llm):
    next(llm.stream([5] * 10, SamplingParams(max_tokens=50)))
    llm.generate([7] * 3, SamplingParams(max_tokens=1))


def read_a_stream(llm):
    list(llm.stream([5] * 10, SamplingParams(max_tokens=2)))


def close_a_stream(llm):
    with llm.stream([5] * 10, SamplingParams(max_tokens=50)) as stream:
        next(stream)


def interrupted_at(number, use, llm):
    """Ctrl-C at one line of the API and of what it calls to take and to cancel; returns whether that was reached.

    What is raised in a ``__del__`` is swallowed by the interpreter, so there it is no Ctrl-C.
    """
    files, seen = ("llm.py", "calls.py", "interrupts.py"), 0

    def trace(frame, event, argument):
        nonlocal seen
        path = Path(frame.f_code.co_filename)
        if path.parent.name != "engine" or path.name not in files or frame.f_code.co_name == "__del__":
            return None
        if event == "line":
            seen += 1
            if seen == number:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        use(llm)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("use", [generate_two, leave_a_stream, read_a_stream, close_a_stream])
def test_an_interrupt_at_any_line_leaves_no_request_behind(stub_llm, use):
    number = 1
    while interrupted_at(number, use, stub_llm):
        assert_idle(stub_llm)
        assert not stub_llm._desk._calls, f"line {number}"
        assert not stub_llm._desk._open, f"line {number}"
        assert len(stub_llm.generate([9] * 5, SamplingParams(max_tokens=1))[0].samples[0].token_ids) == 1
        number += 1
    assert number > 50


def test_a_sample_that_fails_is_told_in_its_output(llm, failing_steps):
    outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=3))
    failing_steps.undo()
    for output in outputs:
        (sample,) = output.samples
        assert sample.finish_reason == "error"
        assert "kernel fell over" in sample.error
    assert llm.generate("a", SamplingParams(max_tokens=3))[0].samples[0].error is None
    assert_idle(llm)


# -- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=30, temperature=1.5, seed=3, skip_special_tokens=False),
        replace(LETTERS, stop=["e", "th"], seed=11),
    ],
    ids=["greedy bytes", "drawn bytes", "stop strings"],
)
def test_deltas_joined_are_the_text(llm, params):
    (output,) = llm.generate("Hello", params)
    stream = llm.stream("Hello", params)
    deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == output.text
    assert tuple(one.token for delta in deltas for one in delta.tokens) == output.samples[0].token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [output.samples[0].finish_reason]
    assert stream.output.text == output.text
    assert next(stream, None) is None


def test_a_chat_streams_too(llm):
    messages = [{"role": "user", "content": "hi"}]
    assert "".join(delta.text for delta in llm.stream(messages=messages, params=LETTERS)) == (
        llm.chat(messages, LETTERS)[0].text
    )


def test_several_streams_and_a_generate_in_between(llm):
    params = [replace(LETTERS, seed=seed, max_tokens=10 * seed) for seed in (1, 2, 3)]
    alone = [output.text for output in llm.generate(["Hello"] * 3, params)]
    streams = [llm.stream("Hello", one) for one in params]
    told = [""] * 3
    for _ in range(2):
        for number, stream in enumerate(streams):
            told[number] += next(stream).text
    assert llm.generate("Hello", params[0])[0].text == alone[0]
    for number in (2, 0, 1):
        told[number] += "".join(delta.text for delta in streams[number])
    assert told == alone
    assert_idle(llm)


@pytest.mark.parametrize("how", ["closed", "left by with", "dropped", "closed before the first token"])
def test_a_stream_that_ends_early_gives_its_memory_back(llm, how):
    stream = llm.stream("Hello", LETTERS)
    if how != "closed before the first token":
        next(stream)
        assert llm.progress().kv_used_tokens > 0
    if how == "left by with":
        with stream:
            pass
    elif how == "dropped":
        del stream
    else:
        stream.close()
        stream.close()
        assert list(stream) == []
        assert stream.output is None
    assert_idle(llm)


def test_leaving_the_loop_is_closing(llm):
    for delta in llm.stream("Hello", LETTERS):
        assert delta.text
        break
    assert_idle(llm)


def test_a_stream_that_fails_does_not_look_like_one_that_ends(llm, failing_steps):
    stream = llm.stream("Hello", LETTERS)
    with pytest.raises(TonnageError, match=r"stream-\d+ failed: .*kernel fell over"):
        list(stream)
    failing_steps.undo()
    assert stream.output.samples[0].finish_reason == "error"
    assert list(stream) == []
    assert_idle(llm)


# -- life --------------------------------------------------------------------------------------------------------


def test_after_close_everything_is_refused_in_one_sentence(tiny_llama):
    llm = LLM(tiny_llama, **OPTIONS)
    stream = llm.stream("Hello", LETTERS)
    next(stream)
    llm.close()
    llm.close()
    uses = [lambda: llm.generate("a"), lambda: llm.chat([]), lambda: llm.stream("a"), llm.progress, llm.result]
    for use in [*uses, lambda: list(stream)]:
        with pytest.raises(UserError, match="This LLM is closed"):
            use()
    stream.close()


def test_plan_and_ledger(llm):
    assert llm.plan.device_bytes == 320 * MiB
    assert llm.plan.limits.max_seq_len == 128
    before = llm.result()
    assert llm.ledger.snapshot().unattributed is not None
    llm.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True))
    after = llm.result()
    assert (after.finished, after.generated_tokens) == (before.finished + 1, before.generated_tokens + 3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        *[({"transfer_slice_s": value}, "transfer_slice_s") for value in (0, -1, math.inf, math.nan, True, "x", None)],
        ({"transfer_slice_s": 10**400}, r"transfer_slice_s = 100000000000\.\.\. \(401 digits\): out of range"),
        *[({"scratch_head_bytes": value}, "scratch_head_bytes") for value in (-1, 0.5, math.nan, True, "x", None)],
        *[({"memory_bytes": value}, "memory_bytes") for value in (0, -1, 1.5, True, "1GiB", 2**63)],
        ({"memory_bytes": GiB, "device": "cuda:1"}, "memory_bytes = 1073741824: cuda:1 is a card"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_sizes_and_times_of_an_engine_are_checked_when_they_are_asked_for(fields, words):
    with pytest.raises(InvalidSetting, match=words) as refused:
        EngineOptions(model="m", **fields)
    assert refused.value.remedy


def test_sizes_and_times_that_can_be():
    EngineOptions(model="m", memory_bytes=1, scratch_head_bytes=0, transfer_slice_s=1)
    EngineOptions(model="m", device="cuda:1", transfer_slice_s=1e-6)


# -- options -----------------------------------------------------------------------------------------------------


def test_options_are_texts_or_numbers_and_remember_where_they_are_from():
    texts = engine_options("m", {"memory": "1.5GiB", "kv_tokens": "4Ki", "kv_fraction": "90%", "chunk_tokens": "64"})
    numbers = engine_options("m", {"memory": GiB * 3 // 2, "kv_tokens": 4096, "kv_fraction": 0.9, "chunk_tokens": 64})
    assert texts.memory_bytes == numbers.memory_bytes == GiB * 3 // 2
    assert texts.chunk_tokens == numbers.chunk_tokens == 64
    for name in ("kv_tokens", "kv_fraction"):
        text, number = (getattr(options.knobs, name) for options in (texts, numbers))
        assert (text.value, text.origin, text.where) == (number.value, Origin.API, name)
    assert (texts.knobs.kv_fraction.text, numbers.knobs.kv_fraction.text) == ("90%", "0.9")


def test_options_left_out_are_not_set():
    options = engine_options("m", dict.fromkeys(Options.__annotations__))
    assert options == engine_options("m", {}) == EngineOptions(model="m")


def test_a_dtype_may_be_one_of_torch():
    import torch

    options = engine_options("m", {"dtype": torch.bfloat16, "kv_dtype": torch.float32})
    assert (options.dtype, options.knobs.kv_dtype.value) == ("bfloat16", "float32")


def test_every_option_arrives():
    given = {
        "memory": "1GiB", "max_seq_len": 1, "max_batch_size": 2, "max_num_tokens": 3, "kv_tokens": 4, "kv_bytes": 5,
        "total_bytes": 6, "keep_free_bytes": 0, "kv_fraction": "1/2", "kv_dtype": "bf16", "dtype": "fp32",
        "block_tokens": 8, "disabled_claims": "penalty tables", "attention": "other", "admission": "reserve_all",
        "chunk_tokens": "none", "graphs": "2,1", "host_kv_bytes": "7", "prefix_caching": False, "fence": False,
        "device": " CPU ", "plan_file": "plan.json", "overlap": True,
    }  # fmt: skip
    assert given.keys() == Options.__annotations__.keys()
    read = engine_options("m", given)
    assert read.device == "cpu"
    found = {name: setting.value for name, setting in read.knobs.items() if setting.is_set}
    assert {name: str(value) for name, value in found.items()} == {
        "total_bytes": "6", "keep_free_bytes": "0", "kv_bytes": "5", "kv_tokens": "4", "kv_fraction": "1/2",
        "kv_dtype": "bfloat16", "block_tokens": "8", "admission": "reserve_all", "host_kv_bytes": "7",
        "graphs": "1,2",
    }  # fmt: skip
    assert read.host_kv_bytes == 0, "no tier where no prefixes are cached"
    assert engine_options("m", {**given, "prefix_caching": None}).host_kv_bytes == 7
    limits = read.limit_knobs
    assert [one.value for one in (limits.max_seq_len, limits.max_batch_size, limits.max_num_tokens)] == [1, 2, 3]
    assert (limits.prefix_caching.value, limits.prefix_caching.origin) == (False, Origin.API)
    assert read.knobs.disabled_claims == {"penalty tables"}
    assert (read.dtype, read.attention, read.chunk_tokens, read.fence) == ("float32", "other", "none", False)
    assert read.overlap is True


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": "lots"}, "memory = 'lots'"),
        ({"memory": [1]}, "memory = .*a list"),
        ({"max_seq_len": 0}, "max_seq_len = 0"),
        ({"max_seq_len": 1.5}, "max_seq_len = '1.5'"),
        ({"kv_fraction": 1.5}, "kv_fraction = '1.5'"),
        ({"admission": "greedy"}, "admission = 'greedy'.*optimistic"),
        ({"fence": "no"}, "fence = 'no'"),
        ({"prefix_caching": "no"}, "prefix_caching = 'no'.*neither True nor False"),
        ({"host_kv_bytes": "much"}, "host_kv_bytes = 'much'"),
        ({"host_kv_bytes": 10**400}, r"host_kv_bytes = 100000000000\.\.\. \(401 digits\): larger than any there is"),
        ({"memory": 10**5000}, r"memory = 100000000000\.\.\. \(5,001 digits\)"),
        ({"kv_bytes": Fraction(1, 2)}, "kv_bytes = .*not a size"),
        ({"memory": "1GiB", "device": "cuda"}, "memory_bytes = 1073741824: cuda:0 is a card.*total_bytes bounds what"),
        ({"memory": "1GiB", "device": "gpu"}, "device = 'gpu': no device"),
        ({"chunk_tokens": "many"}, "chunk_tokens = 'many'"),
        ({"dtype": "int3"}, "dtype = 'int3'"),
        ({"dtype": "fp8"}, "dtype = .*float32"),
        ({"max_seq_length": 5}, "max_seq_length = 5: no such option.*write max_seq_len"),
    ],
)
def test_options_that_cannot_be_read_are_refused_before_anything_starts(options, words):
    with pytest.raises(InvalidSetting, match=words):
        LLM("no such model", **options)


def test_importing_the_package_needs_no_engine():
    code = "import sys, tonnage; tonnage.SamplingParams(); print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_library_is_told_with_what_to_install():
    without = Path(__file__).parent.parent
    code = "import without_engine; without_engine.block()\nfrom tonnage import LLM"
    done = subprocess.run([sys.executable, "-c", code], cwd=without, capture_output=True, text=True)
    assert done.returncode == 1
    assert "tonnage.LLM needs the engine's libraries" in done.stderr
    assert "pip install 'tonnage[engine]'" in done.stderr


def test_other_names_are_missing_as_usual():
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = tonnage.LLMs
    assert {"LLM", "AsyncLLM", "SamplingParams"} <= set(dir(tonnage))
