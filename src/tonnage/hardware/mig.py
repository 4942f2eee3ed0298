"""MIG instances: which slices a card can be cut into, and what memory each has.

Names, shares of memory and of multiprocessors are those of NVIDIA's MIG user guide ("Supported MIG profiles"). A share
is in eighths of the memory; what an instance gets is a little less, and ``nvidia-smi mig -lgip`` lists it in GiB on
the card. Where such a list was found in public the figure is here; elsewhere the share is taken, with a wide bar.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from tonnage.hardware.card import Card, Form, from_catalogue, gib
from tonnage.hardware.catalogue import CARDS
from tonnage.units import MiB, round_down

_GUIDE = "MIG user guide, supported profiles"
#: The least that a slice was seen to get of its share: 16.00 GiB listed for an eighth of an H200's 139.8.
_LEAST_SHARE = Fraction(9, 10)
_NAME = re.compile(r"^(?P<card>.+?)(?:[\s_/-]+mig)?[\s_/-]+(?P<profile>[1-8]g[\s._-]*\d+gb)(?:\+[a-z.]+|-me)?$")


#: Characters of a name that may hold a profile.
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of slice. ``listed`` is what ``nvidia-smi mig -lgip`` shows, in GiB, "" where no list was found;
    ``num_sms`` is 0 where none told."""

    name: str
    share: Fraction
    num_sms: int = 0
    listed: str = ""
    ref: str = _GUIDE


def _eighths(rows: Sequence[tuple[str, int, int, str]], ref: str) -> tuple[Profile, ...]:
    listed = f"{_GUIDE}; memory: {ref}"
    return tuple(
        Profile(name=name, share=Fraction(part, 8), num_sms=sms, listed=gibs, ref=listed if gibs else _GUIDE)
        for name, part, sms, gibs in rows
    )


_A100_40 = _eighths(
    (("1g.5gb", 1, 14, "4.75"), ("1g.10gb", 2, 14, "9.75"), ("2g.10gb", 2, 28, "9.75"), ("3g.20gb", 4, 42, "19.62"),
     ("4g.20gb", 4, 56, "19.62"), ("7g.40gb", 8, 98, "39.38")), "nvidia-smi mig -lgip of an A100-40GB",
)  # fmt: skip
_A100_80 = _eighths(
    (("1g.10gb", 1, 14, ""), ("1g.20gb", 2, 14, ""), ("2g.20gb", 2, 28, ""), ("3g.40gb", 4, 42, ""),
     ("4g.40gb", 4, 56, ""), ("7g.80gb", 8, 98, "")), "",
)  # fmt: skip
_H100_80 = _eighths(
    (("1g.10gb", 1, 16, "9.75"), ("1g.20gb", 2, 26, "19.62"), ("2g.20gb", 2, 32, "19.62"), ("3g.40gb", 4, 60, "39.50"),
     ("4g.40gb", 4, 64, "39.50"), ("7g.80gb", 8, 132, "")), "nvidia-smi mig -lgip of an H100 (jbarrow.ai/field_notes)",
)  # fmt: skip
_H100_94 = _eighths(
    (("1g.12gb", 1, 16, "10.75"), ("1g.24gb", 2, 26, "21.62"), ("2g.24gb", 2, 32, "21.62"),
     ("3g.47gb", 4, 60, "46.38"), ("4g.47gb", 4, 64, "46.38"), ("7g.94gb", 8, 132, "")), "NVIDIA/mig-parted#101",
)  # fmt: skip
_H100_96 = _eighths(
    (("1g.12gb", 1, 16, ""), ("1g.24gb", 2, 26, "23.00"), ("2g.24gb", 2, 32, "23.00"), ("3g.48gb", 4, 60, "46.50"),
     ("4g.48gb", 4, 64, "46.50"), ("7g.96gb", 8, 132, "")), "nvidia-smi mig -lgip of a GH200",
)  # fmt: skip
_H20_96 = tuple(replace(profile, num_sms=0) for profile in _H100_96)
_H200 = _eighths(
    (("1g.18gb", 1, 16, "16.00"), ("1g.35gb", 2, 26, "32.50"), ("2g.35gb", 2, 32, "32.50"), ("3g.71gb", 4, 60, "69.80"),
     ("4g.71gb", 4, 64, "69.80"), ("7g.141gb", 8, 132, "")), "nvidia-smi mig -lgip, and torch in a 3g.71gb of an H200",
)  # fmt: skip
_H20_141 = tuple(replace(profile, num_sms=0) for profile in _H200)
_B200 = _eighths(
    (("1g.23gb", 1, 18, "20.50"), ("1g.45gb", 2, 30, "44.25"), ("2g.45gb", 2, 36, "44.25"), ("3g.90gb", 4, 0, "89.00"),
     ("4g.90gb", 4, 0, "89.00"), ("7g.180gb", 8, 148, "")), "NVIDIA/mig-parted#187, and torch in a 3g.90gb of a B200",
)  # fmt: skip
_A30 = (
    Profile(name="1g.6gb", share=Fraction(1, 4), num_sms=14),
    Profile(name="2g.12gb", share=Fraction(2, 4), num_sms=28),
    Profile(name="4g.24gb", share=Fraction(1), num_sms=56),
)
_PRO_6000 = (
    Profile(name="1g.24gb", share=Fraction(1, 4)),
    Profile(name="2g.48gb", share=Fraction(2, 4)),
    Profile(name="4g.96gb", share=Fraction(1)),
)

