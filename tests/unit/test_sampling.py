"""Sampling parameters: every field is checked when they are made, and samples get seeds of their own."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

import pytest

from tonnage.caching import CacheParams
from tonnage.errors import InvalidSetting
from tonnage.sampling import MAX_BIASED_TOKENS, MAX_LOGPROBS, LogitBias, SamplingParams, child_seed

#: No parameter may be any of these; the first is larger than every float, the second longer than Python prints.
NOT_NUMBERS = (10**400, 10**5000, -(10**400), math.nan, math.inf, -math.inf, True, Decimal("0.5"), Fraction(1, 2), 1j)
NUMBERS = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "n", "logprobs", "prompt_logprobs", "priority",
)  # fmt: skip
BAD = [
    *[(name, value) for name in NUMBERS for value in NOT_NUMBERS],
    *[("logit_bias", {1: value}) for value in NOT_NUMBERS],
    *[("logit_bias", {value: 1}) for value in NOT_NUMBERS],
    *[("stop_token_ids", [value]) for value in NOT_NUMBERS],
    *[("max_tokens", value) for value in (0, -1, 1.5, "3", True)],
    *[("min_tokens", value) for value in (-1, 2.0, None)],
    *[("temperature", value) for value in (-0.1, 0.001, 101, math.nan, math.inf, "hot", None, True)],
    *[("top_k", value) for value in (-1, 1.0, None)],
    *[("top_p", value) for value in (0, -0.5, 1.01, math.nan, "1")],
    *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
    *[("repetition_penalty", value) for value in (0, -1, 101, math.inf)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, "0")],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, math.nan)],
    *[("seed", value) for value in (2**64, -(2**63) - 1, 1.0, "7")],
    *[("n", value) for value in (0, 129, 1.0)],
    *[("logprobs", value) for value in (-1, MAX_LOGPROBS + 1, True)],
    *[("prompt_logprobs", value) for value in (-1, MAX_LOGPROBS + 1)],
    *[("priority", value) for value in (10**7, 0.5)],
    *[("stop", value) for value in ([""], [1], 5, {"a": 1})],
    *[("stop_token_ids", value) for value in ([-1], [1.0], ["a"], 3)],
    *[("logit_bias", value) for value in ([1], {-1: 0}, {1: 101}, {1: math.nan}, {"a": 1}, {1: True})],
    ("logit_bias", dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0)),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: type(value).__name__)
def test_a_value_that_makes_no_sense_is_refused_by_name(name, value):
    with pytest.raises(InvalidSetting) as refused:
        SamplingParams(**{name: value})
    assert str(refused.value.knob).startswith(name)
    assert refused.value.remedy
    assert len(str(refused.value)) < 300


def test_fields_are_checked_against_each_other():
    with pytest.raises(InvalidSetting, match="above max_tokens = 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_the_edges_of_every_range_are_inside():
    SamplingParams(
        max_tokens=1, min_tokens=1, temperature=0.01, top_k=0, top_p=1e-9, min_p=1, repetition_penalty=100,
        presence_penalty=-2, frequency_penalty=2, logit_bias={0: -100, 5: 100.0}, seed=2**64 - 1, n=128,
        logprobs=MAX_LOGPROBS, prompt_logprobs=0, priority=-1_000_000, stop=["a"] * 3, stop_token_ids={4, 5},
    )  # fmt: skip
    SamplingParams(temperature=100, seed=-(2**63), min_p=0)


def test_they_are_a_value():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias, stop="end", stop_token_ids=[3])
    bias[1] = 5.0
    assert params.logit_bias[1] == 2.0
    assert (params.stop, params.stop_token_ids) == (("end",), (3,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    with pytest.raises(TypeError):
        params.logit_bias[1] = 3.0
    assert params == SamplingParams(logit_bias={1: 2.0}, stop=["end"], stop_token_ids=(3,))


EVERYTHING = {
    "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
    "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {7: 1.5, 3: -2},
    "seed": 11, "stop": ("end", "."), "stop_token_ids": (5, 6), "ignore_eos": True, "include_stop": True, "n": 2,
    "logprobs": 4, "prompt_logprobs": 0, "skip_special_tokens": False, "priority": -3,
    "cache": CacheParams(salt="s", priority=80, retain_seconds=2.5, retain_tokens=32),
}  # fmt: skip

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "asdict": lambda params: SamplingParams(**dataclasses.asdict(params)),
    "replace": dataclasses.replace,
    **{
        f"pickle {number}": lambda params, number=number: pickle.loads(pickle.dumps(params, number))
        for number in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("fields", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_a_copy_is_equal_and_as_good(fields, how):
    params = SamplingParams(**fields)
    made = COPIES[how](params)
    assert made == params
    assert hash(made) == hash(params)
    assert {name: getattr(made, name) for name in fields} == fields
    with pytest.raises(TypeError):
        made.logit_bias[1] = 3.0


def test_they_can_be_a_key():
    assert {field.name for field in dataclasses.fields(SamplingParams)} == EVERYTHING.keys()
    told = {SamplingParams(): "default"} | {
        SamplingParams(**(EVERYTHING | {"logit_bias": bias})): "biased" for bias in ({7: 1.5, 3: -2}, {3: -2.0, 7: 1.5})
    }
    assert len(told) == 2
    assert told[SamplingParams(**EVERYTHING)] == "biased"


def test_a_bias_is_a_mapping_like_any_other():
    bias = SamplingParams(logit_bias={7: 1.5, 3: -2}).logit_bias
    assert isinstance(bias, Mapping)
    assert bias == {3: -2, 7: 1.5}
    assert EVERYTHING["logit_bias"] == bias
    assert bias != {3: -2}
    assert (list(bias), list(bias.values()), bias.get(4), len(bias)) == ([7, 3], [1.5, -2], None, 2)
    assert repr(bias) == "{7: 1.5, 3: -2}"
    assert SamplingParams(logit_bias=bias).logit_bias is bias
    assert SamplingParams(logit_bias=MappingProxyType({7: 1.5, 3: -2})).logit_bias == bias
    with pytest.raises(InvalidSetting, match=r"logit_bias\[3\] = 101"):
        LogitBias({3: 101})


def test_what_the_defaults_ask_for_is_greedy():
    params = SamplingParams()
    assert params.is_greedy
    assert not params.has_penalties
    assert all(SamplingParams(**{name: 1.5}).has_penalties for name in ("repetition_penalty", "presence_penalty"))
    assert SamplingParams(frequency_penalty=-0.5).has_penalties


def test_samples_have_seeds_of_their_own_and_the_prompt_is_told_once():
    asked = SamplingParams(n=3, seed=7, temperature=1.0, prompt_logprobs=2)
    samples = asked.samples()
    assert [sample.seed for sample in samples] == [child_seed(7, index) for index in range(3)]
    assert [sample.prompt_logprobs for sample in samples] == [2, None, None]
    assert {sample.n for sample in samples} == {1}
    assert [sample.seed for sample in dataclasses.replace(asked, seed=None).samples()] == [None] * 3
    single = SamplingParams(seed=7)
    assert single.samples() == [single]


def test_child_seeds_are_words_of_splitmix64():
    """The stream of state 1234567 as published with the reference implementation (Vigna, splitmix64.c)."""
    from tonnage.sampling import _splitmix64

    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [_splitmix64(1234567, index) for index in range(4)] == published
    assert child_seed(12, 0) == 12
    assert child_seed(-1, 3) == child_seed(2**64 - 1, 3)
    assert len({child_seed(seed, index) for seed in range(20) for index in range(20)}) == 400


@pytest.mark.parametrize("name", ["ignore_eos", "include_stop", "skip_special_tokens"])
@pytest.mark.parametrize("value", ["no", 1, None, []], ids=repr)
def test_yes_and_no_are_no_other_values(name, value):
    with pytest.raises(InvalidSetting, match="neither true nor false"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("stop", [["x" * 1025], ["y"] * 65, ["ab" * 300, "cd" * 300]], ids=len)
def test_stop_strings_are_bounded(stop):
    with pytest.raises(InvalidSetting, match="1024 characters in all"):
        SamplingParams(stop=stop)
