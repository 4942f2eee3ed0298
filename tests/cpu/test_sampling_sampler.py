"""From logits to tokens: true to the probabilities, blind to the neighbours, honest about what is no number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling_filters import FILTERS, OUTPUT, PENALTIES, PROMPT, expected_scores, tables
from test_sampling_random import SIGNIFICANCE, chi_square

from tonnage.engine.sampling import Sampled, Sampler, SamplingTable
from tonnage.sampling import SamplingParams

STOPS = (0, 5)
NUM_DRAWS = 20_000
EARLY, LATE = len(PROMPT), 1000


def sample(logits: torch.Tensor, params: list[dict], *, positions=None, tile_elements: int = 2**22) -> Sampled:
    """Row i of ``logits`` [rows, V] under ``params[i]``, with seed i; every slot has the same prompt and output."""
    table = SamplingTable(len(params))
    for slot, one in enumerate(params):
        table.set(slot, SamplingParams(**one), seed=slot, stop_ids=STOPS, num_prompt_tokens=len(PROMPT))
    positions = np.full(len(params), LATE) if positions is None else np.asarray(positions)
    rows = table.rows(np.arange(len(params)), positions)
    sampler = Sampler(logits.shape[1], tile_elements=tile_elements)
    before = logits.clone()
    sampled = sampler.sample(logits, rows, tables(logits.shape[1], num_slots=len(params)))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the logits were changed"
    return sampled


# The distribution.


def drawn(logits: torch.Tensor, params: SamplingParams, *, seed: int = 11) -> np.ndarray:
    """How often each token came in ``NUM_DRAWS`` draws at as many positions of one request."""
    table = SamplingTable(1)
    table.set(0, params, seed=seed, stop_ids=STOPS, num_prompt_tokens=len(PROMPT))
    rows = table.rows(np.zeros(NUM_DRAWS, np.int64), LATE + np.arange(NUM_DRAWS))
    sampled = Sampler(len(logits)).sample(logits.expand(NUM_DRAWS, -1), rows, tables(len(logits)))
    assert all(sampled.finite)
    return np.bincount(sampled.tokens, minlength=len(logits))


def expected(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    return NUM_DRAWS * torch.softmax(expected_scores(logits, params).double(), -1).numpy()


@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
def test_tokens_come_as_often_as_their_probabilities_say(params):
    torch.manual_seed(12)
    logits, params = torch.randn(300) * 2, SamplingParams(**params)
    assert chi_square(drawn(logits, params), expected(logits, params)) > SIGNIFICANCE


WRONG = {
    "top_p": ({"top_p": 0.6}, "top_p"),
    "top_k": ({"top_k": 9}, "top_k"),
    "min_p": ({"min_p": 0.2}, "min_p"),
}


@pytest.mark.parametrize(("params", "name"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("one", [-1, 1], ids=["a token fewer", "a token more"])
def test_a_filter_off_by_one_token_would_be_noticed(params, name, one):
    """The test above can fail: against the probabilities of one token fewer or more it does."""
    torch.manual_seed(4)
    logits, params = torch.randn(60), SamplingParams(temperature=1.0, **params)
    found = drawn(logits, params)
    assert chi_square(found, expected(logits, params)) > SIGNIFICANCE
    num_kept = int(torch.isfinite(expected_scores(logits, params)).sum())
    wrong = SamplingParams(temperature=1.0, top_k=num_kept + one)
    assert chi_square(found, expected(logits, wrong)) < 1e-12


@pytest.mark.parametrize("temperature", [0.9, 1.1])
def test_a_temperature_off_by_a_tenth_would_be_noticed(temperature):
    torch.manual_seed(5)
    logits = torch.randn(700) * 3
    found = drawn(logits, SamplingParams(temperature=1.0))
    assert chi_square(found, expected(logits, SamplingParams(temperature=1.0))) > SIGNIFICANCE
    assert chi_square(found, expected(logits, SamplingParams(temperature=temperature))) < SIGNIFICANCE


def test_seeds_that_differ_draw_differently_and_equal_ones_alike():
    logits, params = torch.zeros(500), SamplingParams(temperature=1.0)
    first, again, other = (drawn(logits, params, seed=seed) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


# Rows do not see each other.

MIXED = [{}, *FILTERS.values(), {"logprobs": 5}, PENALTIES, {"logit_bias": {3: 50.0}}]


@given(
    st.lists(st.integers(0, len(MIXED) - 1), min_size=1, max_size=12),
    st.integers(0, 2**32),
    st.sampled_from([1, 257, 1000, 5000, 2**22]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_a_row_gives_the_same_whatever_its_neighbours(kinds, seed, tile_elements, dtype, random):
    """In any order, in any batch, in tiles of any size: the same token, log-probability and alternatives."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(kinds), 400, generator=generator) * 3).to(dtype)
    table = SamplingTable(len(kinds))
    for slot, kind in enumerate(kinds):
        table.set(slot, SamplingParams(**MIXED[kind]), seed=slot * seed, stop_ids=STOPS, num_prompt_tokens=EARLY)
    penalties = tables(400, num_slots=len(kinds))

    def run(slots: list[int], tile_elements: int) -> Sampled:
        rows = table.rows(np.array(slots), np.array(slots) * 3 + LATE)
        return Sampler(400, tile_elements=tile_elements).sample(logits[slots], rows, penalties)

    order = list(range(len(kinds)))
    random.shuffle(order)
    together = run(order, tile_elements)
    for row, slot in enumerate(order):
        alone = run([slot], 2**22)
        assert together.tokens[row] == alone.tokens[0]
        assert together.logprobs[row] == pytest.approx(alone.logprobs[0], abs=1e-5)
        assert [token for token, _ in together.top.get(row, ())] == [token for token, _ in alone.top.get(0, ())]


