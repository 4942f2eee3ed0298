"""The catalogue of cards, and what a device name and a size together mean."""

from __future__ import annotations

import pytest
import shapes

from tonnage.errors import InvalidSetting
from tonnage.hardware import (
    CARDS,
    WITHOUT_TOTAL,
    Form,
    card_for,
    dtype_warning,
    find_card,
    generic_card,
    host_card,
    profiles_of,
    recognise,
    slice_of,
)
from tonnage.planner import find_config, plan_without_device
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


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("h100-80", "H100-80GB"), ("h100-80gb", "H100-80GB"), ("H100 PCIe", "H100-80GB"), ("a100-80", "A100-80GB"),
        ("a100-40gb", "A100-40GB"), ("h200", "H200"), ("h200-141", "H200"), ("rtx4090", "RTX 4090"), ("b200", "B200"),
        ("b300", "B300"), ("h20-96", "H20-96GB"), ("a10g", "A10"), ("A10G-24GB", "A10"), ("gb10", "GB10"),
        ("dgx spark", "GB10"), ("orin-32", "Jetson Orin 32GB"), ("gh200", "GH200-96GB"), ("mi300x", "MI300X"),
        ("a6000", "RTX A6000"), ("2080 ti 22gb", "RTX 2080 Ti 22GB"), ("v100-32", "V100-32GB"), ("l40s-48gb", "L40S"),
        ("l20", "L20"), ("a800-80gb", "A100-80GB"),
    ],
)  # fmt: skip
def test_names_that_people_write(name, canonical):
    assert find_card(name).name == canonical


def test_every_total_that_was_logged_for_a_named_card_is_in_its_range():
    """Two digits of a GiB, as engines print them; cards that no record names are left out."""
    compared = 0
    for row in shapes.starts():
        if row["gpu_mem_source"] != "logged" or "class" in row["gpu"] or "/" in row["gpu"]:
            continue
        try:
            card = find_card(row["gpu"])
        except InvalidSetting:
            assert row["gpu"] in UNLISTED
            continue
        assert card.total.low / GiB - 0.01 <= row["gpu_mem_gib"] <= card.total.high / GiB + 0.01, row["id"]
        compared += 1
    assert compared >= 25


#: Named in the records, with no row: engines of other makers, and cards on which few models fit.
UNLISTED = ("Ascend-64GB", "RTX-6GB", "RTX4060-8GB")