#: By name in the catalogue.
PROFILES: dict[str, tuple[Profile, ...]] = {
    "A100-40GB": _A100_40, "A100-80GB": _A100_80, "H100-80GB": _H100_80, "H100-NVL": _H100_94, "H200": _H200,
    "GH200-96GB": _H100_96, "H20-96GB": _H20_96, "H20-141GB": _H20_141, "B200": _B200, "A30": _A30,
    "RTX PRO 6000": _PRO_6000,
}  # fmt: skip


def profiles_of(card: Card) -> tuple[Profile, ...]:
    """The slices that a card can be cut into; none for a card that cannot."""
    return PROFILES.get(card.name, ())


def split_name(text: str) -> tuple[str, str] | None:
    """(card, profile) of "H100-80GB 3g.40gb" or "NVIDIA H200 MIG 3g.71gb"; None for a name without a profile. What
    stands behind a profile (+me) changes nothing about its memory."""
    found = _NAME.match(text.strip().lower()) if len(text) <= _LONGEST_NAME else None
    if found is None:
        return None
    profile = re.sub(r"[\s_-]", ".", found["profile"])
    return found["card"], profile if "." in profile else profile.replace("g", "g.", 1)


def with_profile(profile: str) -> list[Card]:
    """Every card that can be cut so."""
    return [card for card in CARDS if any(known.name == profile for known in profiles_of(card))]


def slice_of(card: Card, profile: str) -> Card | None:
    """That slice of the card as a card of its own; None where it cannot be cut so. Its bandwidth is its share."""
    known = next((each for each in profiles_of(card) if each.name == profile), None)
    if known is None:
        return None
    share = int(card.total_bytes * known.share)
    most = min(int(card.total.high * known.share), card.total.high)
    best = round_down(min(gib(known.listed) if known.listed else share, most), MiB)
    low = best if known.listed else round_down(int(share * _LEAST_SHARE), MiB)
    total = from_catalogue(best, low, most, ref=known.ref)
    return replace(
        card,
        name=f"{card.name} {known.name}",
        form=Form.SLICE,
        total=total,
        num_sms=known.num_sms,
        bandwidth=None if card.bandwidth is None else int(card.bandwidth * known.share),
        part_of=card.name,
        aliases=(),
    )
