"""``AsyncLLM``: concurrent streams and calls on one thread, cancelled, refused, failing, closed."""

from __future__ import annotations

import asyncio
import gc
import string
import subprocess
import sys
import threading
import time
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny import byte_tokenizer

from tonnage import LLM, AsyncLLM, SamplingParams
from tonnage.engine import Engine
from tonnage.engine.executor import Executor
from tonnage.engine.worker import Worker
from tonnage.errors import InputError, InvalidSetting, ModelNotFound, RequestRefused, TonnageError, UserError
from tonnage.units import MiB

OPTIONS = {"memory": "320MiB", "max_seq_len": 128, "max_batch_size": 8, "max_num_tokens": 64, "fence": False}
#: Letters, drawn.
LETTERS = SamplingParams(
    max_tokens=100,
    temperature=1.0,
    seed=7,
    logit_bias=dict.fromkeys(byte_tokenizer().encode(string.ascii_lowercase), 100.0),
)
SHORT = replace(LETTERS, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tiny_llama):
    """Started in one event loop and used in others."""
    llm = AsyncLLM(tiny_llama, **OPTIONS)
    asyncio.run(llm.start())
    yield llm
    asyncio.run(llm.close())


@pytest.fixture(scope="module")
def truth(tiny_llama):
    """Texts of ``SHORT`` for "Hello" with the seeds 0 to 15, each computed alone."""
    with LLM(tiny_llama, **OPTIONS) as llm:
        return [llm.generate("Hello", replace(SHORT, seed=seed))[0].text for seed in range(16)]


@pytest.fixture
def own(tiny_llama):
    """Not started: for tests that break it."""
    return AsyncLLM(tiny_llama, **OPTIONS)


@pytest.fixture
def steps(monkeypatch):
    """The engine makes ``steps.left`` steps and then computes nothing, but goes on taking jobs.

    So no request ends before its test is ready.
    """
    step, count = Engine.step, SimpleNamespace(left=3)

    def counted(engine):
        if count.left <= 0:
            time.sleep(0.001)
            return []
        count.left -= 1
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)
    return count


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "tonnage engine"]


async def text_of(stream):
    return "".join([delta.text async for delta in stream])


async def assert_idle(llm):
    progress = await llm.progress()
    assert (progress.num_running, progress.num_waiting, progress.kv_used_tokens) == (0, 0, 0)


# -- answers -----------------------------------------------------------------------------------------------------


def test_streams_and_calls_run_together_and_each_gets_its_own(llm, truth):
    async def main():
        streams = [text_of(llm.stream("Hello", replace(SHORT, seed=seed))) for seed in range(16)]
        batch = llm.generate(["Hello"] * 16, [replace(SHORT, seed=seed) for seed in range(16)])
        *streamed, outputs = await asyncio.gather(*streams, batch)
        assert streamed == truth
        assert [output.text for output in outputs] == truth
        await assert_idle(llm)

    asyncio.run(main())


def test_calls_are_those_of_the_synchronous_one(llm, tiny_llama):
    messages = [{"role": "user", "content": "hi"}]
    with LLM(tiny_llama, **OPTIONS) as other:
        chat, (samples,) = other.chat(messages, SHORT)[0].text, other.generate("Hello", replace(SHORT, n=3))

    async def main():
        assert (await llm.chat(messages, SHORT))[0].text == chat
        assert await text_of(llm.stream(messages=messages, params=SHORT)) == chat
        (ours,) = await llm.generate("Hello", replace(SHORT, n=3))
        assert [one.token_ids for one in ours.samples] == [one.token_ids for one in samples.samples]
        assert await llm.generate([]) == []

    asyncio.run(main())


def test_a_stream_has_its_output_in_the_end(llm, truth):
    async def main():
        stream = llm.stream("Hello", replace(SHORT, seed=0))
        assert stream.output is None
        deltas = [delta async for delta in stream]
        assert "".join(delta.text for delta in deltas) == stream.output.text == truth[0]
        assert deltas[-1].finish_reason == "length"
        assert [delta async for delta in stream] == []

    asyncio.run(main())


def test_plan_ledger_and_result(llm):
    async def main():
        assert llm.plan.device_bytes == 320 * MiB
        assert sum(entry.physical_bytes for entry in llm.ledger.snapshot().entries) > 0
        before = await llm.result()
        await llm.generate("Hello", replace(SHORT, ignore_eos=True))
        assert (await llm.result()).generated_tokens == before.generated_tokens + 12

    asyncio.run(main())


