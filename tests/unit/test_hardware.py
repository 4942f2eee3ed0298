"""The catalogue of cards, and what a device name and a size together mean."""

from __future__ import annotations

import pytest

from tonnage.errors import InvalidSetting
from tonnage.hardware import CARDS, card_for, find_card, generic_card, host_card
from tonnage.terms import Source
from tonnage.units import GiB, MiB


@pytest.mark.parametrize("name", ["H200", "h200", "NVIDIA H200", "nvidia-h200", "H200 SXM"])
def test_spelling_does_not_matter(name):
    card = find_card(name)
    assert card.total_bytes == 150_109_880_320  # read on the card: 64 KiB below 143,156 MiB
    assert (card.sm, card.num_sms, card.page_bytes) == (90, 132, 2 * MiB)
    assert card.context is not None
    assert card.context.bytes == 524 * MiB


@pytest.mark.parametrize(
    ("name", "canonical"),
    [("4090", "RTX 4090"), ("GeForce RTX 4090", "RTX 4090"), ("NVIDIA A100 80GB PCIe", "A100-80GB"), ("t4", "T4")],
)
def test_aliases(name, canonical):
    assert find_card(name).name == canonical


def test_an_unknown_card_names_close_ones_and_all():
    with pytest.raises(InvalidSetting) as caught:
        find_card("H10")
    text = str(caught.value)
    assert "close: H100-80GB" in text
    assert all(card.name in text for card in CARDS)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_rows_are_consistent(card):
    assert card.total.low <= card.total.bytes <= card.total.high
    assert card.total.source == Source.CATALOGUE
    assert card.total.high - card.total.low < card.total_bytes // 20
    assert find_card(card.name) is card
    assert all(find_card(alias) is card for alias in card.aliases)
    assert card.chip.total_bytes == card.total_bytes


def test_totals_agree_with_logged_starts():
    logged = {"H100-80GB": 79.19, "A100-80GB": 79.15, "A100-40GB": 39.39, "RTX 4090": 23.55, "L40S": 44.39, "T4": 14.56}
    for name, gib in logged.items():
        assert find_card(name).total_bytes / GiB == pytest.approx(gib, abs=0.01)


def test_a_size_alone_is_a_generic_device_of_exactly_that_size():
    card = card_for(None, 80 * GiB)
    assert (card.kind, card.total_bytes, card.total.source) == ("cuda", 85_899_345_920, Source.ASKED)


def test_a_card_of_which_a_part_is_used():
    card = card_for("H200", 40 * GiB)
    assert (card.name, card.total_bytes, card.num_sms) == ("H200", 40 * GiB, 132)


@pytest.mark.parametrize("name", ["host", "CPU"])
def test_host_memory_needs_its_size(name):
    assert card_for(name, 2 * GiB) == host_card(2 * GiB)
    with pytest.raises(InvalidSetting, match="--memory"):
        card_for(name, None)


@pytest.mark.parametrize("make", [generic_card, host_card])
@pytest.mark.parametrize("size", [0, -1])
def test_a_device_has_a_size(make, size):
    with pytest.raises(InvalidSetting):
        make(size)


def test_neither_name_nor_size():
    with pytest.raises(InvalidSetting, match="--device NAME or --memory"):
        card_for(None, None)
