"""Heads that draft: a layer that shares its target's tables, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_peer_vllm import launch
from test_peer_vllm_drafts import drafting

from tonnage.costs.config import ModelConfig
from tonnage.peers.launch import Launch
from tonnage.peers.predict import predict
from tonnage.peers.vllm.drafting import head_of
from tonnage.peers.vllm.pages import pages_of
from tonnage.peers.vllm.setup import resolve
from tonnage.planner.weights import weights_of
from tonnage.terms import Quantity, Source
from tonnage.units import GiB

#: A head for Llama 3.1 8B, as such heads are published.
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256,
    "draft_vocab_size": 32_000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
#: q, k and v of 48 heads read 2 x 4096; o; gate, up and down; three hidden states to one; a head of 32,000 words.
ATTENTION, OUT, FEED, FUSE, WORDS = 48 * 128 * 8192, 4096 * 4096, 3 * 4096 * 14_336, 3 * 4096 * 4096, 32_000 * 4096
ELEMENTS = ATTENTION + OUT + FEED + FUSE + WORDS
TABLE = 128_256 * 4096


def with_head(*, tp=1, pp=1, head=HEAD, **asked) -> Launch:
    made = launch("llama-3.1-8b", tp=tp, pp=pp, **asked)
    draft = ModelConfig.from_dict(head)
    weights = weights_of(made.config, dtype=made.config.dtype, rank=made.rank, draft=draft)
    return replace(made, draft=draft, weights=weights)


def more(found: Launch) -> Quantity:
    """What the weights have beyond the target's."""
    own, both = (predict(each).term("weights").bytes for each in (replace_draft(found), found))
    return replace(both, bytes=both.bytes - own.bytes, low=both.low - own.low, high=both.high - own.high)


def replace_draft(found: Launch) -> Launch:
    weights = weights_of(found.config, dtype=found.config.dtype, rank=found.rank)
    return replace(found, draft=None, weights=weights)


def test_a_head_shares_its_targets_embeddings():
    """424,673,280 elements in two bytes, beside norms; at most with embeddings of its own."""
    assert ELEMENTS == 424_673_280
    found = more(with_head())
    assert found.bytes == pytest.approx(2 * ELEMENTS, rel=1e-4)
    assert found.high - found.bytes == pytest.approx(2 * TABLE, rel=1e-4)


def test_on_two_ranks_only_what_fuses_is_whole():
    assert more(with_head(tp=2)).bytes == pytest.approx(ELEMENTS + FUSE, rel=1e-4)


def test_a_head_of_the_first_kind_shares_the_head_too():
    """Its layer reads 4096, and two hidden states are fused."""
    first = {**HEAD, "architectures": ["LlamaForCausalLMEagle"]}
    elements = ATTENTION // 2 + OUT + FEED + 2 * 4096 * 4096
    assert more(with_head(head=first)).bytes == pytest.approx(2 * elements, rel=1e-4)


def test_what_does_not_fit_the_targets_is_its_own():
    """Of another vocabulary: 32,000 words of embeddings and as many of a head."""
    small = {**HEAD, "vocab_size": 32_000}
    assert more(with_head(head=small)).bytes == pytest.approx(2 * (ELEMENTS + WORDS), rel=1e-4)
    full = more(with_head(head={**HEAD, "draft_vocab_size": 128_256}))
    assert full.bytes == pytest.approx(2 * (ELEMENTS - WORDS), rel=1e-4)
    assert full.high - full.bytes == pytest.approx(2 * 2 * TABLE, rel=1e-4)


def test_its_layer_is_in_the_pool():
    """33 layers of 8 heads x 2 x 128 x 2 bytes."""
    assert pages_of(resolve(with_head())).bytes_per_token == 33 * 4096


def test_no_release_of_the_second_core_refuses_it():
    for version in ("0.8.5", "0.12.0", "0.33.0"):
        found = with_head(version=version, head={**HEAD, "vocab_size": 32_000})
        assert resolve(found).core == "V1"
        assert {each.name for each in predict(found).checks}.isdisjoint({"draft model", "vocabulary of the draft"})


def test_in_the_first_core_it_is_counted_whole_and_told():
    notes = predict(with_head(version="0.7.0")).notes
    assert any("counted whole" in note for note in notes)
    assert not any("counted whole" in note for note in predict(with_head()).notes)


def test_the_method_that_is_asked_for_decides():
    assert head_of(with_head()) == "eagle3"
    assert head_of(with_head(speculative_method="eagle")) == "eagle"
    assert head_of(with_head(speculative_method="draft_model")) == ""
    assert head_of(drafting()) == ""
    assert head_of(launch()) == ""


def test_logged_weights_have_it():
    found = replace(with_head(), weights=Quantity.exact(16 * GiB, Source.MEASURED, "a log"))
    assert predict(found).term("weights").bytes.bytes == 16 * GiB
