"""Greedy text of the engine against transformers' own ``generate`` on the same float32 weights.

Rule: equal up to the first position whose two best logits are less than ``GAP`` apart; log-probabilities within
``GAP`` up to there; at least 95 % of the prompts equal to the very end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import torch

from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.engine import EngineOptions, start
from tonnage.engine.models import model_folder, quiet_transformers
from tonnage.sampling import SamplingParams
from tonnage.units import MiB

pytestmark = pytest.mark.model

GAP = 1e-3
NEW_TOKENS = 64
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 40, 48, 63, 64, 65, 80, 97,
           120, 128, 144, 160, 200, 256, 300, 350, 400, 480, 512, 600)  # fmt: skip


@dataclass(frozen=True)
class Truth:
    """What ``generate`` gave: tokens, their log-probabilities, and the gap of the two best logits at each position."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """32 prompts of 1 to 600 tokens, cut at different places from a text that every checkout has."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("smollm2"))
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = tokenizer(text)["input_ids"]
    return [ids[37 * i : 37 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def truths(prompts) -> list[Truth]:
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(model_folder("smollm2"), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return [_generate(model, prompt) for prompt in prompts]


def _generate(model, prompt: list[int]) -> Truth:
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = out.sequences[0, len(prompt) :].tolist()
    logits = torch.cat(list(out.logits)).float()
    best = logits.topk(2, dim=-1).values
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return Truth(tokens, logprobs.tolist(), (best[:, 0] - best[:, 1]).tolist())


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run the same prompts. ``new_tokens`` of the 64 that the reference has; ``every`` nth prompt."""

    chunk_tokens: int | str | None = None
    kv_tokens: int | None = None
    new_tokens: int = 24
    every: int = 2
    at_once: bool = True


CASES = {
    "alone": Case(at_once=False, new_tokens=NEW_TOKENS, every=4),
    "batched": Case(new_tokens=NEW_TOKENS, every=1),
    "chunks of 16": Case(chunk_tokens=16),
    "chunks of 64": Case(chunk_tokens=64),
    "chunks of 512": Case(chunk_tokens=512),
    "whole prompts": Case(chunk_tokens="none"),
    # A pool for two of the longest, and the youngest suspended again and again: it is computed anew when it comes back.
    "suspended": Case(kv_tokens=1536, new_tokens=48),
}


def _start(case: Case):
    limits = LimitKnobs(max_seq_len=Setting(768), max_batch_size=Setting(32), max_num_tokens=Setting(640))
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
            scheduler.suspend(next(scheduler._victims()).id)  # as it does itself when the pool runs short
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


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_equals_generate(prompts, truths, name):
    # Truths come first: the reference needs more memory than the engine's fence leaves to others.
    case = CASES[name]
    prompts, truths = prompts[:: case.every], truths[:: case.every]
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
