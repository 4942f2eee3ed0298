"""The catalogue of cards, and what a device name and a size together mean."""

from __future__ import annotations

import pytest

from tonnage.errors import InvalidSetting
from tonnage.hardware import CARDS, WITHOUT_TOTAL, card_for, dtype_warning, find_card, generic_card, host_card
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


@pytest.mark.parametrize("name", ["MI300X", "MI355X", "Gaudi3", "M4 Max", "TPU v5"])
def test_a_card_of_another_maker_has_nothing_close(name):
    with pytest.raises(InvalidSetting, match="not in the catalogue") as caught:
        find_card(name)
    assert "close" not in str(caught.value)


@pytest.mark.parametrize("name", ["A100", "NVIDIA A100", "a-100"])
def test_a_name_of_two_sizes_is_not_guessed(name):
    with pytest.raises(InvalidSetting, match=r"several sizes.*A100-40GB or A100-80GB"):
        find_card(name)


@pytest.mark.parametrize("name", ["B200", "GH200", "A6000", "RTX A6000", "RTX 6000 Ada", "L40", "NVIDIA A30"])
def test_cards_without_a_sourced_total_say_what_to_do(name):
    with pytest.raises(InvalidSetting, match=r"no log at hand says.*--memory") as caught:
        find_card(name)
    assert "close" not in str(caught.value)
    known = {spelling for card in CARDS for spelling in (card.name, *card.aliases)}
    assert not known & set(WITHOUT_TOTAL.values())


@pytest.mark.parametrize(
    ("name", "dtype", "warned"),
    [
        ("V100", "bfloat16", True), ("T4", "bfloat16", True), ("V100", "float16", False),
        ("A100-40GB", "bfloat16", False), ("RTX 5090", "bfloat16", False),
    ],
)  # fmt: skip
def test_cards_that_have_no_bfloat16(name, dtype, warned):
    assert bool(dtype_warning(find_card(name), dtype)) == warned
    assert not dtype_warning(generic_card(GiB), dtype)
