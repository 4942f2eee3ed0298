"""Which tokens pass the filters and with which weight: against transformers' processors, and against sorting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tonnage.engine.sampling import SamplingTable
from tonnage.engine.sampling.edit import edited
from tonnage.engine.sampling.select import gaps_to_best, limits, nearest, weights
from tonnage.resources.penalties import PenaltyTensors
from tonnage.sampling import SamplingParams

PROMPT, OUTPUT = [3, 3, 11, 40, 7], [7, 7, 9, 3, 9, 9]
STOPS = (0, 5)


def tables(vocab_size: int, *, num_slots: int = 1) -> PenaltyTensors:
    """Every slot has the same prompt and output."""
    prompt, output = (torch.tensor([token for token in ids if token < vocab_size]).long() for ids in (PROMPT, OUTPUT))
    counts = torch.bincount(output, minlength=vocab_size).int()
    seen = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, prompt, True)
    return PenaltyTensors(counts.repeat(num_slots, 1), seen.repeat(num_slots, 1))


def expected_scores(logits: torch.Tensor, params: SamplingParams, *, is_early: bool = False) -> torch.Tensor:
    """What transformers makes of logits [V]; penalties by OpenAI's formula, which transformers does not have."""
    scores, ids = logits.float()[None].clone(), torch.tensor([PROMPT + OUTPUT])
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    counts = np.bincount(OUTPUT, minlength=logits.shape[0])
    scores -= torch.from_numpy(counts * params.frequency_penalty + (counts > 0) * params.presence_penalty).float()
    for token, bias in params.logit_bias.items():
        scores[0, token] += bias
    if is_early:
        scores[0, list(STOPS)] = -torch.inf
    for is_on, warper in (
        (not params.is_greedy, lambda: TemperatureLogitsWarper(params.temperature)),
        (params.top_k > 0, lambda: TopKLogitsWarper(params.top_k)),
        (params.top_p < 1, lambda: TopPLogitsWarper(params.top_p)),
        (params.min_p > 0, lambda: MinPLogitsWarper(params.min_p)),
    ):
        scores = warper()(ids, scores) if is_on else scores
    return scores[0]


def ours(logits: torch.Tensor, params: list[SamplingParams], *, is_early: bool = False):
    """(kept, weights), each [rows, V]: what the draw sees of row i of ``logits`` under ``params[i]``."""
    table = SamplingTable(len(params))
    for slot, one in enumerate(params):
        table.set(slot, one, seed=slot, stop_ids=STOPS, num_prompt_tokens=len(PROMPT))
    positions = np.full(len(params), len(PROMPT) + (0 if is_early else 1000))
    rows = table.rows(np.arange(len(params)), positions)
    scores = edited(logits, rows, tables(logits.shape[1], num_slots=len(params)), in_place=False)
    gaps = gaps_to_best(scores, scores.amax(-1, keepdim=True), rows.draws.temperature)
    limit = limits(gaps, rows.draws)
    kept = torch.isfinite(gaps) if limit is None else torch.isfinite(gaps) & (gaps <= limit)
    return kept, weights(gaps, limit)[:, : logits.shape[1]]


PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}
FILTERS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_k 1": {"temperature": 1.0, "top_k": 1},
    "top_k of more than there are": {"temperature": 1.0, "top_k": 10**6},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_p, almost all": {"temperature": 1.0, "top_p": 0.999},
    "top_p, almost none": {"temperature": 1.0, "top_p": 1e-6},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "min_p 1": {"temperature": 1.0, "min_p": 1.0},
    "top_k then top_p": {"temperature": 0.8, "top_k": 30, "top_p": 0.7},
    "top_k that cuts more than top_p": {"temperature": 2.0, "top_k": 3, "top_p": 0.95},
    "top_p then min_p": {"temperature": 1.3, "top_p": 0.95, "min_p": 0.1},
    "all filters": {"temperature": 1.1, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.3},
    "repetition below 1": {"temperature": 1.0, "repetition_penalty": 0.7},
    "presence": {"temperature": 1.0, "presence_penalty": 1.2},
    "frequency": {"temperature": 1.0, "frequency_penalty": 0.5},
    "negative penalties": {"temperature": 1.0, "presence_penalty": -1.0, "frequency_penalty": -0.5},
    "bias": {"temperature": 1.0, "logit_bias": {4: 3.0, 9: -3.0, 7: 1.0}},
    "everything": {"temperature": 0.9, "top_k": 60, "top_p": 0.95, "min_p": 0.01, **PENALTIES,
                   "logit_bias": {1: 2.0, 3: -1.0}},
}  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    size: int
    scale: float


