"""Plans with no device: the worked 8B model, fitted lengths, refusals whose remedies work when followed."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from asked import knobs, limits
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.config import Knobs, LimitKnobs, Origin, Setting
from tonnage.costs.config import ModelConfig
from tonnage.costs.kv import bytes_per_token
from tonnage.errors import DoesNotFit, InvalidSetting
from tonnage.hardware import CARDS, find_card, generic_card, host_card
from tonnage.planner import find_config, plan_without_device, resolve_limits
from tonnage.planner.limits import HOST_MAX_BATCH_SIZE, HOST_MAX_NUM_TOKENS
from tonnage.terms import (
    LineKind,
    MemoryPlan,
    Rank,
)
from tonnage.units import GiB, MiB, parse_bytes

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
SMOLLM2 = find_config("smollm2")


def checked(made: MemoryPlan) -> MemoryPlan:
    assert sum(line.bytes for line in made.lines) == made.device_bytes
    assert all(0 <= line.low <= line.bytes <= line.high for line in made.lines)
    assert made.kv.tokens >= made.limits.max_seq_len
    return made


def test_llama_8b_on_80_gib():
    made = checked(plan_without_device(LLAMA_8B, card=generic_card(80 * GiB)))
    assert bytes_per_token(made.kv.layout) == 131_072
    assert sum(line.bytes for line in made.lines) == 85_899_345_920
    assert made.bytes_of(LineKind.WEIGHTS) == 16_060_522_496
    assert made.line(LineKind.TRANSIENT).bytes == 932 * MiB
    assert made.bytes_of(LineKind.KEEP_FREE) == 256 * MiB
    assert made.limits.max_seq_len == 131_072
    assert made.max_concurrency == made.kv.tokens // 131_072
    assert made.warnings == ()


def test_every_kind_of_line_is_there():
    made = plan_without_device(LLAMA_8B, card=generic_card(80 * GiB), knobs=knobs(kv_fraction=Fraction(9, 10)))
    assert {line.kind for line in made.lines} == set(LineKind)


def test_an_in_process_plan_is_quick():
    """No bar: the best of several is printed; 50 ms would be slow."""
    card, best = generic_card(80 * GiB), 1.0
    for _ in range(5):
        start = time.perf_counter()
        plan_without_device(LLAMA_8B, card=card)
        best = min(best, time.perf_counter() - start)
    print(f"best of five plans: {best * 1000:.1f} ms")


@pytest.mark.parametrize("card", [card for card in CARDS if card.total_bytes > 20 * GiB], ids=lambda card: card.name)
def test_cards(card):
    made = checked(plan_without_device(LLAMA_8B, card=card))
    assert (made.device_name, made.device_bytes) == (card.name, card.total_bytes)
    assert bool(made.warnings) == (
        made.limits.max_seq_len < 131_072 or card.total.low != card.total.high or bool(card.warnings)
    )


def test_the_host_has_no_graphs_and_keeps_books_on_the_device():
    made = checked(plan_without_device(SMOLLM2, card=host_card(1500 * MiB)))
    assert made.bytes_of(LineKind.GRAPHS) == 0
    assert made.bytes_of(LineKind.WEIGHTS) == 538_060_032
    assert any(child.name == "block metadata" for child in made.line(LineKind.TABLES).children)


def test_defaults_say_that_they_are_defaults():
    asked = plan_without_device(LLAMA_8B, card=generic_card(80 * GiB)).limit_knobs
    assert [s.origin for s in (asked.max_seq_len, asked.max_batch_size, asked.max_num_tokens)] == [Origin.DEFAULT] * 3
    assert (asked.max_batch_size.value, asked.max_num_tokens.value) == (256, 8192)


def test_a_length_left_open_is_fitted_and_said():
    made = checked(plan_without_device(LLAMA_8B, card=generic_card(24 * GiB)))
    length = made.limits.max_seq_len
    assert made.limit_knobs.max_seq_len.origin == Origin.FIT
    assert f"max_seq_len is {length:,}, the largest that fits" in made.warnings[0]
    assert length % 16 == 0
    asked = {"max_batch_size": 256, "max_num_tokens": 8192}
    checked(plan_without_device(LLAMA_8B, card=generic_card(24 * GiB), limit_knobs=limits(max_seq_len=length, **asked)))
    with pytest.raises(DoesNotFit):
        plan_without_device(LLAMA_8B, card=generic_card(24 * GiB), limit_knobs=limits(max_seq_len=length + 16, **asked))


@pytest.mark.parametrize(
    ("asked", "resolved"),
    [
        ({}, (8192, 256, 8192)),
        ({"max_num_tokens": 64}, (8192, 64, 64)),
        ({"max_batch_size": 10_000}, (8192, 10_000, 10_000)),
        ({"max_batch_size": 4, "max_seq_len": 100}, (100, 4, 400)),
        ({"max_batch_size": 4, "max_num_tokens": 1000}, (8192, 4, 1000)),
    ],
)
def test_limits_in_force(asked, resolved):
    made, settings = resolve_limits(SMOLLM2, limits(**asked))
    assert (made.max_seq_len, made.max_batch_size, made.max_num_tokens) == resolved
    assert made.max_logits_rows == made.max_batch_size
    assert all(getattr(settings, name).origin == Origin.FLAG for name in asked)


@pytest.mark.parametrize(
    ("asked", "rows", "tokens"),
    [
        ({}, (32, "host device"), (512, "host device")),
        ({"max_num_tokens": 8}, (8, "max_num_tokens"), (8, "--max_num_tokens")),
        ({"max_num_tokens": 4096}, (32, "host device"), (4096, "--max_num_tokens")),
        ({"max_batch_size": 600}, (600, "--max_batch_size"), (600, "max_batch_size")),
        ({"max_batch_size": 2, "max_seq_len": 100}, (2, "--max_batch_size"), (200, "max_batch_size x max_seq_len")),
    ],
)
def test_limits_in_force_on_the_host(asked, rows, tokens):
    made, settings = resolve_limits(SMOLLM2, limits(**asked), device_kind="host")
    assert (made.max_batch_size, settings.max_batch_size.where) == rows
    assert (made.max_num_tokens, settings.max_num_tokens.where) == tokens
    assert all(s.origin == (Origin.FLAG if "--" in s.where else Origin.DEFAULT) for s in _of_a_step(settings))


def _of_a_step(settings: LimitKnobs) -> tuple[Setting[int], Setting[int]]:
    return settings.max_batch_size, settings.max_num_tokens


def test_a_plan_for_the_host_has_the_limits_of_a_run_there():
    """1 GiB is enough for 512 tokens a step; 8,192 would not fit."""
    card = host_card(1 * GiB)
    made = checked(plan_without_device(SMOLLM2, card=card, limit_knobs=limits(max_seq_len=1024)))
    assert (made.limits.max_batch_size, made.limits.max_num_tokens) == (HOST_MAX_BATCH_SIZE, HOST_MAX_NUM_TOKENS)
    assert made.limit_knobs.max_num_tokens.where == "host device"
    with pytest.raises(DoesNotFit):
        plan_without_device(SMOLLM2, card=card, limit_knobs=limits(max_seq_len=1024, max_num_tokens=8192))


def test_remedies_start_from_the_defaults_of_the_host():
    with pytest.raises(DoesNotFit) as caught:
        plan_without_device(SMOLLM2, card=host_card(930 * MiB), limit_knobs=limits(max_seq_len=1024))
    lowered = dict(re.findall(r"lower (max_num_tokens|max_batch_size) to (\d+)", str(caught.value)))
    assert int(lowered["max_num_tokens"]) < HOST_MAX_NUM_TOKENS
    assert int(lowered["max_batch_size"]) < HOST_MAX_BATCH_SIZE


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max_seq_len": 8193}, "8,192 positions"),
        ({"max_seq_len": 0}, "above 0"),
        ({"max_batch_size": -1}, "above 0"),
        ({"max_num_tokens": True}, "above 0"),
        ({"max_batch_size": 8, "max_num_tokens": 7}, "every running sequence decodes"),
    ],
)
def test_limits_refused(asked, said):
    with pytest.raises(InvalidSetting, match=said):
        resolve_limits(SMOLLM2, limits(**asked))


@pytest.mark.parametrize(
    "asked",
    [
        {"kv_bytes": 0},
        {"kv_tokens": -5},
        {"total_bytes": 0},
        {"keep_free_bytes": -1},
        {"kv_fraction": Fraction(0)},
        {"kv_fraction": Fraction(11, 10)},
        {"kv_fraction": 0.5},
        {"block_tokens": 0},
        {"kv_dtype": "int3"},
        {"kv_bytes": True},
        {"admission": "sometimes"},
    ],
)
def test_knobs_out_of_range(asked):
    (name,) = asked
    with pytest.raises(InvalidSetting) as caught:
        plan_without_device(SMOLLM2, card=host_card(2 * GiB), knobs=knobs(**asked))
    assert caught.value.knob == name


def test_more_than_the_device_is_a_warning():
    made = checked(plan_without_device(SMOLLM2, card=host_card(2 * GiB), knobs=knobs(total_bytes=3 * GiB)))
    assert "the device's size holds" in made.warnings[-1]
    assert made.device_bytes == 2 * GiB


def test_experts_are_priced():
    dense = plan_without_device(LLAMA_8B, card=generic_card(200 * GiB))
    mixture = ModelConfig.from_dict({**dict(LLAMA_8B.raw), "num_local_experts": 8, "num_experts_per_tok": 2})
    made = checked(plan_without_device(mixture, card=generic_card(200 * GiB)))
    feed_forward = 32 * 3 * 4096 * 14336 * 2
    router = 32 * 8 * 4096 * 2
    assert made.bytes_of(LineKind.WEIGHTS) - dense.bytes_of(LineKind.WEIGHTS) == 7 * feed_forward + router


def test_a_fingerprint_changes_with_what_matters_and_nothing_else():
    card = generic_card(80 * GiB)
    first = plan_without_device(LLAMA_8B, card=card).fingerprint
    assert first == plan_without_device(LLAMA_8B, card=card).fingerprint
    others = [
        plan_without_device(LLAMA_8B, card=generic_card(81 * GiB)),
        plan_without_device(LLAMA_8B, card=card, dtype="float16"),
        plan_without_device(LLAMA_8B, card=card, limit_knobs=limits(max_batch_size=8)),
        plan_without_device(LLAMA_8B, card=card, knobs=knobs(kv_fraction=Fraction(9, 10))),
    ]
    assert len({first, *(made.fingerprint for made in others)}) == 5
    assert re.fullmatch(r"[0-9a-f]{64}", first)


def test_ranks_see_their_share():
    whole = checked(plan_without_device(LLAMA_8B, card=generic_card(80 * GiB)))
    half = checked(plan_without_device(LLAMA_8B, card=generic_card(80 * GiB), rank=Rank(index=1, size=2, tp=2)))
    assert half.kv.layout.slab_bytes * 2 == whole.kv.layout.slab_bytes
    libraries = half.line(LineKind.LIBRARIES)
    assert {child.name for child in libraries.children} == {"libraries", "collectives"}


def test_pipeline_stages_without_a_head_do_not_sample():
    first, last = (
        checked(plan_without_device(LLAMA_8B, card=generic_card(80 * GiB), rank=Rank(index=index, size=2, pp=2)))
        for index in (0, 1)
    )
    stages = [{child.name for child in made.line(LineKind.TRANSIENT).children} for made in (first, last)]
    assert stages == [{"prefill", "decode"}, {"prefill", "decode", "sampler"}]
    tables = [{child.name for child in made.line(LineKind.TABLES).children} for made in (first, last)]
    assert tables[1] - tables[0] == {"penalty tables"}


def tried(remedy: str, config: ModelConfig, memory: int, asked: Knobs, shape: LimitKnobs) -> MemoryPlan:
    """Do what the remedy says, from its words alone, and plan."""
    dtype, rank = None, Rank()
    if spread := re.search(r"spread it over tp (\d+)", remedy):
        rank = Rank(size=int(spread[1]), tp=int(spread[1]))
    for name, text in re.findall(r"(?:lower|raise|set) (\w+) to (\S+)", remedy):
        if name == "dtype":
            dtype = text
        elif name == "kv_dtype":
            asked = replace(asked, kv_dtype=Setting.flag(text, text, "--kv-dtype"))
        elif name == "kv_fraction":
            asked = replace(asked, kv_fraction=Setting.flag(Fraction(text), text, "--kv-fraction"))
        elif name.startswith("max_"):
            shape = replace(shape, **{name: Setting.flag(int(text), text, f"--{name}")})
        else:
            value = int(text) if name == "kv_tokens" else parse_bytes(text, knob=name, allow_zero=True)
            asked = replace(asked, **{name: Setting.flag(value, text, f"--{name}")})
    for text in re.findall(r"give it (\S+) of memory", remedy):
        memory = parse_bytes(text, knob="memory")
    if "leave total_bytes out" in remedy:
        asked = replace(asked, total_bytes=Setting())
    if "leave kv_fraction out" in remedy:
        asked = replace(asked, kv_fraction=Setting())
    for name in re.findall(r"leave (kv_bytes|kv_tokens) out", remedy):
        asked = replace(asked, **{name: Setting()})
    return plan_without_device(
        config, card=generic_card(memory), knobs=asked, limit_knobs=shape, dtype=dtype, rank=rank
    )


REFUSED = [
    (SMOLLM2, 600 * MiB, {}, {}),
    (SMOLLM2, 1600 * MiB, {}, {"max_seq_len": 8192}),
    (SMOLLM2, 1900 * MiB, {}, {"max_seq_len": 8192}),
    (SMOLLM2, 4 * GiB, {"kv_bytes": 10 * MiB}, {"max_seq_len": 2048}),
    (SMOLLM2, 4 * GiB, {"kv_tokens": 100}, {"max_seq_len": 2048}),
    (SMOLLM2, 4 * GiB, {"kv_fraction": Fraction(1, 100)}, {"max_seq_len": 2048}),
    (LLAMA_8B, 80 * GiB, {"kv_fraction": Fraction(1, 10**9)}, {}),
    (LLAMA_8B, 17 * GiB, {"kv_fraction": Fraction(1, 10**9)}, {}),
    (LLAMA_8B, 17 * GiB, {"kv_fraction": Fraction(1, 10**9), "total_bytes": 15 * GiB}, {}),
    (LLAMA_8B, 80 * GiB, {"kv_fraction": Fraction(1, 10**9), "total_bytes": 15 * GiB}, {}),
    (SMOLLM2, 4 * GiB, {"total_bytes": 400 * MiB}, {"max_seq_len": 2048}),
    (SMOLLM2, 600 * MiB, {"total_bytes": 400 * MiB}, {"max_seq_len": 2048}),
    (SMOLLM2, 4 * GiB, {"keep_free_bytes": 3 * GiB}, {"max_seq_len": 2048}),
    (LLAMA_8B, 10 * GiB, {}, {}),
    (LLAMA_8B, 17 * GiB, {}, {}),
    (LLAMA_8B, 24 * GiB, {}, {"max_seq_len": 131_072}),
    (LLAMA_8B, 24 * GiB, {}, {"max_seq_len": 2048, "max_num_tokens": 65_536}),
    (LLAMA_8B, 18 * GiB, {}, {"max_batch_size": 4096, "max_seq_len": 1024}),
]


@pytest.mark.parametrize(("config", "memory", "asked", "shape"), REFUSED)
def test_every_remedy_works_when_its_words_are_followed(config, memory, asked, shape):
    with pytest.raises(DoesNotFit) as caught:
        plan_without_device(config, card=generic_card(memory), knobs=knobs(**asked), limit_knobs=limits(**shape))
    error = caught.value
    assert error.remedies
    assert error.shortfall_bytes > 0
    assert "\n" not in str(error)
    for remedy in error.remedies:
        checked(tried(remedy, config, memory, knobs(**asked), limits(**shape)))


@pytest.mark.parametrize(
    ("memory", "asked", "shape", "first"),
    [
        (4 * GiB, {"kv_tokens": 100}, {"max_seq_len": 2048}, "lower max_seq_len to 96"),
        (4 * GiB, {"kv_bytes": 10 * MiB}, {"max_seq_len": 2048}, "lower max_seq_len to 224"),
    ],
)
def test_the_largest_length_that_fits_is_named(memory, asked, shape, first):
    with pytest.raises(DoesNotFit) as caught:
        plan_without_device(SMOLLM2, card=host_card(memory), knobs=knobs(**asked), limit_knobs=limits(**shape))
    assert caught.value.remedies[0] == first
    assert caught.value.where == "host"


def test_a_cap_below_the_weights_says_weights():
    with pytest.raises(DoesNotFit, match=r"its weights alone take 513\.13 MiB, and total_bytes allows 400 MiB"):
        plan_without_device(SMOLLM2, card=host_card(2 * GiB), knobs=knobs(total_bytes=400 * MiB))


def test_a_tiny_share_is_told_as_a_share():
    with pytest.raises(DoesNotFit) as caught:
        plan_without_device(LLAMA_8B, card=generic_card(80 * GiB), knobs=knobs(kv_fraction=Fraction(1, 10**9)))
    assert "Need: a kv_fraction of at least 0.000032: 2 MiB (2,097,152 bytes) for 1 block." in str(caught.value)
    assert "TiB" not in str(caught.value)
    assert any(remedy.startswith("raise kv_fraction to 0.0") for remedy in caught.value.remedies)


def test_a_named_card_is_not_made_larger():
    with pytest.raises(DoesNotFit, match="use a device of at least"):
        plan_without_device(LLAMA_8B, card=find_card("T4"))


@settings(max_examples=40)
@given(st.integers(1, 40 * 2**30), st.integers(1, 131_072), st.integers(1, 512))
def test_any_device_gives_a_partition_or_a_refusal(memory, length, batch):
    shape = limits(max_seq_len=length, max_batch_size=batch)
    try:
        made = plan_without_device(LLAMA_8B, card=generic_card(memory), limit_knobs=shape)
    except DoesNotFit as refusal:
        error = refusal
    else:
        checked(made)
        return
    assert error.remedies
    checked(tried(error.remedies[-1], LLAMA_8B, memory, Knobs(), shape))
