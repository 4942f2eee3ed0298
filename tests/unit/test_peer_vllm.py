"""vLLM's start: the budget is a partition, defaults follow release and card, and every knob does what it should."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache

import peer_rows
import pytest
import shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.costs.config import ModelConfig
from tonnage.costs.price import weights_price
from tonnage.errors import InvalidSetting
from tonnage.hardware import find_card
from tonnage.peers.launch import Launch
from tonnage.peers.predict import predict
from tonnage.peers.start import Start
from tonnage.peers.version import Version
from tonnage.peers.vllm.pages import group_layers, pages_of, request_blocks
from tonnage.peers.vllm.setup import resolve
from tonnage.peers.vllm.workers import partition
from tonnage.terms import Quantity, Rank, Source
from tonnage.units import GiB

MODELS = (
    "llama-3.1-8b",
    "qwen3-14b",
    "qwen3-30b-a3b",
    "gemma-3-27b",
    "qwen3.6-27b",
    "deepseek-v2-lite",
    "gpt-oss-120b",
)
VERSIONS = ("0.2.5", "0.6.6", "0.8.5", "0.11.0", "0.16.0", "0.19.0", "0.21.0", "0.28.0", "0.2x", "main")


@cache
def priced(key: str, rank: Rank) -> tuple[ModelConfig, Quantity]:
    config = peer_rows.config_of({"hf_config_key": key, "model": key, "quant": "none"})
    return config, weights_price(config, rank=rank).quantity


def launch(key="llama-3.1-8b", *, version="0.19.0", card="H100", tp=1, pp=1, kv_dtype=None, **asked) -> Launch:
    rank = Rank(size=tp * pp, tp=tp, pp=pp)
    config, weights = priced(key, rank)
    return Launch(
        engine="vllm", version=Version.read(version), config=config, card=find_card(card), rank=rank, weights=weights,
        kv_dtype=kv_dtype, settings=asked,
    )  # fmt: skip


def gib(start: Start, name: str) -> float:
    return start.term(name).bytes.bytes / GiB


def check(start: Start, name: str):
    return next(each for each in start.checks if each.name == name)


@given(
    key=st.sampled_from(MODELS),
    version=st.sampled_from(VERSIONS),
    card=st.sampled_from(("H100", "A100-80GB", "RTX 4090", "T4", "H200")),
    tp=st.sampled_from((1, 2, 4)),
    pp=st.sampled_from((1, 2, 3)),
    share=st.integers(10, 100),
    seqs=st.one_of(st.none(), st.integers(1, 2048)),
    length=st.one_of(st.none(), st.just("auto"), st.integers(1, 131_072)),
    eager=st.booleans(),
    pool=st.one_of(st.none(), st.integers(1, 60 * GiB)),
)
@settings(max_examples=60, deadline=None)
def test_terms_are_a_partition_of_the_card(key, version, card, tp, pp, share, seqs, length, eager, pool):
    """Exactly, whatever is asked; and no term but what is left free is below zero."""
    asked = {"gpu_memory_utilization": Fraction(share, 100), "max_num_seqs": seqs, "max_model_len": length,
             "enforce_eager": eager, "kv_cache_memory_bytes": pool}  # fmt: skip
    start = predict(launch(key, version=version, card=card, tp=tp, pp=pp, **asked))
    assert sum(term.bytes.bytes for term in start.terms) == start.launch.card.total_bytes
    assert len({term.name for term in start.terms}) == len(start.terms)
    for term in start.terms:
        assert term.bytes.low <= term.bytes.bytes <= term.bytes.high, term
        assert term.bytes.low >= 0 or term.name == "left free", term
        assert term.rule.says
    assert start.term("kv pool").bytes == start.pool
    assert 0 <= start.pool.low <= start.pool.bytes <= start.pool.high
    if start.tokens is not None:
        assert start.tokens.low <= start.tokens.best <= start.tokens.high


def ends(start: Start) -> tuple[int, int, int]:
    return start.pool.low, start.pool.bytes, start.pool.high


@given(
    key=st.sampled_from(MODELS), version=st.sampled_from(VERSIONS), few=st.integers(1, 512), more=st.integers(0, 512)
)
@settings(max_examples=30, deadline=None)
def test_more_sequences_never_leave_more_pool(key, version, few, more):
    fewer, larger = (predict(launch(key, version=version, max_num_seqs=number)) for number in (few, few + more))
    assert all(less <= most for less, most in zip(ends(larger), ends(fewer), strict=True))


@given(
    key=st.sampled_from(MODELS), version=st.sampled_from(VERSIONS), tp=st.sampled_from((1, 2, 4)),
    share=st.integers(5, 100), more=st.integers(0, 50), extra=st.integers(0, 4 * GiB),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_a_larger_share_or_a_larger_card_never_leaves_less_pool(key, version, tp, share, more, extra):
    asked = launch(key, version=version, tp=tp, gpu_memory_utilization=Fraction(share, 100))
    fewer = predict(asked)
    wider = launch(key, version=version, tp=tp, gpu_memory_utilization=Fraction(min(100, share + more), 100))
    larger = replace(asked, card=asked.card.with_total(asked.card.total_bytes + extra))
    exact = replace(asked, card=asked.card.with_total(asked.card.total_bytes))
    assert all(less <= most for less, most in zip(ends(fewer), ends(predict(wider)), strict=True))
    assert all(less <= most for less, most in zip(ends(predict(exact)), ends(predict(larger)), strict=True))


@pytest.mark.parametrize(
    ("version", "card", "seqs", "tokens", "share"),
    [
        ("0.6.6", "H100", 256, 131_072 // 64, "0.9"),  # the first core, in chunks: the model's own length is long
        ("0.11.0", "H100", 1024, 8192, "0.9"),
        ("0.11.0", "A100-80GB", 256, 2048, "0.9"),
        ("0.8.5", "A100-80GB", 1024, 8192, "0.9"),
        ("0.11.0", "RTX 4090", 256, 2048, "0.9"),
        ("0.20.2", "H100", 1024, 8192, "0.9"),
        ("0.21.0", "H100", 1024, 8192, "0.92"),
    ],
)
def test_defaults_follow_release_and_card(version, card, seqs, tokens, share):
    setup = resolve(launch(version=version, card=card))
    assert (setup.max_num_seqs, setup.batched_tokens) == (seqs, tokens)
    assert setup.utilisation == Fraction(share)
    assert {name for name, *_ in setup.defaults} == {
        "max_model_len", "gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("version", "card", "core"),
    [
        ("0.7.3", "H100", "V0"),
        ("0.8.0", "H100", "V1"),
        ("0.9.0", "T4", "V0"),
        ("0.11.0", "T4", "V1"),
        ("main", "T4", "V1"),
    ],
)
def test_the_core_follows_release_and_card(version, card, core):
    assert resolve(launch(version=version, card=card)).core == core


def test_sequences_never_exceed_the_tokens_of_a_step():
    assert resolve(launch(max_num_batched_tokens=512)).max_num_seqs == 512


def test_the_sampler_is_a_third_from_017_on():
    early, lean = (predict(launch("qwen3-14b", version=version)) for version in ("0.16.0", "0.17.0"))
    assert gib(early, "activation peak") == pytest.approx(5.64, abs=0.05)
    assert gib(lean, "activation peak") == pytest.approx(2.23, abs=0.05)
    assert early.term("activation peak").rule.before == lean.term("activation peak").rule.since == (0, 17)


def test_a_whole_text_at_once_makes_the_forward_the_peak():
    start = predict(launch(version="0.6.4", card="RTX 3090", max_model_len=29_000))
    assert start.term("activation peak").rule.name == "forward peak"
    assert gib(start, "activation peak") == pytest.approx(2.99, abs=0.15)


def test_graphs_are_deducted_from_021_on():
    before, after = (predict(launch(version=version, gpu_memory_utilization="0.9")) for version in ("0.20.0", "0.21.0"))
    assert not before.term("graphs").is_budgeted
    assert after.term("graphs").is_budgeted
    off = predict(launch(version="0.21.0", gpu_memory_utilization="0.9", cudagraph_mem_estimate_enabled=False))
    assert not off.term("graphs").is_budgeted
    assert off.pool.bytes > after.pool.bytes
    assert gib(predict(launch(version="0.21.0", enforce_eager=True)), "graphs") == 0


def test_shorter_lists_of_sizes_take_less():
    full, short = (predict(launch(max_num_seqs=number, cudagraph_capture_sizes=sizes))
                   for number, sizes in ((512, None), (512, [1, 2, 4])))  # fmt: skip
    assert gib(short, "graphs") < gib(full, "graphs")


def test_a_pool_may_be_asked_for_in_bytes_or_blocks():
    start = predict(launch(kv_cache_memory_bytes=10 * GiB))
    assert start.pool.bytes == 10 * GiB // (16 * 131_072) * 16 * 131_072
    assert start.pool.low == start.pool.high
    assert all(each.name != "free memory" for each in start.checks)
    blocks = predict(launch(num_gpu_blocks_override=1000))
    assert blocks.pool.bytes == 1000 * 16 * 131_072
    assert blocks.logged_tokens.best == 16_000
    assert sum(term.bytes.bytes for term in blocks.terms) == blocks.launch.card.total_bytes


def test_the_length_may_be_what_fits():
    start = predict(launch("qwen3-14b", card="RTX 3090", tp=2, max_model_len="auto"))
    assert start.starts is not False
    own = predict(launch("llama-3.1-8b", card="RTX 4090", max_model_len="auto"))
    assert own.max_model_len < 131_072
    again = predict(launch("llama-3.1-8b", card="RTX 4090", max_model_len=own.max_model_len))
    assert check(again, "longest request").passes is not False


def test_what_is_offloaded_is_not_on_the_card():
    whole, part = (predict(launch(cpu_offload_gb=amount)) for amount in (None, 4))
    assert gib(whole, "weights") - gib(part, "weights") == 4
    assert part.pool.bytes > whole.pool.bytes


def test_an_8_bit_cache_holds_twice_the_tokens():
    wide, narrow = (predict(launch(kv_dtype=dtype)) for dtype in (None, "fp8"))
    assert narrow.pool.bytes == pytest.approx(wide.pool.bytes, rel=0.001)
    assert narrow.logged_tokens.best == pytest.approx(2 * wide.logged_tokens.best, rel=0.001)


def test_knobs_may_come_by_another_door():
    assert predict(launch(kv_cache_dtype="fp8")).logged_tokens == predict(launch(kv_dtype="fp8")).logged_tokens
    inside = resolve(launch(speculative_config={"method": "mtp", "num_speculative_tokens": 2}))
    assert inside.num_drafts == resolve(launch(num_speculative_tokens=2)).num_drafts == 2


def test_drafts_take_states_and_a_layer():
    """A state for each drafted token, and one more layer that keeps everything."""
    plain, drafting = (resolve(launch("qwen3.6-27b", version="0.24.0", num_speculative_tokens=number))
                       for number in (None, 2))  # fmt: skip
    own, more = pages_of(plain), pages_of(drafting)
    assert more.block_bytes > own.block_bytes
    assert request_blocks(more, drafting, 16) - request_blocks(own, plain, 16) == 2 * 3


def test_logged_weights_have_all_that_lies_beside_them():
    given_weights = replace(launch(), weights=Quantity.exact(15 * GiB, Source.MEASURED, "a log"))
    assert gib(predict(given_weights), "beside the weights") == 0
    assert gib(predict(launch()), "beside the weights") == pytest.approx(0.031, abs=0.001)


@pytest.mark.parametrize(("version", "parts"), [("0.6.6", (15, 15, 15, 16)), ("0.9.0", (15, 15, 16, 15))])
def test_what_does_not_divide_goes_to_later_stages(version, parts):
    assert partition(61, 4, Version.read(version)) == parts


def test_the_poorest_stage_decides():
    """The last stage has the vocabulary and, in the first core, alone the sampler."""
    start = predict(launch("qwen3-14b", version="0.6.6", card="RTX 3090", pp=2, max_model_len=4096))
    first = start.launch.rank
    last = replace(start.launch, rank=replace(first, index=1))
    assert (
        start.pool.bytes
        <= predict(replace(last, weights=weights_price(last.config, rank=last.rank).quantity)).pool.bytes
    )
    assert gib(start, "rounding") > 0.5


def test_groups_of_layers_are_filled_up_by_release():
    old, newer, newest = (resolve(launch(version=version)) for version in ("0.10.0", "0.19.0", "0.28.0"))
    assert [group_layers([12, 13], setup) for setup in (old, newer, newest)] == [12, 13, 13]
    assert [group_layers([12, 17], setup) for setup in (old, newer, newest)] == [12, 12, 17]
    assert [group_layers([10, 52], setup) for setup in (old, newer, newest)] == [10, 10, 10]


def test_windows_in_the_pages():
    pages = pages_of(resolve(launch("gemma-3-27b", version="0.19.0")))
    assert (pages.num_groups, pages.padding_layers) == (7, 8)
    assert pages.bytes_per_token == 70 * 8192
    uniform = pages_of(resolve(launch("gemma-3-27b", version="0.6.6")))
    assert uniform.is_uniform
    assert uniform.bytes_per_token == 62 * 8192
    off = pages_of(resolve(launch("gemma-3-27b", disable_hybrid_kv_cache_manager=True)))
    assert off == uniform


def test_the_token_line_changed_its_meaning():
    old, new = (predict(launch("gemma-3-27b", version=version, gpu_memory_utilization="0.9", max_model_len=65_536,
                               cudagraph_mem_estimate_enabled=False, enforce_eager=True))
                for version in ("0.20.0", "0.21.0"))  # fmt: skip
    assert new.logged_tokens.best == new.tokens.best
    assert old.logged_tokens.best < old.tokens.best
    assert (old.bytes_per_token, new.bytes_per_token) == (70 * 8192, None)


def test_states_must_reach_for_all_sequences():
    """A start that vLLM refuses although one request fits: each running sequence needs a state block."""
    start = predict(launch("qwen3.6-27b", version="0.24.0", card="H100", kv_dtype="fp8", max_num_seqs=1024))
    failing = check(start, "state blocks")
    assert failing.passes is False
    assert "--max-num-seqs" in failing.remedy
    assert predict(launch("qwen3.6-27b", version="0.24.0", card="H100", kv_dtype="fp8", max_num_seqs=64)).starts


def test_checks_stop_at_the_first_that_fails_for_sure():
    start = predict(launch("llama-3.1-70b", card="H100"))
    assert [each.name for each in start.checks if each.passes is False] == [start.checks[-1].name]
    assert start.starts is False
    assert start.pool.bytes == 0
    full = predict(launch(gpu_memory_utilization="1"))
    assert check(full, "free memory").passes is False
    assert predict(launch()).starts is True


def test_notes_say_what_is_open():
    assert any("0.21" in note for note in predict(launch(version="0.2x")).notes)
    (note,) = predict(launch(version="0.19.0")).notes
    assert "card's total" in note
    assert any("8 layers" in note for note in predict(launch("gemma-3-27b")).notes)


def test_a_compressed_cache_gives_a_pool_and_no_tokens():
    raw = shapes.raw_config("deepseek-v4-flash")
    config = ModelConfig.from_dict(raw, name="compressed")
    start = predict(replace(launch(tp=8), config=config, weights=Quantity.exact(30 * GiB, Source.ASKED, "a guess")))
    assert start.tokens is start.logged_tokens is start.bytes_per_token is None
    assert start.pool.bytes > 0
    assert sum(term.bytes.bytes for term in start.terms) == start.launch.card.total_bytes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpu_memory_utilization", "1.2"), ("gpu_memory_utilization", "much"), ("max_num_seqs", 0),
        ("max_model_len", "long"), ("enforce_eager", "maybe"), ("engine_core", "V2"), ("cpu_offload_gb", "-1"),
        ("mamba_ssm_cache_dtype", "fp9"), ("block_size", True),
    ],
)  # fmt: skip
def test_settings_that_the_engine_would_not_read(name, value):
    with pytest.raises(InvalidSetting) as caught:
        predict(launch("qwen3.6-27b", **{name: value}))
    assert caught.value.knob == name


def test_settings_may_be_text():
    words = {"gpu_memory_utilization": "0.9", "max_num_seqs": "256", "max_model_len": "8_192", "enforce_eager": "true"}
    parsed = {
        "gpu_memory_utilization": Fraction(9, 10),
        "max_num_seqs": 256,
        "max_model_len": 8192,
        "enforce_eager": True,
    }
    assert predict(launch(**words)).pool == predict(launch(**parsed)).pool


@pytest.mark.parametrize(
    "asked",
    [{"max_cudagraph_capture_size": "abc"}, {"max_cudagraph_capture_size": True}, {"max_capture_size": [1]},
     {"cudagraph_capture_sizes": "x"}, {"cudagraph_capture_sizes": -3}],
)  # fmt: skip
def test_sizes_of_graphs_that_are_none_are_refused_in_words(asked):
    with pytest.raises(InvalidSetting, match=next(iter(asked))):
        predict(launch(**asked))


@pytest.mark.parametrize("asked", [{"max_cudagraph_capture_size": 0}, {"cudagraph_capture_sizes": ()}])
def test_no_sizes_are_no_graphs(asked):
    assert predict(launch(**asked)).term("graphs").bytes.bytes == 0
    assert predict(launch()).term("graphs").bytes.bytes > 0


def test_a_length_beyond_the_models_own_is_told() -> None:
    positions = launch().config.max_position_embeddings
    assert any(f"above the {positions:,} positions" in note for note in predict(launch(max_model_len=10**7)).notes)
    assert not any("positions of config.json" in note for note in predict(launch(max_model_len=positions)).notes)