@pytest.mark.parametrize("vocabulary", [Vocabulary(60, 1.0), Vocabulary(1000, 2.0), Vocabulary(5003, 3.0)], ids=str)
@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize("is_early", [False, True], ids=["", "stops masked"])
def test_kept_tokens_and_their_probabilities_are_those_of_transformers(params, vocabulary, is_early):
    torch.manual_seed(1)
    logits = torch.randn(8, vocabulary.size) * vocabulary.scale
    params = SamplingParams(**params, min_tokens=3)
    kept, weight = ours(logits, [params] * 8, is_early=is_early)
    scores = torch.stack([expected_scores(row, params, is_early=is_early) for row in logits])
    assert torch.equal(kept, torch.isfinite(scores))
    expected = torch.softmax(scores.double(), -1)
    weight = weight.double()
    torch.testing.assert_close(weight / weight.sum(-1, keepdim=True), expected, rtol=2e-5, atol=2.0**-38)


def test_rows_that_ask_for_different_things_each_get_their_own():
    torch.manual_seed(2)
    logits = torch.randn(len(FILTERS), 1000) * 2
    params = [SamplingParams(**one) for one in FILTERS.values()]
    kept, weight = ours(logits, params)
    for row, one in enumerate(params):
        alone_kept, alone_weight = ours(logits[row : row + 1], [one])
        assert torch.equal(kept[row], torch.isfinite(expected_scores(logits[row], one)))
        assert torch.equal(kept[row], alone_kept[0])
        assert torch.equal(weight[row], alone_weight[0])


def test_bfloat16_logits_are_used_as_they_are():
    """Few bits, many ties: all that are as probable as the last one kept are kept."""
    torch.manual_seed(3)
    logits = torch.randn(1, 5000).bfloat16().float()
    assert logits.unique().numel() < 2000
    kept, _ = ours(logits, [SamplingParams(temperature=1.0, top_k=100)])
    assert torch.equal(kept[0], torch.isfinite(expected_scores(logits[0], SamplingParams(temperature=1.0, top_k=100))))
    assert kept.sum() > 100
    kept, _ = ours(logits, [SamplingParams(temperature=1.0, top_p=0.5)])
    least = logits[kept].min()
    assert torch.equal(kept, logits >= least)
    probability = torch.softmax(logits.double(), -1)
    assert probability[logits > least].sum() < 0.5 <= probability[kept].sum()


# Radix select against sorting.

GAPS = {
    "random": lambda rng, size: rng.exponential(3, size),
    "ties": lambda rng, size: np.round(rng.exponential(2, size), 1),
    "equal": lambda rng, size: np.full(size, rng.exponential(1)),
    "neighbouring floats": lambda rng, size: np.float32(7) + rng.integers(0, 9, size) * np.spacing(np.float32(7)),
    "tiny": lambda rng, size: rng.exponential(1, size) * 1e-41,
    "huge": lambda rng, size: rng.choice([0, 1e-30, 1, 3e38, np.inf], size),
}


