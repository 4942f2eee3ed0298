"""The host tier: rates of links, bytes of sequences, what a swap costs, and where it is offered."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.budget.reference.knobs import ReferenceKnobs
from tonnage.config import Knobs, LimitKnobs, Setting
from tonnage.costs.config import ModelConfig
from tonnage.errors import DoesNotFit
from tonnage.hardware import CARDS, Form, find_card, generic_card, host_card
from tonnage.planner import find_config, plan_ranks, plan_without_device
from tonnage.planner.fit import fit
from tonnage.planner.host_tier import (
    GEN3,
    GEN4,
    GEN5,
    LINKS,
    WHAT_FOR,
    HostTier,
    held_text,
    host_tier,
    link_of,
    milliseconds,
)
from tonnage.planner.workload import Goal
from tonnage.terms import IDLE_TIER, HostPlan, MemoryPlan, Rank, Source
from tonnage.units import GiB, MiB, parse_bytes

LLAMA_8B = ModelConfig.read(Path(__file__).parents[2] / "examples/configs/llama-3.1-8b")
PLAN = plan_without_device(LLAMA_8B, card=find_card("H100"))


@pytest.mark.parametrize(("link", "least", "most"), [(GEN3, 13, 16), (GEN4, 26, 32), (GEN5, 52, 64)])
def test_rates_are_below_the_wire_and_above_what_is_commonly_seen(link, least, most):
    assert least * 10**9 < link.bytes_per_second < most * 10**9
    assert (link.source, "base specification" in link.ref) == (Source.ASSUMED, True)


def test_every_card_of_the_catalogue_has_a_link():
    assert set(LINKS) == {card.name for card in CARDS if card.form is not Form.UNIFIED}
    assert {link_of(card) for card in CARDS if card.form is Form.UNIFIED} == {None}
    assert link_of(find_card("H100 3g.40gb")) == link_of(find_card("H100")) == GEN5
    assert link_of(generic_card(8 * GiB)) == GEN4
    assert link_of(host_card(8 * GiB)) is None


def tier_of(num_sequences=10, num_resident=4, seq_tokens=5000, plans=(PLAN,)) -> HostTier | None:
    return host_tier(
        plans, find_card("H100"), num_sequences=num_sequences, num_resident=num_resident, seq_tokens=seq_tokens
    )


def test_worked_figures():
    """5,000 tokens are 313 blocks of 2 MiB; six sequences of that wait."""
    tier = tier_of()
    assert (tier.num_resident, tier.num_waiting) == (4, 6)
    assert tier.sequence_bytes == tier.rank_bytes == 313 * 2 * MiB
    assert tier.kv_bytes == 6 * 313 * 2 * MiB
    assert tier.copy_seconds == Fraction(313 * 2 * MiB, GEN5.bytes_per_second)
    assert tier.swap_seconds == 2 * tier.copy_seconds
    assert "4 of 10 sequences of 5,000 tokens resident, the KV of 6 more (3.67 GiB) in host memory" in tier.told()
    assert "a swap moves 626 MiB out and as much in, 23 ms at the rate of PCIe gen5 x16 (57.6 GB/s" in tier.told()


@pytest.mark.parametrize(("resident", "total"), [(0, 5), (5, 5), (6, 5)])
def test_nothing_to_swap_with_is_no_tier(resident, total):
    assert tier_of(num_sequences=total, num_resident=resident) is None


def test_a_host_has_no_other_side():
    made = plan_without_device(LLAMA_8B, card=host_card(40 * GiB), limit_knobs=LimitKnobs(max_seq_len=Setting(4096)))
    assert host_tier([made], host_card(40 * GiB), num_sequences=9, num_resident=1, seq_tokens=100) is None


def test_ranks_swap_their_shares_side_by_side():
    rank = Rank(size=4, tp=4)
    share = plan_without_device(LLAMA_8B, card=find_card("H100"), rank=rank)
    alone, split = tier_of(), tier_of(plans=(share,))
    assert (split.sequence_bytes, split.rank_bytes) == (alone.sequence_bytes, alone.rank_bytes // 4)
    assert split.swap_seconds == alone.swap_seconds / 4


@given(st.integers(2, 500), st.data())
def test_more_resident_never_needs_more_host_memory(total, data):
    few = data.draw(st.integers(1, total - 1))
    more = data.draw(st.integers(few, total - 1))
    assert tier_of(total, more).kv_bytes <= tier_of(total, few).kv_bytes


@pytest.mark.parametrize(
    ("seconds", "told"), [("1/100000", "0.0 ms"), ("1/2500", "0.4 ms"), ("12/1000", "12 ms"), ("1204/1000", "1,204 ms")]
)
def test_milliseconds(seconds, told):
    assert milliseconds(Fraction(seconds)) == told


REFUSED = LimitKnobs(
    max_batch_size=Setting.flag(4096, "4096", "--max-batch-size"),
    max_seq_len=Setting.flag(1024, "1024", "--max-seq-len"),
)


def offers(**knobs: Setting[int]) -> list[str]:
    with pytest.raises(DoesNotFit) as caught:
        plan_without_device(LLAMA_8B, card=generic_card(18 * GiB), knobs=Knobs(**knobs), limit_knobs=REFUSED)
    return [remedy for remedy in caught.value.remedies if "host_kv_bytes" in remedy]


def test_a_refused_plan_offers_it_and_says_what_it_does():
    (offer,) = offers()
    assert WHAT_FOR in offer
    rows, size = re.search(r"lower max_batch_size to (\d+) and set host_kv_bytes to (\S+) \(", offer).groups()
    resident, waiting = re.search(r"(\d+) of 4,096 sequences.*KV of ([\d,]+) more", offer).groups()
    assert int(resident) + int(waiting.replace(",", "")) == 4096
    made = plan_without_device(
        LLAMA_8B,
        card=generic_card(18 * GiB),
        knobs=Knobs(host_kv_bytes=Setting.flag(parse_bytes(size, knob="host"), size, "--host-kv-bytes")),
        limit_knobs=LimitKnobs(max_batch_size=Setting(int(rows)), max_seq_len=REFUSED.max_seq_len),
    )
    assert made.max_concurrency == int(resident)
    block_bytes = made.kv.layout.slab_bytes
    assert parse_bytes(size, knob="host") >= int(waiting.replace(",", "")) * 64 * block_bytes


def test_host_memory_that_is_too_small_is_not_offered():
    assert offers(host_kv_bytes=Setting(GiB)) == []
    assert len(offers(host_kv_bytes=Setting(10_000 * GiB))) == 1


def test_what_is_taken_is_whole_blocks_and_what_one_sequence_needs_stays():
    """F096, F097 and F123 of the field cases: asked = used but for a block, and a tier does not make a start fit."""
    shape = LimitKnobs(max_seq_len=Setting(8192), max_batch_size=Setting(4))

    def planned(**knobs: Setting[int]) -> MemoryPlan:
        return plan_without_device(LLAMA_8B, card=generic_card(24 * GiB), knobs=Knobs(**knobs), limit_knobs=shape)

    plain, tiered = planned(), planned(host_kv_bytes=Setting(5 * GiB + 100))
    assert (tiered.kv, tiered.lines, tiered.max_concurrency) == (plain.kv, plain.lines, plain.max_concurrency)
    blocks = 5 * GiB // plain.kv.layout.slab_bytes
    told = held_text([tiered])
    assert f"in {blocks:,} whole blocks of 2 MiB, 100 bytes of what was asked are none and are not taken" in told
    assert "not taken" not in held_text([planned(host_kv_bytes=Setting(5 * GiB))])

    needs = []
    for knobs in (Knobs(), Knobs(host_kv_bytes=Setting(500 * GiB))):
        with pytest.raises(DoesNotFit) as caught:
            plan_without_device(LLAMA_8B, card=generic_card(16 * GiB), knobs=knobs, limit_knobs=shape)
        needs.append((caught.value.need_bytes, caught.value.have_bytes))
    assert needs[0] == needs[1]


@pytest.mark.parametrize("card", [generic_card(24 * GiB), host_card(24 * GiB)], ids=["card", "host"])
@pytest.mark.parametrize("seq_len", [None, 4096])
def test_a_tier_of_less_than_a_slab_is_refused_as_an_engine_refuses_it(card, seq_len):
    def planned(host_kv_bytes: int, **limits: Setting[bool]) -> MemoryPlan:
        return plan_without_device(
            LLAMA_8B,
            card=card,
            knobs=Knobs(host_kv_bytes=Setting(host_kv_bytes)),
            limit_knobs=LimitKnobs(max_seq_len=Setting(seq_len), max_batch_size=Setting(4), **limits),
        )

    slab_bytes = planned(GiB).kv.layout.slab_bytes
    with pytest.raises(DoesNotFit, match="holds not one block of the KV cache") as caught:
        planned(slab_bytes - 1)
    assert (caught.value.where, caught.value.need_bytes, caught.value.have_bytes) == (
        "host", slab_bytes, slab_bytes - 1,
    )  # fmt: skip
    assert caught.value.remedies == (f"set host_kv_bytes to at least {slab_bytes} bytes", "leave host_kv_bytes out")
    assert planned(slab_bytes).host == HostPlan(kv_bytes=slab_bytes, taken_bytes=slab_bytes)
    assert planned(slab_bytes - 1, prefix_caching=Setting(False)).host.taken_bytes == 0
    assert planned(0).host == HostPlan()


def test_every_rank_needs_a_slab_of_the_tier():
    asked = {"card": find_card("H100"), "rank": Rank(size=4, tp=2, pp=2)}
    made = plan_ranks(LLAMA_8B, **asked)
    least = 4 * max(stage.kv.layout.slab_bytes for stage in made)
    with pytest.raises(DoesNotFit, match=f"on each of 4 ranks.*set host_kv_bytes to at least {least} bytes"):
        plan_ranks(LLAMA_8B, knobs=Knobs(host_kv_bytes=Setting(least - 1)), **asked)
    for stage in plan_ranks(LLAMA_8B, knobs=Knobs(host_kv_bytes=Setting(least)), **asked):
        assert stage.host == HostPlan(kv_bytes=least, taken_bytes=stage.kv.layout.slab_bytes)
    with pytest.raises(DoesNotFit, match="holds not one block"):
        fit(LLAMA_8B, goal=Goal.LONGEST_CONTEXT, knobs=Knobs(host_kv_bytes=Setting(1)), **asked)


def test_the_plan_says_what_is_taken_and_what_was_asked():
    made = plan_without_device(LLAMA_8B, card=find_card("H100"), knobs=Knobs(host_kv_bytes=Setting(5 * GiB + 100)))
    assert (made.host.kv_bytes, made.host.taken_bytes) == (5 * GiB + 100, 5 * GiB)


def test_without_a_prefix_cache_nothing_is_taken_and_that_is_told_once():
    off = LimitKnobs(prefix_caching=Setting(False), max_seq_len=Setting(4096), max_batch_size=Setting(4))
    for card in (host_card(24 * GiB), find_card("H100")):
        made = plan_without_device(LLAMA_8B, card=card, knobs=Knobs(host_kv_bytes=Setting(GiB)), limit_knobs=off)
        bare = plan_without_device(LLAMA_8B, card=card, limit_knobs=off)
        assert made.host == HostPlan(kv_bytes=GiB, taken_bytes=0)
        assert made.lines == bare.lines
        assert [told for told in made.warnings if told.startswith("host_kv_bytes has no effect here")] == [
            f"host_kv_bytes has no effect here: {IDLE_TIER}"
        ]


SMOLLM2 = find_config("smollm2")


def refused_for_books(seq_len: int | None = 512, **knobs: Setting[int]) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as caught:
        plan_without_device(
            SMOLLM2,
            card=host_card(GiB),
            knobs=Knobs(**knobs),
            limit_knobs=LimitKnobs(max_seq_len=Setting(seq_len)),
        )
    return caught.value


def test_the_books_of_a_huge_tier_are_named_and_the_largest_that_fits_is_offered():
    error = refused_for_books(host_kv_bytes=Setting(2**40))
    assert re.search(
        r"of its tables of 1.04 GiB, 1.04 GiB are host block metadata, .* host_kv_bytes = 1 TiB", error.what
    )
    (offer,) = [each for each in error.remedies if "host_kv_bytes" in each]
    size = parse_bytes(offer.removeprefix("lower host_kv_bytes to "), knob="offer")
    asked = {"card": host_card(GiB), "limit_knobs": LimitKnobs(max_seq_len=Setting(512))}
    assert plan_without_device(SMOLLM2, knobs=Knobs(host_kv_bytes=Setting(size)), **asked).host.taken_bytes > 0
    with pytest.raises(DoesNotFit):
        plan_without_device(SMOLLM2, knobs=Knobs(host_kv_bytes=Setting(size + MiB)), **asked)


def test_where_max_seq_len_is_open_it_is_told_what_there_would_be_without_the_tier():
    error = refused_for_books(None, host_kv_bytes=Setting(2**40))
    assert "host block metadata" in error.what
    tokens = plan_without_device(SMOLLM2, card=host_card(GiB)).limits.max_seq_len
    assert error.remedies[0] == f"leave host_kv_bytes out (room for sequences of {tokens:,} tokens)"


def test_books_that_are_in_nobodys_way_are_not_named():
    error = refused_for_books(kv_tokens=Setting(16), host_kv_bytes=Setting(4 * MiB))
    assert "host" not in error.what
    assert not any("host_kv_bytes" in each for each in error.remedies)


def test_the_reference_knows_no_such_tier():
    with pytest.raises(DoesNotFit) as caught:
        plan_without_device(LLAMA_8B, card=generic_card(18 * GiB), limit_knobs=REFUSED, reference=ReferenceKnobs())
    assert "host_kv_bytes" not in str(caught.value)


def test_a_number_of_sequences_that_nobody_asked_for_is_not_served_from_the_host():
    with pytest.raises(DoesNotFit) as caught:
        plan_without_device(LLAMA_8B, card=generic_card(16 * GiB))
    assert "host_kv_bytes" not in str(caught.value)
