"""vLLM's buffers of adapters, by hand: rank x inputs and outputs x rank of every adapted matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_peer_vllm import MODELS, VERSIONS, check, launch

from tonnage.costs.layers import Experts
from tonnage.errors import InvalidSetting
from tonnage.peers.predict import predict
from tonnage.peers.vllm.adapters import adapter_bytes
from tonnage.peers.vllm.setup import resolve
from tonnage.terms import Quantity, Rank, Source
from tonnage.units import GiB

#: Llama 3.1 8B, inputs and outputs of a layer: q 4096 + 4096, k and v 2 x (4096 + 1024), o 4096 + 4096, gate and up
#: 2 x (4096 + 14336), down 14336 + 4096; 81,920 together, in 32 layers.
LLAMA = 32 * (8192 + 10_240 + 8192 + 36_864 + 18_432)
#: Its embeddings and its head: 128,256 words and 4,096 elements each.
WORDS = 2 * (128_256 + 4096)
#: Rank 16 in two bytes.
EACH = 16 * 2


def buffers(key="llama-3.1-8b", *, version="0.19.0", tp=1, **asked) -> Quantity:
    found = adapter_bytes(resolve(launch(key, version=version, tp=tp, enable_lora=True, **asked)))
    assert found is not None
    return found


def test_one_adapter_of_rank_16_is_the_default():
    assert LLAMA == 2_621_440
    found = buffers()
    assert found.bytes == found.low == found.high == (LLAMA + WORDS) * EACH == 92_356_608


def test_slots_and_ranks_multiply():
    """Four of rank 64 are sixteen times as much."""
    assert buffers(max_loras=4, max_lora_rank=64).bytes == 16 * 92_356_608


def test_the_dtype_of_adapters_is_the_models_unless_asked():
    assert buffers(lora_dtype="auto").bytes == buffers(lora_dtype="float16").bytes == 92_356_608
    assert buffers(lora_dtype="float32").bytes == 2 * 92_356_608


def test_adapters_had_words_of_their_own_before_012():
    """256 more words of 16 + 16 elements, and 256 x 4096 elements beside each of both, in two bytes."""
    more = 2 * (256 * 16 + 256 * 4096) * 2
    assert buffers(version="0.11.0").bytes == 92_356_608 + more == 96_567_296
    assert buffers(version="0.12.0").bytes == 92_356_608
    assert buffers(version="0.11.0", lora_extra_vocab_size=512).bytes == 92_356_608 + 2 * more
    assert buffers(version="0.11.0", lora_extra_vocab_size=0).bytes == 92_356_608


def test_only_the_split_side_is_split():
    """On two ranks: q 4096 + 2048, k and v 2 x (4096 + 512), o 2048 + 4096, gate and up 2 x (4096 + 7168), down
    7168 + 4096, which is 55,296; the vocabulary is whole."""
    assert buffers(tp=2).bytes == (32 * 55_296 + WORDS) * EACH == 65_093_632


def test_both_factors_are_split_where_that_is_asked_for():
    """First factors of q, k, v, gate and up have half the rank (2048 for 4096), second ones of o and down half the
    outputs: q 2048 + 2048, k and v 2 x (2048 + 512), o 2048 + 2048, gate and up 2 x (2048 + 7168), down 7168 + 2048."""
    assert buffers(tp=2, fully_sharded_loras=True).bytes == (32 * 40_960 + WORDS) * EACH == 50_413_568
    assert buffers(tp=1, fully_sharded_loras=True).bytes == 92_356_608


#: Qwen3-30B-A3B: q 2048 + 4096, k and v 2 x (2048 + 512), o 4096 + 2048, and the router 2048 + 128.
QWEN = 6144 + 5120 + 6144 + 2176


def test_experts_are_adapted_from_0111_on():
    """128 experts, each gate and up 2 x (2048 + 768) and down 768 + 2048, in 48 layers."""
    assert buffers("qwen3-30b-a3b", version="0.11.0").bytes == 48 * QWEN * EACH == 30_081_024
    assert buffers("qwen3-30b-a3b", version="0.11.1").bytes == 48 * (QWEN + 128 * 8448) * EACH == 1_691_025_408


def test_experts_are_split_within_and_their_factors_from_012_on():
    """Two ranks: an expert is 384 wide, gate and up 2 x (2048 + 384), down 384 + 2048; split in full 2 x (1024 + 384)
    and 384 + 1024. Attention: q 2048 + 2048, k and v 2 x (2048 + 256), o 2048 + 2048, the router whole; split in full
    1024 + 2048, 2 x (1024 + 256), 2048 + 1024."""
    plain, full = 4096 + 4608 + 4096 + 2176, 3072 + 2560 + 3072 + 2176
    found = buffers("qwen3-30b-a3b", version="0.12.0", tp=2)
    assert found.bytes == 48 * (plain + 128 * 3 * 2432) * EACH
    sharded = {version: buffers("qwen3-30b-a3b", version=version, tp=2, fully_sharded_loras=True).bytes
               for version in ("0.11.1", "0.12.0")}  # fmt: skip
    assert sharded["0.12.0"] == 48 * (full + 128 * 3 * 1408) * EACH
    assert sharded["0.11.1"] == 48 * (full + 128 * 3 * 2432) * EACH


def test_experts_that_keep_gate_and_up_as_one_have_one_first_factor():
    """gpt-oss: 128 experts of 2880 x 2880 in 36 layers: 2880 + 5760 and 2880 + 2880, where others have 3 x 5760."""
    as_one, apart = (buffers("gpt-oss-120b", version=version).bytes for version in ("0.12.0", "0.11.1"))
    assert apart - as_one == 36 * 128 * 2880 * EACH


def test_experts_over_ranks_are_refused_before_021():
    def start(version):
        asked = launch("qwen3-30b-a3b", version=version, tp=2, enable_lora=True)
        return predict(replace(asked, rank=Rank(size=2, tp=2, ep=2)))

    early, late = start("0.20.0"), start("0.21.0")
    assert check(early, "adapters of experts").passes is False
    assert early.starts is False
    assert all(each.name != "adapters of experts" for each in late.checks)
    plain = 4096 + 4608 + 4096 + 2176
    words = 2 * (151_936 + 2048)  # this family's vocabulary too, from 0.16 on
    # 64 experts on each rank, whole
    assert late.term("adapters").bytes.bytes == (48 * (plain + 64 * 8448) + words) * EACH


def test_what_leads_to_latents_is_whole_on_every_rank():
    """DeepSeek-V2-Lite on two ranks of 8 heads: q 2048 + 1536, latents 2048 + 576, from them 512 + 2048, o 1024 + 2048;
    the first layer 3 x (2048 + 5472), 26 others shared experts 3 x (2048 + 1408) and the router 2048 + 64."""
    mixer = 3584 + 2624 + 2560 + 3072
    expected = 27 * mixer + 3 * 7520 + 26 * (3 * 3456 + 2112)
    assert buffers("deepseek-v2-lite", version="0.11.0", tp=2).bytes == expected * EACH


def test_the_interval_has_what_may_be_adapted():
    """Of a hybrid its recurrent layers."""
    found = buffers("qwen3.6-27b", version="0.19.0")
    assert 0 < found.low < found.bytes <= found.high


def test_experts_that_work_on_a_latent_are_as_narrow():
    """Nemotron 3 Super: 40 layers of 512 experts, 1024 wide and 2688 within, up and down; around them 4096 to 1024 and
    back. Shared experts of 5376; 8 attention layers of 32 and 2 heads of 128. No router, for nothing is gated."""
    config = launch("nemotron-3-super-120b").config
    experts = [layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, Experts)]
    assert (len(experts), experts[0].num_experts, experts[0].intermediate_size) == (40, 512, 2688)
    routed = 40 * (512 * 2 * (1024 + 2688) + 2 * (4096 + 1024))
    shared = 40 * 2 * (4096 + 5376)
    attention = 8 * ((4096 + 4096) + 2 * (4096 + 256) + (4096 + 4096))
    words = 2 * (131_072 + 4096)
    found = buffers("nemotron-3-super-120b", version="0.19.0")
    assert found.low == (routed + shared + attention + words) * EACH


def test_an_indexer_may_be_adapted():
    """DeepSeek-V3.2: 64 heads of 128 from 1536, a key of 128 and 64 weights from 7168, in 61 layers."""
    found = buffers("deepseek-v3.2", version="0.19.0")
    assert found.bytes - found.low == 61 * (1536 + 8192 + 7168 + 128 + 7168 + 64) * EACH
    assert found.high == found.bytes


@pytest.mark.parametrize(
    ("key", "since", "before"), [("qwen3-14b", "0.16.0", "0.14.1"), ("qwen3.6-27b", "0.29.0", "0.28.0")]
)
def test_vocabularies_that_are_adapted_later(key, since, before):
    """Of Qwen3-14B 2 x (151,936 + 5120), of Qwen3.6-27B 2 x (248,320 + 5120)."""
    config = launch(key).config
    more = buffers(key, version=since).bytes - buffers(key, version=before).bytes
    assert config.hidden_size == 5120
    assert more == 2 * ({"qwen3-14b": 151_936, "qwen3.6-27b": 248_320}[key] + 5120) * EACH


def test_releases_before_03_have_none():
    with pytest.raises(InvalidSetting, match=r"0\.3 is the first"):
        buffers(version="0.2.5")


def test_they_are_a_term_that_the_pool_has_less_of():
    plain, adapted = (predict(launch(enable_lora=switch)) for switch in (False, True))
    assert all(term.name != "adapters" for term in plain.terms)
    assert adapted.term("adapters").is_budgeted
    assert abs(plain.pool.bytes - adapted.pool.bytes - 92_356_608) < 16 * 131_072  # both are whole blocks
    assert sum(term.bytes.bytes for term in adapted.terms) == adapted.launch.card.total_bytes


def test_weights_that_a_log_told_have_them_from_the_second_core_on():
    logged = Quantity.exact(15 * GiB, Source.MEASURED, "a log")
    late, early = (replace(launch(version=version, enable_lora=True), weights=logged) for version in ("0.19", "0.6.6"))
    assert predict(late).term("adapters").bytes.bytes == 0
    assert predict(early).term("adapters").bytes.bytes == 96_567_296


@given(
    key=st.sampled_from(MODELS), version=st.sampled_from(VERSIONS), tp=st.sampled_from((1, 2, 4)),
    pp=st.sampled_from((1, 2)), adapters=st.integers(1, 8), more=st.integers(0, 8), rank=st.sampled_from((8, 16, 64)),
    sharded=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_more_adapters_never_leave_more_pool(key, version, tp, pp, adapters, more, rank, sharded):
    """And whatever is asked, the terms are a partition of the card."""
    asked = {"enable_lora": True, "max_lora_rank": rank, "fully_sharded_loras": sharded}
    version = "0.3.0" if version == "0.2.5" else version  # there were none before
    fewer, larger = (predict(launch(key, version=version, tp=tp, pp=pp, max_loras=number, card="H200", **asked))
                     for number in (adapters, adapters + more))  # fmt: skip
    assert sum(term.bytes.bytes for term in larger.terms) == larger.launch.card.total_bytes
    term = larger.term("adapters").bytes
    assert 0 < term.low <= term.bytes <= term.high
    assert term.bytes * adapters == fewer.term("adapters").bytes.bytes * (adapters + more)
    for end in ("low", "bytes", "high"):
        assert getattr(larger.pool, end) <= getattr(fewer.pool, end)
    whole = predict(launch(key, version=version, tp=tp, pp=pp, max_loras=adapters, card="H200", enable_lora=True,
                           max_lora_rank=rank))  # fmt: skip
    assert fewer.term("adapters").bytes.bytes <= whole.term("adapters").bytes.bytes


def test_a_diff_of_releases_says_that_experts_are_adapted_now():
    early, late, dense = (predict(launch(key, version=version, enable_lora=True)).term("adapters").rule
                          for key, version in (("qwen3-30b-a3b", "0.11.0"), ("qwen3-30b-a3b", "0.11.1"),
                                               ("llama-3.1-8b", "0.11.1")))  # fmt: skip
    assert early.before == late.since == (0, 11, 1)
    assert dense.since == (0, 3)


@pytest.mark.parametrize(
    ("asked", "version", "knob"),
    [
        ({"max_loras": 4, "max_cpu_loras": 3}, "0.19", "max_cpu_loras"),
        ({"max_lora_rank": 24}, "0.19", "max_lora_rank"),
        ({"max_lora_rank": 1}, "0.11.0", "max_lora_rank"),
        ({"max_lora_rank": 512}, "0.6.6", "max_lora_rank"),
        ({"max_lora_rank": 128}, "0.4.3", "max_lora_rank"),
    ],
)
def test_what_the_engine_refuses_is_refused(asked, version, knob):
    with pytest.raises(InvalidSetting) as fault:
        buffers(version=version, **asked)
    assert fault.value.knob == knob
    assert buffers(version="0.19", max_lora_rank=512, max_loras=2, max_cpu_loras=8).bytes == 64 * 92_356_608
    assert adapter_bytes(resolve(launch(max_loras=4, max_cpu_loras=3))) is None


def test_a_rank_that_does_not_divide_cannot_be_split():
    with pytest.raises(InvalidSetting, match="do not divide it"):
        buffers(tp=2, max_lora_rank=1, fully_sharded_loras=True)


def test_notes_say_what_is_open():
    notes = "; ".join(predict(launch(enable_lora=True)).notes)
    assert "captured with and without adapters" in notes
    assert "captured with" not in "; ".join(predict(launch(version="0.11.0", enable_lora=True)).notes)