# Greedy rows, edits, log-probabilities.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_temperature_0_takes_the_most_probable_token_and_the_first_of_several(dtype):
    torch.manual_seed(6)
    logits = torch.randn(5, 3001).to(dtype)
    logits[1, [7, 2000]] = 9
    sampled = sample(logits, [{"top_k": 3, "top_p": 0.2}] * 5)
    assert sampled.tokens == logits.float().argmax(-1).tolist()
    assert sampled.tokens[1] == 7
    assert sampled.finite == [True] * 5
    assert sampled.top == {}
    logprobs = torch.log_softmax(logits.double(), -1)[range(5), sampled.tokens]
    assert sampled.logprobs == pytest.approx(logprobs.tolist(), abs=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_and_biases_move_greedy_rows_too(temperature):
    logits = torch.full((4, 60), -5.0)
    logits[:, 9], logits[:, 3], logits[:, 20] = 3.0, 2.9, 2.5
    sampled = sample(logits, [
        {"temperature": temperature, "logit_bias": {9: -100.0, 3: -100.0}},
        {"temperature": temperature, "logit_bias": {33: 100.0, 99_999: 100.0}},
        {"temperature": temperature, "presence_penalty": 2.0, "frequency_penalty": 2.0, "top_k": 1},
        {"temperature": temperature, "repetition_penalty": 50.0, "top_k": 1},
    ])  # fmt: skip
    assert sampled.tokens == [20, 33, 20, 20]


def test_100_forces_a_token_and_minus_100_bans_one():
    torch.manual_seed(7)
    logits = torch.randn(2000, 60) * 3
    banned = logits[0].argmax().item()
    logits[:] = logits[0]
    sampled = sample(logits, [{"temperature": 2.0, "logit_bias": {banned: -100.0}}] * 2000)
    assert banned not in sampled.tokens
    assert len(set(sampled.tokens)) > 30
    assert set(sample(logits, [{"temperature": 1.0, "logit_bias": {41: 100.0}}] * 2000).tokens) == {41}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_stop_before_enough_tokens(temperature):
    logits = torch.zeros(3, 60)
    logits[:, 0], logits[:, 5], logits[:, 8] = 40.0, 39.0, 20.0
    params = [{"temperature": temperature, "min_tokens": 4, "top_k": 1, "logit_bias": {0: 1.0}}] * 3
    assert sample(logits, params, positions=[EARLY, EARLY + 3, EARLY + 4]).tokens == [8, 8, 0]


def test_repetition_counts_the_prompt_and_the_others_do_not():
    """Token 11 is in the prompt alone, 9 in the output alone, 3 in both."""
    logits = torch.full((3, 60), -9.0)
    logits[:, 11], logits[:, 9], logits[:, 3], logits[:, 30] = 3.0, 2.9, 2.8, 1.0
    assert sample(logits, [{"repetition_penalty": 10.0}, {"presence_penalty": 2.0}, {}]).tokens == [30, 11, 11]
    assert (PROMPT.count(11), OUTPUT.count(11), PROMPT.count(9), OUTPUT.count(9) > 0) == (1, 0, 0, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probabilities_are_the_models_own(dtype):
    torch.manual_seed(8)
    logits = (torch.randn(4, 900) * 3).to(dtype)
    everything = {"temperature": 0.5, "top_k": 5, **PENALTIES, "logit_bias": {1: 30.0}}
    sampled = sample(logits, [{**everything, "logprobs": 7}, {"logprobs": 20}, {}, {**everything, "logprobs": 0}])
    expected = torch.log_softmax(logits.double(), -1)
    assert sampled.tokens[0] == 1
    assert sampled.logprobs == pytest.approx(expected[range(4), sampled.tokens].tolist(), abs=2e-6)
    assert sampled.top.keys() == {0, 1}
    for row, count in ((0, 7), (1, 20)):
        values, ids = logits[row].float().topk(count)
        assert [token for token, _ in sampled.top[row]] == ids.tolist()
        told = [logprob for _, logprob in sampled.top[row]]
        assert told == pytest.approx(expected[row, ids].tolist(), abs=2e-6)
        assert values.tolist() == sorted(values.tolist(), reverse=True)


def test_more_alternatives_than_tokens_gives_all_of_them():
    sampled = sample(torch.tensor([[0.0, 1.0, 2.0]]), [{"logprobs": 20}])
    assert [token for token, _ in sampled.top[0]] == [2, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile_elements", [1, 1000, 2**22])
def test_log_probabilities_of_a_prompt(dtype, tile_elements):
    torch.manual_seed(9)
    logits, targets = (torch.randn(11, 300) * 3).to(dtype), torch.randint(300, (11,))
    sampler, expected = Sampler(300, tile_elements=tile_elements), torch.log_softmax(logits.double(), -1)
    told = sampler.prompt_logprobs(logits, targets, num_top=4)
    assert [one.token for one in told] == targets.tolist()
    assert [one.logprob for one in told] == pytest.approx(expected[range(11), targets].tolist(), abs=2e-6)
    for one, row, numbers in zip(told, expected, logits.float(), strict=True):
        ids = numbers.topk(4).indices.tolist()
        assert [token for token, _ in one.top] == ids
        assert [logprob for _, logprob in one.top] == pytest.approx(row[ids].tolist(), abs=2e-6)
    assert all(one.top == () for one in sampler.prompt_logprobs(logits, targets, num_top=0))
    assert sampler.prompt_logprobs(logits[:0], targets[:0], num_top=4) == []


# What is no number.

BAD = {
    "a NaN": {17: torch.nan},
    "all NaN": dict.fromkeys(range(700), torch.nan),
    "+inf": {17: torch.inf},
    "+inf and -inf": {17: torch.inf, 9: -torch.inf},
    "all -inf": dict.fromkeys(range(700), -torch.inf),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("params", [{}, *FILTERS.values()], ids=["greedy", *FILTERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_without_numbers_is_told_and_its_neighbours_are_unharmed(bad, params, dtype):
    torch.manual_seed(10)
    logits = torch.randn(3, 700).to(dtype)
    params = {**params, "logprobs": 2}
    clean = sample(logits, [params] * 3)
    for token, value in bad.items():
        logits[1, token] = value
    sampled = sample(logits, [params] * 3)
    assert sampled.finite == [True, False, True]
    assert sampled.tokens[1] == 0
    for row in (0, 2):
        assert sampled.tokens[row] == clean.tokens[row]
        assert sampled.logprobs[row] == clean.logprobs[row]
        assert sampled.top[row] == clean.top[row]


@pytest.mark.parametrize("params", [{}, *FILTERS.values()], ids=["greedy", *FILTERS])
def test_tokens_that_are_impossible_are_never_drawn(params):
    """-inf is a fair logit, as long as there is another one."""
    torch.manual_seed(11)
    logits = torch.randn(50, 60)
    logits[:, 10:] = -torch.inf
    sampled = sample(logits, [params] * 50)
    assert sampled.finite == [True] * 50
    assert all(token < 10 for token in sampled.tokens)
    assert np.isfinite(sampled.logprobs).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_choose_is_told(temperature):
    """Every token with a chance is a stop, and it is too early to stop."""
    logits = torch.full((2, 60), -torch.inf)
    logits[:, list(STOPS)] = 1.0
    sampled = sample(logits, [{"temperature": temperature, "min_tokens": 3}] * 2, positions=[EARLY, LATE])
    assert sampled.finite == [False, True]
    assert sampled.tokens[0] == 0
    assert sampled.tokens[1] in STOPS


@given(st.integers(1, 600), st.integers(0, 2**32), st.sampled_from(sorted(FILTERS)), st.booleans())
def test_any_numbers_give_a_token_of_the_vocabulary(vocab_size, seed, name, is_narrow):
    """Logits as large as floats go; where they overflow under a temperature or penalty the row is told as no number."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice([0, 1, -1, 1e-40, 3e38, -3e38, 88, -104, 1e4], (4, max(vocab_size, 50)))
    logits = torch.from_numpy(kinds).to(torch.bfloat16 if is_narrow else torch.float32)
    sampled = sample(logits, [{**FILTERS[name], "logprobs": 1}] * 4)
    for row, token in enumerate(sampled.tokens):
        assert 0 <= token < logits.shape[1]
        if sampled.finite[row]:
            assert sampled.logprobs[row] <= 1e-6


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 512])
def test_vocabularies_around_the_size_of_a_block(vocab_size):
    """Each of up to 512 equal tokens comes in 10,000 draws."""
    logits = torch.zeros(10_000, vocab_size)
    sampled = sample(logits, [{"temperature": 1.0, "top_p": 0.999999}] * 10_000)
    assert set(sampled.tokens) == set(range(vocab_size))


def test_no_rows_give_nothing():
    assert sample(torch.empty(0, 60), []) == Sampled()


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.5}, {}], ids=str)
def test_zeros_of_different_sign_are_equal(filters):
    """-0.0 less +0.0 is -0.0, whose bits are no small number: such gaps once left no token, and drew the first one."""
    logits = torch.full((1, 64), -30.0)
    logits[0, 10], logits[0, 20] = -0.0, 0.0
    table = SamplingTable(1)
    table.set(0, SamplingParams(temperature=1.0, **filters), seed=1, stop_ids=(), num_prompt_tokens=0)
    rows = (table.rows(np.array([0]), np.array([position])) for position in range(100))
    assert {Sampler(64).sample(logits, row).tokens[0] for row in rows} == {10, 20}