# -- ended early -------------------------------------------------------------------------------------------------


def test_cancelling_a_task_cancels_its_call(llm, truth, steps):
    async def main():
        long = asyncio.create_task(llm.generate(["Hello"] * 3, replace(LETTERS, n=2)))
        other = asyncio.create_task(llm.generate("Hello", replace(SHORT, seed=0)))
        while not (await llm.progress()).num_running:
            pass
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        steps.left = 1000
        assert (await other)[0].text == truth[0]
        await assert_idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["closed", "dropped", "interrupted"])
def test_a_coroutine_that_nobody_awaits_any_more_cancels_its_call(llm, truth, steps, how):
    """Driven by hand: the event loop, which would cancel it, knows nothing of it."""

    async def main():
        call = llm.generate(["Hello"] * 3, replace(LETTERS, n=2))
        call.send(None)
        while not (await llm.progress()).num_running:
            pass
        if how == "closed":
            call.close()
        elif how == "interrupted":
            with pytest.raises(KeyboardInterrupt):
                call.throw(KeyboardInterrupt)
        else:
            del call
        gc.collect()
        await assert_idle(llm)
        steps.left = 1000
        assert (await llm.generate("Hello", replace(SHORT, seed=0)))[0].text == truth[0]

    asyncio.run(main())


@pytest.mark.parametrize("how", ["aclose", "aclosing", "break", "dropped", "task cancelled", "never iterated"])
def test_a_stream_that_ends_early_gives_its_memory_back(llm, steps, how):
    async def read_on(stream):
        async for _ in stream:
            pass

    async def main():
        stream = llm.stream("Hello", LETTERS)
        if how != "never iterated":
            assert (await anext(stream)).text
            assert (await llm.progress()).num_running == 1
        if how == "aclose":
            await stream.aclose()
            await stream.aclose()
            assert [delta async for delta in stream] == []
        elif how == "aclosing":
            async with aclosing(stream):
                pass
        elif how == "break":
            async for _ in stream:
                break
            del stream
        elif how == "task cancelled":
            reader = asyncio.create_task(read_on(stream))
            await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        else:
            del stream
        gc.collect()
        await assert_idle(llm)

    asyncio.run(main())


def test_an_event_loop_that_goes_away_harms_nobody(llm, truth):
    left = []

    async def leave():
        left.append(llm.stream("Hello", LETTERS))
        await anext(left[0])

    async def main():
        assert (await llm.generate("Hello", replace(SHORT, seed=0)))[0].text == truth[0]
        left.clear()
        await assert_idle(llm)

    asyncio.run(leave())
    asyncio.run(main())


# -- refused and failing -----------------------------------------------------------------------------------------


def test_refusals_reach_their_caller(llm):
    async def main():
        with pytest.raises(RequestRefused, match=r"^prompts\[1\]: .*too long"):
            await llm.generate(["a", "x" * 300])
        stream = llm.stream("x" * 300)
        with pytest.raises(RequestRefused, match="too long"):
            await anext(stream)
        with pytest.raises(InputError, match="prompts is int"):
            await llm.generate(5)
        with pytest.raises(InvalidSetting, match="n = 2"):
            llm.stream("a", SamplingParams(n=2))
        await assert_idle(llm)

    asyncio.run(main())


def test_a_failing_step_fails_its_samples_and_not_the_engine(llm, truth, monkeypatch):
    def fall_over(*_, **__):
        raise RuntimeError("kernel fell over")

    async def main():
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "launch", fall_over)
            (output,) = await llm.generate("Hello", SHORT)
            assert "kernel fell over" in output.samples[0].error
            with pytest.raises(TonnageError, match="kernel fell over"):
                await text_of(llm.stream("Hello", SHORT))
        assert (await llm.generate("Hello", replace(SHORT, seed=0)))[0].text == truth[0]
        await assert_idle(llm)

    asyncio.run(main())


