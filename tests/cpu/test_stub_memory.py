"""What a stub takes on the host is told by arithmetic before anything is allocated."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from tonnage.engine.stub import stub_engine
from tonnage.engine.stub_memory import PARTS_OF_HOST, StubSizes, check_fits
from tonnage.errors import DoesNotFit, InvalidSetting
from tonnage.sampling import SamplingParams
from tonnage.units import GiB, MiB

HUGE = 10**18
SIZES = StubSizes(
    kv_tokens=8192,
    head_tokens=2048,
    host_kv_tokens=32768,
    block_tokens=16,
    max_seq_len=1024,
    max_batch_size=256,
    vocab_size=256,
    is_cached=True,
    is_shadowed=True,
)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"kv_tokens": HUGE}, "lower kv_tokens to"),
        ({"kv_tokens": HUGE, "prefix_caching": True, "checks_contents": True}, "lower kv_tokens to"),
        ({"head_tokens": HUGE}, "lower head_tokens and host_kv_tokens to"),
        ({"host_kv_tokens": HUGE}, "lower head_tokens and host_kv_tokens to"),
        ({"kv_tokens": HUGE, "host_kv_tokens": HUGE}, "its head and its host tier with it"),
        ({"max_batch_size": HUGE, "max_num_tokens": HUGE}, "lower max_batch_size to"),
        ({"kv_tokens": HUGE, "max_seq_len": 2**31, "checks_contents": True}, "max_seq_len to"),
    ],
)
def test_sizes_that_no_host_holds_are_refused_before_anything_is_allocated(sizes: dict[str, Any], told: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DoesNotFit, match=told) as refused:
            stub_engine(**{"kv_tokens": 8192, **sizes})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MiB
    assert refused.value.where == "host"
    assert refused.value.need_bytes > refused.value.have_bytes
    for part in ("Need: ", "Have: ", "To change: "):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    "sizes",
    [
        {"kv_tokens": 0},
        {"head_tokens": -1},
        {"host_kv_tokens": -1},
        {"block_tokens": 0},
        {"block_tokens": HUGE},
        {"max_seq_len": HUGE},
        {"max_batch_size": 0},
    ],
)
def test_sizes_out_of_range_are_refused_by_name(sizes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=rf"{next(iter(sizes))} = .*To change: write at least"):
        stub_engine(**{"kv_tokens": 8192, **sizes})


@pytest.mark.parametrize(
    "sizes",
    [
        replace(SIZES, kv_tokens=HUGE, head_tokens=HUGE // 4, host_kv_tokens=4 * HUGE),
        replace(SIZES, max_batch_size=10**9),
        replace(SIZES, kv_tokens=HUGE, max_seq_len=2**31, max_batch_size=10**6),
        replace(SIZES, kv_tokens=10**10, block_tokens=65536, max_seq_len=10**9, max_batch_size=1),
    ],
)
def test_what_a_refusal_says_to_change_fits(sizes: StubSizes) -> None:
    with pytest.raises(DoesNotFit) as refused:
        check_fits(sizes, available_bytes=8 * GiB)
    (remedy,) = refused.value.remedies
    found = {name: int(number) for name, number in re.findall(r"(\w+) to (\d+)", remedy)}
    made = replace(sizes.with_pool(found.pop("kv_tokens", sizes.kv_tokens)), **found)
    check_fits(made, available_bytes=8 * GiB)
    assert made.max_seq_len <= made.kv_tokens
    assert made.num_bytes > 8 * GiB // PARTS_OF_HOST // 4  # and it is no smaller than it has to be


def test_a_host_that_does_not_tell_still_bounds_it() -> None:
    check_fits(SIZES, available_bytes=None)
    with pytest.raises(DoesNotFit, match="a host that does not tell"):
        check_fits(replace(SIZES, kv_tokens=HUGE), available_bytes=None)
    with pytest.raises(DoesNotFit, match="run it where more memory is free"):
        check_fits(SIZES, available_bytes=1000)


def test_blocks_that_cannot_be_numbered_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="can be numbered"):
        check_fits(replace(SIZES, kv_tokens=2**31, block_tokens=1, is_cached=False), available_bytes=2**50)


@pytest.mark.parametrize(
    "sizes",
    [
        {"kv_tokens": 200_000},
        {"kv_tokens": 200_000, "block_tokens": 1, "host_kv_tokens": 100_000},
        {"kv_tokens": 200_000, "checks_contents": True, "host_kv_tokens": 400_000, "head_tokens": 50_000},
        {"kv_tokens": 8192, "max_batch_size": 20_000, "max_num_tokens": 20_000, "max_seq_len": 64},
        {"kv_tokens": 8192, "max_batch_size": 2000, "max_seq_len": 512, "checks_contents": True},
        {"kv_tokens": 200_000, "max_batch_size": 2, "max_seq_len": 200_000, "checks_contents": True},
    ],
)
def test_the_sums_are_what_a_start_takes(sizes: dict[str, Any]) -> None:
    """Without the penalties, which the first request that has some takes."""
    told = replace(
        SIZES,
        **{"head_tokens": 0, "host_kv_tokens": 0, "max_seq_len": 4096}
        | {name: value for name, value in sizes.items() if name not in ("checks_contents", "max_num_tokens")},
        is_cached=False,
        is_shadowed=sizes.get("checks_contents", False),
        vocab_size=0,
    )
    stub_engine(kv_tokens=8192).close()  # what is only made once
    tracemalloc.start()
    try:
        with stub_engine(**sizes):
            taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.9 * taken - 100_000 < told.num_bytes < 1.25 * taken


def test_the_penalties_of_a_large_batch_have_room() -> None:
    params = SamplingParams(max_tokens=3, repetition_penalty=1.1, ignore_eos=True)
    with stub_engine(kv_tokens=8192, max_batch_size=250_000, max_num_tokens=250_000, max_seq_len=64) as engine:
        engine.submit(engine.request("a", params, token_ids=[1, 2, 3]))
        ended = [done.finish_reason for _ in range(3) for done in engine.step()]
    assert ended == ["length"]
