"""A whole model that drafts beside its target: its weights, its cache in the same pool, and who refuses it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_peer_vllm import check, launch, priced

from tonnage.costs.price import weights_price
from tonnage.peers.launch import Launch
from tonnage.peers.predict import predict
from tonnage.peers.vllm.pages import pages_of
from tonnage.peers.vllm.setup import resolve
from tonnage.peers.vllm.workers import other_stages
from tonnage.planner.weights import weights_of
from tonnage.terms import Rank
from tonnage.units import GiB


def drafting(key="llama-3.1-70b", draft="llama-3.1-8b", *, tp=2, pp=1, stage=0, **asked) -> Launch:
    """The target's launch on one stage with the draft's weights, as ``tonnage plan --draft`` makes it."""
    made = launch(key, card="H200", tp=tp, pp=pp, **asked)
    beside, _ = priced(draft, Rank())
    rank = replace(made.rank, index=stage * tp)
    weights = weights_of(made.config, dtype=made.config.dtype, rank=rank, draft=beside)
    return replace(made, draft=beside, weights=weights, rank=rank)


def test_a_block_has_the_pages_of_both():
    """On two ranks a layer of either keeps 4 heads x 2 x 128 x 2 = 2,048 bytes a token; 80 layers and 32."""
    pages = pages_of(resolve(drafting()))
    assert pages.bytes_per_token == (80 + 32) * 2048 == 229_376
    assert pages_of(resolve(launch("llama-3.1-70b", tp=2))).bytes_per_token == 80 * 2048


def test_heads_of_other_sizes_share_a_block():
    """Qwen3-14B: 40 layers x 8 heads x 2 x 128 x 2; Qwen3-0.6B: 28 layers of the same; on eight ranks one head each.
    Qwen2.5-0.5B: 24 layers x 2 heads x 2 x 64 x 2."""
    assert pages_of(resolve(drafting("qwen3-14b", "qwen3-0.6b", tp=1))).bytes_per_token == (40 + 28) * 4096
    assert pages_of(resolve(drafting("qwen3-14b", "qwen2.5-0.5b", tp=1))).bytes_per_token == 40 * 4096 + 24 * 512


def test_its_weights_are_loaded_beside_the_targets():
    """8,030,261,248 elements in two bytes, on two ranks: half of the matrices each."""
    own, both = (predict(each).term("weights").bytes.bytes for each in (launch("llama-3.1-70b", tp=2), drafting()))
    assert both - own == pytest.approx(8_030_261_248, rel=1e-3)


def test_it_lies_on_the_last_stage():
    """Of two stages of 40 layers: the first keeps its own alone."""
    first, last = (drafting(pp=2, stage=stage) for stage in (0, 1))
    assert pages_of(resolve(first)).bytes_per_token == 40 * 2048
    assert pages_of(resolve(last)).bytes_per_token == (40 + 32) * 2048
    (moved,) = other_stages(first)
    assert moved.weights.bytes == pytest.approx(last.weights.bytes, rel=1e-6)
    (moved,) = other_stages(last)
    assert moved.weights.bytes == pytest.approx(first.weights.bytes, rel=1e-6)
    assert predict(first).logged_tokens == predict(last).logged_tokens


def test_the_rule_and_what_is_left_out_are_told():
    start = predict(drafting())
    assert [rule.name for rule in start.rules] == ["draft's cache"]
    assert "the dry run of" in "; ".join(start.notes)
    assert "own weights and cache are not" not in "; ".join(start.notes)
    untold = predict(launch(num_speculative_tokens=3))
    assert "own weights and cache are not" in "; ".join(untold.notes)


def test_layers_for_multi_token_prediction_are_not_counted_beside_it():
    """DeepSeek-V3 has one of its own, 576 x 2 bytes a token; a draft is in its place."""
    own = pages_of(resolve(launch("deepseek-v3", tp=8, num_speculative_tokens=1)))
    assert own.bytes_per_token == 62 * 1152
    beside = pages_of(resolve(drafting("deepseek-v3", "llama-3.1-8b", tp=8, num_speculative_tokens=1)))
    assert beside.bytes_per_token == 61 * 1152 + 32 * 512


@pytest.mark.parametrize("version", ["0.10.0", "0.11.0", "0.14.1"])
def test_releases_without_drafts_by_a_model_refuse_it(version):
    start = predict(drafting(version=version))
    assert check(start, "draft model").passes is False
    assert start.checks[-1].name == "draft model"
    assert start.starts is False


@pytest.mark.parametrize(("version", "core"), [("0.6.6", "V0"), ("0.9.2", "V0"), ("0.15.0", "V1"), ("0.33.0", "V1")])
def test_the_first_core_drafted_with_models_while_it_was_there(version, core):
    found = drafting(version=version)
    assert resolve(found).core == core
    assert all(each.name != "draft model" for each in predict(found).checks)
    assert resolve(launch(version="0.9.2")).core == "V1"


def test_vocabularies_of_two_sizes_are_refused():
    start = predict(drafting("llama-3.1-70b", "qwen3-0.6b"))
    assert check(start, "vocabulary of the draft").have.startswith("151,936")
    assert start.starts is False
    assert predict(drafting("llama-3.1-70b", "qwen3-0.6b", version="0.6.6")).starts is True


def test_beside_windows_its_pages_are_told_to_be_unchecked():
    notes = predict(drafting("gemma-3-27b", "gemma-3-12b", tp=1)).notes
    assert any("checked against no log" in note for note in notes)


def test_a_pool_of_two_models_is_smaller_than_of_one():
    one, two = (predict(each) for each in (launch("llama-3.1-70b", card="H200", tp=2), drafting()))
    draft = weights_price(two.launch.draft, rank=Rank(size=2, tp=2)).quantity.bytes
    assert one.pool.bytes - two.pool.bytes == pytest.approx(draft, abs=GiB / 100)