def test_an_engine_that_fails_tells_everybody_who_waits(own, steps, monkeypatch):
    def fail(engine):
        # The traceback will hold this frame, and close must give back the memory that it looks at.
        _weights = list(engine._runtime.executor._model.parameters())
        raise RuntimeError("the driver is gone")

    async def main():
        await own.start()
        running = own.stream("Hello", LETTERS)
        await anext(running)
        monkeypatch.setattr(Engine, "step", fail)
        waiting = [own.generate("Hello", LETTERS), own.generate("Hello", LETTERS), text_of(running)]
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert len({id(error) for error in errors}) == 3
        for error in errors:
            assert isinstance(error, TonnageError)
            assert "The engine failed: the driver is gone" in str(error)
        with pytest.raises(TonnageError, match="the driver is gone"):
            await own.generate("Hello")
        with pytest.raises(TonnageError, match="the driver is gone"):
            await own.progress()
        await own.close()

    before = threads()
    asyncio.run(main())
    assert threads() == before


def test_a_model_that_cannot_start_says_why(tmp_path):
    async def main():
        llm = AsyncLLM(tmp_path / "nothing", **OPTIONS)
        with pytest.raises(ModelNotFound):
            await llm.start()
        await llm.close()
        with pytest.raises(InvalidSetting):
            AsyncLLM(tmp_path, memory="lots")

    before = threads()
    asyncio.run(main())
    assert threads() == before


def test_what_goes_wrong_in_closing_is_told(own, monkeypatch):
    close = Engine.close

    def failing(engine):
        close(engine)
        raise RuntimeError("still in use")

    async def main():
        async with own:
            monkeypatch.setattr(Engine, "close", failing)

    before = threads()
    with pytest.raises(RuntimeError, match="still in use"):
        asyncio.run(main())
    assert threads() == before


# -- life --------------------------------------------------------------------------------------------------------


def test_closing_tells_who_waits_and_ends_the_thread(own, steps):
    async def main():
        async with own:
            assert len(threads()) == len(before) + 1
            stream = own.stream("Hello", LETTERS)
            await anext(stream)
            waiting = asyncio.create_task(own.generate(["Hello"] * 20, LETTERS))
            await own.progress()
        with pytest.raises(UserError, match="This AsyncLLM is closed"):
            await waiting
        with pytest.raises(UserError, match="This AsyncLLM is closed"):
            await text_of(stream)
        for use in (own.generate("a"), own.chat([]), own.progress(), own.result()):
            with pytest.raises(UserError, match="This AsyncLLM is closed"):
                await use
        with pytest.raises(UserError, match="This AsyncLLM is closed"):
            own.stream("a")
        await own.close()

    before = threads()
    asyncio.run(main())
    assert threads() == before


def test_it_is_started_once(own):
    async def main():
        for use in (own.generate("a"), own.progress()):
            with pytest.raises(UserError, match="not started"):
                await use
        with pytest.raises(UserError, match="not started"):
            _ = own.plan
        await own.close()
        async with own:
            with pytest.raises(UserError, match="started before"):
                await own.start()

    asyncio.run(main())


def test_a_start_that_is_cancelled_leaves_nothing(own):
    async def main():
        starting = asyncio.create_task(own.start())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await own.close()

    before = threads()
    asyncio.run(main())
    assert threads() == before


def test_a_start_that_nobody_awaits_any_more_leaves_nothing(own):
    async def main():
        starting = own.start()
        starting.send(None)
        starting.close()
        await asyncio.wait_for(asyncio.wrap_future(own._worker.ended), 60)
        await own.close()

    before = threads()
    asyncio.run(main())
    assert threads() == before


def test_an_idle_engine_waits_for_its_next_job(own, monkeypatch):
    looks = []
    look = Worker._next_job

    def counted(worker, *, wait):
        looks.append(wait)
        return look(worker, wait=wait)

    monkeypatch.setattr(Worker, "_next_job", counted)

    async def main():
        async with own:
            await own.generate("Hello", SHORT)
            await own.progress()
            await asyncio.sleep(0.05)
            num_looks = len(looks)
            await asyncio.sleep(0.05)
            assert len(looks) == num_looks
            assert looks[-1] is True

    asyncio.run(main())


LEFT_OPEN = """
import asyncio, sys
from tonnage import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM(sys.argv[1], memory="320MiB", max_seq_len=256, fence=False)
    await llm.start()
    stream = llm.stream("Hello", SamplingParams(max_tokens=200, ignore_eos=True))
    await anext(aiter(stream))
    raise RuntimeError("nobody closes it")

asyncio.run(main())
"""


def test_an_engine_left_open_ends_with_the_interpreter(tiny_llama):
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN, str(tiny_llama)], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "nobody closes it" in done.stderr
    assert "terminate called" not in done.stderr
