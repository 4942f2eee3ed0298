"""Steps that overlap on a card, every feature of sampling behind them, and an engine that sleeps between them."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tonnage import AsyncLLM
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import EngineOptions, Finish, start
from tonnage.sampling import SamplingParams
from tonnage.units import MiB

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from tiny import save_tiny_llama

pytestmark = pytest.mark.gpu

#: Whatever looks at tokens.
ASKS = {
    "plain": {},
    "drawn": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 5},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "told": {"logprobs": 4, "prompt_logprobs": 2},
    "biased": {"logit_bias": {5: 2.0, 9: -100.0}, "min_tokens": 6, "stop_token_ids": tuple(range(0, 250, 2))},
    "string": {"stop": ("a", "e", "i")},
    "one": {"max_tokens": 1},
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder = save_tiny_llama(tmp_path_factory.mktemp("small"), hidden_size=256, intermediate_size=384)
    return EngineOptions(
        model=str(folder), device="cuda", attention="triton", compile=False,
        knobs=Knobs(kv_tokens=Setting(16 * 1024)),
        limit_knobs=LimitKnobs(
            max_batch_size=Setting(16), max_num_tokens=Setting(256), max_seq_len=Setting(256)
        ),
    )  # fmt: skip


def served(engine, rounds=2):
    done = {}
    for round_ in range(rounds):
        for i, (name, params) in enumerate(ASKS.items()):
            wanted = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **params})
            ids = [(7 * j + 3 * i) % 250 for j in range(20 + 3 * i)]
            engine.submit(engine.request(f"{round_} {name}", wanted, token_ids=ids))
        while engine.has_work:
            done |= {one.request_id: one for one in engine.step()}
    return done


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        other = theirs[name]
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason), name
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-3)
        assert len(one.prompt_logprobs) == len(other.prompt_logprobs)


def test_everything_told_is_the_same_one_at_a_time(asked):
    found = []
    for overlap in (True, False):
        with start(replace(asked, overlap=overlap)) as engine:
            assert engine.steps_ahead == overlap
            found.append(served(engine))
            assert engine.stats()["kv.allocated"] == 0
            assert not engine.result().retried_steps
    assert_same(*found)


def test_a_host_that_looks_late_finds_what_the_device_drew(asked):
    """Many steps behind one another, with rows that come, end and leave meanwhile."""
    with start(asked) as engine:
        alone = {}
        for i in range(24):
            params = SamplingParams(max_tokens=5 + i, ignore_eos=True)
            engine.submit(engine.request(f"alone {i}", params, token_ids=[(5 * j + i) % 250 for j in range(9 + i)]))
            while engine.has_work:
                alone |= {one.request_id[6:]: one.token_ids for one in engine.step()}
        done = {}
        for i in range(24):
            params = SamplingParams(max_tokens=5 + i, ignore_eos=True)
            engine.submit(engine.request(f"{i}", params, token_ids=[(5 * j + i) % 250 for j in range(9 + i)]))
            done |= {one.request_id: one for one in engine.step()}
            if i % 5 == 4:
                engine.cancel(f"{i - 1}")
        while engine.has_work:
            done |= {one.request_id: one for one in engine.step()}
        finished = {name: one.token_ids for name, one in done.items() if one.finish_reason is Finish.LENGTH}
        assert len(finished) >= 19
        assert finished == {name: alone[name] for name in finished}


def num_replays(engine):
    return sum(engine._runtime.executor.graphs.num_replays.values())


NAPS = [(), ("kv",), ("weights",), ("graphs",), ("weights", "kv")]


def test_an_engine_sleeps_and_wakes_to_the_same_text(asked):
    import torch

    def free():
        torch.cuda.synchronize()
        return engine._runtime.site.free_bytes()

    with start(asked) as engine:
        wanted = served(engine, rounds=1)
        late = SamplingParams(max_tokens=30, ignore_eos=True)
        engine.submit(engine.request("late", late, token_ids=[*range(40)]))
        (undisturbed,) = [one for _ in range(60) if engine.has_work for one in engine.step()]
        for nap, tags in enumerate(NAPS):
            engine.submit(engine.request(f"late {nap}", late, token_ids=[*range(40)]))
            for _ in range(9):
                engine.step()
            before = free()
            slept = engine.sleep(*tags)
            held = sum(num_bytes for tag, num_bytes in slept.freed_bytes.items())
            assert held > 0
            assert free() - before == pytest.approx(held, abs=4 * MiB)
            engine.wake(*tags)
            (woken,) = [one for _ in range(60) if engine.has_work for one in engine.step()]
            assert woken.token_ids == undisturbed.token_ids
            replays = num_replays(engine)
            assert_same(served(engine, rounds=1), wanted)
            assert num_replays(engine) > replays
        assert engine.ledger.snapshot().unattributed <= 64 * MiB


def test_many_are_served_at_once(asked):
    async def all_of(llm):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        return await asyncio.gather(*(llm.generate(f"text {i}", params) for i in range(30)))

    async def main():
        limits = {"max_batch_size": 16, "max_seq_len": 256}
        async with AsyncLLM(asked.model, device="cuda", attention="triton", dtype="bfloat16", **limits) as llm:
            return await all_of(llm)

    outputs = asyncio.run(main())
    assert [len(one[0].samples[0].token_ids) for one in outputs] == [20] * 30