@st.composite
def gap_rows(draw: st.DrawFn, most_tokens: int = 5000) -> np.ndarray:
    """float32 [rows, V], one gap in each row 0, as the best token's is."""
    size, num_rows = draw(st.integers(1, most_tokens) | st.integers(1, 20)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = [GAPS[draw(st.sampled_from(sorted(GAPS)))](rng, size) for _ in range(num_rows)]
    gaps = np.stack(rows).astype(np.float32)
    gaps[:, rng.integers(size)] = 0
    return gaps


@given(gap_rows(), st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_the_kth_nearest_is_the_one_that_sorting_finds(gaps, shares):
    size = gaps.shape[1]
    k = np.array([1 + int(share * (size - 1)) for share in shares])[: len(gaps), None]
    found = nearest(torch.from_numpy(gaps), torch.ones(gaps.shape, dtype=torch.int64), torch.from_numpy(k)).numpy()
    np.testing.assert_array_equal(found, np.take_along_axis(np.sort(gaps), k - 1, 1))


def by_sorting(gaps: np.ndarray, weight: np.ndarray, need: int) -> np.float32:
    order = np.argsort(gaps, kind="stable")
    return gaps[order][np.searchsorted(np.cumsum(weight[order]), need)]


@given(gap_rows(), st.lists(st.floats(0, 1), min_size=4, max_size=4), st.integers(0, 2**32), st.booleans())
def test_the_limit_of_a_weight_is_the_one_that_sorting_finds(gaps, shares, seed, is_probability):
    if is_probability:
        weight = weights(torch.from_numpy(gaps), None)[:, : gaps.shape[1]].numpy()
    else:
        weight = np.random.default_rng(seed).integers(0, 2**40, gaps.shape)
    total = weight.sum(-1).tolist()
    need = [max(1, int(share * one)) for share, one in zip(shares, total, strict=False) if one > 0]
    gaps, weight = gaps[np.array(total) > 0], weight[np.array(total) > 0]
    found = nearest(torch.from_numpy(gaps), torch.from_numpy(weight), torch.tensor(need).unsqueeze(1)).squeeze(1)
    assert found.tolist() == [by_sorting(*row) for row in zip(gaps, weight, need, strict=True)]


@given(gap_rows(most_tokens=600), st.integers(1, 700), st.floats(1e-9, 1, exclude_max=True), st.floats(0, 1))
@settings(max_examples=60)
def test_filters_keep_what_their_definitions_say(gaps, top_k, top_p, min_p):
    """In exact integers, one token after the other: k nearest, then a share of their weight, then those near the
    best; all ties of the last one kept."""
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    table = SamplingTable(1)
    table.set(0, params, seed=0, stop_ids=(), num_prompt_tokens=1)
    draws = table.rows(np.zeros(len(gaps), np.int64), np.arange(len(gaps))).draws
    limit = limits(torch.from_numpy(gaps), draws).squeeze(1).tolist()
    weight = weights(torch.from_numpy(gaps), None).numpy()
    for row, found in enumerate(limit):
        order = np.argsort(gaps[row], kind="stable").tolist()
        kth = gaps[row][order[min(top_k, len(order)) - 1]]
        nearest_k = [token for token in order if gaps[row][token] <= kth]
        total, mass = sum(weight[row].tolist()[token] for token in nearest_k), 0
        for token in nearest_k:
            mass += int(weight[row][token])
            share = gaps[row][token]
            if mass >= top_p * total:
                break
        assert found == min(kth, share, np.float32(-np.log(min_p)) if min_p else np.inf)


def test_a_row_without_numbers_leaves_its_neighbours_alone():
    gaps = torch.rand(3, 700)
    gaps[0, 0] = gaps[2, 0] = 0
    ones, need = torch.ones(3, 700, dtype=torch.int64), torch.tensor([[5], [5], [9]])
    expected = nearest(gaps, ones, need)
    for bad in (torch.nan, -torch.nan, -torch.inf, -1.0):
        gaps[1] = bad
        assert torch.equal(nearest(gaps, ones, need)[::2], expected[::2])
