"""The reference policy through the planner: the same model, device and engine, another derivation."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from cli_fakes import tonnage_fixture  # noqa: F401 - a fixture

from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.cli.reference import reference_knobs
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.costs.config import ModelConfig
from tonnage.errors import InvalidSetting
from tonnage.hardware import find_card, generic_card
from tonnage.planner import plan_measured, plan_ranks, plan_without_device
from tonnage.planner.predict import predict
from tonnage.planner.weights import weights_of
from tonnage.reserves.penalties import EXTRA_PENALTY_TABLES
from tonnage.terms import LineKind, Rank
from tonnage.units import GiB

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
CARD = generic_card(80 * GiB)


def by_reference(**given):
    return plan_without_device(LLAMA_8B, card=CARD, reference=ReferenceKnobs(**given))


def test_the_fraction_comes_after_the_peak_and_leaves_slack():
    made = by_reference()
    assert [step.name for step in made.steps][:1] == ["peak"]
    slack = made.bytes_of(LineKind.SLACK)
    assert slack > 0
    assert sum(line.bytes for line in made.lines) == made.device_bytes
    assert made.kv.layout.groups[0].block_tokens == 32
    assert made.kv.tokens < plan_without_device(LLAMA_8B, card=CARD).kv.tokens


def test_its_own_knobs_move_it():
    usual = by_reference()
    assert by_reference(free_gpu_memory_fraction=Fraction(1, 2)).kv.bytes < usual.kv.bytes
    assert by_reference(max_tokens=200_000).kv.tokens == 200_000
    assert by_reference(tokens_per_block=64).kv.layout.groups[0].block_tokens == 64
    assert by_reference(kv_dtype="fp8").kv.tokens > 1.9 * usual.kv.tokens


@pytest.mark.parametrize("name", ["total_bytes", "kv_bytes", "kv_tokens", "keep_free_bytes", "block_tokens"])
def test_our_knobs_about_money_are_refused(name):
    knobs = Knobs(**{name: Setting.flag(4096, "4096", f"--{name}")})
    with pytest.raises(InvalidSetting, match=f"{name}.*knobs of its own"):
        plan_without_device(LLAMA_8B, card=CARD, knobs=knobs, reference=ReferenceKnobs())


def test_the_fingerprint_tells_policies_apart():
    made = [plan_without_device(LLAMA_8B, card=CARD), by_reference(), by_reference(max_tokens=200_000)]
    assert len({plan.fingerprint for plan in made}) == 3


# -- seats of steps that overlap --


def penalties_of(plan, name=EXTRA_PENALTY_TABLES):
    return sum(child.bytes for line in plan.lines for child in line.children if child.name == name)


def test_as_many_seats_more_as_there_are_sequences():
    """256 seats, a vocabulary of 128,256, five bytes for each entry; on the peak, so the pool pays 0.9 of them."""
    ahead, alone = by_reference(), by_reference(has_seat_headroom=False)
    tables = 256 * 128_256 * 5
    assert (penalties_of(ahead), penalties_of(alone)) == (tables, 0)
    assert alone.kv.bytes - ahead.kv.bytes == pytest.approx(tables * 9 // 10, abs=ahead.kv.layout.slab_bytes)
    assert (ahead.limits.lookahead_steps, alone.limits.lookahead_steps) == (1, 0)
    assert by_reference(is_overlapped=False).kv == alone.kv


def test_the_reference_does_not_pay_for_the_seats_themselves():
    tables = "penalty tables"
    plan = by_reference()
    off = plan_without_device(
        LLAMA_8B, card=CARD, knobs=Knobs(disabled_claims=frozenset({tables})), reference=ReferenceKnobs()
    )
    assert penalties_of(plan, tables) == 256 * 128_256 * 5  # a part of the slack
    assert off.kv.bytes > plan.kv.bytes  # and nobody then has a table of extra seats either
    assert penalties_of(off) == 0


def test_stages_take_turns_and_have_no_seats_more():
    plans = plan_ranks(LLAMA_8B, card=CARD, rank=Rank(pp=2, size=2), reference=ReferenceKnobs())
    assert [penalties_of(plan) for plan in plans] == [0, 0]
    assert [plan.limits.lookahead_steps for plan in plans] == [0, 0]


def test_two_answers_to_one_question_are_refused():
    asked = {"card": CARD, "reference": ReferenceKnobs()}
    with pytest.raises(InvalidSetting, match=r"lookahead_steps.*knobs of its own"):
        plan_without_device(LLAMA_8B, limit_knobs=LimitKnobs(lookahead_steps=Setting(2)), **asked)
    with pytest.raises(InvalidSetting, match=r"prefix_caching.*knobs of its own.*enable_block_reuse decides"):
        plan_without_device(LLAMA_8B, limit_knobs=LimitKnobs(prefix_caching=Setting(False)), **asked)
    with pytest.raises(InvalidSetting, match=r"snapshot_tokens.*knobs of its own"):
        plan_without_device(LLAMA_8B, limit_knobs=LimitKnobs(snapshot_tokens=Setting(256)), **asked)
    with pytest.raises(InvalidSetting, match="no encoder"):
        by_reference(encoder_cache_max_bytes=GiB)


def test_our_engine_has_no_beams():
    weights = weights_of(LLAMA_8B, rank=Rank(), dtype="bfloat16")
    limits = by_reference().limits
    measured = predict(LLAMA_8B, card=CARD, limits=limits, rank=Rank(), dtype="bfloat16", weights=weights)
    asked = {"card": CARD, "measured": measured}
    assert plan_measured(LLAMA_8B, reference=ReferenceKnobs(), **asked).kv == by_reference().kv
    with pytest.raises(InvalidSetting, match=r"max_beam_width.*one way only"):
        plan_measured(LLAMA_8B, reference=ReferenceKnobs(max_beam_width=2), **asked)


# -- latent attention: scratch for what a step attends to --

LATENT = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/deepseek-v2-lite")
#: 27 layers of 512 + 64 elements of one byte; 8 heads of 128 + 64 + 128, one byte each.
CACHE_RATE, SCRATCH_RATE = 27 * 576, 8 * 320


def latent(device="RTX 5090", seq_len=32_768, **given):
    return plan_without_device(
        LATENT,
        card=find_card(device),
        backend="trtllm",
        rank=Rank(tp=2, size=2),
        limit_knobs=LimitKnobs(max_seq_len=Setting(seq_len)),
        reference=ReferenceKnobs(kv_dtype="fp8", **given),
    )


def budget_after_fraction(plan):
    return next(step.after for step in plan.steps if step.name == "free_gpu_memory_fraction")


@pytest.mark.parametrize("device", ["RTX 5090", "H200"])
def test_reuse_without_chunks_shares_the_budget(device):
    """Pool and scratch hold equally many tokens: B/(k+w)."""
    plan = latent(device)
    tokens = budget_after_fraction(plan) // (CACHE_RATE + SCRATCH_RATE)
    assert 0 <= tokens - plan.kv.tokens < 32
    assert plan.attended_cap is not None
    assert abs(plan.attended_cap - tokens) <= 1
    assert plan.bytes_of(LineKind.SCRATCH) == pytest.approx(tokens * SCRATCH_RATE, abs=SCRATCH_RATE)


def test_chunks_bound_it_only_where_the_long_probe_fits():
    """From SM 100 on the probe takes eight chunks of prefix and one of new tokens, 9 x 8,192 here, and one token."""
    plain, short = latent(), latent(enable_chunked_prefill=True)
    long = latent("RTX 5090", 73_729, enable_chunked_prefill=True)
    assert (short.kv.tokens, short.attended_cap) == (plain.kv.tokens, plain.attended_cap)
    assert long.attended_cap is None
    assert long.kv.tokens > 1.1 * plain.kv.tokens
    assert latent("RTX 5090", 73_728, enable_chunked_prefill=True).attended_cap is not None
    assert latent("H200", enable_chunked_prefill=True).attended_cap is None


def test_nothing_is_reserved_where_nothing_is_reused():
    assert latent(enable_block_reuse=False).attended_cap is None
    assert latent(enable_block_reuse=False).kv.tokens > 1.1 * latent().kv.tokens


# -- on the command line --


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        ([], "sdpa"),
        (["--policy", "reference"], "trtllm"),
        (["--policy", "reference", "--attention", "sdpa"], "sdpa"),
        (["--policy", "own", "--attention", "trtllm"], "trtllm"),
    ],
)
def test_whose_declarations(tonnage, flags, backend):
    model = Path(__file__).parents[2] / "examples/configs/deepseek-v2-lite"
    ended = tonnage("plan", str(model), "--device", "H200", "--max-seq-len", "8192", "--json", *flags)
    assert ended.code == 0, ended.err
    plan = json.loads(ended.out)
    lines = [child["owner"] for line in plan["lines"] for child in line["children"]]
    owners = {*lines, *(one["owner"] for one in plan["not_charged"])}
    assert {name for name in owners if name.startswith("attention.") and name != "attention.indexer"} == {
        f"attention.{backend}"
    }


def test_a_variable_that_the_reference_does_not_read_is_refused():
    assert reference_knobs(["TRTLLM_SKIP_KV_CACHE_ESTIMATION=1"]).environment.skip_estimation
    with pytest.raises(InvalidSetting, match="no such variable"):
        reference_knobs(["TRTLLM_SKIP_ESTIMATION=1"])


@pytest.mark.parametrize(
    ("texts", "what"),
    [
        (["max_tokens=8", "max-tokens=9"], "max_tokens is given twice"),
        (["TRTLLM_SKIP_KV_CACHE_ESTIMATION=1", "TRTLLM_SKIP_KV_CACHE_ESTIMATION=0"], "is given twice"),
        (["TRTLLM_SKIP_KV_CACHE_ESTIMATION=yes"], "not a whole number"),
        (["manager=V3"], "no such manager"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(texts, what):
    with pytest.raises(InvalidSetting, match=what):
        reference_knobs(texts)
