"""Greedy text of the engine against transformers' own ``generate`` on the same float32 weights (``truths``).

Rule: equal up to the first position whose two best logits are less than ``GAP`` apart; log-probabilities within
``GAP`` up to there; at least 95 % of the prompts equal to the very end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import pytest
from truths import NEW_TOKENS, Truth, filed, generated, make_prompts

from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import EngineOptions, start
from tonnage.sampling import SamplingParams
from tonnage.units import MiB

pytestmark = pytest.mark.model

GAP = 1e-3


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts()


@pytest.fixture(scope="module")
def truths() -> list[Truth]:
    return filed()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run the same prompts. ``new_tokens`` of the 64 that the reference has; ``every`` nth prompt, from
    the ``first`` on. The probes of a start run steps of ``max_num_tokens``."""

    chunk_tokens: int | str | None = None
    kv_tokens: int | None = None
    new_tokens: int = 24
    every: int = 4
    first: int = 0
    at_once: bool = True
    max_num_tokens: int = 640


#: All prompts together; those in chunks take a quarter each, the longest of which is cut by every size.
CASES = {
    "alone": Case(at_once=False, new_tokens=32, every=8),
    "batched": Case(new_tokens=NEW_TOKENS, every=1),
    "chunks of 16": Case(chunk_tokens=16, first=1, max_num_tokens=64),
    "chunks of 64": Case(chunk_tokens=64, first=2, max_num_tokens=128),
    "chunks of 512": Case(chunk_tokens=512, first=3),
    "whole prompts": Case(chunk_tokens="none"),
    # A pool for two of the longest, and the youngest suspended again and again: it is computed anew when it comes back.
    "suspended": Case(kv_tokens=1536, new_tokens=48, every=2, max_num_tokens=128),
}


def _start(case: Case):
    limits = LimitKnobs(
        max_seq_len=Setting(768), max_batch_size=Setting(32), max_num_tokens=Setting(case.max_num_tokens)
    )
    knobs = Knobs(kv_tokens=Setting(case.kv_tokens))
    return start(
        EngineOptions(
            model="smollm2",
            memory_bytes=2048 * MiB,
            knobs=knobs,
            limit_knobs=limits,
            chunk_tokens=case.chunk_tokens,
        )
    )


def _serve(engine, prompts, new_tokens: int, *, suspend_every: int | None = None) -> list:
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        engine.submit(engine.request(f"p{i}", params, token_ids=prompt))
    done, scheduler = {}, engine._scheduler
    for step in count(1):
        if not engine.has_work:
            break
        done.update({completion.request_id: completion for completion in engine.step()})
        if suspend_every is not None and step % suspend_every == 0 and len(scheduler.running) > 1:
            scheduler.suspend(scheduler._victim().id)  # as it does itself when the pool runs short
    return [done[f"p{i}"] for i in range(len(prompts))]


def _run(case: Case, prompts) -> list:
    with _start(case) as engine:
        if not case.at_once:
            return [completion for prompt in prompts for completion in _serve(engine, [prompt], case.new_tokens)]
        if case.kv_tokens is None:
            return _serve(engine, prompts, case.new_tokens)
        completions = _serve(engine, prompts, case.new_tokens, suspend_every=4)
        suspensions = engine.result().suspensions
        print(f"\n{suspensions} suspensions")
        assert suspensions > 0
        return completions


def test_the_filed_truths_are_what_transformers_gives(prompts, truths):
    """Here and now, for some of them; another machine's sums differ in the last bits."""
    some = slice(3, None, 8)
    for truth, told in zip(generated(prompts[some]), truths[some], strict=True):
        first = next((i for i, gap in enumerate(told.gaps) if gap < GAP), NEW_TOKENS)
        assert truth.tokens[:first] == told.tokens[:first]
        assert truth.logprobs[:first] == pytest.approx(told.logprobs[:first], abs=GAP)


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_equals_generate(prompts, truths, name):
    case = CASES[name]
    some = slice(case.first, None, case.every)
    prompts, truths = prompts[some], truths[some]
    completions = _run(case, prompts)
    equal, compared, worst, smallest_gap = 0, 0, 0.0, min(min(truth.gaps) for truth in truths)
    for prompt, truth, completion in zip(prompts, truths, completions, strict=True):
        assert len(completion.token_ids) == case.new_tokens
        same = [ours == theirs for ours, theirs in zip(completion.token_ids, truth.tokens, strict=False)]
        first = same.index(False) if False in same else case.new_tokens
        equal += first == case.new_tokens
        compared += first
        if first < case.new_tokens:
            assert truth.gaps[first] < GAP, f"{len(prompt)} tokens: differs at {first}, gap {truth.gaps[first]:.2e}"
        errors = [abs(a - b) for a, b in zip(completion.logprobs[:first], truth.logprobs[:first], strict=True)]
        worst = max([worst, *errors])
    print(
        f"\n{name}: {equal} of {len(prompts)} prompts equal to the end, {compared} tokens compared, "
        f"largest log-probability error {worst:.1e}, smallest top-two gap {smallest_gap:.1e}"
    )
    assert worst < GAP
    assert equal >= 0.95 * len(prompts)
