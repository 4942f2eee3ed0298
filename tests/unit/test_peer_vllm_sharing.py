"""Ranks that divide the tokens of a sequence: a block of each stands for as many times the tokens."""

from __future__ import annotations

from fractions import Fraction

import pytest
from test_peer_vllm import launch

from tonnage.errors import InvalidSetting
from tonnage.peers.predict import predict
from tonnage.peers.vllm.pages import Keeps, pages_of, request_blocks
from tonnage.peers.vllm.setup import resolve

NAME = "decode_context_parallel_size"


def shared(key="deepseek-v3", *, ranks=8, tp=8, version="0.19.0", **asked):
    return launch(key, version=version, card="H200", tp=tp, **{NAME: ranks}, **asked)


def test_a_block_stands_for_the_tokens_of_all_ranks():
    """DeepSeek-V3: 61 layers x 576 x 2 = 70,272 bytes a token, 16 of them a block; eight ranks: 128 tokens a block,
    8,784 bytes each. A text of 131,072 tokens: 1,024 blocks of a rank, without them 8,192."""
    setup = resolve(shared())
    pages = pages_of(setup)
    assert pages.block_bytes == 16 * 70_272
    assert pages.bytes_per_token == 8784 == Fraction(70_272, 8)
    assert request_blocks(pages, setup, 131_072) == 1024
    alone = resolve(shared(ranks=1))
    assert request_blocks(pages_of(alone), alone, 131_072) == 8192


@pytest.mark.parametrize("version", ["0.10.2", "0.19.0", "0.21.0", "0.33.0"])
def test_the_log_tells_the_tokens_of_all_ranks(version):
    """1,000 blocks of 16 tokens on each of eight ranks; a text of 4,096 tokens is 32 of them."""
    start = predict(shared(version=version, num_gpu_blocks_override=1000, max_model_len=4096))
    assert start.logged_tokens.best == 1000 * 16 * 8
    assert start.concurrency.best == 1000 * 1000 // 32
    assert [rule.name for rule in start.rules] == ["shared tokens"]
    assert predict(shared(ranks=1, version=version)).rules == ()


def test_the_pool_has_the_same_bytes():
    plain, divided = (predict(shared(ranks=ranks)) for ranks in (1, 4))
    assert plain.pool == divided.pool
    assert divided.logged_tokens.best == 4 * plain.logged_tokens.best


def test_replicas_of_a_head_divide_its_tokens():
    """Qwen3-30B-A3B: 4 heads on 8 ranks, each twice: 48 layers x 1 head x 2 x 128 x 2 bytes a token."""
    pages = pages_of(resolve(shared("qwen3-30b-a3b", ranks=2)))
    assert pages.bytes_per_token == Fraction(48 * 512, 2) == 12_288


@pytest.mark.parametrize(
    ("key", "asked", "says"),
    [
        ("deepseek-v3", {"version": "0.10.1"}, "0.10.2 is the first"),
        ("deepseek-v3", {"ranks": 3}, "does not divide the 8"),
        ("qwen3-30b-a3b", {"ranks": 2, "version": "0.11.0"}, "latents alone"),
        ("qwen3-30b-a3b", {"ranks": 4}, "held 2 times"),
        ("qwen3-30b-a3b", {"ranks": 2, "tp": 4}, "held once"),
        ("qwen3.6-27b", {"ranks": 2, "version": "0.25.0"}, "beside states"),
        ("gpt-oss-120b", {"ranks": 2, "tp": 16}, "windows"),
        ("deepseek-v3", {"version": "0.16.0", "kv_cache_dtype": "fp8"}, "8 bits"),
    ],
)
def test_what_the_engine_refuses_is_refused(key, asked, says):
    with pytest.raises(InvalidSetting, match=says):
        predict(shared(key, **asked))


def test_a_state_is_whole_on_every_rank():
    """From 0.26 on. Qwen3.6-27B has 4 KV heads: two ranks share each of them on eight."""
    setup = resolve(shared("qwen3.6-27b", ranks=2, version="0.26.0"))
    alone = resolve(shared("qwen3.6-27b", ranks=1, version="0.26.0"))
    pairs = list(zip(pages_of(setup).groups, pages_of(alone).groups, strict=True))
    assert {group.keeps for group, _ in pairs} == {Keeps.ALL, Keeps.STATE}
    for group, whole in pairs:
        assert group.block_tokens == whole.block_tokens * (1 if group.keeps is Keeps.STATE else 2)


def test_windows_in_full_may_be_divided():
    """Without the hybrid manager all layers keep everything: gpt-oss-120b, 36 layers x 1 head x 2 x 64 x 2 bytes."""
    found = shared("gpt-oss-120b", ranks=2, tp=16, disable_hybrid_kv_cache_manager=True)
    assert pages_of(resolve(found)).bytes_per_token == Fraction(36 * 256, 2)
