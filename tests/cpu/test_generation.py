"""Greedy text of the engine against transformers' own ``generate`` on the same float32 weights.

Rule: equal up to the first position whose two best logits are less than ``GAP`` apart; log-probabilities within
``GAP`` up to there; at least 95 % of the prompts equal to the very end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tonnage.config import LimitKnobs, Setting
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


@pytest.fixture(scope="module")
def engine(truths):
    # After the reference, which needs more memory than the engine's fence leaves to others.
    assert truths
    limits = LimitKnobs(max_seq_len=Setting(768), max_batch_size=Setting(32), max_num_tokens=Setting(512))
    with start(EngineOptions(model="smollm2", memory_bytes=2048 * MiB, limit_knobs=limits)) as engine:
        yield engine


def _run(engine, prompts, *, at_once: bool) -> list:
    requests = [
        engine.request(f"p{i}", SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True), token_ids=prompt)
        for i, prompt in enumerate(prompts)
    ]
    done = {}
    for batch in [requests] if at_once else [[request] for request in requests]:
        for request in batch:
            engine.submit(request)
        while engine.has_work:
            done.update({completion.request_id: completion for completion in engine.step()})
    return [done[request.id] for request in requests]


@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "batched"])
def test_greedy_text_equals_generate(engine, prompts, truths, at_once):
    completions = _run(engine, prompts, at_once=at_once)
    equal, compared, worst, smallest_gap = 0, 0, 0.0, min(min(truth.gaps) for truth in truths)
    for prompt, truth, completion in zip(prompts, truths, completions, strict=True):
        assert len(completion.token_ids) == NEW_TOKENS
        same = [ours == theirs for ours, theirs in zip(completion.token_ids, truth.tokens, strict=True)]
        first = same.index(False) if False in same else NEW_TOKENS
        equal += first == NEW_TOKENS
        compared += first
        if first < NEW_TOKENS:
            assert truth.gaps[first] < GAP, f"{len(prompt)} tokens: differs at {first}, gap {truth.gaps[first]:.2e}"
        errors = [abs(a - b) for a, b in zip(completion.logprobs[:first], truth.logprobs[:first], strict=True)]
        worst = max([worst, *errors])
    print(
        f"\n{equal} of {len(prompts)} prompts equal to the end, {compared} tokens compared, "
        f"largest log-probability error {worst:.1e}, smallest top-two gap {smallest_gap:.1e}"
    )
    assert worst < GAP
    assert equal >= 0.95 * len(prompts)