@pytest.mark.parametrize(
    ("name", "gib", "canonical"),
    [
        ("NVIDIA H200", 139.80, "H200"), ("NVIDIA H100 80GB HBM3", 79.19, "H100-80GB"),
        ("NVIDIA H100 PCIe", 79.10, "H100-80GB"),
        ("NVIDIA H100 NVL", 93.10, "H100-NVL"), ("NVIDIA A100-SXM4-80GB", 79.15, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", 79.25, "A100-80GB"), ("NVIDIA A100-SXM4-40GB", 39.39, "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", 39.39, "A100-40GB"), ("NVIDIA B200", 178.35, "B200"),
        ("NVIDIA B300 SXM6 AC", 267.69, "B300"),
        ("NVIDIA L20", 44.53, "L20"),
        ("NVIDIA L40S", 44.39, "L40S"), ("NVIDIA L4", 22.03, "L4"), ("NVIDIA A10G", 22.06, "A10"),
        ("NVIDIA A10", 22.06, "A10"),
        ("NVIDIA GeForce RTX 4090", 23.55, "RTX 4090"), ("NVIDIA GeForce RTX 5090", 31.37, "RTX 5090"),
        ("NVIDIA RTX A6000", 47.53, "RTX A6000"), ("NVIDIA RTX 6000 Ada Generation", 44.43, "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.97, "RTX PRO 6000"), ("Tesla T4", 14.56, "T4"),
        ("Tesla V100-SXM2-32GB", 31.73, "V100-32GB"), ("NVIDIA GeForce RTX 2080 Ti", 21.66, "RTX 2080 Ti 22GB"),
        ("NVIDIA GB10", 121.69, "GB10"), ("Orin", 29.96, "Jetson Orin 32GB"),
        ("NVIDIA GH200 480GB", 94.88, "GH200-96GB"),
        ("NVIDIA H20", 93.58, "H20-96GB"), ("NVIDIA H200 MIG 3g.71gb", 69.8, "H200 3g.71gb"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19.6, "A100-40GB 3g.20gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 9.75, "H100-80GB 1g.10gb"),
    ],
)  # fmt: skip
def test_a_device_is_recognised_by_what_its_driver_calls_it(name, gib, canonical):
    found = recognise(name, round(gib * GiB))
    assert found is not None
    assert found.name == canonical


@pytest.mark.parametrize(
    ("name", "gib"),
    [("NVIDIA GeForce RTX 2080 Ti", 10.75), ("NVIDIA Fake", 8), ("", 8), ("NVIDIA H200 MIG 5g.99gb", 99)],
)
def test_a_device_of_another_size_or_none_of_the_rows(name, gib):
    assert recognise(name, round(gib * GiB)) is None


@pytest.mark.parametrize(
    ("name", "canonical", "gib"),
    [
        ("H100-80GB 3g.40gb", "H100-80GB 3g.40gb", 39.50),
        ("h100 mig 3g.40gb", "H100-80GB 3g.40gb", 39.50),
        ("H200-1g-18gb", "H200 1g.18gb", 16.00),  # an eighth would be 17.48
        ("A100 3g.20gb", "A100-40GB 3g.20gb", 19.62),  # the profile tells the size of the card
        ("A100 MIG 3g.40gb", "A100-80GB 3g.40gb", 39.57),
        ("RTX PRO 6000 1g.24gb", "RTX PRO 6000 1g.24gb", 23.74),
    ],
)
def test_slices(name, canonical, gib):
    card = find_card(name)
    assert (card.name, card.form, card.kind) == (canonical, Form.SLICE, "cuda")
    assert card.total_bytes / GiB == pytest.approx(gib, abs=0.01)
    assert any("MIG instance" in told and "infer" in told for told in card.warnings)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_slices_are_parts_of_their_card(card):
    for profile in profiles_of(card):
        cut = slice_of(card, profile.name)
        assert cut is not None
        assert 0 < cut.total.low <= cut.total.bytes <= cut.total.high <= card.total.high
        assert cut.total.high <= int(card.total.high * profile.share)
        assert cut.num_sms <= card.num_sms
        assert (cut.part_of, cut.whole_name, card.whole_name) == (card.name, card.name, card.name)
        assert cut.total.low % MiB == cut.total.bytes % MiB == 0
        assert "MIG user guide" in cut.total.ref


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("H100 9g.99gb", "not in the catalogue"),
        ("H100 3g.41gb", r"a H100-80GB has no MIG profile 3g\.41gb.*use one of 1g\.10gb, "),
        ("RTX 4090 1g.6gb", "a RTX 4090 cannot be cut into MIG slices"),
        ("A100 3g.41gb", "several sizes"),
        ("H1000 1g.10gb", "not in the catalogue; close: H100"),
    ],
)
def test_slices_that_there_are_not(name, told):
    with pytest.raises(InvalidSetting, match=told):
        find_card(name)


@pytest.mark.parametrize("name", ["RTX 4090 WSL", "rtx4090-wsl2", "RTX 4090 (WSL)", "RTX 4090 under WSL"])
def test_under_wsl(name):
    card, bare = find_card(name), find_card("RTX 4090")
    assert (card.name, card.form, card.whole_name) == ("RTX 4090 under WSL", Form.WSL, "RTX 4090")
    assert bare.total_bytes - card.total_bytes == 770_000_000
    assert card.total.low < bare.total.low - 2 * 10**9
    assert any("Windows desktop" in told for told in card.warnings)


SMOLLM2 = find_config("smollm2")


def test_a_unified_machine_leaves_its_system_what_it_holds():
    card = find_card("GB10")
    assert (card.kind, card.form) == ("cuda", Form.UNIFIED)
    made = plan_without_device(SMOLLM2, card=card)
    (foreign,) = (line for line in made.lines if line.name == "foreign")
    assert card.system is not None
    assert (foreign.bytes, foreign.low, foreign.high) == (card.system.bytes, card.system.low, card.system.high)
    told = " ".join(made.warnings)
    assert "GB10 reports between 119.67 GiB and 121.70 GiB" in told
    assert "shared with everything that runs there; page cache counts as used" in told
    assert "are left to the operating system and its programs" in told
    assert "MemAvailable" in told
    # The pool's bar holds the system at its least and at its most.
    pool = next(line for line in made.lines if line.name == "kv")
    assert pool.bytes - pool.low >= card.system.high - card.system.bytes
    assert pool.high - pool.bytes >= card.system.bytes - card.system.low


@pytest.mark.parametrize("name", ["GH200", "H200 3g.71gb", "RTX 4090 WSL"])
def test_what_is_odd_about_a_device_is_told_in_its_plan(name):
    card = find_card(name)
    assert set(card.warnings) <= set(plan_without_device(SMOLLM2, card=card).warnings)
    assert card.warnings


def test_a_card_of_its_own_has_nothing_to_tell():
    assert find_card("H100").warnings == generic_card(GiB).warnings == host_card(GiB).warnings == ()


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
    # ECC can be switched on workstation cards, which takes a fifteenth.
    assert card.total.high - card.total.low < card.total_bytes // (14 if "ECC" in card.note else 20)
    assert card.total.ref
    assert card.form in (Form.DISCRETE, Form.COHERENT, Form.UNIFIED)
    assert (card.system is not None) == (card.form is Form.UNIFIED)
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


@pytest.mark.parametrize("name", ["Gaudi3", "Ascend 910B", "M4 Max", "TPU v5"])
def test_a_card_of_another_maker_has_nothing_close(name):
    with pytest.raises(InvalidSetting, match="not in the catalogue") as caught:
        find_card(name)
    assert "close" not in str(caught.value)


@pytest.mark.parametrize("name", ["A100", "NVIDIA A100", "a-100"])
def test_a_name_of_two_sizes_is_not_guessed(name):
    with pytest.raises(InvalidSetting, match=r"several sizes.*A100-40GB or A100-80GB"):
        find_card(name)


@pytest.mark.parametrize("name", ["GB200", "A40", "RTX A5000", "4080", "RTX 5080", "Jetson Thor"])
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


@pytest.mark.parametrize("name", ["a" + " " * 300_000 + "b", "a" + "-" * 300_000 + "b", "wsl" * 100_000])
def test_a_name_without_end_is_no_card(name):
    """A manifest may write one: it is refused at once, whatever a pattern would make of it."""
    with pytest.raises(InvalidSetting, match="no card has so long a name") as caught:
        find_card(name)
    assert len(str(caught.value)) < 300
    assert recognise(name, GiB) is None


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        *((name, "write --device H100 --tp 8") for name in ("8xH100", "8 x H100", "H100:8", "H100x8", "8*H100")),
        ("2xRTX 4090", "write --device 'RTX 4090' --tp 2"),
        ("4xA100", "write --device A100 --tp 4"),
    ],
)
def test_several_cards_are_ranks(name: str, remedy: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        find_card(name)
    assert caught.value.remedy == remedy


@pytest.mark.parametrize("name", ["cuda:0", "8xH900", "x8", "8x"])
def test_what_is_no_number_of_cards_is_not_read_as_one(name: str) -> None:
    with pytest.raises(InvalidSetting, match="not in the catalogue"):
        find_card(name)
